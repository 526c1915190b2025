// Rows of x as int8 with one scale for each 32 values, or rotated with one for each 128, and the sums that
// minima are multiplied by: a row, or a whole tile at once, to the bit alike.
#include "layout.h"

namespace hasten {
namespace {

// The largest of |x| over n floats, whole blocks, as bits: NaN is above infinity, which is above the rest.
inline uint32_t largest_bits(const float* x, int64_t n) {
    VI top{};
    for (int64_t i = 0; i < n; i += W) {
        const VI bits = (VI)((VU)load(x + i) & 0x7fffffffu);
        top = bits > top ? bits : top;
    }
#if defined(__AVX512F__)
    return uint32_t(_mm512_reduce_max_epi32((__m512i)top));
#else
    int32_t largest = 0;
    for (int i = 0; i < W; i++) largest = std::max(largest, top[i]);
    return uint32_t(largest);
#endif
}

// Stores W integers as bytes and returns their sum.
inline int32_t narrow_bytes(VI v, int8_t* to) {
#if defined(__AVX512F__)
    const __m128i narrow = _mm512_cvtepi32_epi8((__m512i)v);
    std::memcpy(to, &narrow, W);
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t sum = 0;
    for (int i = 0; i < W; i++) {
        to[i] = int8_t(v[i]);
        sum += v[i];
    }
    return sum;
#endif
}

// Where a block of a row goes, or of a tile from its first row on; words of a row lie `width` apart.
struct Place {
    int64_t width;
    uint32_t *bytes, *scale, *halves, *whole;
    Place(int64_t K, uint32_t* to, int64_t width) : width(width), bytes(to) {
        const BytesRow row(K);
        scale = to + row.scales() * width;
        halves = to + row.sums(16) * width;
        whole = to + row.sums(32) * width;
    }
    Place of_row(int64_t r) const {
        Place other = *this;
        other.bytes += r, other.scale += r, other.halves += r, other.whole += r;
        return other;
    }
    void next() { bytes += BLOCK / 4 * width, scale += width, halves += 2 * width, whole += width; }
};

// Sums over groups of 64 and of 128, of those over 32, of `rows` rows that are neighbours in the tile.
void wider_sums(int64_t K, uint32_t* to, int64_t width, int64_t rows) {
    const BytesRow row(K);
    for (int64_t group = 64; group <= 128; group *= 2) {
        const int64_t halves = row.groups(group / 2);
        const float* from = (const float*)to + row.sums(group / 2) * width;
        float* sums = (float*)to + row.sums(group) * width;
        for (int64_t i = 0; i < halves; i += 2, from += 2 * width, sums += width)
            for (int64_t r = 0; r < rows; r++) sums[r] = i + 1 < halves ? from[r] + from[width + r] : from[r];
    }
}

inline void put_float(float number, uint32_t* at) {
    std::memcpy(at, &number, 4);
}

// Of numbers with one scale. It is NaN where one is not finite, and all sums that read it are.
struct Scale {
    bool finite;
    float inverse, scale;
    Scale(const float* x, int64_t n) {
        const uint32_t bits = largest_bits(x, n);
        const float largest = float_at(&bits);
        finite = bits < 0x7f800000u;
        // Below, 127 / largest would be infinite.
        inverse = finite && largest > 1e-36f ? 127.0f / largest : 0.0f;
        scale = finite ? inverse > 0 ? largest / 127.0f : 0.0f : __builtin_nanf("");
    }
};

struct Sums {
    int32_t low = 0, high = 0;  // of the first and the second half
};

// A block of 32 floats as int8, words `width` apart.
inline Sums write_bytes(const float* x, const Scale& of, uint32_t* to, int64_t width) {
    int8_t bytes[BLOCK] = {};
    Sums sums;
    if (of.finite) {
        for (int64_t i = 0; i < BLOCK; i += W) {
            const VI rounded = rounded_to_int(load(x + i) * of.inverse);
            (i < BLOCK / 2 ? sums.low : sums.high) += narrow_bytes(rounded, bytes + i);
        }
    }
    for (int64_t u = 0; u < BLOCK / 4; u++) std::memcpy(to + u * width, bytes + 4 * u, 4);
    return sums;
}

// A block of 32 floats with a scale of its own.
inline void write_block(const float* x, const Place& to) {
    const Scale of(x, BLOCK);
    const auto [low, high] = write_bytes(x, of, to.bytes, to.width);
    put_float(of.scale, to.scale);
    put_float(of.scale * float(low), to.halves);
    put_float(of.scale * float(high), to.halves + to.width);
    put_float(of.scale * float(low + high), to.whole);
}

// K values from a block's beginning on, the last block filled with zeros.
inline void write_blocks(const float* x, int64_t K, Place to) {
    for (int64_t k = 0; k < K; k += BLOCK, to.next()) {
        if (K - k >= BLOCK) {
            write_block(x + k, to);
            continue;
        }
        float block[BLOCK] = {};
        std::memcpy(block, x + k, size_t(K - k) * 4);
        write_block(block, to);
    }
}

}  // namespace

namespace {

// Where a group of a rotated row goes, or of a tile from its first row on; words of a row lie `width` apart.
struct RotatedPlace {
    int64_t width;
    uint32_t *bytes, *scale, *count, *sum;
    RotatedPlace(int64_t K, uint32_t* to, int64_t width) : width(width), bytes(to) {
        const RotatedRow row(K);
        scale = to + row.scales() * width;
        count = to + row.counts() * width;
        sum = to + row.sums() * width;
    }
    void next() { bytes += ROTATED / 4 * width, scale += width, count += width, sum += width; }
};

// The rotation of a group of n values, zeros up to the end of a block.
inline void rotated_group(const float* x, int64_t n, float* out) {
    for (int64_t k = n; k % BLOCK; k++) out[k] = 0;
    rotate_block(x, n, out);
}

void quantise_rotated(const float* x, int64_t K, uint32_t* to, int64_t width) {
    alignas(64) float turned[ROTATED];
    RotatedPlace place(K, to, width);
    for (int64_t k = 0; k < K; k += ROTATED, place.next()) {
        const int64_t n = std::min(ROTATED, K - k);
        rotated_group(x + k, n, turned);
        const Scale of(turned, round_up(n, BLOCK));
        int32_t total = 0;
        for (int64_t i = 0; i < n; i += BLOCK) {
            const auto [low, high] = write_bytes(turned + i, of, place.bytes + i / 4 * width, width);
            total += low + high;
        }
        put_float(of.scale, place.scale);
        std::memcpy(place.count, &total, 4);
        put_float(of.scale * float(total), place.sum);
    }
}

}  // namespace

void quantise_row(const float* x, int64_t K, uint32_t* to, int64_t width, bool rotated) {
    if (rotated) return quantise_rotated(x, K, to, width);
    write_blocks(x, K, Place(K, to, width));
    wider_sums(K, to, width, 1);
}

#if defined(__AVX512F__)
namespace {

inline __m512i larger(__m512i a, __m512i b) {
    return _mm512_max_epi32(a, b);
}

// The largest lane of each of 8 vectors, in lanes 0 .. 7 and again in 8 .. 15.
inline __m512i largest_of_each(const __m512i* t) {
    __m512i halves[4], quarters[2];
    for (int i = 0; i < 4; i++)
        halves[i] = larger(_mm512_shuffle_i32x4(t[2 * i], t[2 * i + 1], 0x44),
                           _mm512_shuffle_i32x4(t[2 * i], t[2 * i + 1], 0xee));
    for (int i = 0; i < 2; i++)
        quarters[i] = larger(_mm512_shuffle_i32x4(halves[2 * i], halves[2 * i + 1], 0x88),
                             _mm512_shuffle_i32x4(halves[2 * i], halves[2 * i + 1], 0xdd));
    // Quarter l holds row l, and row 4 + l.
    const __m512i pairs = larger(_mm512_unpacklo_epi64(quarters[0], quarters[1]),
                                 _mm512_unpackhi_epi64(quarters[0], quarters[1]));
    const __m512i both = larger(pairs, _mm512_shuffle_epi32(pairs, _MM_PERM_CDAB));
    alignas(64) static constexpr int32_t order[16] = {0, 4, 8, 12, 2, 6, 10, 14, 0, 4, 8, 12, 2, 6, 10, 14};
    return _mm512_permutexvar_epi32(_mm512_load_si512(order), both);
}

// Sums of four bytes, of both vectors, added over the halves: [8 rows].
inline __m256i sums_of_bytes(__m512i first, __m512i second) {
    const __m512i ones = _mm512_set1_epi8(1);
    const __m512i pairs =
        _mm512_add_epi16(_mm512_maddubs_epi16(ones, first), _mm512_maddubs_epi16(ones, second));
    const __m512i quads = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    return _mm256_add_epi32(_mm512_castsi512_si256(quads), _mm512_extracti64x4_epi64(quads, 1));
}

// The largest of |x| of each of 8 rows over n values, whole blocks, as bits.
inline __m256i largest_of_tile(const float* x, int64_t x_row, int64_t n = BLOCK) {
    __m512i top[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        top[r] = __m512i{};
        for (int64_t k = 0; k < n; k += W)
            top[r] = larger(top[r], (__m512i)((VU)load(x + r * x_row + k) & 0x7fffffffu));
    }
    return _mm512_castsi512_si256(largest_of_each(top));
}

// The largest of n blocks' rows, as bits, become scales, NaN where one is not finite, and what numbers are
// multiplied by.
inline void scales_of(int64_t n, float* scales, float* inverses) {
    each_vector(n, [&](int64_t i, auto lanes) {
        const VF largest = get(scales + i, lanes);
        const VF inverse = largest > 1e-36f ? 127.0f / largest : VF{};
        const VF scale = largest > 1e-36f ? largest / 127.0f : VF{};
        put(inverses + i, inverse, lanes);
        put(scales + i, (VI)largest < 0x7f800000 ? scale : splat(__builtin_nanf("")), lanes);
    });
}

struct TileSums {
    __m256i low, high;  // of the first and the second half of each row
};

// A block of 8 rows, whose numbers are all finite, as int8.
inline TileSums write_bytes(const float* x, int64_t x_row, uint32_t* to, const float* factors) {
    __m512i halves[8], bytes[4];
#pragma GCC unroll 8
    for (int r = 0; r < 8; r++) {
        const VI low = rounded_to_int(load(x + r * x_row) * factors[r]);
        const VI high = rounded_to_int(load(x + r * x_row + W) * factors[r]);
        halves[r] = _mm512_packs_epi32((__m512i)low, (__m512i)high);
    }
    // Quarter l: words l and 4 + l of the first row, then of the second.
    for (int i = 0; i < 4; i++) bytes[i] = _mm512_packs_epi16(halves[2 * i], halves[2 * i + 1]);
    const auto four = [&](int i, auto odd) {
        constexpr int chosen = decltype(odd)::value ? 0xdd : 0x88;
        return (__m512i)_mm512_shuffle_ps((__m512)bytes[i], (__m512)bytes[i + 1], chosen);
    };
    alignas(64) static constexpr int64_t order[2][8] = {{0, 1, 8, 9, 2, 3, 10, 11},
                                                        {4, 5, 12, 13, 6, 7, 14, 15}};
    __m512i words[4];
    const auto join = [&](int at, __m512i a, __m512i b) {
        for (int i = 0; i < 2; i++) {
            words[at + i] = _mm512_permutex2var_epi64(a, _mm512_load_si512(order[i]), b);
            _mm512_storeu_si512(to + (at + i) * 16, words[at + i]);
        }
    };
    join(0, four(0, std::false_type{}), four(2, std::false_type{}));
    join(2, four(0, std::true_type{}), four(2, std::true_type{}));
    return {sums_of_bytes(words[0], words[1]), sums_of_bytes(words[2], words[3])};
}

inline void write_tile(const float* x, int64_t x_row, const Place& to, const float* factors) {
    const __m256 scale = _mm256_loadu_ps((const float*)to.scale);
    const auto [low, high] = write_bytes(x, x_row, to.bytes, factors);
    const auto sums_to = [&](uint32_t* at, __m256i sums, int64_t first) {
        _mm256_storeu_ps((float*)at + first, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sums)));
    };
    sums_to(to.halves, low, 0);
    sums_to(to.halves, high, TILE);
    sums_to(to.whole, _mm256_add_epi32(low, high), 0);
}

