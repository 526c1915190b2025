"""The table of measured choices: its verdicts, its file, and that calls follow it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hasten.base.screen import Screen
from hasten.ops import choices, native, tune
from hasten.ops.attention import attention
from hasten.ops.cases import Case, all_cases
from hasten.ops.choices import Row, Table
from hasten.train import tuning

needs_kernels = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)


def row(
    op: str = "attention", size: tuple[int, int] = (10, 12), ratio: float = 2.0, dtype: str = "float32"
) -> Row:
    """A measurement in which the kernel took `ratio` times as long as torch."""
    return Row(op=op, dtype=dtype, size=size, case="made-up", native_s=ratio, torch_s=1.0)


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, with tables allowed."""
    monkeypatch.setenv("HASTEN_TUNE", "1")
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path))
    choices.in_force.cache_clear()
    yield tmp_path
    choices.in_force.cache_clear()


def small_attention() -> Case:
    return next(c for c in all_cases()["attention"] if c.name == "causal-63")


def test_verdicts() -> None:
    table = Table(rows=(row(), row(size=(20, 20), ratio=0.5), row(op="rotary", ratio=1.04)))
    assert table.torch_wins("attention", "float32", (10, 12))
    assert table.torch_wins("attention", "float32", (11, 13))
    assert not table.torch_wins("attention", "float32", (12, 13))  # three powers of two away: unknown
    assert not table.torch_wins("attention", "float32", (19, 20))
    assert not table.torch_wins("attention", "bfloat16", (10, 12))
    assert not table.torch_wins("rotary", "float32", (10, 12))  # within the margin
    assert set(table.by_operator) == {"attention"}


def test_size_of_a_call() -> None:
    a, b = torch.empty(3, 5), torch.empty(1000, dtype=torch.bfloat16)
    assert choices._described((a, b, None, 2.0)) == ("float32", (4, 10))
    assert choices._described(([b, b], a)) == ("bfloat16", (11, 11))
    assert choices._described((torch.empty(0), 1)) == ("float32", (0, 0))
    # gelu says nothing of silu.
    assert choices._described((b, "gelu")) == ("bfloat16 gelu", (10, 10))


@needs_kernels
def test_calls_follow_the_table(tuned: Path) -> None:
    """Forward and backward each by their own rows; another size keeps the kernel."""
    leaves = [torch.randn(1, 2, 40, 16, requires_grad=True) for _ in range(3)]
    with choices.observed() as seen:
        attention(*leaves)[0].sum().backward()
    names = [name for name, _, _ in seen]
    assert names == ["attention", "attention_backward"]

    def launches() -> tuple[int, int]:
        start = native.launches()
        out = attention(*leaves)[0]
        middle = native.launches()
        out.sum().backward()
        return middle - start, native.launches() - middle

    assert all(launches())
    size = dict(zip(names, (entry[2] for entry in seen), strict=True))
    choices.keep([row(size=size["attention"])])
    forward, backward = launches()
    assert forward == 0
    assert backward > 0
    choices.keep(
        [row(size=size["attention"], ratio=0.5), row("attention_backward", size["attention_backward"])]
    )
    forward, backward = launches()
    assert forward > 0
    assert backward == 0


@needs_kernels
def test_the_file_belongs_to_this_machine_and_build(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choices.in_force() == Table()
    kept = choices.keep([row()])
    assert kept.rows == (row(),)
    assert choices.path().parent == tuned / "choices"
    assert set(kept.key) == {"processor", "level", "cores", "torch", "hasten", "kernels"}
    assert all(kept.key.values())
    copied = json.loads(choices.path().read_text())
    copied["key"]["processor"] = "another"
    choices.path().write_text(json.dumps(copied))
    choices.in_force.cache_clear()
    assert choices.in_force().rows == ()
    assert "of another machine" in choices.in_force().source
    for damaged in ("{", '{"rows": [{"op": "x"}]}', '{"rows": [], "more": 1}'):
        choices.path().write_text(damaged)
        choices.in_force.cache_clear()
        assert choices.in_force().rows == ()
        assert "cannot be read, the kernels run" in choices.in_force().source
    choices.keep([row()])
    monkeypatch.setenv("HASTEN_TUNE", "0")
    choices.in_force.cache_clear()
    assert choices.in_force().rows == ()
    assert "HASTEN_TUNE=0" in choices.in_force().source


@needs_kernels
def test_tuning(tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Measures both directions of a case once, and a second use measures nothing."""
    monkeypatch.setattr(tune, "all_cases", lambda: {"attention": [small_attention()]})
    tuning.tune_once(Screen())
    table = choices.in_force()
    assert {(r.op, r.dtype) for r in table.rows} == {
        (op, dtype) for op in ("attention", "attention_backward") for dtype in ("float32", "bfloat16")
    }
    assert all(r.native_s > 0 and r.torch_s > 0 for r in table.rows)
    assert "first use on this machine" in capsys.readouterr().err
    before = native.launches()
    tuning.tune_once(Screen())
    assert native.launches() == before
    assert capsys.readouterr().err == ""


@needs_kernels
def test_tuning_ends_with_its_time(tuned: Path) -> None:
    assert list(tune.measure(0.0, lambda done_s, what: None)) == []


@needs_kernels
def test_a_cache_that_cannot_be_written_is_a_warning(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "all_cases", dict)
    (tuned / "choices").write_text("a file in the place of the folder")
    tuning.tune_now(Screen(enabled=False))
    assert "the measured choices are not kept" in capsys.readouterr().err


def test_nothing_is_measured_where_tables_are_off(
    tuned: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HASTEN_TUNE", "0")
    choices.in_force.cache_clear()
    tuning.tune_once(Screen())
    assert tune.tune(1.0).rows == ()
    assert capsys.readouterr().err == ""
    assert not choices.path().exists()


@needs_kernels
def test_an_operator_without_a_kernel_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(generator: torch.Generator, dtype: torch.dtype) -> tuple[tuple[torch.Tensor], dict[str, int]]:
        return (torch.ones(4, dtype=dtype),), {}

    cases = [Case("sine", name, make, torch.sin, torch.sin) for name in "abc"]
    monkeypatch.setattr(tune, "all_cases", lambda: {"sine": cases})
    tried: list[str] = []
    assert list(tune.measure(5.0, lambda spent_s, what: tried.append(what))) == []
    assert len(tried) == 2  # one for each dtype


@pytest.mark.parametrize(("slow_s", "pairs"), [(0.0, tune.MIN_PAIRS), (0.002, tune.CONFIRM_PAIRS)])
def test_a_kernel_that_loses_is_measured_longer(
    slow_s: float, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "PAIR_S", 0.0)
    times = {False: 1.0 + slow_s * 1000, True: 1.0}
    calls: list[bool] = []

    def timed(call: object, torch_body: bool) -> float:
        calls.append(torch_body)
        return times[torch_body] * 1e-3

    monkeypatch.setattr(tune, "_timed", timed)
    native_s, torch_s = tune._fastest(lambda: None, 0.0)
    assert calls == [False, True] * pairs
    assert (native_s > torch_s) == (slow_s > 0)
