"""The longest context that fits into the memory that the plain model needs for a short one.

Memory is the high-water mark of a process that opens the model, reads a prompt and answers with a few tokens.
The lengths double until one does not fit, and the last interval is halved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hasten.bench.generation.report import Longest, LongestContext

BUDGET_TOKENS = 512
RESOLUTION_TOKENS = 64

Probe = Callable[[str, int], int]
"""(contender, tokens of prompt and answer) to peak memory in bytes."""


def longest_context(
    names: Sequence[str],
    budget_of: str,
    model_tokens: int,
    probe: Probe,
    *,
    budget_tokens: int = BUDGET_TOKENS,
    resolution_tokens: int = RESOLUTION_TOKENS,
) -> LongestContext:
    """Measures the budget and the longest context of every contender but `budget_of`.

    Args:
        model_tokens: the longest sequence of the model.

    Raises: as `probe` does.
    """
    budget = probe(budget_of, budget_tokens)
    found = {
        name: _longest(name, budget, budget_tokens, model_tokens, resolution_tokens, probe)
        for name in names
        if name != budget_of
    }
    return LongestContext(
        budget_bytes=budget,
        budget_of=budget_of,
        budget_tokens=budget_tokens,
        resolution_tokens=resolution_tokens,
        contenders=found,
        ratios={name: longest.tokens / budget_tokens for name, longest in found.items()},
    )


def _longest(name: str, budget: int, first: int, model_tokens: int, resolution: int, probe: Probe) -> Longest:
    peaks: dict[int, int] = {}

    def fits(tokens: int) -> bool:
        peaks[tokens] = probe(name, tokens)
        return peaks[tokens] <= budget

    fitting, beyond = 0, None
    tokens = min(first, model_tokens)
    while beyond is None and fitting < model_tokens:
        if fits(tokens):
            fitting, tokens = tokens, min(2 * tokens, model_tokens)
        else:
            beyond = tokens
    while beyond is not None and beyond - fitting > resolution:
        tokens = fitting + max(resolution, (beyond - fitting) // 2 // resolution * resolution)
        if fits(tokens):
            fitting = tokens
        else:
            beyond = tokens
    return Longest(
        tokens=fitting,
        peak_rss_bytes=peaks.get(fitting, 0),
        limited_by="model" if beyond is None else "memory",
        probes={str(tokens): peaks[tokens] for tokens in sorted(peaks)},
    )
