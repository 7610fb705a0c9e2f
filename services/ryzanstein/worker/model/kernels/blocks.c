/* Products of rows with a weight in blocks of GGUF, computed with the bits that the file has: rows are quantized in each call.

   A block stores 32 numbers, or 256 in parts of 32. A part is levels of 4 to 8 bits and for all of them, or for each half of
   them, a scale; some types add a shift. A row is quantized in parts of 32 too, with a scale for each. The sum of a part's
   products is exact. It is multiplied with both scales and added to the sum of the parts before it: a row's result depends neither
   on the other rows nor on the number of threads.

   A weight is packed once, in panels (panels.h), and takes the memory that it takes in the file: a panel has each word of 32 bits
   of a block for all its outputs side by side, block after block, and then the 16-bit scales in the same way. A word has the
   levels of four inputs, or of two times four in its nibbles, as the file has. What is changed: 8-bit levels are stored plus 128,
   since products are those of unsigned with signed numbers, and the fifth bits of Q5_0 and Q5_1 are grouped as the levels are.

   Legend: T rows, I inputs, O outputs, P parts of 32 inputs. */

#include <stdlib.h>
#include <string.h>

#include "ints.h"

#if LANES == 16 /* 32 registers: 8 sums, 8 of a weight's part, its scales, what is being computed */
#define TILE_ROWS 8
#else
#define TILE_ROWS 4
#endif
#define TILE_PANELS 1 /* what is computed of a row serves one panel: nothing is gained by more */
#define TILE_SINGLE 4

#include "panels.h"

enum { PART = 32, FOURS = PART / 4 };    /* inputs of a part, and its words of 8-bit levels */
enum { PARALLEL = 128 * 1024 };          /* products from which threads pay for their start */
enum { AHEAD = 4096, LINE = 64 };        /* bytes that the first rows ask for in advance, and of a line of the cache */

/* The types' ids in the file. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

/* A type's block: its parts, words of 32 bits and scales of 16 bits. `first_word`: where the words begin in the file's block.
   Levels are at most `largest`, and are stored plus `offset`. `halves`: the scales of a part, one for each 16 inputs if 2. */
typedef struct {
    int parts, words, scales, first_word, largest, offset, halves;
} Format;

INLINE Format format_of(const int type) {
    switch (type) {
    case Q4_0: return (Format){1, 4, 1, 2, 15, 8, 1};
    case Q4_1: return (Format){1, 4, 2, 4, 15, 0, 1};
    case Q5_0: return (Format){1, 5, 1, 2, 31, 16, 1};
    case Q5_1: return (Format){1, 5, 2, 4, 31, 0, 1};
    case Q8_0: return (Format){1, 8, 1, 2, 255, 128, 1};
    case Q4_K: return (Format){8, 35, 2, 4, 15, 0, 1};
    case Q5_K: return (Format){8, 43, 2, 4, 31, 0, 1};
    case Q6_K: return (Format){8, 52, 1, 0, 63, 32, 2};
    }
    return (Format){0};
}

INLINE i64 block_bytes(const Format f) { return 4 * f.words + 2 * f.scales; }

/* A part of a row: levels of -127 to 127; what the sum of their products with a weight's begins with, which takes the weight's
   `offset` away, for each half if the weight has scales for each; their scale; the sum of the levels times the scale. */
typedef struct {
    int32_t levels[FOURS], begin[2];
    float scale, total;
} RowPart;

/* A part of a panel: the levels of four inputs in each vector, their scales, and what is added to each number. */
typedef struct {
    Ints levels[FOURS];
    Lanes scale[2], shift;
} PanelPart;

/* Where a panel's words and scales are. */
typedef struct {
    const Ints *words;
    const char *scales;
} Panel;

INLINE Panel panel_at(const uint8_t *packed, i64 panel, i64 blocks, const Format f) {
    const uint8_t *begin = packed + panel * LANES * blocks * block_bytes(f);
    return (Panel){(const Ints *)begin, (const char *)begin + LANES * blocks * 4 * f.words};
}

INLINE Lanes floats_of(Ints x) { return __builtin_convertvector(x, Lanes); }

/* The scale and the shift of part n of a Q4_K or Q5_K block: 6 bits each, the first four of both whole in a byte, whose upper two
   bits are those of the last four. */
