"""What a SwiGLU layer keeps for its backward pass, counted in bytes of distinct memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.linear import activation_linear, linear
from hasten.ops.norm_linear import norm_linear

BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 2, 37, 96, 4, 256
EPS = 1e-6
Layer = Callable[[Tensor, dict[str, Tensor]], Tensor]


def _parameters() -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k", "v", "o"), (WIDTH, WIDTH))
    shapes.update(gate=(HIDDEN, WIDTH), up=(HIDDEN, WIDTH), down=(WIDTH, HIDDEN))
    tensors = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    tensors.update(norm1=torch.rand(WIDTH) + 0.5, norm2=torch.rand(WIDTH) + 0.5)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = [t.view(BATCH, TOKENS, HEADS, -1).transpose(1, 2) for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads, is_causal=True)
    return out.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _eager(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    n = _eager_norm(x, p["norm1"])
    h = x + F.linear(_attention(*(F.linear(n, p[name]) for name in "qkv")), p["o"])
    n = _eager_norm(h, p["norm2"])
    return h + F.linear(F.silu(F.linear(n, p["gate"])) * F.linear(n, p["up"]), p["down"])


def _fused(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    q, k, v = norm_linear(x, [p["q"], p["k"], p["v"]], norm="rms", norm_weight=p["norm1"], eps=EPS)
    out = linear(_attention(q, k, v), p["o"])
    h, gate, up = norm_linear(
        x, [p["gate"], p["up"]], norm="rms", norm_weight=p["norm2"], eps=EPS, residual=out
    )
    return h + activation_linear(gate, up, "silu", p["down"])


def _saved_bytes(layer: Layer, dtype: torch.dtype) -> tuple[int, Tensor, list[Tensor]]:
    """Bytes of distinct saved storages without parameters and their casts; the output; every gradient."""
    torch.manual_seed(0)
    p = _parameters()
    x = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    storages: dict[int, int] = {}
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        # Activations have BATCH * TOKENS rows, parameters and their casts and transposes have not.
        if tensor.numel() % (BATCH * TOKENS) == 0:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype != torch.float32),
    ):
        y = layer(x, p)
    gradients = torch.autograd.grad(y.float().square().sum(), [x, *p.values()])
    return sum(storages.values()), y.detach(), list(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pointwise_results_are_not_stored(dtype: torch.dtype) -> None:
    eager_bytes, expected, expected_gradients = _saved_bytes(_eager, dtype)
    fused_bytes, y, gradients = _saved_bytes(_fused, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    for value, other in zip([y, *gradients], [expected, *expected_gradients], strict=True):
        assert value.dtype == other.dtype
        torch.testing.assert_close(value, other, rtol=0, atol=tolerance * other.abs().max().item())

    rows, narrow = BATCH * TOKENS, dtype.itemsize
    residual_stream = 2 * (WIDTH * 4 + 4)  # x and h in float32, and a statistic for each
    attention = 4 * WIDTH * narrow + HEADS * 4  # q, k, v, the result, the log-sum-exp
    mlp = 2 * HIDDEN * narrow  # gate and up
    allowed_rest = 64  # the generator state of scaled_dot_product_attention
    least = rows * (residual_stream + attention + mlp)
    assert least <= fused_bytes <= least + allowed_rest
    assert fused_bytes <= 0.61 * eager_bytes, f"{fused_bytes} of {eager_bytes} bytes"
