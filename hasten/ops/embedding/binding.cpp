// The gradient of an embedding's table, on torch tensors.
#include "../_cpu/binding.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <numeric>
#include <vector>

namespace hasten {
namespace {

using at::Tensor;

// grad [T, H], ids [T] int64 -> [rows, H] in `dtype`; the rows of one id are added in the order of the
// tokens.
Tensor embedding_backward(const Tensor& grad_, const Tensor& ids_, int64_t rows, at::ScalarType dtype,
                          int64_t padding_idx, double scale) {
    const Tensor grad = grad_.contiguous(), ids = ids_.contiguous();
    const int64_t tokens = ids.numel(), H = grad.size(1);
    TORCH_CHECK(grad.size(0) == tokens, "embedding_backward: ", grad.size(0), " rows for ", tokens, " ids");
    Tensor dweight = at::empty({rows, H}, grad.options().dtype(dtype));
    if (dweight.numel() == 0) return dweight;
    const int64_t* id = ids.data_ptr<int64_t>();
    std::vector<int64_t> places(tokens), sorted(tokens);
    std::iota(places.begin(), places.end(), 0);
    std::stable_sort(places.begin(), places.end(), [&](int64_t a, int64_t b) { return id[a] < id[b]; });
    for (int64_t t = 0; t < tokens; t++) sorted[t] = id[places[t]];
    TORCH_CHECK_INDEX(tokens == 0 || (sorted.front() >= 0 && sorted.back() < rows),
                      "embedding_backward: an id is outside [0, ", rows, ")");
    EmbeddingGradient a{};
    a.type = type_of(dweight), a.grad_type = type_of(grad);
    a.grad = grad.data_ptr(), a.dweight = dweight.data_ptr();
    a.ids = sorted.data(), a.places = places.data();
    a.tokens = tokens, a.rows = rows, a.H = H, a.padding_idx = padding_idx, a.scale = float(scale);
    a.item_rows = std::max<int64_t>(1, (1 << 16) / H);
    const Kernels& kernels = *level().kernels;
    spread((rows + a.item_rows - 1) / a.item_rows,
           [&](int64_t item, int64_t) { kernels.embedding_backward(a, item); });
    return dweight;
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def(
        "embedding_backward(Tensor grad, Tensor ids, int rows, ScalarType dtype, int padding_idx, float "
        "scale) "
        "-> Tensor");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("embedding_backward", hasten::embedding_backward);
}
