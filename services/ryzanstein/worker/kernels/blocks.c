/* Products of rows with a weight in blocks, computed with the bits that the file has: rows are quantized in each call.

   A row is quantized in parts of 32 inputs, each with a scale. The sum of a part's products is exact. It is multiplied with the
   weight's scale and the row's and added to the sum of the parts before it: a row's result depends neither on the other rows nor
   on the number of threads.

   A few rows are multiplied while the weight is unpacked, in registers, and so are all rows with levels of 8 bits, which need no
   unpacking: what counts is how fast the weight comes from memory. For many rows some parts of two panels are unpacked into a buffer
   in the first-level cache, and all rows are multiplied with them, in tiles whose sums fit the registers. Between two such chunks of
   a row's parts its sums are in the result.

   Legend: T rows, I inputs, O outputs, P parts of 32 inputs. */

#include <stdlib.h>
#include <string.h>

#include "block_types.h"
#include "panels.h"
#include "team.h"

enum { PARALLEL = 128 * 1024 };          /* products from which threads pay for their start */
enum { AHEAD = 16384, LINE = 64 };        /* bytes that the first rows ask for in advance, and of a line of the cache */
#if LANES == 16 && VNNI
enum { AT_ONCE = 8, FEW = 2 * AT_ONCE }; /* rows that are multiplied with what is in registers */
#elif defined(ADD_PAIRS) || VNNI || defined(__aarch64__)
enum { AT_ONCE = 4, FEW = 2 * AT_ONCE }; /* FEW: rows for which to unpack a weight twice takes less time than to store it */
#else
enum { AT_ONCE = 1, FEW = 2 };           /* of older CPUs, for which compilation would take a minute */
#endif
enum { CHUNK = 16 };                     /* parts that are unpacked for many rows: whole blocks of every type */

/* A part of a row: levels of -127 to 127; what the sum of their products with a weight's begins with, which takes the weight's
   `offset` away, for each half if the weight has scales for each; their scale; the sum of the levels, times the scale unless the
   weight has zero points. */
typedef struct {
    int32_t levels[FOURS], begin[2];
    float scale, total;
} RowPart;

typedef struct {
    const RowPart *x_TP;
    const uint8_t *packed;
    const float *bias_O; /* or NULL */
    float *out_TO;
    i64 T, P, O, stride; /* of rows of the result */
} BlockProduct;

/* The parts `begin` to `end` - 1 of one or two panels from `panel` on, unpacked. */
typedef struct {
    i64 panel, begin, end;
    int panels;
    PanelPart parts[MOST_PANELS][CHUNK];
} Chunk;

/* Returns `sum` plus a part's products, or those of its half `h`, with the scales and what else the type has. */
INLINE Lanes add_scaled(Lanes sum, Ints products, const PanelPart *w, const RowPart *x, const int h, const Kind kind) {
    Lanes floats = floats_of(products);
    if (kind.also == ZEROED) floats = fused(w->added, all(x->total), floats);
    sum = fused(floats, w->scale[h] * x->scale, sum);
    return kind.also == SHIFTED ? fused(w->added, all(x->total), sum) : sum;
}

/* Adds the products of rows' parts with panels' parts to the sums. */
INLINE void add_parts(Lanes sum[][MOST_PANELS], const PanelPart *const *w, const RowPart *const *x, const int rows,
                      const int panels, const Kind kind) {
#pragma GCC unroll 2
    for (int h = 0; h < kind.halves; h++) {
        Words words = {.count = FOURS / kind.halves};
        Ints products[MOST_ROWS][MOST_PANELS];
#pragma GCC unroll 2
        for (int n = 0; n < panels; n++) words.weight[n] = w[n]->levels + h * words.count;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            words.row[r] = x[r]->levels + h * words.count;
            words.begin[r] = has_offset(kind) ? x[r]->begin + h : NULL;
        }
        sum_products(products, &words, rows, panels, kind.largest);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int n = 0; n < panels; n++) sum[r][n] = add_scaled(sum[r][n], products[r][n], w[n], x[r], h, kind);
    }
}

