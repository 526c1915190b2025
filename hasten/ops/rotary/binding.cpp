// Rotary position embedding on torch tensors: strides, and blocks of positions as items.
#include "../_cpu/binding.h"

#include <ATen/Functions.h>
#include <torch/library.h>

#include "cpu.h"

namespace hasten {
namespace {

using at::Tensor;

// `out` [B, H, S, D] is written: x [B, H, S, D] turned by cos and sin [(B or 1,) S, R], or by the transpose.
void rotary(const Tensor& x_, const Tensor& cos_, const Tensor& sin_, bool interleaved, bool transposed,
            Tensor out) {
    auto dense = [](const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); };
    const Tensor x = dense(x_), cos = dense(cos_), sin = dense(sin_);
    TORCH_CHECK(out.sizes() == x.sizes() && out.stride(-1) == 1, "hasten_cpu::rotary: out does not fit");
    Rotary a{};
    a.B = x.size(0), a.H = x.size(1), a.S = x.size(2), a.D = x.size(3), a.R = cos.size(-1);
    a.interleaved = interleaved, a.transposed = transposed;
    a.type = type_of(x), a.table_type = type_of(cos), a.out_type = type_of(out);
    a.x = x.data_ptr(), a.cos = cos.data_ptr(), a.sin = sin.data_ptr(), a.out = out.data_ptr();
    a.x_b = x.stride(0), a.x_h = x.stride(1), a.x_s = x.stride(2);
    a.out_b = out.stride(0), a.out_h = out.stride(1), a.out_s = out.stride(2);
    a.cos_b = cos.dim() == 3 && cos.size(0) > 1 ? cos.stride(0) : 0, a.cos_s = cos.stride(-2);
    a.sin_b = sin.dim() == 3 && sin.size(0) > 1 ? sin.stride(0) : 0, a.sin_s = sin.stride(-2);
    a.positions = std::max<int64_t>(1, 16384 / (a.H * a.D));
    const int64_t items = a.B * ((a.S + a.positions - 1) / a.positions), size = 3 * a.R;
    Tensor scratch = at::empty({slots(items), size}, x.options().dtype(at::kFloat));
    float* base = scratch.data_ptr<float>();
    spread(items, [&](int64_t item, int64_t slot) { level().kernels->rotary(a, item, base + slot * size); });
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def(
        "rotary(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool transposed, Tensor(a!) out) -> ()");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("rotary", hasten::rotary);
}
