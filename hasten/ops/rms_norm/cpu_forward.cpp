// Norms, forward: a row is read once, its statistics and its result are taken from the first-level cache.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "../_cpu/rows.h"
#include "cpu.h"

namespace hasten {
namespace {

// The row of h as floats, h = x + residual rounded to its type and written.
const float* summed_row(const Norm& a, int64_t r, float* h, float* other) {
    const int64_t K = a.K, first = r * K;
    const float* x = as_floats(a.x_type, at(a.x_type, a.x, first), K, h);
    if (!a.residual) return x;
    const float* residual = as_floats(a.residual_type, at(a.residual_type, a.residual, first), K, other);
    if (a.h_type == Type::f32) h = (float*)a.h + first;
    each_vector(
        K, [&](int64_t i, auto lanes) { put(h + i, get(x + i, lanes) + get(residual + i, lanes), lanes); });
    if (a.h_type == Type::f32) return h;
    void* rounded = at(a.h_type, a.h, first);
    write_floats(a.h_type, rounded, h, K);
    return as_floats(a.h_type, rounded, K, h);
}

template <class Inner, class Out>
void write_row(const Norm& a, const float* x, float mean, float rstd, Out* y) {
    const float *multiplier = a.multiplier, *bias = a.bias;
    if (a.layer)
        each_vector(a.K, [&](int64_t i, auto lanes) {
            const VF n = (get(x + i, lanes) - mean) * rstd;
            put(y + i, n * get(multiplier + i, lanes) + get(bias + i, lanes), lanes);
        });
    else
        each_vector(a.K, [&](int64_t i, auto lanes) {
            const VF n = rounded_to<Inner>(get(x + i, lanes) * rstd);
            put(y + i, n * get(multiplier + i, lanes), lanes);
        });
}

template <class Inner>
void normalise_row(const Norm& a, int64_t r, const float* x, float* buffer) {
    const float mean = a.layer ? a.mean[r] : 0, rstd = a.rstd[r];
    void* to = at(a.y_type, a.y, r * a.K);
    if (a.middle == Type::f32 || a.middle == a.y_type) {
        with_type(a.y_type, [&](auto* t) { write_row<Inner>(a, x, mean, rstd, (decltype(t))to); });
        return;
    }
    with_type(a.middle, [&](auto* t) { write_row<Inner>(a, x, mean, rstd, (decltype(t))buffer); });
    write_floats(a.y_type, to, as_floats(a.middle, buffer, a.K, buffer + norm_pad(a.K)), a.K);
}

void forward(const Norm& a, int64_t item, float* scratch) {
    const int64_t last = std::min(a.N, (item + 1) * a.rows), pad = norm_pad(a.K);
    for (int64_t r = item * a.rows; r < last; r++) {
        const float* x = summed_row(a, r, scratch, scratch + pad);
        if (!a.given) {
            float mean = 0;
            if (a.layer) {
                mean = sum_over(a.K, [&](int64_t i, auto lanes) { return get(x + i, lanes); }) / float(a.K);
                a.mean[r] = mean;
            }
            const float squares = sum_over(a.K, [&](int64_t i, auto lanes) {
                const VF c = keep(get(x + i, lanes) - mean, lanes);
                return c * c;
            });
            a.rstd[r] = 1 / std::sqrt(squares / float(a.K) + a.eps);
        }
        with_type(a.inner, [&](auto* t) {
            normalise_row<std::remove_pointer_t<decltype(t)>>(a, r, x, scratch + 2 * pad);
        });
    }
}

}  // namespace

void norm_forward_kernels(Kernels& table) {
    table.norm_forward = forward;
}

}  // namespace hasten