/* The sums of a tile, or of a single row and panel. */
typedef Lanes Sums[MOST_ROWS][MOST_PANELS];

/* Loads the sums that the result has from the chunks before. The last panel may have fewer outputs than lanes. */
static void load_sums(const BlockProduct *p, const Chunk *c, i64 t, int rows, Sums sum) {
    for (int n = 0; n < c->panels; n++) {
        i64 o = (c->panel + n) * LANES;
        for (int r = 0; r < rows; r++) sum[r][n] = load_some(p->out_TO + (t + r) * p->stride + o, p->O - o);
    }
}

/* Stores a tile's sums, plus the bias if they are complete. One function serves all tiles: it takes little time. */
static void store_sums(const BlockProduct *p, i64 t, i64 panel, int complete, int rows, int panels, Sums sum) {
    for (int n = 0; n < panels; n++) {
        i64 o = (panel + n) * LANES, left = p->O - o;
        for (int r = 0; r < rows; r++) {
            if (complete && p->bias_O != NULL) sum[r][n] += load_some(p->bias_O + o, left);
            store_some(p->out_TO + (t + r) * p->stride + o, sum[r][n], left);
        }
    }
}

/* Rows from t on times a chunk. Of a single panel's chunk the second panel is the first again, whose sums are not stored. */
INLINE void multiply_tile(const BlockProduct *p, const Chunk *c, i64 t, const int rows, const Kind kind) {
    Sums stored = {0}, sum;
    const RowPart *x[MOST_ROWS];
    const PanelPart *w[MOST_PANELS] = {c->parts[0], c->parts[c->panels - 1]};
    if (c->begin > 0) load_sums(p, c, t, rows, stored);
    memcpy(sum, stored, sizeof sum); /* a copy that no other function knows stays in registers */
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) x[r] = p->x_TP + (t + r) * p->P + c->begin;
    for (i64 part = c->begin; part < c->end; part++) {
        add_parts(sum, w, x, rows, MOST_PANELS, kind);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) x[r]++;
#pragma GCC unroll 2
        for (int n = 0; n < MOST_PANELS; n++) w[n]++;
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int n = 0; n < MOST_PANELS; n++) stored[r][n] = sum[r][n];
    store_sums(p, t, c->panel, c->end == p->P, rows, c->panels, stored);
}

/* All rows times the parts that are unpacked. */
typedef void MultiplyTiles(const BlockProduct *, const Chunk *);

#define OF_KIND(NAME, LARGEST, HALVES, ALSO)                                                                                    \
    static void multiply_##NAME(const BlockProduct *p, const Chunk *c) {                                                        \
        const Kind kind = {LARGEST, HALVES, ALSO};                                                                              \
        i64 t = 0;                                                                                                              \
        for (; p->T - t >= 4; t += 4) multiply_tile(p, c, t, 4, kind);                                                          \
        for (; p->T - t >= 2; t += 2) multiply_tile(p, c, t, 2, kind);                                                          \
        for (; p->T > t; t++) multiply_tile(p, c, t, 1, kind);                                                                  \
    }
/* Of levels that are unpacked. */
#define EVERY_KIND(DO)                                                                                                          \
    DO(plain4, 15, 1, PLAIN) DO(shifted4, 15, 1, SHIFTED) DO(zeroed4, 15, 1, ZEROED) DO(plain5, 31, 1, PLAIN)                   \
    DO(shifted5, 31, 1, SHIFTED) DO(plain6, 63, 2, PLAIN)
EVERY_KIND(OF_KIND)

INLINE MultiplyTiles *tiles_of(const Kind kind) {
#define IS_KIND(NAME, LARGEST, HALVES, ALSO) if (kind.largest == LARGEST && kind.also == ALSO) return multiply_##NAME;
    EVERY_KIND(IS_KIND)
    return NULL;
}

/* Asks for a part's share of the words that are AHEAD: the CPU itself does not look so far, in several panels at once. */
INLINE void ask_ahead(const Panel panel, i64 block, int part, const Format f) {
    const int share = 4 * f.words * LANES / f.parts;
    const char *begin = (const char *)(panel.words + block * f.words) + part * share + AHEAD;
#pragma GCC unroll 8
    for (int at = 0; at < share; at += LINE) __builtin_prefetch(begin + at, 0, 2);
}

