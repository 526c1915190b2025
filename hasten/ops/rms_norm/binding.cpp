// The norms on torch tensors: buffers, and blocks of rows as items.
#include "../_cpu/binding.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "cpu.h"

namespace hasten {
namespace {

using at::ScalarType;
using at::Tensor;
using Optional = std::optional<Tensor>;

// Rows [N, K] of a tensor [..., K]; the parameters, float32 [K], ones and zeros where there are none.
struct Problem {
    Norm a{};
    Tensor x, multiplier, bias;

    Problem(const Tensor& x_, const Optional& multiplier_, const Optional& bias_, bool layer)
        : x(x_.contiguous()) {
        const auto floats = x.options().dtype(at::kFloat);
        a.K = x.size(-1);
        a.N = x.numel() / a.K;
        a.layer = layer;
        a.x = x.data_ptr();
        a.x_type = type_of(x);
        multiplier = multiplier_ ? multiplier_->to(at::kFloat).contiguous() : at::ones({a.K}, floats);
        a.multiplier = multiplier.data_ptr<float>();
        if (!layer) return;
        bias = bias_ ? bias_->to(at::kFloat).contiguous() : at::zeros({a.K}, floats);
        a.bias = bias.data_ptr<float>();
    }

    void run(void (*kernel)(const Norm&, int64_t, float*)) const {
        const int64_t items = (a.N + a.rows - 1) / a.rows, size = norm_scratch(a.K);
        Tensor scratch = at::empty({slots(items), size}, x.options().dtype(at::kFloat));
        float* base = scratch.data_ptr<float>();
        spread(items, [&](int64_t item, int64_t slot) { kernel(a, item, base + slot * size); });
    }
};

// y; then h if there is a residual; then, unless they are given, the mean if `layer` and 1 / std, [..., 1].
// `inner` and `middle`: the types in which the normalised value and the result are rounded on the way.
std::vector<Tensor> forward(const Tensor& x, const Optional& residual_, const Optional& multiplier,
                            const Optional& bias, const Optional& mean_, const Optional& rstd_, double eps,
                            bool layer, ScalarType inner, ScalarType middle, ScalarType out) {
    Problem problem(x, multiplier, bias, layer);
    Norm& a = problem.a;
    Tensor y = at::empty(x.sizes(), x.options().dtype(out)), residual, mean, rstd;
    std::vector<Tensor> outputs{y};
    a.h_type = a.x_type;
    if (residual_) {
        TORCH_CHECK(residual_->sizes() == x.sizes(), "hasten_cpu::norm: a residual of another shape");
        residual = residual_->contiguous();
        Tensor h = at::empty(x.sizes(),
                             x.options().dtype(c10::promoteTypes(x.scalar_type(), residual.scalar_type())));
        outputs.push_back(h);
        a.residual = residual.data_ptr(), a.residual_type = type_of(residual);
        a.h = h.data_ptr(), a.h_type = type_of(h);
    }
    a.given = rstd_.has_value();
    auto sizes = x.sizes().vec();
    sizes.back() = 1;
    const auto floats = x.options().dtype(at::kFloat);
    if (layer) mean = a.given ? mean_->contiguous() : at::empty(sizes, floats);
    rstd = a.given ? rstd_->contiguous() : at::empty(sizes, floats);
    if (layer) a.mean = mean.data_ptr<float>();
    a.rstd = rstd.data_ptr<float>();
    if (!a.given && layer) outputs.push_back(mean);
    if (!a.given) outputs.push_back(rstd);
    a.eps = float(eps);
    a.inner = type_of(inner), a.middle = type_of(middle), a.y_type = type_of(out);
    a.y = y.data_ptr();
    a.rows = std::max<int64_t>(1, 16384 / a.K);
    problem.run(level().kernels->norm_forward);
    return outputs;
}

// The gradient of h [..., K] plus dh, in the types `first` and `second` if given; then, if wanted, the
// float32 sums over rows of dy * n and, if `layer`, of dy.
std::vector<Tensor> backward(const Tensor& dy_, const Tensor& h, const Optional& mean_, const Tensor& rstd_,
                             const Optional& multiplier, const Optional& dh_, std::optional<ScalarType> first,
                             std::optional<ScalarType> second, bool sums) {
    Problem problem(h, multiplier, std::nullopt, mean_.has_value());
    Norm& a = problem.a;
    TORCH_CHECK(dy_.numel() == h.numel() && (!dh_ || dh_->numel() == h.numel()),
                "hasten_cpu::norm_backward: a gradient of another shape");
    const Tensor dy = dy_.contiguous(), rstd = rstd_.contiguous(), mean = mean_ ? mean_->contiguous() : rstd;
    Tensor dh, partial;
    std::vector<Tensor> outputs;
    a.dy = dy.data_ptr(), a.dy_type = type_of(dy);
    a.mean = mean.data_ptr<float>(), a.rstd = rstd.data_ptr<float>();
    if (dh_) {
        dh = dh_->contiguous();
        a.dh = dh.data_ptr(), a.dh_type = type_of(dh);
    }
    if (first) {
        outputs.push_back(at::empty(h.sizes(), h.options().dtype(*first)));
        a.dx = outputs.back().data_ptr(), a.dx_type = type_of(*first);
    }
    if (second) {
        outputs.push_back(at::empty(h.sizes(), h.options().dtype(*second)));
        a.dx2 = outputs.back().data_ptr(), a.dx2_type = type_of(*second);
    }
    a.rows = 32;
    const auto floats = h.options().dtype(at::kFloat);
    a.sums = sums;
    if (sums) {
        partial = at::empty({(a.N + a.rows - 1) / a.rows, 2, a.K}, floats);
        a.partial = partial.data_ptr<float>();
        outputs.push_back(at::empty({a.K}, floats));
        a.dmultiplier = outputs.back().data_ptr<float>();
        if (a.layer) {
            outputs.push_back(at::empty({a.K}, floats));
            a.dbias = outputs.back().data_ptr<float>();
        }
    }
    problem.run(level().kernels->norm_backward);
    if (sums)
        spread((a.K + NORM_COLUMNS - 1) / NORM_COLUMNS,
               [&](int64_t item, int64_t) { level().kernels->norm_sum(a, item); });
    return outputs;
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def(
        "norm(Tensor x, Tensor? residual, Tensor? multiplier, Tensor? bias, Tensor? mean, Tensor? rstd, "
        "float eps, bool layer, ScalarType inner, ScalarType middle, ScalarType out) -> Tensor[]");
    m.def(
        "norm_backward(Tensor dy, Tensor h, Tensor? mean, Tensor rstd, Tensor? multiplier, Tensor? dh, "
        "ScalarType? first, ScalarType? second, bool sums) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("norm", hasten::forward);
    m.impl("norm_backward", hasten::backward);
}
