/* Attention of single new tokens over keys and values that lie in blocks, for float32 on CPUs; the cache may be float16.

   torch's kernels would have to gather the blocks first.

   A head of a sequence is computed by itself and in one order: results depend neither on the other sequences of a step nor on
   the number of threads. Strides and widths are in floats. NaN and infinity are propagated.

   Legend: T tokens, S sequences, K key-value heads, G query heads of a group, D head dimension (a multiple of 16), N slots of
   the cache, C columns of a slot, B blocks of the longest table. */

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

enum { CHUNK = 64 };           /* keys whose scores are held at once: whole vectors of them */
enum { LINE = 64 };            /* bytes of a line of the caches */
enum { PARALLEL = 16 * 1024 }; /* floats from which on threads pay for their start */

/* What one head of one sequence computes with. */
typedef struct {
    const float *q_GD;
    const char *keys[CHUNK];
    float *out_GD, *scores_GJ, *greatest_G, *total_G;
} Head;

/* Where the next keys lie, up to a chunk of them. Past the last one its address is repeated, for whole vectors of keys. */
static i64 find_keys(const Attention *a, Head *head, const i64 *table, i64 k, i64 first, i64 end, i64 item_bytes) {
    i64 count = end - first < CHUNK ? end - first : CHUNK, slot_bytes = a->C * item_bytes;
    i64 block = first / a->block_size, offset = first % a->block_size;
    for (i64 j = 0; j < count; offset = 0, block++) {
        const char *key = a->pages_NC + (table[block] * a->block_size + offset) * slot_bytes + k * a->D * item_bytes;
        for (; offset < a->block_size && j < count; offset++, key += slot_bytes) head->keys[j++] = key;
    }
    for (i64 j = count; j % LANES; j++) head->keys[j] = head->keys[count - 1];
    return count;
}

/* Asks for the keys and values of the next chunk. A small head reads so little of a slot that the CPU does not foresee where it
   goes on; of a large one it does. */
static void prefetch_keys(const Attention *a, const i64 *table, i64 k, i64 first, i64 end, i64 item_bytes) {
    i64 bytes = a->D * item_bytes;
    if (bytes > 4 * LINE) return;
    for (i64 j = first; j < end && j < first + CHUNK; j++) {
        const char *key = key_at(a, table, k, j, item_bytes), *value = key + a->values * item_bytes;
        for (i64 b = 0; b < bytes; b += LINE) __builtin_prefetch(key + b), __builtin_prefetch(value + b);
        __builtin_prefetch(key + bytes - 1), __builtin_prefetch(value + bytes - 1);
    }
}

/* Scores of `rows` query heads from g on with keys from j on, as many as make a vector of scores: each key is loaded once. */
INLINE void score_tile(const Attention *a, Head *head, i64 j, i64 g, const int rows, const int half) {
    const int keys = LANES / rows;
    const float *q = head->q_GD + g * a->D;
    Lanes products[LANES];
    for (int n = 0; n < LANES; n++) products[n] = (Lanes){0};
    for (i64 d = 0; d < a->D; d += LANES) {
        Lanes query[4];
        for (int r = 0; r < rows; r++) query[r] = load(q + r * a->D + d);
#pragma GCC unroll 16
        for (int i = 0; i < keys; i++) {
            Lanes key = load_cached(head->keys[j + i], d, half);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) products[r * keys + i] += query[r] * key;
        }
    }
    Lanes scores = sums(products) * a->scale;
    for (int r = 0; r < rows; r++)
        memcpy(head->scores_GJ + (g + r) * CHUNK + j, (float *)&scores + r * keys, (size_t)keys * sizeof(float));
}

INLINE void score_keys(const Attention *a, Head *head, i64 count, const int half) {
    i64 g = 0;
    for (; g + 4 <= a->G; g += 4)
        for (i64 j = 0; j < count; j += LANES / 4) score_tile(a, head, j, g, 4, half);
    for (; g < a->G; g++)
        for (i64 j = 0; j < count; j += LANES) score_tile(a, head, j, g, 1, half);
}

/* Squeezes scores between -cap and cap. */
static void cap_scores(const Attention *a, Head *head, i64 count) {
    for (i64 g = 0; g < a->G; g++)
        for (i64 j = 0; j < count; j++) {
            float *score = head->scores_GJ + g * CHUNK + j;
            *score = a->cap * tanhf(*score / a->cap);
        }
}

