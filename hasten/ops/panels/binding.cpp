// Products with panels on torch tensors: for tests, benchmarks and whoever has no program.
#include "../_cpu/binding.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu.h"

namespace hasten {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// A matrix in a format: [kind, bits, group, zero].
Matrix matrix_of(const Tensor& data, at::IntArrayRef format, double unit, int64_t N, int64_t K) {
    TORCH_CHECK(format.size() == 4, "panels: a format is kind, bits, group and zero, got ", format);
    Matrix m{};
    m.data = data.const_data_ptr<uint8_t>();
    m.format = Panel(format[0]);
    m.bits = int32_t(format[1]), m.group = int32_t(format[2]), m.zero = int32_t(format[3]);
    m.unit = float(unit), m.N = N, m.K = K;
    m.panel_bytes = panel_bytes(m);
    TORCH_CHECK(m.panel_bytes > 0 || K == 0, "panels: no layout for format ", format);
    TORCH_CHECK(data.is_contiguous() && int64_t(data.nbytes()) == panels_of(m) * m.panel_bytes,
                "panels: a matrix [", N, ", ", K, "] in format ", format, " takes ",
                panels_of(m) * m.panel_bytes, " contiguous bytes, got ", data.sizes());
    return m;
}

Tensor floats(const Tensor& t, at::IntArrayRef sizes, const char* name) {
    TORCH_CHECK(t.sizes() == sizes, "panel_linear: ", name, " is ", t.sizes(), ", it must be ", sizes);
    return t.to(at::kFloat).contiguous();
}

// Contiguous shares of the panels, one for each thread.
template <class F>
void shares(int64_t count, const F& f) {
    const int64_t parts = slots(count);
    spread(parts, [&](int64_t item, int64_t slot) {
        const int64_t first = count * item / parts;
        f(first, count * (item + 1) / parts - first, slot);
    });
}

// scale * (kind(x W^T + b) * (x Up^T + b_up)) + residual; x [..., K], result fp32 [..., N].
Tensor linear(const Tensor& x_, const Tensor& data, at::IntArrayRef format, double unit, int64_t N, int64_t K,
              const Optional& bias, const Optional& up, at::IntArrayRef up_format, double up_unit,
              const Optional& up_bias, int64_t kind, const Optional& residual, double scale) {
    TORCH_CHECK(x_.dim() > 0 && x_.size(-1) == K, "panel_linear: x is ", x_.sizes(), ", K is ", K);
    const Tensor x = x_.to(at::kFloat).reshape({-1, K}).contiguous();
    auto sizes = x_.sizes().vec();
    sizes.back() = N;
    Tensor y = at::empty(sizes, x.options());
    Tensor bias_, up_bias_, residual_;
    Matrix factor{};
    PanelProduct p{};
    p.matrix = matrix_of(data, format, unit, N, K);
    if (bias) bias_ = floats(*bias, {N}, "bias"), p.matrix.bias = bias_.const_data_ptr<float>();
    if (up) {
        factor = matrix_of(*up, up_format, up_unit, N, K);
        TORCH_CHECK(factor.format == p.matrix.format, "panel_linear: formats ", format, " and ", up_format,
                    " read x in different forms");
        if (up_bias)
            up_bias_ = floats(*up_bias, {N}, "up_bias"), factor.bias = up_bias_.const_data_ptr<float>();
        p.up = &factor;
    }
    if (residual) {
        residual_ = floats(*residual, sizes, "residual");
        p.residual = residual_.const_data_ptr<float>(), p.residual_row = N;
    }
    p.kind = int32_t(kind), p.scale = float(scale);
    p.M = x.size(0), p.x = x.const_data_ptr<float>(), p.x_row = K;
    p.y = y.data_ptr<float>(), p.y_row = N;
    p.bf16 = level().bf16, p.vnni = level().vnni, p.brgemm = p.bf16 ? usable_brgemm() : nullptr;
    if (y.numel() == 0) return y;
    const Kernels& kernels = *level().kernels;
    const auto bytes = x.options().dtype(at::kByte);
    Tensor prepared = at::empty({kernels.panel_prepared_bytes(p)}, bytes);
    p.prepared = prepared.data_ptr();
    const int64_t panels = panels_of(p.matrix);
    Tensor scratch = at::empty({slots(panels), kernels.panel_scratch_bytes(p)}, bytes);
    shares(p.M >= 64 ? p.M : 1, [&](int64_t first, int64_t count, int64_t) {
        p.M >= 64 ? kernels.panel_prepare(p, first, count) : kernels.panel_prepare(p, 0, p.M);
    });
    shares(panels, [&](int64_t first, int64_t count, int64_t slot) {
        kernels.panel_product(p, first, count, (uint8_t*)scratch.data_ptr() + slot * scratch.size(1));
    });
    return y;
}

// Rows `ids` (int64) of the matrix, fp32 [..., K].
Tensor rows(const Tensor& data, at::IntArrayRef format, double unit, int64_t N, int64_t K,
            const Tensor& ids_) {
    const Matrix m = matrix_of(data, format, unit, N, K);
    const Tensor ids = ids_.to(at::kLong).contiguous();
    auto sizes = ids.sizes().vec();
    sizes.push_back(K);
    Tensor out = at::empty(sizes, data.options().dtype(at::kFloat));
    const int64_t* id = ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < ids.numel(); i++)
        TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < N, "panel_rows: row ", id[i], " is outside [0, ", N, ")");
    const Kernels& kernels = *level().kernels;
    float* to = out.data_ptr<float>();
    if (out.numel())
        shares(ids.numel(), [&](int64_t first, int64_t count, int64_t) {
            for (int64_t i = first; i < first + count; i++) kernels.panel_row(m, id[i], to + i * K);
        });
    return out;
}

}  // namespace
}  // namespace hasten

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def(
        "panel_linear(Tensor x, Tensor data, int[] format, float unit, int N, int K, Tensor? bias=None, "
        "Tensor? up=None, int[] up_format=[], float up_unit=1, Tensor? up_bias=None, int kind=-1, "
        "Tensor? residual=None, float scale=1) -> Tensor");
    m.def("panel_rows(Tensor data, int[] format, float unit, int N, int K, Tensor ids) -> Tensor");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("panel_linear", hasten::linear);
    m.impl("panel_rows", hasten::rows);
}
