/* Attention of new tokens over keys and values in blocks, for float32 on CPUs; the cache may be float16.

   torch's kernels would have to gather the blocks first. Queries are processed in blocks of rows, keys in chunks; weights are
   relative to the greatest score so far (Milakov and Gimelshein 2018; Dao et al. 2022).

   A row is one query of one head. Its result is one sequence of operations that depends only on its position: chunks begin at
   multiples of their size, and within a chunk keys are processed from the first to the last that the row sees. What is computed
   beside it (other sequences, other new tokens of its own sequence, however a prompt is divided) decides only which registers
   hold it. NaN and infinity are propagated; a row never reads a value that it does not see.

   Strides and widths are in floats. Legend: T tokens, S sequences, K key-value heads, G query heads of a group, D head
   dimension, W the same rounded up to whole vectors, N slots of the cache, C columns of a slot, B blocks of the longest table,
   P positions of a bias, R rows of a block of queries: tokens times heads of the group; J keys of a chunk. */

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "lanes.h"

enum { CHUNK = 64 };           /* keys: whole vectors of them */
enum { ROWS = 64 };            /* of a block, as far as a token's heads allow */
enum { COPIED = 16 };          /* rows of several tokens from which copying a chunk pays off: contiguous, and converted once */
enum { LINE = 64 };            /* bytes of a cache line */
enum { PARALLEL = 16 * 1024 }; /* floats from which threads pay for their start */

typedef struct {
    const float *q_T;         /* queries of a token: K x G x D, `q_stride` apart */
    const char *pages_NC;     /* a slot: keys of K heads, and values of K heads from `values` on */
    const i64 *rows_S;        /* a sequence's first new token in the step */
    const i64 *num_new_S;     /* number of a sequence's new tokens, its last keys */
    const i64 *tables_SB, *length_S; /* block tables, and numbers of keys */
    const float *bias_HP;     /* added to the scores of a head by the key's position; or NULL */
    float *out_T;             /* as queries, `out_stride` apart */
    i64 q_stride, out_stride, C, values, B, block_size, S, K, G, D, P;
    i64 half;                 /* whether slots hold float16 */
    i64 window;               /* the most keys that a token sees, itself included; 0: all */
    float scale, cap;         /* scores: times scale, and squashed between -cap and cap if cap > 0 */
} Attention;

/* The working memory of a block of queries. */
typedef struct {
    const char *keys[CHUNK], *values[CHUNK];
    float *q_RW, *out_RW, *scores_RJ, *greatest_R, *total_R, *keys_JW, *values_JW;
    i64 *begin_R, *end_R; /* which keys of the chunk a row sees */
} Block;

/* New tokens `token` to `token` + count - 1 of a sequence. */
typedef struct {
    i64 sequence, token, count;
} Task;

static i64 block_bytes(i64 R, i64 W) {
    i64 bytes = (R * (2 * W + CHUNK + 2) + 2 * CHUNK * W) * (i64)sizeof(float) + 2 * R * (i64)sizeof(i64);
    return (bytes + LINE - 1) / LINE * LINE;
}

/* Arrays that are read in vectors come first, so that no vector crosses a cache line. */
static void carve(Block *b, char *memory, i64 R, i64 W) {
    b->keys_JW = (float *)memory;
    b->values_JW = b->keys_JW + CHUNK * W;
    b->q_RW = b->values_JW + CHUNK * W;
    b->out_RW = b->q_RW + R * W;
    b->scores_RJ = b->out_RW + R * W;
    b->begin_R = (i64 *)(b->scores_RJ + R * CHUNK), b->end_R = b->begin_R + R;
    b->greatest_R = (float *)(b->end_R + R), b->total_R = b->greatest_R + R;
}

/* Returns a head's key at a position of a sequence. */
INLINE const char *key_at(const Attention *a, const i64 *table, i64 k, i64 position, i64 item_bytes) {
    i64 slot = table[position / a->block_size] * a->block_size + position % a->block_size;
    return a->pages_NC + (slot * a->C + k * a->D) * item_bytes;
}

