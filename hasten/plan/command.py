"""`hasten plan`: predicts a training run and searches its layout, without a device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hasten.plan.cluster import Cluster
    from hasten.plan.job import Job
    from hasten.plan.model import ModelShape
    from hasten.plan.search import Found, Limits

HELP = """Predict memory and step time of a training run and find its best layout.

Needs no device and no network. MODEL is a preset, a config.json or its folder,
a TOML with the fields of a shape, or a hub id whose config is cached. CLUSTER
is a preset, a TOML file, or "this" for the machine at hand (measured by hasten
calibrate). --list shows the presets.

A layout is written as in the tables: tp=4,pp=8,recompute=full. What is left
out follows: dp fills the devices, accumulation the batch.

Exit codes: 0 done; 1 nothing fits, or --fit says no; 2 a mistake in what was
asked for.

Examples:

  hasten plan gpt3-175b --cluster dgx-a100-80g --devices 1024 --batch 1536 --seq 2048 --tokens 300e9

  hasten plan llama3-70b --cluster dgx-h100 --nodes 8 --batch 256 --seq 8192 --html plan.html

  hasten plan llama2-7b --cluster atlas-800t-a2 --fit

  hasten plan llama2-70b --cluster dgx-h100 --nodes 8 --what-if "tp=4,recompute=full"

  hasten plan llama2-70b --cluster dgx-h100 --nodes 8 --explain tp=8,pp=2 tp=4,pp=4

  hasten plan smollm2-135m --cluster this --batch 2 --seq 512 --toml plan.toml

  hasten plan smollm2-135m --cluster this --batch 8 --seq 1024 --profile step.json
