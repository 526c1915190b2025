"""Quantising: never worse than rounding to nearest, odd sizes, budgets kept to the byte."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hasten.base.errors import ConfigError, InputError, ShapeError
from hasten.models import tiny_model
from hasten.ops.panels import BFLOAT16, FLOAT32, Format, named, rotated
from hasten.ops.panels.formats import GROUPS, PLANES
from hasten.ops.panels.reference import unpack
from hasten.ops.panels.rotation import rotate, rotated_moments, rotated_weights
from hasten.serve.calibrate import Calibration, Matrix, calibrate, matrices_of
from hasten.serve.plan import LADDER, allocate, plan_bits
from hasten.serve.program import Weight
from hasten.serve.quantise import (
    output_errors,
    quantise,
    round_to_nearest,
    rounding_costs,
    rounding_errors,
    search,
)
from hasten.serve.weights import ModelSource

FORMATS = [
    Format("quantised", bits, group, zero)
    for bits in PLANES
    for group in GROUPS
    if not (1 in PLANES[bits] and group < 32)
    for zero in (None, 1 << bits - 1)
] + [rotated(bits, minima) for bits in PLANES for minima in (False, True)]
CHUNKS = [torch.arange(begin, begin + 48) * 7 % 250 for begin in (0, 60)]


def matrix(N: int, K: int, seed: int = 0) -> torch.Tensor:
    """Weights with outliers, and a group of zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(N, K, generator=generator) * 0.02
    found[torch.rand(N, K, generator=generator) < 0.01] *= 8
    found[0, : min(K, 32)] = 0
    return found


def rounded(dense: torch.Tensor, format: Format) -> torch.Tensor:
    """The numbers that are rounded."""
    return rotated_weights(dense) if format.rotated else dense


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_search_is_never_worse_than_rounding_to_nearest(format: Format) -> None:
    for N, K in ((1, 1), (7, 33), (40, 129)):
        dense = matrix(N, K)
        found, plain = search(dense, format), round_to_nearest(dense, format)
        ours, theirs = (output_errors(dense, one.dense(), None) for one in (found, plain))
        assert bool((ours <= theirs * (1 + 1e-5) + 1e-12).all())
        torch.testing.assert_close(unpack(found.panels()), found.dense(), rtol=1e-6, atol=1e-7)
        # Rounding to nearest is off by half a step, and by what fp16 does to scales and minima.
        numbers, other = rounded(dense, format), rounded(plain.dense(), format)
        half = 2**-11 * float(numbers.abs().max())
        steps = plain.scales.float().abs().repeat_interleave(format.group, 1)[:, :K] * plain.unit
        assert bool(((numbers - other).abs() <= steps * (0.5 + 2**-11 * 2**format.bits) + half).all())


def test_search_gains_on_few_bits() -> None:
    dense = matrix(64, 256)
    for name in ("int3", "int4", "int4m"):
        ours, theirs = (
            float(output_errors(dense, way(dense, named(name)).dense(), None).sum())
            for way in (search, round_to_nearest)
        )
        assert ours < 0.9 * theirs


@pytest.mark.parametrize("name", ["int4", "int3g64m", "int6g16", "int4r", "int3mr"])
def test_moments_lower_the_error_of_the_products(name: str) -> None:
    format, dense = named(name), matrix(40, 150)
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(150, 150, generator=generator)
    x_TK = torch.randn(600, 150, generator=generator) @ mixing * torch.linspace(0.1, 3, 150)
    moments = x_TK.t() @ x_TK / 600
    plain, diagonal, full = (
        search(dense, format, given).dense() for given in (None, moments.diagonal(), moments)
    )
    errors = [output_errors(dense, found, moments) for found in (plain, diagonal, full)]
    assert bool((errors[2] <= errors[1] * (1 + 1e-4)).all())
    assert errors[2].sum() < 0.9 * errors[0].sum()
    # The figure is what it says: the mean square of the product's error.
    measured = ((x_TK @ (dense - full).t()) ** 2).mean(0)
    torch.testing.assert_close(errors[2], measured, rtol=1e-2, atol=1e-5)
    weighted = [output_errors(dense, found, moments.diagonal()) for found in (plain, diagonal)]
    assert weighted[1].sum() < weighted[0].sum()


