/* Cold pages: keys and values of 16 tokens, sealed in 8 bits with scales of their own.

   A block of a layer is one part for each key-value head, so that it shards by heads. A part: 16 bytes of head (float32 scale of
   the keys, float32 scale of the values, 8 bytes of zeros), the keys as [D][16], the values as [16][V] with V = D rounded up to
   16. Keys are transposed: a vector has the same number of 16 keys, and scores need no sums across lanes. Python knows the sizes
   as `cold_layout`.

   Keys may have a scale for each channel (CHANNELS): a channel of large numbers costs the others nothing then. The keys follow V
   bytes of FP8 numbers; a channel's scale is its number times the head's scale, and the keys are int8.

   FP8 is e4m3 without infinity (Micikevicius et al. 2022), the scale of a head's keys or values is their greatest magnitude / 448;
   int8 is -127 to 127, and the scale that magnitude / 127; 16-bit keys have scale 1. A head with a NaN or an infinity has the
   scale NaN: so has what is read with it. */

#ifndef RYZANSTEIN_ATTENTION_PAGES_H
#define RYZANSTEIN_ATTENTION_PAGES_H

#include "lanes.h"

enum { PAGE = 16 };      /* tokens */
enum { PART_HEAD = 16 }; /* bytes */
enum { FLOAT, HALF, FP8, INT8, CHANNELS };

typedef int32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

INLINE i64 item_bytes_of(int kind) { return kind == FLOAT ? 4 : kind == HALF ? 2 : 1; }
INLINE i64 value_row_bytes(i64 D) { return (D + PAGE - 1) / PAGE * PAGE; }
INLINE i64 part_keys(i64 D, int key_kind) { return PART_HEAD + (key_kind == CHANNELS ? value_row_bytes(D) : 0); }
INLINE i64 part_values(i64 D, int key_kind) { return part_keys(D, key_kind) + PAGE * D * item_bytes_of(key_kind); }
INLINE i64 part_bytes(i64 D, int key_kind) { return part_values(D, key_kind) + PAGE * value_row_bytes(D); }

#if defined(__aarch64__)
/* Four numbers, twice. */
INLINE int8x8_t four_at(const char *from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    return vreinterpret_s8_s32(vdup_n_s32(four));
}
#endif

/* FP8 numbers times 2^-8, from i on. The bits of e4m3 are those of a float16 whose exponent is 8 smaller: subnormal numbers
   need no care, and a shift replaces a table. */
INLINE Lanes load_fp8(const char *from) {
#if LANES == 16
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from)), 7);
    return (Lanes)_mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16((short)0xbfff)));
#elif LANES == 8 && defined(__F16C__)
    __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from)), 7);
    return (Lanes)_mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16((short)0xbfff)));
#elif defined(__aarch64__)
    int16x4_t bits = vget_low_s16(vshll_n_s8(four_at(from), 7));
    return (Lanes)vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(bits, vdup_n_s16((short)0xbfff))));
#else
    Words bits = __builtin_convertvector(*(const Bytes *)from, Words);
    Words size = (bits & 0x7f) << 20, normal = size + (112 << 23); /* a subnormal one has no implicit bit */
    Lanes low = __builtin_convertvector(size >> 20, Lanes) * 0x1p-17f;
    Words is_normal = size >= (1 << 23), found = (is_normal & normal) | (~is_normal & (Words)low);
    return (Lanes)(found | (bits & INT32_MIN));
#endif
}

/* GCC 12 makes scalar conversions of the generic one. */
INLINE Lanes load_int8(const char *from) {
#if LANES == 16
    return (Lanes)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif LANES == 8 && defined(__AVX2__)
    return (Lanes)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#elif defined(__aarch64__)
    return (Lanes)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four_at(from)))));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const Bytes *)from, Words), Lanes);
#endif
}

/* Returns a vector of numbers from i on. */
INLINE Lanes load_item(const char *from, i64 i, const int kind) {
    if (kind == FP8) return load_fp8(from + i);
    if (kind == INT8) return load_int8(from + i);
    return load_cached(from, i, kind == HALF);
}

/* What a number that `load_item` returns must be multiplied by. */
INLINE float factor_of(const char *scale, const int kind) {
    float value;
    memcpy(&value, scale, sizeof value);
    return kind == FP8 || kind == CHANNELS ? value * 256.0f : value;
}

#endif
