"""Experts of a router from the files to the answer: packed, counted in a budget, calibrated, stored."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.ops import native
from hasten.ops.panels import named
from hasten.ops.panels.reference import unpack
from hasten.serve.calibrate import calibrate, matrices_of
from hasten.serve.open import open_runner, runner_logits
from hasten.serve.plan import plan_bits
from hasten.serve.program import Weight
from hasten.serve.quantise import output_errors
from hasten.serve.weights import ModelSource, part_of

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from unlisted import unlisted_model

CHUNKS = [torch.randint(3, 250, (48,), generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
ROUTED = ("mixtral", "gpt_oss", "granitemoe")
needs_kernels = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)


def stack_names(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.dim() == 3]


@pytest.mark.parametrize("name", ROUTED)
def test_a_stack_is_one_matrix_with_whole_panels_for_each_expert(name: str) -> None:
    model = unlisted_model(name)
    found = {matrix.name: matrix for matrix in matrices_of(model)}
    for stack in stack_names(model):
        matrix, parameter = found[stack], model.get_parameter(stack).detach()
        E = parameter.shape[0]
        whole = part_of(parameter, Weight(stack, matrix.transposed))
        assert tuple(whole.shape) == (matrix.N, matrix.K)
        each = whole.view(E, -1, matrix.K)
        assert each.shape[1] % 16 == 0
        own = parameter.transpose(1, 2) if matrix.transposed else parameter
        assert torch.equal(each[:, : own.shape[1]], own)
        assert not each[:, own.shape[1] :].any()
        panels = ModelSource(model).panels(Weight(stack, matrix.transposed), named("float32"))
        assert torch.equal(unpack(panels), whole)


def test_a_budget_counts_experts() -> None:
    model = unlisted_model("mixtral")
    for source in (ModelSource(model), ModelSource(model, calibration=calibrate(model, CHUNKS))):
        plan = plan_bits(source, 6.0)
        names = {row.matrix.name for row in plan.rows}
        assert names.issuperset(stack_names(model))
        assert plan.weights == sum(parameter.numel() for parameter in model.parameters())
        routers = sum(
            parameter.numel() for name, parameter in model.named_parameters() if "gate.weight" in name
        )
        norms = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
        assert plan.other_weights == routers + norms
        assert plan.bytes * 8 <= 6.0 * plan.weights


@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_predicted_divergence_of_experts_is_about_the_measured_one(stack: str) -> None:
    model = unlisted_model("mixtral").eval()
    found = calibrate(model, CHUNKS)
    name = f"model.layers.1.mlp.experts.{stack}"
    weight = model.get_parameter(name).detach()
    other = weight + 0.2 * weight.std() * torch.randn(
        weight.shape, generator=torch.Generator().manual_seed(3)
    )
    changed = copy.deepcopy(model)
    changed.get_parameter(name).data.copy_(other)
    before, after = (part_of(w, Weight(name)) for w in (weight, other))
    predicted = 0.5 * float((output_errors(before, after, found.moments[name]) * found.outputs[name]).sum())
    with torch.no_grad():
        p, q = (
            torch.cat([m(input_ids=chunk[None]).logits[0] for chunk in CHUNKS]).log_softmax(-1)
            for m in (model, changed)
        )
    measured = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0.2 < predicted / measured < 5


@needs_kernels
@pytest.mark.parametrize("name", ROUTED)
def test_a_folder_with_experts_is_served_by_a_program(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path / "cache"))
    model = unlisted_model(name).eval()
    model.save_pretrained(tmp_path / "model")
    ids = CHUNKS[0]
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    # Rounded, a router may choose another expert where two are nearly equal.
    for weights, allowed in (("float32", 1e-5), ("bfloat16", 0.03), ("int8", 0.03), ("6.0", 0.2)):
        for from_disk in (False, True):
            served = open_runner(
                tmp_path / "model", weights=weights, context_tokens=64, cache_bytes=1 << 20,
                cache="float32",
            )  # fmt: skip
            assert (served.about.ordinary, served.about.from_disk) == ("", from_disk)
            found = runner_logits(served.runner)(ids)
            assert float((found - expected).norm() / expected.norm()) <= allowed
