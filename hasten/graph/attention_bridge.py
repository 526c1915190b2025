"""Attention of Hugging Face models, through their own two registries.

The mask function turns whatever mask the model asks for into one small integer tensor: for each query the
first visible key and the one after the last, `[batch, queries, 2]`. All limits (causal, window, padding,
packed documents) are in it, so nothing can be lost between the two functions. A mask that is no interval
stays dense. Registering adds a name to the registries and changes no other model; a model uses it after
`set_attn_implementation("hasten")`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hasten.base.errors import CaptureError
from hasten.graph.blocks import repeated_blocks
from hasten.graph.bypass import recorded, transforming
from hasten.ops.attention import ranges_from_mask, window_ranges

NAME = "hasten"
_WEIGHTS = {"attentions", "cross_attentions", "encoder_attentions", "decoder_attentions"}
# An index, a size or a concatenation of the mask in the code of a layer; a sum is its own way of attention,
# which a layer that asks the registry does not go.
_MASK_WORK = re.compile(
    r"\battention_mask\s*\[|\battention_mask\.(shape|size|masked_fill|unsqueeze|expand|view|reshape|repeat)\b"
    r"|\b(cat|pad|where)\(\s*[\[(]?\s*attention_mask\b"
)
_MASK_SUM = re.compile(r"[+*]\s*attention_mask\b")
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_NAMED_ROWS: ContextVar[torch.Tensor | None] = ContextVar("hasten_named_rows", default=None)
# Query rows of a dense mask that are looked at together: bounds the memory for long sequences.
_MASK_ROWS = 1024


def register() -> None:
    """Adds the two functions under `NAME`; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """query [B,Hq,Sq,D], key and value [B,Hkv,Sk,D] -> ([B,Sq,Hq,D], None), as transformers expects.

    Written out in plain torch where the operator cannot run: with dropout in training, which it has not,
    inside a transform of torch.func, and where the attention weights are recorded (the second result then).
    """
    ranges, bias, causal = None, None, False
    if attention_mask is None:
        asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        causal = bool(asked) and query.shape[2] > 1 and query.shape[2] == key.shape[2]
    elif attention_mask.dim() == 3:
        ranges = attention_mask
    else:
        bias = attention_mask[..., : key.shape[2]].expand(-1, -1, query.shape[2], -1)
    if position_bias is not None:
        visible = bias if bias is not None else None if ranges is None else _visible(ranges, key.shape[2])
        bias, ranges = _add_mask(position_bias, visible), None
    compiling = torch.compiler.is_compiling()
    in_steps = (
        not compiling
        and _NAMED_ROWS.get() is None
        and (transforming() or not recorded().isdisjoint(_WEIGHTS))
    )
    if dropout > 0.0 or in_steps:
        visible = bias if ranges is None else _visible(ranges, key.shape[2])
        run = _written_out if in_steps or softcap or s_aux is not None else _torch_attention
        return run(query, key, value, visible, causal, dropout, scaling, softcap, s_aux)
    out = torch.ops.hasten.attention(
        query, key, value, ranges, bias, s_aux, None, scaling, causal, 0, softcap or 0.0
    )[0]  # fmt: skip
    return out, None


def _visible(ranges: torch.Tensor, keys: int) -> torch.Tensor:
    """[B,Sq,2] -> bool [B,1,Sq,Sk]."""
    position = torch.arange(keys, device=ranges.device)
    return ((position >= ranges[..., :1]) & (position < ranges[..., 1:]))[:, None]


