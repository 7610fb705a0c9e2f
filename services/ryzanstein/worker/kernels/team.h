/* What every thread of a team calls, inside a parallel region that is already there: one region then computes many layers (step.c).

   The functions that Python calls are the same, each in a region of its own: so both compute the same bits.

   Legend: T rows, I inputs, O outputs. */

#ifndef RYZANSTEIN_TEAM_H
#define RYZANSTEIN_TEAM_H

#include "lanes.h"

/* How a weight is kept. */
enum { IN_FLOATS, IN_HALVES, UNPACKED, IN_BYTES, IN_BLOCKS };

/* A product of rows and a weight. Panels are what panels.h says, or as many outputs of an unpacked weight. */
typedef struct {
    const float *x_TI;
    const char *weight;
    const float *scale_O, *bias_O; /* or NULL */
    float *out_TO;
    char *levels;                  /* room for quantized rows: `product_row_bytes` of each */
    i64 T, I, O, stride, block;    /* stride: of rows of the result; block: of the transform of rows before they are quantized */
    int kind, type;                /* type: of blocks */
    float smallest;                /* scale of quantized rows */
} Product;

/* Returns the bytes of a quantized row. Rows of products with floats are not quantized. */
i64 int8_row_bytes(const Product *p);
i64 block_row_bytes(const Product *p);

/* Quantizes row t, which is `row_I`, in floats that this overwrites. */
void int8_quantize(const Product *p, i64 t, float *row_I);
void block_quantize(const Product *p, i64 t, const float *row_I);

/* Multiplies all rows with panels `panel` to `last` - 1, and adds the bias. */
void float_panels(const Product *p, i64 panel, i64 last);
void int8_panels(const Product *p, i64 panel, i64 last);
void block_panels(const Product *p, i64 panel, i64 last);

/* Row o of a packed weight, in floats. */
void int8_row(const uint8_t *packed, const float *scale_O, i64 o, float *out_I, i64 I, i64 block);
void blocks_row(const uint8_t *packed, i64 o, float *out_I, i64 I, int type);

/* Single rows of draw.c and rows.c. */
void greatest_row(const float *logits_V, i64 V, float *best_logit, i64 *best_token);
void angles_row(i64 position, const float *frequencies_R, float *cos_R, float *sin_R, i64 R, int interleaved, float magnitude);
void rms_norm_row(const float *x_E, const float *weight_E, float *out_E, i64 E, float eps, float offset);
void activate_columns(const float *x_E, const float *up_E, float *out_E, i64 E, int kind);
void rotate_row(float *row, i64 H, i64 D, const float *cos_R, const float *sin_R, i64 R, int interleaved);
void store_row(const float *kv_C, void *pages_NC, i64 slot, i64 C, int half);

#endif
