/* What low-rank adapters add to the result of a product: x A B, with its own A and B for each adapter (Hu et al. 2021). The rows of a
   step are grouped by their adapter, as in Punica (Chen et al. 2024) and S-LoRA (Sheng et al. 2024).

   Each number of x A is the sum of two chains of fused additions, over the first and over the second half of the inputs, each number
   of (x A) B one chain over ranks, which is added once to the result. So a row's bits depend on neither the other rows nor the number
   of threads, nor on the width of registers.

   Legend: T rows of the step, N those with an adapter, I inputs, R ranks, O outputs. */

#include "adapters.h"
#include "panels.h"

/* A tile is 1, 2 or 6 rows times 1, 2, 4 or 8 vectors, or 12 rows times one: as many sums as registers hold. Rows that fill a tile up
   are computed and thrown away. */
#if LANES == 16
enum { SHRUNK = 2, SHRUNK_SINGLE = 4, EXPANDED = 4, EXPANDED_SINGLE = 8, TALL = 12 }; /* vectors of a tile, and of one with a single row */
#else
enum { SHRUNK = 1, SHRUNK_SINGLE = 4, EXPANDED = 2, EXPANDED_SINGLE = 4, TALL = 6 };
#endif
enum { MOST_TILE = 12, ROWS_AT_ONCE = 24, OUTPUTS_AT_ONCE = 512 }; /* of a part that one thread computes; there are as many ranks */
enum { CHAINS = 2, MOST_RANKS = 512 };                             /* of x A: a single one waits for each addition */
enum { PARALLEL = 64 * 1024 };                                     /* products from which threads pay for their start */
enum { AHEAD = 2048 }; /* numbers of each half of A that are asked for in advance; of B the next tile, where a row has it for itself */

/* Some rows times some columns of a matrix. */
typedef struct {
    const float *x[ROWS_AT_ONCE + MOST_TILE];
    float *out[ROWS_AT_ONCE + MOST_TILE];
    const char *weight_IO; /* in float16 if `half` */
    const float *bias_O;
    i64 I, O, stride;
    float scale;    /* of what is stored */
    int adds, half; /* adds: to what is there */
} Part;

static void put_sums(const Part *p, i64 t, i64 o, const Lanes *sums, i64 count) {
    float *out = p->out[t] + o;
    for (i64 n = 0; n < count; n++) {
        const i64 left = p->O - o - n * LANES; /* lanes past the last output have read what comes after it */
        Lanes sum = sums[n];
        if (p->bias_O != NULL) sum += load_some(p->bias_O + o + n * LANES, left);
        if (p->scale != 1.0f) sum *= p->scale;
        if (p->adds) sum += load_some(out + n * LANES, left);
        store_some(out + n * LANES, sum, left);
    }
}

/* The inputs of the first chain: as many as those of the second one, or one more. */
INLINE i64 first_half(i64 I) { return (I + 1) / 2; }

INLINE void add_tile(const Part *p, i64 t, i64 panel, const int rows, const int panels, const int chains, const int half) {
    const float *x[MOST_TILE];
    Lanes sum[CHAINS][MOST_TILE][8];
    for (int r = 0; r < rows; r++) {
        x[r] = p->x[t + r];
        for (int n = 0; n < panels; n++) {
            for (int c = 0; c < chains; c++) sum[c][r][n] = (Lanes){0};
            if (p->adds) __builtin_prefetch(p->out[t + r] + (panel + n) * LANES, 1);
        }
    }
    const i64 first = chains == 2 ? first_half(p->I) : p->I, both = p->I - (chains - 1) * first;
    i64 at = panel * LANES;
    for (i64 i = 0; i < both; i++, at += p->stride)
#pragma GCC unroll 2
        for (int c = 0; c < chains; c++) {
            const i64 now = at + c * first * p->stride;
            Lanes column[8];
#pragma GCC unroll 8
            for (int n = 0; n < panels; n++) column[n] = load_cached(p->weight_IO, now + n * LANES, half);
            if (chains == 2) __builtin_prefetch(p->weight_IO + (now + AHEAD) * (half ? 2 : 4), 0, 2);
            else if (rows == 1)
#pragma GCC unroll 8
                for (int n = 0; n < panels; n += half ? 2 : 1) __builtin_prefetch(p->weight_IO + (now + (panels + n) * LANES) * (half ? 2 : 4), 0, 2);
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int n = 0; n < panels; n++) sum[c][r][n] = fused(column[n], all(x[r][i + c * first]), sum[c][r][n]);
        }
    for (int n = 0; both < first && n < panels; n++) { /* an odd number of inputs */
        Lanes column = load_cached(p->weight_IO, at + n * LANES, half);
        for (int r = 0; r < rows; r++) sum[0][r][n] = fused(column, all(x[r][both]), sum[0][r][n]);
    }
    for (int r = 0; r < rows; r++) {
        for (int n = 0; chains == 2 && n < panels; n++) sum[0][r][n] += sum[1][r][n];
        put_sums(p, t + r, panel * LANES, sum[0][r], panels);
    }
}