INLINE void unpack_sixes(PanelPart *to, const Ints *words, Lanes scale, Lanes shift, int n) {
    Ints least = words[0] >> 8 * (n & 3), most = words[1] >> 8 * (n & 3), rest = words[2] >> 8 * (n & 3);
    if (n < 4) {
        least &= 63;
        most &= 63;
    } else {
        least = (rest & 15) | (least >> 2 & 48);
        most = (rest >> 4 & 15) | (most >> 2 & 48);
    }
    to->scale[0] = scale * floats_of(least);
    to->shift = -(shift * floats_of(most));
}

INLINE void unpack_nibbles(PanelPart *to, const Ints *words) {
#pragma GCC unroll 4
    for (int n = 0; n < FOURS / 2; n++) {
        to->levels[n] = words[n] & 0x0f0f0f0f;
        to->levels[n + FOURS / 2] = words[n] >> 4 & 0x0f0f0f0f;
    }
}

/* Levels of which each word has four in its lower nibbles and four of the next part in its upper ones. */
INLINE void unpack_half(PanelPart *to, const Ints *words, int upper) {
#pragma GCC unroll 8
    for (int n = 0; n < FOURS; n++) to->levels[n] = words[n] >> 4 * upper & 0x0f0f0f0f;
}

/* Adds a fifth bit to levels. That of group n is bit n of each byte (Q5_0 and Q5_1 as packed here). */
INLINE void add_fifth(PanelPart *to, Ints bits) {
#pragma GCC unroll 8
    for (int n = 0; n < FOURS; n++) to->levels[n] |= (n < 4 ? bits << (4 - n) : bits >> (n - 4)) & 0x10101010;
}

INLINE void unpack_q6(PanelPart *to, const Ints *words, Lanes scale, int part) {
    const Ints *low = words + part / 4 * 16 + (part & 1) * FOURS, *high = words + 32 + part / 4 * FOURS, *scales = words + 48;
    unpack_half(to, low, part >> 1 & 1);
#pragma GCC unroll 8
    for (int n = 0; n < FOURS; n++) to->levels[n] |= (high[n] >> 2 * (part & 3) & 0x03030303) << 4;
    Ints both = scales[part / 2] >> 16 * (part & 1);
    to->scale[0] = scale * floats_of(both << 24 >> 24);
    to->scale[1] = scale * floats_of(both << 16 >> 24);
}

/* Unpacks part `part` of block `block`. */
INLINE void unpack(PanelPart *to, const Panel panel, i64 block, int part, const int type) {
    const Format f = format_of(type);
    const Ints *words = panel.words + block * f.words;
    const char *scales = panel.scales + block * f.scales * LANES * 2;
    Lanes scale = widen(scales), shift = f.scales == 2 ? widen(scales + LANES * 2) : (Lanes){0};
    to->scale[0] = to->scale[1] = scale;
    to->shift = shift;
    switch (type) {
    case Q8_0:
#pragma GCC unroll 8
        for (int n = 0; n < FOURS; n++) to->levels[n] = words[n];
        break;
    case Q4_0:
    case Q4_1: unpack_nibbles(to, words); break;
    case Q5_0:
    case Q5_1:
        unpack_nibbles(to, words + 1);
        add_fifth(to, words[0]);
        break;
    case Q4_K:
        unpack_half(to, words + 3 + part / 2 * FOURS, part & 1);
        unpack_sixes(to, words, scale, shift, part);
        break;
    case Q5_K:
        unpack_half(to, words + 11 + part / 2 * FOURS, part & 1);
#pragma GCC unroll 8
        for (int n = 0; n < FOURS; n++) to->levels[n] |= (words[3 + n] >> part & 0x01010101) << 4;
        unpack_sixes(to, words, scale, shift, part);
        break;
    case Q6_K: unpack_q6(to, words, scale, part); break;
    }
}

typedef struct {
    const RowPart *x_TP;
    const uint8_t *packed;
    const float *bias_O; /* or NULL */
    float *out_TO;
    i64 P, O;
} BlockProduct;

/* Adds the bias to a tile's sums. One function serves all tiles: it takes little time. */
static void finish_tile(const BlockProduct *p, i64 t, i64 panel, int rows, int panels, Lanes sum[][TILE_SINGLE]) {
    for (int n = 0; n < panels; n++) {
        i64 o = (panel + n) * LANES, left = p->O - o; /* the last panel may have fewer outputs than lanes */
        Lanes bias = p->bias_O != NULL ? load_some(p->bias_O + o, left) : (Lanes){0};
        for (int r = 0; r < rows; r++) store_some(p->out_TO + (t + r) * p->O + o, sum[r][n] + bias, left);
    }
}

