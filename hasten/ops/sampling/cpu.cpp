// Drawing a token from a row of logits without sorting it.
//
// One reading notes the largest logit of every block of 64. The few blocks that can hold a kept token are
// known from that: by the k-th largest block for top-k, by a bound for top-p and min-p. Only their logits
// enter a list, which histograms narrow down to the last token that is kept.
#include <cfloat>

#include "list.h"

namespace hasten {
namespace {

constexpr double COLDEST = 1e-5;

// SplitMix64 (Steele, Lea and Flood 2014): the step, and the mixing of its state.
constexpr uint64_t GOLDEN = 0x9e3779b97f4a7c15u;
inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
// In [0, 1), 53 bits.
inline double uniform(uint64_t seed, uint64_t position) {
    return double(mixed(mixed(seed + GOLDEN) + (position + 1) * GOLDEN) >> 11) * 0x1p-53;
}

// The lowest index of the largest number, which is finite.
int64_t first_largest(const float* x, const float* maxima, float largest) {
    int64_t i = 0;
    while (maxima[i] != largest) i++;
    for (i *= BLOCK; x[i] != largest; i++) {
    }
    return i;
}

int64_t argmax(const float* x, int64_t n, float* maxima) {
    float largest;
    if (!scan(x, n, maxima, largest)) return NOT_FINITE;
    return largest == -INF ? NONE_LEFT : first_largest(x, maxima, largest);
}

// Everything that one row needs.
struct Row {
    const Sampling& a;
    const int64_t V, blocks;
    float *maxima, *order, *changed;
    List list;

    Row(const Sampling& a, float* scratch) : a(a), V(a.V), blocks(block_count(a.V)) {
        const int64_t padded = blocks * BLOCK;
        maxima = scratch, order = maxima + blocks, changed = order + blocks;
        list = {0,
                0,
                0,
                changed + padded,
                changed + 2 * padded,
                (int32_t*)(changed + 3 * padded),
                (int32_t*)(changed + 4 * padded)};
    }

    // The entries among which the k largest are. For few: from the k-th largest block maximum on. For many:
    // from a rank in a sample, one number of each block, that is taken a quarter too low; if it is too high
    // after all, everything.
    void collect_largest(const float* y, int64_t k, float largest) {
        const bool few = k <= blocks / 2;
        const int64_t rank = few ? k - 1 : k / BLOCK * 5 / 4 + 8;
        float low = -FLT_MAX;
        if (rank < blocks) {
            for (int64_t b = 0; b < blocks; b++)
                order[b] = few ? maxima[b] : y[std::min(V - 1, b * BLOCK + b % BLOCK)];
            std::nth_element(order, order + rank, order + blocks, [](float x, float z) { return x > z; });
            low = std::max(low, order[rank]);
        }
        list.collect(y, maxima, V, low, largest);
        if (list.n < k && low > -FLT_MAX) list.collect(y, maxima, V, -FLT_MAX, largest);
    }

    void keep_largest(int64_t k) {
        if (list.n <= k) return;
        const Last last = shortest_run(list, nullptr, double(k));
        int64_t n = 0;
        for (int64_t i = 0; i < list.n; i++) {
            const bool kept = is_kept(list, i, last);
            list.value[n] = list.value[i];
            list.id[n] = list.id[i];
            n += kept;
        }
        list.n = n;
    }

    // The most likely tokens; `maxima` are those of the logits as given.
    void write_top(float largest, double log_total) {
        collect_largest(a.logits, std::min(a.top, V), largest);
        keep_largest(a.top);
        uint64_t keys[SORT];
        for (int64_t i = 0; i < list.n; i++) keys[i] = key_of(list.value[i], int32_t(i));
        std::sort(keys, keys + list.n);
        for (int64_t i = 0; i < a.top; i++) {
            const int64_t place = i < list.n ? int64_t(uint32_t(keys[i])) : -1;
            a.top_tokens[i] = place < 0 ? -1 : list.id[place];
            a.logprobs[1 + i] = place < 0 ? -INF : float(double(list.value[place]) - log_total);
        }
    }

    // Masks, biases and penalties; the logits as given if there are none.
    const float* processed() {
        if (!a.mask && !a.history_size && !a.bias_size) return a.logits;
        if (a.mask) {
            each_vector(V, [&](int64_t i, auto lanes) {
                const VI bits = (splat_int(int32_t(a.mask[i / 32] >> (i % 32))) >> lane_numbers()) & 1;
                put(changed + i, bits != 0 ? get(a.logits + i, lanes) : splat(-INF), lanes);
            });
        } else {
            std::memcpy(changed, a.logits, size_t(V) * sizeof(float));
        }
        for (int64_t i = 0; i < a.bias_size; i++) changed[a.bias_ids[i]] += a.bias_values[i];
        for (int64_t i = 0; i < a.history_size; i++) {
            const int32_t count = a.history[2 * i + 1];
            if (count < 0) continue;  // taken back
            float& y = changed[a.history[2 * i]];
            double value = y < 0 ? y * a.repetition : y / a.repetition;
            if (count) value -= a.presence + a.frequency * count;
            y = float(value);
        }
        return changed;
    }

