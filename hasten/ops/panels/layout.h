// What preparing rows and multiplying them share: forms, tiles of rows, codes of a block, the end of a
// product.
#pragma once

#include <algorithm>

#include "../_cpu/gemm.h"
#include "../_cpu/rows.h"
#include "../activation/kinds.h"
#include "cpu.h"
#include "rotation.h"

#if defined(__AVX512F__)
// Compiled for AVX512-VNNI whatever the level's flags are; called only where the processor has it.
#define HASTEN_VNNI_TARGET __attribute__((target("avx512vnni")))
#else
#define HASTEN_VNNI_TARGET
#endif

namespace hasten {

namespace {

constexpr int64_t LANES = PANEL_ROWS;
// Rows of x that one pass over a panel serves.
constexpr int64_t TILE = W == 16 ? 8 : 4;
// Values of x with one scale.
constexpr int64_t BLOCK = 32;
// Units of k whose products are summed before they are added to the total. The same for few and for many
// rows, so that a row's result does not depend on how many others there are.
constexpr int64_t UNITS = 256;

inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}
inline int64_t round_up(int64_t a, int64_t b) {
    return ceil_div(a, b) * b;
}

// Where the numbers of a row lie that is prepared as bytes, in four-byte words: int8 values, then one scale
// for each block, then scale times the sum of values for each group of 16, of 32, of 64 and of 128, which is
// what minima of groups of that size are multiplied by.
struct BytesRow {
    int64_t blocks;
    explicit BytesRow(int64_t K) : blocks(ceil_div(K, BLOCK)) {}
    int64_t scales() const { return BLOCK / 4 * blocks; }
    int64_t sums(int64_t group) const {
        switch (group) {
            case 16:
                return scales() + blocks;
            case 32:
                return sums(16) + groups(16);
            case 64:
                return sums(32) + groups(32);
            default:
                return sums(64) + groups(64);
        }
    }
    int64_t groups(int64_t size) const { return size == 16 ? 2 * blocks : ceil_div(blocks, size / BLOCK); }
    int64_t words() const { return sums(128) + groups(128); }
};

// Of a rotated row: int8 values of whole blocks of 32, then for each 128 values one scale, their sum as
// int32, and scale times sum.
struct RotatedRow {
    int64_t blocks, groups;
    explicit RotatedRow(int64_t K) : blocks(ceil_div(K, BLOCK)), groups(ceil_div(K, ROTATED)) {}
    int64_t scales() const { return BLOCK / 4 * blocks; }
    int64_t counts() const { return scales() + groups; }
    int64_t sums() const { return counts() + groups; }
    int64_t words() const { return sums() + groups; }
};

// Up to so many rows, panels are read anew from the cache for each tile of rows; with more, unpacking them
// for the blocked product is faster. Measured on 2026-11-29 on a Zen 5, one thread, [1536, 576], microseconds
// as few / as many rows: bf16 with 32 rows 170 / 196, with 512 2735 / 2040; int4m with 32 rows 94 / 185, with
// 512 1540 / 2050, and at AVX2 with 128 1220 / 1950; int8 without VNNI with 32 rows 325 / 340, with 128 1290
// / 1030; at the generic level with 8 rows 560 / 610, with 64 3570 / 2760. Where integers always win, a row's
// result does not depend on the number of rows. Torch's product (AMX) was not measured.
inline int64_t few_rows_limit(const PanelProduct& p) {
    const bool quantised = has_codes(p.matrix);
    if (quantised && W == 4) return 8;
    return quantised && !p.brgemm && (p.vnni || p.matrix.bits < 8) ? INT64_MAX : 32;
}

inline PanelForm form_of(const PanelProduct& p) {
    const bool few = p.M <= few_rows_limit(p), pairs = p.bf16 && p.matrix.format != Panel::f32;
    if (p.matrix.format == Panel::rotated) {
        if (few) return PanelForm::rotated_bytes;
        return pairs ? PanelForm::rotated_pairs_rows : PanelForm::rotated_floats_rows;
    }
    if (!few) return pairs ? PanelForm::pairs_rows : PanelForm::floats_rows;
    if (p.matrix.format == Panel::quantised) return PanelForm::bytes;
    return pairs ? PanelForm::pairs : PanelForm::floats;
}

inline bool is_rotated(PanelForm form) {
    return form >= PanelForm::rotated_bytes;
}

// Of many rows, and whether as pairs of bf16.
inline bool is_pairs_rows(PanelForm form) {
    return form == PanelForm::pairs_rows || form == PanelForm::rotated_pairs_rows;
}

inline bool is_few(PanelForm form) {
    return is_bytes(form) || form == PanelForm::pairs || form == PanelForm::floats;
}

// Four-byte words of one prepared row.
inline int64_t words_of(PanelForm form, int64_t K) {
    switch (form) {
        case PanelForm::bytes:
            return BytesRow(K).words();
        case PanelForm::rotated_bytes:
            return RotatedRow(K).words();
        case PanelForm::pairs:
            return ceil_div(K, 2);
        case PanelForm::floats:
            return round_up(K, 2);
        case PanelForm::pairs_rows:
        case PanelForm::rotated_pairs_rows:
            return round_up(ceil_div(K, 2), 16);
        default:
            return round_up(K, 16);
    }
}

// Many rows: UNITS words of all rows lie together, then the next, so that what a block of the product reads
// is one piece of memory. Rows are padded to what torch's product takes, words to 16.
constexpr int64_t ROWS_STEP = 32;
struct RowsBlock {
    int64_t first, words;  // units of k
    uint32_t* data;        // [rows][words]
    RowsBlock(const PanelProduct& p, int64_t index, int64_t all_words)
        : first(index * UNITS),
          words(std::min(UNITS, all_words - first)),
          data((uint32_t*)p.prepared + first * round_up(p.M, ROWS_STEP)) {}
};

// Few rows lie in tiles, word after word, each word for all rows of the tile. Widths are 1, 2, 4 and 8: a
// tile of other height ends in rows of zeros.
struct Tile {
    int64_t first, rows, width;
    Tile(int64_t M, int64_t index) : first(index * TILE), rows(std::min(TILE, M - first)) {
        width = rows > 4 ? 8 : rows > 2 ? 4 : rows;
    }
};
inline int64_t tiles_of(int64_t M) {
    return ceil_div(M, TILE);
}

inline float float_at(const uint32_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}

inline VU load_words(const void* p) {
    VU v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// fp16 numbers that are finite, as scales and minima are.
inline VF finite_f16(VH h) {
#if defined(__AVX2__)
    return widen_f16(h);
#else
    // Without an instruction: the bits in their place, times the difference of the exponents' biases.
    const VU bits = widen_bits(h);
    const VF magnitude = (VF)((bits & 0x7fff) << 13) * 0x1p112f;
    return (VF)((VU)magnitude | (bits & 0x8000) << 16);
#endif
}

// Codes of a block of 4 U values of k: U = 8, or 4 where the group has 16. `a` and `b` are the first and the
// second plane at the block, shifted to the part's lanes.
template <int BITS, int U>
struct Codes {
    static constexpr int first_bits = BITS == 3 ? 2 : BITS == 8 ? 8 : 4;
    static constexpr int second_bits = BITS - first_bits;
    static constexpr int64_t a_step = 8 * U * first_bits, b_step = 8 * U * second_bits;

    // How many units of four values a vector of a plane holds.
    static constexpr int first_units = 8 / first_bits, second_units = second_bits ? 8 / second_bits : U;
    static inline VU first(const uint8_t* a, int u) { return load_words(a + u / first_units * 64); }
    static inline VU second(const uint8_t* b, int u) {
        return second_bits ? load_words(b + u / second_units * 64) : VU{};
    }

    // The codes of k = 4u .. 4u + 3, one in each byte of a lane, from what the planes hold there.
    static inline VU unit(VU first, VU second, int u) {
        VU q = field<first_bits>(first, u);
        if constexpr (second_bits == 1) {
            constexpr uint32_t mask = 0x01010101u << first_bits;
            q |= (u > first_bits ? second >> (u - first_bits) : second << (first_bits - u)) & mask;
        } else if constexpr (second_bits == 2) {
            q |= field<2>(second, u) << first_bits;
        }
        return q;
    }
    static inline VU unit(const uint8_t* a, const uint8_t* b, int u) {
        return unit(first(a, u), second(b, u), u);
    }

    template <int bits>
    static inline VU field(VU v, int u) {
        if constexpr (bits == 8) return v;
        constexpr uint32_t mask = 0x01010101u * ((1 << bits) - 1);
        return (v >> (u % (8 / bits) * bits)) & mask;
    }
};

// Where a group's numbers lie, for one part of the lanes. The last group may have fewer blocks.
template <int BITS, int U>
struct Groups {
    int64_t bytes, header, blocks;
    float zero;
    bool minima;

    explicit Groups(const Matrix& m)
        : bytes(group_bytes(m, m.group)),
          header(m.zero < 0 ? 64 : 32),
          blocks(m.group / (4 * U)),
          zero(float(m.zero)),
          minima(m.zero < 0) {}

    static const uint8_t* panel(const Matrix& m, int64_t index) { return m.data + index * m.panel_bytes; }
    VF scale(const uint8_t* group, int64_t part) const { return finite_f16(load_half(group + part * 2 * W)); }
    VF minimum(const uint8_t* group, int64_t part, VF scale) const {
        return minima ? finite_f16(load_half(group + 32 + part * 2 * W)) : scale * -zero;
    }
    // The first and the second plane of a group, where `left` blocks are left with it.
    const uint8_t* a(const uint8_t* group, int64_t part) const { return group + header + part * 4 * W; }
    const uint8_t* b(const uint8_t* a, int64_t left) const {
        return a + std::min(blocks, left) * Codes<BITS, U>::a_step;
    }
};

// Columns [column, column + W) of rows [row, row + rows): from sums over k to y, through the activation `of`.
// Sums of a row lie `stride` floats apart; `ups` is null without a factor.
template <class Lanes, class F>
inline void finish_rows(const PanelProduct& p, int64_t column, int64_t row, int64_t rows, const float* sums,
                        const float* ups, int64_t stride, Lanes lanes, const F& of) {
    auto bias_of = [&](const Matrix& m) { return m.bias ? get(m.bias + column, lanes) : VF{}; };
    auto unit_of = [](const Matrix& m) { return has_codes(m) ? m.unit : 1.0f; };
    const VF bias = bias_of(p.matrix), up_bias = ups ? bias_of(*p.up) : VF{};
    const float unit = unit_of(p.matrix), up_unit = ups ? unit_of(*p.up) : 1.0f;
    float* y = p.y + row * p.y_row + column;
    const float* residual = p.residual ? p.residual + row * p.residual_row + column : nullptr;
    for (int64_t r = 0; r < rows; r++) {
        VF v = of(load(sums + r * stride) * unit + bias);
        if (ups) v = v * (load(ups + r * stride) * up_unit + up_bias);
        v = v * p.scale;
        if (residual) v = v + get(residual + r * p.residual_row, lanes);
        put(y + r * p.y_row, v, lanes);
    }
}

// The kind is chosen once for all rows.
template <class Lanes>
inline void finish_lanes(const PanelProduct& p, int64_t column, int64_t row, int64_t rows, const float* sums,
                         const float* ups, int64_t stride, Lanes lanes) {
    const auto with = [&](const auto& of) {
        finish_rows(p, column, row, rows, sums, ups, stride, lanes, of);
    };
    if (p.kind == NO_ACTIVATION) return with([](VF v) { return v; });
    with_kind(Kind(p.kind), [&](auto k) { with([](VF v) { return decltype(k)::of(v).value; }); });
}

inline void finish(const PanelProduct& p, int64_t column, int64_t row, int64_t rows, const float* sums,
                   const float* ups, int64_t stride) {
    const int64_t left = p.matrix.N - column;
    if (left >= W)
        finish_lanes(p, column, row, rows, sums, ups, stride, Full{});
    else if (left > 0)
        finish_lanes(p, column, row, rows, sums, ups, stride, int(left));
}

}  // namespace

// Sums over k of W columns (part `part` of the panel) for a tile of rows, into out[width].
using FewSumsOf = void (*)(const Matrix&, int64_t panel, int64_t part, const uint32_t* x, float* out);
// fetch: lines ahead; for nothing where another tile has just read the panel.
FewSumsOf bytes_sums(const Matrix& m, int64_t width, bool vnni, bool fetch);
FewSumsOf dense_sums(const Matrix& m, int64_t width, bool bf16);

// K values of one row, words `width` apart; TILE rows, x_row floats apart. As BytesRow, or rotated, as
// RotatedRow.
void quantise_row(const float* x, int64_t K, uint32_t* to, int64_t width, bool rotated);
void quantise_tile(const float* x, int64_t x_row, int64_t K, uint32_t* to, bool rotated);

void many_rows(const PanelProduct& p, int64_t first_panel, int64_t panels, void* scratch);
int64_t many_rows_scratch(const PanelProduct& p);

}  // namespace hasten
