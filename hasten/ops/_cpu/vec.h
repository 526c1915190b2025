// Vectors of one register, by GCC's and Clang's vector extension: the same code at every level, W floats
// wide. Everything is in an inline namespace of the level, so that no two libraries share a symbol.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
// GCC 12 warns of its own undefined vectors, which no lane of a result is taken from.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#if defined(__AVX512F__)
#define HASTEN_WIDTH 16
#elif defined(__AVX2__)
#define HASTEN_WIDTH 8
#else
#define HASTEN_WIDTH 4
#endif

namespace hasten {
namespace {

constexpr int W = HASTEN_WIDTH;

typedef float VF __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));
typedef uint16_t VH __attribute__((vector_size(W * 2)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

constexpr float INF = __builtin_inff();

inline VF splat(float x) {
    return x - VF{};
}
inline VI splat_int(int32_t x) {
    return x - VI{};
}
// 0, 1, .. W - 1.
inline VI lane_numbers() {
    VI v;
    for (int i = 0; i < W; i++) v[i] = i;
    return v;
}

inline VF load(const float* p) {
    VF v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, VF v) {
    std::memcpy(p, &v, sizeof v);
}

inline VH load_half(const void* p) {
    VH v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store_half(void* p, VH v) {
    std::memcpy(p, &v, sizeof v);
}

// W halves as the low bits of W words, and back. By instruction: GCC 12 takes three to five for a conversion.
inline VU widen_bits(VH h) {
#if defined(__AVX512F__)
    return (VU)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    return (VU)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, VU);
#endif
}
inline VH narrow_bits(VU v) {
#if defined(__AVX512F__)
    return (VH)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_packus_epi32((__m256i)v, (__m256i)v);
    return (VH)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0xd8));
#else
    return __builtin_convertvector(v, VH);
#endif
}

inline VF widen_bf16(VH h) {
    return (VF)(widen_bits(h) << 16);
}

// Round to nearest even; NaN becomes a quiet NaN.
inline VH narrow_bf16(VF v) {
    const VU bits = (VU)v;
    const VU rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const VU quiet = 0x7fc0 - VU{};
    return narrow_bits(v != v ? quiet : rounded);
}

// The same as a float.
inline VF rounded_bf16(VF v) {
    const VU bits = (VU)v;
    const VU rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
    return v != v ? v : (VF)rounded;
}

inline float widen_scalar(float x) {
    return x;
}
inline float widen_scalar(bf16 h) {
    const uint32_t bits = uint32_t(h.bits) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline bf16 narrow_scalar_bf16(float f) {
    if (f != f) return {0x7fc0};
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float widen_scalar(f16 h) {
    const uint32_t sign = uint32_t(h.bits & 0x8000) << 16;
    const uint32_t exponent = (h.bits >> 10) & 31, fraction = h.bits & 0x3ff;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | (fraction << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {  // subnormal: an integer times 2^-24, exact in float
        const float value = float(fraction) * 5.9604644775390625e-08f;
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline f16 narrow_scalar_f16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000);
    const uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // 65520 and above round to infinity
    if (magnitude < 0x38800000) {                                   // below 2^-14: subnormal
        float value;
        std::memcpy(&value, &magnitude, 4);
        const float shifted = value + 0.5f;  // the sum rounds to a multiple of 2^-24, to nearest even
        uint32_t rounded;
        std::memcpy(&rounded, &shifted, 4);
        return {uint16_t(sign | (rounded - 0x3f000000))};
    }
    const uint32_t rounded = magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1);
    return {uint16_t(sign | (rounded >> 13))};
}

#if defined(__AVX512F__)
inline VF widen_f16(VH h) {
    return (VF)_mm512_cvtph_ps((__m256i)h);
}
inline VH narrow_f16(VF v) {
    return (VH)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__AVX2__) && defined(__F16C__)
inline VF widen_f16(VH h) {
    return (VF)_mm256_cvtph_ps((__m128i)h);
}
inline VH narrow_f16(VF v) {
    return (VH)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
}
#else
inline VF widen_f16(VH h) {
    VF v;
    for (int i = 0; i < W; i++) v[i] = widen_scalar(f16{h[i]});
    return v;
}
inline VH narrow_f16(VF v) {
    VH h;
    for (int i = 0; i < W; i++) h[i] = narrow_scalar_f16(v[i]).bits;
    return h;
}
#endif

// load_as_float / store_from_float for every element type; the `part` forms handle n < W elements.
inline VF load_float(const float* p) {
    return load(p);
}
inline VF load_float(const bf16* p) {
    return widen_bf16(load_half(p));
}
inline VF load_float(const f16* p) {
    return widen_f16(load_half(p));
}
inline void store_float(float* p, VF v) {
    store(p, v);
}
inline void store_float(bf16* p, VF v) {
    store_half(p, narrow_bf16(v));
}
inline void store_float(f16* p, VF v) {
    store_half(p, narrow_f16(v));
}

template <class T>
inline VF load_part(const T* p, int n) {
    T tmp[W] = {};
    std::memcpy(tmp, p, n * sizeof(T));
    return load_float(tmp);
}
template <class T>
inline void store_part(T* p, VF v, int n) {
    T tmp[W];
    store_float(tmp, v);
    std::memcpy(p, tmp, n * sizeof(T));
}

// The nearest integers, ties to even, of numbers below 2^22 in size.
inline VI rounded_to_int(VF v) {
    // 1.5 * 2^23: adding it rounds to an integer, whose bits are then the lowest.
    return (VI)(v + 12582912.0f) - 0x4b400000;
}

inline VF maximum(VF a, VF b) {
    return a > b ? a : b;
}

// The sum of the halves, then of their halves, and so on: the same order at every level.
inline float sum(VF v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[W];
    store(s, v);
    for (int step = W / 2; step; step /= 2)
        for (int i = 0; i < step; i++) s[i] += s[i + step];
    return s[0];
#endif
}
inline float max_of(VF v) {
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m ? v[i] : m;
    return m;
}
// The largest lane, NaN if there is one.
inline float max_or_nan(VF v) {
#if defined(__AVX512F__)
    if (_mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q)) return __builtin_nanf("");
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < W; i++) m = v[i] > m || v[i] != v[i] ? v[i] : m;
    return m;
#endif
}

