/* What both kernels of attention are told.

   Strides and widths are in floats. Legend: T tokens, S sequences, K key-value heads, G query heads of a group, D head dimension,
   N slots of the cache, C columns of a slot, B blocks of the longest table. */

#ifndef RYZANSTEIN_ATTENTION_H
#define RYZANSTEIN_ATTENTION_H

#include "lanes.h"

typedef struct {
    const float *q_T;       /* queries of a token: H x D, `q_stride` apart */
    const char *pages_NC;   /* a slot: keys of K heads, and values of K heads from `values` on */
    const i64 *rows_S;      /* which token of the step is a sequence's first new one */
    const i64 *num_new_S;   /* new tokens of a sequence; NULL: one each */
    const i64 *tables_SB, *begin_S, *length_S; /* blocks; keys `begin` to `length` - 1 are seen */
    float *out_T;           /* as queries, `out_stride` apart */
    i64 q_stride, out_stride, C, values, B, block_size, S, K, G, D;
    i64 half;               /* whether slots hold float16 */
    i64 window;             /* how many keys a token sees at most, itself included; 0: all. Of several new tokens */
    float scale, cap;       /* scores: times scale, and where cap > 0 squeezed between -cap and cap */
} Attention;

/* A sequence's key at a position, of one head. */
INLINE const char *key_at(const Attention *a, const i64 *table, i64 k, i64 position, i64 item_bytes) {
    i64 slot = table[position / a->block_size] * a->block_size + position % a->block_size;
    return a->pages_NC + (slot * a->C + k * a->D) * item_bytes;
}

#endif
