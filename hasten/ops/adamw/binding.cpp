// AdamW over all parameters of a group and the squared norm of all gradients: fixed pieces, spread at once.
#include "../_cpu/binding.h"

#include <torch/library.h>

#include <cmath>
#include <vector>

namespace hasten {
namespace {

using at::Tensor;

constexpr int64_t PIECE = 1 << 14;

struct Piece {
    int64_t tensor, first, count;
};

std::vector<Piece> pieces_of(at::TensorList tensors) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < tensors.size(); i++)
        for (int64_t first = 0, n = tensors[i].numel(); first < n; first += PIECE)
            pieces.push_back({int64_t(i), first, std::min(PIECE, n - first)});
    return pieces;
}

bool same_layout(const Tensor& a, const Tensor& b) {
    return a.sizes() == b.sizes() && (a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous()));
}

void adamw(at::TensorList params, at::TensorList grads, at::TensorList exp_avg, at::TensorList exp_avg_sq,
           at::TensorList steps, at::TensorList shadows, double lr, double beta1, double beta2, double eps,
           double weight_decay, double grad_scale) {
    std::vector<AdamW> work(params.size());
    for (size_t i = 0; i < params.size(); i++) {
        const Tensor &p = params[i], &g = grads[i], &m = exp_avg[i], &v = exp_avg_sq[i];
        TORCH_CHECK(
            p.is_non_overlapping_and_dense() && same_layout(p, g) && same_layout(p, m) && same_layout(p, v),
            "adamw_ takes dense tensors of one layout");
        float* step = steps[i].data_ptr<float>();
        *step += 1;
        const double correction = 1 - std::pow(beta1, double(*step));
        AdamW& a = work[i];
        a.param_type = type_of(p), a.grad_type = type_of(g);
        a.param = p.data_ptr(), a.grad = g.data_ptr();
        a.exp_avg = m.data_ptr<float>(), a.exp_avg_sq = v.data_ptr<float>();
        if (i < shadows.size() && shadows[i].numel()) {
            TORCH_CHECK(shadows[i].scalar_type() == at::kBFloat16 && same_layout(p, shadows[i]),
                        "adamw_: a shadow is a bfloat16 copy of its param");
            a.shadow = shadows[i].data_ptr();
        }
        a.decay = float(1 - lr * weight_decay), a.step_size = float(lr / correction);
        a.square_scale = float(1 / std::sqrt(1 - std::pow(beta2, double(*step))));
        a.beta1 = float(beta1), a.rest1 = float(1 - beta1);
        a.beta2 = float(beta2), a.rest2 = float(1 - beta2);
        a.eps = float(eps), a.grad_scale = float(grad_scale);
    }
    const std::vector<Piece> pieces = pieces_of(params);
    const Kernels& kernels = *level().kernels;
    spread(int64_t(pieces.size()), [&](int64_t item, int64_t) {
        const Piece& piece = pieces[item];
        kernels.adamw(work[piece.tensor], piece.first, piece.count);
    });
}

// The sum of squares of all elements; pieces are added in order, so the threads do not matter.
double sum_of_squares(at::TensorList tensors) {
    for (const Tensor& t : tensors)
        TORCH_CHECK(t.is_non_overlapping_and_dense(), "sum_of_squares takes dense tensors");
    const std::vector<Piece> pieces = pieces_of(tensors);
    std::vector<double> part(pieces.size());
    const Kernels& kernels = *level().kernels;
    spread(int64_t(pieces.size()), [&](int64_t item, int64_t) {
        const Piece& piece = pieces[item];
        const Tensor& t = tensors[piece.tensor];
        part[item] = kernels.sum_of_squares(type_of(t), t.data_ptr(), piece.first, piece.count);
    });
    double total = 0;
    for (double x : part) total += x;
    return total;
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def(
        "adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
        "Tensor(d!)[] steps, Tensor(e!)[] shadows, float lr, float beta1, float beta2, float eps, "
        "float weight_decay, float grad_scale) -> ()");
    m.def("sum_of_squares(Tensor[] tensors) -> float");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("adamw_", hasten::adamw);
    m.impl("sum_of_squares", hasten::sum_of_squares);
}
