"""A program computes what its model computes: for every family, at every edge of a block."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import CONTEXT, ByHand, logits_of, program_of, runner_of

from hasten.base.errors import CaptureError
from hasten.models import tiny_model
from hasten.ops import native
from hasten.ops.panels import named
from hasten.serve.model_runner import ModelRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from unlisted import unlisted_model

pytestmark = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)

FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "smollm3", "gpt2", "gpt_neox",
    "opt", "bloom",
)  # fmt: skip
PROMPT = 70


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    return tiny_model(request.param).eval()


def test_logits_and_greedy_tokens_are_the_models(model):
    tokens = tokens_of(PROMPT)
    runner = runner_of(model)
    expected = logits_of(model, tokens)
    found = ByHand(runner).feed({0: tokens})
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() <= 2e-5 * max(1.0, scale)
    with torch.no_grad():
        generated = model.generate(
            torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    assert ByHand(runner).greedy(tokens, 24) == generated[0, PROMPT:].tolist()


@pytest.mark.parametrize("first", [1, 31, 32, 33, 63, 64, 65])
def test_a_prompt_in_two_pieces_gives_the_same(first: int):
    torch.manual_seed(0)
    model = tiny_model("gemma2").eval()
    tokens = tokens_of(PROMPT)
    runner = runner_of(model)
    whole = ByHand(runner).feed({0: tokens})
    by_hand = ByHand(runner)
    pieces = [by_hand.feed({0: tokens[:first]}), by_hand.feed({0: tokens[first:]})]
    assert np.abs(np.concatenate(pieces) - whole).max() <= 1e-5


def test_sequences_of_one_step_do_not_see_each_other():
    torch.manual_seed(0)
    model = tiny_model("qwen3").eval()
    runner = runner_of(model)
    prompts = {s: tokens_of(length, s) for s, length in enumerate((5, 40, 33, 1))}
    together = ByHand(runner, 4).feed(prompts, every=False)
    for sequence, prompt in prompts.items():
        alone = ByHand(runner).feed({0: prompt}, every=False)[0]
        assert np.abs(together[sequence] - alone).max() <= 1e-5


def test_what_another_sequence_left_in_a_block_changes_nothing():
    torch.manual_seed(0)
    model = tiny_model("llama").eval()
    runner = runner_of(model, cache="bfloat16")
    tokens = tokens_of(9)
    clean = ByHand(runner).feed({0: tokens})
    for cache in runner._linked.cache:
        cache.fill(np.nan)
    assert np.array_equal(ByHand(runner).feed({0: tokens}), clean)


def test_the_order_of_roots_in_the_arena_overlaps_no_life():
    program = program_of(tiny_model("llama").eval())
    assert len(program.layers) == 3
    assert program.windows() == (0,)


FURTHER = (
    "olmo2", "stablelm", "cohere", "granite", "starcoder2", "gemma", "glm4", "gptj", "codegen", "llama_bias",
    "exaone4", "nemotron", "gpt_neox_japanese", "xglm", "nanochat", "helium", "apertus", "bart",
)  # fmt: skip
# Masks that are written out: ALiBi, a window in every other layer; latent attention.
WRITTEN = ("falcon", "falcon_alibi", "mpt", "gpt_neo", "gpt_neo_wide", "deepseek_v2", "deepseek_v3")
ROUTED = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "deepseek_v2_moe",
    "deepseek_v3_moe",
)  # fmt: skip


@pytest.mark.parametrize("name", FURTHER)
def test_families_without_a_list_of_their_own(name: str):
    model = unlisted_model(name).eval()
    tokens = tokens_of(50)
    expected, found = logits_of(model, tokens), ByHand(runner_of(model)).feed({0: tokens})
    assert np.abs(found - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", [*WRITTEN, *ROUTED])
def test_what_masks_and_routers_compute_is_the_models(name: str):
    """Logits of a prompt longer than every window, greedy tokens, and pieces beside other sequences."""
    model = unlisted_model(name).eval()
    tokens = tokens_of(120)
    expected, runner = logits_of(model, tokens), runner_of(model)
    close = 2e-5 * max(1.0, np.abs(expected).max())
    assert np.abs(ByHand(runner).feed({0: tokens}) - expected).max() <= close
    together = ByHand(runner, 2)
    pieces = [
        together.feed({0: tokens[:65], 1: tokens[:9]})[:65],
        together.feed({1: [7], 0: tokens[65:]})[1:],
    ]
    assert np.abs(np.concatenate(pieces) - expected).max() <= close
    with torch.no_grad():
        given = torch.tensor([tokens])
        generated = model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    assert ByHand(runner).greedy(tokens, 12) == generated[0, 120:].tolist()


def test_a_window_behind_a_written_mask_is_found_however_wide_it_is():
    assert program_of(unlisted_model("gpt_neo").eval()).windows() == (0, 8)
    assert program_of(unlisted_model("gpt_neo_wide").eval()).windows() == (0, 100)


@pytest.mark.parametrize(
    ("name", "what"), [("rwkv", "pad"), ("jetmoe", "traced"), ("bert", "attention: .* not causal")]
)
def test_what_has_no_instruction_is_named(name: str, what: str, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(CaptureError, match=what):
        program_of(unlisted_model(name).eval())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["mpt", "mixtral"])
def test_a_model_without_a_program_is_served_by_its_own_forward(name: str):
    torch.manual_seed(0)
    model = unlisted_model(name).eval()
    runner = ModelRunner(model, CONTEXT, 64, 128, 128)
    tokens = tokens_of(40)
    expected = logits_of(model, tokens)
    by_hand = ByHand(runner, 2)
    found = [by_hand.feed({0: tokens[:33], 1: tokens[:5]})[:33], by_hand.feed({0: tokens[33:]})]
    assert np.abs(np.concatenate(found) - expected).max() <= 1e-5
    # What the second sequence holds was not touched by the first.
    assert np.abs(by_hand.feed({1: tokens[5:]}) - expected[5:]).max() <= 1e-5


ALONE = [
    (tiny_model, "llama"),
    (tiny_model, "mistral"),
    *((unlisted_model, n) for n in ("gpt_neo", "mixtral", "deepseek_v3_moe")),
]


@pytest.mark.parametrize(("make", "family"), ALONE)
@pytest.mark.parametrize("cache", ["float32", "bfloat16", "int8"])
def test_a_row_does_not_depend_on_what_else_is_in_the_step(make: Any, family: str, cache: str):
    """To the bit: alone, beside others, beside pieces of prompts, and as a part of its own prompt; and
    whatever was in the blocks before.
    """
    torch.manual_seed(0)
    runner = runner_of(make(family).eval(), cache=cache, step_tokens=300, step_logits=300)
    prompts = {s: tokens_of(length, s) for s, length in enumerate((150, 7, 40))}
    alone = ByHand(runner)
    for token in prompts[0]:
        expected = alone.feed({0: [token]})
    whole = ByHand(runner).feed({0: prompts[0]})
    assert np.array_equal(whole[-1], expected[0])
    for memory in runner._linked.cache:
        memory.fill(np.nan)
    together = ByHand(runner, 3)
    together.feed({0: prompts[0][:149], 1: prompts[1]})
    found = together.feed({2: prompts[2], 0: prompts[0][149:], 1: [9]})
    assert np.array_equal(found[len(prompts[2])], expected[0])
    others = ByHand(runner, 3)
    others.feed({0: prompts[0][:149], 1: prompts[1], 2: prompts[2]})
    assert np.array_equal(others.feed({1: [9], 0: prompts[0][149:], 2: [9]})[1], expected[0])


@pytest.mark.parametrize("rows", [2, 300])
def test_fewer_threads_than_were_asked_for_do_all_the_work(rows: int):
    """As where the runtime gives no more: OMP_THREAD_LIMIT holds for the whole process."""
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "graph")]!r}
import numpy as np, torch
from programs import ByHand, runner_of
from hasten.models import tiny_model
from hasten.ops.panels import named
torch.manual_seed(0)
runner = runner_of(tiny_model("llama").eval(), named("int4m"), step_tokens=300)
prompts = {{s: torch.randint(3, 250, ({rows} // 2,)).tolist() for s in range(2)}}
found = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    found.append(ByHand(runner, 2).feed(prompts, every=False))
assert torch.get_num_threads() == 2
assert np.array_equal(*found)
"""
    given = os.environ | {"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], env=given, check=True, timeout=120)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("form", ["int4m", "int5", "int8", "int6g16", "int4r"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bloom", "phi3", "gemma2"])
