"""FLOPs of one token under the conventions that publications use, and the matrix products of a layer.

Conventions (names as used by `flops_per_token`):
    model        6 per weight that a token visits (the embedding's look-up not counted, the head counted) and
                 causal attention counted as half of the square. NVIDIA Megatron-Bridge since 2025.
    full         the same with the whole square of attention. Megatron-LM, NeMo until 2024, PaLM (arXiv
                 2204.02311 appendix B, which counts no norm).
    hardware     `full` with every layer's forward pass a second time and the head's not: arXiv 2104.04473
                 equation 3, full recompute.
    mosaic       6 per weight of the whole model, embedding included, and the whole square (llm-foundry).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from hasten.plan.model import ModelShape

Convention = Literal["model", "full", "hardware", "mosaic"]


class Product(NamedTuple):
    """One matrix product: `times` of m x k times k x n."""

    name: str
    m: float
    n: float
    k: float
    times: float = 1.0

    @property
    def flops(self) -> float:
        """2 m n k of each."""
        return 2.0 * self.m * self.n * self.k * self.times


def attention_widths(model: ModelShape) -> tuple[int, int]:
    """Elements of all query heads as scores see them, and of all value heads."""
    if model.latent is not None:
        a = model.latent
        return model.heads * (a.plain_size + a.rotary_size), model.heads * a.value_size
    return model.heads * model.head_size, model.heads * model.head_size


def seen_tokens(model: ModelShape, sequence: int, causal_half: bool) -> float:
    """Keys that a query meets on average, over the layers; a window bounds those of its layers."""
    whole = sequence / 2 if causal_half else float(sequence)
    if not model.window or model.window >= sequence:
        return whole
    # A window of w of s tokens: the first w queries see a triangle, the rest w each.
    near = model.window * (sequence - model.window / 2) / sequence
    share = 1 / model.window_every
    return (near if causal_half else min(2 * near, sequence)) * share + whole * (1 - share)


def product_weights(model: ModelShape) -> float:
    """Weights of the layers that one token is multiplied with (no norms, no biases, no router: NVIDIA's
    published counts leave it out)."""
    ups = 3 if model.gated else 2
    attention = model.attention_parameters
    if model.biases and model.latent is None:
        attention -= (model.heads + 2 * model.kv_heads) * model.head_size + model.hidden
    total = 0.0
    for index in range(model.layers):
        total += attention
        if model.sparse(index):
            width = model.experts_per_token * model.expert_inner + model.shared_inner
            total += ups * model.hidden * width
        else:
            total += ups * model.hidden * model.inner
    return total


def flops_per_token(model: ModelShape, sequence: int, convention: Convention = "model") -> float:
    """Forward and backward FLOPs of one token of a sequence of so many.

    `model` and `full` count matrix products alone, `hardware` also a second forward pass of the layers.
    """
    queries, values = attention_widths(model)
    seen = seen_tokens(model, sequence, causal_half=False)
    if convention == "model":
        # Half of what the mask lets through: half of the square, or of the window.
        share = 1 / model.window_every if 0 < model.window < sequence else 0.0
        seen = (share * model.window + (1 - share) * sequence) / 2
    square = 2 * (queries + values) * seen * (model.layers + model.predicted_tokens)
    head = 2 * model.vocabulary * model.hidden * (1 + model.predicted_tokens)
    if convention == "mosaic":
        return 6.0 * model.parameters + 3 * square
    body = 2 * product_weights(model)
    if model.predicted_tokens:
        # A predicting layer is one more layer of the last kind and a product of twice the width (2412.19437).
        ups = 3 if model.gated else 2
        width = (
            model.experts_per_token * model.expert_inner + model.shared_inner
            if model.experts
            else model.inner
        )
        extra = model.attention_parameters + ups * model.hidden * width + 2 * model.hidden**2
        body += 2 * extra * model.predicted_tokens
    if convention == "hardware":
        return 4 * (body + square) + 3 * head
    return 3 * (body + square + head)


def training_flops(parameters: float, tokens: float) -> float:
    """6 N D: weights (of a mixture those that a token visits) times tokens (arXiv 2001.08361)."""
    return 6 * parameters * tokens


def layer_products(model: ModelShape, index: int, tokens: float, tp: int, ep: int) -> list[Product]:
    """Matrix products of layer `index`'s forward pass on one device, attention's own square left out.

    Args:
        tokens: of the micro batch on one device of the tensor parallel group (that group shares all of them).
        tp: tensor parallel degree; columns or rows are divided by it.
        ep: expert parallel degree; balanced routing is assumed, so a device's experts see as many tokens
            as its own tokens send out.
    """
    h = model.hidden
    if model.latent is not None:
        a = model.latent
        query = model.heads * (a.plain_size + a.rotary_size) / tp
        found = [Product("query", tokens, a.query_rank or query, h)]
        if a.query_rank:
            found.append(Product("query", tokens, query, a.query_rank))
        found.append(Product("key_value", tokens, a.key_value_rank + a.rotary_size, h))
        found.append(
            Product("key_value", tokens, model.heads * (a.plain_size + a.value_size) / tp, a.key_value_rank)
        )
        found.append(Product("output", tokens, h, model.heads * a.value_size / tp))
    else:
        wide = (model.heads + 2 * max(model.kv_heads, tp)) * model.head_size / tp
        found = [
            Product("qkv", tokens, wide, h),
            Product("output", tokens, h, model.heads * model.head_size / tp),
        ]
    ups = 2 if model.gated else 1
    if not model.sparse(index):
        found.append(Product("up", tokens, ups * model.inner / tp, h))
        found.append(Product("down", tokens, h, model.inner / tp))
        return found
    found.append(Product("router", tokens, model.experts, h))
    if model.shared_inner:
        found.append(Product("up", tokens, ups * model.shared_inner / tp, h))
        found.append(Product("down", tokens, h, model.shared_inner / tp))
    local = max(1.0, model.experts / ep)
    each = tokens * model.experts_per_token / local
    # Experts beyond the data-parallel devices are cut by nothing else: tensor parallelism of experts is `tp`
    # where the expert group does not take it.
    cut = tp if ep < tp else 1
    found.append(Product("expert_up", each / (tp / cut), ups * model.expert_inner / cut, h, local))
    found.append(Product("expert_down", each / (tp / cut), h, model.expert_inner / cut, local))
    return found
