/* The steps between two matrix products, for float32 on CPUs (the cache may be float16): norms, rotation, cache writes, gates, attention over pages.

   In torch each of them is several operators, and at one to a few tokens a step an operator costs more to start than to run.
   Attention reads keys and values in their blocks, where torch's kernels would have to gather them first.

   Every function computes a row, or a head of a sequence, by itself and in one order: results depend neither on the other
   sequences of a step nor on the number of threads. Strides and widths are in floats. NaN and infinity are propagated.

   Legend: T tokens, S sequences, E width of a row, H heads, K key-value heads, G query heads of a group, D head dimension,
   N slots of the cache, C columns of a slot, B blocks of the longest table. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef int64_t i64;

enum { CHUNK = 64 };             /* keys whose scores are held at once */
enum { PARALLEL = 16 * 1024 };   /* floats from which on threads pay for their start */

/* Cephes' expf: 2 ulp. A plain loop over it becomes vector instructions, one over the library's does not. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t bits; float value; } power = {(uint32_t)((int32_t)n + 127) << 23};
    return p * power.value;
}

/* out = x / sqrt(mean(x^2) + eps) * (offset + weight), Zhang and Sennrich 2019. */
void rms_norm(const float *x_TE, const float *weight_E, float *out_TE, i64 T, i64 E, float eps, float offset) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const float *x = x_TE + t * E;
        float *out = out_TE + t * E, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (i64 e = 0; e < E; e++) sum += x[e] * x[e];
        float factor = 1.0f / sqrtf(sum / (float)E + eps);
#pragma omp simd
        for (i64 e = 0; e < E; e++) out[e] = x[e] * factor * (offset + weight_E[e]);
    }
}

static inline void rotate_halves(float *x, const float *cosine, const float *sine, i64 half) {
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cosine[i] + high * sine[i];
        x[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

static inline void rotate_neighbours(float *x, const float *cosine, const float *sine, i64 half) {
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * cosine[2 * i] + odd * sine[2 * i];
        x[2 * i + 1] = odd * cosine[2 * i + 1] + even * sine[2 * i + 1];
    }
}

/* Rotates the first R numbers of each of the H heads of a row in place (Su et al. 2021; the sine is signed), then copies the
   row's C columns from `first_kv` on into the token's slot. R may be 0. `half`: slots hold float16. */
void rotate_and_store(float *qkv_T, i64 stride, i64 T, i64 H, i64 D, const float *cos_TR, const float *sin_TR, i64 R,
                      int interleaved, i64 first_kv, void *pages_NC, const i64 *slots_T, i64 C, int half) {
#pragma omp parallel for schedule(static) if (T * stride >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        float *row = qkv_T + t * stride;
        for (i64 h = 0; R > 0 && h < H; h++) {
            if (interleaved) rotate_neighbours(row + h * D, cos_TR + t * R, sin_TR + t * R, R / 2);
            else rotate_halves(row + h * D, cos_TR + t * R, sin_TR + t * R, R / 2);
        }
        if (half) {
            _Float16 *slot = (_Float16 *)pages_NC + slots_T[t] * C;
#pragma omp simd
            for (i64 c = 0; c < C; c++) slot[c] = (_Float16)row[first_kv + c];
        } else memcpy((float *)pages_NC + slots_T[t] * C, row + first_kv, (size_t)C * sizeof(float));
    }
}

/* out = silu(gate) * up, of rows that hold E gates and then E ups (Shazeer 2020). */
void silu_gate(const float *gate_up_T2E, float *out_TE, i64 T, i64 E) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const float *gate = gate_up_T2E + t * 2 * E, *up = gate + E;
        float *out = out_TE + t * E;
#pragma omp simd
        for (i64 e = 0; e < E; e++) out[e] = gate[e] / (1.0f + exponential(-gate[e])) * up[e];
    }
}

/* scale = max(|x|) / 127 of each row, NaN where the row has a NaN or an infinity. */
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

void quantize_to_float(const float *x_TE, float *levels_TE, float *scale_T, i64 T, i64 E, float smallest) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        float scale = scale_T[t] = row_scale(x_TE + t * E, E, smallest);
#pragma omp simd
        for (i64 e = 0; e < E; e++) levels_TE[t * E + e] = rintf(x_TE[t * E + e] / scale);
    }
}

void quantize_to_int8(const float *x_TE, int8_t *levels_TE, float *scale_T, i64 T, i64 E, float smallest) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        float scale = scale_T[t] = row_scale(x_TE + t * E, E, smallest);
#pragma omp simd
        for (i64 e = 0; e < E; e++) levels_TE[t * E + e] = (int8_t)(int32_t)rintf(x_TE[t * E + e] / scale);
    }
}

