/* Attention of new tokens over keys and values in pages, for float32 on CPUs; hot pages may be float16, cold ones are in 8 bits.

   torch's kernels would have to gather the pages first. Queries are processed in blocks of rows, keys in chunks; weights are
   relative to the greatest score so far (Milakov and Gimelshein 2018; Dao et al. 2022).

   A row is one query of one head. Its result is one sequence of operations that depends only on its position: its keys are
   divided into parts (attention_parts.h), chunks begin at multiples of their size, within a chunk cold keys come before hot
   ones, each from the first to the last that the row sees. Which are cold depends on the position too: a query at position p
   sees page j cold if p - (16 j + 15) >= `hot`. What is computed beside it (other sequences, other new tokens of its own
   sequence, however a prompt is divided) decides only which registers hold it, whether values are converted once for many rows,
   and which thread sums a part. NaN and infinity are propagated; a row never reads a hot value that it does not see, nor a cold
   page of which it sees nothing.

   Sparse rows first read lasting pages in the order of their list, in chunks of it, then their window; rows that choose their pages
   read the chosen ones and the window as one list. Where everything is read, the operations are those of a row that is not sparse.

   Strides and widths are in floats. Legend: T tokens, S sequences, K key-value heads, G query heads of a group, D head
   dimension, W the same rounded up to whole vectors, N slots of the cache, C columns of a slot, B blocks of the longest table,
   P positions of a bias, R rows of a block of queries: tokens times heads of the group; J keys of a chunk. */

#include <omp.h>

#include "attention_cold.h"
#include "attention_parts.h"
#include "attention_tiles.h"

enum { ROWS = 128 };            /* of a block, as far as a token's heads allow */
enum { FEW = 32 };             /* rows whose scores, queries and sums leave room in the L1 cache */
enum { TRANSPOSED = 16 };      /* rows of several tokens from which copying a chunk pays off */
enum { CONVERTED = 16 };       /* rows from which converting a cold chunk once pays off */
enum { PARALLEL = 16 * 1024 }; /* floats from which threads pay for their start */
enum { ROOM = 16 << 20 };      /* bytes of sums that a call's threads share, at most */
enum { BOUNDED = 64 };         /* pages whose bounds a thread computes at once */

static i64 sums_bytes(i64 R, i64 W) { return R * (W + 2) * (i64)sizeof(float); }
static i64 lists_bytes(const Attention *a, i64 R, i64 pages) { return a->quest > 0 ? R * pages * 8 : a->sparse ? pages * 4 : 0; }
static i64 lines(i64 bytes) { return (bytes + LINE - 1) / LINE * LINE; }

static i64 block_bytes(const Attention *a, i64 R, i64 W, i64 pages) {
    const i64 floats = R * (W + CHUNK) + (2 * CHUNK + PAGES) * W;
    return lines(floats * (i64)sizeof(float) + 2 * sums_bytes(R, W) + 2 * R * (i64)sizeof(i64) + lists_bytes(a, R, pages));
}

/* Arrays that are read in vectors come first, so that no vector crosses a cache line. */
static void carve(const Attention *a, Block *b, char *memory, i64 R, i64 W, i64 pages) {
    b->keys_JW = (float *)memory;
    b->values_JW = b->keys_JW + CHUNK * W;
    b->channels_W = b->values_JW + CHUNK * W;
    b->q_RW = b->channels_W + PAGES * W;
    b->part.out_RW = b->q_RW + R * W, b->whole.out_RW = b->part.out_RW + R * W;
    b->scores_RJ = b->whole.out_RW + R * W;
    b->begin_R = (i64 *)(b->scores_RJ + R * CHUNK), b->end_R = b->begin_R + R;
    b->part.greatest_R = (float *)(b->end_R + R), b->part.total_R = b->part.greatest_R + R;
    b->whole.greatest_R = b->part.total_R + R, b->whole.total_R = b->whole.greatest_R + R;
    b->bounds_RP = b->whole.total_R + R;
    b->lists_RP = (int32_t *)(b->bounds_RP + (a->quest > 0 ? R * pages : 0));
    b->listed = NULL;
}

INLINE i64 within(i64 position, i64 first) {
    i64 j = position - first;
    return j < 0 ? 0 : j > CHUNK ? CHUNK : j;
}

