/* The likeliest token of a row of logits, and random draws: temperature, top-k, top-p, min-p.

   The weight of a token is a whole number, 2^bits for the likeliest, so that sums are exact in any order. It is computed from
   the logit in float64 by additions and products that are each rounded once: `truncation.py` does the same with torch, bit
   for bit, and so does every CPU. Beside one weight for each token
   of the row, nothing of a vocabulary's size is kept.

   Legend: S rows, R rows drawn among them, V vocabulary. */

#include <float.h>
#include <stdlib.h>

#include "team.h"

enum {
    CHUNK = 512,          /* tokens whose buckets are found at once */
    GROUP = 128,          /* tokens that are skipped at once */
    PARTS = 256,          /* sums of weights of a row */
    BUCKETS = 2048,       /* of equal width in logits; one more is for logits outside their range */
    COPIES = 2,           /* of the buckets, for alternate tokens: an addition waits for a preceding one to the same bucket */
    SMALL = 1024,         /* up to so many tokens a bucket is sorted, not split again */
    PARALLEL = 32 * 1024, /* logits from which threads pay for their start */
};

/* The draw of one row: Draw of `draw.py`. */
typedef struct {
    i64 row, bits, top_k, least;
    double rate, top_p, uniform;
} Draw;

typedef struct {
    const float *x_V;
    i64 *weight_V, V;
    float best;
} Row;

typedef union {
    double value;
    uint64_t bits;
} Double;

/* ROUNDING for doubles. */
#define ROUNDING_DOUBLE 6755399441055744.0 /* 1.5 * 2^52 */

INLINE i64 smaller(i64 a, i64 b) { return a < b ? a : b; }

/* Returns the greatest number, or NaN if there is one. */
static float greatest_of(const float *x, i64 count) {
    float best = -INFINITY;
    int invalid = 0;
#pragma omp simd reduction(max : best) reduction(| : invalid)
    for (i64 i = 0; i < count; i++) {
        best = x[i] > best ? x[i] : best;
        invalid |= x[i] != x[i];
    }
    return invalid ? NAN : best;
}

/* Finds the greatest logit of a row and the lowest token that has it; NaN and 0 if the row has a NaN. */
void greatest_row(const float *x, i64 V, float *best_logit, i64 *best_token) {
    float best = -INFINITY;
    i64 token = 0;
    for (i64 begin = 0; begin < V && best == best; begin += CHUNK) {
        float found = greatest_of(x + begin, smaller(CHUNK, V - begin));
        if (found <= best) continue;
        best = found;
        token = begin;
    }
    while (best == best && x[token] != best) token++;
    *best_logit = best;
    *best_token = best == best ? token : 0;
}

void greatest(const float *logits_SV, float *best_S, i64 *token_S, i64 S, i64 stride, i64 V) {
#pragma omp parallel for schedule(static) if (S > 1 && S * V >= PARALLEL)
    for (i64 s = 0; s < S; s++) greatest_row(logits_SV + s * stride, V, best_S + s, token_S + s);
}

/* Copies each row of logits, with -INFINITY for tokens whose bit in `allowed` is 0. A word has 32 tokens, the first in its lowest
   bit. */
void restrict_rows(const float *logits_SV, i64 stride, const uint32_t *allowed_SW, i64 words, float *out_SV, i64 S, i64 V) {
#pragma omp parallel for schedule(static) if (S > 1 && S * V >= PARALLEL)
    for (i64 s = 0; s < S; s++) {
        const float *x = logits_SV + s * stride;
        float *out = out_SV + s * V;
        for (i64 begin = 0; begin < V; begin += 32) {
            const uint32_t allowed = allowed_SW[s * words + begin / 32];
            const i64 count = smaller(32, V - begin);
#pragma omp simd
            for (i64 i = 0; i < count; i++) out[begin + i] = allowed >> i & 1 ? x[begin + i] : -INFINITY;
        }
    }
}

/* Returns 2^f for f in [-0.5, 0.5], and 1 for 0: 12 terms of Taylor's series, with an error of 1e-14. Neighbours are added first:
   a single chain would take twice as long. */
INLINE double series(double f) {
    const double f2 = f * f, f4 = f2 * f2, f8 = f4 * f4;
    const double p0 = 1.0 + 0.6931471805599453 * f, p1 = 0.24022650695910072 + 0.05550410866482158 * f;
    const double p2 = 0.009618129107628477 + 0.0013333558146428443 * f, p3 = 0.0001540353039338161 + 1.5252733804059841e-5 * f;
    const double p4 = 1.321548679014431e-6 + 1.01780860092397e-7 * f, p5 = 7.054911620801123e-9 + 4.4455382718708116e-10 * f;
    return ((p0 + p1 * f2) + (p2 + p3 * f2) * f4) + (p4 + p5 * f2) * f8;
}

