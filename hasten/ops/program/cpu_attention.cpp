// Attention over the paged cache: tiles of queries over blocks of keys.
//
// The query heads of a KV head are folded together: row g * tokens + t of a tile is the t-th token's query of
// head h * G + g. Products read the cache as it lies: K [D units, 32] and V [units of tokens, Dv].
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../_cpu/rows.h"
#include "cache.h"
#include "softmax.h"
#include "span.h"

namespace hasten {
namespace {

// f(m, row, head) for the rows of a tile, without a division for each.
template <class F>
inline void each_row(const Tile& t, int64_t group, const F& f) {
    int64_t m = 0;
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < t.tokens; i++) f(m++, t.first + i, t.head * group + g);
}

void write_results(const Instruction& in, const Tile& t, const CacheLayer& c, const float* o,
                   const float* largest, const float* totals) {
    each_row(t, in.n0 / c.heads, [&](int64_t m, int64_t row, int64_t h) {
        float share = 1, total = totals[m];
        if (in.b.base) {  // a sink takes probability and has no value
            const float sink = in.b.base[h] * LOG2E, peak = std::max(largest[m], sink);
            share = largest[m] == -INF ? 0.0f : std::exp2(largest[m] - peak);
            total = total * share + std::exp2(sink - peak);
        }
        const float scale = total == 0 ? 0.0f : share / total;
        const float* from = o + m * c.dv_pad;
        float* out = in.dst.base + row * in.dst.row_stride + h * in.dst.s0;
        each_vector(c.Dv, [&](int64_t d, auto lanes) { put(out + d, get(from + d, lanes) * scale, lanes); });
    });
}

// Adds a part's sums [M, width] to those of the parts before it. One function for all who join parts, so that
// the compiler rounds alike and a row's bits depend on its keys alone. Numbers of rows have W places more.
__attribute__((noinline)) void fold(int64_t M, int64_t width, float* o, float* largest, float* total,
                                    const float* part, const float* part_largest, const float* part_total) {
    for (int64_t m0 = 0; m0 < M; m0 += W) {
        const VF was = load(largest + m0), is = load(part_largest + m0);
        const VF peak = (was > is) | (was != was) ? was : is;
        const VF before = was == splat(-INF) ? VF{} : exp2_of(was - peak);
        const VF now = is == splat(-INF) ? VF{} : exp2_of(is - peak);
        hasten::store(total + m0, load(total + m0) * before + load(part_total + m0) * now);
        hasten::store(largest + m0, peak);
        alignas(64) float a[W], b[W];
        hasten::store(a, before);
        hasten::store(b, now);
        for (int64_t i = 0; i < std::min<int64_t>(W, M - m0); i++)
            for (int64_t d = (m0 + i) * width; d < (m0 + i + 1) * width; d += W)
                hasten::store(o + d, load(o + d) * a[i] + load(part + d) * b[i]);
    }
}

template <class Unit>
HASTEN_PAIRS_TARGET void to_halves(const float* x, int64_t n, float factor, uint16_t* to) {
    int64_t d = 0;
    for (; d + W <= n; d += W) store_half(to + d, halves_of<Unit>(load(x + d) * factor));
    if (d == n) return;
    const VH last = halves_of<Unit>(load_part(x + d, int(n - d)) * factor);
    std::memcpy(to + d, &last, size_t(n - d) * 2);
}

// Queries [M, units] for products with keys, times the scale of scores; scales: with integers, what products
// are multiplied by instead.
template <class Unit>
void take_queries(const Step& s, const Instruction& in, const Tile& t, const CacheLayer& c, uint32_t* q,
                  float* scales, int32_t* positions, float* slopes) {
    const float limit = float(integer_limit(2 * c.d_units)), scale = float(in.f[0]) * LOG2E;
    each_row(t, in.n0 / c.heads, [&](int64_t m, int64_t row, int64_t h) {
        const float* x = row_of(in.a, row, h);
        uint32_t* to = q + m * c.d_units;
        to[c.d_units - 1] = 0;  // the second of a pair, where D is odd
        if constexpr (Unit::integers)
            scales[m] = scale * to_integers(x, c.D, limit, (int16_t*)to);
        else if constexpr (Unit::per_unit == 2)
            to_halves<Unit>(x, c.D, scale, (uint16_t*)to);
        else
            each_vector(
                c.D, [&](int64_t d, auto lanes) { put((float*)to + d, get(x + d, lanes) * scale, lanes); });
        positions[m] = s.positions[row];
        if (in.c.base) slopes[m] = in.c.base[h];
    });
}

// `fresh`: the unit before was not of this tile and head, whose queries are then there.
template <class Unit>
HASTEN_PAIRS_TARGET void attend(const Program& p, const Step& s, const Instruction& in, const Tile& t,
                                const Tile& after, bool fresh, char* memory) {
    const CacheLayer& c = p.layers[in.i[0]];
    auto take = [&memory](int64_t floats) {
        float* at = (float*)memory;
        memory += (floats * 4 + 63) / 64 * 64;
        return at;
    };
    uint32_t* q = (uint32_t*)take(t.M * c.d_units);
    int32_t* positions = (int32_t*)take(t.M);
    float *slopes = take(t.M), *q_scales = take(t.M), *factors = take(t.M + W);
    float *scores = take(t.M * PART_TOKENS), *o = take(t.M * c.dv_pad);
    uint32_t* weights = (uint32_t*)take(t.M * (PART_TOKENS / Unit::per_unit));
    float *largest = take(t.M + W), *total = take(t.M + W);
    float *sum_o = take(t.M * c.dv_pad), *sum_largest = take(t.M + W), *sum_total = take(t.M + W);
    if (fresh) take_queries<Unit>(s, in, t, c, q, q_scales, positions, slopes);
    Rows<Unit> rows{};
    rows.M = t.M, rows.window = in.i[3];
    rows.scores = scores, rows.weights = weights, rows.largest = largest, rows.total = total;
    rows.positions = positions, rows.slopes = in.c.base ? slopes : nullptr;
    rows.q_scales = q_scales, rows.factors = factors;
    rows.softcap = float(in.f[1]);
    const int64_t part = t.begin / PART_BLOCKS,
                  parts = t.begin < t.end ? (t.end - 1) / PART_BLOCKS + 1 - part : 0;
    if (parts != 1) {
        std::memset(sum_o, 0, size_t(t.M * c.dv_pad) * 4);
        std::fill_n(sum_largest, t.M, -INF);
        std::fill_n(sum_total, t.M, 0.0f);
    }
    Span<Unit> span(c, s, t, part);
    for (int64_t i = 0; i < parts; i++) {
        // Blocks lie anywhere, so the processor cannot guess the next ones: they are this tile's, or the
        // first of the tile that this thread works on next.
        const bool last = i + 1 == parts;
        const Span<Unit> next(c, s, last ? after : t, last ? after.begin / PART_BLOCKS : part + i + 1);
        scores_of<Unit>(t.M, c.d_units, q, span, next, scores);
        rows.from = span.low * T, rows.keys = span.high * T, rows.first_key = (part + i) * PART_TOKENS;
        rows.span = &span;
        if constexpr (Unit::integers) {
            VF top{};
            for (int64_t j = rows.from; j < rows.keys; j += W)
                top = maximum(top, finite_or_zero(rows.v_scales(j)));
            rows.v_largest = max_or_nan(top);
            next.fetch_scales();
        }
        if (rows.keys - rows.from == PART_TOKENS)
            softmax_of<Unit, true>(rows);
        else
            softmax_of<Unit, false>(rows);
        // Values behind the last visible one are not read: they may be another sequence's.
        const int64_t seen = s.positions[t.first + t.tokens - 1] - rows.first_key + 1;
        values_of<Unit>(t.M, c.dv_pad, weights, span, next, (seen + Unit::per_unit - 1) / Unit::per_unit,
                        factors, o);
        if (parts > 1) fold(t.M, c.dv_pad, sum_o, sum_largest, sum_total, o, largest, total);
        span = next;
    }
    if (parts != 1) o = sum_o, largest = sum_largest, total = sum_total;
    if (s.parts == 1) return write_results(in, t, c, o, largest, total);
    float* to = p.partial + t.index * t.M * (c.dv_pad + 2);
    std::memcpy(to, o, size_t(t.M * c.dv_pad) * 4);
    std::memcpy(to + t.M * c.dv_pad, largest, size_t(t.M) * 4);
    std::memcpy(to + t.M * (c.dv_pad + 1), total, size_t(t.M) * 4);
}

// Joins the parts of a tile, in order.
void merge(const Program& p, const Step& s, const Instruction& in, int64_t unit, float* memory) {
    const CacheLayer& c = p.layers[in.i[0]];
    const Tile t(p, s, in, c, unit * s.parts);
    const int64_t M = t.M, sums = M * c.dv_pad;
    float *o = memory, *largest = o + sums, *total = largest + M + W;
    float *part_largest = total + M + W, *part_total = part_largest + M + W;
    std::fill_n(o, sums, 0.0f);
    std::fill_n(largest, M, -INF);
    std::fill_n(total, M, 0.0f);
    for (int64_t i = 0; i < s.parts; i++) {
        const float* part = p.partial + (t.index + i) * M * (c.dv_pad + 2);
        std::memcpy(part_largest, part + sums, size_t(M) * 4);
        std::memcpy(part_total, part + sums + M, size_t(M) * 4);
        fold(M, c.dv_pad, o, largest, total, part, part_largest, part_total);
    }
    write_results(in, t, c, o, largest, total);
}

int64_t units(const Program& p, const Step& s, const Instruction& in) {
    if (in.op == Op::store) return row_units(in, s.rows);
    const int64_t heads = p.layers[in.i[0]].heads;
    if (in.op == Op::merge) return s.parts == 1 ? 0 : s.tiles * heads;
    return s.tiles * heads * s.parts;
}

int64_t scratch_bytes(const Program& p, const Step& s, const Instruction& in) {
    const CacheLayer& c = p.layers[in.i[0]];
    if (in.op == Op::store) return store_floats(c) * 4;
    const int64_t M = s.tile_tokens * (in.n0 / c.heads);
    return (M * (c.d_units + 2 * PART_TOKENS + 2 * c.dv_pad + 8) + 5 * W) * 4 + 1024;
}

void run(const Program& p, const Step& s, const Instruction& in, int64_t first, int64_t count,
         void* scratch) {
    if (in.op == Op::store) {
        const RowRange rows = rows_of_units(in, s.rows, first, count);
        return store_rows(p, s, in, rows.first, rows.count, (float*)scratch);
    }
    if (in.op == Op::merge) {
        for (int64_t unit = first; unit < first + count; unit++) merge(p, s, in, unit, (float*)scratch);
        return;
    }
    auto function = attend<Float>;
    if (p.cache == Cache::bf16) function = attend<WidenedBF16>;
    if (p.cache == Cache::bytes) function = attend<PairIntegers>;
#if defined(__AVX512F__)
    if (p.cache == Cache::bf16 && p.bf16) function = attend<PairBF16>;
    if (p.cache == Cache::bytes && p.vnni) function = attend<PairIntegersVNNI>;
#endif
    const CacheLayer& c = p.layers[in.i[0]];
    for (int64_t unit = first; unit < first + count; unit++) {
        const Tile tile(p, s, in, c, unit);
        const bool fresh = unit == first || unit % s.parts == 0;
        // Behind the last unit there is nothing to fetch ahead: the tile itself, whose blocks are here.
        const Tile after(p, s, in, c, std::min(unit + 1, first + count - 1));
        function(p, s, in, tile, after, fresh, (char*)scratch);
    }
}

}  // namespace

void program_attention_kernels(Kernels& table) {
    table.program_attention_units = units;
    table.program_attention_scratch = scratch_bytes;
    table.program_attention_run = run;
}

}  // namespace hasten
