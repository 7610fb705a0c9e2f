/* The working memory of a block of rows, and the sums of rows over the keys of a chunk.

   Strides and widths are in floats. The legend is that of attention.c. */

#ifndef RYZANSTEIN_ATTENTION_ROWS_H
#define RYZANSTEIN_ATTENTION_ROWS_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention_pages.h"
#include "attention_team.h"

enum { CHUNK = 64 };              /* keys: whole vectors and whole pages of them */
enum { PAGES = CHUNK / PAGE };    /* cold pages of a chunk */

/* New tokens `token` to `token` + count - 1 of a sequence, whose keys are divided into parts (attention_parts.h). */
typedef struct {
    i64 sequence, token, count, parts;
} Task;

/* The sums of rows over some of their keys: weighted values, the greatest score, the weights relative to it. */
typedef struct {
    float *out_RW, *greatest_R, *total_R;
} Sums;

/* The working memory of a block of queries. */
typedef struct {
    const char *keys[CHUNK], *values[CHUNK]; /* cold: `keys` of the chunk's pages */
    float key_factor[PAGES], value_factor[PAGES];
    float *channels_W; /* scales of the channels of each page's keys */
    float *q_RW, *scores_RJ, *keys_JW, *values_JW;
    Sums part, whole;      /* over the keys of one part, and of all so far */
    i64 *begin_R, *end_R;  /* which keys of the chunk a row sees in this pass */
    int32_t *lists_RP;     /* room for the numbers of the pages that each row reads */
    float *bounds_RP;      /* room for a bound of each row and page */
    const int32_t *listed; /* the pages whose keys are counted in this pass, in this order; or NULL: all */
} Block;

/* Returns the keys that at least one of the rows sees, begin to end; none if begin >= end. */
INLINE void union_of(const Block *b, i64 r, i64 rows, i64 *begin, i64 *end) {
    *begin = CHUNK, *end = 0;
    for (i64 i = r; i < r + rows; i++) {
        if (b->end_R[i] <= b->begin_R[i]) continue;
        if (b->begin_R[i] < *begin) *begin = b->begin_R[i];
        if (b->end_R[i] > *end) *end = b->end_R[i];
    }
}

/* Squashes a row's scores between -cap and cap, and adds the bias of its head. */
static void adjust_scores(const Attention *a, const Block *b, i64 r, i64 head, i64 first) {
    float *scores = b->scores_RJ + r * CHUNK;
    if (a->cap > 0)
        for (i64 j = b->begin_R[r]; j < b->end_R[r]; j++) scores[j] = a->cap * tanhf(scores[j] / a->cap);
    if (a->bias_HP != NULL)
        for (i64 j = b->begin_R[r]; j < b->end_R[r]; j++) scores[j] += a->bias_HP[head * a->P + first + j];
}

/* Gives keys that a row does not see the score -infinity, as far as whole vectors reach. Returns the vectors' keys. */
INLINE void whole_vectors(const Block *b, i64 r, i64 *from, i64 *to) {
    const i64 begin = b->begin_R[r], end = b->end_R[r];
    float *scores = b->scores_RJ + r * CHUNK;
    *from = begin / LANES * LANES, *to = (end + LANES - 1) / LANES * LANES;
    for (i64 j = *from; j < begin; j++) scores[j] = -INFINITY;
    for (i64 j = end; j < *to; j++) scores[j] = -INFINITY;
}

INLINE Lanes exponentials(Lanes x) {
    Lanes found;
#pragma omp simd
    for (int n = 0; n < LANES; n++) found[n] = exponential(x[n]);
    return found;
}

/* Multiplies what was summed so far by `factor`. */
INLINE void rescale(const Block *b, i64 r, i64 W, float factor) {
    float *out = b->part.out_RW + r * W;
    for (i64 d = 0; d < W; d += LANES) store(out + d, load(out + d) * factor);
}

/* Turns a row's scores into weights relative to the greatest so far, and rescales the previous sums. Keys that the row does not
   see have weight 0 in the sum, which is over whole vectors. A NaN score makes the sum NaN. */
static inline void soften(const Block *b, i64 r, i64 W) {
    i64 from, to;
    float *scores = b->scores_RJ + r * CHUNK, before = b->part.greatest_R[r], peak = before;
    if (b->end_R[r] <= b->begin_R[r]) return;
    whole_vectors(b, r, &from, &to);
#pragma omp simd reduction(max : peak)
    for (i64 j = from; j < to; j++) peak = scores[j] > peak ? scores[j] : peak;
#pragma omp simd
    for (i64 j = from; j < to; j++) scores[j] = exponential(scores[j] - peak);
    Lanes sum = {0};
    for (i64 j = from; j < to; j += LANES) sum += load(scores + j);
    float factor = exponential(before - peak);
    b->part.total_R[r] = fused_one(b->part.total_R[r], factor, sum_of(sum));
    b->part.greatest_R[r] = peak;
    if (peak != before) rescale(b, r, W, factor);
}

