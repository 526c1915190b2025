// Products of queries with the keys of a few blocks, and of weights with their values.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../_cpu/gemm.h"
#include "cache.h"
#include "integers.h"

namespace hasten {
namespace {

// One tile of queries of one KV head over its keys; over one part of them where each row is a sequence.
struct Tile {
    int64_t head, sequence, first, tokens, M;  // rows [first, first + tokens) of the step
    int64_t begin, end;                        // blocks
    int64_t index;

    Tile(const Program& p, const Step& s, const Instruction& in, const CacheLayer& c, int64_t unit) {
        index = unit;
        const int64_t part = unit % s.parts;
        unit /= s.parts;
        head = unit % c.heads;
        const QueryTile& tile = s.query_tiles[unit / c.heads];
        sequence = tile.sequence;
        first = tile.first;
        tokens = tile.rows;
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

// Keys and values of a head in a block, as the unit reads them.
template <class Unit>
using HeadOf = std::conditional_t<Unit::integers, Bytes, Head>;

// Blocks [low, high) of a part of a sequence's keys. It begins at the same keys for every row, whatever its
// window and whatever shares its tile.
template <class Unit>
struct Span {
    using Stored = typename Unit::Stored;
    int64_t low = 0, high = 0;
    const Stored *k[PART_BLOCKS] = {}, *v[PART_BLOCKS] = {};
    const float *k_scales[PART_BLOCKS] = {}, *v_scales[PART_BLOCKS] = {};  // of bytes

    Span(const CacheLayer& c, const Step& s, const Tile& t, int64_t part) {
        const int64_t start = part * PART_BLOCKS;
        low = std::max<int64_t>(0, t.begin - start), high = std::min(PART_BLOCKS, t.end - start);
        for (int64_t i = low; i < high; i++) {
            const HeadOf<Unit> head(c, block_of(c, s, t.sequence, start + i), t.head);
            k[i] = head.k, v[i] = head.v;
            if constexpr (Unit::integers) k_scales[i] = head.k_scale, v_scales[i] = head.v_scale;
        }
    }
    void fetch_scales() const {
        for (int64_t i = low; i < high; i++)
            for (int64_t j = 0; j < T; j += 16)
                __builtin_prefetch(k_scales[i] + j), __builtin_prefetch(v_scales[i] + j);
    }
};

// Registers for two blocks of 32 keys are there at 16 lanes alone.
constexpr bool TWO_BLOCKS = W == 16;

// The keys of two blocks: twice the independent sums of one, and each number of a query is spread once for
// both.
template <class Unit, int MR, bool FETCH>
HASTEN_PAIRS_TARGET inline __attribute__((always_inline)) void scores_block(
    int64_t units, const uint32_t* q, const typename Unit::Stored* const* k, float* scores,
    const typename Unit::Stored* const* next) {
    constexpr int NV = T / W;
    constexpr int VECTOR = W * sizeof(typename Unit::Stored);
    typename Unit::Sum sum[MR][2 * NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < 2 * NV; n++) sum[m][n] = typename Unit::Sum{};
    for (int64_t u = 0; u < units; u++) {
        VU keys[2 * NV];
        for (int n = 0; n < 2 * NV; n++) {
            const int64_t at = u * T + n % NV * W;
            keys[n] = Unit::load(k[n / NV] + at);
            if (FETCH && n % NV * VECTOR % 64 == 0) __builtin_prefetch(next[n / NV] + at, 0, 2);
        }
#pragma GCC unroll 6
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
            for (int n = 0; n < 2 * NV; n++)
                sum[m][n] = Unit::multiply_add(sum[m][n], q + m * units + u, keys[n]);
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < 2 * NV; n++) store(scores + m * PART_TOKENS + n * W, Unit::total(sum[m][n]));
}

// scores [M, PART_TOKENS] = q [M, units] times the keys of a span [units, 32 a block]. Lines of the next span
// are fetched where those of this are read.
template <class Unit>
HASTEN_PAIRS_TARGET void scores_of(int64_t M, int64_t units, const uint32_t* q, const Span<Unit>& span,
                                   const Span<Unit>& next, float* scores) {
    int64_t i = span.low;
    const auto two = [&](auto ahead) HASTEN_PAIRS_TARGET {
        in_blocks<decltype(ahead)::value>(M, [&](auto rows, auto fetch, int64_t m) HASTEN_PAIRS_TARGET {
            scores_block<Unit, decltype(rows)::value, decltype(fetch)::value>(
                units, q + m * units, span.k + i, scores + m * PART_TOKENS + i * T, next.k + i);
        });
    };
    for (; TWO_BLOCKS && i + 2 <= span.high; i += 2)
        next.k[i] && next.k[i + 1] ? two(std::true_type()) : two(std::false_type());
    for (; i < span.high; i++)
        gemm<Unit>(M, T, {units, q, units, 1, span.k[i], T, scores + i * T, PART_TOKENS, false, next.k[i]});
}

// o [M, width] from column n on = weights [M, PART_UNITS] times the values of a span [units, width].
template <class Unit, int MR, int NV, bool FETCH>
HASTEN_PAIRS_TARGET inline __attribute__((always_inline)) void values_block(
    const uint32_t* weights, const Span<Unit>& span, const Span<Unit>& next, int64_t units, int64_t width,
    int64_t n0, const float* factors, float* o) {
    constexpr int64_t BLOCK_UNITS = T / Unit::per_unit, PART_UNITS = PART_BLOCKS * BLOCK_UNITS;
    constexpr int VECTOR = W * sizeof(typename Unit::Stored);
    typename Unit::Sum sum[MR][NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) sum[m][n] = typename Unit::Sum{};
    for (int64_t i = span.low; i < span.high; i++) {
        const typename Unit::Stored *v = span.v[i] + n0, *ahead = FETCH && next.v[i] ? next.v[i] + n0 : v;
        const uint32_t* w = weights + i * BLOCK_UNITS;
        for (int64_t u = std::min(BLOCK_UNITS, units - i * BLOCK_UNITS); u > 0; u--) {
            VU values[NV];
            for (int n = 0; n < NV; n++) {
                values[n] = Unit::load(v + n * W);
                if (FETCH && n * VECTOR % 64 == 0) __builtin_prefetch(ahead + n * W, 0, 2);
            }
#pragma GCC unroll 6
            for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++)
                    sum[m][n] = Unit::multiply_add(sum[m][n], w + m * PART_UNITS, values[n]);
            v += width, ahead += width, w++;
        }
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) {
            VF total = Unit::total(sum[m][n]);
            if (Unit::integers) total = total * factors[m];
            store(o + m * width + n0 + n * W, total);
        }
}

// The same for all columns. Only the first `units` of the part are read.
template <class Unit>
HASTEN_PAIRS_TARGET void values_of(int64_t M, int64_t width, const uint32_t* weights, const Span<Unit>& span,
                                   const Span<Unit>& next, int64_t units, const float* factors, float* o) {
    constexpr int64_t PART_UNITS = PART_TOKENS / Unit::per_unit;
    in_columns(width, [&](auto vectors, int64_t n) HASTEN_PAIRS_TARGET {
        in_blocks<true>(M, [&](auto rows, auto fetch, int64_t m) HASTEN_PAIRS_TARGET {
            values_block<Unit, decltype(rows)::value, decltype(vectors)::value, decltype(fetch)::value>(
                weights + m * PART_UNITS, span, next, units, width, n, factors + m, o + m * width);
        });
    });
}

}  // namespace
}  // namespace hasten