// e^x to 2 units in the last place: 2^n p(r) with r = x - n log 2 and Cephes' polynomial of degree 6.
// Below -87.3 the result is 0 (never subnormal); above 88.7 infinity; NaN stays.
inline VF exp_of(VF x) {
    const VF low = splat(-87.33654f), high = splat(88.72283f);
    VF clamped = x < low ? low : x;
    clamped = clamped > high ? high : clamped;
    const VF shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const VF n = (clamped * 1.44269504088896341f + shift) - shift;
    VF r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    VF p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // 2^n in two steps, since 2^128 is no float.
    const VI exponent = __builtin_convertvector(n, VI);
    const VI half = exponent >> 1;
    const VF scale_a = (VF)((half + 127) << 23), scale_b = (VF)((exponent - half + 127) << 23);
    VF y = p * scale_a * scale_b;
    y = x < low ? VF{} : y;
    y = x > high ? splat(__builtin_inff()) : y;
    return x != x ? x : y;
}

// 2^x to 2 units in the last place: 2^n p(r) with r = x - n in [-1/2, 1/2] and p the Taylor polynomial of 2^r
// of degree 7. Below -126 the result may be rounded to 0; NaN stays.
inline VF exp2_of(VF x) {
    const VF low = splat(-150.0f), high = splat(129.0f);
#if defined(__AVX512F__)
    // The second operand is returned where either is NaN.
    x = (VF)_mm512_max_ps((__m512)low, (__m512)x);
    const VF n = (VF)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const VF shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    VF clamped = x < low ? low : x;
    clamped = clamped > high ? high : clamped;
    const VF n = (clamped + shift) - shift;
    const VF given = x;
    x = clamped;
#endif
    const VF r = x - n;
    VF p = splat(1.5252733804059841e-5f);
    p = p * r + 1.5403530393381608e-4f;
    p = p * r + 1.3333558146428443e-3f;
    p = p * r + 9.6181291076284772e-3f;
    p = p * r + 5.5504108664821580e-2f;
    p = p * r + 2.4022650695910071e-1f;
    p = p * r + 6.9314718055994531e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    (void)high;
    return (VF)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const VI exponent = __builtin_convertvector(n, VI);
    const VI half = exponent >> 1;
    const VF y = p * (VF)((half + 127) << 23) * (VF)((exponent - half + 127) << 23);
    return given != given ? given : y;
#endif
}

// 2^x for x <= 0: with degree 4 to 3e-6 of it, with 5 to 2e-7 (the least largest relative error among
// polynomials of 2^r on [-1/2, 1/2] that are 1 at 0). Below -126 less than it, from -127 on 0; what NaN
// becomes is not said.
template <int DEGREE>
inline VF exp2_of_negative(VF x) {
    static_assert(DEGREE == 4 || DEGREE == 5);
    x = maximum(x, splat(-127.0f));
    const VF shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, the lowest bits
    const VF shifted = x + shift, r = x - (shifted - shift);
    VF p;
    if constexpr (DEGREE == 4) {
        p = splat(9.58285294e-3f);
        p = p * r + 5.59064262e-2f;
        p = p * r + 2.40240991e-1f;
        p = p * r + 6.93124175e-1f;
    } else {
        p = splat(1.32647273e-3f);
        p = p * r + 9.67151299e-3f;
        p = p * r + 5.55073358e-2f;
        p = p * r + 2.40222424e-1f;
        p = p * r + 6.93147004e-1f;
    }
    p = p * r + 1.0f;
    return (VF)((VI)p + ((VI)shifted << 23));
}

inline VF tanh_of(VF x) {
    // 1 - 2 / (e^2x + 1); for small x, where that cancels, an odd polynomial.
    const VF magnitude = (VF)((VU)x & 0x7fffffff);
    const VF e = exp_of(magnitude * 2.0f);
    const VF large = 1.0f - 2.0f / (e + 1.0f);
    const VF s = x * x;
    VF p = splat(-5.70498872745e-3f);
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    const VF small = magnitude + magnitude * s * p;
    const VF chosen = magnitude < splat(0.625f) ? small : large;
    const VU sign = (VU)x & 0x80000000u;
    return (VF)((VU)chosen | sign);
}

inline VF sigmoid_of(VF x) {
    return 1.0f / (1.0f + exp_of(-x));
}

}  // namespace
}  // namespace hasten
