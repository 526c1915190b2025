// Instructions along the numbers of a row: a router's softmax, its largest places, and what is done with
// them.
#include <algorithm>
#include <cmath>

#include "../_cpu/rows.h"
#include "cpu.h"

namespace hasten {
namespace {

inline float* line(const Operand& o, const Step& s, int64_t row, int64_t i) {
    const int64_t at = o.by == 0 ? row : o.by == 1 ? s.positions[row] : 0;
    return o.base + at * o.row_stride + i * o.s0;
}

// Places are whole numbers in floats; one that is none is taken for the first.
inline int64_t place(float v) {
    return v >= 0 ? int64_t(v) : 0;
}

// Sums of many lines in one order, whatever the strides are.
void sum_lines(const Instruction& in, const float* x, float* y) {
    const float factor = float(in.f[0]);
    if (in.a.s0 != 1 || in.dst.s0 != 1) {
        for (int64_t i = 0; i < in.n0; i++) {
            float total = 0;
            for (int64_t j = 0; j < in.n1; j++) total += x[i * in.a.s0 + j * in.a.s1];
            y[i * in.dst.s0] = total * factor;
        }
        return;
    }
    each_vector(in.n0, [&](int64_t i, auto lanes) {
        VF total{};
        for (int64_t j = 0; j < in.n1; j++) total = total + get(x + i + j * in.a.s1, lanes);
        put(y + i, total * factor, lanes);
    });
}

void reduce(const Instruction& in, const Step& s, int64_t row) {
    if (in.i[0] == 0) return sum_lines(in, line(in.a, s, row, 0), line(in.dst, s, row, 0));
    const bool largest = in.i[0] == 1;
    for (int64_t i = 0; i < in.n0; i++) {
        const float* x = line(in.a, s, row, i);
        float top = x[0];
        for (int64_t j = 1; j < in.n1; j++) {
            const float v = x[j * in.a.s1];
            if (v != v || (largest ? v > top : v < top)) top = v;
        }
        *line(in.dst, s, row, i) = top * float(in.f[0]);
    }
}

void softmax(const Instruction& in, const Step& s, int64_t row) {
    for (int64_t i = 0; i < in.n0; i++) {
        const float* x = line(in.a, s, row, i);
        float* y = line(in.dst, s, row, i);
        float top = x[0], total = 0;
        for (int64_t j = 1; j < in.n1; j++) top = std::max(top, x[j * in.a.s1]);
        for (int64_t j = 0; j < in.n1; j++) {
            const float e = std::exp(x[j * in.a.s1] - top);
            y[j * in.dst.s1] = e;
            total += e;
        }
        for (int64_t j = 0; j < in.n1; j++) y[j * in.dst.s1] /= total;
    }
}

// The next place in the order of the one before: values fall (NaN first, as torch has it), equal ones rise in
// their place.
void places(const Instruction& in, const Step& s, int64_t row) {
    const float sign = in.i[1] ? 1.0f : -1.0f;
    for (int64_t i = 0; i < in.n0; i++) {
        const float* x = line(in.a, s, row, i);
        float* y = line(in.dst, s, row, i);
        auto value = [&](int64_t j) {
            const float v = sign * x[j * in.a.s1];
            return v != v ? (in.i[1] ? INFINITY : -INFINITY) : v;
        };
        float last = INFINITY;
        int64_t last_place = -1;
        for (int64_t k = 0; k < in.i[0]; k++) {
            int64_t best = -1;
            float top = 0;
            for (int64_t j = 0; j < in.n1; j++) {
                const float v = value(j);
                const bool later = v < last || (v == last && j > last_place);
                if (later && (best < 0 || v > top)) best = j, top = v;
            }
            y[k * in.dst.s1] = float(best);
            last = top;
            last_place = best;
        }
    }
}

void gather(const Instruction& in, const Step& s, int64_t row) {
    for (int64_t i = 0; i < in.n0; i++) {
        const float *x = line(in.a, s, row, i), *at = line(in.b, s, row, i);
        float* y = line(in.dst, s, row, i);
        for (int64_t j = 0; j < in.n1; j++) y[j * in.dst.s1] = x[place(at[j * in.b.s1]) * in.a.s1];
    }
}

void scatter(const Instruction& in, const Step& s, int64_t row) {
    for (int64_t i = 0; i < in.n0; i++) {
        const float *at = line(in.a, s, row, i), *x = line(in.b, s, row, i);
        float* y = line(in.dst, s, row, i);
        for (int64_t j = 0; j < in.n1; j++) y[place(at[j * in.a.s1]) * in.dst.s1] = x[j * in.b.s1];
    }
}

void where(const Instruction& in, const Step& s, int64_t row) {
    for (int64_t i = 0; i < in.n0; i++) {
        const float *a = line(in.a, s, row, i), *b = line(in.b, s, row, i), *c = line(in.c, s, row, i);
        float* y = line(in.dst, s, row, i);
        for (int64_t j = 0; j < in.n1; j++)
            y[j * in.dst.s1] = a[j * in.a.s1] != 0 ? b[j * in.b.s1] : c[j * in.c.s1];
    }
}

template <class F>
inline void each(const float* x, int64_t stride, float factor, float added, int64_t n, float* y, const F& f) {
    for (int64_t j = 0; j < n; j++) y[j] = f(x[j * stride] * factor + added);
}

}  // namespace

void program_function(int64_t function, const float* x, int64_t stride, float factor, float added, int64_t n,
                      float* y) {
    auto all = [&](const auto& f) { each(x, stride, factor, added, n, y, f); };
    // In the order of `FUNCTIONS` in codes.py.
    switch (function) {
        case 0:
            return all([](float v) { return std::exp(v); });
        case 1:
            return all([](float v) { return std::expm1(v); });
        case 2:
            return all([](float v) { return std::log(v); });
        case 3:
            return all([](float v) { return std::log1p(v); });
        case 4:
            return all([](float v) { return std::sqrt(v); });
        case 5:
            return all([](float v) { return 1.0f / std::sqrt(v); });
        case 6:
            return all([](float v) { return 1.0f / v; });
        case 7:
            return all([](float v) { return v * v; });
        case 8:
            return all([](float v) { return std::abs(v); });
        case 9:
            return all([](float v) { return std::trunc(v); });
        case 10:
            return all([](float v) { return std::floor(v); });
        default:  // softplus: beyond 20 it is the number itself
            return all([](float v) { return v > 20 ? v : std::log1p(std::exp(v)); });
    }
}

void program_along(const Step& s, const Instruction& in, int64_t row) {
    switch (in.op) {
        case Op::where:
            return where(in, s, row);
        case Op::reduce:
            return reduce(in, s, row);
        case Op::softmax:
            return softmax(in, s, row);
        case Op::places:
            return places(in, s, row);
        case Op::gather:
            return gather(in, s, row);
        case Op::scatter:
            return scatter(in, s, row);
        default:
            return;
    }
}

}  // namespace hasten
