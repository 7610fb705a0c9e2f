/* A program of a rank's layers: what each computes, in which buffers, with which weights.

   Python builds it once and runs it for each step (functions/steps/program.py has the same structs). A buffer is an array of
   `most_rows` rows in one arena; it is named by its offset in floats.

   Legend: T tokens, R rows that are wanted, or rotated numbers of a head, I inputs, O outputs, H heads, K key-value heads,
   D head dimension, C columns of a slot. */

#ifndef RYZANSTEIN_STEP_H
#define RYZANSTEIN_STEP_H

#include "adapters.h"
#include "attention_team.h"
#include "meeting.h"

/* What an op computes. `in`, `out` and `residual` are buffers; -1: none. HEAD is a PRODUCT of the rows that are wanted; its result
   has one row for each of these. ADAPT adds to a product's result what adapters add: `weight` is the Site (adapters.h). ADAPT_EMBED and ADAPT_HEAD do so for EMBED
   and HEAD. */
enum { PRODUCT, STORE, ATTEND, ADD, ACTIVATE, REDUCE, EMBED, ANGLES, HEAD, GREATEST, ADAPT, ADAPT_EMBED, ADAPT_HEAD };

typedef struct {
    int32_t op, layer, place, unused; /* layer and place: what the board shows (meeting.h) */
    i64 in, out, residual;            /* PRODUCT, ADD: out += residual, in the end */
    int32_t kind, type;               /* PRODUCT: of the weight (team.h) and of its blocks */
    int32_t activation, gated;        /* PRODUCT, ACTIVATE: -1, or out = activation(in), of the first half times the second if `gated` */
    const char *weight;
    const float *scale, *bias;
    i64 I, O, stride, block;          /* stride: of rows of `out`; GREATEST: of `in` */
    i64 first;                        /* EMBED: the id of the first of the weight's O rows */
    const float *norm;                /* of rows of I numbers, before anything else; or NULL. ANGLES: frequencies, R */
    float eps, offset, factor;        /* of norms; out *= factor before the residual is added. ANGLES: times factor */
    int32_t group, rotary;            /* STORE, ATTEND, ANGLES: of the step; rotary -1: none */
    i64 H, K, D, C;                   /* STORE: H query heads and K key heads are rotated, C columns after the queries are stored */
    const float *query_norm, *key_norm; /* STORE: of each head; or NULL */
    float clip, cap;                  /* STORE: numbers are at most so large; 0: any. ATTEND: see Attention */
    int32_t clips_last, half;         /* STORE: after the norms; slots hold float16 */
    char *pages, *cold;
    const float *sinks;
} Op;

typedef struct {
    float *cos_TR, *sin_TR;           /* ANGLES writes them */
    i64 R;
    int32_t interleaved, unused;
} StepAngles;

/* What all layers of a group read in a step. */
typedef struct {
    const i64 *slots_T;
    Attention asked; /* but for queries, pages, cold blocks, sinks, scale and cap, which each layer has of its own */
} StepGroup;

typedef struct {
    const Op *ops;
    i64 num_ops, num_groups, threads;
    float *arena;
    char *memory;                     /* for rows of each thread, quantized rows of all, and attention */
    i64 memory_bytes, needed_bytes;   /* needed: what the last step would have had to have */
    i64 most_inputs, most_row_bytes;  /* of products: inputs, and bytes of a quantized row */
    float smallest, unused;           /* scale of a quantized row */
    Meeting *meeting;                 /* of the ranks; NULL: there is one */
    i64 reached;                      /* the op at which the last run ended too soon */
} Program;

typedef struct {
    i64 T, R;                         /* tokens; rows that are wanted, at most T */
    const i64 *ids_T, *positions_T, *last_R;
    const StepGroup *groups;
    const StepAngles *rotaries;
    float *best_R;                    /* GREATEST: the greatest logit of each row, and its place among the op's O */
    i64 *token_R;
    const Segment *segments, *last_segments; /* ADAPT: which rows, or which wanted ones, have which adapters */
    const i64 *index_N, *last_index_N;
    i64 num_segments, N, last_num_segments, last_N;
    i64 low_floats;                          /* of which there is room for each row with an adapter */
} Step;

enum { STEP_SHORT = -1 };

/* Runs ops `first` to `last` - 1. Returns 0; STEP_SHORT before anything is computed, because more memory is needed; or the status of
   a meeting, in which the step ended at op `reached`. After MEETING_AGAIN the ops from there on are to be run, with `again`. */
int run_step(Program *program, const Step *step, i64 first, i64 last, int again);

#endif