def test_moments_of_rotated_inputs_are_those_of_the_rotation() -> None:
    x_TK = torch.randn(500, 203, dtype=torch.float64) * torch.linspace(0.1, 3, 203)
    turned = rotate(x_TK)
    torch.testing.assert_close(rotated_moments(x_TK.t() @ x_TK), turned.t() @ turned)
    # Of mean squares alone: where inputs have nothing to do with one another.
    squares = torch.linspace(0.1, 3, 203, dtype=torch.float64)
    torch.testing.assert_close(rotated_moments(squares), rotated_moments(squares.diag()).diagonal())


@pytest.mark.parametrize("name", ["int3g64", "int4m", "int3r", "int4r", "int6mr"])
def test_errors_are_expected_as_they_will_be(name: str) -> None:
    format, dense = named(name), matrix(64, 203)
    generator = torch.Generator().manual_seed(1)
    x_TK = torch.randn(900, 203, generator=generator) @ torch.randn(203, 203, generator=generator)
    x_TK[:, 7] += 20 * x_TK[:, 30]  # inputs that hang together, one of them large
    moments = x_TK.t() @ x_TK / 900
    found = output_errors(dense, search(dense, format, moments).dense(), moments).sum()
    expected = rounding_errors(dense, format, rounding_costs(moments, format.rotated)).sum()
    assert 0.6 * found < expected < 1.5 * found
    # Where later columns are not there to make up for an error, it is what mean squares say.
    squares = moments.diagonal()
    alone = output_errors(dense, search(dense, format, squares).dense(), squares).sum()
    if not format.rotated:
        torch.testing.assert_close(rounding_errors(dense, format, squares).sum(), alone)
    assert rounding_costs(None, format.rotated) is None
    plain = output_errors(dense, search(dense, format).dense(), None)
    torch.testing.assert_close(rounding_errors(dense, format, None), plain, rtol=1e-3, atol=0)


def test_an_outlier_is_spread_by_rotation() -> None:
    dense = torch.randn(32, 256) * 0.02
    dense[:, 17] *= 30
    errors = [
        float(output_errors(dense, search(dense, named(name)).dense(), None).sum())
        for name in ("int4g128", "int4r")
    ]
    assert errors[1] < 0.5 * errors[0]


def test_moments_that_cannot_be_inverted() -> None:
    dense = matrix(5, 64)
    for moments in (torch.zeros(64, 64), torch.ones(64, 64), torch.zeros(64)):
        found = search(dense, named("int4"), moments).dense()
        assert bool(torch.isfinite(found).all())
        assert float((found - dense).norm() / dense.norm()) < 0.2


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(0, 40), st.integers(1, 140), st.floats(1e-30, 1e30))
@example(named("int6g128"), 18, 122, 1.0)
def test_any_size_and_scale(format: Format, N: int, K: int, scale: float) -> None:
    dense = matrix(max(N, 1), K, N * K)[:N] * scale
    found = unpack(quantise(dense, format))
    assert found.shape == (N, K)
    assert bool(torch.isfinite(found).all())
    plain = round_to_nearest(dense, format).dense()
    # One weight may be further off than a step, where all others of its group gain by it.
    ours, theirs = ((other.double() - dense.double()).square().sum(1) for other in (found, plain))
    assert bool((ours <= 1.001 * theirs).all())
    if N:
        numbers, other = rounded(dense, format), rounded(plain, format)
        limit = float(numbers.abs().max()) / (2 ** (format.bits - 1) - 1)
        assert float((numbers - other).abs().max()) <= limit * (1 + 1e-5)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int4", "int3g64m", "int4r"])
