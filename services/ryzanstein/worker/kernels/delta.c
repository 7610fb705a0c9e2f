/* The gated delta rule (Yang et al. 2025, "Gated Delta Networks") with its short convolution, for float32 on CPUs.

   Each sequence's tokens are divided into runs. A run begins with the state in one slot and leaves its own in another, which
   may be the same. A slot has the channels of the last L - 1 tokens, the farthest first, then a matrix for each head.

   A head's matrix S is multiplied by the decay g; key k writes value v: S + k (b (v - k S)), with strength b; query q finds
   q S, which is what it finds before the write and (q k) times what is written. The columns of S do not depend on each other:
   they are computed a few vectors at a time, so that these stay in the nearest cache while some tokens are added. Each number is one sequence of operations, token by token and key by key: it
   depends neither on the runs, nor on the other sequences, nor on the number of threads. NaN and infinity are propagated.

   Strides and widths are in floats. Legend: T tokens, S sequences, R runs, N slots, W width of a slot, F channels, L tokens
   that the convolution sees, J key heads, H value heads, K key dimension, V value dimension. */

#include "lanes.h"

enum { CHANNELS = 256 };       /* that a thread mixes at once */
enum { TOKENS = 32 };          /* whose keys a thread prepares at once */
enum { VECTORS = 4 };          /* of columns that a thread computes at once */
enum { PARALLEL = 64 * 1024 }; /* operations from which threads pay for their start */

/* As `functions/delta.py` declares it. */
typedef struct {
    const i64 *begin_S, *first_R, *count_R, *source_R, *target_R; /* sequence s has runs begin_S[s] to begin_S[s + 1] - 1 */
    float *slots_NW;
    i64 T, S, W, F, L, J, H, K, V, tiled; /* tiled: value head h has key head h % J, not h / (H / J) */
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

/* What some tokens bring to one head. `overlap` is the product of a token's key and query. */
typedef struct {
    float *q_TK, *k_TK;
    float decay[TOKENS], strength[TOKENS], overlap[TOKENS];
} Brought;

/* out = x / |x| * scale. */
static void of_length(const float *x, float *out, i64 K, float scale) {
    float factor = scale / sqrtf(squares(x, K) + 1e-6f);
#pragma omp simd
    for (i64 k = 0; k < K; k++) out[k] = x[k] * factor;
}

static float dot(const float *x, const float *y, i64 K) {
    Lanes sum = {0};
    for (i64 k = 0; k < K; k += LANES) sum = fused(load_some(x + k, K - k), load_some(y + k, K - k), sum);
    return sum_of(sum);
}

/* log(1 + e^x), by the series of 2 artanh(u / (2 + u)) for log(1 + u): the library's logarithm differs between systems. */
static float softplus(float x) {
    float u = exponential(-fabsf(x)), z = u / (2.0f + u), square = z * z, sum = 1.0f / 13;
    for (int n = 11; n > 0; n -= 2) sum = fused_one(sum, square, 1.0f / (float)n);
    return (x > 0.0f ? x : 0.0f) + 2.0f * z * sum;
}

/* Columns of a matrix: `stride` from row to row, in n vectors, of which the last may have fewer than all lanes (`left`). */
typedef struct {
    const float *from;
    float *to;
    i64 from_stride, to_stride, left;
} Columns;

INLINE Lanes load_of(const float *x, i64 i, i64 left, const int whole) { return whole ? load(x) : load_some(x, left - i * LANES); }
INLINE void store_of(float *x, Lanes value, i64 i, i64 left, const int whole) {
    if (whole) store(x, value);
    else store_some(x, value, left - i * LANES);
}

/* Reads the columns and adds the last token to them (k NULL: there is none); stores them (`to` NULL: not); finds what the next
   token's key and query read (next_k NULL: there is none). */
INLINE void pass(const Columns *c, const float *k, float g, const Lanes *written, const float *next_k, const float *next_q,
                 Lanes *known, Lanes *found, i64 K, const int n, const int whole) {
    for (i64 row = 0; row < K; row++)
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            Lanes x = load_of(c->from + row * c->from_stride + i * LANES, i, c->left, whole);
            if (k != NULL) x = fused(x, all(g), all(k[row]) * written[i]);
            if (c->to != NULL) store_of(c->to + row * c->to_stride + i * LANES, x, i, c->left, whole);
            if (next_k != NULL) {
                known[i] = fused(x, all(next_k[row]), known[i]);
                found[i] = fused(x, all(next_q[row]), found[i]);
            }
        }
}

