// Cross-entropy of rows of logits and its gradient, written over the logits: see kernel.py for the formulas.
//
// A row [V] is read twice: once for maximum, sum and label, a block at a time so that the exponentials find
// their block in the first-level cache, and once to turn each logit into its gradient. At V = 49152 in bf16 a
// row is 96 KB and the second read comes from the second-level cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../_cpu/kernels.h"
#include "../_cpu/vec.h"

namespace hasten {
namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
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

inline VI lanes() {
    VI v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

// What a row's first reading gives: log-sum-exp is largest + log(total).
struct Sums {
    float largest = -INF;
    double total = 0, plain = 0;
};

template <class T, bool Capped>
Sums read_row(const CrossEntropy& a, const T* z) {
    Sums sums;
    float values[BLOCK];
    for (int64_t c0 = 0; c0 < a.V; c0 += BLOCK) {
        const int64_t n = std::min(BLOCK, a.V - c0), whole = n / W * W, rest = n - whole;
        VF largest = splat(-INF), plain{};
        for (int64_t c = 0; c < whole; c += W) {
            const VF s = Logit<Capped>(a, load_float(z + c0 + c)).value;
            store(values + c, s);
            largest = maximum(largest, s);
            plain = plain + s;
        }
        if (rest) {
            const VI inside = lanes() < splat_int(int32_t(rest));
            VF s = Logit<Capped>(a, load_part(z + c0 + whole, int(rest))).value;
            plain = plain + (inside ? s : VF{});
            s = inside ? s : splat(-INF);
            store(values + whole, s);
            largest = maximum(largest, s);
        }
        const float before = sums.largest, now = max_of(largest);
        if (!(now <= before)) {
            // A block of -inf alone leaves the maximum there, and its terms must be 0, not NaN.
            if (before != -INF) sums.total *= std::exp(double(before) - double(now));
            sums.largest = now;
        }
        const VF shift = splat(sums.largest == -INF ? 0.0f : sums.largest);
        VF total{};
        for (int64_t c = 0; c < n; c += W) total = total + exp_of(load(values + c) - shift);
        sums.total += double(sum(total));
        sums.plain += double(sum(plain));
    }
    return sums;
}

template <class T, bool Capped>
void one_row(const CrossEntropy& a, int64_t r) {
    T* z = (T*)a.z + r * a.V;
    const int64_t label = a.labels[r];
    const float w = a.w[r];
    const Sums sums = read_row<T, Capped>(a, z);
    const VF label_z = load_part(z + label, 1);
    const Logit<Capped> target(a, label_z);
    const double lse = double(sums.largest) + std::log(sums.total), s = a.label_smoothing;
    double loss = lse - double(target.value[0]);
    if (s != 0) loss = (1 - s) * loss + s * (lse - sums.plain / double(a.V));
    a.loss[r] = float(loss * w);
    a.z_sum[r] = float(a.z_loss * lse * lse * w);
    if (!a.gradient) return;
    const double weight = double(w) / a.scale * a.logit_scale;
    const float factor = float(weight * (1 + 2 * double(a.z_loss) * lse) / sums.total);
    const float uniform = float(weight * s / double(a.V)), hit = float(weight * (1 - s));
    const auto gradient = [&](VF from, float minus) {
        const Logit<Capped> logit(a, from);
        VF g = exp_of(logit.value - sums.largest) * factor - minus;
        if (Capped) g = g * logit.slope;
        return g;
    };
    int64_t c = 0;
    for (; c + W <= a.V; c += W) store_float(z + c, gradient(load_float(z + c), uniform));
    if (c < a.V) {
        const int rest = int(a.V - c);
        store_part(z + c, gradient(load_part(z + c, rest), uniform), rest);
    }
    store_part(z + label, gradient(label_z, uniform + hit), 1);
}

template <class T>
void rows(const CrossEntropy& a, int64_t item) {
    const int64_t end = std::min(a.rows, (item + 1) * a.item_rows);
    for (int64_t r = item * a.item_rows; r < end; r++)
        a.softcap > 0 ? one_row<T, true>(a, r) : one_row<T, false>(a, r);
}

// dbias += the sums of gradients over rows, for the columns of one item, in the order of the rows.
template <class T>
void columns(const CrossEntropy& a, int64_t item) {
    const int64_t first = item * BLOCK, n = std::min(BLOCK, a.V - first);
    float total[BLOCK] = {};
    for (int64_t r = 0; r < a.rows; r++) {
        const T* z = (const T*)a.z + r * a.V + first;
        int64_t c = 0;
        for (; c + W <= n; c += W) store(total + c, load(total + c) + load_float(z + c));
        if (c < n)
            store_part(total + c, load_part(total + c, int(n - c)) + load_part(z + c, int(n - c)),
                       int(n - c));
    }
    for (int64_t c = 0; c < n; c++) a.dbias[first + c] += total[c];
}

void cross_entropy(const CrossEntropy& a, int64_t item) {
    if (a.type == Type::f32) return rows<float>(a, item);
    if (a.type == Type::bf16) return rows<bf16>(a, item);
    rows<f16>(a, item);
}

void cross_entropy_bias(const CrossEntropy& a, int64_t item) {
    if (a.type == Type::f32) return columns<float>(a, item);
    if (a.type == Type::bf16) return columns<bf16>(a, item);
    columns<f16>(a, item);
}

}  // namespace

void cross_entropy_kernels(Kernels& table) {
    table.cross_entropy = cross_entropy;
    table.cross_entropy_bias = cross_entropy_bias;
    table.cross_entropy_columns = BLOCK;
}

}  // namespace hasten
