"""Families that hasten has no list of are recognised by what they compute, and equal the original.

The table says what stands in the graphs of one training step of two layers at length 17, right-padded.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from comparing import Batch, Run, assert_budget, make_batch, original_of, takes
from torch import nn
from unlisted import MODELS, unlisted_model

import hasten

DECODER = {"norm_linear": 2, "rotary": 2, "attention": 1, "activation_linear": 1}
PLAIN = {"norm_linear": 2, "attention": 1, "activation_linear": 1}
POST_NORM = {"linear_group": 1, "attention": 1, "add_layer_norm": 2, "activation_linear": 1}
NORMED_BRANCHES = {"linear_group": 2, "rms_norm": 4, "rotary": 2, "attention": 1, "activation_linear": 1}
# The experts of a mixture stay as they are; what stands around them is fused.
MIXTURE = {"norm_linear": 1, "rotary": 2, "attention": 1, "add_rms_norm": 1, "gated_activation": 1}

OPERATORS: dict[str, dict[str, int]] = {
    "olmo2": NORMED_BRANCHES,
    "stablelm": DECODER,
    # Attention and MLP stand side by side behind one norm: all five projections are one product.
    "cohere": DECODER | {"norm_linear": 1},
    "granite": DECODER,
    "starcoder2": DECODER,
    "gemma": DECODER,
    "glm4": DECODER | {"rms_norm": 2},
    # One norm before projections with and without bias.
    "gptj": DECODER | {"norm_linear": 1},
    "codegen": DECODER | {"norm_linear": 1},
    "falcon": DECODER,
    "mpt": PLAIN,
    "t5_encoder": {name: 2 * count for name, count in PLAIN.items()},  # the first layer has the position bias
    "distilbert": POST_NORM,
    "roberta": POST_NORM,
    # Two terms of content and position are its bias; their projections are the second group.
    "deberta": POST_NORM | {"linear_group": 2},
    "vit": PLAIN,
    "llama_bias": DECODER,
    "qwen2_moe": MIXTURE | {"linear_group": 1, "activation_linear": 1},
    "mixtral": MIXTURE,
    "gpt_oss": MIXTURE,
    "exaone4": NORMED_BRANCHES,
    "nemotron": DECODER,
    # Attention is written out in these, each in its own way.
    "gpt_neo": PLAIN,
    "gpt_neox_japanese": {name: 2 * count for name, count in DECODER.items()},  # the last layer has no bias
    "xglm": PLAIN,
    "nanochat": DECODER | {"rms_norm": 2},
    # Keys and values come from one narrow projection, behind a norm of their own.
    "deepseek_v2": DECODER | {"norm_linear": 3, "rms_norm": 1},
    "deepseek_v3": DECODER | {"norm_linear": 3, "rms_norm": 1},
    # The encoder's layer and the decoder's, whose second attention looks at the encoder.
    "bigbird_pegasus": {"norm_linear": 5, "attention": 3, "linear_group": 1, "activation_linear": 2},
    "longformer": POST_NORM | {"attention": 0},
    "helium": DECODER,
}


def step(model: nn.Module, batch: Batch, wide: torch.dtype | None = None) -> Run:
    """One backward pass from a random weighting of the logits, or of the hidden states."""
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(0)
    if takes(model, "input_ids"):
        more = {"use_cache": False} if takes(model, "use_cache") else {}
        out = model(input_ids=batch.ids, attention_mask=batch.mask, **more)
        logits = out.logits if "logits" in out else out.last_hidden_state
    else:
        pixels = torch.randn(2, 3, 32, 32, generator=generator)
        logits = model(pixel_values=pixels if wide is None else pixels.to(wide)).last_hidden_state
    logits = torch.as_tensor(logits)
    weights = torch.randn(logits.shape, generator=generator, dtype=torch.float32).to(logits.dtype) * 0.01
    counted = weights * batch.real[..., None] if takes(model, "input_ids") else weights
    loss = (torch.where(counted != 0, logits, 0.0) * counted).sum()
    loss.backward()
    gradients = {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}
    return Run(loss.item(), logits.detach().double(), gradients)


def test_the_table_names_every_model() -> None:
    assert set(OPERATORS) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_recognised_and_equal(name: str) -> None:
    model = unlisted_model(name)
    original = original_of(model)
    hasten.optimize(model, measure=False, level=2)  # one graph for each kind of layer
    batch = make_batch(17, "right")
    ours, own = step(model, batch), step(original, batch)
    if not takes(model, "input_ids"):
        batch = Batch(torch.zeros(ours.logits.shape[:2], dtype=torch.long), batch.labels, None)
    assert_budget(ours, own, own, batch, torch.float32, name)
    report = hasten.report(model)
    assert +report.operator_counts() == +Counter(OPERATORS[name]), str(report)
    assert not report.originals
    for graph in report.graphs:
        assert graph.runs == "rewritten", graph.reason
        assert graph.proof.passed


@pytest.mark.parametrize("name", ["gptj", "mpt", "deberta", "xglm", "nanochat", "deepseek_v3"])
def test_equal_in_bf16_and_left_padded(name: str) -> None:
    model = unlisted_model(name)
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17, "left")
    with torch.autocast("cpu", torch.bfloat16):
        ours, own = step(model, batch), step(original, batch)
    assert_budget(ours, own, step(original, batch), batch, torch.bfloat16, name)
    assert all(graph.runs == "rewritten" for graph in hasten.report(model).graphs), hasten.report(model)
