// AdamW over a piece of a parameter, and sums of squares: one pass over memory each.
#include <cmath>

#include "../_cpu/kernels.h"
#include "../_cpu/vec.h"

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
    const auto one = [&](VF& param, VF grad, VF& mean, VF& square) {
        grad = grad * a.grad_scale;
        mean = mean * a.beta1 + grad * a.rest1;
        square = square * a.beta2 + grad * grad * a.rest2;
        param = param * a.decay - a.step_size * mean / (sqrt_of(square) * a.square_scale + a.eps);
    };
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        VF param = load_float(p + i), mean = load(m + i), square = load(v + i);
        one(param, load_float(g + i), mean, square);
        store_float(p + i, param), store(m + i, mean), store(v + i, square);
        if (shadow) store_float(shadow + i, param);
    }
    if (const int n = int(count - i)) {
        VF param = load_part(p + i, n), mean = load_part(m + i, n), square = load_part(v + i, n);
        one(param, load_part(g + i, n), mean, square);
        store_part(p + i, param, n), store_part(m + i, mean, n), store_part(v + i, square, n);
        if (shadow) store_part(shadow + i, param, n);
    }
}

template <class P>
void update_from(const AdamW& a, int64_t first, int64_t count) {
    if (a.grad_type == Type::f32) return update<P, float>(a, first, count);
    if (a.grad_type == Type::bf16) return update<P, bf16>(a, first, count);
    update<P, f16>(a, first, count);
}

void adamw(const AdamW& a, int64_t first, int64_t count) {
    if (a.param_type == Type::f32) return update_from<float>(a, first, count);
    if (a.param_type == Type::bf16) return update_from<bf16>(a, first, count);
    update_from<f16>(a, first, count);
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
    if (type == Type::f32) return squares((const float*)x + first, count);
    if (type == Type::bf16) return squares((const bf16*)x + first, count);
    return squares((const f16*)x + first, count);
}

}  // namespace

void adamw_kernels(Kernels& table) {
    table.adamw = adamw;
    table.sum_of_squares = sum_of_squares;
}

}  // namespace hasten