/* Sixteen floats. Of a head dimension only multiples of it are supported. */
typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
typedef _Float16 HalfLanes __attribute__((vector_size(32), aligned(2), may_alias));
typedef int32_t LaneIndex __attribute__((vector_size(64)));
enum { LANES = 16 };

static inline Lanes load(const float *from) { return *(const Lanes *)from; }
static inline Lanes widen(const HalfLanes *from) {
#ifdef __AVX512F__ /* GCC 12 makes sixteen scalar conversions of the other */
    return (Lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    return __builtin_convertvector(*from, Lanes);
#endif
}

/* Number i and those after it of an array of float32 or float16. */
static inline __attribute__((always_inline)) Lanes load_cached(const char *from, i64 i, const int half) {
    return half ? widen((const HalfLanes *)(from + 2 * i)) : *(const Lanes *)(from + 4 * i);
}
static inline void store(float *to, Lanes value) { *(Lanes *)to = value; }

/* Two vectors become one: each half of it, pair by pair `step` lanes apart, the sums of one of them. */
#define FOLD(a, b, low, high) (__builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high))

/* The sums of sixteen vectors: four rounds of folding, an eighth of the additions of sixteen separate sums. */
static inline Lanes sums(Lanes x[LANES]) {
    const LaneIndex low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const LaneIndex low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};
    const LaneIndex low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const LaneIndex low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};
    for (int i = 0; i < 8; i++) x[i] = FOLD(x[i], x[i + 8], low8, low8 + 8);
    for (int i = 0; i < 4; i++) x[i] = FOLD(x[i], x[i + 4], low4, low4 + 4);
    for (int i = 0; i < 2; i++) x[i] = FOLD(x[i], x[i + 2], low2, low2 + 2);
    return FOLD(x[0], x[1], low1, low1 + 1);
}

typedef struct {
    const float *q_T;       /* queries of a token: H x D, `q_stride` apart */
    const char *pages_NC;   /* a slot: keys of K heads, and values of K heads from `values` on */
    const i64 *rows_S;      /* which token of the step is a sequence's new one */
    const i64 *tables_SB, *begin_S, *length_S;  /* blocks; keys `begin` to `length` - 1 are seen */
    float *out_T;           /* as queries, `out_stride` apart */
    i64 q_stride, out_stride, C, values, B, block_size, S, K, G, D;
    i64 half;               /* whether slots hold float16 */
    float scale, cap;       /* scores: times scale, and where cap > 0 squeezed between -cap and cap */
} Attention;

/* What one head of one sequence computes with. */
typedef struct {
    const float *q_GD;
    const char *keys[CHUNK];
    float *out_GD, *scores_GJ, *greatest_G, *total_G;
} Head;

/* Where the next keys lie, up to a chunk of them. Past the last one its address is repeated, for whole vectors of keys. */
static inline i64 find_keys(const Attention *a, Head *head, const i64 *table, i64 k, i64 first, i64 end, i64 item_bytes) {
    i64 count = end - first < CHUNK ? end - first : CHUNK;
    i64 block = first / a->block_size, offset = first % a->block_size;
    for (i64 j = 0; j < count; j++) {
        head->keys[j] = a->pages_NC + ((table[block] * a->block_size + offset) * a->C + k * a->D) * item_bytes;
        if (++offset == a->block_size) offset = 0, block++;
    }
    for (i64 j = count; j % LANES; j++) head->keys[j] = head->keys[count - 1];
    return count;
}

static inline __attribute__((always_inline)) void score_keys(const Attention *a, Head *head, i64 count, i64 G, i64 D, const int half) {
    for (i64 j = 0; j < count; j += LANES)
        for (i64 g = 0; g < G; g++) {
            Lanes products[LANES];
            for (int i = 0; i < LANES; i++) products[i] = load(head->q_GD + g * D) * load_cached(head->keys[j + i], 0, half);
            for (i64 d = LANES; d < D; d += LANES) {
                Lanes q = load(head->q_GD + g * D + d);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) products[i] += q * load_cached(head->keys[j + i], d, half);
            }
            store(head->scores_GJ + g * CHUNK + j, sums(products) * a->scale);
        }
    if (a->cap > 0)
        for (i64 g = 0; g < G; g++)
            for (i64 j = 0; j < count; j++) head->scores_GJ[g * CHUNK + j] = a->cap * tanhf(head->scores_GJ[g * CHUNK + j] / a->cap);
}