    // The place of the token drawn from n weights; block(b, to) writes those of block b, of which sums has
    // the sum.
    template <class F>
    int64_t draw(int64_t n, const float* sums, double total, const F& block) {
        const double target = uniform(a.seed, a.position) * total;
        double mass = 0;
        int64_t last = 0;  // of the blocks with weight, for a target that rounding put behind the end
        int64_t b = 0;
        for (; b < block_count(n); b++) {
            if (!(sums[b] > 0)) continue;
            last = b;
            if (mass + sums[b] > target) break;
            mass += sums[b];
        }
        float weights[BLOCK];
        block(last, weights);
        int64_t found = 0;
        for (int64_t i = 0; i < std::min(BLOCK, n - last * BLOCK); i++) {
            if (!(weights[i] > 0)) continue;
            found = i;
            mass += weights[i];
            if (mass > target) break;
        }
        return last * BLOCK + found;
    }

    int64_t draw_from_all(const float* y, const Weight& weight) {
        const double total = total_weight(weight, y, V, order);
        const auto block = [&](int64_t b, float* to) {
            const float* from = y + b * BLOCK;
            each_vector(std::min(BLOCK, V - b * BLOCK),
                        [&](int64_t i, auto lanes) { put(to + i, weight(get(from + i, lanes)), lanes); });
        };
        if (a.probabilities)
            each_vector(V, [&](int64_t i, auto lanes) {
                put(a.probabilities + i, weight(get(y + i, lanes)) / splat(float(total)), lanes);
            });
        return draw(V, order, total, block);
    }

    int64_t draw_from_list() {
        double total = 0;
        for (int64_t b = 0; b * BLOCK < list.n; b++) {
            const float* from = list.weight + b * BLOCK;
            VF s{};
            each_vector(std::min(BLOCK, list.n - b * BLOCK),
                        [&](int64_t i, auto lanes) { s = s + get(from + i, lanes); });
            order[b] = sum(s);
            total += order[b];
        }
        if (a.probabilities) {
            std::memset(a.probabilities, 0, size_t(V) * sizeof(float));
            for (int64_t i = 0; i < list.n; i++) a.probabilities[list.id[i]] = float(list.weight[i] / total);
        }
        const auto block = [&](int64_t b, float* to) {
            std::memcpy(to, list.weight + b * BLOCK,
                        size_t(std::min(BLOCK, list.n - b * BLOCK)) * sizeof(float));
        };
        return list.id[draw(list.n, order, total, block)];
    }

    // y: after masks, biases and penalties; `maxima` are its own.
    int64_t draw_token(const float* y, float largest) {
        const Weight weight{largest, float(1 / a.temperature)};
        const bool few = a.top_k > 0 && a.top_k < V, nucleus = a.top_p < 1, likely = a.min_p > 0;
        if (!few && !nucleus && !likely) return draw_from_all(y, weight);
        // From here on a token is kept, by min-p.
        const double lowest = likely ? largest + a.temperature * std::log(a.min_p) : -FLT_MAX;
        double wanted = INF;  // mass of the nucleus
        if (few) {
            collect_largest(y, a.top_k, largest);
            keep_largest(a.top_k);
            const double total = list.weigh(weight);
            if (nucleus) wanted = a.top_p * total;
        } else {
            double low = lowest;
            if (nucleus) {
                const double total = total_weight(weight, y, V, nullptr);
                wanted = a.top_p * total;
                // All V tokens below this weight together are less than what top-p leaves out.
                const double least = std::log((1 - a.top_p) * total / double(V)) - 0.01;
                low = std::max(low, largest + a.temperature * least);
            }
            // Rounded down: which of them min-p keeps is asked below.
            const float from = std::nextafter(float(std::max(low, double(-FLT_MAX))), -INF);
            list.collect(y, maxima, V, std::max(from, -FLT_MAX), largest);
            list.weigh(weight);
        }
        Last last{-INF, 0};
        if (nucleus) last = shortest_run(list, list.weight, wanted);
        float least = float(std::max(lowest, double(-FLT_MAX)));
        if (double(least) < lowest) least = std::nextafter(least, INF);
        for (int64_t i = 0; i < list.n; i++) {
            const float v = list.value[i];
            const bool kept = (v > last.value) | ((v == last.value) & (i <= last.place));
            list.weight[i] = kept & (v >= least) ? list.weight[i] : 0.0f;
        }
        return draw_from_list();
    }

    void run() {
        *a.token = NOT_FINITE;
        float given_largest, largest;
        if (!scan(a.logits, V, maxima, given_largest)) return;
        *a.token = NONE_LEFT;
        if (given_largest == -INF) return;
        double log_total = 0;
        if (a.logprob) {
            log_total = given_largest + std::log(total_weight({given_largest, 1.0f}, a.logits, V, nullptr));
            if (a.top) write_top(given_largest, log_total);
        }
        const float* y = processed();
        largest = given_largest;
        if (y != a.logits && !scan(y, V, maxima, largest)) {
            *a.token = NOT_FINITE;
            return;
        }
        if (largest == -INF) return;
        if (a.temperature < COLDEST) {
            *a.token = first_largest(y, maxima, largest);
            if (a.probabilities) {
                std::memset(a.probabilities, 0, size_t(V) * sizeof(float));
                a.probabilities[*a.token] = 1;
            }
        } else {
            *a.token = draw_token(y, largest);
        }
        if (a.logprob) a.logprobs[0] = float(double(a.logits[*a.token]) - log_total);
    }
};

void sample(const Sampling& a, float* scratch) {
    Row(a, scratch).run();
}

}  // namespace

void sampling_kernels(Kernels& table) {
    table.argmax = argmax;
    table.sample = sample;
}

}  // namespace hasten
