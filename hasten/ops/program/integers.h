// Products of a cache in bytes: pairs of bytes, which one operation widens, with pairs of 16-bit integers, in
// 32 bits and without rounding.
#pragma once

#include <algorithm>

#include "../_cpu/gemm.h"
#include "../_cpu/rows.h"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#endif

namespace hasten {
namespace {

// The other operand is a row of floats times a factor of the row, rounded.
struct PairIntegers {
    static constexpr int per_unit = 2;
    static constexpr bool integers = true;
    using Sum = VI;
    using Stored = uint16_t;  // two bytes
    static inline VU load(const uint16_t* b) {
#if defined(__AVX512F__)
        return (VU)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)b));
#elif defined(__AVX2__)
        return (VU)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)b));
#elif defined(__SSE2__)
        const __m128i bytes = _mm_loadl_epi64((const __m128i*)b);
        return (VU)_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
#else
        const VU pairs = widen_bits(load_half(b));
        return (VU)((VI)(pairs << 24) >> 24) & 0xffffu | (VU)((VI)(pairs << 16) >> 24) << 16;
#endif
    }
    static inline VI multiply_add(VI sum, const uint32_t* a, VU b) {
#if defined(__AVX512F__)
        __m512i products = _mm512_madd_epi16(_mm512_set1_epi32(int(*a)), (__m512i)b);
        // Apart: a compiler might join both, in an instruction that this processor lacks.
        asm("" : "+v"(products));
        return sum + (VI)products;
#elif defined(__AVX2__)
        return sum + (VI)_mm256_madd_epi16(_mm256_set1_epi32(int(*a)), (__m256i)b);
#elif defined(__SSE2__)
        return sum + (VI)_mm_madd_epi16(_mm_set1_epi32(int(*a)), (__m128i)b);
#else
        return sum + int32_t(int16_t(*a)) * ((VI)(b << 16) >> 16) + (int32_t(*a) >> 16) * ((VI)b >> 16);
#endif
    }
    static inline VF total(VI sum) { return __builtin_convertvector(sum, VF); }
};

#if defined(__AVX512F__)
struct PairIntegersVNNI : PairIntegers {
    HASTEN_PAIRS_TARGET static inline VI multiply_add(VI sum, const uint32_t* a, VU b) {
        return (VI)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32(int(*a)), (__m512i)b);
    }
};
#endif

// Largest integers of a row that is multiplied with n bytes: sums fit 32 bits.
constexpr int64_t integer_limit(int64_t n) {
    return std::min<int64_t>(32767, INT32_MAX / (127 * n));
}

// W integers of the range as 16 or 8 bits.
template <class Integer>
inline auto narrowed(VI v) {
    typedef Integer Vector __attribute__((vector_size(W * sizeof(Integer))));
#if defined(__AVX512F__)
    if constexpr (sizeof(Integer) == 2) return (Vector)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
    if constexpr (sizeof(Integer) == 2) {
        const __m256i pairs = _mm256_packs_epi32((__m256i)v, (__m256i)v);
        return (Vector)_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0xd8));
    }
#endif
    return __builtin_convertvector(v, Vector);
}

// n values as integers of at most `limit` in size, and the scale that they are multiplied by: NaN or infinite
// where one of them is.
template <class Integer>
inline float to_integers(const float* x, int64_t n, float limit, Integer* to) {
    VF top{};
    each_vector(n, [&](int64_t d, auto lanes) {
        const VF size = (VF)((VU)get(x + d, lanes) & 0x7fffffffu);
        top = ((size > top) | (size != size)) ? size : top;
    });
    const float scale = max_or_nan(top) / limit, inverse = scale > 0 ? 1 / scale : 0, most = limit + 0.5f;
    each_vector(n, [&](int64_t d, auto lanes) {
        const VF v = get(x + d, lanes) * inverse;
        // A NaN is in no range.
        const VF fitting = ((v >= splat(-most)) & (v <= splat(most))) ? v : VF{};
        const auto rounded = narrowed<Integer>(rounded_to_int(fitting));
        std::memcpy(to + d, &rounded, size_t(int(lanes)) * sizeof(Integer));
    });
    return scale;
}

}  // namespace
}  // namespace hasten
