/* Slots of states, and what the rules that add tokens to them have in common.

   Each sequence's tokens are divided into runs. A run begins with the state in one slot and leaves its own in another, which
   may be the same. A slot has the channels of the last L - 1 tokens, the farthest first, then a matrix for each head.

   Strides and widths are in floats. Legend: T tokens, S sequences, R runs, N slots, W width of a slot, F channels, L tokens
   that the convolution sees, J key heads or groups of heads, H heads, K rows of a head's matrix, V its columns. */

#ifndef RYZANSTEIN_SLOTS_H
#define RYZANSTEIN_SLOTS_H

#include "lanes.h"

enum { TOKENS = 32 };          /* that a thread prepares at once */
enum { VECTORS = 4 };          /* of columns that a thread computes at once */
enum { PARALLEL = 64 * 1024 }; /* operations from which threads pay for their start */

/* As `functions/recurrent/slots.py` declares it. */
typedef struct {
    const i64 *begin_S, *first_R, *count_R, *source_R, *target_R; /* sequence s has runs begin_S[s] to begin_S[s + 1] - 1 */
    float *slots_NW;
    i64 T, S, W, F, L, J, H, K, V;
} Slots;

/* log(1 + e^x), by the series of 2 artanh(u / (2 + u)) for log(1 + u): the library's logarithm differs between systems. */
static inline float softplus(float x) {
    float u = exponential(-fabsf(x)), z = u / (2.0f + u), square = z * z, sum = 1.0f / 13;
    for (int n = 11; n > 0; n -= 2) sum = fused_one(sum, square, 1.0f / (float)n);
    return (x > 0.0f ? x : 0.0f) + 2.0f * z * sum;
}

/* Columns of a matrix: `stride` from row to row, in n vectors, of which the last may have fewer than all lanes (`left`). */
typedef struct {
    const float *from;
    float *to;
    i64 from_stride, to_stride, left;
} Columns;

INLINE Lanes load_of(const float *x, i64 i, i64 left, const int whole) { return whole ? load(x) : load_some(x, left - i * LANES); }
INLINE void store_of(float *x, Lanes value, i64 i, i64 left, const int whole) {
    if (whole) store(x, value);
    else store_some(x, value, left - i * LANES);
}

#endif
