/* Scores of rows with keys in cold pages (attention_pages.h), which are converted in registers: a page's scale multiplies its
   scores, or its weights.

   A score is one chain of fused products over the head dimension, in any tile and in registers of any width. */

#ifndef RYZANSTEIN_ATTENTION_COLD_H
#define RYZANSTEIN_ATTENTION_COLD_H

#include "attention_rows.h"

enum { PARTS = PAGE / LANES }; /* vectors of a page's keys */

INLINE const char *part_at(const Attention *a, i64 s, i64 k, i64 page) {
    i64 place = page - (a->cold_first_S == NULL ? 0 : a->cold_first_S[s]);
    return a->cold + (a->cold_tables_SB[s * a->cold_B + place] * a->K + k) * part_bytes(a->D, (int)a->key_kind);
}

/* Finds the pages that hold keys `from` to `to` - 1 of a chunk, and their values. */
static void find_pages(const Attention *a, Block *b, i64 s, i64 k, i64 first, i64 from, i64 to, i64 W) {
    const i64 row = value_row_bytes(a->D), values = part_values(a->D, (int)a->key_kind);
    for (i64 page = from / PAGE; page * PAGE < to; page++) {
        const char *part = part_at(a, s, k, first / PAGE + page);
        b->keys[page] = part + part_keys(a->D, (int)a->key_kind);
        if (a->key_kind == CHANNELS)
            for (i64 d = 0; d < W; d += LANES) store(b->channels_W + page * W + d, load_fp8(part + PART_HEAD + d));
        b->key_factor[page] = factor_of(part, (int)a->key_kind) * a->scale;
        b->value_factor[page] = factor_of(part + sizeof(float), (int)a->value_kind);
        for (i64 j = 0; j < PAGE; j++) b->values[page * PAGE + j] = part + values + j * row;
    }
}

INLINE void copy_items(const char *from, float *to, i64 count, const int kind) {
    for (i64 i = 0; i < count; i += LANES) store(to + i, load_item(from, i, kind));
}

/* Keys times the scales of their channels. */
static void copy_channels(const char *from, const float *scales, float *to, i64 D) {
    for (i64 d = 0; d < D; d++)
        for (i64 j = 0; j < PAGE; j += LANES) store(to + d * PAGE + j, load_item(from, d * PAGE + j, INT8) * all(scales[d]));
}

static void copy_kind(const char *from, float *to, i64 count, int kind) {
    switch (kind) {
    case HALF: copy_items(from, to, count, HALF); break;
    case FP8: copy_items(from, to, count, FP8); break;
    default: copy_items(from, to, count, INT8);
    }
}

/* Converts what `find_pages` has found to float32, once for many rows. */
static void copy_pages(const Attention *a, Block *b, i64 from, i64 to, i64 W) {
    for (i64 page = from / PAGE; page * PAGE < to; page++) {
        float *keys = b->keys_JW + page * PAGE * W;
        if (a->key_kind == CHANNELS) copy_channels(b->keys[page], b->channels_W + page * W, keys, a->D);
        else copy_kind(b->keys[page], keys, PAGE * a->D, (int)a->key_kind);
        b->keys[page] = (char *)keys;
    }
    for (i64 j = from / PAGE * PAGE; j < to; j++) {
        copy_kind(b->values[j], b->values_JW + j * W, W, (int)a->value_kind);
        b->values[j] = (char *)(b->values_JW + j * W);
    }
}

/* Computes the scores of `rows` rows from r on with the keys of `pages` pages: each key is loaded once. */
INLINE void score_pages(const Attention *a, const Block *b, i64 page, i64 r, i64 W, const int rows, const int pages,
                        const int kind) {
    const float *q = b->q_RW + r * W;
    Lanes sum[4][PAGES * PARTS];
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < pages * PARTS; n++) sum[i][n] = (Lanes){0};
    for (i64 d = 0; d < a->D; d++)
#pragma GCC unroll 16
        for (int n = 0; n < pages * PARTS; n++) {
            Lanes key = load_item(b->keys[page + n / PARTS], d * PAGE + n % PARTS * LANES, kind == CHANNELS ? INT8 : kind);
            if (kind == CHANNELS) key *= all(b->channels_W[(page + n / PARTS) * W + d]);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) sum[i][n] = fused(key, all(q[i * W + d]), sum[i][n]);
        }
    for (int i = 0; i < rows; i++)
        for (int n = 0; n < pages * PARTS; n++)
            store(b->scores_RJ + (r + i) * CHUNK + page * PAGE + n * LANES, sum[i][n] * b->key_factor[page + n / PARTS]);
}

INLINE void score_page_rows(const Attention *a, const Block *b, i64 r, i64 W, const int rows, const int kind) {
    const int most = LANES == 16 ? PAGES : PAGES / rows; /* as many sums as registers hold */
    i64 begin, end;
    union_of(b, r, rows, &begin, &end);
    i64 page = begin / PAGE, last = (end + PAGE - 1) / PAGE;
    if (most >= 4)
        for (; page + 4 <= last; page += 4) score_pages(a, b, page, r, W, rows, 4, kind);
    if (most >= 2)
        for (; page + 2 <= last; page += 2) score_pages(a, b, page, r, W, rows, 2, kind);
    for (; page < last; page++) score_pages(a, b, page, r, W, rows, 1, kind);
}

INLINE void score_kind(const Attention *a, const Block *b, i64 R, i64 W, const int kind) {
    i64 r = 0;
    for (; r + 4 <= R; r += 4) score_page_rows(a, b, r, W, 4, kind);
    for (; r + 2 <= R; r += 2) score_page_rows(a, b, r, W, 2, kind);
    for (; r < R; r++) score_page_rows(a, b, r, W, 1, kind);
}

static void score_cold(const Attention *a, const Block *b, i64 R, i64 W, int kind) {
    switch (kind) {
    case FLOAT: score_kind(a, b, R, W, FLOAT); break;
    case HALF: score_kind(a, b, R, W, HALF); break;
    case FP8: score_kind(a, b, R, W, FP8); break;
    case CHANNELS: score_kind(a, b, R, W, CHANNELS); break;
    default: score_kind(a, b, R, W, INT8);
    }
}

/* Multiplies a row's weights by the scales of the values. */
INLINE void scale_weights(const Block *b, i64 r) {
    float *weights = b->scores_RJ + r * CHUNK;
    for (i64 j = b->begin_R[r] / LANES * LANES; j < b->end_R[r]; j += LANES)
        store(weights + j, load(weights + j) * b->value_factor[j / PAGE]);
}

#endif
