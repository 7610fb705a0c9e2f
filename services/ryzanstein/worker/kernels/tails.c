/* The short convolution of layers that keep a state, whose slots have what it needs of the last tokens; see slots.h.

   Each number is one sequence of operations: it depends neither on the runs, nor on the other sequences, nor on the number
   of threads. NaN and infinity are propagated. */

#include "slots.h"

enum { CHANNELS = 256 }; /* that a thread mixes at once */

/* out = the sum over a token and the L - 1 before it of channels times weights, the farthest first, and
   the bias, if there is one. */
void convolve_tails(const Slots *d, const float *x_TF, i64 stride, const float *weight_LF, const float *bias_F, float *out_TF) {
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
                        if (l == 0 && bias_F == NULL)
#pragma omp simd
                            for (i64 i = 0; i < num; i++) out[i] = x[i] * weight[i];
                        else if (l == 0)
#pragma omp simd
                            for (i64 i = 0; i < num; i++) out[i] = fused_one(x[i], weight[i], bias_F[c + i]);
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
