"""Cases of attention: shapes of real models and odd ones, each option alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.attention import attention
from hasten.ops.attention import reference as meaning
from hasten.ops.attention.plan import visible_intervals
from hasten.ops.cases import Case, Inputs

Extras = Callable[[torch.Generator, torch.dtype], dict[str, Any]]


def reference(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The meaning, with a log-sum-exp that carries no gradient, as the operator's."""
    out, lse = meaning.attention(*args, **kwargs)
    return out, lse.detach()


def plain_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """As in a model's code: repeated KV heads, a dense mask, scaled_dot_product_attention where it can."""
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    fused = not (softcap or sinks is not None)
    if fused and causal and offset == 0 and ranges is None and bias is None and alibi is None and not window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)
    position = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    key = torch.arange(k.shape[2], device=q.device)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    visible = meaning.visible_keys(q.new_empty(shape), ranges, bias, position, key, causal, window)
    mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
    mask = mask.masked_fill(~visible, torch.finfo(q.dtype).min)
    if bias is not None and bias.dtype != torch.bool:
        mask = mask + bias
    if alibi is not None:
        mask = mask + alibi.to(q.dtype)[:, None, None] * (key - position).to(q.dtype)
    if fused:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    p = torch.softmax(scores, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return (p[..., : k.shape[2]] @ v).transpose(1, 2)


def case(
    name: str,
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int],
    *,
    extras: Extras | None = None,
    grads: tuple[int | str, ...] = (0, 1, 2),
    layout: str = "projected",
    benchmark: bool = False,
    empty_rows: bool = False,
    **options: Any,
) -> Case:
    """One case; `extras` draws the tensors among the options; a projection gives [B, S, H, D] in memory."""

    def tensor(generator: torch.Generator, dtype: torch.dtype, h: int, s: int, d: int) -> Tensor:
        if layout == "contiguous":
            return torch.randn(batch, h, s, d, generator=generator).to(dtype)
        if layout == "strided":
            return torch.randn(batch, h, d, 2 * s, generator=generator).to(dtype)[..., ::2].transpose(2, 3)
        return torch.randn(batch, s, h, d, generator=generator).to(dtype).transpose(1, 2)

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        q = tensor(generator, dtype, heads[0], lengths[0], dims[0])
        k = tensor(generator, dtype, heads[1], lengths[1], dims[0])
        v = tensor(generator, dtype, heads[1], lengths[1], dims[1])
        return (q, k, v), {**options, **(extras(generator, dtype) if extras else {})}

    def flops() -> float:
        seen = visible_intervals(None, *lengths, options.get("causal", False), options.get("window", 0))
        pairs = float((seen[..., 1] - seen[..., 0]).sum()) * batch * heads[0]
        return 2.0 * pairs * (dims[0] + dims[1])

    # Plain torch spreads a row without a key over all keys, so there its error says nothing.
    equivalent = None if empty_rows else plain_torch
    return Case(
        "attention", name, make, attention, reference, equivalent, grads, flops=flops, benchmark=benchmark
    )


def padding(*pairs: tuple[int, int]) -> Extras:
    """Key ranges [start, end) for each batch row."""
    return lambda generator, dtype: {"ranges": torch.tensor(pairs, dtype=torch.int32)}


def documents(*lengths: int) -> Extras:
    """Key ranges for documents packed into one row."""
    edges = torch.tensor((0, *lengths)).cumsum(0)
    pair = torch.stack((edges[:-1], edges[1:]), dim=-1).to(torch.int32)
    return lambda generator, dtype: {"ranges": pair.repeat_interleave(torch.tensor(lengths), dim=0)[None]}


def _sinks_and_alibi(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {"sinks": torch.randn(4, generator=generator), "alibi": torch.rand(4, generator=generator)}


def _float_bias(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    return {"bias": torch.randn(1, 4, 33, 40, generator=generator).to(dtype)}


def _bool_bias(generator: torch.Generator, dtype: torch.dtype) -> dict[str, Any]:
    bias = torch.rand(2, 1, 33, 40, generator=generator) < 0.5
    bias[:, :, 7] = False
    return {"bias": bias}


CASES = [
    case("causal-63", 2, (9, 3), (63, 63), (64, 64), causal=True),
    case("causal-513", 2, (3, 1), (513, 513), (32, 32), causal=True),
    case("full-511-contiguous", 1, (4, 4), (511, 511), (16, 16), layout="contiguous"),
    case("one-token", 2, (8, 2), (1, 1), (64, 64), causal=True),
    case("decode-4109", 1, (4, 2), (1, 4096 + 13), (32, 32), causal=True),
    case("chunk-on-cache", 2, (8, 1), (3, 10), (32, 32), causal=True),
    case("more-queries-than-keys", 1, (4, 2), (10, 3), (16, 16), causal=True, empty_rows=True),
    case("strided", 2, (4, 2), (63, 63), (24, 24), causal=True, layout="strided"),
    case("value-dim-and-scale", 1, (4, 2), (33, 40), (48, 80), scale=0.3),
    case("empty-batch", 0, (4, 2), (5, 5), (16, 16), causal=True),
    case("no-queries", 2, (4, 2), (0, 5), (16, 16)),
    case("no-keys", 2, (4, 2), (5, 0), (16, 16), empty_rows=True),
    case("window-causal", 2, (4, 2), (150, 150), (32, 32), causal=True, window=16),
    case("window-both-ways", 1, (4, 2), (150, 150), (32, 32), window=16),
    case("softcap", 2, (4, 2), (70, 70), (32, 32), causal=True, softcap=3.0),
    case("softcap-window", 2, (4, 2), (70, 90), (32, 32), causal=True, softcap=3.0, window=20),
    case(
        "sinks-alibi", 2, (4, 2), (70, 70), (32, 32),
        extras=_sinks_and_alibi, grads=(0, 1, 2, "sinks"), causal=True,
    ),
    case("bias-float", 2, (4, 2), (33, 40), (32, 32), extras=_float_bias, grads=(0, 1, 2, "bias")),
    case("bias-bool", 2, (4, 2), (33, 40), (32, 32), extras=_bool_bias, empty_rows=True),
    case(
        "padding-left-right", 2, (4, 2), (65, 65), (32, 32),
        extras=padding((13, 65), (0, 50)), causal=True, empty_rows=True,
    ),
    case("documents", 1, (4, 2), (300, 300), (32, 32), extras=documents(7, 150, 1, 142), causal=True),
    case("smollm2-512", 2, (9, 3), (512, 512), (64, 64), causal=True, benchmark=True),
    case("smollm2-2048", 1, (9, 3), (2048, 2048), (64, 64), causal=True, benchmark=True),
    case("llama3-1024", 1, (32, 8), (1024, 1024), (128, 128), causal=True, benchmark=True),
    case("bert-512", 2, (12, 12), (512, 512), (64, 64), benchmark=True),
    case("gemma3-window-2048", 1, (4, 1), (2048, 2048), (256, 256), causal=True, window=512, benchmark=True),
]  # fmt: skip
