"""The tasks of the bench: what a masked batch is, what inference compares, and which model can do which."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hasten.base.errors import ConfigError
from hasten.base.screen import Screen
from hasten.bench import compare, contender, tasks, train, workload
from hasten.bench.contenders import Spec
from hasten.bench.report import ModelSize


def test_masking_keeps_the_ids_and_predicts_a_seventh_of_them() -> None:
    ids = np.random.default_rng(0).integers(0, 90, (40, 100))
    inputs, labels = tasks.mask_tokens(ids, 103, 90, seed=1)
    chosen = labels != tasks.IGNORE
    assert 0.13 < chosen.mean() < 0.17
    assert (labels[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    assert 0.7 < (inputs[chosen] == 103).mean() < 0.9
    again = tasks.mask_tokens(ids, 103, 90, seed=1)
    assert (again[0] == inputs).all()
    short = tasks.mask_tokens(ids[:, :2], 103, 90, seed=1)[1]
    assert ((short != tasks.IGNORE).sum(axis=1) >= 1).all()


@pytest.mark.parametrize("task", ["clm", "mlm"])
def test_what_the_loss_rounds_off(task: tasks.Task) -> None:
    """A loss of many small terms: torch's is compared with float64 over the same logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 49152, generator=generator) * 3
    labels = torch.randint(0, 49152, (2, 9), generator=generator)
    labels[0, :4] = tasks.IGNORE
    shifted = (logits[:, :-1], labels[:, 1:]) if task == "clm" else (logits, labels)
    rows, expected = (x.flatten(0, 1) for x in shifted)
    exact = float(torch.nn.functional.cross_entropy(rows.double(), expected))
    assert tasks.loss_rounding(exact, logits, labels, task) == pytest.approx(0, abs=1e-12)
    assert tasks.loss_rounding(exact + 1e-5, logits, labels, task) == pytest.approx(1e-5, rel=1e-4)
    with_other_terms = exact * (1 + 2e-4)
    assert tasks.loss_rounding(with_other_terms, logits, labels, task) is None


def test_the_probe_sees_every_element() -> None:
    hidden, ids = torch.randn(2, 3, 8), torch.randint(0, 90, (2, 3))
    before = tasks.probe_loss(hidden, ids)
    assert before == tasks.probe_loss(hidden, ids)
    for place in ((0, 0, 0), (1, 2, 7)):
        changed = hidden.clone()
        changed[place] += 0.5
        assert tasks.probe_loss(changed, ids) != before


@pytest.mark.parametrize(
    ("model", "task", "words"),
    [
        ("tiny:llama", "mlm", "causal language model; allowed: clm or infer"),
        ("bert-large-random", "clm", "masked language model; allowed: mlm or infer"),
        ("tiny:bert", "clm", "masked"),
        ("tiny:llama", "mml", "mlm"),
    ],
)
def test_a_task_for_the_other_kind_of_model(model: str, task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train.check_model_and_task(model, task)


def test_inference_is_a_third_of_the_work() -> None:
    size = ModelSize(parameters=10, product_parameters=8, attention_width=4, sees_documents=True)
    assert 3 * compare.flops_per_step(size, 5, 7.0, "infer") == compare.flops_per_step(size, 5, 7.0, "mlm")


@pytest.mark.parametrize(
    ("model", "task"), [("tiny:bert", "mlm"), ("tiny:bert", "infer"), ("tiny:llama", "infer")]
)
def test_contenders_do_the_same(model: str, task: str, tmp_path: Path, text_folder: Path) -> None:
    blocks = workload.make_blocks(model, str(text_folder), 2, 2, 16, 0, Screen())
    workload.save_blocks(blocks, tmp_path / "blocks.npz", task)
    losses = {}
    for name in ("eager-fp32", "hasten-fp32"):
        spec = Spec(
            contender=name,
            model=model,
            task=task,
            blocks_file=str(tmp_path / "blocks.npz"),
            batch=2,
            steps=2,
            learning_rate=1e-3,
            seed=0,
            bf16=False,
        )
        measured = contender.run(spec).round
        assert len(measured.steps_s) == 2
        losses[name] = measured.losses
    assert losses["hasten-fp32"] == pytest.approx(losses["eager-fp32"], rel=1e-5)
