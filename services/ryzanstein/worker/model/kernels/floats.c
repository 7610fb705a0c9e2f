/* Products of float32 rows with a weight of float32 or float16 that is packed once (panels.h), summed in float32.

   Every sum adds the same numbers in the same order in any tile: a row's result depends neither on the other rows nor on the
   number of threads.

   Legend: T rows, I inputs, O outputs. */

#include "panels.h"

enum { BLOCK = 1024 };         /* inputs of a tile's panels that the second level of cache holds */
enum { PARALLEL = 64 * 1024 }; /* products from which on threads pay for their start */

typedef struct {
    const float *x_TI;
    const char *packed;
    const float *bias_O; /* or NULL */
    float *out_TO;
    i64 I, O;
} FloatProduct;

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

/* Adds a tile's sums to the bias, or to what the inputs before `begin` gave. One function for all tiles: it is not what takes time. */
static void finish_tile(const FloatProduct *p, i64 t, i64 panel, i64 begin, int rows, int panels, Lanes sum[][TILE_SINGLE]) {
    for (int n = 0; n < panels; n++) {
        i64 o = (panel + n) * LANES, left = p->O - o; /* the last panel may have fewer outputs than lanes */
        Lanes bias = begin == 0 && p->bias_O != NULL ? load_some(p->bias_O + o, left) : (Lanes){0};
        for (int r = 0; r < rows; r++) {
            float *out = p->out_TO + (t + r) * p->O + o;
            store_some(out, (begin == 0 ? bias : load_some(out, left)) + sum[r][n], left);
        }
    }
}

INLINE void add_tile(const FloatProduct *p, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels,
                     const int half) {
    const float *x = p->x_TI + t * p->I;
    Lanes sum[TILE_ROWS][TILE_SINGLE];
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < panels; n++) sum[r][n] = (Lanes){0};
    for (i64 i = begin; i < end; i++) {
        Lanes column[TILE_SINGLE];
#pragma GCC unroll 8
        for (int n = 0; n < panels; n++) column[n] = load_cached(p->packed, ((panel + n) * p->I + i) * LANES, half);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < panels; n++) sum[r][n] += column[n] * x[r * p->I + i];
    }
    finish_tile(p, t, panel, begin, rows, panels, sum);
}

INLINE void add_float_tile(const void *p, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels) {
    add_tile(p, t, panel, begin, end, rows, panels, 0);
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
