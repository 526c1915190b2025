"""The body for plain attention where torch's own CPU kernel is the faster one: float32, and in float32 for
bfloat16 or float16 on a processor that does not multiply them natively.

The kernel knows neither key ranges nor shared KV heads nor bottom-right causal order. So every run of query
rows that sees one whole interval of keys, or a causal square, is one call on exactly these rows and keys,
with KV heads as its batch dimension and a stride of zero over the query heads that share one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hasten.ops.attention import blocked
from hasten.ops.attention.plan import Runs, runs

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def plan(q: Tensor, k: Tensor, v: Tensor, options: blocked.Options) -> Runs | None:
    """The calls to make; None where this body does not serve (`blocked` then does)."""
    extras = (options.bias, options.sinks, options.alibi)
    plain = all(x is None for x in extras) and options.softcap == 0 and q.shape[3] == v.shape[3]
    if q.device.type != "cpu" or q.dtype == torch.float64 or blocked.native(q) or not plain:
        return None
    if q.numel() == 0 or k.numel() == 0:
        return None
    # The kernel spreads NaN to rows that do not see it, and loses some.
    if not all(blocked.all_finite(x) for x in (q, k, v)):
        return None
    return runs(options.ranges, q.shape[0], q.shape[2], k.shape[2], options.causal, options.window)


def forward(q: Tensor, k: Tensor, v: Tensor, options: blocked.Options, calls: Runs) -> tuple[Tensor, Tensor]:
    """As `blocked.forward`."""
    batch, heads, queries, dim = q.shape
    out = q.new_zeros(batch, queries, heads, dim)
    q, k, v = (_single(t) for t in (q, k, v))
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float32)
    out_BHSD = out.transpose(1, 2)
    for b, q0, q1, k0, k1, causal in calls:
        q_run, k_run, v_run, out_run = _grouped(k.shape[1], b, (q0, q1), (k0, k1), q, k, v, out_BHSD)
        result, statistics = _forward(q_run, k_run, v_run, 0.0, causal, scale=options.scale)
        out_run.copy_(result)
        lse[b, :, q0:q1] = statistics.reshape(heads, q1 - q0)
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    options: blocked.Options,
    calls: Runs,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, as `blocked.backward`."""
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
    dtypes = k.dtype, v.dtype
    q, k, v = (_single(t) for t in (q, k, v))
    grad_BHSD, out_BHSD = _single(grad_out).transpose(1, 2), _single(out).transpose(1, 2)
    kv_heads = k.shape[1]
    for b, q0, q1, k0, k1, causal in calls:
        rows, keys = (q0, q1), (k0, k1)
        q_run, k_run, v_run, out_run = _grouped(kv_heads, b, rows, keys, q, k, v, out_BHSD)
        dq_run, _, _, grad_run = _grouped(kv_heads, b, rows, keys, dq, k, v, grad_BHSD)
        lse_run = lse[b, :, q0:q1].unflatten(0, (kv_heads, -1))
        grads = _backward(grad_run, q_run, k_run, v_run, out_run, lse_run, 0.0, causal, scale=options.scale)
        dq_run.copy_(grads[0])
        # Documents do not overlap, but a row of padding may share its keys with another run.
        dk[b, :, k0:k1] += grads[1].sum(dim=1)
        dv[b, :, k0:k1] += grads[2].sum(dim=1)
    return dq, dk.to(dtypes[0]), dv.to(dtypes[1])


def _single(x: Tensor) -> Tensor:
    """x in float32, the last dimension dense: the kernel reads it as if its stride were 1."""
    x = x.to(torch.float32)
    return x if x.stride(-1) == 1 else x.contiguous()


def _grouped(
    kv_heads: int,
    b: int,
    rows: tuple[int, int],
    keys: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views [Hkv, G, S, D] of batch row b of q, k, v and of the output or its gradient [B, Hq, Sq, D]."""
    q_run, o_run = (t[b, :, rows[0] : rows[1]].unflatten(0, (kv_heads, -1)) for t in (q, o))
    group = q_run.shape[1]
    k_run, v_run = (t[b, :, None, keys[0] : keys[1]].expand(-1, group, -1, -1) for t in (k, v))
    return q_run, k_run, v_run, o_run