/* As many rows of a tile as are left, or more. */
INLINE i64 tile_rows(i64 left, const int panels, const int chains) {
    if (panels == 1 && chains == 2 && TALL > 6 && left > 8) return TALL;
    return left > 2 ? 6 : left;
}

INLINE void add_rows_of(const Part *p, i64 rows, i64 panel, const int panels, const int chains, const int half) {
    for (i64 t = 0, count; t < rows; t += count) {
        count = tile_rows(rows - t, panels, chains);
        if (count == 1) add_tile(p, t, panel, 1, panels, chains, half);
        else if (panels > (chains == 2 ? SHRUNK : EXPANDED)) break; /* only a single row has so many */
        else if (count == 2) add_tile(p, t, panel, 2, panels, chains, half);
        else if (count == 6) add_tile(p, t, panel, 6, panels, chains, half);
        else if (panels == 1 && chains == 2) add_tile(p, t, panel, MOST_TILE, 1, chains, half);
    }
}

INLINE void add_columns(const Part *p, i64 rows, const int chains, const int half) {
    const i64 last = whole(p->O, LANES) / LANES;
    const int most = chains == 2 ? (rows == 1 ? SHRUNK_SINGLE : SHRUNK) : (rows == 1 ? EXPANDED_SINGLE : EXPANDED);
    for (i64 panel = 0, panels; panel < last; panel += panels) {
        const i64 left = last - panel < most ? last - panel : most;
        panels = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (panels == 1) add_rows_of(p, rows, panel, 1, chains, half);
        else if (panels == 2) add_rows_of(p, rows, panel, 2, chains, half);
        else if (panels == 4) add_rows_of(p, rows, panel, 4, chains, half);
        else if (chains == 1) add_rows_of(p, rows, panel, 8, chains, half);
    }
}

static void add_part(Part *p, i64 rows, const int chains) {
    float unused[OUTPUTS_AT_ONCE + LANES];
    if (rows == 0) return;
    for (i64 r = rows; r < rows + MOST_TILE; r++) p->x[r] = p->x[0], p->out[r] = unused;
    if (p->half && chains == 2) add_columns(p, rows, 2, 1);
    else if (p->half) add_columns(p, rows, 1, 1);
    else if (chains == 2) add_columns(p, rows, 2, 0);
    else add_columns(p, rows, 1, 0);
}

/* The place of a row's id among this rank's, or -1. */
INLINE i64 own_id(const Adapted *p, i64 t) {
    const i64 id = p->ids_T[t] - p->first_id;
    return id < p->num_ids ? id : -1;
}

/* x A of some rows of a segment: of single numbers 1 a row of A. */
static void shrink(const Adapted *p, const Factors *factors, i64 weight, i64 begin, i64 end) {
    float *low = p->low_NR + weight * p->N * p->site->low_stride;
    Part part = {.weight_IO = factors->a_IR, .I = p->I, .O = factors->R, .stride = factors->R, .scale = factors->scale, .half = factors->half};
    for (i64 n = begin; n < end; n++) {
        const i64 t = p->index_N[n], row = p->rows_T == NULL ? t : p->rows_T[t], id = p->ids_T == NULL ? 0 : own_id(p, t);
        part.out[n - begin] = low + n * p->site->low_stride;
        if (p->ids_T == NULL) part.x[n - begin] = p->x_TI + row * p->x_stride;
        else for (i64 r = 0; id >= 0 && r < factors->R; r += LANES)
            store_some(part.out[n - begin] + r, load_cached(factors->a_IR, id * factors->R + r, factors->half) * factors->scale, factors->R - r);
    }
    if (p->ids_T == NULL) add_part(&part, end - begin, CHAINS);
}

/* One chain of x A of a segment's only row. */
static void shrink_half(const Adapted *p, const Factors *factors, i64 weight, i64 n, i64 chain) {
    const i64 row = p->rows_T == NULL ? p->index_N[n] : p->rows_T[p->index_N[n]], first = first_half(p->I), from = chain * first;
    Part part = {.weight_IO = factors->a_IR + from * factors->R * (factors->half ? 2 : 4), .I = chain == 0 ? first : p->I - first,
                 .O = factors->R, .stride = factors->R, .scale = 1.0f, .half = factors->half};
    part.x[0] = p->x_TI + row * p->x_stride + from;
    part.out[0] = p->low_NR + ((chain * p->site->weights + weight) * p->N + n) * p->site->low_stride;
    add_part(&part, 1, 1);
}

/* x A of a segment's only row, of which each chain is known. */
static const float *joined(const Adapted *p, const Factors *factors, i64 weight, i64 n, float *low_R) {
    const float *first = p->low_NR + (weight * p->N + n) * p->site->low_stride, *second = first + p->site->weights * p->N * p->site->low_stride;
    for (i64 r = 0; r < factors->R; r++) {
        low_R[r] = first[r] + second[r];
        if (factors->scale != 1.0f) low_R[r] *= factors->scale;
    }
    return low_R;
}

