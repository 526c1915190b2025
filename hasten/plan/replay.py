"""A measured step in place of the model's own prices: `hasten plan --profile FILE`.

A profile (`hasten-profile/1`, JSON) is the step of one model, layout and job on one device, and the seconds
of its operators. `hasten train --profile FILE` writes one; by hand the operators may be a trace of torch's
profiler (`"trace": "trace.json"`, Chrome's format). Operators are sorted to kinds by their names. Each
kind's seconds over those that the planner computes for the same step become a factor on that kind, so the
planner gives the profiled step back as it was, and another shape or layout is the profiled one scaled by
shape. What the step takes beyond its operators scales the host's costs; where `hasten calibrate` measured
those, it is spread over the operators instead (allocation and page faults, which grow with them). Collectives
keep their own prices: what a profile shows of them is mostly waiting. A pipeline is not profiled as a whole,
so pp is 1; its bubble is simulated.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hasten.base.errors import ConfigError, InputError, first_fault
from hasten.plan.cluster import Cluster, overridden
from hasten.plan.cost import Costs
from hasten.plan.efficiency import constants
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape
from hasten.plan.step import step

FORMAT = "hasten-profile/1"
KINDS = ("matmul", "attention", "elementwise", "optimizer")
# The first pattern that is found in an operator's name says its kind; `host` is what the remainder of the
# step stands for, `collective` is left out.
_NAMES = (
    ("collective", r"(?i:nccl|hccl|gloo|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|c10d)"),
    ("optimizer", r"(?i:adam|sgd|lion|sum_of_squares|multi_tensor|optimizer|_foreach|clip_grad)"),
    (
        "host",
        r"^hasten::|^GeneratedBackward|^autograd::|Torch-Compiled|TorchDynamo|Backward\d*$|^cuda|^Memset",
    ),
    ("host", r"^aten::(empty|view|reshape|t|transpose|as_strided|detach|resolve_|slice|select|expand|alias)"),
    ("elementwise", r"cross_entropy|nll_loss|log_softmax"),
    ("attention", r"attention|flash|fmha|softmax"),
    ("matmul", r"(^|::|_)(b?add)?(b?mm|matmul|linear)(_|$)|gemm|cutlass|xmma|nvjet|panels"),
)
# The parts of a step that operators on the device make up.
_DEVICE_PARTS = ("matmul", "attention", "elementwise", "embedding", "head", "recompute", "optimizer")
_HOST = ("launch_s", "collective_launch_s", "micro_s", "step_s")
# A factor beyond these says that the profile is of another step than it says.
_FACTORS = (0.02, 50.0)


class Profile(BaseModel):
    """One measured step. Frozen; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["hasten-profile/1"]
    device: str
    """Name of the device, as the cluster has it."""
    model: ModelShape
    layout: Layout = Layout()
    job: Job
    step_s: float = Field(gt=0)
    """Seconds of a step that no profiler slowed down."""
    operators_s: dict[str, float] = Field(default_factory=dict)
    """Seconds of one step by operator or kernel, each without those that it calls."""
    trace: str = ""
    """Instead of `operators_s`: a trace of torch's profiler, beside this file or with its whole path."""
    steps: int = Field(default=1, gt=0)
    """Steps that the trace covers."""
    source: str = ""


def kind_of(operator: str) -> str:
    """matmul, attention, elementwise, optimizer; or collective or host, which no factor is made of."""
    return next((kind for kind, pattern in _NAMES if re.search(pattern, operator)), "elementwise")


def load(path: Path) -> Profile:
    """A profile with its operators' seconds.

    Raises:
        InputError: the file or its trace is missing, malformed, or names no operator.
    """
    values = _json(path)
    try:
        found = Profile.model_validate(values)
    except ValidationError as error:
        fault = first_fault(error)
        raise InputError(f"{path}: {fault.field}: {fault.said}") from None
    if bool(found.trace) == bool(found.operators_s):
        raise InputError(f"{path}: give operators_s, or the name of a trace, and not both")
    if not found.trace:
        return found
    operators = trace_seconds(path.parent / found.trace)
    return found.model_copy(update={"operators_s": {k: v / found.steps for k, v in operators.items()}})


