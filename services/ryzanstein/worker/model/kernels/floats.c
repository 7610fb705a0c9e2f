/* Products of float32 rows with a weight of float32 or float16 that is packed once.

   Legend: T rows, I inputs, O outputs. */

#include "floats.h"

enum { BLOCK = 1024 };         /* inputs of a tile's panels that the second level of cache holds */
enum { PARALLEL = 64 * 1024 }; /* products from which on threads pay for their start */

/* Bytes of a packed weight. */
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
    const FloatProduct product = {x_TI, packed, bias_O, out_TO, I, O, 0};
    i64 panels = whole(O, LANES) / LANES;
#pragma omp parallel if (T * I * O >= PARALLEL)
    if (half) add_share(add_half_tile, &product, T, panels, I, BLOCK);
    else add_share(add_float_tile, &product, T, panels, I, BLOCK);
}
