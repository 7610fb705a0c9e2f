/* The gated delta rule (Yang et al. 2025, "Gated Delta Networks"), for float32 on CPUs; see slots.h.

   A head's matrix S is multiplied by the decay g; key k writes value v: S + k (b (v - k S)), with strength b; query q finds
   q S, which is what it finds before the write and (q k) times what is written. The columns of S do not depend on each other:
   they are computed a few vectors at a time, so that these stay in the nearest cache while some tokens are added. Each number
   is one sequence of operations, token by token and key by key: it depends neither on the runs, nor on the other sequences,
   nor on the number of threads. NaN and infinity are propagated.

   J are key heads, H value heads. Those of a key head follow each other, or if `tiled` are J heads apart. */

#include "slots.h"

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
INLINE void add_columns(const Slots *d, const Brought *b, Columns c, float *side, const float *value, float *out, i64 num,
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

static void add_tokens(const Slots *d, const Brought *b, const float *from, float *to, float *side, const float *value,
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
void delta_rule(const Slots *d, i64 tiled, const float *mixed_TF, const float *strengths_T2H, const float *gate_T,
                i64 gate_stride, const float *decay_H, const float *step_H, const float *norm_V, float eps, float *out_T) {
    const i64 F = d->F, J = d->J, H = d->H, K = d->K, V = d->V;
    const float scale = 1.0f / sqrtf((float)K);
#pragma omp parallel for collapse(2) schedule(dynamic) if (d->T * H * K * V >= PARALLEL)
    for (i64 s = 0; s < d->S; s++)
        for (i64 h = 0; h < H; h++) {
            float q_TK[TOKENS * K], k_TK[TOKENS * K], side[K * VECTORS * LANES];
            Brought b = {.q_TK = q_TK, .k_TK = k_TK};
            const float rate = exponential(decay_H[h]);
            const i64 place = (d->L - 1) * F + h * K * V, head = tiled ? h % J : h / (H / J);
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
