/* Products of float32 rows with a weight of float32 or float16 that is packed once, or with an unpacked weight of float32.

   Legend: T rows, I inputs, O outputs, H heads. */

#include "floats.h"

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

/* out = x weight^T + bias. */
void float_product(const float *x_TI, const char *packed, const float *bias_O, float *out_TO, i64 T, i64 I, i64 O, int half) {
    const FloatProduct product = {x_TI, packed, bias_O, out_TO, I, O};
    i64 panels = whole(O, LANES) / LANES;
#pragma omp parallel if (T * I * O >= PARALLEL)
    if (half) add_share(add_half_tile, &product, T, panels, I, BLOCK);
    else add_share(add_float_tile, &product, T, panels, I, BLOCK);
}

/* Multiplies each head's rows with the head's own weight, which is packed in float32. */
void float_product_by_head(const float *x_HTI, const char *packed_H, float *out_HTO, i64 H, i64 T, i64 I, i64 O) {
    i64 packed_bytes = float_packed_bytes(O, I, 0), panels = whole(O, LANES) / LANES;
#pragma omp parallel for schedule(static) if (H * T * I * O >= PARALLEL)
    for (i64 h = 0; h < H; h++) {
        const FloatProduct product = {x_HTI + h * T * I, packed_H + h * packed_bytes, NULL, out_HTO + h * T * O, I, O};
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
INLINE void sum_rows(const float *x_TI, const float *weight_OI, const float *bias_O, float *out_TO, i64 t, i64 last, i64 first,
                     i64 I, i64 O, const int rows) {
    const int outputs = LANES / rows;
    for (i64 o = first; t < last && o < first + LANES && o < O; o += outputs)
        for (i64 row = t; row < last; row += rows) {
            Lanes sum;
            sum_tile(x_TI, weight_OI, &sum, row, o, I, O, rows);
            for (int r = 0; r < rows; r++)
                for (i64 n = 0; n < outputs && o + n < O; n++)
                    out_TO[(row + r) * O + o + n] = ((float *)&sum)[r * outputs + n] + (bias_O == NULL ? 0.0f : bias_O[o + n]);
        }
}

/* out = x weight^T + bias, with a weight in the checkpoint's layout. Slower than a packed weight for many rows; it is for weights
   that have another reader. */
void float_product_unpacked(const float *x_TI, const float *weight_OI, const float *bias_O, float *out_TO, i64 T, i64 I, i64 O) {
#pragma omp parallel for schedule(static) if (T * I * O >= PARALLEL)
    for (i64 o = 0; o < O; o += LANES) {
        i64 fours = T / 4 * 4, twos = T / 2 * 2;
        sum_rows(x_TI, weight_OI, bias_O, out_TO, 0, fours, o, I, O, 4);
        sum_rows(x_TI, weight_OI, bias_O, out_TO, fours, twos, o, I, O, 2);
        sum_rows(x_TI, weight_OI, bias_O, out_TO, twos, T, o, I, O, 1);
    }
}
