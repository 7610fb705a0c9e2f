/* The gated delta rule (Yang et al. 2025, "Gated Delta Networks") with its short convolution, for float32 on CPUs.

   Each sequence's tokens are divided into runs. A run begins with the state in one slot and leaves its own in another, which
   may be the same. A slot has the channels of the last L - 1 tokens, the farthest first, then a matrix for each head.

   A head's matrix S is multiplied by the decay g; key k writes value v: S + k (b (v - k S)), with strength b; query q finds
   q S. The columns of S do not depend on each other: they are computed a few vectors at a time, so that these stay in the
   nearest cache while some tokens are added. Each number is one sequence of operations, token by token and key by key: it
   depends neither on the runs, nor on the other sequences, nor on the number of threads. NaN and infinity are propagated.

   Strides and widths are in floats. Legend: T tokens, S sequences, R runs, N slots, W width of a slot, F channels, L tokens
   that the convolution sees, J key heads, H value heads, K key dimension, V value dimension. */

#include "lanes.h"

enum { CHANNELS = 256 };       /* that a thread mixes at once */
enum { TOKENS = 16 };          /* whose keys a thread prepares at once */
enum { VECTORS = 4 };          /* of columns that a thread computes at once */
enum { PARALLEL = 64 * 1024 }; /* operations from which threads pay for their start */

/* As `functions/delta.py` declares it. */
typedef struct {
    const i64 *begin_S, *first_R, *count_R, *source_R, *target_R; /* sequence s has runs begin_S[s] to begin_S[s + 1] - 1 */
    float *slots_NW;
    i64 T, S, W, F, L, J, H, K, V;
} Delta;

/* out = the sum over a token and the L - 1 before it of channels times weights, the farthest first. */
void delta_convolve(const Delta *d, const float *x_TF, i64 stride, const float *weight_LF, float *out_TF) {
    const i64 F = d->F, back = d->L - 1, blocks = (F + CHANNELS - 1) / CHANNELS;
#pragma omp parallel for collapse(2) schedule(static) if (d->T * F * d->L >= PARALLEL)
    for (i64 s = 0; s < d->S; s++)
        for (i64 block = 0; block < blocks; block++) {
            const i64 c = block * CHANNELS, num = F - c < CHANNELS ? F - c : CHANNELS;
            const i64 begin = d->begin_S[s], end = d->begin_S[s + 1], first = d->first_R[begin];
            const float *source = d->slots_NW + d->source_R[begin] * d->W + c;
            float tail[d->L][CHANNELS]; /* a copy: the slot may be written */
            for (i64 l = 0; l < back; l++) memcpy(tail[l], source + l * F, (size_t)num * sizeof(float));
            for (i64 r = begin; r < end; r++) {
                const i64 stop = d->first_R[r] + d->count_R[r];
                for (i64 t = d->first_R[r]; t < stop; t++) {
                    float *out = out_TF + t * F + c;
                    for (i64 l = 0; l <= back; l++) {
                        const i64 row = t - back + l;
                        const float *x = row < first ? tail[row - first + back] : x_TF + row * stride + c;
                        const float *weight = weight_LF + l * F + c;
                        if (l == 0)
#pragma omp simd
                            for (i64 i = 0; i < num; i++) out[i] = x[i] * weight[i];
                        else
#pragma omp simd
                            for (i64 i = 0; i < num; i++) out[i] = fused_one(x[i], weight[i], out[i]);
                    }
                }
                float *target = d->slots_NW + d->target_R[r] * d->W + c;
                for (i64 l = 0; l < back; l++) {
                    const i64 row = stop - back + l;
                    const float *x = row < first ? tail[row - first + back] : x_TF + row * stride + c;
                    memcpy(target + l * F, x, (size_t)num * sizeof(float));
                }
            }
        }
}

/* What some tokens bring to one head. */
typedef struct {
    float *q_TK, *k_TK;
    float decay[TOKENS], strength[TOKENS];
} Brought;

/* out = x / |x| * scale. */
static void of_length(const float *x, float *out, i64 K, float scale) {
    float factor = scale / sqrtf(squares(x, K) + 1e-6f);
#pragma omp simd
    for (i64 k = 0; k < K; k++) out[k] = x[k] * factor;
}

static float softplus(float x) { return x > 20.0f ? x : log1pf(exponential(x)); }

