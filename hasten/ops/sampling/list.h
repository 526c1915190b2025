// Parts of a row of logits: the largest number of every block, weights, and the list of those that can be
// kept.
#pragma once

#include <algorithm>
#include <cmath>

#include "../_cpu/rows.h"
#include "cpu.h"

namespace hasten {
namespace {

constexpr int64_t BLOCK = SAMPLING_BLOCK;
constexpr int64_t SORT = 256;      // entries that are sorted rather than counted
constexpr int64_t BUCKETS = 1024;  // of a histogram

inline int64_t block_count(int64_t n) {
    return (n + BLOCK - 1) / BLOCK;
}

inline float largest_of(VF v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX2__)
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
#else
    return max_of(v);
#endif
}

// The largest number of every block of x [n], and of all; false if one is NaN or +infinity.
inline bool scan(const float* x, int64_t n, float* maxima, float& largest) {
    VI magnitude{};
    largest = -INF;
    for (int64_t b = 0; b * BLOCK < n; b++) {
        VF high = splat(-INF);
        each_vector(std::min(BLOCK, n - b * BLOCK), [&](int64_t i, auto lanes) {
            VF v = get(x + b * BLOCK + i, lanes);
            if (int(lanes) < W) v = lane_numbers() < int(lanes) ? v : splat(-INF);
            const VI bits = (VI)v & 0x7fffffff;
            magnitude = bits > magnitude ? bits : magnitude;
            high = maximum(v, high);
        });
        maxima[b] = largest_of(high);
        largest = std::max(largest, maxima[b]);
    }
    for (int i = 0; i < W; i++)
        if (magnitude[i] > 0x7f800000) return false;
    return largest < INF;
}

// e^(beta (x - shift)).
struct Weight {
    float shift, beta;
    VF operator()(VF x) const { return exp_of((x - splat(shift)) * beta); }
};

// The sum of the weights of x [n]; sums, if given, gets those of the blocks.
inline double total_weight(const Weight& weight, const float* x, int64_t n, float* sums) {
    double total = 0;
    for (int64_t b = 0; b * BLOCK < n; b++) {
        const float* from = x + b * BLOCK;
        VF s{};
        each_vector(std::min(BLOCK, n - b * BLOCK),
                    [&](int64_t i, auto lanes) { s = s + keep(weight(get(from + i, lanes)), lanes); });
        const float block = sum(s);
        if (sums) sums[b] = block;
        total += block;
    }
    return total;
}

// The logits that can be kept, in the order of their index.
struct List {
    int64_t n;
    float low, high;  // no value lies outside
    float *value, *weight;
    int32_t* id;
    int32_t* places;  // working memory

    // Those of y [V] from `from` on.
    void collect(const float* y, const float* maxima, int64_t V, float from, float largest) {
        n = 0, low = from, high = largest;
        for (int64_t b = 0; b * BLOCK < V; b++) {
            if (maxima[b] < from) continue;
            const int64_t end = std::min(V, (b + 1) * BLOCK);
            for (int64_t i = b * BLOCK; i < end; i++) {
                value[n] = y[i];
                id[n] = int32_t(i);
                n += y[i] >= from;
            }
        }
    }

    double weigh(const Weight& w) {
        each_vector(n, [&](int64_t i, auto lanes) { put(weight + i, w(get(value + i, lanes)), lanes); });
        double total = 0;
        for (int64_t i = 0; i < n; i += BLOCK) {
            VF s{};
            each_vector(std::min(BLOCK, n - i),
                        [&](int64_t j, auto lanes) { s = s + get(weight + i + j, lanes); });
            total += sum(s);
        }
        return total;
    }
};

// The last entry that is kept: larger values, and equal ones up to `place`.
struct Last {
    float value;
    int64_t place;
};

// Ascending words: values fall, and places rise among equal values.
inline uint64_t key_of(float value, int32_t place) {
    uint32_t bits;
    value += 0.0f;  // no negative zero
    std::memcpy(&bits, &value, 4);
    const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(~rising) << 32 | uint32_t(place);
}

// Of the entries in falling order, the shortest run from the first whose weights sum to `wanted`: its last
// entry. Without weights each counts 1.
inline Last shortest_run(const List& list, const float* weight, double wanted) {
    int32_t* place = list.places;
    int64_t n = list.n;
    float low = list.low, high = list.high;
    const auto weight_of = [&](int64_t i) { return weight ? double(weight[i]) : 1.0; };
    // Counted down to the bucket in which the run ends; false if it never does.
    double sums[BUCKETS];
    const auto find = [&](int64_t& b) {
        b = 0;
        while (b < BUCKETS && sums[b] < wanted) wanted -= sums[b++];
        return b < BUCKETS;
    };
    bool listed = false;  // place holds those of n entries, else they are 0, 1, .. n - 1
    if (const float scale = BUCKETS / (high - low); n > SORT && scale > 1e-30f && scale < 1e30f) {
        each_vector(n, [&](int64_t i, auto lanes) {
            VI b = __builtin_convertvector((splat(high) - get(list.value + i, lanes)) * scale, VI);
            b = b < int32_t(BUCKETS - 1) ? b : splat_int(BUCKETS - 1);
            std::memcpy(place + i, &b, size_t(int(lanes)) * sizeof(int32_t));
        });
        std::fill(sums, sums + BUCKETS, 0.0);
        for (int64_t i = 0; i < n; i++) sums[place[i]] += weight_of(i);
        int64_t b;
        if (!find(b)) return {-INF, 0};
        int64_t kept = 0;
        low = INF, high = -INF;
        for (int64_t i = 0; i < n; i++) {
            if (place[i] != b) continue;
            place[kept++] = int32_t(i);
            low = std::min(low, list.value[i]), high = std::max(high, list.value[i]);
        }
        n = kept, listed = true;
    }
    if (!listed)
        for (int64_t i = 0; i < n; i++) place[i] = int32_t(i);
    while (n > SORT && low < high) {
        // In double, for ranges that end at the largest numbers or hold the smallest alone.
        const double scale = BUCKETS / (double(high) - low);
        const auto bucket = [&](float v) {
            return std::min(BUCKETS - 1, int64_t((double(high) - double(v)) * scale));
        };
        std::fill(sums, sums + BUCKETS, 0.0);
        for (int64_t i = 0; i < n; i++) sums[bucket(list.value[place[i]])] += weight_of(place[i]);
        int64_t b;
        if (!find(b)) return {-INF, 0};
        int64_t kept = 0;
        float least = INF, most = -INF;
        for (int64_t i = 0; i < n; i++) {
            const float v = list.value[place[i]];
            if (bucket(v) != b) continue;
            place[kept++] = place[i];
            least = std::min(least, v), most = std::max(most, v);
        }
        n = kept, low = least, high = most;
    }
    if (n <= SORT) {  // else all are equal, and stand in order
        uint64_t keys[SORT];
        for (int64_t i = 0; i < n; i++) keys[i] = key_of(list.value[place[i]], place[i]);
        std::sort(keys, keys + n);
        for (int64_t i = 0; i < n; i++) place[i] = int32_t(uint32_t(keys[i]));
    }
    double mass = 0;
    for (int64_t i = 0; i < n; i++) {
        mass += weight_of(place[i]);
        if (mass >= wanted) return {list.value[place[i]], place[i]};
    }
    return {-INF, 0};
}

inline bool is_kept(const List& list, int64_t i, const Last& last) {
    return list.value[i] > last.value || (list.value[i] == last.value && i <= last.place);
}

}  // namespace
}  // namespace hasten