def test_the_matrix_is_left_as_it_is(name: str) -> None:
    for dense in (matrix(33, 70), matrix(70, 33).t()):
        before = dense.clone()
        for moments in (None, torch.ones(70), torch.eye(70) + 0.5):
            quantise(dense, named(name), moments)
        assert torch.equal(dense, before)


def test_dense_formats_and_refusals() -> None:
    dense = matrix(3, 5)
    assert torch.equal(unpack(quantise(dense, FLOAT32)), dense)
    assert torch.equal(unpack(quantise(dense, BFLOAT16)), dense.bfloat16().float())
    with pytest.raises(InputError, match="not finite"):
        quantise(dense.fill_(math.inf), named("int4"))
    with pytest.raises(ShapeError, match=r"moments \[4\]"):
        quantise(matrix(3, 5), named("int4"), torch.ones(4))
    with pytest.raises(ShapeError, match="matrix"):
        quantise(torch.ones(3), named("int4"))


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama").eval()


def test_calibration_is_of_the_inputs_and_leaves_the_model_alone(llama: Any) -> None:
    modes = llama.training, [p.requires_grad for p in llama.parameters()]
    found = calibrate(llama, CHUNKS)
    assert (llama.training, [p.requires_grad for p in llama.parameters()]) == modes
    assert all(p.grad is None for p in llama.parameters())
    assert not any(module._forward_hooks for module in llama.modules())
    assert found.tokens == 96
    seen: list[torch.Tensor] = []
    layer = llama.model.layers[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    with torch.no_grad():
        for chunk in CHUNKS:
            llama(input_ids=chunk.unsqueeze(0))
    handle.remove()
    x_TK = torch.cat(seen)
    expected = x_TK.t() @ x_TK / 96
    torch.testing.assert_close(found.moments["model.layers.1.mlp.down_proj.weight"], expected)
    names = [f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv"]
    assert all(found.moments[name].shape == (64, 64) for name in names)
    torch.testing.assert_close(found.moments[names[0]], found.moments[names[2]])
    assert found.moments.keys() == found.outputs.keys() == {m.name for m in matrices_of(llama)}
    first = calibrate(llama, CHUNKS[:1])
    part = calibrate(llama, CHUNKS, gradient_chunks=1)
    for name in found.moments:
        torch.testing.assert_close(part.outputs[name], first.outputs[name])
        if name != "model.embed_tokens.weight":
            torch.testing.assert_close(part.moments[name], found.moments[name])
    small = calibrate(llama, CHUNKS, moments_bytes=0)
    assert all(moments.dim() == 1 for moments in small.moments.values())
    torch.testing.assert_close(
        small.moments["model.layers.1.mlp.down_proj.weight"], expected.diagonal(), rtol=1e-4, atol=1e-7
    )
    with pytest.raises(InputError, match="at least one token"):
        calibrate(llama, [])


def test_predicted_divergence_is_about_the_measured_one(llama: Any) -> None:
    import copy

    found = calibrate(llama, CHUNKS)
    name = "model.layers.1.mlp.up_proj.weight"
    weight = llama.get_parameter(name).detach()
    changed = copy.deepcopy(llama)
    other = weight + 0.2 * weight.std() * torch.randn(
        weight.shape, generator=torch.Generator().manual_seed(3)
    )
    changed.get_parameter(name).data.copy_(other)
    predicted = 0.5 * float((output_errors(weight, other, found.moments[name]) * found.outputs[name]).sum())
    with torch.no_grad():
        p, q = (
            torch.cat([m(input_ids=chunk.unsqueeze(0)).logits[0] for chunk in CHUNKS]).log_softmax(-1)
            for m in (llama, changed)
        )
    measured = float((p.exp() * (p - q)).sum(-1).mean())
    assert 0.2 < predicted / measured < 5


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "opt"])
def test_matrices_of_families(family: str) -> None:
    model = tiny_model(family)
    found = {m.name: m for m in matrices_of(model)}
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    roles = [m.role for m in found.values() if m.role != "projection"]
    assert roles == (["tied"] if tied else ["embedding", "head"])
    for name, m in found.items():
        shape = tuple(model.get_parameter(name).shape)
        assert (tuple(reversed(shape)) if m.transposed else shape) == (m.N, m.K)
    assert len(found) == len({id(model.get_parameter(name)) for name in found})


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("bits", [3.9, 4.5, 6.0, 9.0])
def test_budget_is_kept_to_the_byte(llama: Any, bits: float, calibrated: bool) -> None:
    source = ModelSource(llama, calibration=calibrate(llama, CHUNKS) if calibrated else None)
    plan = plan_bits(source, bits)
    held = {
        m.name: source.panels(Weight(m.name, m.transposed), plan.format(m.name)).nbytes
        for m in matrices_of(llama)
    }
    weights = sum(p.numel() for p in llama.parameters())
    norms = sum(p.numel() for p in llama.parameters() if p.dim() == 1)
    assert plan.weights == weights
    assert plan.bytes == sum(held.values()) + 4 * norms
    assert plan.bytes * 8 <= bits * weights
    # No single step that gains is left that would still fit.
    assert bits * weights / 8 - plan.bytes < max(row.bytes for row in plan.rows)
    assert plan.format("lm_head.weight") is plan.format("model.embed_tokens.weight")
    assert plan.format("nothing") is None
    text = str(plan)
    assert f"{plan.bits_per_weight:.3f} bits" in text
    assert all(row.matrix.name in text for row in plan.rows)
    if calibrated:
        more = plan_bits(source, bits + 1.0)
        assert more.error < plan.error


