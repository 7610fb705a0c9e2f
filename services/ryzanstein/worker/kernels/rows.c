/* Operations between two matrix products that treat each token separately, for float32 on CPUs: norms, rotation, cache writes,
   gates, quantized rows.

   In torch each of them is several operators, and with one or a few tokens per step an operator costs more to start than to run.

   Every function computes each row separately and in one order: results depend neither on the other rows of a step nor on the
   number of threads. Strides and widths are in floats. NaN and infinity are propagated.

   Legend: T tokens, E width of a row, H heads, D head dimension, R rotated numbers of a head, N slots of the cache,
   C columns of a slot. */

#include <math.h>
#include <string.h>

#include "team.h"

enum { PARALLEL = 16 * 1024 }; /* floats from which threads pay for their start */

/* out = x / sqrt(mean(x^2) + eps) * (offset + weight), Zhang and Sennrich 2019. `out_E` may be `x_E`. */
void rms_norm_row(const float *x_E, const float *weight_E, float *out_E, i64 E, float eps, float offset) {
    const float factor = 1.0f / sqrtf(squares(x_E, E) / (float)E + eps);
#pragma omp simd
    for (i64 e = 0; e < E; e++) out_E[e] = x_E[e] * factor * (offset + weight_E[e]);
}

void rms_norm(const float *x_TE, const float *weight_E, float *out_TE, i64 T, i64 E, float eps, float offset) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) rms_norm_row(x_TE + t * E, weight_E, out_TE + t * E, E, eps, offset);
}

/* Computes cosine and signed sine of a position's angles, times `magnitude`, for `rotate`. */
void angles_row(i64 position, const float *frequencies_R, float *cos_R, float *sin_R, i64 R, int interleaved, float magnitude) {
    for (i64 i = 0; i < R; i++) {
        float angle = (float)position * frequencies_R[i], sine = sinf(angle) * magnitude;
        int first = interleaved ? i % 2 == 0 : i < R / 2;
        cos_R[i] = cosf(angle) * magnitude;
        sin_R[i] = first ? -sine : sine;
    }
}

void rotary_angles(const i64 *positions_T, const float *frequencies_R, float *cos_TR, float *sin_TR, i64 T, i64 R,
                   int interleaved, float magnitude) {
#pragma omp parallel for schedule(static) if (T * R >= PARALLEL)
    for (i64 t = 0; t < T; t++)
        angles_row(positions_T[t], frequencies_R, cos_TR + t * R, sin_TR + t * R, R, interleaved, magnitude);
}

static inline void rotate_halves(float *x, const float *cosine, const float *sine, i64 half) {
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float low = x[i], high = x[i + half];
        x[i] = fused_one(high, sine[i], low * cosine[i]);
        x[i + half] = fused_one(low, sine[i + half], high * cosine[i + half]);
    }
}

static inline void rotate_neighbours(float *x, const float *cosine, const float *sine, i64 half) {
#pragma omp simd
    for (i64 i = 0; i < half; i++) {
        float even = x[2 * i], odd = x[2 * i + 1];
        x[2 * i] = fused_one(odd, sine[2 * i], even * cosine[2 * i]);
        x[2 * i + 1] = fused_one(even, sine[2 * i + 1], odd * cosine[2 * i + 1]);
    }
}

/* Rotates the first R numbers of each of the H heads of a row in place (Su et al. 2021; the sine is signed). */
void rotate_row(float *row, i64 H, i64 D, const float *cos_R, const float *sin_R, i64 R, int interleaved) {
    for (i64 h = 0; R > 0 && h < H; h++) {
        if (interleaved) rotate_neighbours(row + h * D, cos_R, sin_R, R / 2);
        else rotate_halves(row + h * D, cos_R, sin_R, R / 2);
    }
}

/* Copies keys and values into a slot. `half`: slots hold float16. */
void store_row(const float *kv_C, void *pages_NC, i64 slot, i64 C, int half) {
    if (half) {
        _Float16 *to_C = (_Float16 *)pages_NC + slot * C;
#pragma omp simd
        for (i64 c = 0; c < C; c++) to_C[c] = (_Float16)kv_C[c];
    } else memcpy((float *)pages_NC + slot * C, kv_C, (size_t)C * sizeof(float));
}

/* Rotates each row, then copies its C columns from `first_kv` on into the token's slot. R and C may be 0. */
void rotate_and_store(float *qkv_T, i64 stride, i64 T, i64 H, i64 D, const float *cos_TR, const float *sin_TR, i64 R,
                      int interleaved, i64 first_kv, void *pages_NC, const i64 *slots_T, i64 C, int half) {
#pragma omp parallel for schedule(static) if (T * stride >= PARALLEL)
    for (i64 t = 0; t < T; t++) {
        rotate_row(qkv_T + t * stride, H, D, cos_TR + t * R, sin_TR + t * R, R, interleaved);
        if (C > 0) store_row(qkv_T + t * stride + first_kv, pages_NC, slots_T[t], C, half);
    }
}

/* Activations, with the numbers of `functions/rows.py`. */
enum { SILU, GELU, GELU_TANH, QUICK_GELU, RELU, SIGMOID, RELU2 };

INLINE float activated(float x, const int kind) {
    const float turn = 0.7978845608028654f; /* sqrt(2 / pi) */
    switch (kind) {
    case SILU: return x / (1.0f + exponential(-x));
    case GELU: return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    case GELU_TANH: return x / (1.0f + exponential(-2.0f * turn * fused_one(0.044715f * x * x, x, x)));
    case QUICK_GELU: return x / (1.0f + exponential(-1.702f * x));
    case SIGMOID: return 1.0f / (1.0f + exponential(-x));
    case RELU2: return x < 0.0f ? 0.0f : x * x;
    default: return x < 0.0f ? 0.0f : x;
    }
}

INLINE void activate_row(const float *x, const float *up, float *out, i64 E, const int kind) {
    if (up == NULL) {
#pragma omp simd
        for (i64 e = 0; e < E; e++) out[e] = activated(x[e], kind);
    } else {
#pragma omp simd
        for (i64 e = 0; e < E; e++) out[e] = activated(x[e], kind) * up[e];
    }
}

/* out = activation(x), times up if that is not NULL. */
void activate_columns(const float *x, const float *up, float *out, i64 E, int kind) {
    switch (kind) {
    case SILU: activate_row(x, up, out, E, SILU); break;
    case GELU: activate_row(x, up, out, E, GELU); break;
    case GELU_TANH: activate_row(x, up, out, E, GELU_TANH); break;
    case QUICK_GELU: activate_row(x, up, out, E, QUICK_GELU); break;
    case SIGMOID: activate_row(x, up, out, E, SIGMOID); break;
    case RELU2: activate_row(x, up, out, E, RELU2); break;
    default: activate_row(x, up, out, E, RELU);
    }
}

/* out = activation(x). */
void activate(const float *x_TE, float *out_TE, i64 T, i64 E, int kind) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++) activate_columns(x_TE + t * E, NULL, out_TE + t * E, E, kind);
}

/* out = activation(gate) * up, of rows that hold E gates and then E ups (Shazeer 2020). */
void activate_gate(const float *gate_up_T2E, float *out_TE, i64 T, i64 E, int kind) {
#pragma omp parallel for schedule(static) if (T * E >= PARALLEL)
    for (i64 t = 0; t < T; t++)
        activate_columns(gate_up_T2E + t * 2 * E, gate_up_T2E + t * 2 * E + E, out_TE + t * E, E, kind);
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
            levels_TE[t * E + e] = (int8_t)(uint8_t)level.bits; /* 0 for NaN */
        }
    }
}
