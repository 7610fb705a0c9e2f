/* Products of rows with a weight of 8-bit integers: rows are quantized in each call, sums are exact.

   A weight is packed once (panels.h). Each panel has four inputs of all its outputs side by side, so that one instruction adds
   four products in every lane. Where that instruction multiplies unsigned with signed numbers the levels are stored plus
   LEVEL_OFFSET (levels.h); as many times the sum of a row's levels are subtracted again.

   A row and a weight are transformed first (hadamard.h): a few large numbers of a row would leave few levels for the others.

   Integer sums are the same in any order, and they are scaled in one order: a row's result depends neither on the other rows nor
   on the number of threads, and other exact kernels give the same bits.

   Legend: T rows, I inputs, Q groups of four inputs, O outputs. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hadamard.h"
#include "levels.h"
#include "panels.h"
#include "team.h"

enum { FOUR = 4 };                        /* inputs that are multiplied at once */
enum { PARALLEL = 128 * 1024 };           /* products from which threads pay for their start */

/* Returns the bytes of a packed weight. */
i64 int8_packed_bytes(i64 O, i64 I) { return whole(O, LANES) * whole(I, FOUR); }

/* Packs levels of -127 to 127. */
void int8_pack(const int8_t *levels_OI, uint8_t *packed, i64 O, i64 I) {
    memset(packed, LEVEL_OFFSET, (size_t)int8_packed_bytes(O, I));
    for (i64 o = 0; o < O; o++) {
        uint8_t *to = packed + o / LANES * LANES * whole(I, FOUR) + o % LANES * FOUR;
        for (i64 i = 0; i < I; i++) to[i / FOUR * LANES * FOUR + i % FOUR] = (uint8_t)(levels_OI[o * I + i] + LEVEL_OFFSET);
    }
}

typedef struct {
    const int32_t *levels_TQ, *sum_T;
    const float *scale_T, *scale_O;
    const uint8_t *packed;
    float *out_TO;
    i64 Q, O, stride; /* of rows of the result */
} Int8Product;

/* Scales a tile's sums. One function serves all tiles: it takes little time. */
static void finish_tile(const Int8Product *p, i64 t, i64 panel, int rows, int panels, Ints sum[][TILE_SINGLE]) {
    for (int n = 0; n < panels; n++) {
        i64 o = (panel + n) * LANES, left = p->O - o; /* the last panel may have fewer outputs than lanes */
        Lanes scale = load_some(p->scale_O + o, left);
        for (int r = 0; r < rows; r++)
            store_some(p->out_TO + (t + r) * p->stride + o, __builtin_convertvector(sum[r][n], Lanes) * scale * p->scale_T[t + r], left);
    }
}

INLINE void add_tile(const void *product, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels) {
    const Int8Product *p = product;
    const Ints *weight = (const Ints *)p->packed + panel * p->Q;
    const int32_t *levels = p->levels_TQ + t * p->Q;
    Ints sum[TILE_ROWS][TILE_SINGLE];
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < panels; n++) sum[r][n] = -LEVEL_OFFSET * p->sum_T[t + r] - (Ints){0};
    for (i64 q = begin; q < end; q++) {
        if (ASKS && t == 0) ask_panels(weight, q, p->Q, sizeof(Ints), panels);
        Ints column[TILE_SINGLE];
#pragma GCC unroll 8
        for (int n = 0; n < panels; n++) column[n] = weight[n * p->Q + q];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < panels; n++) sum[r][n] = add_level_products(sum[r][n], column[n], levels[r * p->Q + q]);
    }
    finish_tile(p, t, panel, rows, panels, sum);
}

/* The Hadamard transform of each block of each row. */
void transform_rows(const float *x_TI, float *out_TI, i64 T, i64 I, i64 block) {
#pragma omp parallel for schedule(static) if (T * I >= PARALLEL / LANES)
    for (i64 t = 0; t < T; t++) {
        memcpy(out_TI + t * I, x_TI + t * I, (size_t)I * sizeof(float));
        transform(out_TI + t * I, I, block);
    }
}

