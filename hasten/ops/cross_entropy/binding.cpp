// Cross-entropy over a chunk of logits, on torch tensors.
#include "../_cpu/binding.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace hasten {
namespace {

using at::Tensor;

void cross_entropy(const Tensor& z, const Tensor& labels, const Tensor& w, double scale,
                   double label_smoothing, double z_loss, double logit_scale, double softcap, bool gradient,
                   const Tensor& loss, const Tensor& z_sum, const std::optional<Tensor>& dbias) {
    CrossEntropy a{};
    a.type = type_of(z);
    a.rows = z.size(0), a.V = z.size(1);
    TORCH_CHECK(z.is_contiguous() && labels.is_contiguous() && w.is_contiguous() && loss.is_contiguous() &&
                    z_sum.is_contiguous(),
                "cross_entropy_ takes contiguous tensors");
    TORCH_CHECK(
        labels.numel() == a.rows && w.numel() == a.rows && loss.numel() == a.rows && z_sum.numel() == a.rows,
        "cross_entropy_ takes one label, weight, loss and z_sum for each of ", a.rows, " rows");
    if (a.rows == 0 || a.V == 0) return;
    a.z = z.data_ptr();
    a.labels = labels.data_ptr<int64_t>(), a.w = w.data_ptr<float>();
    a.loss = loss.data_ptr<float>(), a.z_sum = z_sum.data_ptr<float>();
    a.scale = float(scale), a.label_smoothing = float(label_smoothing), a.z_loss = float(z_loss);
    a.logit_scale = float(logit_scale), a.softcap = float(softcap), a.gradient = gradient;
    for (int64_t r = 0; r < a.rows; r++)
        TORCH_CHECK_INDEX(a.labels[r] >= 0 && a.labels[r] < a.V, "label ", a.labels[r], " of ", a.V);
    const Kernels& kernels = *level().kernels;
    a.item_rows = std::max<int64_t>(1, 16384 / a.V);
    const int64_t columns = kernels.cross_entropy_columns, groups = (a.V + columns - 1) / columns;
    const int64_t items = (a.rows + a.item_rows - 1) / a.item_rows;
    const Tensor scratch = at::empty({slots(items), groups * (columns + 1)}, loss.options());
    spread(items, [&](int64_t item, int64_t slot) {
        kernels.cross_entropy(a, item, scratch.data_ptr<float>() + slot * scratch.size(1));
    });
    if (!dbias || !gradient) return;
    TORCH_CHECK(dbias->is_contiguous() && dbias->numel() == a.V, "cross_entropy_: dbias needs [", a.V, "]");
    a.dbias = dbias->data_ptr<float>();
    spread(groups, [&](int64_t item, int64_t) { kernels.cross_entropy_bias(a, item); });
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def(
        "cross_entropy_(Tensor(a!) z, Tensor labels, Tensor w, float scale, float label_smoothing, "
        "float z_loss, float logit_scale, float softcap, bool gradient, Tensor(b!) loss, Tensor(c!) z_sum, "
        "Tensor(d!)? dbias) -> ()");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("cross_entropy_", hasten::cross_entropy);
}