/* Finds the addresses of `count` keys and values. The last one is repeated to fill whole vectors of keys. */
static void find_keys(const Attention *a, Block *b, const i64 *table, i64 k, i64 first, i64 count, i64 item_bytes) {
    i64 slot_bytes = a->C * item_bytes, block = first / a->block_size, offset = first % a->block_size;
    for (i64 j = 0; j < count; offset = 0, block++) {
        const char *key = a->pages_NC + (table[block] * a->block_size + offset) * slot_bytes + k * a->D * item_bytes;
        for (; offset < a->block_size && j < count; offset++, key += slot_bytes) b->keys[j++] = key;
    }
    for (i64 j = count; j % LANES; j++) b->keys[j] = b->keys[count - 1];
    for (i64 j = 0; j < count; j++) b->values[j] = b->keys[j] + a->values * item_bytes;
}

/* Prefetches the keys and values of the next chunk. A small head reads so little of a slot that the CPU does not predict the next
   address; for a large one it does. */
static void prefetch_keys(const Attention *a, const i64 *table, i64 k, i64 first, i64 end, i64 item_bytes) {
    i64 bytes = a->D * item_bytes;
    if (bytes > 4 * LINE) return;
    for (i64 j = first; j < end && j < first + CHUNK; j++) {
        const char *key = key_at(a, table, k, j, item_bytes), *value = key + a->values * item_bytes;
        for (i64 n = 0; n < bytes; n += LINE) __builtin_prefetch(key + n), __builtin_prefetch(value + n);
        __builtin_prefetch(key + bytes - 1), __builtin_prefetch(value + bytes - 1);
    }
}

INLINE Lanes load_part(const char *from, i64 d, i64 D, const int half) {
    if (d + LANES <= D) return load_cached(from, d, half);
    float part[LANES] = {0};
    for (i64 n = 0; d + n < D; n++) part[n] = half ? (float)((const _Float16 *)from)[d + n] : ((const float *)from)[d + n];
    return load(part);
}

/* Copies what `find_keys` has found, as float32, padded with zeros to whole vectors. */
INLINE void copy_keys(const Attention *a, Block *b, i64 count, i64 W, const int half) {
    for (i64 j = 0; j < count; j++) {
        const char *key = b->keys[j], *value = b->values[j];
        for (i64 d = 0; d < W; d += LANES) store(b->keys_JW + j * W + d, load_part(key, d, a->D, half));
        b->keys[j] = b->values[j] = (char *)(b->keys_JW + j * W);
        if (value == key) continue; /* a latent is both key and value */
        for (i64 d = 0; d < W; d += LANES) store(b->values_JW + j * W + d, load_part(value, d, a->D, half));
        b->values[j] = (char *)(b->values_JW + j * W);
    }
    for (i64 j = count; j % LANES; j++) b->keys[j] = b->keys[count - 1];
}

/* Computes a vector of scores, of `rows` rows from r on and keys from j on: each key is loaded once. A score is summed in each
   lane, then over the lanes, in the same order for any `rows`. */
INLINE void score_tile(const Attention *a, const Block *b, i64 j, i64 r, i64 W, const int rows, const int half) {
    const int keys = LANES / rows;
    const float *q = b->q_RW + r * W;
    Lanes products[LANES];
    for (int n = 0; n < LANES; n++) products[n] = (Lanes){0};
    for (i64 d = 0; d < W; d += LANES) {
        Lanes query[4];
        for (int i = 0; i < rows; i++) query[i] = load(q + i * W + d);
#pragma GCC unroll 16
        for (int n = 0; n < keys; n++) {
            Lanes key = load_cached(b->keys[j + n], d, half);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) products[i * keys + n] = fused(query[i], key, products[i * keys + n]);
        }
    }
    Lanes scores = sums(products) * a->scale;
    for (int i = 0; i < rows; i++)
        memcpy(b->scores_RJ + (r + i) * CHUNK + j, (float *)&scores + i * keys, (size_t)keys * sizeof(float));
}

