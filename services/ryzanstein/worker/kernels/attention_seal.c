/* Seals pages: compresses the keys and values of 16 tokens into a cold block (attention_pages.h).

   A block depends on nothing but the page: neither on what is sealed beside it nor on the number of threads.

   Legend: M pages, K key-value heads, D head dimension, C columns of a slot, V bytes of a value. */

#include <math.h>
#include <stdlib.h>

#include "attention_pages.h"

enum { PARALLEL = 16 * 1024 }; /* numbers from which threads pay for their start */

typedef struct {
    const char *pages_NC;    /* slots with keys of K heads, and values of K heads from `values` on */
    char *cold;              /* blocks */
    const i64 *from_M, *to_M; /* numbers of pages and blocks */
    i64 C, values, M, K, D, half, key_kind, value_kind;
} Seal;

/* Rounds to the nearest number of FP8, half to even. |x| is at most 448 but for rounding; NaN stays NaN. */
INLINE uint8_t as_fp8(float x) {
    Float value = {x}, size = {.bits = value.bits & 0x7fffffff};
    Float small = {size.value + 16384.0f}; /* whole numbers of 2^-9 are its lowest bits */
    uint32_t normal = (size.bits + 0x7ffff + (size.bits >> 20 & 1) - (120u << 23)) >> 20;
    uint32_t found = size.bits < (121u << 23) ? small.bits - (141u << 23) : normal;
    found = found > 0x7e ? 0x7e : found;
    found = size.bits > 0x7f800000 ? 0x7f : found;
    return (uint8_t)(found | (value.bits >> 24 & 0x80));
}

static void encode(const float *x, uint8_t *out, i64 D, float scale, int kind) {
    if (kind == FP8)
#pragma omp simd
        for (i64 d = 0; d < D; d++) out[d] = as_fp8(x[d] / scale);
    else
#pragma omp simd
        for (i64 d = 0; d < D; d++) {
            Float level = {x[d] / scale + ROUNDING};
            out[d] = level.value == level.value ? (uint8_t)level.bits : 0;
        }
}

/* Returns the scale: NaN if a number is NaN or infinite. */
static float scale_of(const float *x, i64 count, int kind) {
    float largest = 0, invalid = 0;
#pragma omp simd reduction(max : largest) reduction(+ : invalid)
    for (i64 i = 0; i < count; i++) {
        float size = fabsf(x[i]);
        largest = size > largest ? size : largest;
        invalid += x[i] * 0.0f;
    }
    float scale = largest / (kind == FP8 ? 448.0f : 127.0f);
    return (scale < 0x1p-126f ? 0x1p-126f : scale) + invalid;
}

/* Loads the page's keys or values of a head as [16][D]. */
static void gather(const Seal *s, const char *first, float *x_JD, i64 item_bytes) {
    for (i64 j = 0; j < PAGE; j++) {
        const char *row = first + j * s->C * item_bytes;
        if (!s->half) memcpy(x_JD + j * s->D, row, (size_t)s->D * sizeof(float));
        else
#pragma omp simd
            for (i64 d = 0; d < s->D; d++) x_JD[j * s->D + d] = (float)((const _Float16 *)row)[d];
    }
}

/* Returns the number of FP8 in a code without sign. */
INLINE float fp8_value(uint8_t code) {
    Float value = {.bits = (120u << 23) + ((uint32_t)code << 20)};
    return code < 8 ? (float)code * 0x1p-9f : value.value;
}

/* Seals keys in int8 with a scale for each channel, rounded up: no number exceeds 127. */
static void seal_channels(const Seal *s, const float *x_JD, char *part) {
    const i64 D = s->D;
    char *codes = part + PART_HEAD, *keys = part + part_keys(D, CHANNELS);
    float scale = scale_of(x_JD, PAGE * D, INT8) / 448.0f;
    scale = scale < 0x1p-126f ? 0x1p-126f : scale;
    memcpy(part, &scale, sizeof scale);
    memset(codes, 0, (size_t)(keys - codes));
    for (i64 d = 0; d < D; d++) {
        float largest = 0;
        for (i64 j = 0; j < PAGE; j++) largest = fabsf(x_JD[j * D + d]) > largest ? fabsf(x_JD[j * D + d]) : largest;
        float wanted = largest / 127.0f / scale;
        uint8_t code = as_fp8(wanted);
        if (code < 0x7e && fp8_value(code) < wanted) code++;
        float own = fp8_value(code) * scale;
        for (i64 j = 0; j < PAGE; j++) {
            float level = rintf(x_JD[j * D + d] / own); /* NaN where the scale is NaN or 0 */
            keys[d * PAGE + j] = (char)(int8_t)(level > 127 ? 127 : level < -127 ? -127 : level == level ? level : 0);
        }
        codes[d] = (char)code;
    }
}

static void seal_keys(const Seal *s, const float *x_JD, uint8_t *coded_D, char *part) {
    const i64 D = s->D;
    char *keys = part + PART_HEAD;
    if (s->key_kind == CHANNELS) {
        seal_channels(s, x_JD, part);
        return;
    }
    float scale = s->key_kind == HALF ? 1.0f : scale_of(x_JD, PAGE * D, (int)s->key_kind);
    memcpy(part, &scale, sizeof scale);
    for (i64 j = 0; j < PAGE; j++) {
        if (s->key_kind == HALF) {
            for (i64 d = 0; d < D; d++) ((_Float16 *)keys)[d * PAGE + j] = (_Float16)x_JD[j * D + d];
            continue;
        }
        encode(x_JD + j * D, coded_D, D, scale, (int)s->key_kind);
        for (i64 d = 0; d < D; d++) keys[d * PAGE + j] = (char)coded_D[d];
    }
}

static void seal_values(const Seal *s, const float *x_JD, char *part) {
    const i64 D = s->D, V = value_row_bytes(D);
    char *values = part + part_values(D, (int)s->key_kind);
    float scale = scale_of(x_JD, PAGE * D, (int)s->value_kind);
    memcpy(part + sizeof scale, &scale, sizeof scale);
    memset(part + 2 * sizeof scale, 0, PART_HEAD - 2 * sizeof scale);
    for (i64 j = 0; j < PAGE; j++) {
        encode(x_JD + j * D, (uint8_t *)values + j * V, D, scale, (int)s->value_kind);
        memset(values + j * V + D, 0, (size_t)(V - D));
    }
}

/* Seals pages into blocks. Nonzero: no memory. */
int seal(const Seal *s) {
    const i64 item_bytes = s->half ? 2 : 4, bytes = part_bytes(s->D, (int)s->key_kind);
    int failed = 0;
#pragma omp parallel if (s->M * PAGE * s->C >= PARALLEL)
    {
        float *x_JD = malloc((size_t)(PAGE * s->D) * sizeof(float) + (size_t)s->D);
        if (x_JD == NULL) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for collapse(2) schedule(static)
        for (i64 m = 0; m < s->M; m++)
            for (i64 k = 0; k < s->K; k++) {
                if (x_JD == NULL) continue;
                const char *key = s->pages_NC + (s->from_M[m] * PAGE * s->C + k * s->D) * item_bytes;
                char *part = s->cold + (s->to_M[m] * s->K + k) * bytes;
                gather(s, key, x_JD, item_bytes);
                seal_keys(s, x_JD, (uint8_t *)(x_JD + PAGE * s->D), part);
                gather(s, key + s->values * item_bytes, x_JD, item_bytes);
                seal_values(s, x_JD, part);
            }
        free(x_JD);
    }
    return failed;
}
