/* What adapters.c is told: the factors of adapters, and which rows of a step have which.

   Legend: T rows of the step, N those with an adapter, I inputs, R ranks, O outputs. */

#ifndef RYZANSTEIN_ADAPTERS_H
#define RYZANSTEIN_ADAPTERS_H

#include "lanes.h"

/* An adapter's part of one weight on this rank. Without A it adapts other weights. */
typedef struct {
    const char *a_IR, *b_RO; /* in float16 if `half` */
    const float *bias_O;     /* or NULL */
    i64 R, stride;           /* of rows of b, in numbers */
    float scale;             /* of x A; a power of two */
    int32_t half;
} Factors;

/* Outputs of a weight, from `from` on, that are columns of the result from `to` on. */
typedef struct {
    i64 weight, from, count, to;
} Piece;

/* Rows index[begin] to index[end - 1] have the adapter of a slot. */
typedef struct {
    i64 slot, begin, end;
} Segment;

/* The results of one product: of some weights, whose outputs are its columns in pieces. */
typedef struct {
    const Factors *const *slots; /* of each slot those of all weights */
    const Piece *pieces;
    i64 weights, num_pieces, low_stride; /* low_stride: the most ranks of any slot */
} Site;

typedef struct {
    const float *x_TI;
    const i64 *rows_T; /* which rows of x the rows of the result are made of; NULL: the same */
    const i64 *ids_T;  /* or NULL: A's row `id - first_id` is what x A would be; to ids of other ranks nothing is added */
    float *out_TO;
    const Site *site;
    const Segment *segments;
    const i64 *index_N;
    float *low_NR; /* room for two chains of x A of each weight */
    i64 x_stride, out_stride, I, N, num_segments, first_id, num_ids;
} Adapted;

/* out += x A B, of each row with the factors of its adapter. Called by every thread of a team; all of it is there when it returns. */
void adapters_team(const Adapted *p);

#endif