/* Computes the weights, 2^(bits + (x - best) * rate), rounded to whole numbers. */
static void weigh(const Row *row, i64 bits, double rate) {
    const float *x_V = row->x_V;
    i64 *weight_V = row->weight_V;
    const double best = row->best;
    const uint64_t exponent = 1023 + (uint64_t)bits;
#pragma omp simd
    for (i64 i = 0; i < row->V; i++) {
        double y = (x_V[i] - best) * rate;
        y = y > -64.0 ? y : -64.0;
        Double turns = {y + ROUNDING_DOUBLE}, none = {ROUNDING_DOUBLE};
        Double power = {.bits = (turns.bits + exponent) << 52};
        Double whole = {series(y - (turns.value - ROUNDING_DOUBLE)) * power.value + ROUNDING_DOUBLE};
        weight_V[i] = (i64)(whole.bits - none.bits);
    }
}

/* Returns the least logit that is at least `low`. */
static float lowest(const Row *row, float low) {
    float found = row->best;
    const float *x_V = row->x_V;
#pragma omp simd reduction(min : found)
    for (i64 i = 0; i < row->V; i++) {
        float x = x_V[i] >= low ? x_V[i] : INFINITY;
        found = x < found ? x : found;
    }
    return found;
}

/* Returns whether any of the tokens has a logit of at least `floor`. */
static int reaches(const Row *row, i64 begin, i64 count, float floor) {
    return greatest_of(row->x_V + begin, count) >= floor;
}

/* A range of logits in which the sum of weights, or the number of tokens, from `high` down reaches a bound. */
typedef struct {
    float low, high; /* both are logits of the row */
    i64 needed;
    int counts;
} Search;

typedef struct {
    float x;
    i64 measure; /* weight, or 1 */
} Token;

typedef struct {
    i64 count;
    float low, high;
    Token first[SMALL];
} Bucket;

/* Returns the bucket of a logit in the range: its distance from the high end. `low` and `high` are in different buckets. */
INLINE int32_t place(Search range, double x) {
    const double scale = (BUCKETS - 1) / ((double)range.high - range.low), distance = (range.high - x) * scale;
    return (int32_t)(distance < BUCKETS - 1 ? distance : BUCKETS - 1);
}

/* Returns the index of a token's bucket among all copies. */
INLINE int32_t copy_of(i64 i, int32_t bucket) { return bucket + (int32_t)(i % COPIES) * (BUCKETS + 1); }

/* Finds the bucket of each of `count` tokens. */
static void spread(const Row *row, Search range, i64 begin, i64 count, int32_t *bucket) {
    const float *x_V = row->x_V + begin;
#pragma omp simd
    for (i64 i = 0; i < count; i++) {
        int inside = x_V[i] >= range.low && x_V[i] <= range.high;
        int32_t found = place(range, inside ? x_V[i] : range.high);
        bucket[i] = copy_of(i, inside ? found : BUCKETS);
    }
}

/* Computes the sum of each bucket. Returns the sum of all. */
static i64 sum_buckets(const Row *row, Search range, i64 *sums) {
    i64 copies[COPIES * (BUCKETS + 1)] = {0}, total = 0;
    int32_t bucket[CHUNK];
    for (i64 begin = 0; begin < row->V; begin += CHUNK) {
        i64 count = smaller(CHUNK, row->V - begin);
        const i64 *weight = row->weight_V + begin;
        if (!reaches(row, begin, count, range.low)) continue;
        spread(row, range, begin, count, bucket);
        if (range.counts)
            for (i64 i = 0; i < count; i++) copies[bucket[i]]++;
        else
            for (i64 i = 0; i < count; i++) copies[bucket[i]] += weight[i];
    }
    for (int32_t b = 0; b < BUCKETS; b++) {
        sums[b] = 0;
        for (i64 n = 0; n < COPIES; n++) sums[b] += copies[copy_of(n, b)];
        total += sums[b];
    }
    return total;
}

/* Adds the tokens of one bucket: all of them to its range and count, and each to `first` while there is room. */
static void collect_some(const Row *row, Search range, i64 begin, i64 count, int32_t wanted, Bucket *found) {
    const float *x_V = row->x_V + begin;
    int32_t bucket[GROUP];
    float low = found->low, high = found->high;
    i64 hits = 0, last = found->count;
    spread(row, range, begin, count, bucket);
#pragma omp simd reduction(min : low) reduction(max : high) reduction(+ : hits)
    for (i64 i = 0; i < count; i++) {
        int hit = bucket[i] == copy_of(i, wanted);
        low = hit && x_V[i] < low ? x_V[i] : low;
        high = hit && x_V[i] > high ? x_V[i] : high;
        hits += hit;
    }
    found->low = low;
    found->high = high;
    found->count += hits;
    for (i64 i = 0; last < found->count && found->count <= SMALL; i++)
        if (bucket[i] == copy_of(i, wanted)) found->first[last++] = (Token){x_V[i], range.counts ? 1 : row->weight_V[begin + i]};
}

