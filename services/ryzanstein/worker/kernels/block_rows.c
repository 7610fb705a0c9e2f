/* Packs weights in blocks for their products (blocks.c), and looks up their rows. The layout is described in block_types.h.

   Legend: T rows, I inputs, O outputs, P parts of 32 inputs. */

#include <string.h>

#include "block_types.h"
#include "panels.h"
#include "team.h"

enum { PARALLEL = 128 * 1024 }; /* numbers from which threads pay for their start */
enum { MOST_PARTS = 8 };        /* of a block */

static Format format_by_id(int type) {
    switch (type) {
#define FORMAT(TYPE) case TYPE: return format_of(TYPE);
        EVERY_TYPE(FORMAT)
    }
    return (Format){0};
}

/* Returns the bytes of a packed weight. */
i64 blocks_packed_bytes(i64 O, i64 I, int type) {
    const Format f = format_by_id(type);
    return whole(O, LANES) * (I / PART / f.parts) * block_bytes(f);
}

/* Returns the bits of a Q5_0 or Q5_1 block so that those of inputs 4 n to 4 n + 3 are bit n of each byte. */
static uint32_t grouped(uint32_t bits) {
    uint32_t to = 0;
    for (int i = 0; i < PART; i++) to |= (bits >> i & 1) << (i % 4 * 8 + i / 4);
    return to;
}

/* Returns what is stored for the word that a file has. */
static uint32_t packed_word(uint32_t word, int n, int type, const Format f) {
    int has_sign = type == Q8_0, wants_sign = LEVEL_OFFSET == 0;
    if (f.kind.largest == BYTE) return has_sign == wants_sign ? word : word ^ 0x80808080;
    return n == 0 && (type == Q5_0 || type == Q5_1) ? grouped(word) : word;
}

/* Returns the bytes of a block in the file. */
static i64 stored_bytes(int type, const Format f) { return type == MXFP4 ? block_bytes(f) - 1 : block_bytes(f); }

/* Returns the upper half of the float 2^(exponent - 128): half of the power that the file means, since levels are twice as large. */
static uint16_t half_power(uint8_t exponent) { return exponent < 2 ? (uint16_t)(0x20 << exponent) : (uint16_t)((exponent - 1) << 7); }

/* Packs `rows` rows of I inputs, `stride` bytes apart, as outputs from `first` on. Other outputs stay as they are; those that no
   row is packed for must be zero bytes. */
void blocks_pack(const uint8_t *from, i64 stride, i64 rows, uint8_t *packed, i64 first, i64 I, int type) {
    const Format f = format_by_id(type);
    i64 blocks = I / PART / f.parts;
#pragma omp parallel for schedule(static) if (rows * I >= PARALLEL)
    for (i64 row = 0; row < rows; row++) {
        const uint8_t *block = from + row * stride;
        i64 lane = (first + row) % LANES;
        const Panel panel = panel_at(packed, (first + row) / LANES, blocks, f);
        uint8_t *words = (uint8_t *)panel.words + 4 * lane, *scales = (uint8_t *)panel.scales + 2 * lane;
        for (i64 b = 0; b < blocks; b++, block += stored_bytes(type, f)) {
            for (int n = 0; n < f.words; n++, words += 4 * LANES) {
                uint32_t word;
                memcpy(&word, block + f.first_word + 4 * n, 4);
                word = packed_word(word, n, type, f);
                memcpy(words, &word, 4);
            }
            if (type == MXFP4) {
                const uint16_t scale = half_power(*block);
                memcpy(scales, &scale, 2), scales += 2 * LANES;
                continue;
            }
            const uint8_t *stored = f.first_word ? block : block + 4 * f.words;
            for (int n = 0; n < f.scales; n++, scales += 2 * LANES) memcpy(scales, stored + 2 * n, 2);
        }
    }
}

static void unpack_by_id(PanelPart *to, const Panel panel, i64 block, int type) {
    switch (type) {
#define UNPACK(TYPE)                                                                                                            \
    case TYPE:                                                                                                                  \
        for (int part = 0; part < format_of(TYPE).parts; part++) unpack(to + part, panel, block, part, TYPE);                   \
        break;
        EVERY_TYPE(UNPACK)
    }
}

/* Writes one lane's numbers of an unpacked part, with the order of operations of ggml. */
static void write_numbers(const PanelPart *w, i64 lane, float *out, const Format f) {
    const uint8_t *levels = (const uint8_t *)w->levels + lane * 4;
    for (int i = 0; i < PART; i++, levels += i % 4 ? 1 : 4 * LANES - 3) {
        int level = *levels;
        if (f.kind.largest == BYTE && LEVEL_OFFSET == 0) level = (int8_t)level;
        level -= f.offset;
        float scale = w->scale[i / (PART / f.kind.halves)][lane];
        out[i] = f.kind.also == ZEROED ? scale * ((float)level + w->added[lane]) : scale * (float)level;
        if (f.kind.also == SHIFTED) out[i] += w->added[lane];
    }
}

/* The numbers of an output's weights, with the bits that ggml computes. */
void blocks_row(const uint8_t *packed, i64 o, float *out, i64 I, int type) {
    const Format f = format_by_id(type);
    const i64 blocks = I / PART / f.parts;
    const Panel panel = panel_at(packed, o / LANES, blocks, f);
    for (i64 block = 0; block < blocks; block++) {
        PanelPart parts[MOST_PARTS];
        unpack_by_id(parts, panel, block, type);
        for (int part = 0; part < f.parts; part++, out += PART) write_numbers(parts + part, o % LANES, out, f);
    }
}

/* Those of some outputs. An index that no output has gives zeros. */
void blocks_rows(const uint8_t *packed, const i64 *index_T, float *out_TI, i64 T, i64 I, i64 O, int type) {
#pragma omp parallel for schedule(static) if (T * I >= PARALLEL / LANES)
    for (i64 t = 0; t < T; t++) {
        const i64 o = index_T[t];
        if (o >= 0 && o < O) blocks_row(packed, o, out_TI + t * I, I, type);
        else memset(out_TI + t * I, 0, (size_t)I * sizeof(float));
    }
}