/* Finds which keys of the chunk a position sees in cold pages, or in hot ones. */
static void range_of(const Attention *a, i64 s, i64 position, i64 first, int cold, i64 *begin, i64 *end) {
    const Extent seen = extent_of(a, s, position);
    const i64 border = within(seen.cold, first);
    *begin = within(seen.begin, first), *end = within(seen.end, first);
    if (cold) *end = *end < border ? *end : border;
    else *begin = *begin > border ? *begin : border;
}

/* Sets them for each row. Returns whether any row sees any, and which. Neither end decreases from one position to the next, so
   what is equal for the first and the last is equal for all. */
static int set_ranges(const Attention *a, const Block *b, const Task *task, i64 position, i64 first, int cold, i64 *from, i64 *to) {
    const i64 R = task->count * a->G, last = position + task->count - 1;
    i64 begin, end, last_begin, last_end;
    range_of(a, task->sequence, position, first, cold, &begin, &end);
    range_of(a, task->sequence, last, first, cold, &last_begin, &last_end);
    const int same = begin == last_begin && end == last_end;
    for (i64 r = 0; r < R; r++) {
        if (!same && r % a->G == 0) range_of(a, task->sequence, position + r / a->G, first, cold, &begin, &end);
        b->begin_R[r] = begin, b->end_R[r] = end;
    }
    union_of(b, 0, R, from, to);
    return *from < *to;
}

/* The same for keys of lasting pages. */
static int set_lasting(const Attention *a, const Block *b, const Task *task, i64 position, i64 first, i64 *from, i64 *to) {
    const i64 R = task->count * a->G;
    for (i64 r = 0; r < R; r++) b->begin_R[r] = 0, b->end_R[r] = within(lasting_keys(a, position + r / a->G), first);
    union_of(b, 0, R, from, to);
    return *from < *to;
}

/* Loads the rows' queries, padded with zeros to whole vectors. */
static void load_queries(const Attention *a, const Block *b, const Task *task, i64 k, i64 W) {
    const i64 G = a->G, D = a->D, R = task->count * G, row = a->rows_S[task->sequence] + task->token;
    for (i64 r = 0; r < R; r++) {
        const float *q = a->q_T + (row + r / G) * a->q_stride + (k * G + r % G) * D;
        for (i64 d = 0; d < W; d += LANES) store(b->q_RW + r * W + d, load_some(q + d, D - d));
    }
}

/* Adds the head's sink to a row's sums: the sink has a score and no value. */
static void add_sink(float sink, i64 r, Sums whole, i64 W) {
    const float before = whole.greatest_R[r], peak = sink > before ? sink : before, kept = exponential(before - peak);
    whole.total_R[r] = fused_one(whole.total_R[r], kept, exponential(sink - peak));
    whole.greatest_R[r] = peak;
    for (i64 d = 0; d < W; d += LANES) store(whole.out_RW + r * W + d, load(whole.out_RW + r * W + d) * kept);
}

/* Writes the answer of a row. One that sees no key has the answer 0. */
static void end_row(const Attention *a, const Task *task, i64 k, i64 r, Sums whole, i64 W) {
    const i64 G = a->G, D = a->D, row = a->rows_S[task->sequence] + task->token + r / G, head = k * G + r % G;
    const Extent seen = extent_of(a, task->sequence, position_of(a, task) + r / G);
    float *out = a->out_T + row * a->out_stride + head * D;
    if (a->sink_H != NULL && seen.begin < seen.end) add_sink(a->sink_H[head], r, whole, W);
    const float total = seen.begin < seen.end ? whole.total_R[r] : 1.0f;
    for (i64 d = 0; d < W; d += LANES) store_some(out + d, load(whole.out_RW + r * W + d) / total, D - d);
    if (a->lse_TH != NULL)
        a->lse_TH[row * a->K * G + head] = seen.begin < seen.end ? whole.greatest_R[r] + logf(total) : -INFINITY;
}

/* Scores of rows r to R - 1 become weights. */
static void soften_chunk(const Attention *a, const Block *b, i64 r, i64 R, i64 k, i64 first, i64 W) {
    for (i64 n = r; n < R && (a->cap > 0 || a->bias_HP != NULL); n++) adjust_scores(a, b, n, k * a->G + n % a->G, first);
    while (r < R) {
        int whole = 1, some = r + LANES <= R;
        for (i64 n = r; some && n < r + LANES; n++)
            whole &= b->begin_R[n] == 0 && b->end_R[n] == CHUNK, some &= b->end_R[n] > b->begin_R[n];
        if (!some) soften(b, r++, W);
        else if (whole) soften_lanes(b, r, W, 1), r += LANES;
        else soften_lanes(b, r, W, 0), r += LANES;
    }
}

