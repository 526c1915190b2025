"""From raw rounds to what the report says: medians, agreement of the losses, ratios, share of the limit.

Pure functions of numbers: no torch, no clock.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hasten.bench.contenders import BASES, CONTENDERS, Kind
from hasten.bench.report import Agreement, Contender, Limits, ModelSize, Ratio, Round


class Bound(NamedTuple):
    """Largest relative differences of two loss curves that still count as equal."""

    first: float
    """Step 1: equal weights, so only the rounding of one forward pass differs."""
    later: float
    """Any other step: rounding of every earlier step as well, amplified by the optimizer."""
    mean: float
    """Mean of the signed differences: rounding is as often up as down, a wrong formula is not."""
    reason: str


BOUNDS = {
    "bfloat16": Bound(
        2.0**-9,
        2.0**-6,
        2.0**-8,
        "bf16 rounds each value by up to 2^-9 of itself; step 1 starts from equal weights and is held to one "
        "rounding (2^-9), later steps to eight (2^-6) and their mean difference to two (2^-8)",
    ),
    "float32": Bound(
        1e-5,
        1e-5,
        1e-5,
        "fp32 rounds by 6e-8; the sums and the optimizer of a step amplify that by less than 200",
    ),
}


def flops_per_step(size: ModelSize, tokens: int, visible_keys: float) -> float:
    """Floating-point operations of one training step, a multiply-add counted as two.

    6 * (parameters in products) * tokens (Kaplan et al. 2020, section 2.1), plus attention: two products over
    the visible query-key pairs forward and twice as many backward, 12 * pairs * heads * head dimension in
    each layer. A sliding window is not subtracted. Recomputation does not count as work.
    """
    return 6.0 * size.product_parameters * tokens + 12.0 * visible_keys * size.attention_width


def summarise(
    kind: Kind, bf16: bool, rounds: Sequence[Round], tokens: int, flops: float, limits: Limits
) -> Contender:
    """The contender's entry of the report from its rounds (at least one)."""
    dtype = "bfloat16" if kind.wants_bf16 and bf16 else "float32"
    counted = [seconds for entry in rounds for seconds in (entry.steps_s[1:] or entry.steps_s)]
    step_s = statistics.median(counted)
    return Contender(
        description=kind.description,
        dtype=dtype,
        note=None if bf16 or not kind.wants_bf16 else "fp32: this processor has no bf16 in hardware",
        step_s=step_s,
        first_step_s=rounds[0].first_step_s,
        tokens_per_s=tokens / step_s,
        peak_rss_bytes=int(statistics.median(entry.peak_rss_bytes for entry in rounds)),
        losses=rounds[0].losses,
        repeatable=all(entry.losses == rounds[0].losses for entry in rounds),
        flops_per_s=flops / step_s,
        share_of_limit=flops / step_s / limits.gemm_flops_per_s_by_dtype[dtype],
        text=rounds[0].text,
        rounds=list(rounds),
    )


def agreements(contenders: Mapping[str, Contender]) -> list[Agreement]:
    """Each contender against its base: the first plain one of its dtype, else the first plain one at all."""
    found = []
    for name, contender in contenders.items():
        base = _base_of(name, contenders)
        if base is not None:
            found.append(_agreement(name, contender, base, contenders[base]))
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
            )
    return table


def _base_of(name: str, contenders: Mapping[str, Contender]) -> str | None:
    dtype = contenders[name].dtype
    plain = [other for other in contenders if CONTENDERS[other].engine == "eager"]
    same = [other for other in plain if contenders[other].dtype == dtype]
    for base in same or plain:
        return None if base == name else base
    return None


def _agreement(name: str, contender: Contender, base: str, other: Contender) -> Agreement:
    bound = BOUNDS["bfloat16" if "bfloat16" in (contender.dtype, other.dtype) else "float32"]
    pairs = zip(contender.losses, other.losses, strict=True)
    differences = [(ours - theirs) / max(abs(theirs), 1e-6) for ours, theirs in pairs]
    first, largest = abs(differences[0]), max(abs(value) for value in differences)
    mean = abs(statistics.fmean(differences))
    return Agreement(
        contender=name,
        base=base,
        bound_first=bound.first,
        bound_later=bound.later,
        bound_mean=bound.mean,
        reason=bound.reason,
        difference_first=first,
        difference_largest=largest,
        difference_mean=mean,
        agree=first <= bound.first and largest <= bound.later and mean <= bound.mean,
    )