/* Collects the tokens of one bucket. Few logits are near it: the others are skipped a group at a time. */
static void collect(const Row *row, Search range, i64 wanted, Bucket *found) {
    const double width = ((double)range.high - range.low) / (BUCKETS - 1);
    const float from = nextafterf((float)(range.high - width * (double)(wanted + 2)), -INFINITY);
    const float to = nextafterf((float)(range.high - width * (double)(wanted - 1)), INFINITY);
    found->count = 0;
    found->low = INFINITY;
    found->high = -INFINITY;
    for (i64 begin = 0; begin < row->V; begin += GROUP) {
        i64 count = smaller(GROUP, row->V - begin);
        int near = 0;
#pragma omp simd reduction(| : near)
        for (i64 i = begin; i < begin + count; i++) near |= (row->x_V[i] >= from) & (row->x_V[i] <= to);
        if (near) collect_some(row, range, begin, count, (int32_t)wanted, found);
    }
}

/* Returns the first bucket, from the high end, that reaches the bound; `needed` becomes what is left for it. */
static i64 reach(const i64 *sums, i64 *needed) {
    i64 b = 0;
    for (; b < BUCKETS - 1 && sums[b] < *needed; b++) *needed -= sums[b];
    return b;
}

static int descending(const void *a, const void *b) {
    float left = ((const Token *)a)->x, right = ((const Token *)b)->x;
    return (left < right) - (left > right);
}

/* Like `reach`, for the tokens of a bucket: returns the logit of the token that reaches the bound. */
static float reach_token(Bucket *found, i64 needed) {
    i64 i = 0;
    qsort(found->first, (size_t)found->count, sizeof(Token), descending);
    for (; i < found->count - 1 && found->first[i].measure < needed; i++) needed -= found->first[i].measure;
    return found->first[i].x;
}

/* Returns a share of a sum, rounded up, and at least 1. */
static i64 share_of(i64 total, double share) {
    i64 needed = (i64)ceil(share * (double)total);
    return needed < 1 ? 1 : needed;
}

/* Returns the logit down to which there are `needed` tokens or, if that is 0, the tokens have the given share of the weight. Only
   tokens from `low` on count. */
static float reached(const Row *row, float low, i64 needed, double share) {
    i64 sums[BUCKETS];
    Bucket found;
    Search range = {lowest(row, low), row->best, needed, needed > 0};
    while (range.low < range.high) {
        i64 total = sum_buckets(row, range, sums);
        if (range.needed == 0) range.needed = share_of(total, share);
        if (range.needed > total) return low;
        collect(row, range, reach(sums, &range.needed), &found);
        if (found.count <= SMALL) return reach_token(&found, range.needed);
        range.low = found.low;
        range.high = found.high;
    }
    return range.high;
}

/* Returns the least logit that may be drawn; smaller ones have weight 0 or are cut. Tokens equal to the last one kept are kept. */
static float floor_of(const Row *row, const Draw *draw) {
    float floor = (float)fmax(row->best - (double)(draw->bits + 2) / draw->rate, -FLT_MAX);
    if (draw->top_k > 0) floor = reached(row, floor, draw->top_k, 0.0);
    if (draw->top_p < 1.0) floor = reached(row, floor, 0, draw->top_p);
    return floor;
}

/* Sets the weights of tokens that may not be drawn to 0. Returns the sum of the others. */
static i64 keep(const Row *row, i64 begin, i64 end, float floor, i64 least) {
    const float *x_V = row->x_V;
    i64 *weight_V = row->weight_V, sum = 0;
#pragma omp simd reduction(+ : sum)
    for (i64 i = begin; i < end; i++) {
        weight_V[i] = x_V[i] >= floor && weight_V[i] >= least ? weight_V[i] : 0;
        sum += weight_V[i];
    }
    return sum;
}

/* Returns the token at which the sum of weights, in vocabulary order, exceeds a uniform part of their total. */
static i64 drawn(const Row *row, float floor, i64 least, double uniform) {
    const i64 V = row->V, length = (V + PARTS - 1) / PARTS;
    i64 sums[PARTS], total = 0, part = 0;
    for (i64 n = 0; n < PARTS; n++) {
        sums[n] = keep(row, smaller(n * length, V), smaller((n + 1) * length, V), floor, least);
        total += sums[n];
    }
    i64 left = (i64)(uniform * (double)total);
    for (; part < PARTS - 1 && sums[part] <= left; part++) left -= sums[part];
    i64 token = part * length;
    for (; token < V - 1 && row->weight_V[token] <= left; token++) left -= row->weight_V[token];
    return token;
}

static i64 draw_row(Row row, const Draw *draw) {
    row.best = greatest_of(row.x_V, row.V);
    if (!isfinite(row.best)) return -1;
    weigh(&row, draw->bits, draw->rate);
    return drawn(&row, floor_of(&row, draw), draw->least, draw->uniform);
}

/* Draws one token for each of R rows; -1 if the row's greatest logit is not finite. Returns whether memory was short. */
int draw_rows(const float *logits_SV, i64 stride, i64 V, const Draw *draw_R, i64 *token_R, i64 R) {
    int failed = 0;
#pragma omp parallel if (R > 1 && R * V >= PARALLEL)
    {
        i64 *weight_V = malloc((size_t)V * sizeof(i64));
        if (weight_V == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (i64 r = 0; r < R; r++)
            if (weight_V != NULL)
                token_R[r] = draw_row((Row){logits_SV + draw_R[r].row * stride, weight_V, V, 0.0f}, &draw_R[r]);
        free(weight_V);
    }
    return failed;
}
