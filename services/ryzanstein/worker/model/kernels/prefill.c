/* Attention of several new tokens of a sequence over its keys and values, where they lie in blocks; float32 on CPUs, the cache may
   be float16.

   Queries are taken in blocks, keys in chunks: a chunk is copied into panels once for a block of queries, and both products are
   those of floats.h. Weights are relative to the greatest score so far (Milakov and Gimelshein 2018; Dao et al. 2022).

   Chunks begin at multiples of their size, so that a token's result depends neither on the other sequences of a step, nor on the
   number of threads, nor on how its prompt was cut into steps. NaN and infinity are propagated.

   Legend: as attention.h; R rows of a block of queries: tokens times heads of the group; J keys of a chunk. */

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "floats.h"

enum { CHUNK = 64 };            /* keys */
enum { ROWS = 64 };             /* of a block, as far as a token's heads allow */
enum { PARALLEL = 64 * 1024 };  /* products from which on threads pay for their start */

/* What a block of queries is computed in. */
typedef struct {
    float *q_RD, *scores_RJ, *out_RD, *greatest_R, *total_R;
    char *keys, *values; /* panels of J and of D outputs */
} Scratch;

static Scratch carve(float *memory, i64 R, i64 D) {
    Scratch s = {.q_RD = memory};
    s.scores_RJ = s.q_RD + R * D;
    s.out_RD = s.scores_RJ + R * CHUNK;
    s.greatest_R = s.out_RD + R * D;
    s.total_R = s.greatest_R + R;
    s.keys = (char *)(s.total_R + R);
    s.values = s.keys + CHUNK * D * (i64)sizeof(float);
    return s;
}

static i64 scratch_floats(i64 R, i64 D) { return R * (2 * D + CHUNK + 2) + 2 * CHUNK * D; }

/* Copies `count` keys and values from position `first` on into panels; zeros for the others of the chunk. */
INLINE void copy_chunk(const Attention *a, const Scratch *s, const i64 *table, i64 k, i64 first, i64 count, const int half) {
    float *keys = (float *)s->keys, *values = (float *)s->values;
    if (count < CHUNK) memset(keys, 0, (size_t)(2 * CHUNK * a->D) * sizeof(float));
    for (i64 j = 0; j < count; j++) {
        const char *key = key_at(a, table, k, first + j, half ? 2 : 4);
        for (i64 d = 0; d < a->D; d += LANES) {
            float columns[LANES];
            store(columns, load_cached(key, d, half));
            float *to = keys + (j / LANES * a->D + d) * LANES + j % LANES;
            for (i64 n = 0; n < LANES; n++) to[n * LANES] = columns[n];
            store(values + d * CHUNK + j * LANES, load_cached(key, a->values + d, half));
        }
    }
}

/* All rows times all panels of a chunk. */
static void multiply(const FloatProduct *p, i64 R) {
    i64 panels = p->O / LANES, panel = 0;
    for (; panel + TILE_PANELS <= panels; panel += TILE_PANELS) add_rows(add_float_tile, p, R, panel, 0, p->I, TILE_PANELS);
    switch (panels - panel) {
#if TILE_PANELS == 4
    case 3: add_rows(add_float_tile, p, R, panel, 0, p->I, 3); break;
    case 2: add_rows(add_float_tile, p, R, panel, 0, p->I, 2); break;
#endif
    case 1: add_rows(add_float_tile, p, R, panel, 0, p->I, 1); break;
    }
}

/* Turns a row's scores of keys `begin` to `end` - 1 of the chunk into weights, the others into 0. A NaN makes the sum NaN. */
static inline void soften(const Scratch *s, i64 r, i64 begin, i64 end, float cap, i64 D) {
    float *scores = s->scores_RJ + r * CHUNK, before = s->greatest_R[r], peak = before, sum = 0;
    if (end <= begin) {
        memset(scores, 0, CHUNK * sizeof(float));
        return;
    }
    if (cap > 0)
        for (i64 j = begin; j < end; j++) scores[j] = cap * tanhf(scores[j] / cap);
#pragma omp simd reduction(max : peak)
    for (i64 j = begin; j < end; j++) peak = scores[j] > peak ? scores[j] : peak;
#pragma omp simd reduction(+ : sum)
    for (i64 j = 0; j < CHUNK; j++) {
        float weight = j >= begin && j < end ? exponential(scores[j] - peak) : 0.0f;
        scores[j] = weight;
        sum += weight;
    }
    float factor = exponential(before - peak);
    s->total_R[r] = s->total_R[r] * factor + sum;
    s->greatest_R[r] = peak;
    if (peak != before)
        for (i64 d = 0; d < D; d += LANES) store(s->out_RD + r * D + d, load(s->out_RD + r * D + d) * factor);
}

