// Attention on torch tensors: checks, buffers and the plan of tiles.
#include "../_cpu/binding.h"

#include <ATen/Functions.h>
#include <torch/library.h>

namespace hasten {
namespace {

using at::Tensor;
using Optional = std::optional<Tensor>;

// int32 [B or 1, Sq, 2]: the first visible key of each query and the one after the last.
Tensor bounds_of(const Tensor& q, const Tensor& k, const Optional& ranges, bool causal, int64_t window) {
    const int64_t B = q.size(0), Sq = q.size(2), Sk = k.size(2), offset = Sk - Sq;
    const bool by_batch = ranges && ranges->dim() == 2;
    const int64_t batch = ranges ? (by_batch ? B : ranges->size(0)) : 1;
    Tensor bounds = at::empty({batch, Sq, 2}, q.options().dtype(at::kInt));
    Tensor given;
    if (ranges) given = ranges->to(at::kLong).contiguous();
    int32_t* to = bounds.data_ptr<int32_t>();
    for (int64_t b = 0; b < batch; b++)
        for (int64_t i = 0; i < Sq; i++, to += 2) {
            int64_t first = 0, last = Sk;
            if (ranges) {
                const int64_t* range = given.data_ptr<int64_t>() + 2 * (by_batch ? b : b * Sq + i);
                first = std::max<int64_t>(first, range[0]);
                last = std::min<int64_t>(last, range[1]);
            }
            if (causal) last = std::min(last, i + offset + 1);
            if (window > 0) {
                first = std::max(first, i + offset - window + 1);
                last = std::min(last, i + offset + window);
            }
            to[0] = int32_t(std::min(first, Sk));
            to[1] = int32_t(std::max<int64_t>(last, 0));
        }
    return bounds;
}

// Up to so many rows of a KV head (queries times heads of its group) nothing is packed.
constexpr int64_t FEW_ROWS = 12;

struct Problem {
    Attention a{};
    Tensor q, k, v, bounds, bias, sinks, alibi;

    Problem(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Optional& ranges,
            const Optional& bias_, const Optional& sinks_, const Optional& alibi_, double scale, bool causal,
            int64_t window, double softcap) {
        auto dense = [](const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); };
        q = dense(q_), k = dense(k_), v = dense(v_);
        bounds = bounds_of(q, k, ranges, causal, window);
        a.type = type_of(q);
        a.bf16 = level().bf16 && a.type == Type::bf16;
        a.brgemm = a.bf16 ? usable_brgemm() : nullptr;
        a.B = q.size(0), a.Hq = q.size(1), a.Sq = q.size(2), a.D = q.size(3);
        a.Hkv = k.size(1), a.Sk = k.size(2), a.Dv = v.size(3);
        a.q = q.data_ptr(), a.q_b = q.stride(0), a.q_h = q.stride(1), a.q_s = q.stride(2);
        a.k = k.data_ptr(), a.k_b = k.stride(0), a.k_h = k.stride(1), a.k_s = k.stride(2);
        a.v = v.data_ptr(), a.v_b = v.stride(0), a.v_h = v.stride(1), a.v_s = v.stride(2);
        a.bounds = bounds.data_ptr<int32_t>(), a.bounds_b = bounds.size(0) > 1 ? bounds.stride(0) : 0;
        if (bias_) {
            bias = bias_->to(at::kFloat);
            if (bias.stride(-1) != 1) bias = bias.contiguous();
            a.bias = bias.data_ptr<float>();
            a.bias_b = bias.size(0) > 1 ? bias.stride(0) : 0;
            a.bias_h = bias.size(1) > 1 ? bias.stride(1) : 0;
            a.bias_q = bias.stride(2);
        }
        if (sinks_) sinks = sinks_->to(at::kFloat).contiguous(), a.sinks = sinks.data_ptr<float>();
        if (alibi_) alibi = alibi_->to(at::kFloat).contiguous(), a.alibi = alibi.data_ptr<float>();
        a.scale = float(scale), a.softcap = float(softcap);
    }

