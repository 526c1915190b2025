// The activations on vectors, and how an item is walked.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../_cpu/rows.h"
#include "cpu.h"

namespace hasten {
namespace {

struct Pair {
    VF value, slope;
};

// 1 / x to a unit in the last place, for x far from the ends of the range: an estimate of 14 bits and one
// step of Newton's method take less than a division.
inline VF reciprocal(VF x) {
#if defined(__AVX512F__)
    const VF r = (VF)_mm512_rcp14_ps((__m512)x);
    return r + r * (1.0f - x * r);
#else
    return 1.0f / x;
#endif
}

// 1 / (1 + e^-x). An infinite argument of the power is kept from it: there is no fraction of infinity.
inline VF logistic(VF x) {
    const VF power = x * -1.44269504088896341f;
    return 1.0f / (1.0f + exp2_of(power > splat(129) ? splat(129) : power));
}

// x * s and its derivative, for s a sigmoid of an argument whose derivative is d.
inline Pair times_sigmoid(VF x, VF s, VF d) {
    return {x * s, s + x * (s * (1.0f - s)) * d};
}

struct Silu {
    static Pair of(VF x) { return times_sigmoid(x, logistic(x), splat(1)); }
};

struct GeluQuick {
    static Pair of(VF x) { return times_sigmoid(x, logistic(x * 1.702f), splat(1.702f)); }
};

// (1 + tanh(z)) / 2 = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
    static Pair of(VF x) {
        constexpr float a = 1.5957691216057308f, b = a * 0.044715f;
        const VF square = x * x;
        return times_sigmoid(x, logistic(x * (square * b + a)), square * (3 * b) + a);
    }
};

// x P(x), P the normal distribution function. With z = |x| / sqrt(2), P(-|x|) = exp(-z^2) erfcx(z) / 2 and
// (1 + 2 z) erfcx(z) is smooth in q = (z - 2) / (z + 2) (Shepherd and Laframboise 1981); the polynomial is a
// least-squares fit to it for z <= 10, relative error 1.6e-8. The density shares the exponential.
struct Gelu {
    static Pair of(VF x) {
        const VF magnitude = (VF)((VU)x & 0x7fffffffu);
        const VF t = magnitude > splat(15) ? splat(15) : magnitude, z = t * 0.70710678118654752f;
        const VF near = 1.0f + z + z, far = z + 2.0f, inverse = reciprocal(near * far);
        const VF q = (z - 2.0f) * (inverse * near);
        VF p = splat(-0.000409451156f);
        p = p * q - 0.00124133723f;
        p = p * q + 0.00132048578f;
        p = p * q + 0.00864263663f;
        p = p * q - 0.008061659f;
        p = p * q - 0.0542076565f;
        p = p * q + 0.164055553f;
        p = p * q - 0.166031092f;
        p = p * q - 0.0927639922f;
        p = p * q + 1.27697839f;
        const VF e = exp2_of(t * t * -0.72134752044448170f);
        const VF below = 0.5f * e * p * (inverse * far);
        const VF share = x > VF{} ? 1.0f - below : below;
        return {x * share, share + x * e * 0.3989422804014327f};
    }
};

// The same for bf16 and f16, to 4e-7: P(x) = 1/2 + x R(x^2), R a rational function fitted for |x| <= 5.4.
struct GeluNarrow {
    static Pair of(VF x) {
        const VF low = x < splat(-5.4f) ? splat(-5.4f) : x, t = low > splat(5.4f) ? splat(5.4f) : low;
        const VF s = t * t;
        VF p = splat(-1.83303191e-8f);
        p = p * s + 6.3982225e-6f;
        p = p * s + 4.99486623e-4f;
        p = p * s + 6.66531281e-3f;
        p = p * s + 6.85742049e-2f;
        p = p * s + 0.398942041f;
        VF q = splat(1.6777927e-4f);
        q = q * s + 3.77229193e-3f;
        q = q * s + 4.81512127e-2f;
        q = q * s + 0.338548256f;
        q = q * s + 1.0f;
        const VF share = x < splat(-5.4f) ? VF{} : 0.5f + t * p * reciprocal(q);
        const VF e = exp2_of(x * x * -0.72134752044448170f);
        return {x * share, share + x * e * 0.3989422804014327f};
    }
};

// NaN stays NaN.
struct Relu {
    static Pair of(VF x) { return {x <= VF{} ? VF{} : x, x <= VF{} ? VF{} : splat(1)}; }
};
struct Relu2 {
    static Pair of(VF x) {
        const VF r = x <= VF{} ? VF{} : x;
        return {r * r, r * 2.0f};
    }
};

struct Sigmoid {
    static Pair of(VF x) {
        const VF s = logistic(x);
        return {s, s * (1.0f - s)};
    }
};

struct Tanh {
    static Pair of(VF x) {
        const VF t = tanh_of(x);
        return {t, 1.0f - t * t};
    }
};

template <class F>
inline void with_kind(Kind kind, const F& f) {
    switch (kind) {
        case Kind::silu:
            return f(Silu{});
        case Kind::gelu:
            return f(Gelu{});
        case Kind::gelu_tanh:
            return f(GeluTanh{});
        case Kind::gelu_quick:
            return f(GeluQuick{});
        case Kind::relu:
            return f(Relu{});
        case Kind::relu2:
            return f(Relu2{});
        case Kind::sigmoid:
            return f(Sigmoid{});
        case Kind::tanh:
            return f(Tanh{});
    }
}

// Calls f(kind, null pointer of the element type).
template <class F>
inline void with_kind_and_type(const Activation& a, const F& f) {
    with_kind(a.kind, [&](auto kind) {
        using K = decltype(kind);
        with_type(a.type, [&](auto* type) {
            constexpr bool narrow = sizeof(std::remove_pointer_t<decltype(type)>) == 2;
            f(std::conditional_t < narrow && std::is_same_v<K, Gelu>, GeluNarrow, K > {}, type);
        });
    });
}

// f(r, c, n) for every row of the item: its columns [c, c + n).
template <class F>
inline void each_row(const Activation& a, int64_t item, const F& f) {
    const int64_t across = (a.K + a.cols - 1) / a.cols;
    const int64_t r0 = item / across * a.rows, c0 = item % across * a.cols;
    const int64_t r1 = std::min(a.N, r0 + a.rows), c1 = std::min(a.K, c0 + a.cols);
    for (int64_t r = r0; r < r1; r++) f(r, c0, c1 - c0);
}

}  // namespace
}  // namespace hasten
