"""From raw rounds to what the report says: medians, shares of the limits, agreement with the judge, ratios.

Pure functions of numbers: no torch, no clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hasten.bench.generation.judge import Scored
from hasten.bench.generation.names import BASES, CONTENDERS, Kind
from hasten.bench.generation.report import Agreement, Contender, Ratio, Round, Streams
from hasten.bench.report import Limits

PERPLEXITY_RATIO = 1.05
"""What quantised weights may cost, as `--max-perplexity-ratio` of the serving commands has it."""

FULL_TOKENS = 64


class Bound(NamedTuple):
    """How far a contender's tokens and log-probabilities may be from the judge's; see `Agreement`."""

    regret: float
    logprob: float | None
    reason: str


def bound(weights: str, tokens: int) -> Bound:
    """The bound for means over `tokens` tokens with weights in a format.

    Errors of tokens are nearly independent: below 64 tokens it grows with the square root of what is missing.
    """
    full = _bound(weights)
    wider = max(1.0, math.sqrt(FULL_TOKENS / tokens))
    return Bound(full.regret * wider, full.logprob and full.logprob * wider, full.reason)


def _bound(weights: str) -> Bound:
    if weights == "float32":
        return Bound(
            1e-3,
            1e-3,
            "fp32: sums in another order change a logit by 1e-4 at most; ten times that is allowed",
        )
    if weights == "bfloat16":
        return Bound(
            5e-3,
            4e-2,
            "bf16 has 8 significant bits; plain PyTorch in bf16 is 1.3e-3 below the best and its "
            "log-probabilities differ by 9.7e-3 (SmolLM2-135M, 2026-11-29); four times that is allowed",
        )
    if weights == "stored":
        return Bound(
            5e-3,
            5e-2,
            "the file's own weights, inputs in 8 bits: llama.cpp's log-probabilities differ by 1.3e-2 "
            "(SmolLM2-135M in Q4_1, 2026-11-29); four times that is allowed",
        )
    return Bound(
        math.log(PERPLEXITY_RATIO),
        None,
        f"weights in few bits: the tokens may cost a factor of {PERPLEXITY_RATIO} in perplexity on average",
    )


class Sizes(NamedTuple):
    """What the summary of a contender needs beside its rounds."""

    prompt_tokens: int
    new_tokens: int
    prefill_flops: float
    weight_bytes: int
    cache_bytes: int


def summarise(
    kind: Kind,
    weights: str,
    note: str | None,
    rounds: Sequence[Round],
    sizes: Sizes,
    limits: Limits,
    text: str | None,
) -> Contender:
    """The contender's entry of the report from its rounds (at least one)."""
    warm = [run for entry in rounds for run in entry.runs[1:]]
    first_token_s = statistics.median(run.first_token_s for run in warm)
    decode = (sizes.new_tokens - 1) / statistics.median(run.decode_s for run in warm)
    read_bytes = sizes.weight_bytes + sizes.cache_bytes
    # Each round is held to what the machine could do at that time.
    at_hand = [entry.limits or limits for entry in rounds]
    bounds = [now.read_bytes_per_s / read_bytes for now in at_hand]
    shares, prefill_shares = [], []
    for entry, now, bound in zip(rounds, at_hand, bounds, strict=True):
        decode_s = statistics.median(run.decode_s for run in entry.runs[1:])
        prefill_s = statistics.median(run.first_token_s for run in entry.runs[1:])
        shares.append((sizes.new_tokens - 1) / decode_s / bound)
        prefill_shares.append(sizes.prefill_flops / prefill_s / now.gemm_flops_per_s)
    starts = [entry.start_to_first_token_s for entry in rounds]
    streams = {
        str(group[0].streams): _together(group)
        for group in zip(*(entry.streams for entry in rounds), strict=True)
    }
    return Contender(
        description=kind.description,
        weights=weights,
        note=note,
        open_s=statistics.median(entry.open_s for entry in rounds),
        first_token_s=first_token_s,
        prefill_tokens_per_s=sizes.prompt_tokens / first_token_s,
        decode_tokens_per_s=decode,
        start_to_first_token_s=statistics.median(starts[1:] or starts),
        first_start_to_first_token_s=starts[0],
        peak_rss_bytes=int(statistics.median(entry.peak_rss_bytes for entry in rounds)),
        weight_bytes=sizes.weight_bytes,
        cache_bytes=sizes.cache_bytes,
        bound_tokens_per_s=statistics.median(bounds),
        share_of_bound=statistics.median(shares),
        prefill_flops_per_s=sizes.prefill_flops / first_token_s,
        prefill_share_of_limit=statistics.median(prefill_shares),
        repeatable=all(entry.tokens == rounds[0].tokens for entry in rounds),
        text=text,
        streams=streams,
        streams_gain={
            name: None if group.decode_tokens_per_s is None else group.decode_tokens_per_s / decode
            for name, group in streams.items()
        },
        tokens=rounds[0].tokens,
        where=rounds[0].where,
        rounds=list(rounds),
    )


