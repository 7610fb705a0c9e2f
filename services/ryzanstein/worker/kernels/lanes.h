/* The building blocks of the kernels: vectors of as many floats as a register holds, the exponential, sums over a row.

   They use the vector extensions of GCC 12 and clang 15, so that one source serves every CPU. */

#ifndef RYZANSTEIN_LANES_H
#define RYZANSTEIN_LANES_H

#if defined(__clang__) ? __clang_major__ < 15 : __GNUC__ < 12
#error "GCC 12 or clang 15 is needed, or a later one"
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

typedef int64_t i64;

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float Lanes __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef _Float16 HalfLanes __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE Lanes load(const float *from) { return *(const Lanes *)from; }
INLINE void store(float *to, Lanes value) { *(Lanes *)to = value; }

/* Returns a vector with the same number in every lane. */
INLINE Lanes all(float x) { return x - (Lanes){0}; }

/* a * b + c, rounded once if the CPU can. No other operations are contracted (-ffp-contract=off): the compiler must not choose the
   operations of a sum, since its choice may differ from one tile or tail of a loop to the next. */
INLINE Lanes fused(Lanes a, Lanes b, Lanes c) {
#if LANES == 16
    return (Lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
    return (Lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
INLINE float fused_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

/* The first `count` lanes, which may be more than there are; the others are 0 or stay unchanged. */
INLINE Lanes load_some(const float *from, i64 count) {
    if (count >= LANES) return load(from);
    Lanes value = {0};
    memcpy(&value, from, (size_t)count * sizeof(float));
    return value;
}
INLINE void store_some(float *to, Lanes value, i64 count) {
    if (count >= LANES) store(to, value);
    else memcpy(to, &value, (size_t)count * sizeof(float));
}

/* GCC 12 makes scalar conversions of the generic one. */
INLINE Lanes widen(const char *from) {
#if LANES == 16
    return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8 && defined(__F16C__)
    return (Lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (Lanes)vcvt_f32_f16(vld1_f16((const __fp16 *)from));
#else
    return __builtin_convertvector(*(const HalfLanes *)from, Lanes);
#endif
}

/* Returns a vector of numbers from i on of an array of float32 or float16. */
INLINE Lanes load_cached(const char *from, i64 i, const int half) {
    return half ? widen(from + 2 * i) : *(const Lanes *)(from + 4 * i);
}

/* Stores what load_cached loads. */
INLINE void store_cached(char *to, i64 i, Lanes value, const int half) {
    if (!half) *(Lanes *)(to + 4 * i) = value;
#if LANES == 16
    else _mm256_storeu_si256((__m256i *)(to + 2 * i), _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif LANES == 8 && defined(__F16C__)
    else _mm_storeu_si128((__m128i *)(to + 2 * i), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    else vst1_f16((__fp16 *)(to + 2 * i), vcvt_f16_f32((float32x4_t)value));
#else
    else *(HalfLanes *)(to + 2 * i) = __builtin_convertvector(value, HalfLanes);
#endif
}

/* Two vectors become one of pairs, whose halves STAY and MOVED have: where the bit of the lane's number is 0 they are two lanes of a,
   else two of b. What stays in its lane is blended, what moves is shuffled. */
#define PICK(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#if LANES == 16
#define STAY8 PICK(0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31)
#define MOVED8 PICK(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
#define STAY4 PICK(0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31)
#define MOVED4 PICK(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27)
#define STAY2 PICK(0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31)
#define MOVED2 PICK(2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29)
#define STAY1 PICK(0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31)
#define MOVED1 PICK(1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30)
#elif LANES == 8
#define STAY4 PICK(0, 1, 2, 3, 12, 13, 14, 15)
#define MOVED4 PICK(4, 5, 6, 7, 8, 9, 10, 11)
#define STAY2 PICK(0, 1, 10, 11, 4, 5, 14, 15)
#define MOVED2 PICK(2, 3, 8, 9, 6, 7, 12, 13)
#define STAY1 PICK(0, 9, 2, 11, 4, 13, 6, 15)
#define MOVED1 PICK(1, 8, 3, 10, 5, 12, 7, 14)
#else
#define STAY2 PICK(0, 1, 6, 7)
#define MOVED2 PICK(2, 3, 4, 5)
#define STAY1 PICK(0, 5, 2, 7)
#define MOVED1 PICK(1, 4, 3, 6)
#endif

#define FOLD(bit, join)                                                                                                          \
    for (int i = 0; i < bit; i++) {                                                                                              \
        Lanes a = x[i], b = x[i + bit];                                                                                          \
        x[i] = join(STAY##bit, MOVED##bit);                                                                                      \
    }
#if LANES == 16
#define FOLDS(join) FOLD(8, join) FOLD(4, join) FOLD(2, join) FOLD(1, join)
#elif LANES == 8
#define FOLDS(join) FOLD(4, join) FOLD(2, join) FOLD(1, join)
#else
#define FOLDS(join) FOLD(2, join) FOLD(1, join)
#endif

INLINE Lanes sum_of_two(Lanes a, Lanes b) { return a + b; }

/* Lane by lane a if it is greater, else b: a NaN in a is not. */
INLINE Lanes greater(Lanes a, Lanes b) {
#if LANES == 16
    return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (Lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    for (int n = 0; n < LANES; n++) b[n] = a[n] > b[n] ? a[n] : b[n];
    return b;
#endif
}

/* Lane i is the sum of x[i]: rounds of folding need a fraction of the additions of separate sums. Uses x up. */
INLINE Lanes sums(Lanes x[LANES]) {
    FOLDS(sum_of_two)
    return x[0];
}

/* Lane i is the greatest of x[i]. Uses x up. */
INLINE Lanes peaks(Lanes x[LANES]) {
    FOLDS(greater)
    return x[0];
}

/* Returns the sum of all lanes. */
INLINE float sum_of(Lanes x) {
    float lane[LANES];
    store(lane, x);
    for (int count = LANES / 2; count > 0; count /= 2)
        for (int n = 0; n < count; n++) lane[n] += lane[n + count];
    return lane[0];
}

/* Returns the sum of squares of a row, independent of its address: four sums of vectors, so that none waits for another. */
static inline float squares(const float *x, i64 E) {
    Lanes sum[4] = {{0}};
    i64 e = 0;
    for (; e + 4 * LANES <= E; e += 4 * LANES)
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            Lanes part = load(x + e + n * LANES);
            sum[n] = fused(part, part, sum[n]);
        }
    for (; e < E; e += LANES) {
        Lanes part = load_some(x + e, E - e);
        sum[0] = fused(part, part, sum[0]);
    }
    return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* A float to which this is added is rounded to a whole number, half to even, which then are the lowest bits. */
#define ROUNDING 12582912.0f /* 1.5 * 2^23 */

typedef union {
    float value;
    uint32_t bits;
} Float;

/* Cephes' expf: 2 ulp, 0 below e^-87. A plain loop over it becomes vector instructions, one over the library's does not. */
INLINE float exponential(float x) {
    float y = x > 88.0f ? 88.0f : x;
    Float turns = {fused_one(y, 1.44269504088896341f, ROUNDING)};
    float n = turns.value - ROUNDING;
    float r = fused_one(n, 2.12194440e-4f, fused_one(n, -0.693359375f, y));
    float p = 1.9875691500e-4f;
    p = fused_one(p, r, 1.3981999507e-3f);
    p = fused_one(p, r, 8.3334519073e-3f);
    p = fused_one(p, r, 4.1665795894e-2f);
    p = fused_one(p, r, 1.6666665459e-1f);
    p = fused_one(p, r, 5.0000001201e-1f);
    p = fused_one(p, r * r, r) + 1.0f;
    Float power = {.bits = (turns.bits + 127) << 23};
    return x < -87.0f ? 0.0f : p * power.value;
}

/* The scale of a row in 8 bits: max(|x|) / 127, NaN where the row has a NaN or an infinity. */
static inline float row_scale(const float *x, i64 E, float smallest) {
    float largest = 0, invalid = 0;
#pragma omp simd reduction(max : largest) reduction(+ : invalid)
    for (i64 e = 0; e < E; e++) {
        float size = fabsf(x[e]);
        largest = size > largest ? size : largest;
        invalid += x[e] * 0.0f;
    }
    float scale = largest / 127.0f;
    return (scale < smallest ? smallest : scale) + invalid;
}

#endif
