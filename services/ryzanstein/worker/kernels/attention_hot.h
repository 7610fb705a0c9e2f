/* Scores of rows with keys in hot slots, side by side with the other heads' keys and values.

   A score is summed in each lane, then over the lanes. */

#ifndef RYZANSTEIN_ATTENTION_HOT_H
#define RYZANSTEIN_ATTENTION_HOT_H

#include "attention_sparse.h"

enum { LINE = 64 };            /* bytes of a cache line */

/* Returns a head's key at a position of sequence s, counted in the listed pages. */
INLINE const char *key_at(const Attention *a, const Block *b, i64 s, i64 k, i64 position, i64 item_bytes) {
    i64 page = b->listed == NULL ? position / a->block_size : b->listed[position / a->block_size];
    i64 slot = a->tables_SB[s * a->B + place_of(a, s, page)] * a->block_size + position % a->block_size;
    return a->pages_NC + (slot * a->C + k * a->D) * item_bytes;
}

/* The first and the last key are repeated to fill whole vectors. */
INLINE void fill_vectors(Block *b, i64 from, i64 count) {
    for (i64 j = from / LANES * LANES; j < from; j++) b->keys[j] = b->keys[from];
    for (i64 j = count; j % LANES; j++) b->keys[j] = b->keys[count - 1];
}

/* Finds the addresses of keys and values `from` to `count` - 1 of a chunk. */
static void find_keys(const Attention *a, Block *b, i64 s, i64 k, i64 first, i64 from, i64 count, i64 item_bytes) {
    i64 slot_bytes = a->C * item_bytes;
    for (i64 j = from; j < count;) {
        const char *key = key_at(a, b, s, k, first + j, item_bytes);
        for (i64 offset = (first + j) % a->block_size; offset < a->block_size && j < count; offset++, key += slot_bytes)
            b->keys[j++] = key;
    }
    for (i64 j = from; j < count; j++) b->values[j] = b->keys[j] + a->values * item_bytes;
    fill_vectors(b, from, count);
}

/* Prefetches the keys and values of the next chunk. A small head reads so little of a slot that the CPU does not predict the next
   address; for a large one it does. */
static void prefetch_keys(const Attention *a, const Block *b, i64 s, i64 k, i64 first, i64 end, i64 item_bytes) {
    i64 bytes = a->D * item_bytes;
    if (bytes > 4 * LINE) return;
    for (i64 j = first; j < end && j < first + CHUNK; j++) {
        const char *key = key_at(a, b, s, k, j, item_bytes), *value = key + a->values * item_bytes;
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

/* Copies a head's numbers as float32, padded with zeros. */
INLINE void copy_head(float *to, const char *from, i64 D, i64 W, const int half) {
    i64 d = 0;
    for (; d + LANES <= D; d += LANES) store(to + d, load_cached(from, d, half));
    for (; d < W; d += LANES) store(to + d, load_part(from, d, D, half));
}

/* Copies what `find_keys` has found, as float32, padded with zeros to whole vectors. */
INLINE void copy_keys(const Attention *a, Block *b, i64 from, i64 count, i64 W, const int half) {
    for (i64 j = from; j < count; j++) {
        const char *key = b->keys[j], *value = b->values[j];
        copy_head(b->keys_JW + j * W, key, a->D, W, half);
        b->keys[j] = b->values[j] = (char *)(b->keys_JW + j * W);
        if (value == key) continue; /* a latent is both key and value */
        copy_head(b->values_JW + j * W, value, a->D, W, half);
        b->values[j] = (char *)(b->values_JW + j * W);
    }
    fill_vectors(b, from, count);
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

INLINE void score_rows(const Attention *a, const Block *b, i64 r, i64 W, const int rows, const int half) {
    i64 begin, end, keys = LANES / rows;
    union_of(b, r, rows, &begin, &end);
    for (i64 j = begin / keys * keys; j < end; j += keys) score_tile(a, b, j, r, W, rows, half);
}

INLINE void score_hot(const Attention *a, const Block *b, i64 R, i64 W, const int half) {
    i64 r = 0;
    for (; r + 4 <= R; r += 4) score_rows(a, b, r, W, 4, half);
    for (; r + 2 <= R; r += 2) score_rows(a, b, r, W, 2, half);
    for (; r < R; r++) score_rows(a, b, r, W, 1, half);
}

#endif
