"""The rules that come with hasten, as one ordered table.

Level 0 unifies spellings that need more than one node; level 1 makes operators. What works inside a layer or
across layers has a varying number of branches (three projections, two, one), so it is a pass over the
operators of level 1: see `hasten/graph/layer_passes.py`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hasten.graph.attention_rules import attentions
from hasten.graph.nodes import aten, shape_of
from hasten.graph.rotary_rules import rotaries
from hasten.graph.rules import Context, Rule

hasten_ops = torch.ops.hasten


def _rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


# --- level 0: spelling --------------------------------------------------------------------------------------


def _gelu_tanh_power(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_tanh_product(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def _gelu_tanh_factored(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))


def _gelu_erf(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _silu_product(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _spelling() -> Iterator[Rule]:
    def examples() -> Sequence[torch.Tensor]:
        return [_rand(2, 3, 8)]

    tanh_forms = (_gelu_tanh_power, _gelu_tanh_product, _gelu_tanh_factored)
    for pattern in tanh_forms:
        yield Rule(
            "spelling.gelu_tanh", pattern, lambda x: aten.gelu.default(x, approximate="tanh"), examples, 0,
            "the tanh approximation of GELU (Hendrycks & Gimpel 2016), multiplied out",
        )  # fmt: skip
    yield Rule(
        "spelling.gelu",
        _gelu_erf,
        lambda x: aten.gelu.default(x),
        examples,
        0,
        "GELU by its definition with erf",
    )
    yield Rule(
        "spelling.silu", _silu_product, lambda x: aten.silu.default(x), examples, 0, "SiLU(x) = x sigmoid(x)"
    )


# --- level 1: norms -----------------------------------------------------------------------------------------


def _rms_core(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def _rms_round_first(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * _rms_core(x, eps).to(x.dtype)


def _rms_round_last(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (weight * _rms_core(x, eps)).to(x.dtype)


def _rms_wide_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (weight.to(torch.float32) * _rms_core(x, eps)).to(x.dtype)


def _rms_offset(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (_rms_core(x, eps) * (1.0 + weight.float())).type_as(x)


def _rms_plain(x: torch.Tensor, eps: float) -> torch.Tensor:
    return _rms_core(x, eps).to(x.dtype)


def _rms_narrow(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """T5: statistics in fp32, the product in the input's dtype."""
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return weight * (x * torch.rsqrt(variance + eps)).to(x.dtype)


