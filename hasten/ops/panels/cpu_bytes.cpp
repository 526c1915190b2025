// Few rows times quantised panels, in integers: codes times int8 values, summed in int32 over a block of 32
// (16 where the group has 16), then times the scale of x and added in fp32 over the group, whose scale and
// minimum follow once. Memory is the limit: a tile of rows reads a panel once.
#include "layout.h"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#endif

namespace hasten {
namespace {

// How four codes of a lane are multiplied with four int8 values and added to the lane's sum. `add` may keep
// sums of another kind, which `finish` turns into int32 after at most 32 values.
#if defined(__AVX512F__)
struct BytesVNNI {
    template <int BITS>
    HASTEN_VNNI_TARGET static inline VI add(VI sum, VU q, const uint32_t* x) {
        return (VI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)q, _mm512_set1_epi32(int(*x)));
    }
    template <int BITS>
    static inline VI finish(VI sum) {
        return sum;
    }
};
#endif

#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
using Register = __m512i;
#define HASTEN_I(name) _mm512_##name
#else
using Register = __m256i;
#define HASTEN_I(name) _mm256_##name
#endif
struct BytesPlain {
    template <int BITS>
    static inline VI add(VI sum, VU q, const uint32_t* x) {
        const Register ones = HASTEN_I(set1_epi16)(1), xs = HASTEN_I(set1_epi32)(int(*x));
        if constexpr (BITS == 8) {  // two products of a code above 128 would not fit 16 bits
            const Register low = (Register)(q & 0x00ff00ffu), high = HASTEN_I(srli_epi16)((Register)q, 8);
            const Register x_low = HASTEN_I(srai_epi16)(HASTEN_I(slli_epi16)(xs, 8), 8),
                           x_high = HASTEN_I(srai_epi16)(xs, 8);
            return sum + (VI)HASTEN_I(madd_epi16)(low, x_low) + (VI)HASTEN_I(madd_epi16)(high, x_high);
        }
        const Register pairs = HASTEN_I(maddubs_epi16)((Register)q, xs);
        // 8 times 2 products of at most 15 * 127 fit 16 bits.
        if constexpr (BITS <= 4) return (VI)HASTEN_I(add_epi16)((Register)sum, pairs);
        return sum + (VI)HASTEN_I(madd_epi16)(pairs, ones);
    }
    template <int BITS>
    static inline VI finish(VI sum) {
        if constexpr (BITS <= 4) return (VI)HASTEN_I(madd_epi16)((Register)sum, HASTEN_I(set1_epi16)(1));
        return sum;
    }
};
#elif defined(__SSE2__)
struct BytesPlain {
    template <int BITS>
    static inline VI add(VI sum, VU q, const uint32_t* x) {
        const __m128i xs = _mm_set1_epi32(int(*x));
        const __m128i low = (__m128i)(q & 0x00ff00ffu), high = _mm_srli_epi16((__m128i)q, 8);
        const __m128i x_low = _mm_srai_epi16(_mm_slli_epi16(xs, 8), 8), x_high = _mm_srai_epi16(xs, 8);
        return sum + (VI)_mm_madd_epi16(low, x_low) + (VI)_mm_madd_epi16(high, x_high);
    }
    template <int BITS>
    static inline VI finish(VI sum) {
        return sum;
    }
};
#else
struct BytesPlain {
    template <int BITS>
    static inline VI add(VI sum, VU q, const uint32_t* x) {
        for (int i = 0; i < 4; i++) sum += (VI)((q >> (8 * i)) & 255u) * int32_t(int8_t(*x >> (8 * i)));
        return sum;
    }
    template <int BITS>
    static inline VI finish(VI sum) {
        return sum;
    }
};
#endif

// v, which the compiler would else load again for each of its units.
template <int UNITS>
inline VU in_register(VU v) {
    return UNITS > 1 ? (VU)apart((VF)v) : v;
}

// to(m, the products of a block of row m), as floats.
template <class Bytes, int BITS, int U, int MR, class F>
HASTEN_VNNI_TARGET inline __attribute__((always_inline)) void each_product(const uint8_t* a, const uint8_t* b,
                                                                           const uint32_t* x, const F& to) {
    VI sum[MR];
    for (int m = 0; m < MR; m++) sum[m] = VI{};
    using C = Codes<BITS, U>;
    VU first{}, second{};
#pragma GCC unroll 8
    for (int u = 0; u < U; u++) {
        // Loaded once for all of their units: there are no more loads to spare than multiplications.
        if (u % C::first_units == 0) first = in_register<C::first_units>(C::first(a, u));
        if (C::second_bits && u % C::second_units == 0)
            second = in_register<C::second_units>(C::second(b, u));
        const VU q = C::unit(first, second, u);
#pragma GCC unroll 8
        for (int m = 0; m < MR; m++) sum[m] = Bytes::template add<BITS>(sum[m], q, x + u * MR + m);
    }
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) to(m, __builtin_convertvector(Bytes::template finish<BITS>(sum[m]), VF));
}

