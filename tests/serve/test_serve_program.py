"""A program computes what its model computes: for every family, at every edge of a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from programs import ByHand, logits_of, program_of, runner_of

from hasten.models import tiny_model
from hasten.ops import native

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
        cache.fill_(float("nan"))
    assert np.array_equal(ByHand(runner).feed({0: tokens}), clean)


def test_the_order_of_roots_in_the_arena_overlaps_no_life():
    program = program_of(tiny_model("llama").eval())
    assert len(program.layers) == 3
    assert program.windows() == (0,)
