/* Products of float32 rows with a weight of float16, summed in float32.

   The weight stays as checkpoints have it, a row of inputs for each output: nothing is packed, and at few rows each of its bytes
   is read once. Tiles of outputs and rows keep their sums in registers. Every sum adds the same numbers in the same order in
   any tile: a row's result depends neither on the other rows nor on the number of threads.

   Legend: T rows, I inputs, O outputs. */

#include <string.h>

#include "lanes.h"

enum { OUTPUTS = 4, ROWS = 6 };       /* of a tile: 24 sums, 4 weights and a row's numbers fit 32 registers */
enum { BLOCK = 96 };                  /* rows that the second level of cache holds, a multiple of ROWS */
enum { STRIP = 16 };                  /* outputs that a thread takes at once */

typedef struct {
    const float *x_TI;
    const char *weight_OI;
    const float *bias_O; /* or NULL */
    float *out_TO;
    i64 T, I, O;
} HalfProduct;

/* One output of `outputs` x `rows` sums each, from row t and output o on. */
INLINE void add_tile(const HalfProduct *p, i64 t, i64 o, const int outputs, const int rows) {
    Lanes sum[(OUTPUTS * ROWS + LANES - 1) / LANES * LANES];
    memset(sum, 0, sizeof sum);
    for (i64 i = 0; i < p->I; i += LANES) {
        Lanes weight[OUTPUTS];
#pragma GCC unroll 4
        for (int a = 0; a < outputs; a++) weight[a] = widen(p->weight_OI + 2 * ((o + a) * p->I + i));
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            Lanes x = load(p->x_TI + (t + r) * p->I + i);
#pragma GCC unroll 4
            for (int a = 0; a < outputs; a++) sum[r * outputs + a] += weight[a] * x;
        }
    }
    float done[sizeof sum / sizeof *sum];
    for (int n = 0; n < outputs * rows; n += LANES) store(done + n, sums(sum + n));
    for (int r = 0; r < rows; r++)
        for (int a = 0; a < outputs; a++)
            p->out_TO[(t + r) * p->O + o + a] = done[r * outputs + a] + (p->bias_O == NULL ? 0.0f : p->bias_O[o + a]);
}

/* `outputs` outputs of rows t to end - 1. */
INLINE void add_rows(const HalfProduct *p, i64 t, i64 end, i64 o, const int outputs) {
    for (; t + ROWS <= end; t += ROWS) add_tile(p, t, o, outputs, ROWS);
    switch (end - t) {
    case 5: add_tile(p, t, o, outputs, 5); break;
    case 4: add_tile(p, t, o, outputs, 4); break;
    case 3: add_tile(p, t, o, outputs, 3); break;
    case 2: add_tile(p, t, o, outputs, 2); break;
    case 1: add_tile(p, t, o, outputs, 1); break;
    }
}

/* out = x weight^T + bias. I must be a multiple of LANES. */
void half_product(const float *x_TI, const void *weight_OI, const float *bias_O, float *out_TO, i64 T, i64 I, i64 O) {
    const HalfProduct product = {x_TI, weight_OI, bias_O, out_TO, T, I, O};
    for (i64 t = 0; t < T; t += BLOCK) {
        i64 end = t + BLOCK < T ? t + BLOCK : T;
#pragma omp parallel for schedule(static)
        for (i64 strip = 0; strip < O; strip += STRIP) {
            i64 o = strip, last = strip + STRIP < O ? strip + STRIP : O;
            for (; o + OUTPUTS <= last; o += OUTPUTS) add_rows(&product, t, end, o, OUTPUTS);
            for (; o < last; o++) add_rows(&product, t, end, o, 1);
        }
    }
}
