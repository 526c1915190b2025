"""Which layouts a search looks at: every way to cut a model over a number of devices that makes sense.

What is left out always loses to what is kept: sequence parallel costs nothing beside tensor parallel
(Korthikanti et al., arXiv 2205.05198), sharding the optimizer's states moves as much as plain data parallel
does (ZeRO, arXiv 1910.02054), and recomputing attention alone gains nothing where a flash kernel never keeps
its inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hasten.base.errors import ConfigError, first_fault, nearest
from hasten.plan.cluster import Cluster
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape

# Sequences of one micro batch: beyond these the bubble and the activations grow and products gain nothing.
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Tokens of a sequence that one device of a context parallel group holds at least.
CONTEXT_TOKENS = 4096
# Model chunks of one stage: more cost more transfers than they save of the bubble.
MOST_VIRTUAL = 8


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """Whether every field exists and may have its value.

    Raises:
        ConfigError: it does not, or may not; names the nearest.
    """
    for name, value in fixed.items():
        if name not in Layout.model_fields:
            raise ConfigError(f"a layout has no field {name!r}; {nearest(name, Layout.model_fields)}")
        try:
            Layout.model_validate({name: value})
        except ValidationError as error:
            # Rules between fields are the candidates' business.
            for item in error.errors():
                if item["loc"] == (name,):
                    raise ConfigError(f"layout: {name} = {value!r}: {item['msg']}") from None


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def candidates(
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    devices: int,
    fixed: Mapping[str, Any] | None = None,
) -> Iterator[Layout]:
    """Every layout of exactly `devices` devices that cuts the model and divides the batch.

    `fixed`: fields of `Layout` that have one value, which is then also taken outside the usual choices.
    """
    given = dict(fixed or {})
    for tp, cp, pp, dp in _degrees(model, cluster, job, devices, given):
        if job.batch % dp:
            continue
        rows = job.batch // dp
        for micro in _choices(given, "micro_batch", [m for m in MICRO_BATCHES if rows % m == 0]):
            if rows % micro:
                continue
            accumulation = rows // micro
            if micro > 1 and 2 * accumulation < pp and "micro_batch" not in given:
                continue  # Mostly bubble; a smaller micro batch has less of it.
            if "accumulation" in given and given["accumulation"] != accumulation:
                continue
            base: dict[str, Any] = {
                "tp": tp,
                "cp": cp,
                "pp": pp,
                "dp": dp,
                "micro_batch": micro,
                "accumulation": accumulation,
                "sp": given.get("sp", tp > 1),
            }
            for schedule, virtual in _schedules(model, pp, accumulation, given):
                for ep in _experts(model, tp * cp * dp, cluster, given):
                    for zero in _choices(given, "zero", _zeros(dp * cp, pp)):
                        for recompute in _choices(given, "recompute", _recomputes(job)):
                            rest = {
                                "schedule": schedule,
                                "virtual": virtual,
                                "ep": ep,
                                "zero": zero,
                                "recompute": recompute,
                            }
                            yield Layout(**{**given, **base, **rest})


def complete(
    changes: Mapping[str, Any],
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    devices: int,
    base: Layout | None = None,
) -> Layout:
    """A whole layout from some of its fields: what is not given comes from `base`; dp fills the devices and
    accumulation the batch.

    Raises:
        ConfigError: an unknown field, degrees that do not divide the devices, or a batch that is not divided;
            the message names the nearest that works.
    """
    for name in changes:
        if name not in Layout.model_fields:
            raise ConfigError(f"a layout has no field {name!r}; {nearest(name, Layout.model_fields)}")
    values: dict[str, Any] = base.model_dump() if base is not None else {}
    if base is not None and {"pp", "virtual"} & set(changes) and "stages" not in changes:
        values["stages"] = None
    values |= changes
    tp, cp, pp = (int(values.get(name) or 1) for name in ("tp", "cp", "pp"))
    across = tp * cp * pp
    if devices % across and "dp" not in changes:
        near = min(divisors(devices), key=lambda d: abs(d - across))
        raise ConfigError(
            f"tp x cp x pp = {tp} x {cp} x {pp} = {across} does not divide {devices} devices; the nearest "
            f"product "
            f"that does is {near}"
        )
    if "dp" not in changes:
        values["dp"] = devices // across
    if across * int(values["dp"]) != devices:
        raise ConfigError(
            f"tp x cp x pp x dp = {tp} x {cp} x {pp} x {values['dp']} = {across * int(values['dp'])} "
            f"devices; the "
            f"cluster has {devices}"
        )
    dp = int(values["dp"])
    if job.batch % dp:
        below = max(job.batch // dp * dp, dp)
        raise ConfigError(
            f"dp = {dp} does not divide the batch of {job.batch} sequences; the nearest batches that it "
            f"divides are "
            f"{below} and {below + dp}"
        )
    rows = job.batch // dp
    micro = int(values.get("micro_batch") or 1)
    if "micro_batch" not in changes and rows % micro:
        micro = max(m for m in divisors(rows) if m <= micro)
    if rows % micro:
        near = min(divisors(rows), key=lambda m: abs(m - micro))
        raise ConfigError(
            f"micro_batch = {micro} does not divide the {rows} sequences of one replica; the nearest that "
            f"does is "
            f"{near}"
        )
    values |= {"micro_batch": micro}
    if "accumulation" not in changes:
        values["accumulation"] = rows // micro
    if "sp" not in changes:
        values["sp"] = tp > 1 and (base is None or base.tp == 1 or base.sp)
    if pp == 1:
        values |= {"virtual": 1, "schedule": "1f1b"}
    elif int(values.get("virtual") or 1) > 1:
        values["schedule"] = "interleaved"
    elif values.get("schedule") == "interleaved":
        values["schedule"] = "1f1b"
    try:
        layout = Layout(**values)
    except ValidationError as error:
        _, field, given, said = first_fault(error)
        raise ConfigError(f"layout: {f'{field} = {given!r}: ' if field else ''}{said}") from None
    if layout.batch != job.batch:
        raise ConfigError(
            f"dp x micro_batch x accumulation = {layout.batch} sequences; the batch has {job.batch}, so "
            f"accumulation would be {rows / micro:g}"
        )
    layout.check(model)
    return layout


def parse_layout(text: str) -> dict[str, Any]:
    """`"tp=4,recompute=full"` -> `{"tp": 4, "recompute": "full"}`; blanks may stand for commas.

    Raises ConfigError for a part that is not NAME=VALUE or a name that no layout has.
    """
    found: dict[str, Any] = {}
    for part in text.replace(",", " ").split():
        name, equals, raw = part.partition("=")
        if not equals or not raw:
            # What `Layout.describe` prints beside its degrees.
            if name == "sp":
                found["sp"] = True
                continue
            if name in ("1f1b", "gpipe", "interleaved", "zero_bubble"):
                found["schedule"] = name
                continue
            raise ConfigError(f"layout {text!r}: {part!r} is not NAME=VALUE, for example tp=4,recompute=full")
        if name not in Layout.model_fields:
            raise ConfigError(f"layout {text!r}: no field {name!r}; {nearest(name, Layout.model_fields)}")
        if name == "stages":
            found[name] = _stages(text, raw)
        elif raw.lower() in ("true", "false", "yes", "no"):
            found[name] = raw.lower() in ("true", "yes")
        else:
            found[name] = int(raw) if raw.lstrip("-").isdigit() else raw
    return found


def _stages(text: str, raw: str) -> tuple[int, ...]:
    parts = raw.split("/")
    if not all(part.isdigit() for part in parts):
        raise ConfigError(
            f"layout {text!r}: stages = {raw}: give layers with / between them, for example 10/11/10"
        )
    return tuple(int(part) for part in parts)


def _choices(given: Mapping[str, Any], name: str, usual: list[Any]) -> list[Any]:
    return [given[name]] if name in given else usual


def _degrees(
    model: ModelShape, cluster: Cluster, job: Job, devices: int, given: Mapping[str, Any]
) -> Iterator[tuple[int, int, int, int]]:
    """(tp, cp, pp, dp) whose product is `devices`."""
    heads = [d for d in divisors(devices) if model.heads % d == 0 and d <= max(cluster.joined, 1)]
    for tp in _choices(given, "tp", heads):
        if devices % tp or model.heads % tp:
            continue
        rest = devices // tp
        contexts = [d for d in divisors(rest) if d == 1 or job.sequence // d >= CONTEXT_TOKENS]
        contexts = [d for d in contexts if job.sequence % d == 0]
        for cp in _choices(given, "cp", contexts):
            if rest % cp or job.sequence % cp:
                continue
            for pp in _choices(given, "pp", [d for d in divisors(rest // cp) if d <= model.layers]):
                if (rest // cp) % pp or pp > model.layers:
                    continue
                dp = rest // cp // pp
                if given.get("dp", dp) == dp:
                    yield tp, cp, pp, dp


def _schedules(
    model: ModelShape, pp: int, accumulation: int, given: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """(schedule, virtual) for a pipeline of `pp` stages."""
    if pp == 1:
        if given.get("virtual", 1) == 1:
            yield given.get("schedule", "1f1b"), 1
        return
    usual: list[tuple[str, int]] = [("1f1b", 1), ("zero_bubble", 1)]
    if accumulation % pp == 0:  # What the interleaved schedule asks for (Megatron-LM, arXiv 2104.04473).
        each = model.layers // pp
        usual += [
            ("interleaved", v)
            for v in divisors(each)
            if 1 < v <= MOST_VIRTUAL and model.layers % (pp * v) == 0
        ]
    if given.get("schedule") == "gpipe":
        usual.append(("gpipe", 1))
    for schedule, virtual in usual:
        if given.get("schedule", schedule) == schedule and given.get("virtual", virtual) == virtual:
            yield schedule, virtual


def _experts(model: ModelShape, ranks: int, cluster: Cluster, given: Mapping[str, Any]) -> list[int]:
    if not model.experts:
        return _choices(given, "ep", [1])
    usual = [d for d in divisors(model.experts) if ranks % d == 0 and d <= 8 * cluster.joined]
    return [ep for ep in _choices(given, "ep", usual) if ranks % ep == 0 and model.experts % ep == 0]


def _zeros(ranks: int, pp: int) -> list[int]:
    if ranks == 1:
        return [0]
    # Gradients and weights that are sharded would be reduced and gathered anew for every micro batch of a
    # pipeline.
    return [1, 2, 3] if pp == 1 else [1]


def _recomputes(job: Job) -> list[str]:
    return ["none", "operators" if job.attention == "flash" else "selective", "full"]