/* Returns `sum` plus the products of a row's part with a panel's part. */
INLINE Lanes add_part(Lanes sum, const PanelPart *w, const RowPart *x, const int type) {
    const Format f = format_of(type);
    const int count = FOURS / f.halves;
#pragma GCC unroll 2
    for (int h = 0; h < f.halves; h++) {
        Ints products = add_small_products(all_ints(x->begin[h]), w->levels + h * count, x->levels + h * count, count, f.largest);
        sum = fused(floats_of(products), w->scale[h] * x->scale, sum);
    }
    return f.scales == 2 ? fused(w->shift, all(x->total), sum) : sum;
}

/* Asks for a part's share of the words that are AHEAD: the CPU itself does not look so far, in several panels at once. */
INLINE void ask_ahead(const Panel panel, i64 block, int part, const Format f) {
    const int share = 4 * f.words * LANES / f.parts;
    const char *begin = (const char *)(panel.words + block * f.words) + part * share + AHEAD;
#pragma GCC unroll 8
    for (int at = 0; at < share; at += LINE) __builtin_prefetch(begin + at, 0, 2);
}

INLINE void add_tile(const BlockProduct *p, i64 t, i64 panel, const int rows, const int panels, const int type) {
    const Format f = format_of(type);
    const RowPart *x_TP = p->x_TP + t * p->P;
    const i64 blocks = p->P / f.parts;
    Lanes sum[TILE_ROWS][TILE_SINGLE];
    Panel from[TILE_SINGLE];
    for (int n = 0; n < panels; n++) {
        from[n] = panel_at(p->packed, panel + n, blocks, f);
        for (int r = 0; r < rows; r++) sum[r][n] = (Lanes){0};
    }
    for (i64 block = 0; block < blocks; block++)
        for (int part = 0; part < f.parts; part++)
#pragma GCC unroll 4
            for (int n = 0; n < panels; n++) {
                PanelPart w;
                if (t == 0) ask_ahead(from[n], block, part, f);
                unpack(&w, from[n], block, part, type);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) sum[r][n] = add_part(sum[r][n], &w, x_TP + r * p->P + block * f.parts + part, type);
            }
    finish_tile(p, t, panel, rows, panels, sum);
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
    to->begin[0] = (int32_t)(-(uint32_t)f.offset * (f.halves == 2 ? sum[0] : sum[0] + sum[1]));
    to->begin[1] = (int32_t)(-(uint32_t)f.offset * sum[1]);
    to->scale = scale;
    to->total = scale * (float)(int32_t)(sum[0] + sum[1]);
}

/* Quantizes this thread's share of the rows, then multiplies all rows with its share of the panels. */
INLINE void multiply(AddTile *add, const float *x_TI, const BlockProduct *p, RowPart *x_TP, i64 T, const Format f, float smallest) {
#pragma omp for schedule(static)
    for (i64 n = 0; n < T * p->P; n++) quantize_part(x_TI + n * PART, x_TP + n, f, smallest);
    add_share(add, p, T, whole(p->O, LANES) / LANES, p->P, p->P);
}

/* The functions of a type. The parallel region is in each, or the compiler would make one of them all that knows no type. */
#define OF_TYPE(TYPE)                                                                                                       \
    INLINE void add_##TYPE(const void *p, i64 t, i64 panel, i64 begin, i64 end, const int rows, const int panels) {         \
        (void)begin, (void)end; /* all inputs at once */                                                                    \
        add_tile(p, t, panel, rows, panels, TYPE);                                                                          \
    }                                                                                                                       \
    static void multiply_##TYPE(const float *x_TI, const BlockProduct *p, RowPart *x_TP, i64 T, float smallest) {           \
        _Pragma("omp parallel if (T * p->P * PART * p->O >= PARALLEL)")                                                     \
            multiply(add_##TYPE, x_TI, p, x_TP, T, format_of(TYPE), smallest);                                                      \
    }                                                                                                                       \
    static void unpack_##TYPE(PanelPart *to, Panel panel, i64 block, int part) { unpack(to, panel, block, part, TYPE); }
OF_TYPE(Q4_0)
OF_TYPE(Q4_1)
OF_TYPE(Q5_0)
OF_TYPE(Q5_1)
OF_TYPE(Q8_0)
OF_TYPE(Q4_K)
OF_TYPE(Q5_K)
OF_TYPE(Q6_K)

#define EVERY_TYPE(DO) DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K)