def test_plan_of_one_format_and_refusals(llama: Any) -> None:
    source = ModelSource(llama)
    for name in ("int8g32", "bfloat16", "float32", "int5g64", "int4r"):
        assert {row.format for row in plan_bits(source, name).rows} == {named(name)}
    assert {row.format for row in plan_bits(source, "int8").rows} == {named("int8r")}
    assert plan_bits(source, "int4").bits_per_weight <= 4.0
    with pytest.raises(ConfigError, match="at least 3"):
        plan_bits(source, 2.0)
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        plan_bits(source, "int88")
    with pytest.raises(ConfigError, match="positive"):
        plan_bits(source, "-1")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_allocation_keeps_the_limit_and_never_lowers_for_more_bytes(data: st.DataObject) -> None:
    formats = [named(name) for name in LADDER]
    count = data.draw(st.integers(1, 5))
    matrices = [
        Matrix(f"w{i}", data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300)), "projection")
        for i in range(count)
    ]
    errors = [
        data.draw(st.lists(st.floats(0, 10), min_size=len(formats), max_size=len(formats))) for _ in matrices
    ]
    least = sum(min(f.matrix_bytes(m.N, m.K) for f in formats) for m in matrices)
    limit = least + data.draw(st.integers(-100, 500_000))
    rows = allocate(matrices, formats, errors, limit)
    if limit < least:
        assert rows == []
        return
    assert sum(row.bytes for row in rows) <= limit
    for row, m, error in zip(rows, matrices, errors, strict=True):
        assert row.bytes == row.format.matrix_bytes(m.N, m.K)
        # Nothing that is no larger is better.
        smaller = [e for f, e in zip(formats, error, strict=True) if f.matrix_bytes(m.N, m.K) <= row.bytes]
        assert row.error == min(smaller)


def test_uncalibrated_matrices_are_planned_without(llama: Any) -> None:
    found = calibrate(llama, CHUNKS)
    part = Calibration(
        found.tokens, dict(list(found.moments.items())[:3]), dict(list(found.outputs.items())[:3])
    )
    assert plan_bits(ModelSource(llama, calibration=part), "int4").bits_per_weight <= 4.0