// Four groups at a time: it is a long way from numbers to their scale.
void quantise_rotated_tile(const float* x, int64_t x_row, int64_t K, uint32_t* to) {
    constexpr int64_t TOGETHER = 4 * ROTATED;
    alignas(64) float turned[TILE * TOGETHER], inverses[TILE * TOGETHER / ROTATED];
    RotatedPlace place(K, to, TILE);
    for (int64_t k = 0; k < K; k += TOGETHER) {
        const int64_t values = std::min(TOGETHER, K - k), groups = ceil_div(values, ROTATED);
        float* scales = (float*)place.scale;
        for (int64_t i = 0; i < groups; i++) {
            const int64_t n = std::min(ROTATED, values - i * ROTATED);
            float* group = turned + i * ROTATED;
            for (int64_t r = 0; r < TILE; r++)
                rotated_group(x + r * x_row + k + i * ROTATED, n, group + r * TOGETHER);
            const __m256i largest = largest_of_tile(group, TOGETHER, round_up(n, BLOCK));
            _mm256_storeu_si256((__m256i*)(scales + i * TILE), largest);
        }
        scales_of(TILE * groups, scales, inverses);
        for (int64_t i = 0; i < groups; i++, place.next()) {
            __m256i total{};
            // Where a scale is NaN, so are all sums: what the bytes of that row are does not matter.
            for (int64_t at = i * ROTATED; at < std::min(values, (i + 1) * ROTATED); at += BLOCK) {
                const auto [low, high] = write_bytes(
                    turned + at, TOGETHER, place.bytes + at % ROTATED / 4 * TILE, inverses + i * TILE);
                total = _mm256_add_epi32(total, _mm256_add_epi32(low, high));
            }
            _mm256_storeu_si256((__m256i*)place.count, total);
            const __m256 scale = _mm256_loadu_ps((const float*)place.scale);
            _mm256_storeu_ps((float*)place.sum, _mm256_mul_ps(scale, _mm256_cvtepi32_ps(total)));
        }
    }
}

}  // namespace