/* (x A) B of some rows of a segment and some outputs of a piece. */
static void expand(const Adapted *p, const Factors *factors, const Piece *piece, i64 first, i64 count, i64 begin, i64 end, const int halved) {
    float joined_R[MOST_RANKS];
    const float *low = p->low_NR + piece->weight * p->N * p->site->low_stride;
    const i64 from = piece->from + first;
    Part part = {.weight_IO = factors->b_RO + from * (factors->half ? 2 : 4), .bias_O = factors->bias_O == NULL ? NULL : factors->bias_O + from,
                 .I = factors->R, .O = count, .stride = factors->stride, .scale = 1.0f, .adds = 1,
                 .half = factors->half};
    i64 rows = 0;
    for (i64 n = begin; n < end; n++) {
        const i64 t = p->index_N[n];
        if (p->ids_T != NULL && own_id(p, t) < 0) continue;
        part.x[rows] = halved ? joined(p, factors, piece->weight, n, joined_R) : low + n * p->site->low_stride;
        part.out[rows++] = p->out_TO + t * p->out_stride + piece->to + first;
    }
    add_part(&part, rows, 1);
}

/* Calls for all parts of all segments, of which this thread takes its turn. */
#define EACH_PART(COUNT, OF, WEIGHT)                                                                                                \
    for (i64 s = 0; s < p->num_segments; s++)                                                                                       \
        for (i64 begin = p->segments[s].begin, end; begin < p->segments[s].end; begin = end) {                                      \
            end = begin + even_part(p->segments[s].end - begin, ROWS_AT_ONCE);                                                      \
            for (i64 n = 0; n < COUNT; n++) {                                                                                       \
                const Factors *factors = p->site->slots[p->segments[s].slot] + (WEIGHT);                                            \
                if (factors->a_IR == NULL) continue;                                                                                \
                OF                                                                                                                  \
            }                                                                                                                       \
        }
#define MINE (turn++ % threads == thread)

/* Whether a chain is a part: where there are fewer rows and weights than threads could share. */
static int are_halved(const Adapted *p, i64 threads) {
    return threads > 1 && p->ids_T == NULL && p->site->low_stride <= MOST_RANKS && p->num_segments == p->N && p->N * p->site->weights < 2 * threads;
}

static void shrink_all(const Adapted *p, i64 thread, i64 threads) {
    i64 turn = 0;
    if (!are_halved(p, threads)) {
        EACH_PART(p->site->weights, if (MINE) shrink(p, factors, n, begin, end);, n)
        return;
    }
    EACH_PART(p->site->weights, for (i64 chain = 0; chain < 2; chain++) if (MINE) shrink_half(p, factors, n, begin, chain);, n)
}

/* The same with columns `first` to `last` - 1 of the result. */
static void expand_own(const Adapted *p, const Factors *factors, const Piece *piece, i64 first, i64 last, i64 begin, i64 end, const int halved) {
    const i64 from = first > piece->to ? first - piece->to : 0, to = last - piece->to < piece->count ? last - piece->to : piece->count;
    const i64 most = end - begin == 1 ? piece->count : OUTPUTS_AT_ONCE;
    for (i64 o = from; o < to; o += most) expand(p, factors, piece, o, to - o < most ? to - o : most, begin, end, halved);
}

/* A thread has the columns that it computed of the product, which are in its cache. Where each of many rows has an adapter of its
   own, it has whole adapters: these are what is read most then, and two threads would each ask for parts that the other one has. */
static void expand_all(const Adapted *p, i64 thread, i64 threads) {
    const int alone = p->num_segments == p->N && p->N > 4 * threads, halved = are_halved(p, threads);
    i64 panels = 0, turn = 0;
    for (i64 n = 0; n < p->site->num_pieces; n++) {
        const i64 needed = whole(p->site->pieces[n].to + p->site->pieces[n].count, LANES) / LANES;
        if (panels < needed) panels = needed;
    }
    const i64 first = alone ? 0 : panels * thread / threads * LANES, last = alone ? panels * LANES : panels * (thread + 1) / threads * LANES;
    EACH_PART(p->site->num_pieces, if (!alone || MINE) expand_own(p, factors, p->site->pieces + n, first, last, begin, end, halved);,
              p->site->pieces[n].weight)
}

void adapters_team(const Adapted *p) {
    const i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
    shrink_all(p, thread, threads);
#pragma omp barrier
    expand_all(p, thread, threads);
#pragma omp barrier
}

/* The same in a region of its own. `work`: products, about. */
void adapters_add(const Adapted *p, i64 work) {
#pragma omp parallel if (work >= PARALLEL)
    adapters_team(p);
}
