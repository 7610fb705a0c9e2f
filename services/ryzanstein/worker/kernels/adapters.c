/* What low-rank adapters add to the result of a product: x A B, with its own A and B for each adapter (Hu et al. 2021). The rows of a
   step are grouped by their adapter, as in Punica (Chen et al. 2024) and S-LoRA (Sheng et al. 2024).

   Each number is one chain of fused additions, over inputs for x A and over ranks for (x A) B, and is added once to the result. So a
   row's bits depend on neither the other rows nor the number of threads, nor on the width of registers.

   Legend: T rows of the step, N those with an adapter, I inputs, R ranks, O outputs. */

#include "adapters.h"
#include "panels.h"

enum { PART_ROWS = 2 * TILE_ROWS };                           /* of a tile with one panel */
enum { ROWS_AT_ONCE = 2 * PART_ROWS, OUTPUTS_AT_ONCE = 512 }; /* of a part that one thread computes */
enum { PARALLEL = 64 * 1024 };                                /* products from which threads pay for their start */

/* Some rows times some columns of a matrix. */
typedef struct {
    const float *x[ROWS_AT_ONCE];
    float *out[ROWS_AT_ONCE];
    const char *weight_IO; /* in float16 if `half` */
    const float *bias_O;
    i64 I, O, stride;
    float scale;    /* of what is stored */
    int adds, half; /* adds: to what is there */
} Part;

/* Stores the sums of a tile whose panels are whole, or of one whose last panel is not. */
INLINE void put_tile(const Part *p, i64 t, i64 panel, Lanes sum[][TILE_SINGLE], const int rows, const int panels, const int whole_panels) {
    for (int n = 0; n < panels; n++) {
        const i64 o = (panel + n) * LANES, left = whole_panels ? LANES : p->O - o; /* other lanes have read what comes after it */
        if (p->bias_O != NULL) {
            Lanes bias = load_some(p->bias_O + o, left);
            for (int r = 0; r < rows; r++) sum[r][n] += bias;
        }
        for (int r = 0; r < rows; r++) {
            float *out = p->out[t + r] + o;
            if (p->scale != 1.0f) sum[r][n] *= p->scale;
            if (p->adds) sum[r][n] += load_some(out, left);
            store_some(out, sum[r][n], left);
        }
    }
}

INLINE void add_part_tile(const Part *p, i64 t, i64 panel, const int rows, const int panels, const int half) {
    const float *x[PART_ROWS];
    i64 at = panel * LANES;
    Lanes sum[PART_ROWS][TILE_SINGLE];
    for (int r = 0; r < rows; r++) {
        x[r] = p->x[t + r];
        for (int n = 0; n < panels; n++) {
            sum[r][n] = (Lanes){0};
            if (p->adds) __builtin_prefetch(p->out[t + r] + (panel + n) * LANES, 1);
        }
    }
    for (i64 i = 0; i < p->I; i++, at += p->stride) {
        Lanes column[TILE_SINGLE];
#pragma GCC unroll 8
        for (int n = 0; n < panels; n++) column[n] = load_cached(p->weight_IO, at + n * LANES, half);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < panels; n++) sum[r][n] = fused(column[n], all(x[r][i]), sum[r][n]);
    }
    if ((panel + panels) * LANES <= p->O) put_tile(p, t, panel, sum, rows, panels, 1);
    else put_tile(p, t, panel, sum, rows, panels, 0);
}

INLINE void add_part_rows(const Part *p, i64 rows, i64 panel, const int panels, const int half) {
    const int most = panels > TILE_PANELS ? FEW_ROWS : panels == 1 ? PART_ROWS : TILE_ROWS;
    for (i64 t = 0, count; t < rows; t += count) {
        count = even_part(rows - t, most);
        switch (count) {
#define ROWS_OF(ROWS) case ROWS: if (ROWS <= most) add_part_tile(p, t, panel, ROWS, panels, half); break;
            ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4) ROWS_OF(5) ROWS_OF(6) ROWS_OF(7) ROWS_OF(8) ROWS_OF(9) ROWS_OF(10) ROWS_OF(11) ROWS_OF(12)
        }
    }
}