/* New tokens `token` to `token` + count - 1 of a sequence, and the query heads of one key-value head. */
INLINE void attend_block(const Attention *a, const Scratch *s, i64 sequence, i64 k, i64 token, i64 count, const int half) {
    const i64 G = a->G, D = a->D, R = count * G, *table = a->tables_SB + sequence * a->B;
    i64 row = a->rows_S[sequence] + token, position = a->length_S[sequence] - a->num_new_S[sequence] + token;
    for (i64 t = 0; t < count; t++)
        for (i64 n = 0; n < G * D; n += LANES)
            store(s->q_RD + t * G * D + n, load(a->q_T + (row + t) * a->q_stride + k * G * D + n) * a->scale);
    for (i64 r = 0; r < R; r++) s->greatest_R[r] = -3.0e38f, s->total_R[r] = 0;
    memset(s->out_RD, 0, (size_t)(R * D) * sizeof(float));
    const FloatProduct scores = {s->q_RD, s->keys, NULL, s->scores_RJ, D, CHUNK, 0};
    const FloatProduct sums = {s->scores_RJ, s->values, NULL, s->out_RD, CHUNK, D, 1};
    i64 lowest = a->window > 0 && position >= a->window ? position - a->window + 1 : 0, end = position + count;
    for (i64 first = lowest / CHUNK * CHUNK; first < end; first += CHUNK) {
        copy_chunk(a, s, table, k, first, end - first < CHUNK ? end - first : CHUNK, half);
        multiply(&scores, R);
        for (i64 r = 0; r < R; r++) {
            i64 own = position + r / G - first, begin = a->window > 0 ? own - a->window + 1 : 0;
            soften(s, r, begin > 0 ? begin : 0, own + 1 < CHUNK ? own + 1 : CHUNK, a->cap, D);
        }
        multiply(&sums, R);
    }
    for (i64 r = 0; r < R; r++) {
        float *out = a->out_T + (row + r / G) * a->out_stride + (k * G + r % G) * D;
        for (i64 d = 0; d < D; d += LANES) store(out + d, load(s->out_RD + r * D + d) / s->total_R[r]);
    }
}

/* The new tokens of each sequence look at its keys, themselves included. Nonzero: no memory for the scores. */
int attend_prefill(const Attention *a) {
    int failed = 0;
    i64 tokens = ROWS / a->G > 0 ? ROWS / a->G : 1, blocks = 0, work = 0; /* of a block; blocks of the longest sequence */
    for (i64 s = 0; s < a->S; s++) {
        i64 needed = (a->num_new_S[s] + tokens - 1) / tokens;
        blocks = needed > blocks ? needed : blocks;
        work += a->num_new_S[s] * a->length_S[s] * a->G * a->D;
    }
#pragma omp parallel if (work >= PARALLEL)
    {
        float *memory = malloc((size_t)scratch_floats(tokens * a->G, a->D) * sizeof(float));
        if (memory == NULL) {
#pragma omp atomic write
            failed = 1;
        }
        const Scratch scratch = carve(memory, tokens * a->G, a->D);
#pragma omp for collapse(3) schedule(dynamic)
        for (i64 block = blocks - 1; block >= 0; block--) /* the longest first */
            for (i64 s = 0; s < a->S; s++)
                for (i64 k = 0; k < a->K; k++) {
                    i64 token = block * tokens, left = a->num_new_S[s] - token, count = left < tokens ? left : tokens;
                    if (count <= 0 || memory == NULL) continue;
                    if (a->half) attend_block(a, &scratch, s, k, token, count, 1);
                    else attend_block(a, &scratch, s, k, token, count, 0);
                }
        free(memory);
    }
    return failed;
}