/* Returns the keys that at least one of the rows sees, begin to end; none if begin >= end. */
INLINE void union_of(const Block *b, i64 r, int rows, i64 *begin, i64 *end) {
    *begin = b->begin_R[r], *end = b->end_R[r];
    for (int i = 1; i < rows; i++) {
        if (b->begin_R[r + i] < *begin) *begin = b->begin_R[r + i];
        if (b->end_R[r + i] > *end) *end = b->end_R[r + i];
    }
}

INLINE void score_rows(const Attention *a, const Block *b, i64 r, i64 W, const int rows, const int half) {
    i64 begin, end, keys = LANES / rows;
    union_of(b, r, rows, &begin, &end);
    for (i64 j = begin / keys * keys; j < end; j += keys) score_tile(a, b, j, r, W, rows, half);
}

/* Squashes a row's scores between -cap and cap, and adds the bias of its head. */
static void adjust_scores(const Attention *a, const Block *b, i64 r, i64 head, i64 first) {
    float *scores = b->scores_RJ + r * CHUNK;
    if (a->cap > 0)
        for (i64 j = b->begin_R[r]; j < b->end_R[r]; j++) scores[j] = a->cap * tanhf(scores[j] / a->cap);
    if (a->bias_HP != NULL)
        for (i64 j = b->begin_R[r]; j < b->end_R[r]; j++) scores[j] += a->bias_HP[head * a->P + first + j];
}

/* Turns a row's scores into weights relative to the greatest so far, and rescales the previous sums. Keys that the row does not
   see have weight 0 in the sum, which is over whole vectors. A NaN score makes the sum NaN. */
static inline void soften(const Block *b, i64 r, i64 W) {
    i64 begin = b->begin_R[r], end = b->end_R[r], from = begin / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
    float *scores = b->scores_RJ + r * CHUNK, before = b->greatest_R[r], peak = before;
    if (end <= begin) return;
    for (i64 j = from; j < begin; j++) scores[j] = -INFINITY;
    for (i64 j = end; j < to; j++) scores[j] = -INFINITY;
#pragma omp simd reduction(max : peak)
    for (i64 j = from; j < to; j++) peak = scores[j] > peak ? scores[j] : peak;
#pragma omp simd
    for (i64 j = from; j < to; j++) scores[j] = exponential(scores[j] - peak);
    Lanes sum = {0};
    for (i64 j = from; j < to; j += LANES) sum += load(scores + j);
    float factor = exponential(before - peak);
    b->total_R[r] = fused_one(b->total_R[r], factor, sum_of(sum));
    b->greatest_R[r] = peak;
    if (peak != before)
        for (i64 d = 0; d < W; d += LANES) store(b->out_RW + r * W + d, load(b->out_RW + r * W + d) * factor);
}

/* Adds the weighted values of keys `begin` to `end` - 1, of `rows` rows from r on and `width` vectors from d on. */
INLINE void add_values(const Block *b, i64 begin, i64 end, i64 r, i64 d, i64 W, const int rows, const int width, const int half) {
    const float *scores = b->scores_RJ + r * CHUNK;
    float *out = b->out_RW + r * W + d;
    Lanes sum[4][8];
    for (int i = 0; i < rows; i++)
        for (int w = 0; w < width; w++) sum[i][w] = load(out + i * W + w * LANES);
    for (i64 j = begin; j < end; j++) {
        Lanes weight[4];
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) weight[i] = all(scores[i * CHUNK + j]);
#pragma GCC unroll 8
        for (int w = 0; w < width; w++) {
            Lanes value = load_cached(b->values[j], d + w * LANES, half);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) sum[i][w] = fused(value, weight[i], sum[i][w]);
        }
    }
    for (int i = 0; i < rows; i++)
        for (int w = 0; w < width; w++) store(out + i * W + w * LANES, sum[i][w]);
}

