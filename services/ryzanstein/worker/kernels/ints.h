/* Vectors of as many 32-bit integers as a register holds, and sums of products of 8-bit numbers in their lanes.

   A weight has the numbers of four inputs in each lane, a row has them in one word that is spread over all lanes. */

#ifndef RYZANSTEIN_INTS_H
#define RYZANSTEIN_INTS_H

#include "lanes.h"

typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES), may_alias));

/* Returns a vector with the same number in every lane. */
INLINE Ints all_ints(int32_t x) { return x - (Ints){0}; }

#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES == 8 && defined(__AVXVNNI__))
#define VNNI 1
#else
#define VNNI 0
#endif

/* sum[l] += weight[4 l + j] * x[j] for j from 0 to 3; weights are unsigned, the row's four numbers signed. */
INLINE Ints add_products(Ints sum, Ints weight, int32_t x) {
    Ints row = all_ints(x);
#if LANES == 16 && VNNI
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)row);
#elif LANES == 8 && VNNI
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight, (__m256i)row);
#else
    Shorts even = (Shorts)(weight & 0x00ff00ff), odd = (Shorts)((weight >> 8) & 0x00ff00ff);
    Shorts row_even = (Shorts)row << 8 >> 8, row_odd = (Shorts)row >> 8;
#if LANES == 16 && defined(__AVX512BW__)
    return sum + (Ints)_mm512_madd_epi16((__m512i)even, (__m512i)row_even) +
           (Ints)_mm512_madd_epi16((__m512i)odd, (__m512i)row_odd);
#elif LANES == 8 && defined(__AVX2__)
    return sum + (Ints)_mm256_madd_epi16((__m256i)even, (__m256i)row_even) +
           (Ints)_mm256_madd_epi16((__m256i)odd, (__m256i)row_odd);
#else
    Shorts products = even * row_even, high = odd * row_odd; /* at most 255 * 127: within 16 bits */
    Ints first = (Ints)products, second = (Ints)high;
    return sum + (first << 16 >> 16) + (first >> 16) + (second << 16 >> 16) + (second >> 16);
#endif
#endif
}

#endif
