// Many rows: some panels are unpacked for a part of K, as pairs of bf16 or floats, and multiplied with all
// rows by the blocked product.
#include "layout.h"

namespace hasten {
namespace {

constexpr int64_t PANELS = 4;  // unpacked together: the 64 columns of the blocked product
constexpr int64_t ROWS = 512;  // whose sums stay in the second-level cache
constexpr int64_t PRODUCT_ROWS =
    128;  // of one call of torch's product; a multiple of 32, as all its row counts

template <class Unit>
struct Unpacked;

template <>
struct Unpacked<Float> {
    // Stores the weights of k .. k + 3, one code in each byte of a lane, to rows of B.
    static inline void codes(VU q, VF scale, VF minimum, uint32_t* to, int64_t ldb) {
        for (int i = 0; i < 4; i++) {
            const VF code = __builtin_convertvector((VI)((q >> (8 * i)) & 255u), VF);
            store((float*)to + i * ldb, code * scale + minimum);
        }
    }
    static inline void pair(VU w, uint32_t* to, int64_t ldb) {
        store((float*)to, (VF)(w << 16));
        store((float*)to + ldb, (VF)(w & 0xffff0000u));
    }
};

#if defined(__AVX512F__)
template <>
struct Unpacked<PairBF16> {
    HASTEN_PAIRS_TARGET static inline VU rounded(VF even, VF odd) {
        alignas(64) static constexpr uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
        return (VU)_mm512_permutexvar_epi16(_mm512_load_si512(order), halves);
    }
    HASTEN_PAIRS_TARGET static inline void codes(VU q, VF scale, VF minimum, uint32_t* to, int64_t ldb) {
        VF w[4];
        for (int i = 0; i < 4; i++)
            w[i] = __builtin_convertvector((VI)((q >> (8 * i)) & 255u), VF) * scale + minimum;
        const VU first = rounded(w[0], w[1]), second = rounded(w[2], w[3]);
        std::memcpy(to, &first, sizeof first);
        std::memcpy(to + ldb, &second, sizeof second);
    }
    static inline void pair(VU w, uint32_t* to, int64_t) { std::memcpy(to, &w, sizeof w); }
};
#endif

// Weights of k0 .. k0 + count - 1 (k0 a multiple of 128, count rounded up to a block) of one part of a panel.
template <class Unit, int BITS, int U>
HASTEN_PAIRS_TARGET void unpack_codes(const Matrix& m, int64_t panel, int64_t part, int64_t k0, int64_t count,
                                      uint32_t* to, int64_t ldb) {
    using C = Codes<BITS, U>;
    const Groups<BITS, U> groups(m);
    const uint8_t* group = groups.panel(m, panel) + k0 / m.group * groups.bytes;
    for (int64_t left = ceil_div(count, 4 * U); left > 0; left -= groups.blocks, group += groups.bytes) {
        const VF scale = groups.scale(group, part), minimum = groups.minimum(group, part, scale);
        const uint8_t *a = groups.a(group, part), *b = groups.b(a, left);
        for (int64_t i = std::min(left, groups.blocks); i > 0; i--, a += C::a_step, b += C::b_step)
#pragma GCC unroll 8
            for (int u = 0; u < U; u++, to += 4 / Unit::per_unit * ldb)
                Unpacked<Unit>::codes(C::unit(a, b, u), scale, minimum, to, ldb);
    }
}

template <class Unit>
HASTEN_PAIRS_TARGET void unpack(const Matrix& m, int64_t panel, int64_t part, int64_t k0, int64_t count,
                                uint32_t* to, int64_t ldb) {
    const uint8_t* w = m.data + panel * m.panel_bytes + part * 4 * W;
    switch (m.format) {
        case Panel::f32:
            for (int64_t k = k0; k < k0 + count; k++, to += ldb) std::memcpy(to, w + k * 64, W * 4);
            return;
        case Panel::bf16:
            for (int64_t k = k0; k < k0 + count; k += 2, to += 2 / Unit::per_unit * ldb)
                Unpacked<Unit>::pair(load_words(w + k / 2 * 64), to, ldb);
            return;
        default:
            break;
    }
    const bool small = m.group == 16;
    switch (m.bits) {
        case 3:
            return unpack_codes<Unit, 3, 8>(m, panel, part, k0, count, to, ldb);
        case 4:
            return small ? unpack_codes<Unit, 4, 4>(m, panel, part, k0, count, to, ldb)
                         : unpack_codes<Unit, 4, 8>(m, panel, part, k0, count, to, ldb);
        case 5:
            return unpack_codes<Unit, 5, 8>(m, panel, part, k0, count, to, ldb);
        case 6:
            return small ? unpack_codes<Unit, 6, 4>(m, panel, part, k0, count, to, ldb)
                         : unpack_codes<Unit, 6, 8>(m, panel, part, k0, count, to, ldb);
        default:
            return small ? unpack_codes<Unit, 8, 4>(m, panel, part, k0, count, to, ldb)
                         : unpack_codes<Unit, 8, 8>(m, panel, part, k0, count, to, ldb);
    }
}

// C [rows, 16 panels] = rows [row, row + rows) of x times panels of the matrix.
template <class Unit>
HASTEN_PAIRS_TARGET void multiply(const PanelProduct& p, const Matrix& m, int64_t panel, int64_t panels,
                                  int64_t row, int64_t rows, uint32_t* B, float* C) {
    const int64_t columns = panels * LANES, words = words_of(form_of(p), m.K);
    for (int64_t index = 0; index * UNITS < words; index++) {
        const RowsBlock block(p, index, words);
        const int64_t k = block.first * Unit::per_unit;
        const int64_t values = std::min(block.words * Unit::per_unit, m.K - k);
        const int64_t units = ceil_div(values, Unit::per_unit);
        for (int64_t i = 0; i < panels; i++)
            for (int64_t part = 0; part < LANES / W; part++)
                unpack<Unit>(m, panel + i, part, k, values, B + i * LANES + part * W, columns);
        const uint32_t* x = block.data + row * block.words;
        if (Unit::per_unit == 1 || !p.brgemm) {
            gemm<Unit>(rows, columns, {units, x, block.words, 1, B, columns, C, columns, index > 0});
            continue;
        }
        std::memset(B + units * columns, 0, size_t((block.words - units) * columns) * 4);
        for (int64_t r = 0; r < rows; r += PRODUCT_ROWS)
            p.brgemm(std::min(PRODUCT_ROWS, round_up(rows - r, ROWS_STEP)), columns, 2 * block.words,
                     2 * block.words, columns, columns, index > 0, x + r * block.words, B, C + r * columns);
    }
}

template <class Unit>
HASTEN_PAIRS_TARGET void many(const PanelProduct& p, int64_t first, int64_t count, void* scratch) {
    uint32_t* B = (uint32_t*)((uintptr_t(scratch) + 63) / 64 * 64);
    float* sums = (float*)(B + UNITS * PANELS * LANES);
    float* factors = sums + round_up(std::min(p.M, ROWS), ROWS_STEP) * PANELS * LANES;
    for (int64_t panel = first; panel < first + count; panel += PANELS) {
        const int64_t panels = std::min(PANELS, first + count - panel), columns = panels * LANES;
        for (int64_t row = 0; row < p.M; row += ROWS) {
            const int64_t rows = std::min(ROWS, p.M - row);
            multiply<Unit>(p, p.matrix, panel, panels, row, rows, B, sums);
            if (p.up) multiply<Unit>(p, *p.up, panel, panels, row, rows, B, factors);
            // A few rows at a time, since a row of y may be a page of its own.
            for (int64_t r = 0; r < rows; r += 32)
                for (int64_t c = 0; c < columns; c += W)
                    finish(p, panel * LANES + c, row + r, std::min<int64_t>(32, rows - r),
                           sums + r * columns + c, p.up ? factors + r * columns + c : nullptr, columns);
        }
    }
}

}  // namespace

int64_t many_rows_scratch(const PanelProduct& p) {
    const int64_t tile = round_up(std::min(p.M, ROWS), ROWS_STEP) * PANELS * LANES;
    return 64 + 4 * (UNITS * PANELS * LANES + tile * (p.up ? 2 : 1));
}

void many_rows(const PanelProduct& p, int64_t first_panel, int64_t panels, void* scratch) {
#if defined(__AVX512F__)
    if (is_pairs_rows(form_of(p))) return many<PairBF16>(p, first_panel, panels, scratch);
#endif
    many<Float>(p, first_panel, panels, scratch);
}

}  // namespace hasten
