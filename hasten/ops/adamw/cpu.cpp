// AdamW over a piece of a parameter, and sums of squares: one pass over memory each.
#include <cmath>

#include "../_cpu/rows.h"

namespace hasten {
namespace {

inline VF sqrt_of(VF v) {
#if defined(__AVX512F__)
    return (VF)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
    return (VF)_mm256_sqrt_ps((__m256)v);
#else
    VF r;
    for (int i = 0; i < W; i++) r[i] = std::sqrt(v[i]);
    return r;
#endif
}

template <class P, class G>
void update(const AdamW& a, int64_t first, int64_t count) {
    P* p = (P*)a.param + first;
    const G* g = (const G*)a.grad + first;
    float *m = a.exp_avg + first, *v = a.exp_avg_sq + first;
    bf16* shadow = a.shadow ? (bf16*)a.shadow + first : nullptr;
    each_vector(count, [&](int64_t i, auto lanes) {
        const VF grad = get(g + i, lanes) * a.grad_scale;
        const VF mean = get(m + i, lanes) * a.beta1 + grad * a.rest1;
        const VF square = get(v + i, lanes) * a.beta2 + grad * grad * a.rest2;
        const VF param =
            get(p + i, lanes) * a.decay - a.step_size * mean / (sqrt_of(square) * a.square_scale + a.eps);
        put(p + i, param, lanes), put(m + i, mean, lanes), put(v + i, square, lanes);
        if (shadow) put(shadow + i, param, lanes);
    });
}

void adamw(const AdamW& a, int64_t first, int64_t count) {
    with_type(a.param_type, [&](auto* p) {
        with_type(a.grad_type, [&](auto* g) {
            update<std::remove_pointer_t<decltype(p)>, std::remove_pointer_t<decltype(g)>>(a, first, count);
        });
    });
}

template <class T>
double squares(const T* x, int64_t count) {
    constexpr int64_t RUN = 64 * 4 * W;  // each lane adds 64 squares in float, then all go to a double
    double total = 0;
    for (int64_t i = 0; i < count; i += RUN) {
        const int64_t end = count - i < RUN ? count : i + RUN;
        VF part[4] = {};
        int64_t c = i;
        for (; c + 4 * W <= end; c += 4 * W)
            for (int j = 0; j < 4; j++) {
                const VF value = load_float(x + c + j * W);
                part[j] = part[j] + value * value;
            }
        for (; c < end; c += W) {
            const VF value = end - c >= W ? load_float(x + c) : load_part(x + c, int(end - c));
            part[0] = part[0] + value * value;
        }
        for (int j = 0; j < 4; j++) total += double(sum(part[j]));
    }
    return total;
}

double sum_of_squares(Type type, const void* x, int64_t first, int64_t count) {
    return with_type(type, [&](auto* t) { return squares((const decltype(t))x + first, count); });
}

}  // namespace

void adamw_kernels(Kernels& table) {
    table.adamw = adamw;
    table.sum_of_squares = sum_of_squares;
}

}  // namespace hasten