/* Many rows: a few after the others, whose scores and sums stay in the L1 cache beside the keys and values, which are copied there. */
static void attend_many(const Attention *a, Block *b, i64 R, i64 k, i64 first, i64 from, i64 to, i64 W) {
    copy_tiles(a, b, from, to, W, a->half != 0);
    for (i64 r = 0, end; r < R; r = end) {
        end = least_of(r + FEW, R);
        score_tiles(a, b, r, end, W);
        soften_chunk(a, b, r, end, k, first, W);
        add_chunk(b, r, end, W, FLOAT);
    }
}

/* `R` rows of a task; `last` is the position after the last key that will be read, to which the next ones are prefetched. */
static void attend_hot(const Attention *a, Block *b, const Task *task, i64 R, i64 k, i64 first, i64 from, i64 to, i64 last, i64 W) {
    const i64 s = task->sequence, item_bytes = a->half ? 2 : 4;
    const int copied = W > a->D, half = a->half && !copied;
    find_keys(a, b, s, k, first, from, to, item_bytes);
    prefetch_keys(a, b, s, k, first + CHUNK, last, item_bytes);
    if (task->count > 1 && R >= TRANSPOSED) {
        attend_many(a, b, R, k, first, from, to, W);
        return;
    }
    if (copied) copy_keys(a, b, from, to, W, a->half != 0);
    if (half) score_hot(a, b, R, W, 1);
    else score_hot(a, b, R, W, 0);
    soften_chunk(a, b, 0, R, k, first, W);
    add_chunk(b, 0, R, W, half ? HALF : FLOAT);
}

static void attend_cold(const Attention *a, Block *b, const Task *task, i64 k, i64 first, i64 from, i64 to, i64 W) {
    const i64 R = task->count * a->G;
    const int converted = R >= CONVERTED;
    find_pages(a, b, task->sequence, k, first, from, to, W);
    if (converted) copy_pages(a, b, from, to, W);
    score_cold(a, b, R, W, converted ? FLOAT : (int)a->key_kind);
    soften_chunk(a, b, 0, R, k, first, W);
    for (i64 r = 0; r < R; r++) scale_weights(b, r);
    add_chunk(b, 0, R, W, converted ? FLOAT : (int)a->value_kind);
}

/* Computes the bounds of pages `begin` to `end` - 1 for rows that choose. */
static void bound_pages(const Attention *a, const Block *b, const Task *task, i64 k, i64 begin, i64 end, i64 pages, i64 W) {
    const i64 position = position_of(a, task), last = window_begin(a, position + task->count - 1) / a->block_size;
    for (i64 page = begin > a->sinks ? begin : a->sinks; page < least_of(end, last); page++)
        bound_page(a, b, task, k, page, position, W, pages);
}

static void list_row(const Attention *a, const Task *task, int32_t *lists_RP, const float *bounds_RP, i64 r, i64 pages) {
    list_chosen(a, lists_RP + r * pages, bounds_RP + r * pages, position_of(a, task) + r / a->G);
}

/* A part of rows that do not see the same pages: one after the other, each over its list. */
static void attend_chosen(const Attention *a, const Block *b, const Task *task, i64 k, i64 part, i64 pages, i64 W) {
    for (i64 r = 0; r < task->count * a->G; r++) {
        const Task own = {task->sequence, task->token + r / a->G, 1, 0};
        const i64 keys = listed_keys(a, position_of(a, &own)), end = least_of(keys, (part + 1) * PART);
        Block row = *b;
        row.q_RW += r * W, row.part = sums_after(b->part, r, W), row.listed = b->lists_RP + r * pages;
        for (i64 first = part * PART; first < end; first += CHUNK) {
            row.begin_R[0] = 0, row.end_R[0] = within(keys, first);
            attend_hot(a, &row, &own, 1, k, first, 0, row.end_R[0], keys, W);
        }
    }
}

