/* The types of blocks, and how a part of 32 inputs of a packed weight is unpacked.

   A block stores 32 numbers, or several parts of 32. A part is levels of 2 to 8 bits and for all of them, or for each half of
   them, a scale; some types add a shift, others take a zero point from the levels.

   Levels of MXFP4 (Open Compute Project, Microscaling Formats, 2023) are the 16 numbers of a 4-bit float, twice as large, so that
   they are whole: an instruction looks them up. Its scales are powers of two: 8 bits in the file, packed as the upper half of a
   float, since float16 has not all of them.

   A packed weight takes the memory that it takes in the file, except for those 8 bits. A panel (panels.h) has each word of 32 bits of a block for all its
   outputs side by side, block after block, and then the 16-bit numbers in the same way. A word has the levels of four inputs, or
   of several times four, as the file has. What is changed: 8-bit levels are stored signed, plus LEVEL_OFFSET (levels.h), and the
   fifth bits of Q5_0 and Q5_1 are grouped as the levels are. */

#ifndef RYZANSTEIN_BLOCK_TYPES_H
#define RYZANSTEIN_BLOCK_TYPES_H

#include <string.h>

#include "levels.h"

enum { PART = 32, FOURS = PART / 4 }; /* inputs of a part, and its words of 8-bit levels */

/* The types' ids: those of GGUF, and our own for groups of 32, 64 or 128 inputs with a zero point (G4, G8). */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, TQ2_0 = 35, MXFP4 = 39 };
enum { G4_32 = 432, G4_64 = 464, G4_128 = 4128, G8_32 = 832, G8_64 = 864, G8_128 = 8128 };

#define EVERY_TYPE(DO)                                                                                                          \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(TQ2_0) DO(MXFP4)                                 \
    DO(G4_32) DO(G4_64) DO(G4_128) DO(G8_32) DO(G8_64) DO(G8_128)

/* What a part's sum is besides the products of levels times the scale: nothing, plus a shift times the row's sum, or its products
   less a zero point times the row's levels. */
enum { PLAIN, SHIFTED, ZEROED };

/* How the parts of a type are multiplied. Levels are at most `largest`; a part has `halves` scales. */
typedef struct {
    int largest, halves, also;
} Kind;

/* Whether the sums of products are those of stored levels that have an offset, which the sums' beginning takes away. */
INLINE int has_offset(const Kind kind) {
    return kind.largest == BYTE ? LEVEL_OFFSET != (kind.also == ZEROED ? 128 : 0) : kind.also == PLAIN;
}

/* A type's block: its parts, words of 32 bits and numbers of 16 bits. `first_word`: where the words begin in the file's block;
   the 16-bit numbers are before them, or behind them if it is 0. Levels are stored plus `offset`. */
typedef struct {
    Kind kind;
    int parts, words, scales, first_word, offset;
} Format;

INLINE Format format_of(const int type) {
    const int level_offset = LEVEL_OFFSET; /* of signed levels; those without a sign are stored less 128 plus that */
    switch (type) {
    case Q4_0: return (Format){{15, 1, PLAIN}, 1, 4, 1, 2, 8};
    case Q4_1: return (Format){{15, 1, SHIFTED}, 1, 4, 2, 4, 0};
    case Q5_0: return (Format){{31, 1, PLAIN}, 1, 5, 1, 2, 16};
    case Q5_1: return (Format){{31, 1, SHIFTED}, 1, 5, 2, 4, 0};
    case Q8_0: return (Format){{BYTE, 1, PLAIN}, 1, 8, 1, 2, level_offset};
    case Q4_K: return (Format){{15, 1, SHIFTED}, 8, 35, 2, 4, 0};
    case Q5_K: return (Format){{31, 1, SHIFTED}, 8, 43, 2, 4, 0};
    case Q6_K: return (Format){{63, 2, PLAIN}, 8, 52, 1, 0, 32};
    case TQ2_0: return (Format){{15, 1, PLAIN}, 8, 16, 1, 0, 1}; /* levels of 2 bits are multiplied as those of 4 */
    case MXFP4: return (Format){{31, 1, PLAIN}, 1, 4, 1, 1, 12};
    case G4_32: return (Format){{15, 1, ZEROED}, 1, 4, 2, 4, 0};
    case G4_64: return (Format){{15, 1, ZEROED}, 2, 8, 2, 4, 0};
    case G4_128: return (Format){{15, 1, ZEROED}, 4, 16, 2, 4, 0};
    case G8_32: return (Format){{BYTE, 1, ZEROED}, 1, 8, 2, 4, level_offset - 128};
    case G8_64: return (Format){{BYTE, 1, ZEROED}, 2, 16, 2, 4, level_offset - 128};
    case G8_128: return (Format){{BYTE, 1, ZEROED}, 4, 32, 2, 4, level_offset - 128};
    }
    return (Format){0};
}