INLINE void add_part_panels(const Part *p, i64 rows, const int half) {
    const i64 last = whole(p->O, LANES) / LANES;
    for (i64 panel = 0, panels; panel < last; panel += panels) {
        panels = even_part(last - panel, rows <= FEW_ROWS ? TILE_SINGLE : TILE_PANELS);
        switch (panels) {
#define PANELS_OF(PANELS) case PANELS: if (PANELS <= TILE_SINGLE) add_part_rows(p, rows, panel, PANELS, half); break;
            PANELS_OF(1) PANELS_OF(2) PANELS_OF(3) PANELS_OF(4) PANELS_OF(5) PANELS_OF(6) PANELS_OF(7) PANELS_OF(8)
        }
    }
}

static void add_part(const Part *p, i64 rows) {
    if (p->half) add_part_panels(p, rows, 1);
    else add_part_panels(p, rows, 0);
}

/* x A of some rows of a segment: of single numbers 1 a row of A. */
static void shrink(const Adapted *p, const Factors *factors, i64 weight, i64 begin, i64 end) {
    float *low = p->low_NR + weight * p->N * p->site->low_stride;
    Part part = {.weight_IO = factors->a_IR, .I = p->I, .O = factors->R, .stride = factors->R, .scale = factors->scale, .half = factors->half};
    for (i64 n = begin; n < end; n++) {
        const i64 t = p->index_N[n];
        part.out[n - begin] = low + n * p->site->low_stride;
        if (p->ids_T == NULL) part.x[n - begin] = p->x_TI + t * p->x_stride;
        else for (i64 r = 0; p->ids_T[t] >= 0 && r < factors->R; r += LANES)
            store_some(part.out[n - begin] + r, load_cached(factors->a_IR, p->ids_T[t] * factors->R + r, factors->half) * factors->scale, factors->R - r);
    }
    if (p->ids_T == NULL) add_part(&part, end - begin);
}

/* (x A) B of some rows of a segment and some outputs of a piece. */
static void expand(const Adapted *p, const Factors *factors, const Piece *piece, i64 first, i64 begin, i64 end) {
    const float *low = p->low_NR + piece->weight * p->N * p->site->low_stride;
    const i64 from = piece->from + first, left = piece->count - first;
    Part part = {.weight_IO = factors->b_RO + from * (factors->half ? 2 : 4), .bias_O = factors->bias_O == NULL ? NULL : factors->bias_O + from,
                 .I = factors->R, .O = left < OUTPUTS_AT_ONCE ? left : OUTPUTS_AT_ONCE, .stride = factors->stride, .scale = 1.0f, .adds = 1,
                 .half = factors->half};
    i64 rows = 0;
    for (i64 n = begin; n < end; n++) {
        const i64 t = p->index_N[n];
        if (p->ids_T != NULL && p->ids_T[t] < 0) continue;
        part.x[rows] = low + n * p->site->low_stride;
        part.out[rows++] = p->out_TO + t * p->out_stride + piece->to + first;
    }
    add_part(&part, rows);
}

/* Calls for all parts of all segments, of which this thread takes its turn. */
#define EACH_PART(COUNT, OF, WEIGHT)                                                                                                \
    for (i64 s = 0, turn = 0; s < p->num_segments; s++)                                                                             \
        for (i64 begin = p->segments[s].begin, end; begin < p->segments[s].end; begin = end) {                                      \
            end = begin + even_part(p->segments[s].end - begin, ROWS_AT_ONCE);                                                      \
            for (i64 n = 0; n < COUNT; n++) {                                                                                       \
                const Factors *factors = p->site->slots[p->segments[s].slot] + (WEIGHT);                                            \
                if (factors->a_IR == NULL) continue;                                                                                \
                OF                                                                                                                  \
            }                                                                                                                       \
        }
#define MINE (turn++ % threads == thread)

static void shrink_all(const Adapted *p, i64 thread, i64 threads) {
    EACH_PART(p->site->weights, if (MINE) shrink(p, factors, n, begin, end);, n)
}

static void expand_all(const Adapted *p, i64 thread, i64 threads) {
    EACH_PART(p->site->num_pieces, for (i64 first = 0; first < p->site->pieces[n].count; first += OUTPUTS_AT_ONCE)
        if (MINE) expand(p, factors, p->site->pieces + n, first, begin, end);, p->site->pieces[n].weight)
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
