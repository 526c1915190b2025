"""What is recognised in each family, by count: over the distinct graphs of one training step at length 17.

At level 2, where a layer is captured once; what level 3 does between layers is in `test_across_layers.py`.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from comparing import assert_rewritten, make_batch, run

import hasten
from hasten.models.tiny import FAMILIES, tiny_model

# A SwiGLU decoder layer: both norms with the projections behind them, q and k turned, one MLP product.
DECODER = {"norm_linear": 2, "rotary": 2, "attention": 1, "activation_linear": 1}
# Layers with learned or biased positions: the same without rotary.
PLAIN = {"norm_linear": 2, "attention": 1, "activation_linear": 1}

OPERATORS = {
    "llama": DECODER,
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER | {"rms_norm": 2},  # of q and k
    "gemma2": DECODER | {"rms_norm": 2},  # behind attention and MLP
    "gemma3_text": DECODER | {"rms_norm": 4},
    "phi3": DECODER,
    # The third layer has no rotary and is a graph of its own.
    "smollm3": {"norm_linear": 4, "rotary": 2, "attention": 2, "activation_linear": 2},
    "gpt2": PLAIN,
    "gpt_neox": DECODER,
    "opt": PLAIN,
    "bloom": PLAIN,
    # Norms stand behind the sums here, so the projections are one group of their own.
    "bert": {"linear_group": 1, "attention": 1, "add_layer_norm": 2, "activation_linear": 1},
    # The first layer has no norm before attention and is a graph of its own.
    "modernbert": {"norm_linear": 3, "rotary": 4, "attention": 2, "activation_linear": 2},
    "torch_encoder": PLAIN,
}

# Rules that only a family of its kind uses.
RULES = {
    "gpt2": {
        "layer_norm": 2,
        "activation": 1,
        "norm_linear": 2,
        "activation_linear": 1,
        "spelling.gelu_tanh": 1,
    },
    "llama": {"rms_norm": 2, "rotary": 2, "gated_activation": 1, "norm_linear": 2, "activation_linear": 1},
    "torch_encoder": {
        "layer_norm": 2,
        "attention": 1,
        "activation": 1,
        "norm_linear": 2,
        "activation_linear": 1,
    },
}


def test_the_table_names_every_family() -> None:
    assert set(OPERATORS) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_operators_of_each_family(family: str, autocast: torch.dtype | None) -> None:
    model = hasten.optimize(tiny_model(family), measure=False, level=2)
    run(model, make_batch(17, "right"), autocast)
    report = hasten.report(model)
    assert report.operator_counts() == Counter(OPERATORS[family]), str(report)
    if family in RULES and autocast is None:
        levels = [entry for graph in report.graphs for entry in graph.log if entry.count]
        counts = Counter[str]()
        for entry in levels:
            counts[entry.name] += entry.count
        assert counts == Counter(RULES[family]), str(report)
    assert_rewritten(model)
    assert sum(report.blocks.values()) == 3


def test_the_layers_of_a_model_share_their_graphs() -> None:
    model = hasten.optimize(tiny_model("llama"), measure=False)
    for length in (130, 200, 257, 384):
        run(model, make_batch(length))
    # The first layer is given a tensor, all others the two summands of the layer before.
    assert len(hasten.report(model).graphs) == 2


def test_levels_build_on_one_another() -> None:
    expected = {
        1: {"rms_norm": 2, "rotary": 2, "attention": 1, "gated_activation": 1},
        2: DECODER,
        3: {name: 2 * count for name, count in DECODER.items()},  # two graphs
    }
    for level, operators in expected.items():
        model = hasten.optimize(tiny_model("llama"), measure=False, level=level)
        run(model, make_batch(17))
        assert hasten.report(model).operator_counts() == Counter(operators), level


def test_level_0_changes_nothing() -> None:
    model = hasten.optimize(tiny_model("llama"), level=0)
    own = tiny_model("llama")
    batch = make_batch(17)
    ours, theirs = run(model, batch), run(own, batch)
    assert torch.equal(ours.logits, theirs.logits)
    assert hasten.report(model).graphs == []
