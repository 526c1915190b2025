"""`hasten calibrate`: measures this machine and stores a device file that `hasten plan --cluster this` uses.

Measured are matrix products by size and format, attention, elementwise operators, the optimizer, memory
bandwidth, the cost of a small operator, and collectives among processes. From them come the planner's
constants: every efficiency is then relative to what was measured, not to a datasheet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from hasten.base.screen import Screen
    from hasten.plan.cluster import Cluster
    from hasten.plan.kernels import Attention
    from hasten.plan.measure import Line, Message, Product, Step

HELP = """Measure this machine for hasten plan, in under two minutes.

Matrix products by size and format, attention, elementwise operators, the
optimizer, memory bandwidth, the cost of a small operator, and collectives over
processes of this machine (gloo; NCCL with two GPUs or more). The result is a
TOML file that hasten plan --cluster this reads; --output writes it elsewhere,
for --cluster FILE. Measure on an idle machine.

Examples:

  hasten calibrate

  hasten calibrate --output my-node.toml

  hasten plan smollm2-135m --cluster this --batch 2 --seq 512
"""

OUTPUT = Annotated[
    Path | None, typer.Option("--output", help="Where the file goes.", show_default="the cache")
]
DEVICE = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
RANKS = Annotated[
    int, typer.Option("--ranks", min=1, help="Processes of the collectives; 1: none are measured.")
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print what was measured as JSON; no progress.")]


# What `cost.Costs.optimizer` counts for each parameter of fp32 weights and AdamW: weight, two moments and
# gradient, read and written.
OPTIMIZER_BYTES = 32.0


class Measured(NamedTuple):
    """Everything that was measured. FLOP/s, bytes/s, seconds."""

    device: str
    name: str
    devices: int
    memory_bytes: float
    products: list[Product]
    attention: list[Attention]
    read_bytes_per_s: float
    update_bytes_per_s: float
    elementwise_bytes_per_s: float
    optimizer_s: float
    """For each parameter."""
    small_operator_s: float
    messages: list[Message]
    steps: list[Step]
    seconds: float


def calibrate(
    output: OUTPUT = None, device: DEVICE = "auto", ranks: RANKS = 2, as_json: AS_JSON = False
) -> None:
    from hasten.base.files import make_folder, write_atomically
    from hasten.base.screen import Screen
    from hasten.plan.machine import as_toml, device_file

    measured = measure_machine(_chosen(device), ranks, Screen(enabled=not as_json))
    cluster = as_cluster(measured)
    path = output or device_file()
    make_folder(path.parent, f"cannot write {path}")
    date = datetime.now(UTC).date().isoformat()
    comment = (
        f"Measured by `hasten calibrate` on {date} in {measured.seconds:.0f} s. FLOP/s, bytes, "
        "bytes/s, seconds."
    )
    write_atomically(path, as_toml(cluster, comment))
    if as_json:
        typer.echo(
            json.dumps({"file": str(path), "cluster": cluster.model_dump(), "measured": _plain(measured)})
        )
        return
    from rich.console import Console

    Console().print(_tables(measured, cluster))
    typer.echo(f"written: {path}", err=True)


calibrate.__doc__ = HELP


def measure_machine(device: str, ranks: int, screen: Screen, quick: bool = False) -> Measured:
    """Measures everything on `device` (cpu, cuda). `quick`: only small sizes, for a look or a test."""
    import torch

    from hasten.base.facts import detect
    from hasten.plan import kernels, measure

    begin = time.perf_counter()
    facts = detect()
    formats = ["float32", *(["bfloat16"] if device != "cpu" or facts.bf16_in_hardware.value else [])]
    stages = len(formats) + 5
    with screen.bar("calibrating", stages) as bar:
        done = [0]

        def advance(what: str) -> None:
            bar.update(done[0], what, line=True)
            done[0] += 1

        shapes = measure.SHAPES[:3] if quick else None
        products = measure.products(formats, device, shapes, advance)
        advance("attention")
        attention = kernels.attention(formats[-1], device, 128 if quick else 1024)
        advance("memory bandwidth")
        size = 1 << (24 if quick else 29)
        read = measure.read_bandwidth(device, size)
        update = measure.update_bandwidth(device, size)
        advance("elementwise operators and the optimizer")
        side = 256 if quick else 2048
        elementwise = kernels.elementwise_bandwidth(formats[-1], device, side, side)
        optimizer = kernels.optimizer_seconds(device, 1 << (20 if quick else 25))
        small = measure.small_operator(device)
        messages: list[Message] = []
        steps: list[Step] = []
        if device == "cpu":
            advance("small training steps")
            steps = [] if quick else measure.small_steps(formats[-1])
            name, count, memory = facts.processor.value, 1, float(facts.memory_limit_bytes.value)
            backend = "gloo"
        else:
            properties = torch.cuda.get_device_properties(0)
            name, count, memory = properties.name, torch.cuda.device_count(), float(properties.total_memory)
            backend, ranks = "nccl", min(ranks, torch.cuda.device_count())
        if ranks > 1:
            advance(f"collectives over {ranks} processes")
            sizes = measure.MESSAGE_BYTES[:3] if quick else measure.MESSAGE_BYTES
            messages = measure.collectives(ranks, sizes, backend)
    return Measured(
        device=device,
        name=name,
        devices=count,
        memory_bytes=memory,
        products=products,
        attention=attention,
        read_bytes_per_s=read,
        update_bytes_per_s=update,
        elementwise_bytes_per_s=elementwise,
        optimizer_s=optimizer,
        small_operator_s=small,
        messages=messages,
        steps=steps,
        seconds=time.perf_counter() - begin,
    )


def as_cluster(measured: Measured) -> Cluster:
    """The cluster of one node that the measurements describe, with constants in place of fitted ones."""
    from hasten.plan import cluster as clusters
    from hasten.plan.machine import GLOO, THIS_NAME
    from hasten.plan.measure import fit_line

    date = datetime.now(UTC).date().isoformat()

    def figure(value: float, what: str) -> dict[str, Any]:
        return {"value": float(f"{value:.5g}"), "source": f"{what}, {date}", "confidence": "measured"}

    rates, depth, tall = fit_products(measured.products)
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    peaks = {names[name]: figure(rate, "matrix products by size") for name, rate in rates.items()}
    if "bf16" not in peaks:
        peaks["bf16"] = figure(rates["float32"] / 4, "no bf16 in hardware: a quarter of fp32")
    peaks.setdefault("fp16", peaks["bf16"])
    reduces = [message for message in measured.messages if message.operation == "all_reduce"]
    line = fit_line(reduces) if reduces else None
    bandwidth = measured.update_bytes_per_s
    link: dict[str, Any]
    if line is None:
        link = {
            "bandwidth": {"value": min(bandwidth, 2e9), "source": "not measured", "confidence": "recalled"}
        }
    else:
        # What goes through memory can not be faster than memory.
        link = {
            "bandwidth": figure(
                min(line.bytes_per_s, bandwidth), f"all-reduce over {reduces[0].ranks} processes"
            ),
            "latency_s": figure(line.latency_s, "the same"),
        }
    across = {"bandwidth": {**link["bandwidth"]}}
    overrides = {
        "matmul": 1.0,
        "depth": depth,
        "tall": tall,
        "memory": measured.elementwise_bytes_per_s / bandwidth if measured.device == "cpu" else 1.0,
        "optimizer": OPTIMIZER_BYTES / measured.optimizer_s / bandwidth,
        "straggle": 0.0,
    }
    overrides |= {"inside": 1.0, "across": 1.0, "point": 1.0}
    if line is not None:
        overrides |= {"inside_s": line.latency_s, "inside_step_s": 0.0, "collective_launch_s": 0.0}
    overrides |= _attention_constants(measured, rates)
    # On a processor the host that launches an operator is the device that runs it.
    overrides |= {
        "kernel_s": measured.small_operator_s,
        "launch_s": 0.0 if measured.device == "cpu" else 9e-6,
    }
    whole = clusters.build(
        {
            "name": THIS_NAME,
            "device": {
                "name": measured.name,
                "matmul_flops": peaks,
                "memory_bytes": figure(measured.memory_bytes, "what this process may use"),
                "memory_bandwidth": figure(bandwidth, "b += a, read and written"),
                "overrides": {name: float(f"{value:.5g}") for name, value in overrides.items()},
            },
            "devices_per_node": measured.devices,
            "inside": link,
            "across": across,
            **({"all_reduce": GLOO} if measured.device == "cpu" else {}),
            "host_bandwidth": figure(measured.read_bytes_per_s, "sum over a buffer"),
        },
        THIS_NAME,
    )
    launches = fixed_costs(measured.steps, whole, "bf16" if "bfloat16" in rates else "fp32")
    return clusters.overridden(whole, {"device": {"overrides": launches}}) if launches else whole


def fixed_costs(steps: Sequence[Step], cluster: Cluster, precision: str) -> dict[str, float]:
    """`launch_s`, `micro_s` and `step_s` with which the planner predicts the small steps as measured.

    On a processor an operator's fixed cost adds to its work (exponent 1) where an accelerator hides it.
    None of the three is negative.
    """
    from hasten.plan.cluster import overridden
    from hasten.plan.estimate import estimate
    from hasten.plan.job import Job
    from hasten.plan.layout import Layout
    from hasten.plan.measure import SMALL_SHAPE, SMALL_STEPS, SMALL_TOKENS
    from hasten.plan.model import ModelShape

    if {(step.layers, step.micro_batches) for step in steps} != set(SMALL_STEPS):
        return {}
    # The part called launch counts operators when one costs a second and a micro batch nothing.
    probe = {"launch_norm": 1.0, "launch_s": 1.0, "micro_s": 0.0, "step_s": 0.0}
    counting = overridden(cluster, {"device": {"overrides": probe}})
    rest: dict[tuple[int, int], tuple[float, float]] = {}
    for step in steps:
        shape = ModelShape.model_validate({**SMALL_SHAPE, "layers": step.layers})
        job = Job.model_validate(
            {"batch": step.micro_batches, "sequence": SMALL_TOKENS, "precision": precision, "master": "fp32"}
        )
        item = estimate(shape, counting, Layout(accumulation=step.micro_batches), job)
        operators = item.parts["launch"]
        rest[step.layers, step.micro_batches] = (
            step.seconds - (item.step_s.value - operators),
            operators,
        )
    (few, few_operators), (many, many_operators), (thrice, thrice_operators) = (
        rest[key] for key in SMALL_STEPS
    )
    launch = max(0.0, (many - few) / (many_operators - few_operators))
    micro = max(0.0, ((thrice - few) - launch * (thrice_operators - few_operators)) / 2)
    whole = max(0.0, few - launch * few_operators - micro)
    found = {"launch_norm": 1.0, "launch_s": launch, "micro_s": micro, "step_s": whole}
    return {name: float(f"{value:.5g}") for name, value in found.items()}


def fit_products(products: Sequence[Product]) -> tuple[dict[str, float], float, float]:
    """(FLOP/s of a large product by dtype, depth, tall): rate = peak k / (k + depth) r / (r + tall), r =
    min(m, n).

    depth and tall are fitted on the fastest format and hold for all. Least squares of the relative error of
    the time, which is linear in 1, 1/k and 1/r where their product is small; neither is negative.
    """
    import numpy as np

    by_format: dict[str, list[Product]] = {}
    for product in products:
        by_format.setdefault(product.dtype, []).append(product)
    fastest = max(by_format.values(), key=lambda rows: max(row.flops_per_s for row in rows))
    rate = np.array([row.flops_per_s for row in fastest])
    rate = rate / rate.max()
    k = np.array([row.k for row in fastest], dtype=float)
    r = np.array([min(row.m, row.n) for row in fastest], dtype=float)
    columns = [np.ones_like(k), 1 / k, 1 / r]
    kept = [0, 1, 2]
    while True:
        solved, *_ = np.linalg.lstsq(
            np.stack([columns[i] * rate for i in kept], axis=1), np.ones_like(rate), rcond=None
        )
        if solved.min() >= 0 or len(kept) == 1:
            break
        kept.pop(int(np.argmin(solved)))
        if 0 not in kept:
            kept = [0]
    found = dict(zip(kept, (float(value) for value in solved), strict=True))
    base = found.get(0, 1.0) or 1.0
    depth, tall = found.get(1, 0.0) / base, found.get(2, 0.0) / base
    peaks = {
        name: float(np.median([x.flops_per_s * (1 + depth / x.k) * (1 + tall / min(x.m, x.n)) for x in rows]))
        for name, rows in by_format.items()
    }
    return peaks, depth, tall


def _attention_constants(measured: Measured, rates: dict[str, float]) -> dict[str, float]:
    """Shares of the products' rate that attention reaches, by head size; see `efficiency.Constants`."""
    by_head = {row.head_size: row for row in measured.attention}
    if not {64, 128} <= set(by_head):
        return {}
    wide, narrow = by_head[128], by_head[64]
    peak = rates[wide.dtype]
    fill = wide.sequence / (wide.sequence + 256.0)
    return {
        "flash": wide.forward_flops_per_s / peak / fill,
        "flash_backward": wide.backward_flops_per_s / wide.forward_flops_per_s,
        "flash_narrow": narrow.forward_flops_per_s / wide.forward_flops_per_s,
    }