def trace_seconds(path: Path) -> dict[str, float]:
    """Seconds by name in a trace of torch's profiler: of kernels where a device ran any, else of operators of
    the processor, each without those inside it.

    Raises:
        InputError: the file is missing, malformed, or has no such event.
    """
    events = _json(path).get("traceEvents")
    if not isinstance(events, list):
        raise InputError(f"{path}: no traceEvents; torch.profiler's export_chrome_trace writes them")
    whole = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e]
    kernels = [e for e in whole if e.get("cat") in ("kernel", "gpu_memcpy")]
    seconds: dict[str, float] = {}
    if kernels:
        for event in kernels:
            seconds[event["name"]] = seconds.get(event["name"], 0.0) + float(event["dur"]) * 1e-6
        return seconds
    lanes: dict[Any, list[tuple[float, float, str]]] = {}
    for event in whole:
        if event.get("cat") == "cpu_op":
            lane = lanes.setdefault((event.get("pid"), event.get("tid")), [])
            lane.append((float(event["ts"]), -float(event["dur"]), str(event["name"])))
    for lane in lanes.values():
        inside: list[tuple[float, str]] = []
        for begin, minus, name in sorted(lane):
            while inside and inside[-1][0] <= begin:
                inside.pop()
            if inside:
                seconds[inside[-1][1]] = seconds.get(inside[-1][1], 0.0) + minus * 1e-6
            seconds[name] = seconds.get(name, 0.0) - minus * 1e-6
            inside.append((begin - minus, name))
    if not seconds:
        raise InputError(f"{path}: no kernel and no operator in the trace")
    return seconds


def replayed(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster whose device takes as long as the profile says; see the module's text.

    Raises:
        ConfigError: the profile is of another device or of a pipeline.
        InputError: its seconds cannot be those of the step that it describes.
    """
    if profile.device != cluster.device.name:
        raise ConfigError(
            f"the profile is of {profile.device!r}; the cluster's device is {cluster.device.name!r}"
        )
    if profile.layout.pp != 1:
        raise ConfigError(f"the profile has pp = {profile.layout.pp}; a profile is of one stage: pp = 1")
    measured = dict.fromkeys(KINDS, 0.0)
    for name, seconds in profile.operators_s.items():
        if (kind := kind_of(name)) in measured:
            measured[kind] += seconds
    factors: dict[str, float] = {}
    for kind, computed in _computed(cluster, profile).items():
        if measured[kind] <= 0 or computed <= 0:
            continue
        factor = measured[kind] / computed
        if not _FACTORS[0] <= factor <= _FACTORS[1]:
            raise InputError(
                f"the profile has {measured[kind]:.3g} s of {kind} in a step; {profile.model.name} with "
                f"{profile.layout.describe()} and a batch of {profile.job.batch} x {profile.job.sequence} "
                f"tokens takes about {computed:.3g} s: it is a profile of something else"
            )
        factors[kind] = float(f"{factor:.5g}")
    if not factors:
        raise InputError("the profile has no operator of a known kind: " + ", ".join(KINDS))
    if "launch_s" in cluster.device.overrides and (even := _even(cluster, factors, profile)):
        factors = {kind: float(f"{factor * even:.5g}") for kind, factor in factors.items()}
        return overridden(cluster, {"device": {"replayed": factors}})
    found = overridden(cluster, {"device": {"replayed": factors}})
    return overridden(found, {"device": {"overrides": _host(found, profile)}})


def _seconds(cluster: Cluster, profile: Profile) -> dict[str, float]:
    wide = cluster.model_copy(update={"nodes": -(-profile.layout.devices // cluster.devices_per_node)})
    return step(Costs(profile.model, wide, profile.layout, profile.job)).parts


def _computed(cluster: Cluster, profile: Profile) -> dict[str, float]:
    """Seconds of each kind in the profiled step as the planner has it: what doubling the kind adds."""

    def device_s(factors: dict[str, float]) -> float:
        parts = _seconds(overridden(cluster, {"device": {"replayed": factors}}), profile)
        return sum(parts.get(part, 0.0) for part in _DEVICE_PARTS)

    once = dict.fromkeys(KINDS, 1.0)
    base = device_s(once)
    return {kind: device_s({**once, kind: 2.0}) - base for kind in KINDS}


def _even(cluster: Cluster, factors: dict[str, float], profile: Profile) -> float:
    """What to multiply every factor with so that the step takes as long as it did; 0 where that is not within
    a factor of two."""

    def step_s(times: float) -> float:
        scaled = {kind: factor * times for kind, factor in factors.items()}
        return sum(_seconds(overridden(cluster, {"device": {"replayed": scaled}}), profile).values())

    low, high = 0.5, 2.0
    if not step_s(low) <= profile.step_s <= step_s(high):
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(middle) < profile.step_s else (low, middle)
    return high


def _host(cluster: Cluster, profile: Profile) -> dict[str, float]:
    """The host's costs with which the step takes as long as it did; none where operators alone take
    longer."""
    known = constants(cluster.device)
    mine = {name: getattr(known, name) for name in _HOST}

    def step_s(times: float) -> float:
        scaled = {name: value * times for name, value in mine.items()}
        return sum(_seconds(overridden(cluster, {"device": {"overrides": scaled}}), profile).values())

    low, high = 0.0, 64.0
    if step_s(low) >= profile.step_s:
        return dict.fromkeys(mine, 0.0)
    if step_s(high) <= profile.step_s:
        return {**mine, "step_s": known.step_s + profile.step_s - step_s(1.0)}
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if step_s(middle) < profile.step_s else (low, middle)
    return {name: float(f"{value * high:.5g}") for name, value in mine.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path}: is not a JSON object")
    return values
