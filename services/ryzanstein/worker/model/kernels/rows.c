/* Steps between two matrix products that treat each token by itself, for float32 on CPUs: norms, rotation, cache writes, gates,
   rows of whole numbers.

   In torch each of them is several operators, and at one to a few tokens a step an operator costs more to start than to run.

   Every function computes a row by itself and in one order: results depend neither on the other rows of a step nor on the
   number of threads. Strides and widths are in floats. NaN and infinity are propagated.

   Legend: T tokens, E width of a row, H heads, D head dimension, R rotated numbers of a head, N slots of the cache,
   C columns of a slot. */

#include <math.h>
#include <string.h>

#include "lanes.h"

enum { PARALLEL = 16 * 1024 }; /* floats from which on threads pay for their start */

/* out = x / sqrt(mean(x^2) + eps) * (offset + weight), Zhang and Sennrich 2019. */
void rms_norm(const float *x_TE, const float *weight_E, float *out_TE, i64 T, i64 E, float eps, float offset) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const float *x = x_TE + t * E;
        float *out = out_TE + t * E, sum = 0;
#pragma omp simd reduction(+ : sum)
        for (i64 e = 0; e < E; e++) sum += x[e] * x[e];
        float factor = 1.0f / sqrtf(sum / (float)E + eps);
#pragma omp simd
        for (i64 e = 0; e < E; e++) out[e] = x[e] * factor * (offset + weight_E[e]);
    }
}

static inline void rotate_halves(float *x, const float *cosine, const float *sine, i64 half) {
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = low * cosine[i] + high * sine[i];
        x[i + half] = high * cosine[i + half] + low * sine[i + half];
    }
}

static inline void rotate_neighbours(float *x, const float *cosine, const float *sine, i64 half) {
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = even * cosine[2 * i] + odd * sine[2 * i];
        x[2 * i + 1] = odd * cosine[2 * i + 1] + even * sine[2 * i + 1];
    }
}

/* Rotates the first R numbers of each of the H heads of a row in place (Su et al. 2021; the sine is signed), then copies the
   row's C columns from `first_kv` on into the token's slot. R may be 0. `half`: slots hold float16. */
void rotate_and_store(float *qkv_T, i64 stride, i64 T, i64 H, i64 D, const float *cos_TR, const float *sin_TR, i64 R,
                      int interleaved, i64 first_kv, void *pages_NC, const i64 *slots_T, i64 C, int half) {
#pragma omp parallel for schedule(static) if (T * stride >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        float *row = qkv_T + t * stride;
        for (i64 h = 0; R > 0 && h < H; h++) {
            if (interleaved) rotate_neighbours(row + h * D, cos_TR + t * R, sin_TR + t * R, R / 2);
            else rotate_halves(row + h * D, cos_TR + t * R, sin_TR + t * R, R / 2);
        }
        if (half) {
            _Float16 *slot = (_Float16 *)pages_NC + slots_T[t] * C;
#pragma omp simd
            for (i64 c = 0; c < C; c++) slot[c] = (_Float16)row[first_kv + c];
        } else memcpy((float *)pages_NC + slots_T[t] * C, row + first_kv, (size_t)C * sizeof(float));
    }
}

/* out = silu(gate) * up, of rows that hold E gates and then E ups (Shazeer 2020). */
void silu_gate(const float *gate_up_T2E, float *out_TE, i64 T, i64 E) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        const float *gate = gate_up_T2E + t * 2 * E, *up = gate + E;
        float *out = out_TE + t * E;
#pragma omp simd
        for (i64 e = 0; e < E; e++) out[e] = gate[e] / (1.0f + exponential(-gate[e])) * up[e];
    }
}

void quantize_to_float(const float *x_TE, float *levels_TE, float *scale_T, i64 T, i64 E, float smallest) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        float scale = scale_T[t] = row_scale(x_TE + t * E, E, smallest);
#pragma omp simd
        for (i64 e = 0; e < E; e++) levels_TE[t * E + e] = rintf(x_TE[t * E + e] / scale);
    }
}

void quantize_to_int8(const float *x_TE, int8_t *levels_TE, float *scale_T, i64 T, i64 E, float smallest) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        float scale = scale_T[t] = row_scale(x_TE + t * E, E, smallest);
#pragma omp simd
        for (i64 e = 0; e < E; e++) {
            Float level = {x_TE[t * E + e] / scale + ROUNDING};
            levels_TE[t * E + e] = (int8_t)(uint8_t)level.bits; /* of NaN 0 */
        }
    }
}
