/* A row's keys are divided into parts, so that several threads can read one sequence (flash-decoding; Dao et al. 2023).

   A part is PART keys from a multiple of PART on: positions or, where pages are listed, places in the list. It is summed from
   nothing, and the sums of parts are merged in their order. Which parts a row has depends on its position alone, and not on who
   sums them: by one thread, each as soon as it is there, or by several that put theirs where one finds them all (Share). The sums
   of a row with one part are those of the part. */

#ifndef RYZANSTEIN_ATTENTION_PARTS_H
#define RYZANSTEIN_ATTENTION_PARTS_H

#include "attention_sparse.h"

enum { PART = 4 * CHUNK };
#define NOTHING -3.0e38f /* the greatest score of no keys */

/* The positions of keys that a query sees: `begin` to `end` - 1, those before `cold` in cold pages. */
typedef struct {
    i64 begin, cold, end;
} Extent;

static Extent extent_of(const Attention *a, i64 s, i64 position) {
    i64 begin = a->quest > 0 ? 0 : window_begin(a, position), end = position + 1;
    i64 cold = a->cold != NULL && position + 1 >= a->hot + PAGE ? (position + 1 - a->hot) / PAGE * PAGE : 0;
    if (a->begin_S != NULL && a->begin_S[s] > begin) begin = a->begin_S[s];
    if (a->end_S != NULL && a->end_S[s] < end) end = a->end_S[s];
    return (Extent){begin, cold, end};
}

INLINE i64 position_of(const Attention *a, const Task *task) {
    return a->length_S[task->sequence] - a->num_new_S[task->sequence] + task->token;
}

INLINE int task_chooses(const Attention *a, const Task *task) { return chooses(a, position_of(a, task) + task->count - 1); }

INLINE i64 parts_of(i64 keys) { return (keys + PART - 1) / PART; }

/* Returns the number of parts of lasting pages. They come before the others. */
INLINE i64 lasting_parts(const Attention *a, const Task *task) {
    return a->sparse && a->quest == 0 ? parts_of(lasting_keys(a, position_of(a, task) + task->count - 1)) : 0;
}

static i64 chosen_parts(const Attention *a, i64 position, i64 last) {
    i64 most = 0;
    for (; position <= last; position++) most = listed_keys(a, position) > most ? listed_keys(a, position) : most;
    return parts_of(most);
}

/* Returns the number of parts that any row of a task has. Some may have no key of the others. */
static i64 num_parts(const Attention *a, const Task *task) {
    const i64 position = position_of(a, task), last = position + task->count - 1;
    if (task_chooses(a, task)) return chosen_parts(a, position, last);
    const i64 begin = extent_of(a, task->sequence, position).begin, end = extent_of(a, task->sequence, last).end;
    return lasting_parts(a, task) + (begin < end ? parts_of(end) - begin / PART : 0);
}

/* Returns the sums of so many rows later. */
INLINE Sums sums_after(Sums s, i64 rows, i64 W) { return (Sums){s.out_RW + rows * W, s.greatest_R + rows, s.total_R + rows}; }

static void clear_sums(Sums s, i64 R, i64 W) {
    for (i64 r = 0; r < R; r++) s.greatest_R[r] = NOTHING, s.total_R[r] = 0;
    memset(s.out_RW, 0, (size_t)(R * W) * sizeof(float));
}

INLINE int is_nothing(Sums s, i64 r) { return s.greatest_R[r] == NOTHING && s.total_R[r] == 0; }

/* Adds a row's sums over the next part to those over the parts before it. */
static void merge_row(Sums into, Sums part, i64 r, i64 W) {
    float *out = into.out_RW + r * W, *more = part.out_RW + r * W;
    if (is_nothing(part, r)) return;
    if (is_nothing(into, r)) {
        into.greatest_R[r] = part.greatest_R[r], into.total_R[r] = part.total_R[r];
        memcpy(out, more, (size_t)W * sizeof(float));
        return;
    }
    const float before = into.greatest_R[r], after = part.greatest_R[r], peak = after > before ? after : before;
    const float kept = exponential(before - peak), added = exponential(after - peak);
    into.greatest_R[r] = peak;
    into.total_R[r] = fused_one(part.total_R[r], added, into.total_R[r] * kept);
    for (i64 d = 0; d < W; d += LANES) store(out + d, fused(load(more + d), all(added), load(out + d) * kept));
}

/* What several threads compute of one head of a task: the sums of all parts, part by part; of queries that choose their pages
   the bounds and the lists. */
typedef struct {
    const Task *task;
    i64 k;
    Sums parts;
    int32_t *lists_RP;
    float *bounds_RP;
} Share;

#endif
