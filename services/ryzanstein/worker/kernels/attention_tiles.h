/* Scores of many rows with the same keys, which are copied and transposed: a vector has one number of as many keys as there are lanes.

   A score has the operations of attention_hot.h: what a lane sums there is a chain here, and the chains are added as the lanes
   are. So nothing moves across lanes. */

#ifndef RYZANSTEIN_ATTENTION_TILES_H
#define RYZANSTEIN_ATTENTION_TILES_H

#include "attention_hot.h"

enum { TILE_QUERIES = LANES == 16 ? 8 : 4 };
enum { LEVELS = LANES == 16 ? 4 : LANES == 8 ? 3 : 2 }; /* of the tree of chains */

#if LANES == 16
#define LOW8 PICK(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH8 PICK(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define LOW4 PICK(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define HIGH4 PICK(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define LOW2 PICK(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH2 PICK(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW1 PICK(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define HIGH1 PICK(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#elif LANES == 8
#define LOW4 PICK(0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH4 PICK(4, 5, 6, 7, 12, 13, 14, 15)
#define LOW2 PICK(0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH2 PICK(2, 3, 10, 11, 6, 7, 14, 15)
#define LOW1 PICK(0, 8, 2, 10, 4, 12, 6, 14)
#define HIGH1 PICK(1, 9, 3, 11, 5, 13, 7, 15)
#else
#define LOW2 PICK(0, 1, 4, 5)
#define HIGH2 PICK(2, 3, 6, 7)
#define LOW1 PICK(0, 4, 2, 6)
#define HIGH1 PICK(1, 5, 3, 7)
#endif

/* Exchanges the numbers of lanes and vectors that differ in one bit. */
#define EXCHANGE(bit, low, high)                                                                                                 \
    for (int i = 0; i < LANES; i++) {                                                                                            \
        if (i & bit) continue;                                                                                                   \
        Lanes a = x[i], b = x[i + bit];                                                                                          \
        x[i] = low, x[i + bit] = high;                                                                                           \
    }

/* Lane n of vector m becomes lane m of vector n. */
INLINE void transpose(Lanes x[LANES]) {
#if LANES == 16
    EXCHANGE(8, LOW8, HIGH8)
#endif
#if LANES >= 8
    EXCHANGE(4, LOW4, HIGH4)
#endif
    EXCHANGE(2, LOW2, HIGH2)
    EXCHANGE(1, LOW1, HIGH1)
}

/* Copies the keys that `find_keys` has found as [W][CHUNK] float32, and the values as [CHUNK][W], both padded with zeros. */
INLINE void copy_tiles(const Attention *a, Block *b, i64 from, i64 count, i64 W, const int half) {
    for (i64 j = from / LANES * LANES; j < count; j += LANES)
        for (i64 d = 0; d < W; d += LANES) {
            Lanes x[LANES];
#pragma GCC unroll 16
            for (int n = 0; n < LANES; n++) x[n] = load_part(b->keys[j + n], d, a->D, half);
            transpose(x);
#pragma GCC unroll 16
            for (int n = 0; n < LANES; n++) store(b->keys_JW + (d + n) * CHUNK + j, x[n]);
        }
    for (i64 j = from; j < count; j++) {
        copy_head(b->values_JW + j * W, b->values[j], a->D, W, half);
        b->values[j] = (char *)(b->values_JW + j * W);
    }
}

/* The number with its lowest LEVELS bits reversed. */
INLINE int reversed(const int n) {
    int found = 0;
    for (int bit = 0; bit < LEVELS; bit++) found |= (n >> bit & 1) << (LEVELS - 1 - bit);
    return found;
}

/* Scores of `rows` rows from r on with a vector of keys from j on. Two sums of the tree are added as soon as both are there, so that
   few wait in registers. */
INLINE void score_outer(const Attention *a, const Block *b, i64 j, i64 r, i64 W, const int rows) {
    const float *q = b->q_RW + r * W, *keys = b->keys_JW + j;
    Lanes waiting[LEVELS + 1][TILE_QUERIES];
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++) {
        Lanes sum[TILE_QUERIES];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) sum[i] = (Lanes){0};
        for (i64 d = reversed(n); d < W; d += LANES) {
            const Lanes key = load(keys + d * CHUNK);
#pragma GCC unroll 8
            for (int i = 0; i < rows; i++) sum[i] = fused(all(q[i * W + d]), key, sum[i]);
        }
        const int pairs = __builtin_ctz(~n);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            for (int level = 0; level < pairs; level++) sum[i] += waiting[level][i];
            waiting[pairs][i] = sum[i];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++) store(b->scores_RJ + (r + i) * CHUNK + j, waiting[LEVELS][i] * a->scale);
}

INLINE void score_outer_rows(const Attention *a, const Block *b, i64 r, i64 W, const int rows) {
    i64 begin, end;
    union_of(b, r, rows, &begin, &end);
    for (i64 j = begin / LANES * LANES; j < end; j += LANES) score_outer(a, b, j, r, W, rows);
}

/* Scores of rows r to R - 1. Where it is inlined GCC spills the sums. */
static __attribute__((noinline)) void score_tiles(const Attention *a, const Block *b, i64 r, i64 R, i64 W) {
    for (; r + TILE_QUERIES <= R; r += TILE_QUERIES) score_outer_rows(a, b, r, W, TILE_QUERIES);
    for (; r + 4 <= R; r += 4) score_outer_rows(a, b, r, W, 4);
    for (; r < R; r++) score_outer_rows(a, b, r, W, 1);
}

#endif