    // Rows and keys of a tile such that the scores of a tile and what goes with them stay in the second-level
    // cache.
    void plan(bool backward) {
        const int64_t group = a.Hq / a.Hkv, heads = a.B * a.Hkv;
        const int64_t folded = level().l2_bytes >= (1 << 20) ? 192 : 96;
        a.rows = std::max<int64_t>(2, folded / group / 2 * 2);
        a.rows = std::max<int64_t>(1, std::min(a.rows, a.Sq));
        // Measured on 2026-11-29 (Zen 5, 1 MB): 128 to 512 keys are within 3 % of each other at 512 tokens;
        // at 2,048 tokens the forward pass gains 7 % with 512 keys and the backward pass loses 40 %.
        a.cols = !backward && a.Sk >= 2048 ? 512 : 256;
        const int64_t threads = at::get_num_threads(), items = heads * ((a.Sq + a.rows - 1) / a.rows);
        a.parts = 1;
        if (backward)
            a.parts = std::min<int64_t>((a.Sk + 127) / 128,
                                        std::max<int64_t>(1, (4 * threads + heads - 1) / heads));
        else if (items < 2 * threads && threads > 1)
            a.parts = std::max<int64_t>(1, std::min(a.Sk / 256, (2 * threads + items - 1) / items));
    }
};

// A gradient in the layout of its tensor, as far as its rows are dense.
Tensor like(const Tensor& t) {
    Tensor made = at::empty_like(t);
    return made.stride(-1) == 1 ? made : at::empty(t.sizes(), t.options());
}

bool pack(Attention& a, bool backward) {
    std::atomic<bool> finite{true};
    spread(a.B * a.Hkv, [&](int64_t item, int64_t) {
        if (!level().kernels->attention_pack(a, backward, item)) finite = false;
    });
    return finite;
}

std::tuple<Tensor, Tensor, bool> forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Optional& ranges, const Optional& bias, const Optional& sinks,
                                         const Optional& alibi, double scale, bool causal, int64_t window,
                                         double softcap) {
    Problem problem(q, k, v, ranges, bias, sinks, alibi, scale, causal, window, softcap);
    Attention& a = problem.a;
    Tensor out = at::empty({a.B, a.Sq, a.Hq, a.Dv}, q.options());
    Tensor lse = at::empty({a.B, a.Hq, a.Sq}, q.options().dtype(at::kFloat));
    if (out.numel() == 0 && lse.numel() == 0) return {out, lse, true};
    a.out = out.data_ptr(), a.lse = lse.data_ptr<float>();
    problem.plan(false);
    const Kernels& kernels = *level().kernels;
    const AttentionSizes size = kernels.attention_sizes(a, false);
    const int64_t heads = a.B * a.Hkv, blocks = (a.Sq + a.rows - 1) / a.rows,
                  items = heads * blocks * a.parts;
    const auto ints = q.options().dtype(at::kInt);
    const bool few = a.Sq * (a.Hq / a.Hkv) <= FEW_ROWS;
    Tensor packed = at::empty({heads, few ? 0 : size.packed}, ints);
    Tensor partial = at::empty({size.partial}, ints.dtype(at::kFloat));
    Tensor scratch = at::empty({slots(items), size.scratch / 64 * 64 + 128}, ints.dtype(at::kByte));
    a.packed = few ? nullptr : (uint32_t*)packed.data_ptr(), a.packed_stride = size.packed;
    a.partial = partial.data_ptr<float>();
    if (!few && !pack(a, false)) return {out, lse, false};
    spread(items, [&](int64_t item, int64_t slot) {
        kernels.attention_forward(a, item, scratch.data_ptr<uint8_t>() + slot * scratch.stride(0));
    });
    if (a.parts > 1) spread(heads * blocks, [&](int64_t item, int64_t) { kernels.attention_merge(a, item); });
    return {out, lse, true};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, bool> backward(const Tensor& grad_, const Tensor& q,
                                                          const Tensor& k, const Tensor& v, const Tensor& out,
                                                          const Tensor& lse, const Optional& ranges,
                                                          const Optional& bias, const Optional& sinks,
                                                          const Optional& alibi, double scale, bool causal,
                                                          int64_t window, double softcap) {
    Problem problem(q, k, v, ranges, bias, sinks, alibi, scale, causal, window, softcap);
    Attention& a = problem.a;
    const Tensor grad = grad_.stride(-1) == 1 ? grad_ : grad_.contiguous(), dense_out = out.contiguous();
    Tensor dq = like(q), dk = like(k), dv = like(v), delta = at::empty_like(lse);
    if (q.numel() == 0 || k.numel() == 0 || v.numel() == 0)
        return {dq.zero_(), dk.zero_(), dv.zero_(), delta.zero_(), true};
    a.out = dense_out.data_ptr(), a.lse = lse.data_ptr<float>(), a.delta = delta.data_ptr<float>();
    a.grad = grad.data_ptr(), a.grad_b = grad.stride(0), a.grad_s = grad.stride(1), a.grad_h = grad.stride(2);
    a.dq = dq.data_ptr(), a.dq_b = dq.stride(0), a.dq_h = dq.stride(1), a.dq_s = dq.stride(2);
    a.dk = dk.data_ptr(), a.dk_b = dk.stride(0), a.dk_h = dk.stride(1), a.dk_s = dk.stride(2);
    a.dv = dv.data_ptr(), a.dv_b = dv.stride(0), a.dv_h = dv.stride(1), a.dv_s = dv.stride(2);
    problem.plan(true);
    const Kernels& kernels = *level().kernels;
    const AttentionSizes size = kernels.attention_sizes(a, true);
    const int64_t heads = a.B * a.Hkv, blocks = (a.Sq + a.rows - 1) / a.rows, items = heads * a.parts;
    const auto ints = q.options().dtype(at::kInt);
    Tensor packed = at::empty({heads, size.packed}, ints);
    Tensor dq_parts = at::empty({items, size.dq_part}, ints.dtype(at::kFloat));
    Tensor scratch = at::empty({slots(items), size.scratch / 64 * 64 + 128}, ints.dtype(at::kByte));
    a.packed = (uint32_t*)packed.data_ptr(), a.packed_stride = size.packed;
    a.dq_parts = dq_parts.data_ptr<float>();
    if (!pack(a, true)) return {dq, dk, dv, delta, false};
    spread(items, [&](int64_t item, int64_t slot) {
        kernels.attention_backward(a, item, scratch.data_ptr<uint8_t>() + slot * scratch.stride(0));
    });
    spread(heads * blocks, [&](int64_t item, int64_t) { kernels.attention_dq(a, item); });
    return {dq, dk, dv, delta, true};
}

}  // namespace
}  // namespace hasten

#define OPTIONS                                                                                          \
    "Tensor? ranges, Tensor? bias, Tensor? sinks, Tensor? alibi, float scale, bool causal, int window, " \
    "float softcap"

TORCH_LIBRARY_FRAGMENT(hasten_cpu, m) {
    m.def("attention(Tensor q, Tensor k, Tensor v, " OPTIONS ") -> (Tensor, Tensor, bool)");
    m.def("attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, " OPTIONS
          ") -> (Tensor, Tensor, Tensor, Tensor, bool)");
}

TORCH_LIBRARY_IMPL(hasten_cpu, CPU, m) {
    m.impl("attention", hasten::forward);
    m.impl("attention_backward", hasten::backward);
}