/* Adds a token to n vectors of columns, of which the last may have fewer than all lanes (`left` < n * LANES). */
INLINE void add_token(const float *from, float *to, const float *q, const float *k, const float *value, float *out, float g,
                      float b, i64 K, i64 V, i64 left, const int n, const int whole) {
    Lanes known[VECTORS], written[VECTORS], found[VECTORS];
    for (int i = 0; i < n; i++) known[i] = found[i] = (Lanes){0};
    for (i64 row = 0; row < K; row++)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            const float *x = from + row * V + i * LANES;
            known[i] = fused(whole ? load(x) : load_some(x, left - i * LANES), all(k[row]), known[i]);
        }
    for (int i = 0; i < n; i++) {
        Lanes v = whole ? load(value + i * LANES) : load_some(value + i * LANES, left - i * LANES);
        written[i] = (v - known[i] * all(g)) * all(b);
    }
    for (i64 row = 0; row < K; row++)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            const i64 place = row * V + i * LANES;
            Lanes x = whole ? load(from + place) : load_some(from + place, left - i * LANES);
            x = fused(x, all(g), all(k[row]) * written[i]);
            found[i] = fused(x, all(q[row]), found[i]);
            if (whole) store(to + place, x);
            else store_some(to + place, x, left - i * LANES);
        }
    for (int i = 0; i < n; i++) {
        if (whole) store(out + i * LANES, found[i]);
        else store_some(out + i * LANES, found[i], left - i * LANES);
    }
}

/* Adds tokens to all columns of a head: before the first one the matrix is in `from`, afterwards in `to`. */
static void add_tokens(const Delta *d, const Brought *b, const float *from, float *to, const float *value, float *out, i64 num) {
    const i64 K = d->K, V = d->V;
    i64 v = 0;
    for (; v + VECTORS * LANES <= V; v += VECTORS * LANES)
        for (i64 t = 0; t < num; t++)
            add_token((t == 0 ? from : to) + v, to + v, b->q_TK + t * K, b->k_TK + t * K, value + t * d->F + v,
                      out + t * d->H * V + v, b->decay[t], b->strength[t], K, V, 0, VECTORS, 1);
    for (; v < V; v += LANES)
        for (i64 t = 0; t < num; t++)
            add_token((t == 0 ? from : to) + v, to + v, b->q_TK + t * K, b->k_TK + t * K, value + t * d->F + v,
                      out + t * d->H * V + v, b->decay[t], b->strength[t], K, V, V - v, 1, 0);
}

/* out = out / rms(out) * norm * gate * sigmoid(gate). */
static void norm_and_gate(float *out, const float *gate, const float *norm, i64 V, float eps) {
    float factor = 1.0f / sqrtf(squares(out, V) / (float)V + eps);
#pragma omp simd
    for (i64 v = 0; v < V; v++) out[v] = out[v] * factor * norm[v] * (gate[v] / (1.0f + exponential(-gate[v])));
}

/* Queries, keys and values are mixed_TF, in this order; strengths_T2H the logits of strengths, then what decays are made of with
   each head's decay and step; gates [T, H V]. */
void delta_rule(const Delta *d, const float *mixed_TF, const float *strengths_T2H, const float *gate_T, i64 gate_stride,
                const float *decay_H, const float *step_H, const float *norm_V, float eps, float *out_T) {
    const i64 F = d->F, J = d->J, H = d->H, K = d->K, V = d->V;
    const float scale = 1.0f / sqrtf((float)K);
#pragma omp parallel for collapse(2) schedule(dynamic) if (d->T * H * K * V >= PARALLEL)
    for (i64 s = 0; s < d->S; s++)
        for (i64 h = 0; h < H; h++) {
            float q_TK[TOKENS * K], k_TK[TOKENS * K];
            Brought b = {.q_TK = q_TK, .k_TK = k_TK};
            const float rate = exponential(decay_H[h]);
            const i64 place = (d->L - 1) * F + h * K * V, head = h / (H / J);
            for (i64 r = d->begin_S[s]; r < d->begin_S[s + 1]; r++) {
                const float *from = d->slots_NW + d->source_R[r] * d->W + place;
                float *to = d->slots_NW + d->target_R[r] * d->W + place;
                const i64 stop = d->first_R[r] + d->count_R[r];
                for (i64 t = d->first_R[r]; t < stop; t += TOKENS) {
                    const i64 num = stop - t < TOKENS ? stop - t : TOKENS;
                    for (i64 i = 0; i < num; i++) {
                        const float *row = mixed_TF + (t + i) * F, *strengths = strengths_T2H + (t + i) * 2 * H;
                        of_length(row + head * K, q_TK + i * K, K, scale);
                        of_length(row + (J + head) * K, k_TK + i * K, K, 1.0f);
                        b.strength[i] = 1.0f / (1.0f + exponential(-strengths[h]));
                        b.decay[i] = exponential(-rate * softplus(strengths[H + h] + step_H[h]));
                    }
                    float *out = out_T + t * H * V + h * V;
                    add_tokens(d, &b, from, to, mixed_TF + t * F + 2 * J * K + h * V, out, num);
                    for (i64 i = 0; i < num; i++)
                        norm_and_gate(out + i * H * V, gate_T + (t + i) * gate_stride + h * V, norm_V, V, eps);
                    from = to;
                }
            }
        }
}
