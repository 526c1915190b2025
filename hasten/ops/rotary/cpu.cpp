// Every form is y[i] = x[i] * c[i] + x[partner(i)] * s[i]: the rotation and its transpose differ in s, which
// is written once for a position and serves all heads.
#include "cpu.h"

#include <algorithm>

#include "../_cpu/rows.h"

namespace hasten {
namespace {

void factors(const Rotary& a, const float* sin, float* s) {
    const int64_t half = a.R / 2, step = a.interleaved ? 2 : 1, other = a.interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        const int64_t lo = step * i, hi = lo + other;
        s[lo] = a.transposed ? sin[hi] : -sin[lo];
        s[hi] = a.transposed ? -sin[lo] : sin[hi];
    }
}

inline VF swap_pairs(VF v) {
#if defined(__clang__)
    VF swapped;
    for (int i = 0; i < W; i++) swapped[i] = v[i ^ 1];
    return swapped;
#else
    VI index;
    for (int i = 0; i < W; i++) index[i] = i ^ 1;
    return __builtin_shuffle(v, index);
#endif
}

template <class T, class Out>
void turn_row(const Rotary& a, const T* x, const float* c, const float* s, Out* y) {
    if (a.interleaved) {
        each_vector(a.R, [&](int64_t i, auto lanes) {
            const VF v = get(x + i, lanes);
            put(y + i, v * get(c + i, lanes) + swap_pairs(v) * get(s + i, lanes), lanes);
        });
    } else {
        const int64_t half = a.R / 2;
        each_vector(half, [&](int64_t i, auto lanes) {
            const VF lo = get(x + i, lanes), hi = get(x + half + i, lanes);
            put(y + i, lo * get(c + i, lanes) + hi * get(s + i, lanes), lanes);
            put(y + half + i, hi * get(c + half + i, lanes) + lo * get(s + half + i, lanes), lanes);
        });
    }
    each_vector(a.D - a.R, [&](int64_t i, auto lanes) { put(y + a.R + i, get(x + a.R + i, lanes), lanes); });
}

void rotary(const Rotary& a, int64_t item, float* scratch) {
    const int64_t blocks = (a.S + a.positions - 1) / a.positions, b = item / blocks;
    const int64_t first = item % blocks * a.positions, last = std::min(a.S, first + a.positions);
    for (int64_t p = first; p < last; p++) {
        const float* c =
            as_floats(a.table_type, at(a.table_type, a.cos, b * a.cos_b + p * a.cos_s), a.R, scratch);
        const float* sin =
            as_floats(a.table_type, at(a.table_type, a.sin, b * a.sin_b + p * a.sin_s), a.R, scratch + a.R);
        float* s = scratch + 2 * a.R;
        factors(a, sin, s);
        with_type(a.type, [&](auto* t) {
            with_type(a.out_type, [&](auto* u) {
                for (int64_t h = 0; h < a.H; h++)
                    turn_row(a, (decltype(t))a.x + b * a.x_b + h * a.x_h + p * a.x_s, c, s,
                             (decltype(u))a.out + b * a.out_b + h * a.out_h + p * a.out_s);
            });
        });
    }
}

}  // namespace

void rotary_kernels(Kernels& table) {
    table.rotary = rotary;
}

}  // namespace hasten
