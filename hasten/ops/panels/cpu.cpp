// Products with panels: rows of x in the form that a product reads (PanelForm), few or many rows, one row.
#include "layout.h"

namespace hasten {
namespace {

// `words` words, zeros behind the end.
void write_floats(const float* x, int64_t K, int64_t words, uint32_t* to, int64_t width) {
    for (int64_t k = 0; k < std::min(K, words); k++) std::memcpy(to + k * width, x + k, 4);
    for (int64_t k = std::max<int64_t>(K, 0); k < words; k++) to[k * width] = 0;
}

#if defined(__AVX512F__)
// `words` words of two values each, zeros behind the end.
template <class Unit>
HASTEN_PAIRS_TARGET void write_pairs(const float* x, int64_t K, int64_t words, uint32_t* to, int64_t width) {
    for (int64_t k = 0; k < 2 * words; k += W) {
        const VF v = k + W <= K ? load(x + k) : k < K ? load_part(x + k, int(K - k)) : VF{};
        const VH halves = narrow_fast(v);
        const int64_t count = std::min<int64_t>(W / 2, words - k / 2);
        if (width == 1 && count == W / 2) {
            std::memcpy(to + k / 2, &halves, sizeof halves);
            continue;
        }
        uint32_t pairs[W / 2];
        std::memcpy(pairs, &halves, sizeof halves);
        for (int64_t i = 0; i < count; i++) to[(k / 2 + i) * width] = pairs[i];
    }
}
#endif

// K values, which may be fewer or more than the words hold.
void write_units(bool pairs, const float* x, int64_t K, int64_t words, uint32_t* to, int64_t width) {
#if defined(__AVX512F__)
    if (pairs) return write_pairs<PairBF16>(x, K, words, to, width);
#endif
    write_floats(x, K, words, to, width);
}

int64_t prepared_bytes(const PanelProduct& p) {
    const PanelForm form = form_of(p);
    int64_t rows = round_up(p.M, ROWS_STEP);
    if (is_few(form) && p.M > 0) {
        const Tile last(p.M, tiles_of(p.M) - 1);
        rows = last.first + last.width;
    }
    return 4 * rows * words_of(form, p.matrix.K);
}

void prepare(const PanelProduct& p, int64_t first, int64_t rows) {
    if (rows == 0) return;
    const PanelForm form = form_of(p);
    const bool pairs = form == PanelForm::pairs || is_pairs_rows(form), rotated = is_rotated(form);
    const int64_t K = p.matrix.K, words = words_of(form, K), end = first + rows;
    if (!is_few(form)) {
        alignas(64) float turned[2 * UNITS];
        for (int64_t index = 0; index * UNITS < words; index++) {
            const RowsBlock block(p, index, words);
            const int64_t per_unit = pairs ? 2 : 1, k = block.first * per_unit,
                          values = std::min(K - k, UNITS * per_unit);
            static_assert(UNITS % ROTATED == 0);
            for (int64_t r = first; r < end; r++) {
                const float* x = p.x + r * p.x_row + k;
                if (rotated) rotate(x, values, turned), x = turned;
                write_units(pairs, x, values, block.words, block.data + r * block.words, 1);
            }
            if (end == p.M)
                std::memset(block.data + end * block.words, 0,
                            size_t((round_up(end, ROWS_STEP) - end) * block.words) * 4);
        }
        return;
    }
    uint32_t* to = (uint32_t*)p.prepared;
    for (int64_t r = first; r < end; r++) {
        const Tile tile(p.M, r / TILE);
        const float* x = p.x + r * p.x_row;
        uint32_t* row = to + tile.first * words + (r - tile.first);
        if (!is_bytes(form)) {
            write_units(pairs, x, K, words, row, tile.width);
        } else if (r % TILE == 0 && r + TILE <= end) {
            quantise_tile(x, p.x_row, K, row, rotated);
            r += TILE - 1;
        } else {
            quantise_row(x, K, row, tile.width, rotated);
        }
    }
    if (end == p.M) {  // rows that only fill the last tile
        const Tile tile(p.M, tiles_of(p.M) - 1);
        for (int64_t r = tile.rows; r < tile.width; r++)
            for (int64_t i = 0; i < words; i++) to[tile.first * words + i * tile.width + r] = 0;
    }
}

void few_rows(const PanelProduct& p, PanelForm form, int64_t first, int64_t panels) {
    const bool bytes = is_bytes(form);
    const int64_t words = words_of(form, p.matrix.K), tiles = tiles_of(p.M);
    auto choose = [&](const Matrix& m, int64_t width, bool fetch) {
        return bytes ? bytes_sums(m, width, p.vnni, fetch) : dense_sums(m, width, p.bf16);
    };
    struct Sums {
        FewSumsOf plain, up;
    };
    // All tiles but the last are full.
    auto sums_of = [&](int64_t width, bool fetch) {
        return Sums{choose(p.matrix, width, fetch), p.up ? choose(*p.up, width, fetch) : nullptr};
    };
    const Sums begins = sums_of(TILE, true), full = sums_of(TILE, false),
               last = sums_of(Tile(p.M, tiles - 1).width, tiles == 1);
    // As many panels together as stay in the second-level cache while all tiles pass over them.
    const int64_t bytes_of_both = p.matrix.panel_bytes + (p.up ? p.up->panel_bytes : 0);
    const int64_t together =
        tiles == 1 ? 1 : std::max<int64_t>(1, (1 << 18) / std::max<int64_t>(1, bytes_of_both));
    alignas(64) float sums[TILE * W], factors[TILE * W];
    for (int64_t begin = first; begin < first + panels; begin += together)
        for (int64_t t = 0; t < tiles; t++) {
            const Tile tile(p.M, t);
            const Sums& f = t + 1 == tiles ? last : t ? full : begins;
            const uint32_t* x = (const uint32_t*)p.prepared + tile.first * words;
            for (int64_t panel = begin; panel < std::min(begin + together, first + panels); panel++)
                for (int64_t part = 0; part < LANES / W; part++) {
                    const int64_t column = panel * LANES + part * W;
                    if (column >= p.matrix.N) break;
                    f.plain(p.matrix, panel, part, x, sums);
                    if (p.up) f.up(*p.up, panel, part, x, factors);
                    finish(p, column, tile.first, tile.rows, sums, p.up ? factors : nullptr, W);
                }
        }
}

int64_t scratch_bytes(const PanelProduct& p) {
    return is_few(form_of(p)) ? 0 : many_rows_scratch(p);
}

void product(const PanelProduct& p, int64_t first_panel, int64_t panels, void* scratch) {
    if (p.M == 0 || panels == 0) return;
    const PanelForm form = form_of(p);
    if (is_few(form))
        few_rows(p, form, first_panel, panels);
    else
        many_rows(p, first_panel, panels, scratch);
}

// Codes of values 4 quad .. 4 quad + 3 of a group in a plane of `bits` bits, one in each byte.
inline uint32_t codes_at(const uint8_t* plane, int bits, int64_t lane, int64_t quad) {
    const int64_t per_byte = 8 / bits;
    uint32_t word;
    std::memcpy(&word, plane + quad / per_byte * 64 + lane * 4, 4);
    return word >> (quad % per_byte * bits) & ((1u << bits) - 1) * 0x01010101u;
}

void panel_row(const Matrix& m, int64_t row, float* out) {
    const uint8_t* panel = m.data + row / LANES * m.panel_bytes;
    const int64_t lane = row % LANES;
    if (m.format == Panel::f32) {
        for (int64_t k = 0; k < m.K; k++) std::memcpy(out + k, panel + (k * LANES + lane) * 4, 4);
        return;
    }
    if (m.format == Panel::bf16) {
        for (int64_t k = 0; k < m.K; k++) {
            bf16 value;
            std::memcpy(&value, panel + (k / 2 * LANES + lane) * 4 + k % 2 * 2, 2);
            out[k] = widen_scalar(value);
        }
        return;
    }
    const int first_bits = m.bits == 3 ? 2 : m.bits == 8 ? 8 : 4, second_bits = m.bits - first_bits;
    for (int64_t k0 = 0; k0 < m.K; k0 += m.group, panel += group_bytes(m, m.group)) {
        const int64_t size = group_size(m, k0);
        f16 numbers[2];
        std::memcpy(numbers, panel + 2 * lane, 2);
        std::memcpy(numbers + 1, panel + (m.zero < 0 ? 32 : 0) + 2 * lane, 2);
        const float scale = widen_scalar(numbers[0]);
        const float minimum = m.zero < 0 ? widen_scalar(numbers[1]) : scale * -float(m.zero);
        const uint8_t *a = panel + (m.zero < 0 ? 64 : 32), *b = a + 2 * size * first_bits;
        uint8_t codes[128];
        for (int64_t quad = 0; quad < size / 4; quad++) {
            uint32_t four = codes_at(a, first_bits, lane, quad);
            if (second_bits) four |= codes_at(b, second_bits, lane, quad) << first_bits;
            std::memcpy(codes + 4 * quad, &four, 4);
        }
        for (int64_t k = 0; k < std::min<int64_t>(m.group, m.K - k0); k++)
            out[k0 + k] = m.unit * (scale * float(codes[k]) + minimum);
        if (m.format == Panel::rotated)
            rotate_block(out + k0, std::min<int64_t>(m.group, m.K - k0), out + k0);
    }
}

}  // namespace

void panel_kernels(Kernels& table) {
    table.panel_form = form_of;
    table.panel_prepared_bytes = prepared_bytes;
    table.panel_scratch_bytes = scratch_bytes;
    table.panel_prepare = prepare;
    table.panel_product = product;
    table.panel_row = panel_row;
}

}  // namespace hasten
