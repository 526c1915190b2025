"""Rows are selected as early as can be: what is left for all rows, and that the answers are the same."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import ByHand, program_of, runner_of

from hasten.models import tiny_model
from hasten.ops import native
from hasten.ops.panels import BFLOAT16, FLOAT32, Format, named
from hasten.serve import fuse as rules
from hasten.serve.program import Program

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from unlisted import unlisted_model

needs_kernels = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)

MODELS = [
    *((tiny_model, n) for n in ("llama", "gpt2", "gemma2", "bloom", "phi3")),
    *((unlisted_model, n) for n in ("mixtral", "deepseek_v2_moe", "gpt_neo", "cohere")),
]


def fused(program: Program) -> Program:
    return rules.fuse(program, lambda a, b: True)


@pytest.mark.parametrize(("make", "family"), MODELS)
def test_everything_is_written_before_it_is_read(make: Any, family: str) -> None:
    program = fused(program_of(make(family).eval()))
    written: set[int] = set()
    for one in program.instructions:
        for ref in one.reads():
            assert ref.kind != "root" or ref.index in written, one
            # What is selected reads selected rows, apart from the selection itself.
            if ref.kind == "root" and one.op != "select":
                assert program.roots[ref.index].selected == one.selected, one
        if one.dst is not None:
            written.add(one.dst.index)
    assert program.logits in written


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "bloom", "phi3"])
def test_behind_the_last_attention_only_wanted_rows_go_on(family: str) -> None:
    program = fused(program_of(tiny_model(family).eval()))
    last = max(i for i, one in enumerate(program.instructions) if one.op == "merge")
    behind = program.instructions[last + 1 :]
    assert all(one.selected for one in behind)
    assert sum(one.op == "linear" for one in behind) >= 4
    assert sum(one.op == "select" for one in behind) == 2


@needs_kernels
@pytest.mark.parametrize("form", [FLOAT32, BFLOAT16, named("int4m")], ids=str)
@pytest.mark.parametrize(("make", "family"), MODELS)
def test_the_answers_are_those_of_all_rows(
    make: Any, family: str, form: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: the last rows of two prompts alone, of all rows, and without the rule; then a step more."""
    torch.manual_seed(0)
    model = make(family).eval()
    prompts = {s: torch.randint(3, 99, (length,)).tolist() for s, length in enumerate((150, 41))}
    found = []
    for every, rule in ((False, True), (True, True), (True, False)):
        if not rule:
            monkeypatch.setattr(rules, "wanted_rows_alone", lambda program: program)
        by_hand = ByHand(runner_of(model, form, step_tokens=200, step_logits=200), 2)
        logits = by_hand.feed(prompts, every=every)
        found.append((logits[[149, 190]] if every else logits, by_hand.feed({0: [5], 1: [6]})))
    for others in found[1:]:
        for mine, theirs in zip(found[0], others, strict=True):
            assert np.array_equal(mine, theirs)


def test_a_root_that_others_read_is_selected_where_it_is() -> None:
    """The logits of a program whose last sum is also stored: no rule may take it from the other rows."""
    program = program_of(tiny_model("llama").eval())
    select = next(one for one in program.instructions if one.op == "select")
    assert select.a is not None
    store = next(one for one in reversed(program.instructions) if one.op == "store")
    more = replace(store, a=replace(store.a, index=select.a.index), b=replace(store.b, index=select.a.index))
    at = program.instructions.index(select)
    given = replace(program, instructions=(*program.instructions[:at], more, *program.instructions[at:]))
    kept = [one for one in rules.wanted_rows_alone(given).instructions if one.op == "select"]
    assert kept == [select]