void quantise_tile(const float* x, int64_t x_row, int64_t K, uint32_t* to, bool rotated) {
    if (rotated) return quantise_rotated_tile(x, x_row, K, to);
    static_assert(TILE == 8);
    // Scales of all blocks first: it is a long way from numbers to their scale, and what follows would wait.
    const Place begin(K, to, TILE);
    Place place = begin;
    int64_t k = 0;
    for (; k + BLOCK <= K; k += BLOCK, place.next())
        _mm256_storeu_si256((__m256i*)place.scale, largest_of_tile(x + k, x_row));
    // Until the sums are written, what numbers are multiplied by lies in their place.
    scales_of(TILE * (k / BLOCK), (float*)begin.scale, (float*)begin.whole);
    place = begin;
    for (k = 0; k < K; k += BLOCK, place.next()) {
        const __m256 scale = _mm256_loadu_ps((const float*)place.scale);
        if (K - k >= BLOCK && !_mm256_movemask_ps(_mm256_cmp_ps(scale, scale, _CMP_UNORD_Q))) {
            write_tile(x + k, x_row, place, (const float*)place.whole);
            continue;
        }
        for (int64_t r = 0; r < TILE; r++)
            write_blocks(x + r * x_row + k, std::min(BLOCK, K - k), place.of_row(r));
    }
    wider_sums(K, to, TILE, TILE);
}
#else
void quantise_tile(const float* x, int64_t x_row, int64_t K, uint32_t* to, bool rotated) {
    for (int64_t r = 0; r < TILE; r++) quantise_row(x + r * x_row, K, to + r, TILE, rotated);
}
#endif

}  // namespace hasten
