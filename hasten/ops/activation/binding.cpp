// Activations on torch tensors: rows with strides where a tensor is not dense, one long row where all are.
#include "../_cpu/binding.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "cpu.h"

namespace hasten {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// The stride of rows [N, K] of a tensor [..., K], or -1 if one stride does not reach all.
int64_t row_stride(const Tensor& t) {
    if (t.dim() == 0 || t.stride(-1) != 1) return -1;
    int64_t stride = 0, rows = 1;  // of the rows seen so far, from the last dim to the first
    for (int64_t dim = t.dim() - 2; dim >= 0; dim--) {
        if (t.size(dim) == 1) continue;
        if (rows == 1)
            stride = t.stride(dim);
        else if (t.stride(dim) != stride * rows)
            return -1;
        rows *= t.size(dim);
    }
    return stride;
}

struct Problem {
    Activation a{};
    std::vector<Tensor> kept;  // copies of what has no rows
    bool dense;

    Problem(int64_t kind, const Tensor& x, std::initializer_list<const Tensor*> all) {
        a.kind = Kind(kind);
        a.type = type_of(x);
        dense = true;
        for (const Tensor* t : all) {
            TORCH_CHECK(t->sizes() == x.sizes() && t->scalar_type() == x.scalar_type(),
                        "hasten_cpu::activation: tensors of different shapes or types");
            dense = dense && t->is_contiguous();
        }
        a.K = dense ? x.numel() : x.size(-1);
        a.N = x.numel() / a.K;
        a.cols = std::min<int64_t>(a.K, 8192);
        a.rows = std::max<int64_t>(1, 8192 / a.K);
    }

    void place(const Tensor& t, const void*& p, int64_t& stride) {
        stride = dense ? a.K : row_stride(t);
        const bool copy = stride < 0;
        if (copy) kept.push_back(t.contiguous()), stride = a.K;
        p = copy ? kept.back().data_ptr() : t.data_ptr();
    }

    void run(void (*kernel)(const Activation&, int64_t)) const {
        const int64_t down = (a.N + a.rows - 1) / a.rows, across = (a.K + a.cols - 1) / a.cols;
        spread(down * across, [&](int64_t item, int64_t) { kernel(a, item); });
    }
};

// kind(x) [* up], dense; over x itself if `own`, which must then be dense.
Tensor forward(const Tensor& x, const Optional& up, int64_t kind, bool own) {
    Problem problem(kind, x, {&x, up ? &*up : &x});
    Activation& a = problem.a;
    problem.place(x, a.x, a.x_n);
    if (up) problem.place(*up, a.up, a.up_n);
    Tensor y = own && x.is_contiguous() ? x : at::empty(x.sizes(), x.options());
    a.y = y.data_ptr();
    problem.run(up ? level().kernels->gated_activation : level().kernels->activation);
    return y;
}

// dx; or dx, dup and, if `rebuild`, kind(x) * up. With `own` one of them lies over dy, if that is dense.
std::vector<Tensor> backward(const Tensor& dy, const Tensor& x, const Optional& up, int64_t kind,
                             bool rebuild, bool own) {
    Problem problem(kind, x, {&x, &dy, up ? &*up : &x});
    Activation& a = problem.a;
    problem.place(x, a.x, a.x_n);
    problem.place(dy, a.dy, a.dy_n);
    const bool over = own && dy.is_contiguous();
    std::vector<Tensor> outputs{over && !up ? dy : at::empty(x.sizes(), x.options())};
    a.dx = outputs[0].data_ptr();
    if (up) {
        problem.place(*up, a.up, a.up_n);
        outputs.push_back(over ? dy : at::empty(x.sizes(), x.options()));
        a.dup = outputs[1].data_ptr();
        if (rebuild) {
            outputs.push_back(at::empty(x.sizes(), x.options()));
            a.y = outputs[2].data_ptr();
        }
    }
    problem.run(up ? level().kernels->gated_activation_backward : level().kernels->activation_backward);
    return outputs;
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def("activation(Tensor x, Tensor? up, int kind, bool own) -> Tensor");
    m.def(
        "activation_backward(Tensor dy, Tensor x, Tensor? up, int kind, bool rebuild, bool own) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("activation", hasten::forward);
    m.impl("activation_backward", hasten::backward);
}