def agreements(
    contenders: Mapping[str, Contender], judged: Mapping[str, Sequence[Scored]]
) -> list[Agreement]:
    """What the judge says of each contender; `judged[name][0]` is its cold answer."""
    plain = next((name for name in contenders if CONTENDERS[name].engine == "eager"), None)
    return [
        _agreement(name, contender, judged[name], plain, contenders)
        for name, contender in contenders.items()
        if name in judged
    ]


def ratios(contenders: Mapping[str, Contender], agreed: Sequence[Agreement]) -> dict[str, dict[str, Ratio]]:
    """`ratios[contender][base]`; times and speeds only where the judge agrees with both."""
    right = {entry.contender for entry in agreed if entry.agree}
    table: dict[str, dict[str, Ratio]] = {}
    for name, contender in contenders.items():
        for base in BASES:
            if base not in contenders or base == name or CONTENDERS[name].engine == "eager":
                continue
            table.setdefault(name, {})[base] = _ratio(contender, contenders[base], {name, base} <= right)
    return table


def _ratio(ours: Contender, base: Contender, right: bool) -> Ratio:
    def over(a: float | None, b: float | None) -> float | None:
        return a / b if right and a is not None and b is not None else None

    return Ratio(
        prefill=over(ours.prefill_tokens_per_s, base.prefill_tokens_per_s),
        decode=over(ours.decode_tokens_per_s, base.decode_tokens_per_s),
        first_token=over(ours.first_token_s, base.first_token_s),
        start_to_first_token=over(ours.start_to_first_token_s, base.start_to_first_token_s),
        peak_memory=ours.peak_rss_bytes / base.peak_rss_bytes,
        streams={
            count: over(group.decode_tokens_per_s, base.streams[count].decode_tokens_per_s)
            for count, group in ours.streams.items()
            if count in base.streams
        },
    )


def _together(group: Sequence[Streams]) -> Streams:
    rates = [entry.decode_tokens_per_s for entry in group if entry.decode_tokens_per_s is not None]
    return Streams(
        streams=group[0].streams,
        first_token_s=statistics.median(entry.first_token_s for entry in group),
        last_first_token_s=statistics.median(entry.last_first_token_s for entry in group),
        decode_tokens_per_s=statistics.median(rates) if rates else None,
        total_s=statistics.median(entry.total_s for entry in group),
        tokens_per_s=statistics.median(entry.tokens_per_s for entry in group),
        peak_rss_bytes=int(statistics.median(entry.peak_rss_bytes for entry in group)),
    )


def _agreement(
    name: str,
    contender: Contender,
    judged: Sequence[Scored],
    plain: str | None,
    contenders: Mapping[str, Contender],
) -> Agreement:
    allowed = bound(contender.weights, len(judged[0].logprobs))
    regrets = [
        best - chosen for scored in judged for best, chosen in zip(scored.best, scored.logprobs, strict=True)
    ]
    own = contender.rounds[0].logprobs
    difference = None
    if own:
        pairs = zip(own, judged[0].logprobs, strict=True)
        difference = statistics.fmean(abs(ours - theirs) for ours, theirs in pairs)
    regret = statistics.fmean(regrets)
    near = allowed.logprob is None or difference is None or difference <= allowed.logprob
    return Agreement(
        contender=name,
        judged_tokens=len(regrets),
        regret_mean=regret,
        regret_largest=max(regrets),
        bound_regret=allowed.regret,
        logprob_difference_mean=difference,
        bound_logprob=allowed.logprob,
        reason=allowed.reason,
        base=None if plain == name else plain,
        first_divergence=_first_divergence(contender.tokens[0], contenders[plain].tokens[0])
        if plain is not None
        else None,
        agree=regret <= allowed.regret and near,
    )


def _first_divergence(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((at for at, (mine, other) in pairs if mine != other), None)