/* The same for as many rows as there are lanes, from r on, each of which sees a key, or `whole`: all of the chunk. */
INLINE void soften_lanes(const Block *b, i64 r, i64 W, const int whole) {
    i64 from[LANES], to[LANES];
    Lanes x[LANES], before = load(b->part.greatest_R + r);
    float greatest[LANES], factors[LANES];
    for (int n = 0; n < LANES; n++) {
        if (whole) from[n] = 0, to[n] = CHUNK;
        else whole_vectors(b, r + n, &from[n], &to[n]);
        const float *scores = b->scores_RJ + (r + n) * CHUNK;
        x[n] = all(before[n]);
        for (i64 j = from[n]; j < to[n]; j += LANES) x[n] = greater(load(scores + j), x[n]);
    }
    const Lanes peak = peaks(x);
    store(greatest, peak);
    for (int n = 0; n < LANES; n++) {
        float *scores = b->scores_RJ + (r + n) * CHUNK;
        x[n] = (Lanes){0};
        for (i64 j = from[n]; j < to[n]; j += LANES) {
            Lanes weight = exponentials(load(scores + j) - all(greatest[n]));
            store(scores + j, weight);
            x[n] += weight;
        }
    }
    Lanes factor = exponentials(before - peak);
    store(factors, factor);
    store(b->part.total_R + r, fused(load(b->part.total_R + r), factor, sums(x)));
    store(b->part.greatest_R + r, peak);
    for (int n = 0; n < LANES; n++)
        if (greatest[n] != before[n]) rescale(b, r + n, W, factors[n]);
}

/* Adds the weighted values of keys `begin` to `end` - 1, of `rows` rows from r on and `width` vectors from d on. */
INLINE void add_values(const Block *b, i64 begin, i64 end, i64 r, i64 d, i64 W, const int rows, const int width, const int kind) {
    const float *scores = b->scores_RJ + r * CHUNK;
    float *out = b->part.out_RW + r * W + d;
    Lanes sum[8][8];
    for (int i = 0; i < rows; i++)
        for (int w = 0; w < width; w++) sum[i][w] = load(out + i * W + w * LANES);
    for (i64 j = begin; j < end; j++) {
        Lanes weight[8];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) weight[i] = all(scores[i * CHUNK + j]);
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) {
            Lanes value = load_item(b->values[j], d + w * LANES, kind);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i][w] = fused(value, weight[i], sum[i][w]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int w = 0; w < width; w++) store(out + i * W + w * LANES, sum[i][w]);
}

/* Adds the values for rows that see different keys: first each row's keys before the common ones, then the common keys for all
   rows together, then each row's remaining keys. */
INLINE void add_columns(const Block *b, i64 r, i64 d, i64 W, const int rows, const int width, const int kind) {
    i64 begin = b->begin_R[r], end = b->end_R[r];
    for (int i = 1; i < rows; i++) {
        if (b->begin_R[r + i] > begin) begin = b->begin_R[r + i];
        if (b->end_R[r + i] < end) end = b->end_R[r + i];
    }
    if (rows > 1 && end <= begin) {
        for (int i = 0; i < rows; i++) add_values(b, b->begin_R[r + i], b->end_R[r + i], r + i, d, W, 1, width, kind);
        return;
    }
    for (int i = 0; rows > 1 && i < rows; i++)
        if (b->begin_R[r + i] < begin) add_values(b, b->begin_R[r + i], begin, r + i, d, W, 1, width, kind);
    add_values(b, begin, end, r, d, W, rows, width, kind);
    for (int i = 0; rows > 1 && i < rows; i++)
        if (b->end_R[r + i] > end) add_values(b, end, b->end_R[r + i], r + i, d, W, 1, width, kind);
}

/* Adds several vectors at once, so that adjacent memory is read together; as many as registers hold the sums of. */
INLINE void add_rows(const Block *b, i64 r, i64 W, const int rows, const int kind) {
    const int few = LANES == 8 && rows == 4; /* 16 registers */
    const int widest = rows == 1 ? 8 : few ? 2 : 4;
    i64 d = 0;
    if (widest >= 8)
        for (; d + 8 * LANES <= W; d += 8 * LANES) add_columns(b, r, d, W, rows, 8, kind);
    if (widest >= 4)
        for (; d + 4 * LANES <= W; d += 4 * LANES) add_columns(b, r, d, W, rows, 4, kind);
    if (widest >= 4 && d + 3 * LANES == W) add_columns(b, r, d, W, rows, 3, kind), d = W;
    for (; d + 2 * LANES <= W; d += 2 * LANES) add_columns(b, r, d, W, rows, 2, kind);
    for (; d < W; d += LANES) add_columns(b, r, d, W, rows, 1, kind);
}

INLINE void add_kind(const Block *b, i64 r, i64 R, i64 W, const int kind) {
    if (LANES == 16 && W == 3 * LANES)
        for (; r + 8 <= R; r += 8) add_rows(b, r, W, 8, kind);
    for (; r + 4 <= R; r += 4) add_rows(b, r, W, 4, kind);
    for (; r + 2 <= R; r += 2) add_rows(b, r, W, 2, kind);
    for (; r < R; r++) add_rows(b, r, W, 1, kind);
}

/* Adds the weighted values of the chunk to the sums of rows r to R - 1. */
static void add_chunk(const Block *b, i64 r, i64 R, i64 W, int kind) {
    switch (kind) {
    case FLOAT: add_kind(b, r, R, W, FLOAT); break;
    case HALF: add_kind(b, r, R, W, HALF); break;
    case FP8: add_kind(b, r, R, W, FP8); break;
    default: add_kind(b, r, R, W, INT8);
    }
}

#endif
