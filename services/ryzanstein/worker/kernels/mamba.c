/* The state space of Mamba 2 (Dao and Gu 2024), for float32 on CPUs; see slots.h.

   A head's matrix S is multiplied by the decay e^(a dt), a < 0; key B writes the input x as long as the step dt: S + B (dt x);
   query C finds C S, and a part of x is added. A group of heads shares B and C. The columns of S do not depend on each other:
   they are computed a few vectors at a time, so that these stay in the nearest cache while some tokens are added. Each number
   is one sequence of operations, token by token and row by row: it depends neither on the runs, nor on the other sequences,
   nor on the number of threads. NaN and infinity are propagated.

   J are groups, K rows of B and C, V numbers of a head's input. */

#include "slots.h"

/* Rows whose products with a query are summed apart, so that none waits for another. */
enum { CHAINS = 2 };

/* What some tokens bring to one head. Keys and queries are F apart. */
typedef struct {
    const float *key, *query;
    float decay[TOKENS], step[TOKENS], skip;
} Brought;

INLINE void add_row(const Columns *c, i64 row, float key, float query, Lanes g, const Lanes *written, Lanes *found, const int n,
                    const int whole) {
#pragma GCC unroll 4
    for (int i = 0; i < n; i++) {
        Lanes s = load_of(c->from + row * c->from_stride + i * LANES, i, c->left, whole);
        s = fused(s, g, all(key) * written[i]);
        store_of(c->to + row * c->to_stride + i * LANES, s, i, c->left, whole);
        found[i] = fused(s, all(query), found[i]);
    }
}

/* Adds tokens to n vectors of a head's columns: before the first one they are in `from`, afterwards in `to`. In between they are
   side by side in `side`, which stays in the nearest cache. */
INLINE void add_columns(const Slots *d, const Brought *b, Columns c, float *side, const float *input, float *out, i64 num,
                        const int n, const int whole) {
    const i64 K = d->K, F = d->F, width = n * LANES;
    for (i64 t = 0; t < num; t++) {
        Lanes x[VECTORS], written[VECTORS], found[CHAINS][VECTORS];
        for (int i = 0; i < n; i++) {
            x[i] = load_of(input + t * F + i * LANES, i, c.left, whole);
            written[i] = x[i] * all(b->step[t]);
            found[0][i] = found[1][i] = (Lanes){0};
        }
        Columns now = {side, side, width, width, c.left};
        if (t == 0) now.from = c.from, now.from_stride = c.from_stride;
        if (t == num - 1) now.to = c.to, now.to_stride = c.to_stride;
        const float *key = b->key + t * F, *query = b->query + t * F;
        const Lanes g = all(b->decay[t]);
        i64 row = 0;
        for (; row + CHAINS <= K; row += CHAINS)
            for (int chain = 0; chain < CHAINS; chain++)
                add_row(&now, row + chain, key[row + chain], query[row + chain], g, written, found[chain], n, whole);
        if (row < K) add_row(&now, row, key[row], query[row], g, written, found[0], n, whole);
        for (int i = 0; i < n; i++)
            store_of(out + t * d->H * d->V + i * LANES, fused(x[i], all(b->skip), found[0][i] + found[1][i]), i, c.left, whole);
    }
}

static void add_tokens(const Slots *d, const Brought *b, const float *from, float *to, float *side, const float *input, float *out,
                       i64 num) {
    const i64 V = d->V;
    i64 v = 0;
    for (; v + VECTORS * LANES <= V; v += VECTORS * LANES)
        add_columns(d, b, (Columns){from + v, to + v, V, V, 0}, side, input + v, out + v, num, VECTORS, 1);
    for (; v + 2 * LANES <= V; v += 2 * LANES)
        add_columns(d, b, (Columns){from + v, to + v, V, V, 0}, side, input + v, out + v, num, 2, 1);
    for (; v < V; v += LANES) add_columns(d, b, (Columns){from + v, to + v, V, V, V - v}, side, input + v, out + v, num, 1, 0);
}

/* out = out * gate * sigmoid(gate). */
INLINE void apply_gate(float *out, const float *gate, i64 V) {
#pragma omp simd
    for (i64 v = 0; v < V; v++) out[v] *= gate[v] / (1.0f + exponential(-gate[v]));
}

/* Inputs, keys and queries are mixed_TF, in this order; step_TH are steps before each head's own number is added, softplus and
   bounds; gates [T, H V] or NULL. a is -e^decay_H. */
void mamba_scan(const Slots *d, const float *mixed_TF, const float *step_TH, i64 step_stride, const float *gate_T, i64 gate_stride,
                const float *decay_H, const float *bias_H, const float *skip_H, float least, float most, float *out_T) {
    const i64 F = d->F, J = d->J, H = d->H, K = d->K, V = d->V;
#pragma omp parallel for collapse(2) schedule(dynamic) if (d->T * H * K * V >= PARALLEL)
    for (i64 s = 0; s < d->S; s++)
        for (i64 h = 0; h < H; h++) {
            float side[K * VECTORS * LANES];
            Brought b = {.skip = skip_H[h]};
            const float rate = exponential(decay_H[h]);
            const i64 place = (d->L - 1) * F + h * K * V, group = h / (H / J);
            for (i64 r = d->begin_S[s]; r < d->begin_S[s + 1]; r++) {
                const float *from = d->slots_NW + d->source_R[r] * d->W + place;
                float *to = d->slots_NW + d->target_R[r] * d->W + place;
                const i64 stop = d->first_R[r] + d->count_R[r];
                for (i64 t = d->first_R[r]; t < stop; t += TOKENS) {
                    const i64 num = stop - t < TOKENS ? stop - t : TOKENS;
                    const float *mixed = mixed_TF + t * F;
                    b.key = mixed + H * V + group * K, b.query = b.key + J * K;
                    for (i64 i = 0; i < num; i++) {
                        float step = softplus(step_TH[(t + i) * step_stride + h] + bias_H[h]);
                        step = step < least ? least : step > most ? most : step;
                        b.step[i] = step, b.decay[i] = exponential(-rate * step);
                    }
                    float *out = out_T + t * H * V + h * V;
                    add_tokens(d, &b, from, to, side, mixed + h * V, out, num);
                    if (gate_T != NULL)
                        for (i64 i = 0; i < num; i++) apply_gate(out + i * H * V, gate_T + (t + i) * gate_stride + h * V, V);
                    from = to;
                }
            }
        }
}

/* The sum of squares of each of J groups of E numbers of a row. */
void mamba_squares(const float *x, i64 T, i64 J, i64 E, float *out_TJ) {
#pragma omp parallel for schedule(static) if (T * J * E >= PARALLEL)
    for (i64 i = 0; i < T * J; i++) out_TJ[i] = squares(x + i * E, E);
}

/* x = x / sqrt(the group's squares / count + eps) * weight, and times gate * sigmoid(gate) if there are gates. */
void mamba_norm(float *x, const float *squares_TJ, const float *weight, i64 T, i64 J, i64 E, i64 count, float eps,
                const float *gate_T, i64 gate_stride) {
#pragma omp parallel for collapse(2) schedule(static) if (T * J * E >= PARALLEL)
    for (i64 t = 0; t < T; t++)
        for (i64 j = 0; j < J; j++) {
            float *out = x + (t * J + j) * E, factor = 1.0f / sqrtf(squares_TJ[t * J + j] / (float)count + eps);
#pragma omp simd
            for (i64 e = 0; e < E; e++) out[e] = out[e] * factor * weight[j * E + e];
            if (gate_T != NULL) apply_gate(out, gate_T + t * gate_stride + j * E, E);
        }
}