"""

MODEL = Annotated[
    str | None, typer.Argument(help="Preset, config.json, folder, TOML or hub id.", show_default=False)
]
CLUSTER = Annotated[str, typer.Option("--cluster", help="Preset, TOML file, or this.")]
NODES = Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the cluster.")]
DEVICES = Annotated[int | None, typer.Option("--devices", min=1, help="Devices, instead of --nodes.")]
BATCH = Annotated[
    int, typer.Option("--batch", min=1, help="Sequences of one optimizer step, over all devices.")
]
SEQ = Annotated[int, typer.Option("--seq", min=1, help="Tokens of one sequence.")]
TOKENS = Annotated[float, typer.Option("--tokens", min=0, help="Tokens of the whole run: days and cost.")]
PRECISION = Annotated[str, typer.Option("--precision", help="bf16, fp16, fp32, fp8 or fp4.")]
ATTENTION = Annotated[str, typer.Option("--attention", help="flash or materialised.")]
OPTIMIZER = Annotated[str, typer.Option("--optimizer", help="adamw or sgd.")]
MASTER = Annotated[
    str | None,
    typer.Option(
        "--master",
        help="split: 16-bit weights beside fp32 ones; fp32: those alone, cast where used; none: 16 bits.",
        show_default="split; fp32, as hasten train has it, on this machine",
    ),
]
FIX = Annotated[str | None, typer.Option("--fix", help="Look only at layouts with these values.")]
LIMIT = Annotated[
    list[str] | None,
    typer.Option("--limit", help="step<5s, memory<70GB, days<30, cost<2m, mfu>40%; may be repeated."),
]
OFFLOAD = Annotated[
    bool,
    typer.Option("--offload/--no-offload", help="Where memory lacks, the optimizer's states on the host."),
]
HEADROOM = Annotated[
    float,
    typer.Option(
        "--headroom", min=0, max=0.9, help="Share of memory that stays free: it is predicted to about 5 %."
    ),
]
PRICE = Annotated[float | None, typer.Option("--price", min=0, help="Cost of one device for one hour.")]
SET = Annotated[
    list[str] | None, typer.Option("--set", help="A figure of the cluster: device.memory_bytes=64e9.")
]
PROFILE = Annotated[
    Path | None,
    typer.Option("--profile", help="A measured step (hasten train --profile) in place of computed times."),
]
FIT = Annotated[bool, typer.Option("--fit", help="Only: does it fit, and what is missing.")]
WHAT_IF = Annotated[str | None, typer.Option("--what-if", help="The best layout with some values changed.")]
EXPLAIN = Annotated[
    tuple[str, str] | None,
    typer.Option("--explain", help="Two layouts side by side; best stands for the best.", show_default=False),
]
SCALING = Annotated[
    str | None,
    typer.Option("--scaling", help="The best layout for each of these numbers of devices: 8,16,32."),
]
TOP = Annotated[int, typer.Option("--top", min=0, help="Runners-up that are shown.")]
HTML = Annotated[Path | None, typer.Option("--html", help="Also write one page: timeline, memory, Pareto.")]
TOML = Annotated[Path | None, typer.Option("--toml", help="Also write the settings for hasten train.")]
LIST = Annotated[bool, typer.Option("--list", help="List models and clusters that can be named.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")]


def plan(
    model: MODEL = None,
    cluster: CLUSTER = "this",
    nodes: NODES = None,
    devices: DEVICES = None,
    batch: BATCH = 256,
    seq: SEQ = 2048,
    tokens: TOKENS = 0.0,
    precision: PRECISION = "bf16",
    attention: ATTENTION = "flash",
    optimizer: OPTIMIZER = "adamw",
    master: MASTER = None,
    fix: FIX = None,
    limit: LIMIT = None,
    offload: OFFLOAD = True,
    headroom: HEADROOM = 0.05,
    price: PRICE = None,
    settings: SET = None,
    profile: PROFILE = None,
    fit: FIT = False,
    what_if: WHAT_IF = None,
    explain: EXPLAIN = None,
    scaling: SCALING = None,
    top: TOP = 9,
    html: HTML = None,
    toml: TOML = None,
    list_presets: LIST = False,
    as_json: AS_JSON = False,
) -> None:
    if list_presets:
        _list(as_json)
        return
    from hasten.base.errors import ConfigError
    from hasten.plan.candidates import parse_layout
    from hasten.plan.machine import THIS_NAME, open_cluster
    from hasten.plan.search import Limits, parse_limit
    from hasten.plan.sources import open_shape

    if model is None:
        raise ConfigError(
            "MODEL is missing: give a preset, a config.json or a hub id; --list shows the presets"
        )
    asked = [
        name
        for name, given in (
            ("--fit", fit),
            ("--what-if", what_if),
            ("--explain", explain),
            ("--scaling", scaling),
        )
        if given
    ]
    if len(asked) > 1:
        raise ConfigError(f"{' and '.join(asked)} are different questions; give one of them")
    shape = open_shape(model)
    whole = open_cluster(cluster, nodes, devices, settings or ())
    if profile is not None:
        from hasten.plan.replay import load, replayed

        whole = replayed(whole, load(profile))
    if price is not None:
        whole = whole.model_copy(update={"price_per_device_hour": price})
    # What `hasten train` does on the machine at hand: fp32 weights, and logits that are never whole.
    here = whole.name == THIS_NAME
    master = master or ("fp32" if here else "split")
    job = _job(
        batch=batch,
        sequence=seq,
        tokens_total=tokens,
        precision=precision,
        attention=attention,
        optimizer=optimizer,
        master=master,
        fused_loss=here,
    )
    limits = Limits(
        devices=devices or 0,
        fixed=parse_layout(fix) if fix else {},
        bounds=tuple(parse_limit(text) for text in limit or ()),
        offload=offload,
        headroom=headroom,
        runners_up=top,
    )
    asking = _Asking(shape, whole, job, limits, as_json)
    if fit:
        asking.fit()
    elif scaling:
        asking.scaling(scaling)
    elif explain:
        asking.explain(*explain)
    elif what_if:
        asking.what_if(what_if)
    else:
        asking.plan(model, html, toml)


plan.__doc__ = HELP


class _Asking:
    """One question about a model on a cluster, and how its answer is printed."""

    def __init__(self, model: ModelShape, cluster: Cluster, job: Job, limits: Limits, as_json: bool) -> None:
        self.model, self.cluster, self.job, self.limits, self.as_json = model, cluster, job, limits, as_json
        self.devices = limits.devices or cluster.devices

    def plan(self, model_id: str, html: Path | None, toml: Path | None) -> None:
        from hasten.base.files import write_atomically
        from hasten.plan.document import plan_document
        from hasten.plan.page import render_page
        from hasten.plan.planfile import plan_toml
        from hasten.plan.show import show_plan

        found = self._search()
        document: dict[str, Any] = {}
        if self.as_json or html is not None:
            document = plan_document(self.model, self.cluster, self.job, self._with_timeline(found))
        if html is not None:
            write_atomically(html, render_page(document))
        if toml is not None and found.best is not None:
            write_atomically(toml, plan_toml(found.best, self.job, model_id))
        self._print(document, lambda: show_plan(self.model, self.cluster, self.job, found))
        for path in (html, toml if found.best is not None else None):
            if path is not None:
                typer.echo(f"written: {path}", err=True)
        if found.best is None:
            raise typer.Exit(1)

    def fit(self) -> None:
        from hasten.plan.document import facts_document, fit_document
        from hasten.plan.explain import fit
        from hasten.plan.show import show_fit

        answer = fit(self.model, self.cluster, self.job, self.limits)
        document = {**facts_document(self.model, self.cluster, self.job), "fit": fit_document(answer)}
        self._print(document, lambda: show_fit(answer, self.model, self.cluster))
        if not answer.fits:
            raise typer.Exit(1)

    def explain(self, a: str, b: str) -> None:
        self._compare(self._estimate(a), self._estimate(b))

    def what_if(self, changes: str) -> None:
        from hasten.plan.candidates import complete, parse_layout
        from hasten.plan.estimate import estimate

        best = self._best()
        layout = complete(
            parse_layout(changes), self.model, self.cluster, self.job, self.devices, base=best.layout
        )
        self._compare(best, estimate(self.model, self.cluster, layout, self.job))

    def scaling(self, text: str) -> None:
        from hasten.base.errors import ConfigError
        from hasten.plan.document import facts_document, scaling_document
        from hasten.plan.explain import scaling
        from hasten.plan.show import show_scaling

        parts = text.replace(",", " ").split()
        if not all(part.isdigit() and int(part) > 0 for part in parts):
            raise ConfigError(f"--scaling {text!r}: give numbers of devices, for example 8,16,32")
        rows = scaling(self.model, self.cluster, self.job, [int(part) for part in parts], self.limits)
        document = {**facts_document(self.model, self.cluster, self.job), "scaling": scaling_document(rows)}
        self._print(document, lambda: show_scaling(rows))

    def _compare(self, a: Any, b: Any) -> None:
        from hasten.plan.document import comparison_document, facts_document
        from hasten.plan.explain import compare
        from hasten.plan.show import show_comparison

        comparison = compare(a, b)
        room = self.cluster.device.memory_bytes.value
        over = [name for name, item in (("A", a), ("B", b)) if item.memory_peak > room]
        document = {
            **facts_document(self.model, self.cluster, self.job),
            "comparison": comparison_document(comparison),
            "out_of_memory": over,
        }
        self._print(document, lambda: show_comparison(comparison))
        for name in over if not self.as_json else ():
            typer.echo(f"{name} does not fit: the device has {room / 1e9:.1f} GB")

    def _estimate(self, text: str) -> Any:
        from hasten.plan.candidates import complete, parse_layout
        from hasten.plan.estimate import estimate

        if text.strip() == "best":
            return self._best()
        layout = complete(parse_layout(text), self.model, self.cluster, self.job, self.devices)
        return estimate(self.model, self.cluster, layout, self.job)

    def _best(self) -> Any:
        from hasten.base.errors import ConfigError

        found = self._search()
        if found.best is None:
            reason = f": {found.nearest_miss.reason}" if found.nearest_miss else ""
            raise ConfigError(f"no layout fits, so there is no best{reason}")
        return found.best

    def _search(self) -> Found:
        from hasten.plan.search import search

        return search(self.model, self.cluster, self.job, self.limits)

    def _with_timeline(self, found: Found) -> Found:
        from hasten.plan.estimate import estimate

        if found.best is None:
            return found
        best = estimate(self.model, self.cluster, found.best.layout, self.job, timeline=True)
        return replace(found, best=best)

    def _print(self, document: dict[str, Any], shown: Any) -> None:
        if self.as_json:
            typer.echo(json.dumps(document))
            return
        from rich.console import Console

        Console().print(shown())


def _job(**values: Any) -> Job:
    from pydantic import ValidationError

    from hasten.base.errors import ConfigError, first_fault
    from hasten.plan.job import Job

    try:
        return Job.model_validate(values)
    except ValidationError as error:
        _, name, given, said = first_fault(error)
        raise ConfigError(f"{name} = {given!r}: {said}") from None


def _list(as_json: bool) -> None:
    from hasten.plan import cluster as clusters
    from hasten.plan import model as models

    found_models = {name: models.preset(name) for name in models.presets()}
    found_clusters = {name: clusters.preset(name) for name in clusters.presets()}
    if as_json:
        document = {
            "models": {name: shape.model_dump() for name, shape in found_models.items()},
            "clusters": {name: whole.model_dump() for name, whole in found_clusters.items()},
        }
        typer.echo(json.dumps(document))
        return
    from rich.console import Console
    from rich.table import Table

    sources = models.presets()
    table = Table("model", "parameters", "source", title="Models", title_justify="left")
    for name, shape in found_models.items():
        table.add_row(name, f"{shape.parameters / 1e9:.3g} B", str(sources[name].get("source", "")))
    other = Table("cluster", "device", "a node", "GB", "bf16 TFLOP/s", title="Clusters", title_justify="left")
    for name, whole in found_clusters.items():
        device = whole.device
        other.add_row(
            name,
            device.name,
            f"{whole.devices_per_node}",
            f"{device.memory_bytes.value / 1e9:.0f}",
            f"{device.peak('bf16') / 1e12:.0f}",
        )
    other.add_row("this", "the machine at hand", "1", "", "hasten calibrate")
    Console().print(table, other)
