// Attention over the paged cache: tiles of queries over blocks of keys.
//
// The query heads of a KV head are folded together: row g * tokens + t of a tile is the t-th token's query of
// head h * G + g. Products read the cache as it lies: K [D units, 32] and V [units of tokens, Dv].
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../_cpu/rows.h"
#include "cache.h"
#include "scores.h"
#include "softmax.h"

namespace hasten {
namespace {

// Bytes as bf16, exactly; `n` a multiple of 32.
template <class Unit>
inline void widen_bytes(const int8_t* from, uint32_t* to, int64_t n) {
    typedef int8_t B __attribute__((vector_size(W)));
    for (int64_t i = 0; i < n; i += W) {
        B bytes;
        std::memcpy(&bytes, from + i, sizeof bytes);
        const VF wide = __builtin_convertvector(__builtin_convertvector(bytes, VI), VF);
        store_half((uint16_t*)to + i, narrow_bits((VU)wide >> 16));
    }
}

#if defined(__AVX512F__)
template <>
HASTEN_BF16_TARGET inline void widen_bytes<PairBF16>(const int8_t* from, uint32_t* to, int64_t n) {
    for (int64_t i = 0; i < n; i += 32) {
        const auto wide = [](const int8_t* at) {
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
        };
        const __m512 low = wide(from + i), high = wide(from + i + 16);
        _mm512_storeu_si512((uint16_t*)to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
}
#endif

// Brings bytes into the second-level cache.
inline void fetch(const int8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// One tile of queries of one KV head over one part of its keys.
struct Tile {
    int64_t head, part, sequence, first, tokens, M;  // rows [first, first + tokens) of the step
    int64_t begin, end;                              // blocks
    int64_t index;

    Tile(const Program& p, const Step& s, const Instruction& in, const CacheLayer& c, int64_t unit) {
        index = unit;
        part = unit % s.parts;
        unit /= s.parts;
        head = unit % c.heads;
        const int64_t tile = unit / c.heads;
        sequence = s.tile_sequence[tile];
        first = s.tile_first[tile];
        tokens = std::min<int64_t>(s.tile_tokens, s.starts[sequence + 1] - first);
        M = tokens * (in.n0 / c.heads);
        const int64_t window = in.i[3], last = s.positions[first + tokens - 1];
        const int64_t oldest = window ? std::max<int64_t>(0, s.positions[first] - window + 1) : 0;
        begin = oldest / T;
        end = last / T + 1;
        if (s.tile_tokens > 1) return;
        // A part is the same keys whatever else is in the step, so that a sequence's result is, too.
        begin = std::max(begin, part * PART_BLOCKS);
        end = std::min(end, (part + 1) * PART_BLOCKS);
    }
};

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

template <class Unit, bool BYTES>
HASTEN_BF16_TARGET void attend(const Program& p, const Step& s, const Instruction& in, const Tile& t,
                               const Tile& after, char* memory) {
    const CacheLayer& c = p.layers[in.i[0]];
    const int64_t group = in.n0 / c.heads;
    constexpr int64_t P_UNITS = T / Unit::per_unit;
    auto take = [&memory](int64_t floats) {
        float* at = (float*)memory;
        memory += (floats * 4 + 63) / 64 * 64;
        return at;
    };
    uint32_t* q = (uint32_t*)take(t.M * c.d_units);
    float *scores = take(t.M * 2 * T), *o = take(t.M * c.dv_pad);
    float *largest = take(t.M + W), *total = take(t.M + W), *slopes = take(in.c.base ? t.M : 0);
    int32_t* positions = (int32_t*)take(t.M);
    uint32_t* weights = (uint32_t*)take(t.M * 2 * P_UNITS);
    uint32_t* widened = (uint32_t*)take(BYTES ? std::max(2 * c.d_units * T, P_UNITS * c.dv_pad) : 0);
    float *k_scales = take(BYTES ? 2 * T : 0), *v_scales = take(BYTES ? 2 * T : 0);
    const int64_t first_part = t.begin / PART_BLOCKS,
                  parts = t.begin < t.end ? (t.end - 1) / PART_BLOCKS + 1 - first_part : 0;
    float *sum_o = take(parts > 1 ? t.M * c.dv_pad : 0), *sum_largest = take(t.M + W),
          *sum_total = take(t.M + W);
    each_row(t, group, [&](int64_t m, int64_t row, int64_t h) {
        const float* x = row_of(in.a, row, h);
        uint32_t* to = q + m * c.d_units;
        if (Unit::per_unit == 1) {
            std::memcpy(to, x, size_t(c.D) * 4);
        } else {
            to[c.d_units - 1] = 0;
            each_vector(c.D, [&](int64_t d, auto lanes) { put((bf16*)to + d, get(x + d, lanes), lanes); });
        }
        positions[m] = s.positions[row];
        if (in.c.base) slopes[m] = in.c.base[h];
    });
    const auto nothing = [&](float* of_largest, float* of_total) {
        std::fill_n(of_largest, t.M, -INF);
        std::fill_n(of_total, t.M, 0.0f);
    };
    nothing(largest, total);
    nothing(sum_largest, sum_total);
    Rows rows{};
    rows.M = t.M, rows.o_width = c.dv_pad, rows.window = in.i[3];
    rows.scores = scores, rows.weights = weights, rows.o = o, rows.largest = largest, rows.total = total;
    rows.positions = positions, rows.slopes = in.c.base ? slopes : nullptr;
    rows.k_scales = k_scales, rows.v_scales = v_scales;
    rows.scale = float(in.f[0]), rows.softcap = float(in.f[1]);
    std::memset(o, 0, size_t(t.M * c.dv_pad) * 4);
    if (parts > 1) std::memset(sum_o, 0, size_t(t.M * c.dv_pad) * 4);
    // Blocks lie anywhere, so the processor cannot guess the next one: it is this tile's, or one of the first
    // of the tile that this thread works on next.
    struct Next {
        uint32_t* block;  // null: none
        int64_t head;
    };
    const auto following = [&](int64_t block, int64_t i) -> Next {
        const bool own = block + 2 < t.end;
        const Tile& of = own ? t : after;
        const int64_t index = own ? block + 2 : after.begin + i;
        return {index < of.end ? block_of(c, s, of.sequence, index) : nullptr, of.head};
    };
    // Two blocks at a time: what a row costs beside its products counts once for 64 keys. Pairs and parts
    // begin at the same keys for every row, whatever its window and whatever shares its tile.
    for (int64_t b = t.begin / 2 * 2; b < t.end; b += 2) {
        const int64_t low = b < t.begin ? 1 : 0, pair = std::min<int64_t>(2, t.end - b);
        const bool both = TWO_BLOCKS && low == 0 && pair == 2;
        const uint32_t *keys[2] = {}, *ahead[2] = {};
        for (int64_t i = low; i < pair; i++) {
            uint32_t* block = block_of(c, s, t.sequence, b + i);
            keys[i] = Head(c, block, t.head).k;
            const Next next = following(b + i, i);
            if constexpr (BYTES) {
                const Bytes bytes(c, block, t.head);
                widen_bytes<Unit>(bytes.k, widened + i * c.d_units * T, 2 * c.d_units * T);
                keys[i] = widened + i * c.d_units * T;
                std::memcpy(k_scales + i * T, bytes.k_scale, T * 4);
                std::memcpy(v_scales + i * T, bytes.v_scale, T * 4);
                if (next.block) fetch(Bytes(c, next.block, next.head).k, 2 * c.d_units * T);
            } else if (next.block) {
                ahead[i] = Head(c, next.block, next.head).k;
            }
            if (both) continue;
            if (ahead[i])
                gemm<Unit, true>(t.M, T, c.d_units, q, c.d_units, 1, keys[i], T, scores + i * T, 2 * T, false,
                                 ahead[i]);
            else
                gemm<Unit>(t.M, T, c.d_units, q, c.d_units, 1, keys[i], T, scores + i * T, 2 * T, false);
        }
        if (both)
            scores_of_two<Unit>(t.M, c.d_units, q, keys, scores, ahead[0] && ahead[1] ? ahead : nullptr);
        rows.from = low * T, rows.keys = pair * T, rows.first_key = b * T;
        if (rows.keys - rows.from == 2 * T)
            online_softmax<Unit, BYTES, true>(rows);
        else
            online_softmax<Unit, BYTES, false>(rows);
        for (int64_t i = low; i < pair; i++) {
            // Values behind the last visible one are not read: they may be another sequence's.
            const int64_t behind = s.positions[t.first + t.tokens - 1] - (b + i) * T + 1;
            const int64_t used = (std::min<int64_t>(T, behind) + Unit::per_unit - 1) / Unit::per_unit;
            uint32_t* block = block_of(c, s, t.sequence, b + i);
            const uint32_t* V = Head(c, block, t.head).v;
            if constexpr (BYTES) {
                widen_bytes<Unit>(Bytes(c, block, t.head).v, widened, T * c.dv_pad);
                V = widened;
            }
            const Next next = following(b + i, i);
            if (BYTES || !next.block) {
                if (next.block) fetch(Bytes(c, next.block, next.head).v, T * c.dv_pad);
                gemm<Unit>(t.M, c.dv_pad, used, weights + i * P_UNITS, 2 * P_UNITS, 1, V, c.dv_pad, o,
                           c.dv_pad, true);
            } else {
                const uint32_t* ahead = Head(c, next.block, next.head).v;
                gemm<Unit, true>(t.M, c.dv_pad, used, weights + i * P_UNITS, 2 * P_UNITS, 1, V, c.dv_pad, o,
                                 c.dv_pad, true, ahead);
            }
        }
        if (parts > 1 && ((b + 2) % PART_BLOCKS == 0 || b + 2 >= t.end)) {
            fold(t.M, c.dv_pad, sum_o, sum_largest, sum_total, o, largest, total);
            nothing(largest, total);
            std::memset(o, 0, size_t(t.M * c.dv_pad) * 4);
        }
    }
    if (parts > 1) {
        o = sum_o;
        largest = sum_largest;
        total = sum_total;
    }
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
    const int64_t widened = std::max(2 * c.d_units * T, T / 2 * c.dv_pad) + 4 * T;
    return (M * (c.d_units + 4 * T + 2 * c.dv_pad + 6) + widened + 4 * W) * 4 + 1024;
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
    auto function = attend<Float, false>;
    if (p.cache == Cache::bf16) function = attend<WidenedBF16, false>;
    if (p.cache == Cache::bytes) function = attend<WidenedBF16, true>;
#if defined(__AVX512F__)
    if (p.bf16 && p.cache == Cache::bf16) function = attend<PairBF16, false>;
    if (p.bf16 && p.cache == Cache::bytes) function = attend<PairBF16, true>;
#endif
    const CacheLayer& c = p.layers[in.i[0]];
    for (int64_t unit = first; unit < first + count; unit++) {
        const Tile tile(p, s, in, c, unit);
        // Behind the last unit there is nothing to fetch ahead: the tile itself, whose blocks are here.
        const Tile after(p, s, in, c, std::min(unit + 1, first + count - 1));
        function(p, s, in, tile, after, (char*)scratch);
    }
}

}  // namespace

void program_attention_kernels(Kernels& table) {
    table.program_attention_units = units;
    table.program_attention_scratch = scratch_bytes;
    table.program_attention_run = run;
}

}  // namespace hasten