/* Computes the levels of x / scale and their sum. Padding is 0. */
static void quantize_row(const float *x_I, int8_t *levels, float *scale, int32_t *sum, i64 I, i64 Q, float smallest) {
    *scale = row_scale(x_I, I, smallest);
    int32_t total = 0;
#pragma omp simd reduction(+ : total)
    for (i64 i = 0; i < I; i++) {
        Float level = {x_I[i] / *scale + ROUNDING};
        levels[i] = (int8_t)(uint8_t)level.bits; /* 0 for NaN */
        total += levels[i];
    }
    memset(levels + I, 0, (size_t)(Q * FOUR - I));
    *sum = total;
}

i64 int8_row_bytes(const Product *p) { return (whole(p->I, FOUR) / FOUR + 2) * (i64)sizeof(int32_t); }

static Int8Product int8_of(const Product *p) {
    const i64 Q = whole(p->I, FOUR) / FOUR;
    const int32_t *levels_TQ = (const int32_t *)p->levels, *sum_T = levels_TQ + p->T * Q;
    return (Int8Product){levels_TQ, sum_T, (const float *)(sum_T + p->T), p->scale_O, (const uint8_t *)p->weight, p->out_TO,
                         Q, p->O, p->stride};
}

void int8_quantize(const Product *p, i64 t, float *row_I) {
    const Int8Product to = int8_of(p);
    transform(row_I, p->I, p->block);
    quantize_row(row_I, (int8_t *)(to.levels_TQ + t * to.Q), (float *)to.scale_T + t, (int32_t *)to.sum_T + t, p->I, to.Q, p->smallest);
}

void int8_panels(const Product *p, i64 panel, i64 last) {
    const Int8Product product = int8_of(p);
    const i64 begin = panel * LANES, end = last * LANES < p->O ? last * LANES : p->O;
    add_some(add_tile, &product, p->T, panel, last, product.Q, product.Q);
    for (i64 t = 0; p->bias_O != NULL && t < p->T; t++)
        for (i64 o = begin; o < end; o++) p->out_TO[t * p->stride + o] += p->bias_O[o];
}

/* out = x weight^T, with a scale for each row and each output, of rows that are transformed in blocks and a weight that was.
   Returns nonzero if there is no memory for the levels of the rows. */
int int8_product(const float *x_TI, const uint8_t *packed, const float *scale_O, float *out_TO, i64 T, i64 I, i64 O, i64 block,
                 float smallest) {
    Product p = {.x_TI = x_TI, .weight = (const char *)packed, .scale_O = scale_O, .out_TO = out_TO, .T = T, .I = I, .O = O, .stride = O,
                 .block = block, .kind = IN_BYTES, .smallest = smallest};
    const i64 levels_bytes = T * int8_row_bytes(&p), row_bytes = I * (i64)sizeof(float); /* a transformed row of each thread */
    p.levels = malloc((size_t)(levels_bytes + omp_get_max_threads() * row_bytes));
    if (p.levels == NULL) return T > 0;
#pragma omp parallel if (T * I * O >= PARALLEL)
    {
        float *own_I = (float *)(p.levels + levels_bytes) + omp_get_thread_num() * I;
#pragma omp for schedule(static)
        for (i64 t = 0; t < T; t++) {
            memcpy(own_I, x_TI + t * I, (size_t)row_bytes);
            int8_quantize(&p, t, own_I);
        }
        i64 last, panel = first_panel(whole(O, LANES) / LANES, &last);
        int8_panels(&p, panel, last);
    }
    free(p.levels);
    return 0;
}

/* The numbers of an output's weights, transformed back. */
void int8_row(const uint8_t *packed, const float *scale_O, i64 o, float *out, i64 I, i64 block) {
    const uint8_t *levels = packed + o / LANES * LANES * whole(I, FOUR) + o % LANES * FOUR;
    for (i64 i = 0; i < I; i++)
        out[i] = scale_O[o] * (float)(int8_t)(levels[i / FOUR * LANES * FOUR + i % FOUR] - LEVEL_OFFSET);
    transform(out, I, block);
}

/* Those of some outputs. An index that no output has gives zeros. */
void int8_rows(const uint8_t *packed, const float *scale_O, const i64 *index_T, float *out_TI, i64 T, i64 I, i64 O, i64 block) {
#pragma omp parallel for schedule(static) if (T * I >= PARALLEL / LANES)
    for (i64 t = 0; t < T; t++) {
        const i64 o = index_T[t];
        if (o >= 0 && o < O) int8_row(packed, scale_O, o, out_TI + t * I, I, block);
        else memset(out_TI + t * I, 0, (size_t)I * sizeof(float));
    }
}
