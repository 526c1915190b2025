"""One contender: what it measures, what it says while it runs, and how it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hasten.base.errors import HastenError
from hasten.base.screen import Screen
from hasten.bench import contender, workload
from hasten.bench.contenders import Spec
from hasten.bench.train import ContenderError, run_contender
from hasten.models import open_model

QUIET = Screen(enabled=False)


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    (tmp_path / "text").mkdir()
    for number in range(8):
        (tmp_path / "text" / f"{number}.txt").write_text(
            "The quick brown fox jumps over the dog. " * (number + 1)
        )
    blocks = workload.make_blocks("tiny:llama", str(tmp_path / "text"), 3, 2, 32, 0, QUIET)
    assert blocks.documents > 6, "at least one row must hold two documents"
    workload.save_blocks(blocks, tmp_path / "blocks.npz")
    return Spec(
        contender="eager-fp32",
        model="tiny:llama",
        blocks_file=str(tmp_path / "blocks.npz"),
        batch=2,
        steps=3,
        learning_rate=1e-2,
        seed=0,
        bf16=False,
    )


def test_losses_are_those_of_a_plain_loop(spec: Spec):
    got = contender.run(spec)
    model, _ = workload.open_workload_model("tiny:llama", 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    blocks = np.load(spec.blocks_file)
    for step, loss in enumerate(got.round.losses):
        rows = {name: torch.from_numpy(blocks[name][2 * step : 2 * step + 2]) for name in blocks.files}
        expected = model(**rows, use_cache=False).loss
        assert loss == expected.item()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert got.round.losses[-1] < got.round.losses[0]


@pytest.mark.parametrize("task", ["clm", "infer"])
def test_where_the_time_of_a_step_goes(spec: Spec, task: str):
    plain = contender.run(spec.model_copy(update={"task": task, "where": False})).round
    got = contender.run(spec.model_copy(update={"task": task, "where": True})).round
    assert (plain.where, got.losses) == (None, plain.losses)
    assert got.where is not None
    names = [row.operator for row in got.where]
    assert {"products of matrices", "aten::_scaled_dot_product_flash_attention_for_cpu"} & set(names)
    assert ("optimizer" in names) == (task == "clm")


@pytest.mark.parametrize(("name", "measured"), [("eager-fp32", True), ("hasten-fp32", False)])
def test_plain_fp32_says_what_its_loss_rounds_off(spec: Spec, name: str, measured: bool):
    rounding = contender.run(spec.model_copy(update={"contender": name})).round.loss_rounding
    assert (rounding is not None) == measured
    assert rounding is None or abs(rounding) < 1e-5


def test_packed_documents_do_not_see_each_other(spec: Spec, tmp_path: Path):
    """Another first document in a row changes nothing of the loss over the second."""
    ids = np.tile(np.arange(32), (2, 1)) + 3
    positions = np.tile(np.concatenate([np.arange(12), np.arange(20)]), (2, 1))
    labels = np.where(np.arange(32) > 12, ids, -100)
    losses = []
    for first in (7, 9):
        ids[:, :12] = first
        np.savez(tmp_path / "two.npz", input_ids=ids, labels=labels, position_ids=positions)
        changed = spec.model_copy(update={"blocks_file": str(tmp_path / "two.npz"), "steps": 1})
        losses.append([contender.run(changed).round.losses[0]])
    assert losses[0] == losses[1]


def test_the_tuned_model_continues_the_prompt(spec: Spec, small_model_folder: Path):
    changed = {"model": str(small_model_folder), "prompt": "The quick", "new_tokens": 5, "learning_rate": 0.0}
    got = contender.run(spec.model_copy(update=changed))
    opened = open_model(small_model_folder)
    ids = opened.tokenizer("The quick", return_tensors="pt")["input_ids"]
    for _ in range(5):
        best = opened.model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
    assert got.round.text == opened.tokenizer.decode(ids[0, -5:])


def test_every_step_is_announced_and_timed(spec: Spec):
    events: list[dict[str, object]] = []
    got = contender.run(spec, lambda **event: events.append(event))
    assert [event["event"] for event in events] == ["opened", "step", "step", "step"]
    assert len(got.round.steps_s) == 3
    assert got.round.first_step_s == got.round.steps_s[0] > got.round.first_forward_s > 0
    assert got.round.open_s > 0
    assert got.round.peak_rss_bytes >= got.round.peak_rss_first_step_bytes >= got.round.rss_open_bytes // 2
    assert got.size.parameters > 100_000


def test_the_peak_is_this_process_and_not_its_parent():
    """`ru_maxrss` of a child starts at its parent's; the reading used here does not."""
    ballast = b"x" * (1 << 29)
    code = "from hasten.bench.contender import peak_resident_bytes as p; print(p())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(ballast) <= contender.peak_resident_bytes()
    assert 0 < int(out.stdout) < contender.peak_resident_bytes() - (1 << 27)


def test_a_loss_that_is_not_finite_ends_the_contender(spec: Spec):
    with pytest.raises(HastenError, match=r"eager-fp32: the loss of step \d is (nan|inf)"):
        contender.run(spec.model_copy(update={"learning_rate": 1e30}))


def test_a_process_that_fails_says_why(spec: Spec, tmp_path: Path):
    with pytest.raises(ContenderError, match=r"ended with 1(.|\n)*No such file"):
        run_contender(spec.model_copy(update={"blocks_file": "/nowhere.npz"}), tmp_path, "x", QUIET)


def test_a_failure_on_purpose_is_one_message(spec: Spec, tmp_path: Path):
    with pytest.raises(ContenderError) as caught:
        run_contender(spec.model_copy(update={"model": "tiny:lama"}), tmp_path, "x", QUIET)
    assert "Traceback" not in str(caught.value)
    assert "did you mean 'llama'" in str(caught.value)