/* Adds the values for rows that see different keys: first each row's keys before the common ones, then the common keys for all
   rows together, then each row's remaining keys. */
INLINE void add_columns(const Block *b, i64 r, i64 d, i64 W, const int rows, const int width, const int half) {
    i64 begin = b->begin_R[r], end = b->end_R[r];
    for (int i = 1; i < rows; i++) {
        if (b->begin_R[r + i] > begin) begin = b->begin_R[r + i];
        if (b->end_R[r + i] < end) end = b->end_R[r + i];
    }
    if (rows > 1 && end <= begin) {
        for (int i = 0; i < rows; i++) add_values(b, b->begin_R[r + i], b->end_R[r + i], r + i, d, W, 1, width, half);
        return;
    }
    for (int i = 0; rows > 1 && i < rows; i++)
        if (b->begin_R[r + i] < begin) add_values(b, b->begin_R[r + i], begin, r + i, d, W, 1, width, half);
    add_values(b, begin, end, r, d, W, rows, width, half);
    for (int i = 0; rows > 1 && i < rows; i++)
        if (b->end_R[r + i] > end) add_values(b, end, b->end_R[r + i], r + i, d, W, 1, width, half);
}

/* Adds several vectors at once, so that adjacent memory is read together. */
INLINE void add_rows(const Block *b, i64 r, i64 W, const int rows, const int half) {
    const int widest = rows == 1 ? 8 : 4;
    i64 d = 0;
    if (widest >= 8)
        for (; d + 8 * LANES <= W; d += 8 * LANES) add_columns(b, r, d, W, rows, 8, half);
    if (widest >= 4)
        for (; d + 4 * LANES <= W; d += 4 * LANES) add_columns(b, r, d, W, rows, 4, half);
    for (; d + 2 * LANES <= W; d += 2 * LANES) add_columns(b, r, d, W, rows, 2, half);
    for (; d < W; d += LANES) add_columns(b, r, d, W, rows, 1, half);
}

INLINE void attend_chunk(const Attention *a, const Block *b, i64 R, i64 k, i64 first, i64 W, const int half) {
    i64 r = 0;
    for (; r + 4 <= R; r += 4) score_rows(a, b, r, W, 4, half);
    for (; r + 2 <= R; r += 2) score_rows(a, b, r, W, 2, half);
    for (; r < R; r++) score_rows(a, b, r, W, 1, half);
    for (r = 0; r < R; r++) {
        if (a->cap > 0 || a->bias_HP != NULL) adjust_scores(a, b, r, k * a->G + r % a->G, first);
        soften(b, r, W);
    }
    for (r = 0; r + 4 <= R; r += 4) add_rows(b, r, W, 4, half);
    for (; r + 2 <= R; r += 2) add_rows(b, r, W, 2, half);
    for (; r < R; r++) add_rows(b, r, W, 1, half);
}

/* Loads the rows' queries, padded with zeros to whole vectors, and resets the sums. */
static void begin_block(const Attention *a, const Block *b, const Task *task, i64 k, i64 W) {
    const i64 G = a->G, D = a->D, R = task->count * G, row = a->rows_S[task->sequence] + task->token;
    for (i64 r = 0; r < R; r++) {
        const float *q = a->q_T + (row + r / G) * a->q_stride + (k * G + r % G) * D;
        for (i64 d = 0; d < W; d += LANES) store(b->q_RW + r * W + d, load_some(q + d, D - d));
        b->greatest_R[r] = -3.0e38f, b->total_R[r] = 0;
    }
    memset(b->out_RW, 0, (size_t)(R * W) * sizeof(float));
}

static void end_block(const Attention *a, const Block *b, const Task *task, i64 k, i64 W) {
    const i64 G = a->G, D = a->D, R = task->count * G, row = a->rows_S[task->sequence] + task->token;
    for (i64 r = 0; r < R; r++) {
        float *out = a->out_T + (row + r / G) * a->out_stride + (k * G + r % G) * D;
        for (i64 d = 0; d < W; d += LANES) store_some(out + d, load(b->out_RW + r * W + d) / b->total_R[r], D - d);
    }
}