/* The bytes of a packed block. */
INLINE i64 block_bytes(const Format f) { return 4 * f.words + 2 * f.scales; }

/* Where a panel's words and 16-bit numbers are. */
typedef struct {
    const Ints *words;
    const char *scales;
} Panel;

INLINE Panel panel_at(const uint8_t *packed, i64 panel, i64 blocks, const Format f) {
    const uint8_t *begin = packed + panel * LANES * blocks * block_bytes(f);
    return (Panel){(const Ints *)begin, (const char *)begin + LANES * blocks * 4 * f.words};
}

/* A part of a panel: the levels of four inputs in each vector, their scales, and what is added to each number, or to each level if
   the type has zero points. */
typedef struct {
    Ints levels[FOURS];
    Lanes scale[2], added;
} __attribute__((aligned(64))) PanelPart;

typedef uint16_t Upper __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* Returns floats of which the upper halves are stored. */
INLINE Lanes widen_upper(const char *from) { return (Lanes)(__builtin_convertvector(*(const Upper *)from, Ints) << 16); }

INLINE Lanes floats_of(Ints x) { return __builtin_convertvector(x, Lanes); }

/* The scale and the shift of part n of a Q4_K or Q5_K block: 6 bits each, the first four of both whole in a byte, whose upper two
   bits are those of the last four. */
INLINE void unpack_sixes(PanelPart *to, const Ints *words, int n) {
    Ints least = words[0] >> 8 * (n & 3), most = words[1] >> 8 * (n & 3), rest = words[2] >> 8 * (n & 3);
    if (n < 4) {
        least &= 63;
        most &= 63;
    } else {
        least = (rest & 15) | (least >> 2 & 48);
        most = (rest >> 4 & 15) | (most >> 2 & 48);
    }
    to->scale[0] *= floats_of(least);
    to->added *= -floats_of(most);
}

INLINE void unpack_nibbles(PanelPart *to, const Ints *words) {
#pragma GCC unroll 4
    for (int n = 0; n < FOURS / 2; n++) {
        to->levels[n] = words[n] & 0x0f0f0f0f;
        to->levels[n + FOURS / 2] = words[n] >> 4 & 0x0f0f0f0f;
    }
}

/* Turns codes of 4-bit floats into levels: twice their numbers, plus 12. */
INLINE Ints level_of_codes(Ints codes) {
    static const uint8_t levels[16] __attribute__((aligned(16))) = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if LANES == 16 && defined(__AVX512BW__)
    return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)levels)), (__m512i)codes);
#elif LANES == 8 && defined(__AVX2__)
    return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)levels)), (__m256i)codes);
#elif defined(__aarch64__)
    return (Ints)vqtbl1q_u8(vld1q_u8(levels), (uint8x16_t)codes);
#else
    uint8_t each[sizeof codes];
    memcpy(each, &codes, sizeof codes);
    for (int i = 0; i < (int)sizeof codes; i++) each[i] = levels[each[i]];
    memcpy(&codes, each, sizeof codes);
    return codes;