// So far ahead lines are fetched, across the end of a panel into the next: what a tile of 8 rows reads takes
// three times as long as what one row does.
constexpr int64_t ahead(int rows) {
    return rows < 8 ? 6144 : 3072;
}

// WIDE: groups of several blocks.
template <class Bytes, int BITS, int U, int MR, bool WIDE, bool FETCH = true>
HASTEN_VNNI_TARGET void sums_of(const Matrix& m, int64_t panel, int64_t part, const uint32_t* x, float* out) {
    using C = Codes<BITS, U>;
    const Groups<BITS, U> groups(m);
    constexpr int64_t AHEAD = ahead(MR);
    const BytesRow row(m.K);
    const uint32_t *scales = x + row.scales() * MR, *sums = x + row.sums(m.group) * MR;
    // Totals, and sums of a wide group, which know the scales of x alone. Unrolled, so that they are
    // registers where there are enough; and one loop, not groups and blocks, since short loops are left late.
    VF y[MR], z[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) y[i] = z[i] = VF{};
    const uint8_t *group = groups.panel(m, panel), *a = group, *b = group;
    VF scale{}, minimum{};
    int64_t block = 0;  // of the group
    int half = 0;
    for (int64_t left = ceil_div(m.K, 4 * U); left > 0; left--) {
        if (!WIDE || block == 0) {
            a = groups.a(group, part), b = a + groups.b_at;
            if (FETCH) __builtin_prefetch(group + AHEAD);
            scale = groups.scale(group, part), minimum = groups.minimum(group, part, scale);
        }
#pragma GCC unroll 8
        for (int64_t at = 0; FETCH && at < C::a_step; at += 64) __builtin_prefetch(a + AHEAD + at);
        if constexpr (FETCH && C::b_step > 0) __builtin_prefetch(b + AHEAD);
        each_product<Bytes, BITS, U, MR>(a, b, x, [&](int i, VF products) {
            if constexpr (WIDE)
                z[i] = z[i] + products * float_at(scales + i);
            else
                y[i] = y[i] + products * float_at(scales + i) * scale;
        });
        x += U * MR;
        scales += U == 8 ? MR : half * MR;
        half ^= 1;
        a += C::a_step, b += C::b_step;
        if (WIDE && ++block < groups.blocks && left > 1) continue;
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            if (WIDE) y[i] = y[i] + z[i] * scale;
            y[i] = y[i] + minimum * float_at(sums + i);
            z[i] = VF{};
        }
        block = 0, group += groups.bytes, sums += MR;
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) store(out + i * W, y[i]);
}

template <class Bytes, int BITS, int U, bool WIDE>
FewSumsOf of_width(int64_t width, bool fetch) {
    if (!fetch && width == TILE) return sums_of<Bytes, BITS, U, TILE, WIDE, false>;
    switch (width) {
        case 1:
            return sums_of<Bytes, BITS, U, 1, WIDE>;
        case 2:
            return sums_of<Bytes, BITS, U, 2, WIDE>;
        case 4:
            return sums_of<Bytes, BITS, U, 4, WIDE>;
        default:
            return sums_of<Bytes, BITS, U, TILE, WIDE>;
    }
}

template <class Bytes, int BITS>
FewSumsOf of_group(int64_t group, int64_t width, bool fetch) {
    // Formats with a 1-bit plane have no groups of 16.
    if constexpr (BITS % 2 == 0)
        if (group == 16) return of_width<Bytes, BITS, 4, false>(width, fetch);
    return group == 32 ? of_width<Bytes, BITS, 8, false>(width, fetch)
                       : of_width<Bytes, BITS, 8, true>(width, fetch);
}

template <class Bytes>
FewSumsOf of_format(const Matrix& m, int64_t width, bool fetch) {
    switch (m.bits) {
        case 3:
            return of_group<Bytes, 3>(m.group, width, fetch);
        case 4:
            return of_group<Bytes, 4>(m.group, width, fetch);
        case 5:
            return of_group<Bytes, 5>(m.group, width, fetch);
        case 6:
            return of_group<Bytes, 6>(m.group, width, fetch);
        default:
            return of_group<Bytes, 8>(m.group, width, fetch);
    }
}

}  // namespace

FewSumsOf bytes_sums(const Matrix& m, int64_t width, bool vnni, bool fetch) {
#if defined(__AVX512F__)
    if (vnni) return of_format<BytesVNNI>(m, width, fetch);
#endif
    return of_format<BytesPlain>(m, width, fetch);
}

}  // namespace hasten
