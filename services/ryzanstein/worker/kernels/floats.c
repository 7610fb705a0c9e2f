/* Products of float32 rows with a weight of float32 or float16 that is packed once, or with an unpacked weight of float32.

   Legend: T rows, I inputs, O outputs, H heads. */

#include "floats.h"
#include "team.h"

enum { BLOCK = 1024 };         /* inputs of a tile's panels that fit the L2 cache */
enum { PARALLEL = 64 * 1024 }; /* products from which threads pay for their start */

/* Returns the bytes of a packed weight. */
i64 float_packed_bytes(i64 O, i64 I, int half) { return whole(O, LANES) * I * (half ? 2 : 4); }

void float_pack(const float *weight_OI, char *packed, i64 O, i64 I, int half) {
#pragma omp parallel for schedule(static) if (O * I >= PARALLEL)
    for (i64 panel = 0; panel < O; panel += LANES)
        for (i64 i = 0; i < I; i++) {
            float column[LANES];
            for (i64 n = 0; n < LANES; n++) column[n] = panel + n < O ? weight_OI[(panel + n) * I + i] : 0;
            store_cached(packed, panel * I + i * LANES, load(column), half);
        }
}

INLINE void add_half_tile(const void *p, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels) {
    add_tile(p, t, panel, begin, end, rows, panels, 1);
}

/* Multiplies each head's rows with the head's own weight, which is packed in float32. */
void float_product_by_head(const float *x_HTI, const char *packed_H, float *out_HTO, i64 H, i64 T, i64 I, i64 O) {
    i64 packed_bytes = float_packed_bytes(O, I, 0), panels = whole(O, LANES) / LANES;
#pragma omp parallel for schedule(static) if (H * T * I * O >= PARALLEL)
    for (i64 h = 0; h < H; h++) {
        const FloatProduct product = {x_HTI + h * T * I, packed_H + h * packed_bytes, NULL, out_HTO + h * T * O, I, O, O};
        add_some(add_float_tile, &product, T, 0, panels, I, BLOCK);
    }
}

/* Computes a vector of sums: `rows` rows from t on, with as many outputs from o on as fill it. A sum is computed in each lane, then
   over the lanes, in the same order for any `rows`. The last output's weight is repeated to fill the vector. */
INLINE void sum_tile(const float *x_TI, const float *weight_OI, Lanes *out, i64 t, i64 o, i64 I, i64 O, const int rows) {
    const int outputs = LANES / rows;
    const float *weight[LANES];
    Lanes sum[LANES];
    for (int n = 0; n < outputs; n++) weight[n] = weight_OI + (o + n < O ? o + n : O - 1) * I;
    for (int n = 0; n < LANES; n++) sum[n] = (Lanes){0};
    i64 i = 0;
    for (; i + LANES <= I; i += LANES) {
        Lanes x[4];
        for (int r = 0; r < rows; r++) x[r] = load(x_TI + (t + r) * I + i);
#pragma GCC unroll 16
        for (int n = 0; n < outputs; n++) {
            Lanes part = load(weight[n] + i);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sum[r * outputs + n] = fused(x[r], part, sum[r * outputs + n]);
        }
    }
    for (int r = 0; i < I && r < rows; r++)
        for (int n = 0; n < outputs; n++) {
            Lanes x = load_some(x_TI + (t + r) * I + i, I - i), part = load_some(weight[n] + i, I - i);
            sum[r * outputs + n] = fused(x, part, sum[r * outputs + n]);
        }
    *out = sums(sum);
}

/* Computes rows `t` to `last` - 1, `rows` at a time, for a vector of outputs: their few weights stay in the L1 cache. */
INLINE void sum_rows(const Product *p, i64 t, i64 last, i64 first, const int rows) {
    const float *x_TI = p->x_TI, *weight_OI = (const float *)p->weight, *bias_O = p->bias_O;
    const i64 I = p->I, O = p->O;
    const int outputs = LANES / rows;
    for (i64 o = first; t < last && o < first + LANES && o < O; o += outputs)
        for (i64 row = t; row < last; row += rows) {
            Lanes sum;
            sum_tile(x_TI, weight_OI, &sum, row, o, I, O, rows);
            for (int r = 0; r < rows; r++)
                for (i64 n = 0; n < outputs && o + n < O; n++)
                    p->out_TO[(row + r) * p->stride + o + n] = ((float *)&sum)[r * outputs + n] + (bias_O == NULL ? 0.0f : bias_O[o + n]);
        }
}

static void unpacked_panels(const Product *p, i64 panel, i64 last) {
    const i64 fours = p->T / 4 * 4, twos = p->T / 2 * 2;
    for (i64 o = panel * LANES; o < last * LANES; o += LANES) {
        sum_rows(p, 0, fours, o, 4);
        sum_rows(p, fours, twos, o, 2);
        sum_rows(p, twos, p->T, o, 1);
    }
}

void float_panels(const Product *p, i64 panel, i64 last) {
    const FloatProduct product = {p->x_TI, p->weight, p->bias_O, p->out_TO, p->I, p->O, p->stride};
    if (p->kind == UNPACKED) unpacked_panels(p, panel, last);
    else if (p->kind == IN_HALVES) add_some(add_half_tile, &product, p->T, panel, last, p->I, BLOCK);
    else add_some(add_float_tile, &product, p->T, panel, last, p->I, BLOCK);
}

/* out = x weight^T + bias. */
void float_product(const float *x_TI, const char *packed, const float *bias_O, float *out_TO, i64 T, i64 I, i64 O, int half) {
    const Product p = {.x_TI = x_TI, .weight = packed, .bias_O = bias_O, .out_TO = out_TO, .T = T, .I = I, .O = O, .stride = O,
                       .kind = half ? IN_HALVES : IN_FLOATS};
#pragma omp parallel if (T * I * O >= PARALLEL)
    {
        i64 last, panel = first_panel(whole(O, LANES) / LANES, &last);
        float_panels(&p, panel, last);
    }
}

/* The same with a weight in the checkpoint's layout. Slower than a packed weight for many rows; it is for weights that have
   another reader. */
void float_product_unpacked(const float *x_TI, const float *weight_OI, const float *bias_O, float *out_TO, i64 T, i64 I, i64 O) {
    const Product p = {.x_TI = x_TI, .weight = (const char *)weight_OI, .bias_O = bias_O, .out_TO = out_TO, .T = T, .I = I, .O = O, .stride = O,
                       .kind = UNPACKED};
#pragma omp parallel if (T * I * O >= PARALLEL)
    {
        i64 last, panel = first_panel(whole(O, LANES) / LANES, &last);
        float_panels(&p, panel, last);
    }
}