/* Returns the bytes of a packed weight. */
i64 blocks_packed_bytes(i64 O, i64 I, int type) {
    const Format f = format_of(type);
    return whole(O, LANES) * (I / PART / f.parts) * block_bytes(f);
}

/* Returns the bits of a Q5_0 or Q5_1 block so that those of inputs 4 n to 4 n + 3 are bit n of each byte. */
static uint32_t grouped(uint32_t bits) {
    uint32_t to = 0;
    for (int i = 0; i < PART; i++) to |= (bits >> i & 1) << (i % 4 * 8 + i / 4);
    return to;
}

static uint32_t packed_word(uint32_t word, int n, int type) {
    if (type == Q8_0) return word ^ 0x80808080;
    return n == 0 && (type == Q5_0 || type == Q5_1) ? grouped(word) : word;
}

/* Packs `rows` rows of I inputs, `stride` bytes apart, as outputs from `first` on. Other outputs stay as they are; those that no
   row is packed for must be zero bytes. */
void blocks_pack(const uint8_t *from, i64 stride, i64 rows, uint8_t *packed, i64 first, i64 I, int type) {
    const Format f = format_of(type);
    i64 blocks = I / PART / f.parts;
#pragma omp parallel for schedule(static) if (rows * I >= PARALLEL)
    for (i64 row = 0; row < rows; row++) {
        const uint8_t *block = from + row * stride;
        i64 lane = (first + row) % LANES;
        const Panel panel = panel_at(packed, (first + row) / LANES, blocks, f);
        uint8_t *words = (uint8_t *)panel.words + 4 * lane, *scales = (uint8_t *)panel.scales + 2 * lane;
        for (i64 b = 0; b < blocks; b++, block += block_bytes(f)) {
            for (int n = 0; n < f.words; n++, words += 4 * LANES) {
                uint32_t word;
                memcpy(&word, block + f.first_word + 4 * n, 4);
                word = packed_word(word, n, type);
                memcpy(words, &word, 4);
            }
            const uint8_t *stored = f.first_word ? block : block + 4 * f.words;
            for (int n = 0; n < f.scales; n++, scales += 2 * LANES) memcpy(scales, stored + 2 * n, 2);
        }
    }
}

/* out = x weight^T + bias. Returns nonzero if there is no memory for the levels of the rows. */
int blocks_product(const float *x_TI, const uint8_t *packed, const float *bias_O, float *out_TO, i64 T, i64 I, i64 O, int type,
                   float smallest) {
    i64 P = I / PART;
    RowPart *x_TP = malloc((size_t)(T * P) * sizeof(RowPart));
    if (x_TP == NULL) return T * P > 0;
    const BlockProduct product = {x_TP, packed, bias_O, out_TO, P, O};
    switch (type) {
#define MULTIPLY(TYPE) case TYPE: multiply_##TYPE(x_TI, &product, x_TP, T, smallest); break;
        EVERY_TYPE(MULTIPLY)
    }
    free(x_TP);
    return 0;
}

static void unpack_of(PanelPart *to, Panel panel, i64 block, int part, int type) {
    switch (type) {
#define UNPACK(TYPE) case TYPE: unpack_##TYPE(to, panel, block, part); break;
        EVERY_TYPE(UNPACK)
    }
}

/* The numbers of some outputs' weights, with the bits that ggml computes. An index that no output has gives zeros. */
void blocks_rows(const uint8_t *packed, const i64 *index_T, float *out_TI, i64 T, i64 I, i64 O, int type) {
    const Format f = format_of(type);
    i64 P = I / PART;
#pragma omp parallel for schedule(static) if (T * I >= PARALLEL / LANES)
    for (i64 t = 0; t < T; t++) {
        float *out = out_TI + t * I;
        i64 o = index_T[t];
        if (o < 0 || o >= O) {
            memset(out, 0, (size_t)I * sizeof(float));
            continue;
        }
        const Panel panel = panel_at(packed, o / LANES, P / f.parts, f);
        for (i64 part = 0; part < P; part++, out += PART) {
            PanelPart w;
            unpack_of(&w, panel, part / f.parts, (int)(part % f.parts), type);
            for (int i = 0; i < PART; i++) {
                int level = ((const uint8_t *)&w.levels[i / 4])[o % LANES * 4 + i % 4];
                float number = w.scale[i / (PART / f.halves)][o % LANES] * (float)(level - f.offset);
                out[i] = f.scales == 2 ? number + w.shift[o % LANES] : number;
            }
        }
    }
}
