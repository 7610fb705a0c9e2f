/* What low-rank adapters add to the result of a product: x A B, with its own A and B for each adapter (Hu et al. 2021). The rows of a
   step are grouped by their adapter, as in Punica (Chen et al. 2024) and S-LoRA (Sheng et al. 2024).

   Each number is one chain of fused additions, over inputs for x A and over ranks for (x A) B, and is added once to the result. So a
   row's bits depend on neither the other rows nor the number of threads, nor on the width of registers.

   Legend: T rows of the step, N those with an adapter, I inputs, R ranks, O outputs. */

#include "panels.h"

enum { ROWS_AT_ONCE = 4 * TILE_ROWS, OUTPUTS_AT_ONCE = 512 }; /* of a part that one thread computes */
enum { PARALLEL = 64 * 1024 };                                /* products from which threads pay for their start */

/* An adapter's part of one weight on this rank. A without a number: it adapts another weight. */
typedef struct {
    const float *a_IR, *b_RO, *bias_O; /* the bias may be NULL */
    i64 R, stride;                     /* of rows of b */
} Factors;

/* Outputs of a weight, from `from` on, that are columns of the result from `to` on. */
typedef struct {
    i64 weight, from, count, to;
} Piece;

/* Rows index[begin] to index[end - 1] have the adapter of a slot. */
typedef struct {
    i64 slot, begin, end;
} Segment;

typedef struct {
    const float *x_TI;
    const i64 *ids_T; /* or NULL: A's row of each id is what x A would be; below 0 nothing is added */
    float *out_TO;
    const Factors *const *slots;
    const Piece *pieces;
    const Segment *segments;
    const i64 *index_N;
    float *low_NR; /* room for x A of each weight */
    i64 x_stride, out_stride, low_stride, I, N, weights, num_pieces, num_segments;
} Adapted;

/* Some rows times some columns of a matrix. */
typedef struct {
    const float *x[ROWS_AT_ONCE];
    float *out[ROWS_AT_ONCE];
    const float *weight_IO, *bias_O;
    i64 I, O, stride;
    int adds; /* to what is there */
} Part;

INLINE void add_part_tile(const void *product, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels) {
    const Part *p = product;
    const float *weight = p->weight_IO + panel * LANES;
    Lanes sum[TILE_ROWS][TILE_SINGLE];
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < panels; n++) sum[r][n] = (Lanes){0};
    for (i64 i = begin; i < end; i++) {
        Lanes column[TILE_SINGLE];
#pragma GCC unroll 8
        for (int n = 0; n < panels; n++) column[n] = load(weight + i * p->stride + n * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < panels; n++) sum[r][n] = fused(column[n], all(p->x[t + r][i]), sum[r][n]);
    }
    for (int n = 0; n < panels; n++) {
        i64 o = (panel + n) * LANES, left = p->O - o; /* lanes past the last output have read what comes after it */
        Lanes bias = p->bias_O == NULL ? (Lanes){0} : load_some(p->bias_O + o, left);
        for (int r = 0; r < rows; r++) {
            float *out = p->out[t + r] + o;
            Lanes found = sum[r][n];
            if (p->bias_O != NULL) found += bias;
            if (p->adds) found += load_some(out, left);
            store_some(out, found, left);
        }
    }
}

static void add_part(const Part *p, i64 rows) {
    add_some(add_part_tile, p, rows, 0, whole(p->O, LANES) / LANES, p->I, p->I + (p->I == 0));
}

/* x A of some rows of a segment. */
static void shrink(const Adapted *p, const Factors *factors, i64 weight, i64 begin, i64 end) {
    float *low = p->low_NR + weight * p->N * p->low_stride;
    Part part = {.weight_IO = factors->a_IR, .I = p->I, .O = factors->R, .stride = factors->R};
    for (i64 n = begin; n < end; n++) {
        part.x[n - begin] = p->x_TI + p->index_N[n] * p->x_stride;
        part.out[n - begin] = low + n * p->low_stride;
    }
    add_part(&part, end - begin);
}

/* (x A) B of some rows of a segment and some outputs of a piece. */
static void expand(const Adapted *p, const Factors *factors, const Piece *piece, i64 first, i64 begin, i64 end) {
    const float *low = p->low_NR + piece->weight * p->N * p->low_stride;
    i64 from = piece->from + first, left = piece->count - first;
    Part part = {.weight_IO = factors->b_RO + from, .bias_O = factors->bias_O == NULL ? NULL : factors->bias_O + from, .I = factors->R,
                 .O = left < OUTPUTS_AT_ONCE ? left : OUTPUTS_AT_ONCE, .stride = factors->stride, .adds = 1};
    i64 rows = 0;
    for (i64 n = begin; n < end; n++) {
        i64 t = p->index_N[n], id = p->ids_T == NULL ? 0 : p->ids_T[t];
        if (id < 0) continue;
        part.x[rows] = p->ids_T == NULL ? low + n * p->low_stride : factors->a_IR + id * factors->R;
        part.out[rows++] = p->out_TO + t * p->out_stride + piece->to + first;
    }
    add_part(&part, rows);
}

/* Calls for all parts of all segments, of which this thread takes its turn. */
#define EACH_PART(COUNT, OF, WEIGHT)                                                                                                \
    for (i64 s = 0, turn = 0; s < p->num_segments; s++)                                                                             \
        for (i64 begin = p->segments[s].begin, end; begin < p->segments[s].end; begin = end) {                                      \
            end = begin + ROWS_AT_ONCE < p->segments[s].end ? begin + ROWS_AT_ONCE : p->segments[s].end;                            \
            for (i64 n = 0; n < COUNT; n++) {                                                                                       \
                const Factors *factors = p->slots[p->segments[s].slot] + (WEIGHT);                                                  \
                if (factors->a_IR == NULL) continue;                                                                                \
                OF                                                                                                                  \
            }                                                                                                                       \
        }
#define MINE (turn++ % threads == thread)

static void shrink_all(const Adapted *p, i64 thread, i64 threads) {
    EACH_PART(p->weights, if (MINE) shrink(p, factors, n, begin, end);, n)
}

static void expand_all(const Adapted *p, i64 thread, i64 threads) {
    EACH_PART(p->num_pieces, for (i64 first = 0; first < p->pieces[n].count; first += OUTPUTS_AT_ONCE)
        if (MINE) expand(p, factors, p->pieces + n, first, begin, end);, p->pieces[n].weight)
}

/* out += x A B, of each row with the factors of its adapter. `work`: products, about. */
void adapters_add(const Adapted *p, i64 work) {
#pragma omp parallel if (work >= PARALLEL)
    {
        i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
        if (p->ids_T == NULL) {
            shrink_all(p, thread, threads);
#pragma omp barrier
        }
        expand_all(p, thread, threads);
    }
}
