/* Sums of products of a weight's levels with a row's, for a tile of rows and panels.

   Instructions differ. VNNI multiplies unsigned levels with signed numbers of a row and adds four products in 32 bits. AVX2 adds
   two of them in 16 bits, which may overflow: there 8-bit levels are signed, and their sizes are multiplied with the row's numbers,
   which take their signs. Arm multiplies signed numbers. Smaller levels are not negative. A row's numbers are -127 to 127. */

#ifndef RYZANSTEIN_LEVELS_H
#define RYZANSTEIN_LEVELS_H

#include "ints.h"

/* ADD_PAIRS adds two products in 16 bits, ADD_SHORTS two such sums. SIZES are unsigned, WITH_SIGNS returns the row's numbers times
   -1 where the weight's are negative. */
#if LANES == 16 && !VNNI && defined(__AVX512BW__)
#define ADD_PAIRS(weight, row) ((Shorts)_mm512_maddubs_epi16((__m512i)(weight), (__m512i)(row)))
#define ADD_SHORTS(x) ((Ints)_mm512_madd_epi16((__m512i)(x), _mm512_set1_epi16(1)))
#define SIZES(weight) ((Ints)_mm512_abs_epi8((__m512i)(weight)))
#define WITH_SIGNS(row, weight)                                                                                                 \
    ((Ints)_mm512_mask_sub_epi8((__m512i)(row), _mm512_movepi8_mask((__m512i)(weight)), _mm512_setzero_si512(), (__m512i)(row)))
#elif LANES == 8 && !VNNI && defined(__AVX2__)
#define ADD_PAIRS(weight, row) ((Shorts)_mm256_maddubs_epi16((__m256i)(weight), (__m256i)(row)))
#define ADD_SHORTS(x) ((Ints)_mm256_madd_epi16((__m256i)(x), _mm256_set1_epi16(1)))
#define SIZES(weight) ((Ints)_mm256_abs_epi8((__m256i)(weight)))
#define WITH_SIGNS(row, weight) ((Ints)_mm256_sign_epi8((__m256i)(row), (__m256i)(weight)))
#endif

#if defined(__aarch64__) || defined(ADD_PAIRS)
enum { LEVEL_OFFSET = 0 }; /* of signed 8-bit levels, as they are stored */
#else
enum { LEVEL_OFFSET = 128 };
#endif
enum { BYTE = 255 };                     /* the largest levels of 8 bits, whether or not they have a sign */
enum { MOST_ROWS = LANES == 16 ? 8 : 4, MOST_PANELS = 2 }; /* of a tile */

/* sum[l] += weight[4 l + j] * x[j] for j from 0 to 3. */
INLINE Ints add_level_products(Ints sum, Ints weight, int32_t x) {
#if defined(ADD_PAIRS)
    return sum + ADD_SHORTS(ADD_PAIRS(SIZES(weight), WITH_SIGNS(all_ints(x), weight)));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)weight, (int8x16_t)all_ints(x));
#elif defined(__aarch64__) /* the sum of two products is at most 2 * 128 * 127 */
    int8x16_t levels = (int8x16_t)weight, row = (int8x16_t)all_ints(x);
    int16x8_t lower = vmull_s8(vget_low_s8(levels), vget_low_s8(row)), upper = vmull_high_s8(levels, row);
    return (Ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(lower, upper));
#else
    return add_products(sum, weight, x);
#endif
}

/* Returns x, in a register: GCC would load it again for each use. */
INLINE Ints kept(Ints x) {
#if LANES >= 8
    __asm__("" : "+v"(x));
#endif
    return x;
}

/* The words of one tile: `count` of each panel's levels, as many of each row, and what a row's sums begin with, or NULL. */
typedef struct {
    int count;
    const Ints *weight[MOST_PANELS];
    const int32_t *row[MOST_ROWS], *begin[MOST_ROWS];
} Words;

INLINE Ints begin_of(const Words *of, const int r) { return of->begin[r] != NULL ? all_ints(*of->begin[r]) : (Ints){0}; }

#ifdef ADD_PAIRS
/* Adds products of words `begin` to `end` - 1, whose sums fit in 16 bits. Those of the first words begin the sums of all: GCC would
   keep what is added only in the end in registers that these sums need. */
INLINE void add_in_shorts(Ints sum[][MOST_PANELS], const Words *of, const int begin, const int end, const int has_signs,
                          const int rows, const int panels) {
    Shorts part[MOST_ROWS][MOST_PANELS];
#pragma GCC unroll 8
    for (int k = begin; k < end; k++) {
        Ints weight[MOST_PANELS], size[MOST_PANELS];
#pragma GCC unroll 2
        for (int n = 0; n < panels; n++) {
            weight[n] = kept(of->weight[n][k]);
            size[n] = has_signs ? SIZES(weight[n]) : weight[n];
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            Ints row = all_ints(of->row[r][k]);
#pragma GCC unroll 2
            for (int n = 0; n < panels; n++) {
                Shorts pairs = ADD_PAIRS(size[n], has_signs ? WITH_SIGNS(row, weight[n]) : row);
                if (k > begin) pairs += part[r][n];
                part[r][n] = pairs;
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < panels; n++) sum[r][n] = ADD_SHORTS(part[r][n]) + (begin == 0 ? begin_of(of, r) : sum[r][n]);
}
#else
/* Adds the products of word k. */
INLINE void add_word(Ints sum[][MOST_PANELS], const Words *of, const int k, const int rows, const int panels) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < panels; n++) {
#if LANES == 16 && VNNI /* GCC would spend an instruction on spreading the row's word for a single panel */
            if (panels == 1) __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum[r][0]) : "v"(of->weight[0][k]), "m"(of->row[r][k]));
            else
#endif
                sum[r][n] = add_level_products(sum[r][n], of->weight[n][k], of->row[r][k]);
        }
}
#endif

/* Computes the sums of products of each row's words with each panel's. No level exceeds `largest`, a power of two less one.

   Without VNNI products are added in 16 bits: two levels of at most `largest`, or signed ones of at most 128, times 127, as often as
   32767 has room for that. */
INLINE void sum_products(Ints sum[][MOST_PANELS], const Words *of, const int rows, const int panels, const int largest) {
#ifdef ADD_PAIRS
    const int has_signs = largest == BYTE, room = 32767 / (2 * 127 * (has_signs ? 128 : largest));
#pragma GCC unroll 8
    for (int k = 0; k < of->count; k += room)
        add_in_shorts(sum, of, k, k + room < of->count ? k + room : of->count, has_signs, rows, panels);
#else
    (void)largest;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < panels; n++) sum[r][n] = begin_of(of, r);
#pragma GCC unroll 8
    for (int k = 0; k < of->count; k++) add_word(sum, of, k, rows, panels);
#endif
}

#endif
