"""The meaning of sampling: how one row of logits becomes a token.

    1. grammar mask: a token without its bit gets -infinity
    2. logit bias: added
    3. repetition penalty r of every token in prompt or output: y < 0 ? y r : y / r (Keskar et al. 2019)
    4. presence and frequency: y -= presence + frequency * count, of tokens in the output
    5. temperature T: y / T; below COLDEST the largest y is taken, at ties the lowest token, and 6 to 9 are
       left out
    6. top-k: the k first
    7. top-p: the shortest run of the first whose probability, among those left, is at least p
       (Holtzman et al. 2020)
    8. min-p: those at least min_p times as likely as the first
    9. drawn: the first token in the order of tokens at which the running sum of probabilities passes u

"First" is by falling y, and by rising token among equals: k tokens are kept, not all that equal the k-th. The
order of the steps is that of transformers' processors and warpers. u is a function of seed and position
alone.

Log-probabilities are of the logits as given, before every step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hasten.ops.sampling.rule import COLDEST, NONE_LEFT, NOT_FINITE, Rule

_WORD = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Drawn:
    """`token`, or NOT_FINITE or NONE_LEFT; `probabilities` float64 [V] that it was drawn from; `logprob` and
    `top` (token, log-probability) as the rule asks."""

    token: int
    probabilities: Tensor
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits_V: Tensor, rule: Rule, dtype: torch.dtype = torch.float64) -> Drawn:
    """The token of one row [V] of any floating dtype; computed in `dtype`."""
    x = logits_V.to(dtype)
    nothing = torch.zeros_like(x)
    if not bool((x < math.inf).all()):
        return Drawn(NOT_FINITE, nothing)
    if bool((x == -math.inf).all()):
        return Drawn(NONE_LEFT, nothing)
    y = processed(x, rule)
    if not bool((y < math.inf).all()):
        return Drawn(NOT_FINITE, nothing)
    if bool((y == -math.inf).all()):
        return Drawn(NONE_LEFT, nothing)
    p = probabilities(y, rule)
    passed = p.cumsum(0) > uniform(rule.seed, rule.position)
    # The sum may end just below 1.
    token = int(passed.nonzero()[0]) if bool(passed.any()) else int(p.nonzero()[-1])
    if rule.top is None:
        return Drawn(token, p)
    logprobs = torch.log_softmax(x, 0)
    listed = falling(x)[: rule.top].tolist()
    top = tuple((i, float(logprobs[i])) for i in listed if logprobs[i] > -math.inf)
    return Drawn(token, p, float(logprobs[token]), top)


def processed(x_V: Tensor, rule: Rule) -> Tensor:
    """Steps 1 to 4, a new tensor."""
    y = x_V.clone()
    if rule.mask is not None:
        bits = (torch.from_numpy(rule.mask).unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
        y[bits.reshape(-1)[: y.numel()] == 0] = -math.inf
    if rule.bias is not None:
        tokens, values = map(torch.from_numpy, rule.bias)
        y[tokens.long()] += values.to(y.dtype)
    if rule.history is not None:
        seen = torch.from_numpy(rule.history[rule.history[:, 1] >= 0]).long()
        tokens, counts = seen[:, 0], seen[:, 1]
        of_seen = y[tokens]
        of_seen = torch.where(
            of_seen < 0, of_seen * rule.repetition_penalty, of_seen / rule.repetition_penalty
        )
        of_output = rule.presence_penalty + rule.frequency_penalty * counts
        y[tokens] = of_seen - torch.where(counts > 0, of_output, 0.0)
    return y


def probabilities(y_V: Tensor, rule: Rule) -> Tensor:
    """Steps 5 to 8: what a token is drawn from, float64 [V]; zero for those that are not kept."""
    order = falling(y_V)
    kept = torch.zeros_like(y_V)
    if rule.temperature < COLDEST:
        kept[order[0]] = 1.0
        return kept
    order = order[y_V[order] > -math.inf]
    if rule.top_k > 0:
        order = order[: rule.top_k]
    p = torch.softmax(y_V[order] / rule.temperature, 0)
    keep = torch.ones_like(p, dtype=torch.bool)
    if rule.top_p < 1:
        keep &= p.cumsum(0) - p < rule.top_p
        keep[0] = True
    if rule.min_p > 0:
        keep &= y_V[order] >= y_V[order[0]] + rule.temperature * math.log(rule.min_p)
    kept[order[keep]] = p[keep] / p[keep].sum()
    return kept


def falling(y_V: Tensor) -> Tensor:
    """Indices by falling value, equal ones by rising index."""
    return torch.sort(y_V, descending=True, stable=True).indices


def uniform(seed: int, position: int) -> float:
    """In [0, 1): 53 bits of SplitMix64 (Steele, Lea and Flood 2014) at `position` from a mixed seed."""
    state = _mixed(seed + _GOLDEN) + (position + 1) * _GOLDEN
    return (_mixed(state) >> 11) * 2.0**-53


def _mixed(x: int) -> int:
    x &= _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)
