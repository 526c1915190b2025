// The online softmax of attention over a cache, for rows of scores of two blocks of keys: what is shared by
// rows (largest, factor, sum) is computed for W of them at once, in vectors with a row in each lane.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../_cpu/gemm.h"
#include "cache.h"

namespace hasten {
namespace {

// Scores are kept times this: powers of two are cheaper than of e.
constexpr float LOG2E = 1.44269504088896341f;

// Pairs of bf16 where the processor has no products of them.
struct WidenedBF16 {
    static constexpr int per_unit = 2;
    static inline VF multiply_add(VF acc, const uint32_t* a, VU b) {
        const VU pair = *a - VU{};
        acc = acc + (VF)(pair << 16) * (VF)(b << 16);
        return acc + (VF)(pair & 0xffff0000u) * (VF)(b & 0xffff0000u);
    }
};

#if defined(__AVX512F__)
// Lane r of the result: f over the lanes of v[r], in the order of `sum` in vec.h.
template <class F>
inline VF across(const VF* v, const F& f) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) {
        const __m512 x = (__m512)v[2 * i], y = (__m512)v[2 * i + 1];
        a[i] = f(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    }
    for (int i = 0; i < 4; i++)
        b[i] = f(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88),
                 _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xdd));
    for (int i = 0; i < 2; i++)
        c[i] = f(_mm512_unpacklo_ps(b[2 * i], b[2 * i + 1]), _mm512_unpackhi_ps(b[2 * i], b[2 * i + 1]));
    const __m512d x = (__m512d)c[0], y = (__m512d)c[1];
    const __m512 d = f((__m512)_mm512_unpacklo_pd(x, y), (__m512)_mm512_unpackhi_pd(x, y));
    // Quarter q holds rows q, 4 + q, 8 + q, 12 + q.
    alignas(64) static constexpr int32_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return (VF)_mm512_permutexvar_ps(_mm512_load_si512(order), d);
}
inline VF sums_of_rows(const VF* v) {
    return across(v, [](__m512 a, __m512 b) { return _mm512_add_ps(a, b); });
}
inline VF largest_of_rows(const VF* v) {
    return across(v, [](__m512 a, __m512 b) { return _mm512_max_ps(a, b); });
}
// The largest of a row of vectors, NaN everywhere if there is one.
struct Largest {
    __m512 top = _mm512_set1_ps(-INF);
    __mmask16 odd = 0;
    void add(VF v) {
        top = _mm512_max_ps((__m512)v, top);
        odd |= _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    }
    VF end() const { return odd ? splat(__builtin_nanf("")) : (VF)top; }
};
// A bit for each lane that is not 1.
inline unsigned not_one(VF v) {
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(1), _CMP_NEQ_UQ);
}
#else
inline VF sums_of_rows(const VF* v) {
    VF y;
    for (int r = 0; r < W; r++) y[r] = sum(v[r]);
    return y;
}
inline VF largest_of_rows(const VF* v) {
    VF y;
    for (int r = 0; r < W; r++) y[r] = max_or_nan(v[r]);
    return y;
}
struct Largest {
    VF top = splat(-INF);
    void add(VF v) { top = ((v > top) | (v != v)) ? v : top; }
    VF end() const { return top; }
};
inline unsigned not_one(VF v) {
    unsigned bits = 0;
    for (int r = 0; r < W; r++) bits |= unsigned(v[r] != 1) << r;
    return bits;
}
#endif

// M rows of scores [M, 2 T], of which places [from, keys) are there, and what is kept of the rows before.
// Arrays over rows have W places more than rows.
struct Rows {
    int64_t M, from, keys, o_width;
    float *scores, *o, *largest, *total;
    uint32_t* weights;         // [M, 2 T / per_unit]
    const int32_t* positions;  // of the rows
    const float* slopes;       // of the rows, or null
    const float *k_scales, *v_scales;
    float scale, softcap;
    int64_t window, first_key;
};