def test_rows_of_each_threads_own_are_the_rows_of_a_shared_step(family: str, form: str, threads: int):
    """To the bit: two prompts in one step, of so many rows that threads take their own, and in small pieces.

    438 rows are 55 tiles, which three threads cannot share evenly, and the last is not full. They begin at an
    odd position, so that the two tokens of a pair in the cache are in tiles of different threads; a step
    behind them reads what was stored.
    """
    torch.manual_seed(0)
    cache = {"int5": "float32", "int8": "int8"}.get(form, "bfloat16")
    runner = runner_of(tiny_model(family).eval(), named(form), cache, step_tokens=441, step_logits=441)
    prompts = {s: tokens_of(length, s) for s, length in enumerate((221, 220))}
    pieces, whole = ByHand(runner, 2), ByHand(runner, 2)
    expected: dict[int, list[Any]] = {s: [] for s in prompts}
    for first in range(0, 221, 37):
        for s, prompt in prompts.items():
            expected[s].extend(pieces.feed({s: prompt[first : first + 37]}))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        begin = whole.feed({0: prompts[0][:3]})
        found = np.concatenate([begin, whole.feed({0: prompts[0][3:], 1: prompts[1]})])
        assert np.array_equal(found, np.stack(expected[0] + expected[1]))
        assert np.array_equal(whole.feed({0: [9], 1: [9]}), pieces.feed({0: [9], 1: [9]}))
    finally:
        torch.set_num_threads(before)