static void attend_lasting(const Attention *a, Block *b, const Task *task, i64 k, i64 part, i64 W) {
    const i64 keys = lasting_keys(a, position_of(a, task) + task->count - 1), end = least_of(keys, (part + 1) * PART);
    const i64 next = least_of(keys, end + CHUNK); /* is prefetched */
    i64 from, to;
    list_lasting(a, b, part * PART, next);
    b->listed = b->lists_RP;
    for (i64 first = part * PART; first < end; first += CHUNK)
        if (set_lasting(a, b, task, position_of(a, task), first, &from, &to))
            attend_hot(a, b, task, task->count * a->G, k, first, from, to, next, W);
    b->listed = NULL;
}

/* The part of positions from part * PART on. */
static void attend_positions(const Attention *a, Block *b, const Task *task, i64 k, i64 part, i64 W) {
    const i64 position = position_of(a, task), last = position + task->count;
    const Extent lowest = extent_of(a, task->sequence, position), greatest = extent_of(a, task->sequence, last - 1);
    const i64 begin = lowest.begin > part * PART ? lowest.begin / CHUNK * CHUNK : part * PART;
    const i64 end = least_of(greatest.end, (part + 1) * PART);
    i64 from, to;
    for (i64 first = begin; first < end; first += CHUNK) {
        if (greatest.cold > first && set_ranges(a, b, task, position, first, 1, &from, &to))
            attend_cold(a, b, task, k, first, from, to, W);
        if (lowest.cold < first + CHUNK && set_ranges(a, b, task, position, first, 0, &from, &to))
            attend_hot(a, b, task, task->count * a->G, k, first, from, to, last, W);
    }
}

/* Sums up one part of a task's rows, whose queries are loaded and whose pages are listed. */
static void attend_part(const Attention *a, Block *b, const Task *task, i64 k, i64 part, i64 pages, i64 W) {
    const i64 position = position_of(a, task), lasting = lasting_parts(a, task);
    clear_sums(b->part, task->count * a->G, W);
    if (task_chooses(a, task)) attend_chosen(a, b, task, k, part, pages, W);
    else if (part < lasting) attend_lasting(a, b, task, k, part, W);
    else attend_positions(a, b, task, k, extent_of(a, task->sequence, position).begin / PART + part - lasting, W);
}

/* A task of one thread. */
static void attend_whole(const Attention *a, Block *b, const Task *task, i64 k, i64 pages, i64 W) {
    const i64 R = task->count * a->G;
    load_queries(a, b, task, k, W);
    if (task_chooses(a, task)) {
        bound_pages(a, b, task, k, 0, pages, pages, W);
        for (i64 r = 0; r < R; r++) list_row(a, task, b->lists_RP, b->bounds_RP, r, pages);
    }
    if (task->parts != 1) clear_sums(b->whole, R, W);
    for (i64 part = 0; part < task->parts; part++) {
        attend_part(a, b, task, k, part, pages, W);
        for (i64 r = 0; task->parts > 1 && r < R; r++) merge_row(b->whole, b->part, r, W);
    }
    for (i64 r = 0; r < R; r++) end_row(a, task, k, r, task->parts == 1 ? b->part : b->whole, W);
}

/* Parts `begin` to `end` - 1 of a task of several threads. */
static void attend_share(const Attention *a, const Block *b, const Share *share, i64 begin, i64 end, i64 pages, i64 W) {
    const i64 R = share->task->count * a->G;
    Block own = *b;
    own.lists_RP = share->lists_RP == NULL ? b->lists_RP : share->lists_RP;
    end = least_of(end, share->task->parts);
    if (begin < end) load_queries(a, b, share->task, share->k, W);
    for (i64 part = begin; part < end; part++) {
        own.part = sums_after(share->parts, part * R, W);
        attend_part(a, &own, share->task, share->k, part, pages, W);
    }
}

/* Bounds of pages from `begin` on, of a task of several threads. */
static void bound_share(const Attention *a, const Block *b, const Share *share, i64 begin, i64 pages, i64 W) {
    Block own = *b;
    if (!task_chooses(a, share->task)) return;
    own.bounds_RP = share->bounds_RP;
    load_queries(a, b, share->task, share->k, W);
    bound_pages(a, &own, share->task, share->k, begin, begin + BOUNDED, pages, W);
}

static void list_share(const Attention *a, const Share *share, i64 r, i64 pages) {
    if (r < share->task->count * a->G && task_chooses(a, share->task))
        list_row(a, share->task, share->lists_RP, share->bounds_RP, r, pages);
}

