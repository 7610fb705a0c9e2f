/* A tile of a product of float32 rows with panels of float32 or float16 (panels.h), summed in float32.

   Every sum adds the same numbers in the same order in any tile: a row's result depends neither on the other rows nor on the
   number of threads.

   Legend: T rows, I inputs, O outputs. */

#ifndef RYZANSTEIN_FLOATS_H
#define RYZANSTEIN_FLOATS_H

#include "panels.h"

typedef struct {
    const float *x_TI;
    const char *packed;
    const float *bias_O; /* or NULL */
    float *out_TO;
    i64 I, O, stride; /* of rows of the result */
} FloatProduct;

/* Adds a tile's sums to the bias, or to the sums of the inputs before `begin`. One function for all tiles: it
   is not what takes time. */
static void finish_tile(const FloatProduct *p, i64 t, i64 panel, i64 begin, int rows, int panels, Lanes sum[][TILE_SINGLE]) {
    int add = begin > 0;
    for (int n = 0; n < panels; n++) {
        i64 o = (panel + n) * LANES, left = p->O - o; /* the last panel may have fewer outputs than lanes */
        Lanes bias = !add && p->bias_O != NULL ? load_some(p->bias_O + o, left) : (Lanes){0};
        for (int r = 0; r < rows; r++) {
            float *out = p->out_TO + (t + r) * p->stride + o;
            store_some(out, (add ? load_some(out, left) : bias) + sum[r][n], left);
        }
    }
}

INLINE void add_tile(const FloatProduct *p, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels,
                     const int half) {
    const float *x = p->x_TI + t * p->I;
    const int bytes = half ? sizeof(HalfLanes) : sizeof(Lanes), asks = ASKS && (half || rows > 1); /* a single row of floats: slower */
    const char *weight = p->packed + panel * p->I * bytes;
    Lanes sum[TILE_ROWS][TILE_SINGLE];
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < panels; n++) sum[r][n] = (Lanes){0};
    for (i64 i = begin; i < end; i++) {
        if (asks && t == 0) ask_panels(weight, i, p->I, bytes, panels);
        Lanes column[TILE_SINGLE];
#pragma GCC unroll 8
        for (int n = 0; n < panels; n++) column[n] = load_cached(weight, (n * p->I + i) * LANES, half);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int n = 0; n < panels; n++) sum[r][n] = fused(column[n], all(x[r * p->I + i]), sum[r][n]);
    }
    finish_tile(p, t, panel, begin, rows, panels, sum);
}

INLINE void add_float_tile(const void *p, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels) {
    add_tile(p, t, panel, begin, end, rows, panels, 0);
}

#endif
