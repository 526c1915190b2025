"""Distilling: nearer to the model as it was, never worse, exact in what is stored, whatever the layout."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.base.errors import ConfigError, InputError, ShapeError
from hasten.base.screen import Screen
from hasten.models import tiny_model
from hasten.ops.panels import named
from hasten.ops.panels.reference import unpack
from hasten.serve import distil
from hasten.serve.calibrate import matrices_of
from hasten.serve.open import _planned, check_formats, open_runner, parse_weights
from hasten.serve.program import Weight
from hasten.serve.quantise import Quantised, search
from hasten.serve.weights import ModelSource, part_of

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from unlisted import unlisted_model

PIECES = [torch.randint(3, 250, (32,), generator=torch.Generator().manual_seed(seed)) for seed in range(60)]
UNSEEN = [
    torch.randint(3, 250, (32,), generator=torch.Generator().manual_seed(seed)) for seed in range(90, 98)
]


def opened(family: str) -> Any:
    """A small model that is sure of something: its weights are larger than fresh ones."""
    model = unlisted_model(family) if family in ("mixtral", "gpt_oss") else tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    return model.eval()


def rounded(model: Any, form: str) -> dict[str, Quantised]:
    return {
        m.name: search(
            part_of(model.get_parameter(m.name).detach(), Weight(m.name, m.transposed)).float(), named(form)
        )
        for m in matrices_of(model)
    }


def learnt(model: Any, matrices: dict[str, Quantised], steps: int) -> distil.Distilled:
    return distil.distil(copy.deepcopy(model), matrices, matrices_of(model), PIECES, steps)


def kl(model: Any, matrices: dict[str, Quantised]) -> float:
    """Of the model with such weights, over new pieces; written anew, without the code under test."""
    other = copy.deepcopy(model)
    for m in matrices_of(model):
        parameter, dense = other.get_parameter(m.name), matrices[m.name].dense()
        if parameter.dim() == 3:
            E = parameter.shape[0]
            N = parameter.shape[2 if m.transposed else 1]
            dense = dense.view(E, -1, dense.shape[1])[:, :N]
            dense = dense.transpose(1, 2) if m.transposed else dense
        elif m.transposed:
            dense = dense.t()
        with torch.no_grad():
            parameter.copy_(dense)
    total = 0.0
    for ids in UNSEEN:
        with torch.no_grad():
            p, q = (
                one(input_ids=ids[None], use_cache=False).logits[0].double().log_softmax(-1)
                for one in (model, other)
            )
        total += float((p.exp() * (p - q)).sum(-1).mean())
    return total / len(UNSEEN)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("llama", "int3g64"),
        ("llama", "int4m"),
        ("gpt2", "int3g64m"),
        ("mixtral", "int3g64"),
        ("gpt_oss", "int4"),
        ("llama", "int3r"),
        ("gpt2", "int3mr"),
        ("mixtral", "int3r"),
    ],
)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_what_learnt_is_nearer_to_the_model(family: str, form: str) -> None:
    model = opened(family)
    start = rounded(model, form)
    found = learnt(model, start, 60)
    assert found.helped
    assert kl(model, found.matrices) < 0.98 * kl(model, start)
    for name, matrix in found.matrices.items():
        assert matrix.format == start[name].format
        assert matrix.codes.shape == start[name].codes.shape
        torch.testing.assert_close(unpack(matrix.panels()), matrix.dense(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rate", [3.0, float("nan")])
def test_what_got_worse_is_not_kept(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    monkeypatch.setattr(distil, "_SCALE_RATE", rate)
    model = tiny_model("llama").eval()
    start = rounded(model, "int4m")
    found = learnt(model, start, 3)
    assert not found.helped
    assert all(found.matrices[name] is matrix for name, matrix in start.items())


def test_the_gradient_is_that_of_the_weights_where_nothing_is_rounded_away() -> None:
    """Scales and minima exactly; codes as if rounding were not there, none beyond the last code."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.tensor([[[0.2, 3.4, -0.7, 7.6]]]).requires_grad_()
    scale, base = torch.tensor([[0.5]]).requires_grad_(), torch.tensor([[-1.0]]).requires_grad_()
    given = torch.randn(1, 1, 4, generator=generator)
    found = distil._Rounded.apply(codes, scale, base, 7, torch.float32)
    torch.testing.assert_close(found.detach(), torch.tensor([[[-1.0, 0.5, -1.0, 2.5]]]))
    found.backward(given)
    torch.testing.assert_close(scale.grad, (given * torch.tensor([0.0, 3, 0, 7])).sum(-1))
    torch.testing.assert_close(base.grad, given.sum(-1))
    torch.testing.assert_close(codes.grad, given * torch.tensor([0.5, 0.5, 0, 0]))


@pytest.mark.parametrize("form", ["int3g64m", "int3mr"])
def test_the_start_is_what_rounding_chose_and_near_the_model(form: str) -> None:
    model = tiny_model("gpt2").eval()
    start = rounded(model, form)
    for m in matrices_of(model):
        learner = distil._Learner(start[m.name], m, model.get_parameter(m.name))
        same = learner.quantised()
        assert torch.equal(same.codes, start[m.name].codes)
        assert same.minima is not None
        assert torch.equal(same.minima, start[m.name].minima)
        assert torch.equal(same.scales, start[m.name].scales)
        dense = same.dense().t() if m.transposed else same.dense()
        torch.testing.assert_close(learner.weight(torch.float32), dense, rtol=1e-6, atol=1e-7)
        # As near to the original as the code allows: the same code, and nearer than half a step.
        codes = start[m.name].codes
        apart = (learner.codes.detach().flatten(1)[:, : codes.shape[1]] - codes).abs()
        assert float(apart.max()) <= 0.4501
        assert float(apart.mean()) > 0.1