def _add_mask(bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return bias.masked_fill(~mask, float("-inf"))
    return bias + mask


def _torch_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    dropout: float, scaling: float | None, *_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    grouped = query.shape[1] != key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    dropout: float, scaling: float | None, softcap: float | None, sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B,Sq,Hq,D], weights [B,Hq,Sq,Sk] after dropout), step by step as eager attention."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        # The least finite number, not -inf: a row without a key stays finite, also in its gradient.
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = weights[..., : key.shape[2]].to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def mask_forward(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Visible keys of each query, int32 [B,Sq,2]; bool [B,1,Sq,Sk] where they are no interval.

    Signature and meaning of the arguments are those of `transformers.masking_utils.sdpa_mask`.
    """
    from transformers import masking_utils

    named = _NAMED_ROWS.get()
    if named is not None:
        return window_ranges(named, _window_of(mask_function or masking_utils.causal_mask_function))
    if attention_mask is not None and attention_mask.dim() == 3:
        # Generation with a static cache makes the mask before the forward pass and hands it in.
        return attention_mask
    dense = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    function = mask_function or masking_utils.causal_mask_function

    def rows(start: int, count: int) -> torch.Tensor:
        mask = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=count,
            kv_length=kv_length,
            q_offset=q_offset + start,  # type: ignore[arg-type]  # a tensor with a static cache
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            **dense,
        )
        return mask.expand(batch_size, -1, -1, -1)  # type: ignore[union-attr]  # None only where a skip is allowed

    if torch.compiler.is_compiling() or transforming():
        return rows(0, q_length)
    simple = _simple_ranges(
        batch_size, q_length, kv_length, q_offset, kv_offset, function, attention_mask, kwargs
    )
    if simple is not None:
        return simple
    pieces = []
    for start in range(0, q_length, _MASK_ROWS):
        piece = ranges_from_mask(rows(start, min(_MASK_ROWS, q_length - start)))
        if piece is None:
            return rows(0, q_length)
        pieces.append(piece)
    return torch.cat(pieces, dim=1)


def _simple_ranges(
    batch: int,
    queries: int,
    keys: int,
    q_offset: Any,
    kv_offset: int,
    function: Any,
    padding: Any,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Ranges without a dense mask for the two commonest cases: plain causal and plain bidirectional."""
    from transformers import masking_utils

    if padding is not None or not isinstance(q_offset, int) or kwargs.get("use_vmap"):
        return None
    device = kwargs.get("device") or "cpu"
    # In the layout that packed documents give: with another one the blocks would be captured anew.
    ranges = torch.zeros(batch, queries, 2, dtype=torch.int32, device=device)
    if function is masking_utils.causal_mask_function:
        first = q_offset - kv_offset + 1
        ranges[..., 1] = torch.arange(first, first + queries, dtype=torch.int32, device=device).clamp(0, keys)
    elif function is masking_utils.bidirectional_mask_function:
        ranges[..., 1] = keys
    else:
        return None
    return ranges


@contextlib.contextmanager
def masks_by_name(rows: torch.Tensor) -> Iterator[None]:
    """Inside, masks are not built: one that is causal or hides nothing is a `window_ranges` of `rows` [B, S].

    Any other is a CaptureError.
    """
    token = _NAMED_ROWS.set(rows)
    try:
        yield
    finally:
        _NAMED_ROWS.reset(token)


def _window_of(function: Any) -> int:
    """The window of a causal mask function, 0 if it has none, -1 if it hides nothing, found by asking it.

    Raises:
        CaptureError: the mask is neither causal with at most a window nor one that hides nothing.
    """

    def seen_by(q: int) -> torch.Tensor:
        keys = torch.arange(q + 2)
        seen = function(torch.tensor(0), torch.tensor(0), torch.tensor(q), keys)
        return torch.as_tensor(seen).expand(q + 2)

    def first_seen(q: int) -> int:
        seen = seen_by(q)
        count = int(seen.sum())
        if bool(seen[-1]) or not bool(seen[q + 1 - count : q + 1].all()):
            raise CaptureError("a mask that is not causal with one window")
        return q + 1 - count

    with _disable_current_modes():
        asked = (0, 1, 5, 1000, 1 << 18)
        # Decoders that could look at an encoder make its mask, also where there is none to look at.
        if all(bool(seen_by(q).all()) for q in asked):
            return -1
        probes = {q: first_seen(q) for q in asked}
        cut = {q + 1 - first for q, first in probes.items() if first > 0}
        if not cut:
            return 0
        window = cut.pop()
        # A window is the same everywhere; a mask by chunks is not.
        spread = {q: first_seen(q) for q in (window - 1, window, window + window // 2, 2 * window + 1)}
    if cut or any(first != max(0, q + 1 - window) for q, first in (probes | spread).items()):
        raise CaptureError("a mask by chunks, or one whose window changes with the position")
    return window


class AttentionDoor:
    """Switches one model to the operator and back."""

    def __init__(self, model: nn.Module) -> None:
        self._previous: list[tuple[Any, str]] = []
        self.state = self._enter(model)

    def _enter(self, model: nn.Module) -> str:
        roots = transformers_roots(model)
        if not roots:
            return "not a transformers model; attention inside the blocks is recognised in the graph"
        register()
        for root in roots:
            configs = {
                id(m.config): m.config
                for m in root.modules()
                if hasattr(m, "config") and hasattr(m.config, "_attn_implementation")
            }
            before = [(config, config._attn_implementation) for config in configs.values()]
            if any(name and name.startswith(("flash", "flex", "paged")) for _, name in before):
                return f"left on {before[0][1]!r}, which was chosen explicitly"
            if own := _computes_with_masks(root):
                self.leave()
                return f"left as it was: {own} computes with the attention mask by itself"
            if not type(root)._can_set_attn_implementation():
                self.leave()
                return "the model does not dispatch attention through transformers' registry"
            try:
                root.set_attn_implementation(NAME)
            except (ValueError, NotImplementedError, KeyError) as error:
                self._put_back(before)
                return f"the model does not dispatch attention through transformers' registry ({error})"
            if root.config._attn_implementation != NAME:
                self._put_back(before)
                return "the model does not dispatch attention through transformers' registry"
            self._previous += before
        return "on: the operator runs through transformers' attention and mask registries"

    @staticmethod
    def _put_back(before: list[tuple[Any, str]]) -> None:
        for config, name in before:
            config._attn_implementation_internal = name

    def leave(self) -> None:
        self._put_back(self._previous)
        self._previous = []


def _computes_with_masks(root: nn.Module) -> str:
    """The class of a layer whose code does more with its mask than hand it on: it needs the dense one."""
    present = (type(module) for block in repeated_blocks(root) for module in block.modules())
    kinds = [kind for kind in dict.fromkeys(present) if not kind.__module__.startswith("torch.")]
    later = [other for kind in kinds for other in _made_later(kind)]
    for kind in dict.fromkeys([*kinds, *later]):
        try:
            source = inspect.getsource(kind)
        except (OSError, TypeError):  # made without a source file
            continue
        if _MASK_WORK.search(source) or (_MASK_SUM.search(source) and _REGISTRY not in source):
            return kind.__name__
    return ""


def _made_later(kind: type[nn.Module]) -> Iterator[type[nn.Module]]:
    """Module classes that methods of `kind` name: some models put another attention in during a forward."""
    own = kind.__module__
    scope = vars(sys.modules.get(own, object))
    for name, method in vars(kind).items():
        code = getattr(method, "__code__", None)
        for used in code.co_names if code is not None and name != "__init__" else ():
            found = scope.get(used)
            if (
                isinstance(found, type)
                and issubclass(found, nn.Module)
                and found.__module__ == kind.__module__
            ):
                yield found


def transformers_roots(model: nn.Module) -> list[Any]:
    """The outermost transformers models inside `model` (a PEFT wrapper holds one)."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [root for child in model.children() for root in transformers_roots(child)]