/* Turns scores into weights relative to the greatest so far, and rescales what was summed up before (Milakov and Gimelshein
   2018). A NaN score makes the sum NaN. */
static inline void soften(Head *head, i64 count, i64 g, i64 D) {
    float *scores = head->scores_GJ + g * CHUNK, *out = head->out_GD + g * D, before = head->greatest_G[g], peak = before, sum = 0;
#pragma omp simd reduction(max : peak)
    for (i64 j = 0; j < count; j++) peak = scores[j] > peak ? scores[j] : peak;
#pragma omp simd reduction(+ : sum)
    for (i64 j = 0; j < count; j++) {
        scores[j] = exponential(scores[j] - peak);
        sum += scores[j];
    }
    float factor = exponential(before - peak);
    head->total_G[g] = head->total_G[g] * factor + sum;
    head->greatest_G[g] = peak;
    if (peak != before)
        for (i64 d = 0; d < D; d += LANES) store(out + d, load(out + d) * factor);
}

/* Adds weighted values, of `rows` query heads and `width` lanes of the head dimension at once: what registers hold. */
static inline __attribute__((always_inline)) void add_values(const Attention *a, Head *head, i64 count, i64 g, i64 d, i64 D, const int rows, const int width, const int half) {
    Lanes sum[4][4];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) sum[r][w] = load(head->out_GD + (g + r) * D + d + w * LANES);
    for (i64 j = 0; j < count; j++) {
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int w = 0; w < width; w++) sum[r][w] += head->scores_GJ[(g + r) * CHUNK + j] * load_cached(head->keys[j], a->values + d + w * LANES, half);
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) store(head->out_GD + (g + r) * D + d + w * LANES, sum[r][w]);
}

static inline __attribute__((always_inline)) void add_all_values(const Attention *a, Head *head, i64 count, i64 G, i64 D, const int width, const int half) {
    for (i64 d = 0; d < D; d += width * LANES) {
        i64 g = 0;
        for (; g + 4 <= G; g += 4) add_values(a, head, count, g, d, D, 4, width, half);
        for (; g < G; g++) add_values(a, head, count, g, d, D, 1, width, half);
    }
}

static inline __attribute__((always_inline)) void attend_head(const Attention *a, i64 s, i64 k, float *scratch, const int half) {
    const i64 G = a->G, D = a->D;
    Head head;
    head.q_GD = a->q_T + a->rows_S[s] * a->q_stride + k * G * D;
    head.out_GD = a->out_T + a->rows_S[s] * a->out_stride + k * G * D;
    head.scores_GJ = scratch, head.greatest_G = scratch + G * CHUNK, head.total_G = head.greatest_G + G;
    memset(head.out_GD, 0, (size_t)(G * D) * sizeof(float));
    for (i64 g = 0; g < G; g++) head.greatest_G[g] = -3.0e38f, head.total_G[g] = 0;
    for (i64 first = a->begin_S[s]; first < a->length_S[s]; first += CHUNK) {
        i64 count = find_keys(a, &head, a->tables_SB + s * a->B, k, first, a->length_S[s], half ? 2 : 4);
        score_keys(a, &head, count, G, D, half);
        for (i64 g = 0; g < G; g++) soften(&head, count, g, D);
        if (D % (4 * LANES) == 0) add_all_values(a, &head, count, G, D, 4, half);
        else if (D % (3 * LANES) == 0) add_all_values(a, &head, count, G, D, 3, half);
        else add_all_values(a, &head, count, G, D, 1, half);
    }
    for (i64 g = 0; g < G; g++)
        for (i64 d = 0; d < D; d += LANES) store(head.out_GD + g * D + d, load(head.out_GD + g * D + d) / head.total_G[g]);
}

/* One new token of each sequence looks at the sequence's keys, where they lie. Nonzero: no memory for the scores. */
int attend_paged(const Attention *a) {
    int failed = 0;
    i64 work = 0;
    for (i64 s = 0; s < a->S; s++) work += (a->length_S[s] - a->begin_S[s]) * a->C;
#pragma omp parallel if (work >= PARALLEL)
    {
        float *scratch = malloc((size_t)(a->G * (CHUNK + 2)) * sizeof(float));
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for collapse(2) schedule(dynamic)
        for (i64 s = 0; s < a->S; s++)
            for (i64 k = 0; k < a->K; k++)
                if (scratch != NULL && a->half) attend_head(a, s, k, scratch, 1);
                else if (scratch != NULL) attend_head(a, s, k, scratch, 0);
        free(scratch);
    }
    return failed;
}
