/* Attention of new tokens over keys and values in pages, for float32 on CPUs; hot pages may be float16, cold ones are in 8 bits.

   torch's kernels would have to gather the pages first. Queries are processed in blocks of rows, keys in chunks; weights are
   relative to the greatest score so far (Milakov and Gimelshein 2018; Dao et al. 2022).

   A row is one query of one head. Its result is one sequence of operations that depends only on its position: chunks begin at
   multiples of their size, within a chunk cold keys come before hot ones, each from the first to the last that the row sees.
   Which are cold depends on the position too: a query at position p sees page j cold if p - (16 j + 15) >= `hot`. What is computed
   beside it (other sequences, other new tokens of its own sequence, however a prompt is divided) decides only which registers
   hold it, and whether values are converted once for many rows. NaN and infinity are propagated; a row never reads a hot value
   that it does not see, nor a cold page of which it sees nothing.

   Sparse rows first read lasting pages in the order of their list, in chunks of it, then their window; rows that choose their pages
   read the chosen ones and the window as one list. Where everything is read, the operations are those of a row that is not sparse.

   Strides and widths are in floats. Legend: T tokens, S sequences, K key-value heads, G query heads of a group, D head
   dimension, W the same rounded up to whole vectors, N slots of the cache, C columns of a slot, B blocks of the longest table,
   P positions of a bias, R rows of a block of queries: tokens times heads of the group; J keys of a chunk. */

#include <omp.h>

#include "attention_cold.h"
#include "attention_hot.h"

enum { ROWS = 64 };            /* of a block, as far as a token's heads allow */
enum { COPIED = 16 };          /* rows of several tokens from which copying a chunk pays off: contiguous, and converted once */
enum { CONVERTED = 16 };       /* rows from which converting a cold chunk once pays off */
enum { PARALLEL = 16 * 1024 }; /* floats from which threads pay for their start */

static i64 block_bytes(const Attention *a, i64 R, i64 W, i64 pages) {
    i64 bytes = (R * (2 * W + CHUNK + 2) + (2 * CHUNK + PAGES) * W) * (i64)sizeof(float) + 2 * R * (i64)sizeof(i64);
    if (a->sparse) bytes += pages * (i64)sizeof(i64) + (a->quest > 0 ? R * pages * (i64)sizeof(float) : 0);
    return (bytes + LINE - 1) / LINE * LINE;
}

/* Arrays that are read in vectors come first, so that no vector crosses a cache line. */
static void carve(Block *b, char *memory, i64 R, i64 W, i64 pages) {
    b->keys_JW = (float *)memory;
    b->values_JW = b->keys_JW + CHUNK * W;
    b->channels_W = b->values_JW + CHUNK * W;
    b->q_RW = b->channels_W + PAGES * W;
    b->out_RW = b->q_RW + R * W;
    b->scores_RJ = b->out_RW + R * W;
    b->begin_R = (i64 *)(b->scores_RJ + R * CHUNK), b->end_R = b->begin_R + R;
    b->greatest_R = (float *)(b->end_R + R), b->total_R = b->greatest_R + R;
    b->pages = (i64 *)(b->total_R + R), b->bounds_RP = (float *)(b->pages + pages);
    b->listed = NULL;
}

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

INLINE i64 within(i64 position, i64 first) {
    i64 j = position - first;
    return j < 0 ? 0 : j > CHUNK ? CHUNK : j;
}