/* Rows from t on times a panel. */
INLINE void multiply_panel(const BlockProduct *p, i64 t, const int rows, i64 panel, const int type) {
    const Format f = format_of(type);
    const i64 blocks = p->P / f.parts;
    const Panel from = panel_at(p->packed, panel, blocks, f);
    const RowPart *x[MOST_ROWS];
    Sums sum = {0}, stored;
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) x[r] = p->x_TP + (t + r) * p->P;
    for (i64 block = 0; block < blocks; block++)
#pragma GCC unroll 8
        for (int part = 0; part < f.parts; part++) {
            PanelPart unpacked;
            const PanelPart *w = &unpacked;
            ask_ahead(from, block, part, f);
            unpack(&unpacked, from, block, part, type);
            add_parts(sum, &w, x, rows, 1, f.kind);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) x[r]++;
        }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) stored[r][0] = sum[r][0];
    store_sums(p, t, panel, 1, rows, 1, stored);
}

/* Unpacks the parts of some blocks of a panel. */
typedef void UnpackBlocks(PanelPart *to, Panel panel, i64 block, i64 blocks);

/* Many rows times one or two panels: chunk after chunk of their parts is unpacked. */
INLINE void multiply_many(const BlockProduct *p, i64 panel, int panels, UnpackBlocks *unpack_blocks, const Format f) {
    Chunk chunk;
    chunk.panel = panel, chunk.panels = panels, chunk.begin = 0;
    for (; chunk.begin < p->P; chunk.begin = chunk.end) {
        chunk.end = chunk.begin + CHUNK < p->P ? chunk.begin + CHUNK : p->P;
        for (int n = 0; n < panels; n++)
            unpack_blocks(chunk.parts[n], panel_at(p->packed, panel + n, p->P / f.parts, f), chunk.begin / f.parts,
                          (chunk.end - chunk.begin) / f.parts);
        tiles_of(f.kind)(p, &chunk);
    }
}

typedef int32_t Bits __attribute__((may_alias));

INLINE void quantize_part(const float *x, RowPart *to, const Format f, float smallest) {
    uint32_t level[PART], sum[2] = {0}; /* unsigned: what a NaN gives may be anything, and the scale makes it a NaN again */
    const Bits *bits = (const Bits *)x;
    int32_t most = 0;
    int8_t levels[PART];
    for (int i = 0; i < PART; i++) { /* sizes are ordered as their bits are, and what is not finite is the largest */
        int32_t size = bits[i] & 0x7fffffff;
        most = size > most ? size : most;
    }
    Float largest = {.bits = (uint32_t)most}, zero = {ROUNDING};
    float scale = largest.value / 127.0f;
    scale = (scale < smallest ? smallest : scale) + largest.value * 0.0f;
    float inverse = 1.0f / scale;
    for (int i = 0; i < PART; i++) {
        Float rounded = {x[i] * inverse + ROUNDING};
        level[i] = rounded.bits - zero.bits;
    }
    for (int i = 0; i < PART; i++) levels[i] = (int8_t)level[i];
    for (int i = 0; i < PART / 2; i++) sum[0] += level[i];
    for (int i = PART / 2; i < PART; i++) sum[1] += level[i];
    memcpy(to->levels, levels, PART);
    to->begin[0] = (int32_t)(-(uint32_t)f.offset * (f.kind.halves == 2 ? sum[0] : sum[0] + sum[1]));
    to->begin[1] = (int32_t)(-(uint32_t)f.offset * sum[1]);
    to->scale = scale;
    to->total = (float)(int32_t)(sum[0] + sum[1]) * (f.kind.also == ZEROED ? 1.0f : scale);
}