/* Turns scores into weights relative to the greatest so far, and rescales what was summed up before (Milakov and Gimelshein
   2018). A NaN score makes the sum NaN. */
static inline void soften(Head *head, i64 count, i64 g, i64 D) {
    float *scores = head->scores_GJ + g * CHUNK, *out = head->out_GD + g * D;
    float before = head->greatest_G[g], peak = before, sum = 0;
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

/* Adds weighted values, of `rows` query heads from g on and `width` vectors of the head from d on: what registers hold. */
INLINE void add_values(const Attention *a, Head *head, i64 count, i64 g, i64 d, const int rows, const int width,
                       const int half) {
    const float *scores = head->scores_GJ + g * CHUNK;
    float *out = head->out_GD + g * a->D + d;
    Lanes sum[4][4];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) sum[r][w] = load(out + r * a->D + w * LANES);
    for (i64 j = 0; j < count; j++) {
#pragma GCC unroll 4
        for (int w = 0; w < width; w++) {
            Lanes value = load_cached(head->keys[j], a->values + d + w * LANES, half);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sum[r][w] += scores[r * CHUNK + j] * value;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < width; w++) store(out + r * a->D + w * LANES, sum[r][w]);
}

INLINE void add_all_values(const Attention *a, Head *head, i64 count, const int width, const int half) {
    for (i64 d = 0; d < a->D; d += width * LANES) {
        i64 g = 0;
        for (; g + 4 <= a->G; g += 4) add_values(a, head, count, g, d, 4, width, half);
        for (; g < a->G; g++) add_values(a, head, count, g, d, 1, width, half);
    }
}

INLINE void attend_head(const Attention *a, i64 s, i64 k, float *scratch, const int half) {
    const i64 G = a->G, D = a->D, *table = a->tables_SB + s * a->B;
    Head head;
    head.q_GD = a->q_T + a->rows_S[s] * a->q_stride + k * G * D;
    head.out_GD = a->out_T + a->rows_S[s] * a->out_stride + k * G * D;
    head.scores_GJ = scratch, head.greatest_G = scratch + G * CHUNK, head.total_G = head.greatest_G + G;
    memset(head.out_GD, 0, (size_t)(G * D) * sizeof(float));
    for (i64 g = 0; g < G; g++) head.greatest_G[g] = -3.0e38f, head.total_G[g] = 0;
    for (i64 first = a->begin_S[s]; first < a->length_S[s]; first += CHUNK) {
        i64 count = find_keys(a, &head, table, k, first, a->length_S[s], half ? 2 : 4);
        prefetch_keys(a, table, k, first + CHUNK, a->length_S[s], half ? 2 : 4);
        score_keys(a, &head, count, half);
        if (a->cap > 0) cap_scores(a, &head, count);
        for (i64 g = 0; g < G; g++) soften(&head, count, g, D);
        if (D % (4 * LANES) == 0) add_all_values(a, &head, count, 4, half);
        else if (D % (3 * LANES) == 0) add_all_values(a, &head, count, 3, half);
        else add_all_values(a, &head, count, 1, half);
    }
    for (i64 g = 0; g < G; g++)
        for (i64 d = 0; d < D; d += LANES) store(head.out_GD + g * D + d, load(head.out_GD + g * D + d) / head.total_G[g]);
}

/* One new token of each sequence looks at the sequence's keys, where they lie. Nonzero: no memory for the scores. */
int attend_paged(const Attention *a) {
    int failed = 0;
    i64 work = 0, heads = a->S >= 2 * omp_get_max_threads() ? a->K : 1; /* of a thread at once: in a slot they are neighbours */
    for (i64 s = 0; s < a->S; s++) work += (a->length_S[s] - a->begin_S[s]) * a->C;
#pragma omp parallel if (work >= PARALLEL)
    {
        float *scratch = malloc((size_t)(a->G * (CHUNK + 2)) * sizeof(float));
        if (scratch == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for collapse(2) schedule(dynamic, heads)
        for (i64 s = 0; s < a->S; s++)
            for (i64 k = 0; k < a->K; k++)
                if (scratch != NULL && a->half) attend_head(a, s, k, scratch, 1);
                else if (scratch != NULL) attend_head(a, s, k, scratch, 0);
        free(scratch);
    }
    return failed;
}