// Scores of a row times LOG2E, ready for powers; returns the largest in each lane. FULL: all places are
// there.
template <bool BYTES, bool FULL>
inline VF prepare_scores(const Rows& r, int64_t m) {
    const int64_t from = FULL ? 0 : r.from, keys = FULL ? 2 * T : r.keys;
    float* x = r.scores + m * 2 * T;
    const float scale = r.scale * LOG2E;
    const int32_t seen = r.positions[m] - int32_t(r.first_key);  // the last visible place
    const int32_t oldest = r.window ? seen - int32_t(r.window) + 1 : INT32_MIN;
    Largest top;
    if (seen >= keys - 1 && oldest <= 0 && r.softcap == 0 && !r.slopes) {
#pragma GCC unroll 4
        for (int64_t j = from; j < keys; j += W) {
            VF v = load(x + j) * scale;
            if (BYTES) v = v * load(r.k_scales + j);
            store(x + j, v);
            top.add(v);
        }
        return top.end();
    }
    const VI lane = lane_numbers();
    for (int64_t j = from; j < keys; j += W) {
        VF v = load(x + j) * (r.softcap == 0 ? scale : r.scale);
        if (BYTES) v = v * load(r.k_scales + j);
        if (r.softcap != 0) v = tanh_of(v / r.softcap) * (r.softcap * LOG2E);
        const VI at = lane + int32_t(j);
        if (r.slopes) v = v + __builtin_convertvector(at - seen, VF) * (r.slopes[m] * LOG2E);
        v = ((at <= seen) & (at >= oldest)) ? v : splat(-INF);
        store(x + j, v);
        top.add(v);
    }
    return top.end();
}

// Weights of a row; returns their sum in each lane.
template <class Unit, bool BYTES, bool FULL>
HASTEN_BF16_TARGET inline VF put_weights(const Rows& r, int64_t m, float shift) {
    const int64_t from = FULL ? 0 : r.from, keys = FULL ? 2 * T : r.keys;
    const float* x = r.scores + m * 2 * T;
    uint32_t* w = r.weights + m * (2 * T / Unit::per_unit);
    VF added{};
#pragma GCC unroll 4
    for (int64_t j = from; j < keys; j += W) {
        const VF e = exp2_of(load(x + j) - shift);
        added = added + e;
        VF weight = e;
        // A place that is not visible has no scale of its own.
        if (BYTES) weight = e > VF{} ? e * load(r.v_scales + j) : VF{};
        if constexpr (Unit::per_unit == 1)
            store((float*)w + j, weight);
        else if constexpr (std::is_same_v<Unit, WidenedBF16>)
            store_half((uint16_t*)w + j, narrow_bf16(weight));
        else
            store_half((uint16_t*)w + j, narrow_fast(weight));
    }
    return added;
}

// Scores become weights; totals, and the sums o of values so far, are brought to the new largest score.
template <class Unit, bool BYTES, bool FULL>
HASTEN_BF16_TARGET inline void online_softmax(const Rows& r) {
    VF lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = VF{};
    for (int64_t m0 = 0; m0 < r.M; m0 += W) {
        const int64_t rows = std::min<int64_t>(W, r.M - m0);
        for (int64_t i = 0; i < rows; i++) lanes[i] = prepare_scores<BYTES, FULL>(r, m0 + i);
        const VF before = load(r.largest + m0), highest = largest_of_rows(lanes);
        const VF peak = (before > highest) | (before != before) ? before : highest;
        // Nothing was seen before: there is nothing to be brought anywhere.
        const VF factor = before == splat(-INF) ? splat(1) : exp2_of(before - peak);
        alignas(64) float shifts[W], factors[W];
        store(shifts, peak == splat(-INF) ? VF{} : peak);
        store(factors, factor);
        store(r.largest + m0, peak);
        for (int64_t i = 0; i < rows; i++) lanes[i] = put_weights<Unit, BYTES, FULL>(r, m0 + i, shifts[i]);
        store(r.total + m0, load(r.total + m0) * factor + sums_of_rows(lanes));
        for (unsigned left = not_one(factor) & ((1u << rows) - 1); left; left &= left - 1) {
            const int i = __builtin_ctz(left);
            float* row = r.o + (m0 + i) * r.o_width;
            for (int64_t d = 0; d < r.o_width; d += W) store(row + d, load(row + d) * factors[i]);
        }
    }
}

}  // namespace
}  // namespace hasten
