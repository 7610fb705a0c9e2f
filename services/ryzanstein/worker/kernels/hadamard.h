/* The Hadamard transform of blocks of a row, without its factor (fast, Fino and Algazi 1976).

   A number much larger than its neighbours is spread over its block, so that 8-bit levels of the row lose less. The transform of a
   transform is the block again, times its size. */

#ifndef RYZANSTEIN_HADAMARD_H
#define RYZANSTEIN_HADAMARD_H

#include "lanes.h"

/* Lane l gets lane l ^ n. */
#define MOVED(...) __builtin_shufflevector(x, x, __VA_ARGS__)
#if LANES == 16
INLINE Lanes moved8(Lanes x) { return MOVED(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7); }
INLINE Lanes moved4(Lanes x) { return MOVED(4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11); }
INLINE Lanes moved2(Lanes x) { return MOVED(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13); }
INLINE Lanes moved1(Lanes x) { return MOVED(1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14); }
#elif LANES == 8
INLINE Lanes moved4(Lanes x) { return MOVED(4, 5, 6, 7, 0, 1, 2, 3); }
INLINE Lanes moved2(Lanes x) { return MOVED(2, 3, 0, 1, 6, 7, 4, 5); }
INLINE Lanes moved1(Lanes x) { return MOVED(1, 0, 3, 2, 5, 4, 7, 6); }
#else
INLINE Lanes moved2(Lanes x) { return MOVED(2, 3, 0, 1); }
INLINE Lanes moved1(Lanes x) { return MOVED(1, 0, 3, 2); }
#endif
#undef MOVED

/* Sums in lanes whose number lacks the bit n, differences in the others. */
INLINE Lanes crossed(Lanes x, Lanes moved, const int n) {
    Lanes sign;
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++) sign[l] = l & n ? -1.0f : 1.0f;
    return moved + x * sign;
}

INLINE Lanes transformed_lanes(Lanes x) {
#if LANES == 16
    x = crossed(x, moved8(x), 8);
#endif
#if LANES >= 8
    x = crossed(x, moved4(x), 4);
#endif
    x = crossed(x, moved2(x), 2);
    return crossed(x, moved1(x), 1);
}

/* Transforms each `block` numbers of a row in place. `block` is a power of two of at least 16, which divides the width, or 1. */
static inline void transform(float *x, i64 width, i64 block) {
    if (block == 1) return;
    for (i64 first = 0; first < width; first += block, x += block) {
        for (i64 n = block / 2; n >= LANES; n /= 2)
            for (i64 begin = 0; begin < block; begin += 2 * n)
                for (i64 i = begin; i < begin + n; i += LANES) {
                    Lanes one = load(x + i), other = load(x + i + n);
                    store(x + i, one + other);
                    store(x + i + n, one - other);
                }
        for (i64 i = 0; i < block; i += LANES) store(x + i, transformed_lanes(load(x + i)));
    }
}

#endif
