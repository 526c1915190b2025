// The softmax of attention over a cache, for rows of scores of a part of the keys: what a row has one of
// (largest, sum) is computed for W of them at once, in vectors with a row in each lane.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../_cpu/gemm.h"
#include "cache.h"
#include "span.h"

namespace hasten {
namespace {

// Scores are kept times this, which queries are multiplied by before: powers of two are cheaper than of e.
constexpr float LOG2E = 1.44269504088896341f;

// Pairs of bf16 where the processor has no products of them.
struct WidenedBF16 : FloatSums {
    static constexpr int per_unit = 2;
    static inline VF multiply_add(VF acc, const uint32_t* a, VU b) {
        const VU pair = *a - VU{};
        acc = acc + (VF)(pair << 16) * (VF)(b << 16);
        return acc + (VF)(pair & 0xffff0000u) * (VF)(b & 0xffff0000u);
    }
};

// v as a unit's pairs hold it.
template <class Unit>
HASTEN_PAIRS_TARGET inline VH halves_of(VF v) {
    if constexpr (std::is_same_v<Unit, WidenedBF16>)
        return narrow_bf16(v);
    else
        return narrow_fast(v);
}

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
#endif

// M rows of scores [M, PART_TOKENS], of which places [from, keys) are there. Arrays over rows have W places
// more than rows.
template <class Unit>
struct Rows {
    int64_t M, from, keys;
    float *scores, *largest, *total;
    uint32_t* weights;         // [M, PART_TOKENS / per_unit]
    const int32_t* positions;  // of the rows
    const float* slopes;       // of the rows, or null
    float softcap;
    int64_t window, first_key;
    // With integers: the largest finite scale of a value; what products with queries are multiplied by, and
    // what sums of weights times values will be.
    const Span<Unit>* span;
    float v_largest;
    const float* q_scales;
    float* factors;

    VF score(int64_t m, int64_t j) const {
        const VF v = load(scores + m * PART_TOKENS + j);
        if constexpr (Unit::integers) return v * q_scales[m] * load(span->k_scales[j / T] + j % T);
        return v;
    }
    VF v_scales(int64_t j) const { return load(span->v_scales[j / T] + j % T); }
};

inline VF finite_or_zero(VF v) {
    return v < splat(INF) ? v : VF{};
}

// Scores of a row, ready for powers; returns the largest in each lane. FULL: all places are there. With
// integers v_largest becomes the largest finite scale of a visible value.
template <class Unit, bool FULL>
inline VF prepare_scores(const Rows<Unit>& r, int64_t m, float& v_largest) {
    const int64_t from = FULL ? 0 : r.from, keys = FULL ? PART_TOKENS : r.keys;
    float* x = r.scores + m * PART_TOKENS;
    const int32_t seen = r.positions[m] - int32_t(r.first_key);  // the last visible place
    const int32_t oldest = r.window ? seen - int32_t(r.window) + 1 : INT32_MIN;
    Largest top;
    if (seen >= keys - 1 && oldest <= from && r.softcap == 0 && !r.slopes) {
        v_largest = r.v_largest;
#pragma GCC unroll 8
        for (int64_t j = from; j < keys; j += W) {
            const VF v = r.score(m, j);
            if constexpr (Unit::integers) store(x + j, v);
            top.add(v);
        }
        return top.end();
    }
    const VI lane = lane_numbers();
    VF v_top{};
    for (int64_t j = from; j < keys; j += W) {
        VF v = r.score(m, j);
        if (r.softcap != 0) v = tanh_of(v / (r.softcap * LOG2E)) * (r.softcap * LOG2E);
        const VI at = lane + int32_t(j);
        if (r.slopes) v = v + __builtin_convertvector(at - seen, VF) * (r.slopes[m] * LOG2E);
        const VI visible = (at <= seen) & (at >= oldest);
        v = visible ? v : splat(-INF);
        if constexpr (Unit::integers) v_top = maximum(v_top, visible ? finite_or_zero(r.v_scales(j)) : VF{});
        store(x + j, v);
        top.add(v);
    }
    if constexpr (Unit::integers) v_largest = max_or_nan(v_top);
    return top.end();
}

// Weights of a row: e, or, as integers, e times the value's scale and `factor`. Returns the sum of e in each
// lane.
template <class Unit, bool FULL>
HASTEN_PAIRS_TARGET inline VF put_weights(const Rows<Unit>& r, int64_t m, float shift, float factor) {
    const int64_t from = FULL ? 0 : r.from, keys = FULL ? PART_TOKENS : r.keys;
    const float* x = r.scores + m * PART_TOKENS;
    uint32_t* w = r.weights + m * (PART_TOKENS / Unit::per_unit);
    constexpr int DEGREE = !Unit::integers && Unit::per_unit == 2 ? 4 : 5;
    VF added = splat(shift * 0.0f);  // NaN where a score is
#pragma GCC unroll 8
    for (int64_t j = from; j < keys; j += W) {
        const VF e = exp2_of_negative<DEGREE>(load(x + j) - shift);
        added = added + e;
        if constexpr (Unit::integers) {
            // A place that is not visible has no scale of its own.
            const VF weight = e > VF{} ? e * r.v_scales(j) * factor : VF{};
            added = added + weight * 0.0f;  // NaN is no integer, and is kept here
            store_half((uint16_t*)w + j, (VH)narrowed<int16_t>(rounded_to_int(weight)));
        } else if constexpr (Unit::per_unit == 1) {
            store((float*)w + j, e);
        } else {
            store_half((uint16_t*)w + j, halves_of<Unit>(e));
        }
    }
    return added;
}

// Scores become weights relative to the largest of their row; with integers, to the largest scale of a value
// that the row sees, too, for which `factors` make up.
template <class Unit, bool FULL>
HASTEN_PAIRS_TARGET inline void softmax_of(const Rows<Unit>& r) {
    constexpr float LIMIT = integer_limit(PART_TOKENS);
    VF lanes[W];
    for (int i = 0; i < W; i++) lanes[i] = VF{};
    alignas(64) float v_largest[W] = {}, shifts[W], inverses[W] = {};
    for (int64_t m0 = 0; m0 < r.M; m0 += W) {
        const int64_t rows = std::min<int64_t>(W, r.M - m0);
        for (int64_t i = 0; i < rows; i++) lanes[i] = prepare_scores<Unit, FULL>(r, m0 + i, v_largest[i]);
        const VF largest = largest_of_rows(lanes);
        store(r.largest + m0, largest);
        store(shifts, largest == splat(-INF) ? VF{} : largest);
        if constexpr (Unit::integers) {
            const VF most = load(v_largest);
            store(r.factors + m0, most * (1 / LIMIT));
            // Of less than that the inverse would be infinite.
            store(inverses, most > splat(1e-30f) ? LIMIT / most : VF{});
        }
        for (int64_t i = 0; i < rows; i++)
            lanes[i] = put_weights<Unit, FULL>(r, m0 + i, shifts[i], inverses[i]);
        store(r.total + m0, sums_of_rows(lanes));
    }
}

}  // namespace
}  // namespace hasten
