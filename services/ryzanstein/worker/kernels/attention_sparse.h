/* Which pages a query reads of those before its window, in models that were not trained with one.

   Lasting pages: the first `sinks` pages and every one whose number `stride` divides. With `quest`: `sinks` pages, and so many of
   the others whose keys may have the greatest product with the query (Tang et al. 2024). A page's bound is the sum over the head
   dimension of the greater of query times least key and query times greatest key; equal bounds are taken in the order of pages,
   and a bound that is not a number counts as the greatest, so that it shows. Each query head chooses for itself: heads of a
   group may be on different ranks.

   All of it depends on the query's position and on the tokens before it alone. */

#ifndef RYZANSTEIN_ATTENTION_SPARSE_H
#define RYZANSTEIN_ATTENTION_SPARSE_H

#include "attention_rows.h"

INLINE i64 least_of(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 multiples_before(i64 number, i64 divisor) { return (number + divisor - 1) / divisor; }

/* Returns how many lasting pages there are before a page. */
INLINE i64 lasting_before(const Attention *a, i64 page) {
    i64 sinks = least_of(page, a->sinks);
    return a->stride > 0 ? sinks + multiples_before(page, a->stride) - multiples_before(sinks, a->stride) : sinks;
}

INLINE int lasts(const Attention *a, i64 page) { return page < a->sinks || (a->stride > 0 && page % a->stride == 0); }

/* Returns where a table has a page: lasting ones before its first page come first. */
INLINE i64 place_of(const Attention *a, i64 s, i64 page) {
    const i64 first = a->first_S == NULL ? 0 : a->first_S[s];
    if (!a->sparse) return page - first;
    return page < first ? lasting_before(a, page) : lasting_before(a, first) + page - first;
}

/* Returns the first position of the window of a query. With `quest` it is that of a page. */
INLINE i64 window_begin(const Attention *a, i64 position) {
    i64 begin = a->window > 0 && position >= a->window ? position - a->window + 1 : 0;
    return a->quest > 0 ? begin / a->block_size * a->block_size : begin;
}

/* Returns how many keys of lasting pages a query sees before its window. */
INLINE i64 lasting_keys(const Attention *a, i64 position) {
    const i64 begin = window_begin(a, position), page = begin / a->block_size;
    return lasting_before(a, page) * a->block_size + (lasts(a, page) ? begin % a->block_size : 0);
}

/* Lists the lasting pages that hold keys `begin` to `end` - 1 of all lasting ones, each in its place. */
static void list_lasting(const Attention *a, const Block *b, i64 begin, i64 end) {
    for (i64 n = begin / a->block_size; n * a->block_size < end; n++)
        b->lists_RP[n] = (int32_t)(n < a->sinks ? n : (multiples_before(a->sinks, a->stride) + n - a->sinks) * a->stride);
}

/* Returns whether a query reads fewer pages than there are. */
INLINE int chooses(const Attention *a, i64 position) {
    return a->quest > 0 && window_begin(a, position) / a->block_size - a->sinks > a->quest;
}

INLINE float bound_of(const float *q, const float *least, const float *greatest, i64 D) {
    Lanes sum = {0};
    for (i64 d = 0; d < D; d += LANES) {
        Lanes query = load(q + d), low = query * load_some(least + d, D - d), high = query * load_some(greatest + d, D - d);
        Words lower = low > high;
        sum += (Lanes)((lower & (Words)low) | (~lower & (Words)high));
    }
    float bound = sum_of(sum) + 0.0f;
    return bound == bound ? bound : INFINITY;
}

/* Computes the bounds of a page for the rows that may choose it: each page is loaded once. */
static void bound_page(const Attention *a, const Block *b, const Task *task, i64 k, i64 page, i64 position, i64 W, i64 apart) {
    const i64 Y = a->values, R = task->count * a->G; /* Y keys of all heads */
    const i64 block = a->tables_SB[task->sequence * a->B + place_of(a, task->sequence, page)];
    const float *least = a->bounds + block * 2 * Y + k * a->D, *greatest = least + Y;
    for (i64 r = 0; r < R; r++)
        if (page < window_begin(a, position + r / a->G) / a->block_size)
            b->bounds_RP[r * apart + page - a->sinks] = bound_of(b->q_RW + r * W, least, greatest, a->D);
}

/* Whole numbers in the order of floats. */
INLINE uint32_t order_of(float x) {
    Float found = {x};
    return found.bits >> 31 ? ~found.bits : found.bits | 0x80000000u;
}

/* Returns the `num`-th greatest of `count` numbers, and how many equal ones are among the `num` greatest: byte by byte, in a time
   that does not depend on the numbers. */
static uint32_t nth_greatest(const float *numbers, i64 count, i64 num, i64 *equal) {
    uint32_t found = 0, known = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        i64 counts[256] = {0};
        for (i64 i = 0; i < count; i++) {
            uint32_t order = order_of(numbers[i]);
            if ((order & known) == found) counts[order >> shift & 255]++;
        }
        int byte = 255;
        for (; counts[byte] < num; byte--) num -= counts[byte];
        found |= (uint32_t)byte << shift, known |= 255u << shift;
    }
    *equal = num;
    return found;
}

/* Returns how many keys are in the pages that a row reads, up to its position. */
static i64 listed_keys(const Attention *a, i64 position) {
    const i64 last = window_begin(a, position) / a->block_size, first = least_of(a->sinks, last);
    const i64 left_out = last - first > a->quest ? last - first - a->quest : 0;
    return position + 1 - left_out * a->block_size;
}

/* Lists the pages that a row reads, ascending, up to that of its position. */
static void list_chosen(const Attention *a, int32_t *pages, const float *bounds, i64 position) {
    const i64 last = window_begin(a, position) / a->block_size, first = least_of(a->sinks, last);
    i64 n = 0, equal = 0;
    for (i64 page = 0; page < first; page++) pages[n++] = (int32_t)page;
    if (last - first > a->quest) {
        const uint32_t threshold = nth_greatest(bounds, last - first, a->quest, &equal);
        for (i64 page = first; page < last; page++) {
            uint32_t order = order_of(bounds[page - first]);
            if (order > threshold || (order == threshold && equal-- > 0)) pages[n++] = (int32_t)page;
        }
    } else
        for (i64 page = first; page < last; page++) pages[n++] = (int32_t)page;
    for (i64 page = last; page <= position / a->block_size; page++) pages[n++] = (int32_t)page;
}

#endif