@pytest.mark.parametrize("form", ["int4m", "int4r"])
def test_what_is_judged_is_what_is_stored(form: str) -> None:
    model = tiny_model("llama").eval()
    start = rounded(model, form)
    for m in matrices_of(model):
        learner = distil._Learner(start[m.name], m, model.get_parameter(m.name))
        with torch.no_grad():
            for moved in learner.moved:
                moved.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(0))
        stored = learner.quantised()
        learner.store()
        assert torch.equal(learner.quantised().scales, stored.scales)
        # A rotation's sums of small and large weights round as the largest do.
        exact = 1e-6 * float(stored.dense().abs().max()) if start[m.name].format.rotated else 1e-9
        torch.testing.assert_close(learner.weight(torch.float32), stored.dense(), rtol=1e-6, atol=exact)


def test_rates_climb_and_fall() -> None:
    rates = [distil.rate_at(step, 100) for step in range(100)]
    assert rates[0] < rates[4] <= 1
    assert 0 < rates[-1] < 0.06
    assert max(rates) <= 1
    assert min(rates) > 0


def test_parts_of_quantised_matrices() -> None:
    whole = search(torch.randn(40, 150, generator=torch.Generator().manual_seed(0)), named("int4g64m"))
    part = whole.part((3, 20), (64, 150))
    assert torch.equal(part.dense(), whole.dense()[3:20, 64:150])
    assert torch.equal(whole.part(None, (0, 64)).dense(), whole.dense()[:, :64])
    for columns in ((32, 64), (0, 100)):
        with pytest.raises(ShapeError, match="cut groups of 64"):
            whole.part(None, columns)


def test_a_source_takes_what_is_quantised_already() -> None:
    model = tiny_model("llama").eval()
    source, form = ModelSource(model), named("int4g64m")
    name = "model.layers.0.mlp.up_proj.weight"
    other = search(torch.zeros(tuple(model.get_parameter(name).shape)).add_(0.5), form)
    source.quantised = {name: other}
    assert torch.equal(unpack(source.panels(Weight(name, rows=(0, 16)), form)), other.dense()[:16])
    # Another format is made from the model itself.
    assert not torch.equal(unpack(source.panels(Weight(name), named("int8"))), other.dense())


def test_too_little_text_and_too_little_memory_are_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama").eval()
    with pytest.raises(InputError, match="5 pieces; distilling needs 8"):
        distil.distil(model, rounded(model, "int4"), matrices_of(model), PIECES[:5], 1)
    with pytest.raises(InputError, match="nothing to distil"):
        distil.distil(model, {}, matrices_of(model), PIECES, 1)
    with pytest.raises(ConfigError, match=r"distilling .* takes .* GB.*up to"):
        distil.check_memory(1 << 40, 50_000)


@pytest.fixture
def fresh_folder(small_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of which nothing is kept yet."""
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path))
    return small_model_folder


def test_memory_is_looked_at_before_the_slow_parts(
    fresh_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the slow part began")

    monkeypatch.setattr("hasten.serve.calibrate.calibrate", never)
    monkeypatch.setattr(distil, "_BYTES_PER_WEIGHT", 1 << 40)
    with pytest.raises(ConfigError, match="quantise without steps"):
        open_runner(fresh_folder, weights="int4:2")


def test_a_budget_that_quantises_nothing_is_refused(fresh_folder: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is quantised; leave out :5"):
        open_runner(fresh_folder, weights="17:5")


def test_what_learnt_is_what_is_packed(fresh_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Quantised] = {}
    real = distil.distil

    def noted(*given: Any) -> distil.Distilled:
        found = real(*given)
        kept.update(found.matrices)
        return found

    monkeypatch.setattr(distil, "_CODE_RATE", 0.05)
    monkeypatch.setattr(distil, "distil", noted)
    source, plan, note = _planned(fresh_folder, "4.5", 4, Screen(False))
    assert kept
    assert note["distilled"]["steps"] == 4
    for row in plan.rows:
        if row.matrix.name in kept:
            panels = source.panels(Weight(row.matrix.name, row.matrix.transposed), row.format)
            torch.testing.assert_close(unpack(panels), kept[row.matrix.name].dense(), rtol=1e-6, atol=1e-7)


def test_weights_with_steps() -> None:
    assert parse_weights("int4:100") == ("int4", 100)
    assert parse_weights("4.5") == ("4.5", None)
    for good in ("int4:1", "4.25:80", "int8:5", "int4r", "int5g64m:3"):
        check_formats(good, "bfloat16")
    for bad, message in (
        ("int4:", "a whole number from 1 to 999999, for example int4:200"),
        ("int4:-3", "whole number from 1"),
        ("4.5:0", "whole number from 1"),
        ("stored:10", "steps are for weights that are quantised here"),
        ("bfloat16:10", "for example int4:10"),
        ("int4:" + "9" * 5000, "whole number from 1"),
        ("in4:10", "int4"),
        ("int4g48", "a format of all matrices, for example int4r"),
        ("bfloat16m", "bfloat16"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_formats(bad, "bfloat16")