def _chosen(device: str) -> str:
    from hasten.base.errors import ConfigError, nearest

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device!r}; {nearest(device, ('auto', 'cpu', 'cuda'))}")
    import torch

    present = torch.cuda.is_available()
    if device == "cuda" and not present:
        raise ConfigError("--device cuda: torch finds no GPU here; the nearest that works is cpu")
    return "cuda" if device != "cpu" and present else "cpu"


def _plain(measured: Measured) -> dict[str, Any]:
    whole = measured._asdict()
    for name in ("products", "attention", "messages", "steps"):
        whole[name] = [row._asdict() for row in whole[name]]
    return whole


def _tables(measured: Measured, cluster: Cluster) -> Any:
    from rich.console import Group
    from rich.table import Table

    products = Table(
        "product", *sorted({p.dtype for p in measured.products}), title="GFLOP/s", title_justify="left"
    )
    rates: dict[tuple[int, int, int], dict[str, float]] = {}
    for p in measured.products:
        rates.setdefault((p.m, p.k, p.n), {})[p.dtype] = p.flops_per_s
    for (m, k, n), row in rates.items():
        cells = [
            f"{row[d] / 1e9:,.0f}" if d in row else "" for d in sorted({p.dtype for p in measured.products})
        ]
        products.add_row(f"{m} x {k} x {n}", *cells)
    rest = Table("what", "value", title=f"{measured.name}, {measured.seconds:.0f} s", title_justify="left")
    for name, peak in cluster.device.matmul_flops.items():
        if peak.confidence == "measured":
            rest.add_row(f"large products in {name}", f"{peak.value / 1e9:,.0f} GFLOP/s")
    for found in measured.attention:
        rest.add_row(
            f"attention, heads of {found.head_size}",
            f"{found.forward_flops_per_s / 1e9:,.0f} GFLOP/s forward, "
            f"{found.backward_flops_per_s / 1e9:,.0f} backward",
        )
    rest.add_row("memory, read", f"{measured.read_bytes_per_s / 1e9:.1f} GB/s")
    rest.add_row("memory, read and written", f"{measured.update_bytes_per_s / 1e9:.1f} GB/s")
    rest.add_row("elementwise, read and written", f"{measured.elementwise_bytes_per_s / 1e9:.1f} GB/s")
    rest.add_row("AdamW and the norm", f"{measured.optimizer_s * 1e9:.2f} ns a parameter")
    for step in measured.steps:
        what = f"a step of {step.layers} small layers, {step.micro_batches} micro batch(es)"
        rest.add_row(what, f"{step.seconds * 1e3:.1f} ms")
    rest.add_row("a small operator", f"{measured.small_operator_s * 1e6:.1f} us")
    tables: list[Any] = [products, rest]
    if measured.messages:
        tables.append(_messages(measured))
    return Group(*tables)


def _messages(measured: Measured) -> Any:
    from rich.table import Table

    from hasten.plan.measure import fit_line

    operations = list(dict.fromkeys(message.operation for message in measured.messages))
    ranks = measured.messages[0].ranks
    table = Table("bytes", *operations, title=f"Collectives over {ranks} processes, ms", title_justify="left")
    times: dict[int, dict[str, float]] = {}
    for message in measured.messages:
        times.setdefault(message.size_bytes, {})[message.operation] = message.seconds
    for size, row in times.items():
        table.add_row(f"{size:,}", *[f"{row[name] * 1e3:.3f}" if name in row else "" for name in operations])
    lines: list[Line] = [
        fit_line([message for message in measured.messages if message.operation == name])
        for name in operations
    ]
    table.add_row("latency, us", *[f"{line.latency_s * 1e6:.0f}" for line in lines])
    table.add_row("bandwidth, GB/s", *[f"{line.bytes_per_s / 1e9:.2f}" for line in lines])
    return table
