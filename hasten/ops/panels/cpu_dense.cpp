// Few rows times panels of floats or bf16. bf16 panels take pairs where the processor multiplies them, x
// being rounded to bf16; else they are widened and x stays as it is.
#include "layout.h"

namespace hasten {
namespace {

struct FloatStep {
    static constexpr int per_step = 1, x_words = 1;
    template <int MR>
    static inline VF add(VF sum, const uint32_t* x, VU w) {
        return Float::multiply_add(sum, x, w);
    }
};

struct WideStep {
    static constexpr int per_step = 2, x_words = 2;
    template <int MR>
    static inline VF add(VF sum, const uint32_t* x, VU w) {
        sum = Float::multiply_add(sum, x, w << 16);
        return Float::multiply_add(sum, x + MR, w & 0xffff0000u);
    }
};

#if defined(__AVX512F__)
struct StepPairBF16 {
    static constexpr int per_step = 2, x_words = 1;
    template <int MR>
    HASTEN_PAIRS_TARGET static inline VF add(VF sum, const uint32_t* x, VU w) {
        return PairBF16::multiply_add(sum, x, w);
    }
};
#endif

constexpr int64_t AHEAD = 6144;

template <class Step, int MR>
HASTEN_PAIRS_TARGET void sums_of(const Matrix& m, int64_t panel, int64_t part, const uint32_t* x,
                                 float* out) {
    constexpr int64_t steps = UNITS / Step::x_words;
    const uint8_t* w = m.data + panel * m.panel_bytes + part * 4 * W;
    VF total[MR];
    for (int i = 0; i < MR; i++) total[i] = VF{};
    const int64_t all = ceil_div(m.K, Step::per_step);
    for (int64_t first = 0; first < all; first += steps) {
        const int64_t count = std::min(steps, all - first);
        VF sum[MR];
        for (int i = 0; i < MR; i++) sum[i] = VF{};
        for (int64_t k = 0; k < count; k++, w += 64, x += Step::x_words * MR) {
            const VU weights = load_words(w);
            __builtin_prefetch(w + AHEAD);
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) sum[i] = Step::template add<MR>(sum[i], x + i, weights);
        }
        for (int i = 0; i < MR; i++) total[i] = first ? total[i] + sum[i] : sum[i];
    }
    for (int i = 0; i < MR; i++) store(out + i * W, total[i]);
}

template <class Step>
FewSumsOf of_width(int64_t width) {
    switch (width) {
        case 1:
            return sums_of<Step, 1>;
        case 2:
            return sums_of<Step, 2>;
        case 4:
            return sums_of<Step, 4>;
        default:
            return sums_of<Step, TILE>;
    }
}

}  // namespace

FewSumsOf dense_sums(const Matrix& m, int64_t width, bool bf16) {
    if (m.format == Panel::f32) return of_width<FloatStep>(width);
#if defined(__AVX512F__)
    if (bf16) return of_width<StepPairBF16>(width);
#endif
    return of_width<WideStep>(width);
}

}  // namespace hasten
