// Cross-entropy of rows of logits and its gradient, written over the logits: see kernel.py for the formulas.
//
// A row [V] is read once and written once. The exponentials of its blocks wait in a scratch of floats, which
// the second-level cache holds together with the row (V = 49152 in bf16: 96 + 192 KB), until the sum is
// known.
#include <algorithm>
#include <cmath>

#include "../_cpu/rows.h"

namespace hasten {
namespace {

constexpr int64_t BLOCK = 2048;

// softcap(scale * z) and its derivative without the factor scale.
template <bool Capped>
struct Logit {
    VF value, slope;
    Logit(const CrossEntropy& a, VF z) {
        value = z * a.logit_scale;
        if (Capped) {
            const VF t = tanh_of(value / splat(a.softcap));
            value = t * a.softcap;
            slope = 1.0f - t * t;
        }
    }
};

// What a row's first reading gives: log-sum-exp is largest + log(total).
struct Sums {
    float largest = -INF;
    double total = 0, plain = 0;
};

// terms[c] = exp(logit c - shifts[c / BLOCK]), where a shift is the largest logit up to its block's end.
template <class T, bool Capped>
Sums read_row(const CrossEntropy& a, const T* z, float* terms, float* shifts) {
    Sums sums;
    for (int64_t c0 = 0; c0 < a.V; c0 += BLOCK, terms += BLOCK, shifts++) {
        const int64_t n = std::min(BLOCK, a.V - c0), whole = n / W * W, rest = n - whole;
        VF largest = splat(-INF), plain{};
        for (int64_t c = 0; c < whole; c += W) {
            const VF s = Logit<Capped>(a, load_float(z + c0 + c)).value;
            store(terms + c, s);
            largest = maximum(largest, s);
            plain = plain + s;
        }
        if (rest) {
            const VI inside = lane_numbers() < splat_int(int32_t(rest));
            VF s = Logit<Capped>(a, load_part(z + c0 + whole, int(rest))).value;
            plain = plain + (inside ? s : VF{});
            s = inside ? s : splat(-INF);
            store(terms + whole, s);
            largest = maximum(largest, s);
        }
        const float before = sums.largest, now = max_of(largest);
        if (!(now <= before)) {
            if (before != -INF) sums.total *= std::exp(double(before) - double(now));
            sums.largest = now;
        }
        *shifts = sums.largest;
        // Where all so far is -inf the terms must be 0, not NaN.
        const VF shift = splat(sums.largest == -INF ? 0.0f : sums.largest);
        VF total{};
        for (int64_t c = 0; c < n; c += W) {
            const VF term = exp_of(load(terms + c) - shift);
            store(terms + c, term);
            total = total + term;
        }
        sums.total += double(sum(total));
        sums.plain += double(sum(plain));
    }
    return sums;
}

// z = (factor * term - minus) * the derivative of the soft-cap, for n columns of one block.
template <class T, bool Capped>
void write_columns(const CrossEntropy& a, T* z, const float* terms, float factor, float minus, int64_t n) {
    const auto gradient = [&](const float* term, VF from) {
        VF g = load(term) * factor - minus;
        if (Capped) g = g * Logit<true>(a, from).slope;
        return g;
    };
    each_vector(n, [&](int64_t c, auto lanes) {
        put(z + c, gradient(terms + c, Capped ? get(z + c, lanes) : VF{}), lanes);
    });
}

template <class T, bool Capped>
void one_row(const CrossEntropy& a, int64_t r, float* scratch) {
    T* z = (T*)a.z + r * a.V;
    float *terms = scratch, *shifts = scratch + (a.V + BLOCK - 1) / BLOCK * BLOCK;
    const int64_t label = a.labels[r];
    const float w = a.w[r];
    const Sums sums = read_row<T, Capped>(a, z, terms, shifts);
    const T label_z = z[label];
    const float target = Logit<Capped>(a, splat(widen_scalar(label_z))).value[0];
    const double lse = double(sums.largest) + std::log(sums.total), s = a.label_smoothing;
    double loss = lse - double(target);
    if (s != 0) loss = (1 - s) * loss + s * (lse - sums.plain / double(a.V));
    a.loss[r] = float(loss * w);
    a.z_sum[r] = float(a.z_loss * lse * lse * w);
    if (!a.gradient) return;
    const double weight = double(w) / a.scale * a.logit_scale;
    const double factor = weight * (1 + 2 * double(a.z_loss) * lse) / sums.total;
    const float uniform = float(weight * s / double(a.V)), hit = float(weight * (1 - s));
    const auto block_factor = [&](int64_t c) {
        return float(factor * std::exp(double(shifts[c / BLOCK]) - double(sums.largest)));
    };
    for (int64_t c = 0; c < a.V; c += BLOCK)
        write_columns<T, Capped>(a, z + c, terms + c, block_factor(c), uniform, std::min(BLOCK, a.V - c));
    // The label's column again, from its logit, in float: p - 1 cancels.
    z[label] = label_z;
    const float term[W] = {terms[label]};
    write_columns<T, Capped>(a, z + label, term, block_factor(label), uniform + hit, 1);
}

template <class T>
void rows(const CrossEntropy& a, int64_t item, float* scratch) {
    const int64_t end = std::min(a.rows, (item + 1) * a.item_rows);
    for (int64_t r = item * a.item_rows; r < end; r++)
        a.softcap > 0 ? one_row<T, true>(a, r, scratch) : one_row<T, false>(a, r, scratch);
}

// dbias += the sums of gradients over rows, for the columns of one item, in the order of the rows.
template <class T>
void columns(const CrossEntropy& a, int64_t item) {
    const int64_t first = item * BLOCK, n = std::min(BLOCK, a.V - first);
    float total[BLOCK] = {};
    for (int64_t r = 0; r < a.rows; r++) {
        const T* z = (const T*)a.z + r * a.V + first;
        each_vector(n, [&](int64_t c, auto lanes) { store(total + c, load(total + c) + get(z + c, lanes)); });
    }
    for (int64_t c = 0; c < n; c++) a.dbias[first + c] += total[c];
}

void cross_entropy(const CrossEntropy& a, int64_t item, float* scratch) {
    with_type(a.type, [&](auto* t) { rows<std::remove_pointer_t<decltype(t)>>(a, item, scratch); });
}

void cross_entropy_bias(const CrossEntropy& a, int64_t item) {
    with_type(a.type, [&](auto* t) { columns<std::remove_pointer_t<decltype(t)>>(a, item); });
}

}  // namespace

void cross_entropy_kernels(Kernels& table) {
    table.cross_entropy = cross_entropy;
    table.cross_entropy_bias = cross_entropy_bias;
    table.cross_entropy_columns = BLOCK;
}

}  // namespace hasten