/* Sets which keys of the chunk each row sees in cold pages, or in hot ones. Returns whether any row sees any, and which. */
static int set_ranges(const Attention *a, const Block *b, const Task *task, i64 position, i64 first, int cold, i64 *from, i64 *to) {
    const i64 R = task->count * a->G;
    for (i64 t = 0; t < task->count; t++) {
        Extent seen = extent_of(a, task->sequence, position + t);
        i64 begin = within(seen.begin, first), border = within(seen.cold, first), end = within(seen.end, first);
        if (cold) end = end < border ? end : border;
        else begin = begin > border ? begin : border;
        for (i64 r = t * a->G; r < (t + 1) * a->G; r++) b->begin_R[r] = begin, b->end_R[r] = end;
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

/* A row that sees no key has the answer 0. */
static void end_block(const Attention *a, const Block *b, const Task *task, i64 k, i64 W) {
    const i64 G = a->G, D = a->D, R = task->count * G, row = a->rows_S[task->sequence] + task->token;
    const i64 position = a->length_S[task->sequence] - a->num_new_S[task->sequence] + task->token;
    for (i64 r = 0; r < R; r++) {
        float *out = a->out_T + (row + r / G) * a->out_stride + (k * G + r % G) * D;
        Extent seen = extent_of(a, task->sequence, position + r / G);
        const float total = seen.begin < seen.end ? b->total_R[r] : 1.0f;
        for (i64 d = 0; d < W; d += LANES) store_some(out + d, load(b->out_RW + r * W + d) / total, D - d);
        if (a->lse_TH != NULL)
            a->lse_TH[(row + r / G) * a->K * G + k * G + r % G] =
                seen.begin < seen.end ? b->greatest_R[r] + logf(total) : -INFINITY;
    }
}

/* Scores become weights. */
static void soften_chunk(const Attention *a, const Block *b, i64 R, i64 k, i64 first, i64 W) {
    for (i64 r = 0; r < R; r++) {
        if (a->cap > 0 || a->bias_HP != NULL) adjust_scores(a, b, r, k * a->G + r % a->G, first);
        soften(b, r, W);
    }
}

/* `R` rows of a task; `last` is the position after the last key that will be read, to which the next ones are prefetched. */
static void attend_hot(const Attention *a, Block *b, const Task *task, i64 R, i64 k, i64 first, i64 from, i64 to, i64 last, i64 W) {
    const i64 s = task->sequence, item_bytes = a->half ? 2 : 4;
    const int copied = (task->count > 1 && R >= COPIED) || W > a->D, half = a->half && !copied;
    find_keys(a, b, s, k, first, from, to, item_bytes);
    if (copied && a->half) copy_keys(a, b, from, to, W, 1);
    else if (copied) copy_keys(a, b, from, to, W, 0);
    else prefetch_keys(a, b, s, k, first + CHUNK, last, item_bytes);
    if (half) score_hot(a, b, R, W, 1);
    else score_hot(a, b, R, W, 0);
    soften_chunk(a, b, R, k, first, W);
    add_chunk(b, R, W, half ? HALF : FLOAT);
}

static void attend_cold(const Attention *a, Block *b, const Task *task, i64 k, i64 first, i64 from, i64 to, i64 W) {
    const i64 R = task->count * a->G;
    const int converted = R >= CONVERTED;
    find_pages(a, b, task->sequence, k, first, from, to, W);
    if (converted) copy_pages(a, b, from, to, W);
    score_cold(a, b, R, W, converted ? FLOAT : (int)a->key_kind);
    soften_chunk(a, b, R, k, first, W);
    for (i64 r = 0; r < R; r++) scale_weights(b, r);
    add_chunk(b, R, W, converted ? FLOAT : (int)a->value_kind);
}

/* Rows that do not see the same pages: one after the other, each over its list. */
static void attend_chosen(const Attention *a, const Block *b, const Task *task, i64 k, i64 position, i64 pages, i64 W) {
    const i64 R = task->count * a->G, last = window_begin(a, position + task->count - 1) / a->block_size;
    for (i64 page = a->sinks; page < last; page++) bound_page(a, b, task, k, page, position, W, pages);
    for (i64 r = 0; r < R; r++) {
        const Task own = {task->sequence, task->token + r / a->G, 1};
        const i64 at = position + r / a->G, listed = list_chosen(a, b, b->bounds_RP + r * pages, at);
        const i64 keys = (listed - 1) * a->block_size + at % a->block_size + 1;
        Block row = *b;
        row.q_RW += r * W, row.out_RW += r * W, row.greatest_R += r, row.total_R += r, row.listed = b->pages;
        for (i64 first = 0; first < keys; first += CHUNK) {
            row.begin_R[0] = 0, row.end_R[0] = within(keys, first);
            attend_hot(a, &row, &own, 1, k, first, 0, row.end_R[0], keys, W);
        }
    }
}

static void attend_lasting(const Attention *a, Block *b, const Task *task, i64 k, i64 position, i64 W) {
    const i64 keys = lasting_keys(a, position + task->count - 1);
    i64 from, to;
    list_lasting(a, b, keys);
    b->listed = b->pages;
    for (i64 first = 0; first < keys; first += CHUNK)
        if (set_lasting(a, b, task, position, first, &from, &to))
            attend_hot(a, b, task, task->count * a->G, k, first, from, to, keys, W);
    b->listed = NULL;
}

static void attend_block(const Attention *a, Block *b, const Task *task, i64 k, i64 pages, i64 W) {
    const i64 s = task->sequence, position = a->length_S[s] - a->num_new_S[s] + task->token, last = position + task->count;
    const Extent lowest = extent_of(a, s, position), greatest = extent_of(a, s, last - 1);
    i64 from, to;
    begin_block(a, b, task, k, W);
    if (chooses(a, last - 1)) {
        attend_chosen(a, b, task, k, position, pages, W);
        end_block(a, b, task, k, W);
        return;
    }
    if (a->sparse && a->quest == 0) attend_lasting(a, b, task, k, position, W);
    for (i64 first = lowest.begin / CHUNK * CHUNK; first < greatest.end; first += CHUNK) {
        if (greatest.cold > first && set_ranges(a, b, task, position, first, 1, &from, &to))
            attend_cold(a, b, task, k, first, from, to, W);
        if (lowest.cold < first + CHUNK && set_ranges(a, b, task, position, first, 0, &from, &to))
            attend_hot(a, b, task, task->count * a->G, k, first, from, to, last, W);
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
    i64 most = 0, longest = 0, work = 0, heads = num_tasks >= 2 * omp_get_max_threads() ? a->K : 1; /* per thread at once: adjacent in a slot */
    int failed = 0;
    Task *tasks = malloc((size_t)num_tasks * sizeof(Task));
    if (tasks == NULL) return num_tasks > 0;
    cut(a, tasks, tokens);
    for (i64 n = 0; n < num_tasks; n++) {
        most = tasks[n].count > most ? tasks[n].count : most;
        longest = a->length_S[tasks[n].sequence] > longest ? a->length_S[tasks[n].sequence] : longest;
        work += tasks[n].count * a->length_S[tasks[n].sequence] * a->C;
    }
    const i64 pages = longest / a->block_size + 1;
#pragma omp parallel if (work >= PARALLEL)
    {
        char *memory = aligned_alloc(LINE, (size_t)block_bytes(a, most * a->G, W, pages));
        Block block;
        if (memory == NULL) {
#pragma omp atomic write
            failed = 1;
        } else carve(&block, memory, most * a->G, W, pages);
#pragma omp for collapse(2) schedule(dynamic, heads)
        for (i64 n = 0; n < num_tasks; n++)
            for (i64 k = 0; k < a->K; k++)
                if (memory != NULL) attend_block(a, &block, &tasks[n], k, pages, W);
        free(memory);
    }
    free(tasks);
    return failed;
}