/* Merges the parts of a row. */
static void end_share(const Attention *a, const Share *share, i64 r, i64 W) {
    const i64 R = share->task->count * a->G;
    if (r >= R) return;
    for (i64 part = 1; part < share->task->parts; part++) merge_row(share->parts, sums_after(share->parts, part * R, W), r, W);
    end_row(a, share->task, share->k, r, share->parts, W);
}

/* Divides new tokens into blocks of at most `tokens`, those that see the most keys first. Returns the number of blocks. */
static i64 cut(const Attention *a, Task *tasks, i64 tokens) {
    i64 found = 0, blocks = 0;
    for (i64 s = 0; s < a->S; s++) blocks = a->num_new_S[s] > blocks * tokens ? (a->num_new_S[s] + tokens - 1) / tokens : blocks;
    for (i64 block = blocks - 1; block >= 0; block--)
        for (i64 s = 0; s < a->S; s++) {
            i64 left = a->num_new_S[s] - block * tokens;
            if (left <= 0) continue;
            if (tasks != NULL) {
                tasks[found] = (Task){s, block * tokens, left < tokens ? left : tokens, 0};
                tasks[found].parts = num_parts(a, &tasks[found]);
            }
            found++;
        }
    return found;
}

/* What a call computes, and its sizes. */
struct Call {
    Task *tasks;                             /* those of several threads first */
    Share *shares;                           /* of each head of those */
    i64 num_tasks, num_shared, R, W, pages;  /* R: rows of the largest task */
    i64 num_runs, run;                       /* parts that a thread sums at once */
    i64 shared_bytes, block_bytes;           /* of the shares, and of a thread's block */
    char *blocks;
};

static i64 share_bytes(const Attention *a, const Task *task, i64 W, i64 pages) {
    const i64 R = task->count * a->G;
    return lines(sums_bytes(task->parts * R, W) + (a->quest > 0 ? lists_bytes(a, R, pages) : 0));
}

static void open_share(const Attention *a, Share *share, char *memory, i64 W, i64 pages) {
    const i64 rows = share->task->parts * share->task->count * a->G;
    float *sums = (float *)memory, *after = sums + rows * (W + 2);
    share->parts = (Sums){sums, sums + rows * W, sums + rows * (W + 1)};
    if (a->quest == 0) return;
    share->bounds_RP = after;
    share->lists_RP = (int32_t *)(after + share->task->count * a->G * pages);
}

/* Moves tasks that would keep one thread busy while others wait to the front, as far as there is room. Returns the bytes of their
   shares. */
static i64 choose_shared(const Attention *a, Call *call, i64 threads) {
    i64 total = 0, bytes = 0, parts = 0;
    for (i64 n = 0; n < call->num_tasks; n++) total += call->tasks[n].parts * call->tasks[n].count;
    for (i64 n = 0; n < call->num_tasks && threads > 1; n++) {
        const Task task = call->tasks[n];
        const i64 more = a->K * share_bytes(a, &task, call->W, call->pages);
        if (task.parts < 2 || 4 * threads * task.parts * task.count <= total * a->K || bytes + more > ROOM) continue;
        memmove(call->tasks + call->num_shared + 1, call->tasks + call->num_shared, (size_t)(n - call->num_shared) * sizeof(Task));
        call->tasks[call->num_shared++] = task;
        bytes += more, parts += task.parts;
    }
    call->run = parts * a->K / (8 * threads);
    call->run = call->run < 1 ? 1 : call->run > 4 ? 4 : call->run;
    return bytes;
}

static void open_shares(const Attention *a, Call *call, char *memory) {
    call->num_runs = 0;
    for (i64 n = 0; n < call->num_shared * a->K; n++) {
        Share *share = call->shares + n;
        *share = (Share){.task = call->tasks + n / a->K, .k = n % a->K};
        open_share(a, share, memory, call->W, call->pages);
        memory += share_bytes(a, share->task, call->W, call->pages);
        const i64 runs = (share->task->parts + call->run - 1) / call->run;
        call->num_runs = runs > call->num_runs ? runs : call->num_runs;
    }
}

