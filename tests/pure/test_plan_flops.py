"""FLOPs under each convention, beside published figures."""

from __future__ import annotations

import pytest

from hasten.plan.flops import flops_per_token, layer_products, training_flops
from hasten.plan.model import ModelShape, preset


def test_gpt3_needs_what_its_paper_says() -> None:
    # arXiv 2005.14165 Table D.1: 3.14e23 FLOPs for 300B tokens (6 N D, N = 174.6B).
    assert training_flops(174.6e9, 300e9) == pytest.approx(3.14e23, rel=2e-3)
    assert training_flops(preset("gpt3-175b").parameters, 300e9) == pytest.approx(3.14e23, rel=5e-3)


def test_the_hardware_convention_is_megatrons_formula() -> None:
    # arXiv 2104.04473 equation 3: 96 B s l h^2 (1 + s / 6h + V / 16 l h).
    model, s = preset("gpt3-175b"), 2048
    h, layers, vocabulary = model.hidden, model.layers, model.vocabulary
    formula = 96 * layers * h**2 * (1 + s / (6 * h) + vocabulary / (16 * layers * h))
    # The formula counts the head in three passes as 6 s h V, of 96 s l h^2 one part in 16 l h / V.
    assert flops_per_token(model, s, "hardware") == pytest.approx(formula, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "sequence", "convention", "giga"),
    [
        # NVIDIA's published TFLOP/s/GPU over tokens/s/GPU: NeMo 24.07 (full square), Megatron-Bridge (half).
        ("gpt3-175b", 2048, "full", 1076.93),
        ("llama2-7b", 4096, "full", 46.06),
        ("llama2-70b", 4096, "full", 444.64),
        ("llama3-8b", 8192, "full", 57.91),
        ("llama3-70b", 8192, "full", 481.41),
        ("llama3-8b", 8192, "model", 51.48),
        ("llama3-70b", 8192, "model", 449.2),
        ("llama3-405b", 8192, "model", 2524.16),
    ],
)
def test_flops_of_a_token_are_those_published(name: str, sequence: int, convention: str, giga: float) -> None:
    found = flops_per_token(preset(name), sequence, convention) / 1e9  # type: ignore[arg-type]
    assert found == pytest.approx(giga, rel=2e-3)


def test_a_window_and_experts_lower_the_count() -> None:
    base = {"layers": 4, "hidden": 256, "heads": 4, "inner": 1024, "vocabulary": 1000}
    whole, near = ModelShape(**base), ModelShape(**base, window=128)  # type: ignore[arg-type]
    assert flops_per_token(near, 4096) < flops_per_token(whole, 4096)
    assert flops_per_token(near, 128) == flops_per_token(whole, 128)
    many = ModelShape(**base, experts=8, experts_per_token=2)  # type: ignore[arg-type]
    assert flops_per_token(many, 128) < 6 * many.active_parameters + flops_per_token(whole, 128)


def test_products_of_a_device_add_up_to_the_layers() -> None:
    model = preset("llama3-8b")
    whole = sum(p.flops for p in layer_products(model, 0, 512, 1, 1))
    assert sum(p.flops for p in layer_products(model, 0, 512, 4, 1)) * 4 == pytest.approx(whole)
    assert whole == pytest.approx(2 * 512 * (model.layer_parameters(0) - model.norm_parameters))