#endif
}

INLINE void unpack_bytes(PanelPart *to, const Ints *words) {
#pragma GCC unroll 8
    for (int n = 0; n < FOURS; n++) to->levels[n] = words[n];
}

/* Levels of which each byte of a word has `bits` bits, and those of other parts beside them. */
INLINE void unpack_bits(PanelPart *to, const Ints *words, int from, int32_t mask) {
#pragma GCC unroll 8
    for (int n = 0; n < FOURS; n++) to->levels[n] = words[n] >> from & mask;
}

/* Adds a fifth bit to levels. That of group n is bit n of each byte (Q5_0 and Q5_1 as packed here). */
INLINE void add_fifth(PanelPart *to, Ints bits) {
#pragma GCC unroll 8
    for (int n = 0; n < FOURS; n++) to->levels[n] |= (n < 4 ? bits << (4 - n) : bits >> (n - 4)) & 0x10101010;
}

INLINE void unpack_q6(PanelPart *to, const Ints *words, int part) {
    const Ints *low = words + part / 4 * 16 + (part & 1) * FOURS, *high = words + 32 + part / 4 * FOURS, *scales = words + 48;
    unpack_bits(to, low, 4 * (part >> 1 & 1), 0x0f0f0f0f);
#pragma GCC unroll 8
    for (int n = 0; n < FOURS; n++) to->levels[n] |= (high[n] >> 2 * (part & 3) & 0x03030303) << 4;
    Ints both = scales[part / 2] >> 16 * (part & 1);
    to->scale[0] *= floats_of(both << 24 >> 24);
    to->scale[1] *= floats_of(both << 16 >> 24);
}

INLINE void unpack_levels(PanelPart *to, const Ints *words, int part, const int type) {
    switch (type) {
    case Q8_0:
    case G8_32:
    case G8_64:
    case G8_128: unpack_bytes(to, words + part * FOURS); break;
    case Q4_0:
    case Q4_1:
    case G4_32:
    case G4_64:
    case G4_128: unpack_nibbles(to, words + part * FOURS / 2); break;
    case Q5_0:
    case Q5_1:
        unpack_nibbles(to, words + 1);
        add_fifth(to, words[0]);
        break;
    case Q4_K:
        unpack_bits(to, words + 3 + part / 2 * FOURS, 4 * (part & 1), 0x0f0f0f0f);
        unpack_sixes(to, words, part);
        break;
    case Q5_K:
        unpack_bits(to, words + 11 + part / 2 * FOURS, 4 * (part & 1), 0x0f0f0f0f);
#pragma GCC unroll 8
        for (int n = 0; n < FOURS; n++) to->levels[n] |= (words[3 + n] >> part & 0x01010101) << 4;
        unpack_sixes(to, words, part);
        break;
    case Q6_K: unpack_q6(to, words, part); break;
    case TQ2_0: unpack_bits(to, words + part / 4 * FOURS, 2 * (part & 3), 0x03030303); break;
    case MXFP4:
        unpack_nibbles(to, words);
#pragma GCC unroll 8
        for (int n = 0; n < FOURS; n++) to->levels[n] = level_of_codes(to->levels[n]);
        break;
    }
}

/* Unpacks part `part` of block `block`: what its type has of a PanelPart. */
INLINE void unpack(PanelPart *to, const Panel panel, i64 block, int part, const int type) {
    const Format f = format_of(type);
    const char *scales = panel.scales + block * f.scales * LANES * 2;
    to->scale[0] = type == MXFP4 ? widen_upper(scales) : widen(scales);
    if (f.kind.halves == 2) to->scale[1] = to->scale[0];
    if (f.kind.also == SHIFTED) to->added = widen(scales + LANES * 2);
    if (f.kind.also == ZEROED) to->added = -widen(scales + LANES * 2);
    unpack_levels(to, panel.words + block * f.words, part, type);
}

#endif