static void attend_block(const Attention *a, Block *b, const Task *task, i64 k, i64 W) {
    const i64 R = task->count * a->G, s = task->sequence, *table = a->tables_SB + s * a->B, item_bytes = a->half ? 2 : 4;
    const i64 position = a->length_S[s] - a->num_new_S[s] + task->token, end = position + task->count;
    const int copied = (task->count > 1 && R >= COPIED) || W > a->D;
    i64 lowest = a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
    begin_block(a, b, task, k, W);
    for (i64 first = lowest / CHUNK * CHUNK; first < end; first += CHUNK) {
        i64 count = end - first < CHUNK ? end - first : CHUNK;
        for (i64 r = 0; r < R; r++) {
            i64 own = position + r / a->G - first, begin = a->window > 0 ? own - a->window + 1 : 0;
            b->begin_R[r] = begin > 0 ? begin : 0, b->end_R[r] = own + 1 < CHUNK ? own + 1 : CHUNK;
        }
        find_keys(a, b, table, k, first, count, item_bytes);
        if (copied && a->half) copy_keys(a, b, count, W, 1);
        else if (copied) copy_keys(a, b, count, W, 0);
        else prefetch_keys(a, table, k, first + CHUNK, end, item_bytes);
        if (a->half && !copied) attend_chunk(a, b, R, k, first, W, 1);
        else attend_chunk(a, b, R, k, first, W, 0);
    }
    end_block(a, b, task, k, W);
}

/* Divides new tokens into blocks of at most `tokens`, those that see the most keys first. Returns the number of blocks. */
static i64 cut(const Attention *a, Task *tasks, i64 tokens) {
    i64 found = 0, blocks = 0;
    for (i64 s = 0; s < a->S; s++) blocks = a->num_new_S[s] > blocks * tokens ? (a->num_new_S[s] + tokens - 1) / tokens : blocks;
    for (i64 block = blocks - 1; block >= 0; block--)
        for (i64 s = 0; s < a->S; s++) {
            i64 left = a->num_new_S[s] - block * tokens;
            if (left <= 0) continue;
            if (tasks != NULL) tasks[found] = (Task){s, block * tokens, left < tokens ? left : tokens};
            found++;
        }
    return found;
}

/* Computes the attention of each sequence's new tokens to its keys, themselves included. Nonzero: no memory for the scores. */
int attend(const Attention *a) {
    const i64 W = (a->D + LANES - 1) / LANES * LANES, tokens = ROWS / a->G > 0 ? ROWS / a->G : 1;
    const i64 num_tasks = cut(a, NULL, tokens);
    i64 most = 0, work = 0, heads = num_tasks >= 2 * omp_get_max_threads() ? a->K : 1; /* per thread at once: adjacent in a slot */
    int failed = 0;
    Task *tasks = malloc((size_t)num_tasks * sizeof(Task));
    if (tasks == NULL) return num_tasks > 0;
    cut(a, tasks, tokens);
    for (i64 n = 0; n < num_tasks; n++) {
        most = tasks[n].count > most ? tasks[n].count : most;
        work += tasks[n].count * a->length_S[tasks[n].sequence] * a->C;
    }
#pragma omp parallel if (work >= PARALLEL)
    {
        char *memory = aligned_alloc(LINE, (size_t)block_bytes(most * a->G, W));
        Block block;
        if (memory == NULL) {
#pragma omp atomic write
            failed = 1;
        } else carve(&block, memory, most * a->G, W);
#pragma omp for collapse(2) schedule(dynamic, heads)
        for (i64 n = 0; n < num_tasks; n++)
            for (i64 k = 0; k < a->K; k++)
                if (memory != NULL) attend_block(a, &block, &tasks[n], k, W);
        free(memory);
    }
    free(tasks);
    return failed;
}
