// Scores of queries with the keys of two blocks at once: twice the independent sums of one block, and each
// number of a query is spread once for both.
#pragma once

#include "../_cpu/gemm.h"
#include "cpu.h"

namespace hasten {
namespace {

// Registers for two blocks of 32 keys are there at 16 lanes alone.
constexpr bool TWO_BLOCKS = W == 16;

template <class Unit, int MR, bool FETCH>
HASTEN_BF16_TARGET inline __attribute__((always_inline)) void scores_block(int64_t units, const uint32_t* q,
                                                                           const uint32_t* const* k,
                                                                           float* scores,
                                                                           const uint32_t* const* next) {
    constexpr int NV = BLOCK_TOKENS / W;
    VF sum[MR][2 * NV];
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < 2 * NV; n++) sum[m][n] = VF{};
    for (int64_t u = 0; u < units; u++) {
        VU keys[2 * NV];
        for (int n = 0; n < 2 * NV; n++) {
            const int64_t at = u * BLOCK_TOKENS + n % NV * W;
            std::memcpy(&keys[n], k[n / NV] + at, sizeof(VU));
            if (FETCH) __builtin_prefetch(next[n / NV] + at);
        }
#pragma GCC unroll 6
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
            for (int n = 0; n < 2 * NV; n++)
                sum[m][n] = Unit::multiply_add(sum[m][n], q + m * units + u, keys[n]);
    }
    for (int m = 0; m < MR; m++)
        for (int n = 0; n < 2 * NV; n++) store(scores + m * 2 * BLOCK_TOKENS + n * W, sum[m][n]);
}

// scores [M, 64] = q [M, units] times the keys of two blocks [units, 32]. With `next` the lines of two other
// blocks that lie as these are fetched.
template <class Unit>
HASTEN_BF16_TARGET void scores_of_two(int64_t M, int64_t units, const uint32_t* q, const uint32_t* const* k,
                                      float* scores, const uint32_t* const* next) {
    constexpr int64_t width = 2 * BLOCK_TOKENS;
    int64_t m = 0;
    if (next && M >= 6) {
        scores_block<Unit, 6, true>(units, q, k, scores, next);
        m = 6;
    }
    for (; m + 6 <= M; m += 6)
        scores_block<Unit, 6, false>(units, q + m * units, k, scores + m * width, next);
    q += m * units, scores += m * width, M -= m;
    const bool fetch = next && m == 0;
    if (M >= 4) {
        fetch ? scores_block<Unit, 4, true>(units, q, k, scores, next)
              : scores_block<Unit, 4, false>(units, q, k, scores, next);
        if (M == 5) scores_block<Unit, 1, false>(units, q + 4 * units, k, scores + 4 * width, next);
    } else if (M == 3) {
        fetch ? scores_block<Unit, 3, true>(units, q, k, scores, next)
              : scores_block<Unit, 3, false>(units, q, k, scores, next);
    } else if (M == 2) {
        fetch ? scores_block<Unit, 2, true>(units, q, k, scores, next)
              : scores_block<Unit, 2, false>(units, q, k, scores, next);
    } else if (M == 1) {
        fetch ? scores_block<Unit, 1, true>(units, q, k, scores, next)
              : scores_block<Unit, 1, false>(units, q, k, scores, next);
    }
}

}  // namespace
}  // namespace hasten
