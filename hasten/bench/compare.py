"""From raw rounds to what the report says: medians, agreement of the losses, ratios, share of the limit.

Pure functions of numbers: no torch, no clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hasten.bench.contenders import BASES, CONTENDERS, Kind
from hasten.bench.report import Agreement, Contender, Limits, ModelSize, OperatorTime, Ratio, Round

BF16_TOKENS = 1024


class Bound(NamedTuple):
    """Largest relative differences of two loss curves that still count as equal."""

    first: float
    """Step 1: equal weights, so only the rounding of one forward pass differs."""
    later: float
    """Any other step: rounding of every earlier step as well, amplified by the optimizer."""
    mean: float
    """Mean of the signed differences: rounding is as often up as down, a wrong formula is not."""
    reason: str


def bound(dtype: str, tokens: int) -> Bound:
    """How far the losses of two runs may differ for steps of `tokens` tokens.

    Measured on 2026-11-29 with SmolLM2-135M on eight batches of 2 x 128 tokens, against fp32: eager bf16
    differs by 1.3e-3 (root mean square; at most 2.3e-3), hasten by 1.4e-3 (3.2e-3), both to either side, and
    the two from each other by 1.7e-3; on five batches of 2 x 512 tokens by 9.0e-4 (1.5e-3). Over 20 steps of
    training eager bf16 and eager fp32 differ by 4.6e-3 at most and by 1.5e-3 on average. The errors of tokens
    are nearly independent, so their mean falls with the square root of their number: at 1024 tokens 2^-8 is
    four of these standard deviations.
    """
    if dtype == "float32":
        return Bound(
            1e-5, 1e-5, 1e-5, "fp32 rounds by 6e-8; sums and the optimizer amplify that by less than 200"
        )
    wider = max(1.0, math.sqrt(BF16_TOKENS / tokens))
    return Bound(
        2.0**-8 * wider,
        2.0**-7 * wider,
        2.0**-8 * wider,
        "bf16 has 8 significant bits; over 1024 tokens or more a loss is held to a unit of the last (2^-8) "
        "at step 1 and on average and to two (2^-7) at any later step, over fewer tokens to "
        "sqrt(1024 / tokens) times that; in fp32 plain PyTorch differs from its own bf16 by a tenth to a "
        "third of it",
    )


def flops_per_step(size: ModelSize, tokens: int, visible_keys: float, task: str = "clm") -> float:
    """Floating-point operations of one step, a multiply-add counted as two.

    6 * (parameters in products) * tokens (Kaplan et al. 2020, section 2.1), plus attention: two products over
    the visible query-key pairs forward and twice as many backward, 12 * pairs * heads * head dimension in
    each layer. A sliding window is not subtracted. Recomputation does not count as work. A step of the task
    `infer` is the forward third of it.
    """
    training = 6.0 * size.product_parameters * tokens + 12.0 * visible_keys * size.attention_width
    return training / 3 if task == "infer" else training


def summarise(
    kind: Kind,
    bf16: bool,
    rounds: Sequence[Round],
    tokens: int,
    flops: float,
    limits: Limits,
    bf16_reason: str = "this processor has no bf16 in hardware",
) -> Contender:
    """The contender's entry of the report from its rounds (at least one).

    `bf16_reason`: why a contender that wants bf16 did not get it.
    """
    dtype = "bfloat16" if kind.wants_bf16 and bf16 else "float32"
    counted = [seconds for entry in rounds for seconds in (entry.steps_s[1:] or entry.steps_s)]
    step_s = statistics.median(counted)
    return Contender(
        description=kind.description,
        dtype=dtype,
        note=None if bf16 or not kind.wants_bf16 else f"fp32: {bf16_reason}",
        step_s=step_s,
        open_s=statistics.median(entry.open_s for entry in rounds),
        first_forward_s=rounds[0].first_forward_s,
        first_step_s=rounds[0].first_step_s,
        tokens_per_s=tokens / step_s,
        peak_rss_bytes=int(statistics.median(entry.peak_rss_bytes for entry in rounds)),
        losses=rounds[0].losses,
        repeatable=all(entry.losses == rounds[0].losses for entry in rounds),
        flops_per_s=flops / step_s,
        share_of_limit=flops / step_s / limits.gemm_flops_per_s_by_dtype[dtype],
        loss_rounding=rounds[0].loss_rounding,
        text=rounds[0].text,
        where=_with_limits(rounds[0].where, limits.gemm_flops_per_s_by_dtype[dtype]),
        rounds=list(rounds),
    )


def agreements(contenders: Mapping[str, Contender], tokens: int) -> list[Agreement]:
    """Each contender against its base: the first plain one of its dtype, else the first plain one at all.

    `tokens`: in one step; see `bound`.
    """
    found = []
    for name, contender in contenders.items():
        base = _base_of(name, contenders)
        if base is not None:
            found.append(_agreement(name, contender, base, contenders[base], tokens))
    return found


def ratios(contenders: Mapping[str, Contender], agreed: Sequence[Agreement]) -> dict[str, dict[str, Ratio]]:
    """`ratios[contender][base]`; the speed is None where one of the two does not agree with its own base."""
    disagreeing = {entry.contender for entry in agreed if not entry.agree}
    table: dict[str, dict[str, Ratio]] = {}
    for name, contender in contenders.items():
        bases = BASES if CONTENDERS[name].wants_bf16 else ("eager-fp32",)
        for base in bases:
            if base not in contenders or name in (base, BASES[0]):
                continue
            other = contenders[base]
            table.setdefault(name, {})[base] = Ratio(
                speed=None if {name, base} & disagreeing else other.step_s / contender.step_s,
                peak_memory=contender.peak_rss_bytes / other.peak_rss_bytes,
                first_step=contender.first_step_s / other.first_step_s,
                first_forward_extra_s=contender.first_forward_s - other.first_forward_s,
            )
    return table


def _with_limits(rows: Sequence[OperatorTime] | None, peak: float) -> list[OperatorTime] | None:
    if rows is None:
        return None
    shares = [row.flops / row.time_s / peak if row.flops and row.time_s else None for row in rows]
    return [row.model_copy(update={"share_of_limit": share}) for row, share in zip(rows, shares, strict=True)]


def _base_of(name: str, contenders: Mapping[str, Contender]) -> str | None:
    dtype = contenders[name].dtype
    plain = [other for other in contenders if CONTENDERS[other].engine == "eager"]
    same = [other for other in plain if contenders[other].dtype == dtype]
    for base in same or plain:
        return None if base == name else base
    return None


def _agreement(name: str, contender: Contender, base: str, other: Contender, tokens: int) -> Agreement:
    allowed = bound("bfloat16" if "bfloat16" in (contender.dtype, other.dtype) else "float32", tokens)
    # Plain PyTorch against itself has the same rounding on both sides.
    rounding = None if CONTENDERS[name].engine == "eager" else other.loss_rounding
    pairs = zip(contender.losses, other.losses, strict=True)
    differences = [(ours - (theirs - (rounding or 0.0))) / max(abs(theirs), 1e-6) for ours, theirs in pairs]
    first, largest = abs(differences[0]), max(abs(value) for value in differences)
    mean = abs(statistics.fmean(differences))
    return Agreement(
        contender=name,
        base=base,
        bound_first=allowed.first,
        bound_later=allowed.later,
        bound_mean=allowed.mean,
        reason=allowed.reason,
        base_rounding=rounding,
        difference_first=first,
        difference_largest=largest,
        difference_mean=mean,
        agree=first <= allowed.first and largest <= allowed.later and mean <= allowed.mean,
    )
