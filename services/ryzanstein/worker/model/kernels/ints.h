/* Vectors of as many 32-bit integers as a register holds, and sums of products of 8-bit numbers in their lanes. */

#ifndef RYZANSTEIN_INTS_H
#define RYZANSTEIN_INTS_H

#include "lanes.h"

typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES), may_alias));

/* Returns a vector with the same number in every lane. */
INLINE Ints all_ints(int32_t x) { return x - (Ints){0}; }

/* sum[l] += weight[4 l + j] * x[j] for j from 0 to 3; weights are unsigned, the row's four numbers signed. */
INLINE Ints add_products(Ints sum, Ints weight, int32_t x) {
    Ints row = all_ints(x);
#if LANES == 16 && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)row);
#elif LANES == 8 && defined(__AVXVNNI__)
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

/* The instruction of CPUs without VNNI that adds two products in 16 bits. It saturates: see add_small_products. */
#if LANES == 16 && !defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define ADD_PAIRS(weight, row) ((Shorts)_mm512_maddubs_epi16((__m512i)(weight), (__m512i)(row)))
#define ADD_SHORTS(x) ((Ints)_mm512_madd_epi16((__m512i)(x), _mm512_set1_epi16(1)))
#elif LANES == 8 && !defined(__AVXVNNI__) && defined(__AVX2__)
#define ADD_PAIRS(weight, row) ((Shorts)_mm256_maddubs_epi16((__m256i)(weight), (__m256i)(row)))
#define ADD_SHORTS(x) ((Ints)_mm256_madd_epi16((__m256i)(x), _mm256_set1_epi16(1)))
#endif

/* Adds the products of `count` groups of four inputs. No weight exceeds `largest`, a power of two less one.

   Without VNNI products of small weights are added in 16 bits: two weights of at most `largest` times 127, as often as 32767 has
   room for that. */
INLINE Ints add_small_products(Ints sum, const Ints *weight, const int32_t *x, const int count, const int largest) {
#ifdef ADD_PAIRS
    const int room = 32767 / (2 * 127 * largest);
    if (room > 0) {
#pragma GCC unroll 8
        for (int begin = 0; begin < count; begin += room) {
            const int end = begin + room < count ? begin + room : count;
            Shorts part = ADD_PAIRS(weight[begin], all_ints(x[begin]));
#pragma GCC unroll 8
            for (int n = begin + 1; n < end; n++) part += ADD_PAIRS(weight[n], all_ints(x[n]));
            sum += ADD_SHORTS(part);
        }
        return sum;
    }
#else
    (void)largest;
#endif
#pragma GCC unroll 8
    for (int n = 0; n < count; n++) {
#if LANES == 16 && defined(__AVX512VNNI__) /* GCC would spend an instruction on spreading each of x */
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weight[n]), "m"(x[n]));
#else
        sum = add_products(sum, weight[n], x[n]);
#endif
    }
    return sum;
}

#endif