/* Adds tokens to n vectors of a head's columns: before the first one they are in `from`, afterwards in `to`. In between they are
   side by side in `side`, which stays in the nearest cache. */
INLINE void add_columns(const Delta *d, const Brought *b, Columns c, float *side, const float *value, float *out, i64 num,
                        const int n, const int whole) {
    const i64 K = d->K, F = d->F, width = n * LANES;
    Lanes written[VECTORS], known[VECTORS], found[VECTORS];
    Columns inside = {c.from, side, c.from_stride, width, c.left};
    for (i64 t = 0; t < num; t++) {
        for (int i = 0; i < n; i++) known[i] = found[i] = (Lanes){0};
        if (t == 0) {
            inside.to = num > 1 ? side : NULL;
            pass(&inside, NULL, 0, NULL, b->k_TK, b->q_TK, known, found, K, n, whole);
            if (num > 1) inside.from = side, inside.from_stride = width;
        } else {
            const float *k = b->k_TK + (t - 1) * K;
            pass(&inside, k, b->decay[t - 1], written, k + K, b->q_TK + t * K, known, found, K, n, whole);
        }
        for (int i = 0; i < n; i++) {
            Lanes v = load_of(value + t * F + i * LANES, i, c.left, whole), g = all(b->decay[t]);
            written[i] = (v - known[i] * g) * all(b->strength[t]);
            store_of(out + t * d->H * d->V + i * LANES, fused(found[i], g, written[i] * all(b->overlap[t])), i, c.left, whole);
        }
    }
    inside.to = c.to, inside.to_stride = c.to_stride;
    pass(&inside, b->k_TK + (num - 1) * K, b->decay[num - 1], written, NULL, NULL, NULL, NULL, K, n, whole);
}

static void add_tokens(const Delta *d, const Brought *b, const float *from, float *to, float *side, const float *value,
                       float *out, i64 num) {
    const i64 V = d->V;
    i64 v = 0;
    for (; v + VECTORS * LANES <= V; v += VECTORS * LANES)
        add_columns(d, b, (Columns){from + v, to + v, V, V, 0}, side, value + v, out + v, num, VECTORS, 1);
    for (; v < V; v += LANES) add_columns(d, b, (Columns){from + v, to + v, V, V, V - v}, side, value + v, out + v, num, 1, 0);
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
            float q_TK[TOKENS * K], k_TK[TOKENS * K], side[K * VECTORS * LANES];
            Brought b = {.q_TK = q_TK, .k_TK = k_TK};
            const float rate = exponential(decay_H[h]);
            const i64 place = (d->L - 1) * F + h * K * V, head = d->tiled ? h % J : h / (H / J);
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
                        b.overlap[i] = dot(q_TK + i * K, k_TK + i * K, K);
                        b.strength[i] = 1.0f / (1.0f + exponential(-strengths[h]));
                        b.decay[i] = exponential(-rate * softplus(strengths[H + h] + step_H[h]));
                    }
                    float *out = out_T + t * H * V + h * V;
                    add_tokens(d, &b, from, to, side, mixed_TF + t * F + 2 * J * K + h * V, out, num);
                    for (i64 i = 0; i < num; i++)
                        norm_and_gate(out + i * H * V, gate_T + (t + i) * gate_stride + h * V, norm_V, V, eps);
                    from = to;
                }
            }
        }
}