/* The functions of a type. */
#define OF_TYPE(TYPE)                                                                                                           \
    static void unpack_##TYPE(PanelPart *to, Panel panel, i64 block, i64 blocks) {                                              \
        const Format f = format_of(TYPE);                                                                                       \
        for (i64 last = block + blocks; block < last; block++)                                                                  \
            _Pragma("GCC unroll 8") for (int part = 0; part < f.parts; part++) {                                                \
                ask_ahead(panel, block, part, f);                                                                               \
                unpack(to++, panel, block, part, TYPE);                                                                         \
            }                                                                                                                   \
    }                                                                                                                           \
    static void few_##TYPE(const BlockProduct *p, i64 panel) {                                                                  \
        i64 t = 0;                                                                                                              \
        for (; AT_ONCE >= 8 && p->T - t >= 8; t += 8) multiply_panel(p, t, 8, panel, TYPE);                                     \
        for (; AT_ONCE >= 4 && p->T - t >= 4; t += 4) multiply_panel(p, t, 4, panel, TYPE);                                     \
        for (; AT_ONCE >= 4 && p->T - t >= 2; t += 2) multiply_panel(p, t, 2, panel, TYPE);                                     \
        for (; p->T > t; t++) multiply_panel(p, t, 1, panel, TYPE);                                                             \
    }                                                                                                                           \
    static void quantize_##TYPE(const float *x, RowPart *to, i64 parts, float smallest) {                                       \
        for (i64 n = 0; n < parts; n++) quantize_part(x + n * PART, to + n, format_of(TYPE), smallest);                         \
    }                                                                                                                           \
    static void panels_##TYPE(const BlockProduct *p, i64 panel, i64 last) {                                                     \
        const Format f = format_of(TYPE);                                                                                       \
        for (; (p->T <= FEW || f.kind.largest == BYTE) && panel < last; panel++) few_##TYPE(p, panel);                          \
        for (; panel < last; panel += MOST_PANELS)                                                                              \
            multiply_many(p, panel, last - panel < MOST_PANELS ? (int)(last - panel) : MOST_PANELS, unpack_##TYPE, f);          \
    }
EVERY_TYPE(OF_TYPE)

static void quantize_parts(int type, const float *x, RowPart *to, i64 parts, float smallest) {
    switch (type) {
#define QUANTIZE(TYPE) case TYPE: quantize_##TYPE(x, to, parts, smallest); break;
        EVERY_TYPE(QUANTIZE)
    }
}

i64 block_row_bytes(const Product *p) { return p->I / PART * (i64)sizeof(RowPart); }

void block_quantize(const Product *p, i64 t, const float *row_I) {
    const i64 P = p->I / PART;
    quantize_parts(p->type, row_I, (RowPart *)p->levels + t * P, P, p->smallest);
}

void block_panels(const Product *p, i64 panel, i64 last) {
    const BlockProduct product = {(const RowPart *)p->levels, (const uint8_t *)p->weight, p->bias_O, p->out_TO, p->T,
                                  p->I / PART, p->O, p->stride};
    switch (p->type) {
#define MULTIPLY(TYPE) case TYPE: panels_##TYPE(&product, panel, last); break;
        EVERY_TYPE(MULTIPLY)
    }
}

/* out = x weight^T + bias. Returns nonzero if there is no memory for the levels of the rows. */
int blocks_product(const float *x_TI, const uint8_t *packed, const float *bias_O, float *out_TO, i64 T, i64 I, i64 O, int type,
                   float smallest) {
    Product p = {.x_TI = x_TI, .weight = (const char *)packed, .bias_O = bias_O, .out_TO = out_TO, .T = T, .I = I, .O = O, .stride = O,
                 .kind = IN_BLOCKS, .type = type, .smallest = smallest};
    p.levels = malloc((size_t)(T * block_row_bytes(&p)));
    if (p.levels == NULL) return T * I > 0;
#pragma omp parallel if (T * I * O >= PARALLEL)
    {
        i64 last, part = first_panel(T * (I / PART), &last), panel;
        quantize_parts(type, x_TI + part * PART, (RowPart *)p.levels + part, last - part, smallest);
#pragma omp barrier
        panel = first_panel(whole(O, LANES) / LANES, &last);
        block_panels(&p, panel, last);
    }
    free(p.levels);
    return 0;
}