/* What every thread of a team runs. Heads of a slot are adjacent: where there is enough to do, a thread reads them all. */
void attend_team(const Attention *a, const Call *call) {
    const i64 K = a->K, pages = call->pages, W = call->W, threads = omp_get_num_threads();
    Block own, *block = &own;
    carve(a, block, call->blocks + omp_get_thread_num() * call->block_bytes, call->R, W, pages);
    const i64 heads = call->num_tasks >= 2 * threads ? K : 1;
    const i64 shared_heads = call->num_shared * call->num_runs >= 4 * threads ? K : 1;
    if (a->quest > 0 && call->num_shared > 0) {
#pragma omp for collapse(2) schedule(dynamic)
        for (i64 n = 0; n < call->num_shared * K; n++)
            for (i64 page = 0; page < pages; page += BOUNDED)
                bound_share(a, block, &call->shares[n], page, pages, W);
#pragma omp for collapse(2)
        for (i64 n = 0; n < call->num_shared * K; n++)
            for (i64 r = 0; r < call->R; r++) list_share(a, &call->shares[n], r, pages);
    }
#pragma omp for collapse(3) schedule(dynamic, shared_heads) nowait
    for (i64 n = 0; n < call->num_shared; n++)
        for (i64 run = 0; run < call->num_runs; run++)
            for (i64 k = 0; k < K; k++)
                attend_share(a, block, &call->shares[n * K + k], run * call->run, (run + 1) * call->run, pages, W);
#pragma omp for collapse(2) schedule(dynamic, heads)
    for (i64 n = call->num_shared; n < call->num_tasks; n++)
        for (i64 k = 0; k < K; k++) attend_whole(a, block, &call->tasks[n], k, pages, W);
    if (call->num_shared == 0) return;
#pragma omp for collapse(2)
    for (i64 n = 0; n < call->num_shared * K; n++)
        for (i64 r = 0; r < call->R; r++) end_share(a, &call->shares[n], r, W);
}

static i64 tokens_of(const Attention *a) { return ROWS / a->G > 0 ? ROWS / a->G : 1; }

static i64 call_bytes(void) { return lines((i64)sizeof(Call)); }
static i64 tasks_bytes(i64 tasks) { return lines(tasks * (i64)sizeof(Task)); }

i64 attend_tasks_bytes(const Attention *a) {
    const i64 tasks = cut(a, NULL, tokens_of(a));
    return call_bytes() + tasks_bytes(tasks) + lines(tasks * a->K * (i64)sizeof(Share));
}

Call *attend_divide(const Attention *a, char *memory, i64 threads) {
    Call *call = (Call *)memory;
    *call = (Call){.W = (a->D + LANES - 1) / LANES * LANES, .tasks = (Task *)(memory + call_bytes())};
    call->num_tasks = cut(a, call->tasks, tokens_of(a));
    call->shares = (Share *)((char *)call->tasks + tasks_bytes(call->num_tasks));
    i64 longest = 0;
    for (i64 n = 0; n < call->num_tasks; n++) {
        const Task *task = &call->tasks[n];
        call->R = task->count * a->G > call->R ? task->count * a->G : call->R;
        longest = a->length_S[task->sequence] > longest ? a->length_S[task->sequence] : longest;
    }
    call->pages = longest / a->block_size + 1;
    call->shared_bytes = choose_shared(a, call, threads);
    call->block_bytes = block_bytes(a, call->R, call->W, call->pages);
    return call;
}

i64 attend_work_bytes(const Call *call, i64 threads) { return call->shared_bytes + threads * call->block_bytes; }

void attend_open(const Attention *a, Call *call, char *work) {
    call->blocks = work + call->shared_bytes;
    open_shares(a, call, work);
}

/* Returns the floats of keys and values that new tokens read. */
static i64 work_of(const Attention *a) {
    i64 work = 0;
    for (i64 s = 0; s < a->S; s++) work += a->num_new_S[s] * a->length_S[s] * a->C;
    return work;
}

/* Computes the attention of each sequence's new tokens to its keys, themselves included. Nonzero: no memory for the scores. */
int attend(const Attention *a) {
    const i64 threads = work_of(a) >= PARALLEL ? omp_get_max_threads() : 1;
    char *memory = aligned_alloc(LINE, (size_t)attend_tasks_bytes(a)), *work = NULL;
    if (memory != NULL) {
        Call *call = attend_divide(a, memory, threads);
        work = aligned_alloc(LINE, (size_t)attend_work_bytes(call, threads));
        if (work != NULL) {
            attend_open(a, call, work);
#pragma omp parallel num_threads((int)threads)
            attend_team(a, call);
        }
    }
    const int failed = work == NULL;
    free(work), free(memory);
    return failed;
}