def _layer_core(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (wide - mean) * torch.rsqrt(variance + eps)


def _layer_written_out(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (weight.to(torch.float32) * _layer_core(x, eps)).to(x.dtype)


def _layer_written_out_bias(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    return (weight.to(torch.float32) * _layer_core(x, eps) + bias.to(torch.float32)).to(x.dtype)


def _rms_replacement(offset: float, round_first: bool) -> Callable[..., Any]:
    def replacement(x: Any, eps: float, context: Context, weight: Any = None) -> Any:
        return hasten_ops.rms_norm(x, weight, eps, offset, round_first, context.dtype())[0]

    return replacement


def _weight_condition(context: Context) -> str:
    weight = context.match.inputs.get("weight")
    if weight is not None and shape_of(weight) != shape_of(context.match.inputs["x"])[-1:]:
        return f"norm: weight of shape {shape_of(weight)} is not the last dim"
    return ""


def _norm_examples(x_dtype: torch.dtype, *parameters: torch.dtype) -> Sequence[torch.Tensor]:
    return [_rand(2, 3, 8, dtype=x_dtype), *(_rand(8, dtype=dtype) for dtype in parameters)]


def _norms() -> Iterator[Rule]:
    # The most particular first: in the others `weight` would match `1 + weight` as a whole.
    spellings = [
        (_rms_offset, 1.0, False),
        (_rms_round_first, 0.0, True),
        (_rms_round_last, 0.0, False),
        (_rms_wide_weight, 0.0, False),
        (_rms_narrow, 0.0, True),
    ]
    dtypes = (torch.float32, torch.bfloat16)
    for (pattern, offset, round_first), x_dtype, w_dtype in itertools.product(spellings, dtypes, dtypes):
        yield Rule(
            "rms_norm", pattern, _rms_replacement(offset, round_first),
            functools.partial(_norm_examples, x_dtype, w_dtype), 1,
            "RMSNorm (Zhang & Sennrich 2019) in fp32, rounded where the model rounds", _weight_condition,
        )  # fmt: skip
    for x_dtype in dtypes:
        yield Rule(
            "rms_norm", _rms_plain, _rms_replacement(0.0, False),
            functools.partial(_norm_examples, x_dtype), 1,
            "RMSNorm without a weight", _weight_condition,
        )  # fmt: skip

    def f_rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    yield Rule(
        "rms_norm",
        f_rms,
        _rms_replacement(0.0, False),
        lambda: [_rand(2, 3, 8), _rand(8)],
        1,
        "torch's own RMSNorm",
        _weight_condition,
    )

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def layer_no_bias(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, None, eps)

    def layer_plain(x: torch.Tensor, eps: float) -> torch.Tensor:
        return F.layer_norm(x, (x.shape[-1],), None, None, eps)

    def to_layer_norm(x: Any, eps: float, context: Context, weight: Any = None, bias: Any = None) -> Any:
        return hasten_ops.layer_norm(x, weight, bias, eps, context.dtype())[0]

    reason = "LayerNorm (Ba et al. 2016) over the last dim"
    for x_dtype, w_dtype in itertools.product(dtypes, dtypes):
        yield Rule(
            "layer_norm", _layer_written_out_bias, to_layer_norm,
            functools.partial(_norm_examples, x_dtype, w_dtype, w_dtype), 1,
            reason, _weight_condition,
        )  # fmt: skip
        yield Rule(
            "layer_norm", _layer_written_out, to_layer_norm,
            functools.partial(_norm_examples, x_dtype, w_dtype), 1,
            reason, _weight_condition,
        )  # fmt: skip
    yield Rule("layer_norm", layer, to_layer_norm, lambda: [_rand(2, 3, 8), _rand(8), _rand(8)], 1, reason)
    yield Rule("layer_norm", layer_no_bias, to_layer_norm, lambda: [_rand(2, 3, 8), _rand(8)], 1, reason)
    yield Rule("layer_norm", layer_plain, to_layer_norm, lambda: [_rand(2, 3, 8)], 1, reason)


# --- level 1: activations -----------------------------------------------------------------------------------

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: torch.square(F.relu(x)),
    "relu": F.relu,
}


def _same_shapes(*names: str) -> Callable[[Context], str]:
    def condition(context: Context) -> str:
        shapes = {str(context.shape(name)) for name in names}
        dtypes = {context.dtype_of(name) for name in names}
        if len(shapes) > 1:
            return f"gated_activation: gate and up have shapes {' and '.join(sorted(shapes))}"
        return "" if len(dtypes) == 1 else "gated_activation: gate and up have different dtypes"

    return condition


def _activations() -> Iterator[Rule]:
    def pair() -> Sequence[torch.Tensor]:
        return [_rand(2, 3, 8), _rand(2, 3, 8)]

    for kind, function in _ACTIVATIONS.items():
        yield Rule(
            "gated_activation", lambda gate, up, f=function: f(gate) * up,
            lambda gate, up, k=kind: hasten_ops.gated_activation(gate, up, k), pair, 1,
            "gated linear unit (Shazeer 2020); the backward pass rebuilds the activation",
            _same_shapes("gate", "up"),
        )  # fmt: skip
    yield Rule(
        "gated_activation", lambda gate, up: torch.sigmoid(gate) * up,
        lambda gate, up: hasten_ops.gated_activation(gate, up, "sigmoid"), pair, 1,
        "GLU (Dauphin et al. 2017)",
        _same_shapes("gate", "up"),
    )  # fmt: skip
    for kind, function in _ACTIVATIONS.items():
        yield Rule(
            "activation", lambda x, f=function: f(x), lambda x, k=kind: hasten_ops.activation(x, k),
            lambda: [_rand(2, 3, 8)], 1, "the same function; the backward pass needs the input alone",
        )  # fmt: skip


BUILTIN: tuple[Rule, ...] = (*_spelling(), *_norms(), *rotaries(), *attentions(), *_activations())
