// C [M, N] (+)= A [M, K] B [K, N] for tiles that live in the caches, in units of four bytes along K: one
// float, or a pair of bf16 whose products are added into one float (VNNI order), or of 16-bit integers whose
// products are added into one of 32 bits. A unit of B may be stored in fewer bytes.
//
// A is read one unit at a time, so any two strides do: a row-major matrix, or one stored by pairs of rows,
// which is how a transposed product reads what a plain one wrote. B and C have contiguous rows, padded to
// whole vectors.
#pragma once

#include <type_traits>

#include "vec.h"

namespace hasten {
namespace {

// What units whose products are floats have in common.
struct FloatSums {
    static constexpr bool integers = false;
    using Sum = VF;
    using Stored = uint32_t;  // a unit of B
    static inline VU load(const uint32_t* b) {
        VU v;
        std::memcpy(&v, b, sizeof v);
        return v;
    }
    static inline VF total(VF sum) { return sum; }
};

struct Float : FloatSums {
    static constexpr int per_unit = 1;
    static inline VF multiply_add(VF acc, const uint32_t* a, VU b) {
        float x;
        std::memcpy(&x, a, 4);
        return acc + x * (VF)b;
    }
};

#if defined(__AVX512F__)
// Compiled for products of pairs whatever the level's flags are; a kind of pairs is used only where the
// processor has its products.
#define HASTEN_PAIRS_TARGET __attribute__((target("avx512bf16,avx512vnni")))
struct PairBF16 : FloatSums {
    static constexpr int per_unit = 2;
    HASTEN_PAIRS_TARGET static inline VF multiply_add(VF acc, const uint32_t* a, VU b) {
        return (VF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(*a)), (__m512bh)b);
    }
};
// W floats as bf16 in one instruction.
HASTEN_PAIRS_TARGET inline VH narrow_fast(VF v) {
    return (VH)_mm512_cvtneps_pbh((__m512)v);
}
#else
#define HASTEN_PAIRS_TARGET
inline VH narrow_fast(VF v) {
    return narrow_bf16(v);
}
#endif

// What a product is of; K counts units. With `next` the words of it that lie as those of B are brought into
// the second-level cache: the first has few slots for misses.
template <class Unit>
struct Product {
    int64_t K;
    const uint32_t* A;
    int64_t a_m, a_k;
    const typename Unit::Stored* B;
    int64_t ldb;
    float* C;
    int64_t ldc;
    bool add;
    const typename Unit::Stored* next = nullptr;
};

// Rows m .. m + MR - 1 and NV vectors of columns from n on. One line is fetched for each that is read: a
// burst of fetches would fill the core's few slots for misses and stop it.
template <class Unit, int MR, int NV, bool FETCH = false>
HASTEN_PAIRS_TARGET inline __attribute__((always_inline)) void gemm_block(const Product<Unit>& p, int64_t m0,
                                                                          int64_t n0) {
    const uint32_t* A = p.A + m0 * p.a_m;
    const typename Unit::Stored *B = p.B + n0, *next = FETCH ? p.next + n0 : nullptr;
    const int64_t a_m = p.a_m, a_k = p.a_k, ldb = p.ldb, K = p.K;
    constexpr int VECTOR = W * sizeof(*B);
    typename Unit::Sum acc[MR][NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) acc[m][n] = typename Unit::Sum{};
    for (int64_t k = 0; k < K; k++) {
        VU b[NV];
        for (int n = 0; n < NV; n++) {
            b[n] = Unit::load(B + k * ldb + n * W);
            if (FETCH && n * VECTOR % 64 == 0) __builtin_prefetch(next + k * ldb + n * W, 0, 2);
        }
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++)
                acc[m][n] = Unit::multiply_add(acc[m][n], A + m * a_m + k * a_k, b[n]);
    }
    // What was there is added to the whole block at the end: the rounding errors of a long sum grow with the
    // number of blocks, not of terms.
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) {
            float* c = p.C + (m0 + m) * p.ldc + n0 + n * W;
            const VF total = Unit::total(acc[m][n]);
            store(c, p.add ? load(c) + total : total);
        }
}

// f(rows, fetch, m) for blocks of rows from m on, their number known when compiled; the first alone may
// fetch. 6 x 4 sums, 4 vectors of B and one of A fill 32 registers; with 16, 6 x 2 do. What is left is done
// in as few passes over B as can be: a tile of a decoder has 3 or 4 rows.
template <int N>
using Count = std::integral_constant<int, N>;
template <bool FETCH, class F>
HASTEN_PAIRS_TARGET inline __attribute__((always_inline)) void in_blocks(int64_t M, const F& f) {
    constexpr std::bool_constant<FETCH> first;
    constexpr std::false_type others;
    int64_t m = 0;
    if (M >= 6) {
        f(Count<6>(), first, 0);
        for (m = 6; m + 6 <= M; m += 6) f(Count<6>(), others, m);
        if (M - m >= 4) f(Count<4>(), others, m), m += 4;
        if (M - m == 3) f(Count<3>(), others, m);
        if (M - m == 2) f(Count<2>(), others, m);
        if (M - m == 1) f(Count<1>(), others, m);
        return;
    }
    if (M >= 4) f(Count<4>(), first, 0);
    if (M == 5) f(Count<1>(), others, 4);
    if (M == 3) f(Count<3>(), first, 0);
    if (M == 2) f(Count<2>(), first, 0);
    if (M == 1) f(Count<1>(), first, 0);
}

template <class Unit, int NV, bool FETCH>
HASTEN_PAIRS_TARGET inline void gemm_panel(const Product<Unit>& p, int64_t M, int64_t n) {
    in_blocks<FETCH>(M, [&](auto rows, auto fetch, int64_t m) HASTEN_PAIRS_TARGET {
        gemm_block<Unit, decltype(rows)::value, NV, decltype(fetch)::value>(p, m, n);
    });
}

// f(vectors, n) for N columns, a multiple of W: as many vectors at a time as there are registers for.
template <class F>
HASTEN_PAIRS_TARGET inline __attribute__((always_inline)) void in_columns(int64_t N, const F& f) {
    constexpr int NV = W == 16 ? 4 : 2;
    int64_t n = 0;
    for (; n + NV * W <= N; n += NV * W) f(Count<NV>(), n);
    if constexpr (NV == 4)
        for (; n + 2 * W <= N; n += 2 * W) f(Count<2>(), n);
    for (; n + W <= N; n += W) f(Count<1>(), n);
}

template <class Unit, bool FETCH>
HASTEN_PAIRS_TARGET void gemm_panels(const Product<Unit>& p, int64_t M, int64_t N) {
    in_columns(N, [&](auto vectors, int64_t n)
                      HASTEN_PAIRS_TARGET { gemm_panel<Unit, decltype(vectors)::value, FETCH>(p, M, n); });
}

// C [M, N] (+)= A B; N is a multiple of W.
template <class Unit>
HASTEN_PAIRS_TARGET void gemm(int64_t M, int64_t N, const Product<Unit>& p) {
    if (p.next) return gemm_panels<Unit, true>(p, M, N);
    gemm_panels<Unit, false>(p, M, N);
}

}  // namespace
}  // namespace hasten
