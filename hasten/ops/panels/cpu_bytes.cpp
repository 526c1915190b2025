// Few rows times quantised panels, in integers: codes times int8 values, summed in int32 over a block of 32
// (16 where the group has 16), then times the scale of x and added in fp32 over the group, whose scale and
// minimum follow once. Rotated rows have one scale for a group, which is summed in int32 whole. Memory is the
// limit: a tile of rows reads a panel once.
#include "layout.h"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#endif

namespace hasten {
namespace {

// How four codes of a lane are multiplied with four int8 values and added to the lane's sum. Unless `whole`
// holds, `add` keeps sums of another kind, which `finish` turns into int32 after at most 32 values.
#if defined(__AVX512F__)
struct BytesVNNI {
    template <int BITS>
    static constexpr bool whole = true;
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
    static constexpr bool whole = BITS > 4;
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
    static constexpr bool whole = true;
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
    static constexpr bool whole = true;
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

// to(m, from(m) and the products of a block of row m); from(m) is 0, or a sum so far of whole int32.
template <class Bytes, int BITS, int U, int MR, class From, class To>
HASTEN_VNNI_TARGET inline __attribute__((always_inline)) void each_product(const uint8_t* a, const uint8_t* b,
                                                                           const uint32_t* x,
                                                                           const From& from, const To& to) {
    VI sum[MR];
#pragma GCC unroll 8
    for (int m = 0; m < MR; m++) sum[m] = from(m);
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
    for (int m = 0; m < MR; m++) to(m, Bytes::template finish<BITS>(sum[m]));
}

#define HASTEN_INLINE HASTEN_VNNI_TARGET __attribute__((always_inline))

// So far ahead lines are fetched, across the end of a panel into the next: what a tile of 8 rows reads takes
// three times as long as what one row does.
constexpr int64_t ahead(int rows) {
    return rows < 8 ? 6144 : 3072;
}

inline VF as_floats(VI v) {
    return __builtin_convertvector(v, VF);
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
            a = groups.a(group, part), b = groups.b(a, left);
            if (FETCH) __builtin_prefetch(group + AHEAD);
            scale = groups.scale(group, part), minimum = groups.minimum(group, part, scale);
        }
#pragma GCC unroll 8
        for (int64_t at = 0; FETCH && at < C::a_step; at += 64) __builtin_prefetch(a + AHEAD + at);
        if constexpr (FETCH && C::b_step > 0) __builtin_prefetch(b + AHEAD);
        const auto add = [&](int i, VI products) {
            if constexpr (WIDE)
                z[i] = z[i] + as_floats(products) * float_at(scales + i);
            else
                y[i] = y[i] + as_floats(products) * float_at(scales + i) * scale;
        };
        each_product<Bytes, BITS, U, MR>(a, b, x, [](int) { return VI{}; }, add);
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

// Rows that are rotated: a group is 4 blocks, the last one maybe fewer, and x has one scale for it. MINIMA:
// the format has them; else the zero is taken off in integers.
template <class Bytes, int BITS, int MR, bool MINIMA, bool FETCH = true>
HASTEN_VNNI_TARGET void rotated_sums(const Matrix& m, int64_t panel, int64_t part, const uint32_t* x,
                                     float* out) {
    constexpr int U = 8;
    using C = Codes<BITS, U>;
    // One or two rows would wait for their own sums.
    constexpr bool whole = MR > 2 && Bytes::template whole<BITS>;
    static_assert(ROTATED == 4 * BLOCK);
    constexpr int64_t AHEAD = ahead(MR);
    const Groups<BITS, U> groups(m);
    const RotatedRow row(m.K);
    const uint32_t *scales = x + row.scales() * MR, *sums = x + (MINIMA ? row.sums() : row.counts()) * MR;
    const uint8_t* group = groups.panel(m, panel);
    VF y[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) y[i] = VF{};
    VI total[MR];
    const uint8_t *a = group, *b = group;
    const auto begin = [&](int64_t blocks) HASTEN_INLINE {
        a = groups.a(group, part), b = groups.b(a, blocks);
        if (FETCH) __builtin_prefetch(group + AHEAD);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) total[i] = MINIMA ? VI{} : splat_int(-m.zero * int32_t(sums[i]));
    };
    const auto add_block = [&]() HASTEN_INLINE {
#pragma GCC unroll 8
        for (int64_t at = 0; FETCH && at < C::a_step; at += 64) __builtin_prefetch(a + AHEAD + at);
        if constexpr (FETCH && C::b_step > 0) __builtin_prefetch(b + AHEAD);
        each_product<Bytes, BITS, U, MR>(
            a, b, x, [&](int i) { return whole ? total[i] : VI{}; },
            [&](int i, VI products) { total[i] = whole ? products : total[i] + products; });
        x += U * MR;
        a += C::a_step, b += C::b_step;
    };
    const auto end = [&]() HASTEN_INLINE {
        const VF scale = groups.scale(group, part);
        const VF minimum = MINIMA ? groups.minimum(group, part, scale) : VF{};
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            y[i] = y[i] + as_floats(total[i]) * float_at(scales + i) * scale;
            if (MINIMA) y[i] = y[i] + minimum * float_at(sums + i);
        }
        group += groups.bytes, scales += MR, sums += MR;
    };
    for (int64_t left = row.blocks / 4; left > 0; left--) {
        begin(4);
        add_block(), add_block(), add_block(), add_block();
        end();
    }
    if (row.blocks % 4) {
        begin(row.blocks % 4);
        for (int64_t left = row.blocks % 4; left > 0; left--) add_block();
        end();
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) store(out + i * W, y[i]);
}

// of(width, whether lines are fetched), both as constants.
template <class F>
FewSumsOf of_width(int64_t width, bool fetch, const F& of) {
    if (!fetch && width == TILE) return of(std::integral_constant<int, TILE>{}, std::false_type{});
    switch (width) {
        case 1:
            return of(std::integral_constant<int, 1>{}, std::true_type{});
        case 2:
            return of(std::integral_constant<int, 2>{}, std::true_type{});
        case 4:
            return of(std::integral_constant<int, 4>{}, std::true_type{});
        default:
            return of(std::integral_constant<int, TILE>{}, std::true_type{});
    }
}

template <class Bytes, int BITS>
FewSumsOf of_matrix(const Matrix& m, int64_t width, bool fetch) {
    const auto groups_of = [&](auto units, auto wide) {
        return of_width(width, fetch, [](auto rows, auto fetched) -> FewSumsOf {
            return sums_of<Bytes, BITS, decltype(units)::value, decltype(rows)::value, decltype(wide)::value,
                           decltype(fetched)::value>;
        });
    };
    const auto rotated_of = [&](auto minima) {
        return of_width(width, fetch, [](auto rows, auto fetched) -> FewSumsOf {
            return rotated_sums<Bytes, BITS, decltype(rows)::value, decltype(minima)::value,
                                decltype(fetched)::value>;
        });
    };
    if (m.format == Panel::rotated)
        return m.zero < 0 ? rotated_of(std::true_type{}) : rotated_of(std::false_type{});
    // Formats with a 1-bit plane have no groups of 16.
    if constexpr (BITS % 2 == 0)
        if (m.group == 16) return groups_of(std::integral_constant<int, 4>{}, std::false_type{});
    constexpr std::integral_constant<int, 8> units;
    return m.group == 32 ? groups_of(units, std::false_type{}) : groups_of(units, std::true_type{});
}

template <class Bytes>
FewSumsOf of_format(const Matrix& m, int64_t width, bool fetch) {
    switch (m.bits) {
        case 3:
            return of_matrix<Bytes, 3>(m, width, fetch);
        case 4:
            return of_matrix<Bytes, 4>(m, width, fetch);
        case 5:
            return of_matrix<Bytes, 5>(m, width, fetch);
        case 6:
            return of_matrix<Bytes, 6>(m, width, fetch);
        default:
            return of_matrix<Bytes, 8>(m, width, fetch);
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
