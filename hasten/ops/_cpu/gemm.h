// C [M, N] (+)= A [M, K] B [K, N] for tiles that live in the caches, in units of four bytes along K: one
// float, or a pair of bf16 whose products are added into one float (VNNI order).
//
// A is read one unit at a time, so any two strides do: a row-major matrix, or one stored by pairs of rows,
// which is how a transposed product reads what a plain one wrote. B and C have contiguous rows, padded to
// whole vectors.
#pragma once

#include "vec.h"

namespace hasten {
namespace {

struct Float {
    static constexpr int per_unit = 1;
    static inline VF multiply_add(VF acc, const uint32_t* a, VU b) {
        float x;
        std::memcpy(&x, a, 4);
        return acc + x * (VF)b;
    }
};

#if defined(__AVX512F__)
// Compiled for AVX512-BF16 whatever the level's flags are; called only where the processor has it.
#define HASTEN_BF16_TARGET __attribute__((target("avx512bf16")))
struct PairBF16 {
    static constexpr int per_unit = 2;
    HASTEN_BF16_TARGET static inline VF multiply_add(VF acc, const uint32_t* a, VU b) {
        return (VF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(*a)), (__m512bh)b);
    }
};
// W floats as bf16 in one instruction.
HASTEN_BF16_TARGET inline VH narrow_fast(VF v) {
    return (VH)_mm512_cvtneps_pbh((__m512)v);
}
#else
#define HASTEN_BF16_TARGET
inline VH narrow_fast(VF v) {
    return narrow_bf16(v);
}
#endif

// With `FETCH` the words of `next` that lie as those of B are brought into the first-level cache, one line
// for each that is read: a burst of fetches would fill the core's few slots for misses and stop it.
template <class Unit, int MR, int NV, bool FETCH = false>
HASTEN_BF16_TARGET inline __attribute__((always_inline)) void gemm_block(int64_t K, const uint32_t* A,
                                                                         int64_t a_m, int64_t a_k,
                                                                         const uint32_t* B, int64_t ldb,
                                                                         float* C, int64_t ldc, bool add,
                                                                         const uint32_t* next = nullptr) {
    VF acc[MR][NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < NV; n++) acc[m][n] = VF{};
    for (int64_t k = 0; k < K; k++) {
        VU b[NV];
        for (int n = 0; n < NV; n++) {
            std::memcpy(&b[n], B + k * ldb + n * W, sizeof(VU));
            if (FETCH && (W == 16 || n % 2 == 0)) __builtin_prefetch(next + k * ldb + n * W);
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
            float* c = C + m * ldc + n * W;
            store(c, add ? load(c) + acc[m][n] : acc[m][n]);
        }
}

template <class Unit, int NV, bool FETCH>
HASTEN_BF16_TARGET inline void gemm_panel(int64_t M, int64_t K, const uint32_t* A, int64_t a_m, int64_t a_k,
                                          const uint32_t* B, int64_t ldb, float* C, int64_t ldc, bool add,
                                          const uint32_t* next) {
    // 6 x 4 accumulators, 4 of B and one of A fill 32 registers; with 16, 6 x 2 do. The first rows fetch.
    int64_t m = 0;
    if (FETCH && M >= 6) {
        gemm_block<Unit, 6, NV, FETCH>(K, A, a_m, a_k, B, ldb, C, ldc, add, next);
        m = 6;
    }
    for (; m + 6 <= M; m += 6)
        gemm_block<Unit, 6, NV>(K, A + m * a_m, a_m, a_k, B, ldb, C + m * ldc, ldc, add);
    // What is left in as few passes over B as can be: a tile of a decoder has 3 or 4 rows.
    if (FETCH && m == 0) {
        if (M == 1) return gemm_block<Unit, 1, NV, FETCH>(K, A, a_m, a_k, B, ldb, C, ldc, add, next);
        if (M == 2) return gemm_block<Unit, 2, NV, FETCH>(K, A, a_m, a_k, B, ldb, C, ldc, add, next);
        if (M == 3) return gemm_block<Unit, 3, NV, FETCH>(K, A, a_m, a_k, B, ldb, C, ldc, add, next);
        gemm_block<Unit, 4, NV, FETCH>(K, A, a_m, a_k, B, ldb, C, ldc, add, next);
        m = 4;
    }
    if (m + 4 <= M) {
        gemm_block<Unit, 4, NV>(K, A + m * a_m, a_m, a_k, B, ldb, C + m * ldc, ldc, add);
        m += 4;
    }
    if (m + 3 == M) return gemm_block<Unit, 3, NV>(K, A + m * a_m, a_m, a_k, B, ldb, C + m * ldc, ldc, add);
    if (m + 2 == M) return gemm_block<Unit, 2, NV>(K, A + m * a_m, a_m, a_k, B, ldb, C + m * ldc, ldc, add);
    if (m < M) gemm_block<Unit, 1, NV>(K, A + m * a_m, a_m, a_k, B, ldb, C + m * ldc, ldc, add);
}

// N is a multiple of W. K counts units.
template <class Unit, bool FETCH = false>
HASTEN_BF16_TARGET void gemm(int64_t M, int64_t N, int64_t K, const uint32_t* A, int64_t a_m, int64_t a_k,
                             const uint32_t* B, int64_t ldb, float* C, int64_t ldc, bool add,
                             const uint32_t* next = nullptr) {
    constexpr int NV = W == 16 ? 4 : 2;
    const auto ahead = [next](int64_t n) { return FETCH ? next + n : nullptr; };
    int64_t n = 0;
    for (; n + NV * W <= N; n += NV * W)
        gemm_panel<Unit, NV, FETCH>(M, K, A, a_m, a_k, B + n, ldb, C + n, ldc, add, ahead(n));
    if constexpr (NV == 4)
        for (; n + 2 * W <= N; n += 2 * W)
            gemm_panel<Unit, 2, FETCH>(M, K, A, a_m, a_k, B + n, ldb, C + n, ldc, add, ahead(n));
    for (; n + W <= N; n += W)
        gemm_panel<Unit, 1, FETCH>(M, K, A, a_m, a_k, B + n, ldb, C + n, ldc, add, ahead(n));
}

}  // namespace
}  // namespace hasten
