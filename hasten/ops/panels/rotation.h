// Rotation of rows, x T of rotation.py: Hadamard matrices of 128, and of powers of two for what is left. Sums
// are the same whatever the width of a vector.
#pragma once

#include <utility>

#include "../_cpu/vec.h"

namespace hasten {
namespace {

constexpr int64_t ROTATED = 128;

template <int D, int... I>
inline VF partners(VF v, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(v, v, (I ^ D)...);
#else
    return __builtin_shuffle(v, VI{(I ^ D)...});
#endif
}
template <int D, int... I>
constexpr VF signs(std::integer_sequence<int, I...>) {
    return VF{(I & D ? -1.0f : 1.0f)...};
}

// Lanes D apart: their sum to the lower one, their difference to the other.
template <int D>
inline VF lanes_apart(VF v) {
    if constexpr (D < W) {
        using Lanes = std::make_integer_sequence<int, W>;
        v = lanes_apart<2 * D>(partners<D>(v, Lanes{}) + v * signs<D>(Lanes{}));
    }
    return v;
}

// N values, vectors of them at once, times `factor`.
template <int64_t N>
inline void rotate_vectors(const float* x, float* out, float factor) {
    constexpr int64_t vectors = N / W;
    VF v[vectors];
#pragma GCC unroll 32
    for (int64_t i = 0; i < vectors; i++) v[i] = lanes_apart<1>(load(x + i * W));
#pragma GCC unroll 8
    for (int64_t apart = 1; apart < vectors; apart *= 2)
#pragma GCC unroll 32
        for (int64_t i = 0; i < vectors; i++)
            if (!(i & apart)) {
                const VF low = v[i], high = v[i + apart];
                v[i] = low + high, v[i + apart] = low - high;
            }
#pragma GCC unroll 32
    for (int64_t i = 0; i < vectors; i++) store(out + i * W, N == ROTATED ? v[i] : v[i] * factor);
}

// The same for fewer values than a vector has.
inline void rotate_few(const float* x, int64_t n, float* out, float factor) {
    for (int64_t i = 0; i < n; i++) out[i] = x[i];
    for (int64_t apart = 1; apart < n; apart *= 2)
        for (int64_t i = 0; i < n; i++)
            if (!(i & apart)) {
                const float low = out[i], high = out[i + apart];
                out[i] = low + high, out[i + apart] = low - high;
            }
    for (int64_t i = 0; i < n; i++) out[i] *= factor;
}

// sqrt(128 / n) of a power of two.
constexpr float factor_of(int64_t n) {
    float factor = 1;
    for (; 4 * n <= ROTATED; n *= 4) factor *= 2;
    return n < ROTATED ? factor * 1.41421356237309504880f : factor;
}

// n <= 128 values, from a block's beginning on; `out` may be `x`.
inline void rotate_block(const float* x, int64_t n, float* out) {
    if (n == ROTATED) return rotate_vectors<128>(x, out, 1);
    for (int64_t part = 64; part > 0; part /= 2) {
        if (!(n & part)) continue;
        if (part == 64)
            rotate_vectors<64>(x, out, factor_of(64));
        else if (part == 32)
            rotate_vectors<32>(x, out, factor_of(32));
        else if (part == 16)
            rotate_vectors<16>(x, out, factor_of(16));
        else
            rotate_few(x, part, out, factor_of(part));
        x += part, out += part;
    }
}

inline void rotate(const float* x, int64_t K, float* out) {
    for (int64_t k = 0; k < K; k += ROTATED) rotate_block(x + k, K - k < ROTATED ? K - k : ROTATED, out + k);
}

}  // namespace
}  // namespace hasten
