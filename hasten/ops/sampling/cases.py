"""Cases of sampling: the tokens, and the probabilities that they are drawn from.

Values stay in float32: their error is judged against the float64 reference as that of every operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasten.ops.cases import Case, Inputs
from hasten.ops.sampling import argmax, reference, sample, table
from hasten.ops.sampling.rule import Rule

F32 = (torch.float32,)


def op_argmax(logits: Tensor) -> Tensor:
    """Of every row."""
    return torch.from_numpy(argmax(logits.numpy(), range(len(logits))))


def reference_argmax(logits: Tensor) -> Tensor:
    """The first of the largest."""
    return torch.tensor([int((row == row.max()).nonzero()[0]) for row in logits], dtype=torch.int64)


def op_sample(logits: Tensor, rules: tuple[Rule, ...]) -> tuple[Tensor, ...]:
    """Tokens, probabilities and log-probabilities, [L, V + 1]."""
    words, lists = table(rules)
    drawn = sample(logits.numpy(), words, lists, probabilities=True)
    found = (drawn.tokens, drawn.probabilities, drawn.logprobs, drawn.top_tokens)
    return tuple(map(torch.from_numpy, found))


def reference_sample(
    logits: Tensor, rules: tuple[Rule, ...], dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """The same, row by row."""
    drawn = [reference.sample(row, rule, dtype) for row, rule in zip(logits, rules, strict=True)]
    listed = rules[0].top is not None
    logprobs = [[one.logprob, *(value for _, value in one.top)] if listed else [] for one in drawn]
    top = [[token for token, _ in one.top] for one in drawn]
    return (
        torch.tensor([one.token for one in drawn]),
        torch.stack([one.probabilities for one in drawn]),
        torch.tensor(logprobs, dtype=torch.float64).reshape(len(drawn), -1),
        torch.tensor(top, dtype=torch.int64).reshape(len(drawn), -1),
    )


def op_tokens(logits: Tensor, rules: tuple[Rule, ...]) -> Tensor:
    """The tokens alone, as an engine asks for them."""
    return torch.from_numpy(sample(logits.numpy(), *table(rules)).tokens)


def reference_tokens(logits: Tensor, rules: tuple[Rule, ...]) -> Tensor:
    """The same, row by row."""
    return reference_sample(logits, rules)[0]


def plain_tokens(logits: Tensor, rules: tuple[Rule, ...]) -> Tensor:
    """The same in float32, as a user would write it: a sort of all logits."""
    return reference_sample(logits, rules, torch.float32)[0]


def plain_argmax(logits: Tensor) -> Tensor:
    """torch's own, which promises no order among equals."""
    return logits.argmax(1)


def case(
    name: str, rows: int, vocab: int, *, spread: float = 2.0, benchmark: bool = False, **options: Any
) -> Case:
    """One case: rows of normal logits, one rule for all with the row as seed."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        logits = torch.randn(rows, vocab, generator=generator) * spread
        lists: dict[str, Any] = {}
        kinds = options.get("lists", ())
        if "history" in kinds:
            tokens = torch.randperm(vocab, generator=generator)[: vocab // 4]
            counts = torch.randint(-1, 4, tokens.shape, generator=generator)
            lists["history"] = torch.stack([tokens, counts], 1).to(torch.int32).numpy()
        if "bias" in kinds:
            tokens = torch.randperm(vocab, generator=generator)[: vocab // 8].to(torch.int32)
            lists["bias"] = tokens.numpy(), (torch.randn(len(tokens), generator=generator) * 5).numpy()
        if "mask" in kinds:
            words = torch.randint(-(2**31), 2**31, ((vocab + 31) // 32,), generator=generator)
            lists["mask"] = words.to(torch.int32).numpy()
        numbers = {k: v for k, v in options.items() if k != "lists"}
        rules = tuple(Rule(seed=row, position=3 * row, **numbers, **lists) for row in range(rows))
        return (logits, rules), {}

    if benchmark:
        return Case(
            "sample", name, make, op_tokens, reference_tokens, plain_tokens, dtypes=F32, benchmark=True
        )
    return Case("sample", name, make, op_sample, reference_sample, dtypes=F32)


def argmax_case(name: str, rows: int, vocab: int, *, ties: bool = False, benchmark: bool = False) -> Case:
    """One case; `ties`: few distinct values."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        logits = torch.randn(rows, vocab, generator=generator)
        return (logits.round() if ties else logits,), {}

    plain = plain_argmax if benchmark else None
    return Case("argmax", name, make, op_argmax, reference_argmax, plain, dtypes=F32, benchmark=benchmark)


ALL = ("history", "bias", "mask")
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
CASES = [
    argmax_case("one", 3, 1),
    argmax_case("rows", 5, 513),
    argmax_case("ties", 4, 1000, ties=True),
    argmax_case("smollm2", 1, 49152, benchmark=True),
    argmax_case("eight-rows", 8, 49152, benchmark=True),
    case("one-token", 2, 1, top=1),
    case("plain", 4, 513),
    case("warm", 4, 1000, temperature=1.7),
    case("top-k", 4, 1000, top_k=7, top=3),
    case("top-k-of-many", 2, 4099, top_k=1500),
    case("top-p", 4, 1000, top_p=0.9, temperature=0.7, top=0),
    case("top-p-of-many", 2, 4099, top_p=0.99, spread=0.5),
    case("min-p", 4, 1000, min_p=0.05),
    case(
        "all-of-them",
        3,
        2051,
        top_k=50,
        top_p=0.8,
        min_p=0.02,
        temperature=0.9,
        top=5,
        lists=ALL,
        **PENALTIES,
    ),
    case("coldest", 3, 2051, temperature=0.0, lists=ALL, top=20, **PENALTIES),
    case("smollm2", 1, 49152, benchmark=True),
    case("smollm2-top-k-top-p", 1, 49152, top_k=50, top_p=0.95, temperature=0.8, benchmark=True),
    case("smollm2-top-p", 1, 49152, top_p=0.95, temperature=0.8, benchmark=True),
]
