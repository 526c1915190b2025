"""From a row of a CSV of published runs to what the planner takes; or the reason why it cannot be taken."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hasten.base.errors import UserError
from hasten.plan.cluster import Cluster, Device, device, overridden, preset
from hasten.plan.flops import flops_per_token
from hasten.plan.job import Job
from hasten.plan.layout import Layout, Recompute
from hasten.plan.memory import stage_memory
from hasten.plan.model import ModelShape

Row = Mapping[str, str]


class Refused(Exception):  # noqa: N818
    """A row that lacks what matters; says what."""


@dataclass(frozen=True)
class Case:
    """One published run as the planner sees it."""

    file: str
    id: str
    model: ModelShape
    cluster: Cluster
    layout: Layout
    job: Job
    seconds: float
    memory_gib: float
    conditions: tuple[str, ...] = ()
    """What the row says of device, software and time of the measurement, see `_conditions`."""

    @property
    def group(self) -> tuple[object, ...]:
        """Runs of one group differ in their layout alone."""
        job = self.job.model_dump(exclude={"tokens_total"})
        return (
            self.file,
            self.model.model_copy(update={"name": ""}),
            self.cluster.name,
            self.layout.devices,
            *self.conditions,
            *job.values(),
        )


def rows(folder: Path, name: str) -> list[Row]:
    """The rows of one file; none where it is absent."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def held_back(row: Row) -> bool:
    """Whether a row is kept out of the fit: by a hash of all that it says but its number."""
    text = "|".join(f"{key}={value}" for key, value in sorted(row.items()) if key != "id")
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 1


# Jean Zay's links were mended on this day: "do not compare today's numbers to yesterday's" (the prequel's own
# words above its table of batch sizes).
_JEAN_ZAY_MENDED = "02-25"


# From so many devices on every run hung there without CUDA_LAUNCH_BLOCKING=1 (the prequel's section on that;
# the script of the final run sets it too).
_JEAN_ZAY_HANGS = 320


def _conditions(row: Row) -> tuple[str, ...]:
    """What makes two runs of one model incomparable where the planner sees only their layouts: device and
    number format as written, the source and its release, a machine that was changed in between."""
    release = re.search(r"release ([^;,]+)", row.get("locator") or "")
    day = re.match(r"(\d\d-\d\d);", row.get("notes") or "")
    told = [row.get(name) or "" for name in ("gpu", "gpu_mem_gb", "precision", "source")]
    mended = bool(day) and "JeanZay" in told[-1] and day[1] >= _JEAN_ZAY_MENDED
    return (*told, release[1].strip() if release else "", "mended" if mended else "")


def _whole(row: Row, name: str, default: int | None = None) -> int:
    text = (row.get(name) or "").strip()
    if not text:
        if default is None:
            raise Refused(f"{name} is missing")
        return default
    try:
        return int(float(text))
    except ValueError:
        raise Refused(f"{name} = {text!r} is not a number") from None


# What the files call a device, the planner's name of it, and the cluster whose links it has.
_MACHINES = (
    (r"A100.*40GB", "a100-40g", "dgx-a100-40g"),
    (r"A100", "a100-80g", "dgx-a100-80g"),
    (r"H100", "h100-80g", "dgx-h100"),
    (r"H200", "h200-141g", "dgx-h200"),
    (r"GB[23]00", "gb200", "gb200-nvl72"),
    (r"B300", "b300-288g", "dgx-b200"),
    (r"B200", "b200-180g", "dgx-b200"),
    (r"910C", "ascend-910c-die", "atlas-900-a3-superpod"),
    (r"910B", "ascend-910b1", "atlas-900-a2-pod"),
)


def machine(row: Row) -> Cluster:
    """The cluster of a row: a preset's links, the row's nodes, and what its notes say of network and
    memory."""
    gpu = row.get("gpu") or ""
    found_by = next((entry for entry in _MACHINES if re.search(entry[0], gpu)), None)
    if found_by is None:
        raise Refused(f"no figures of the device {gpu!r}" if gpu else "gpu is missing")
    _, name, links = found_by
    count, each = _whole(row, "n_gpus"), _whole(row, "gpus_per_node", 8)
    base = preset(links, nodes=max(1, -(-count // each)))
    changes: dict[str, object] = {"devices_per_node": each}
    known: Device = device(name)
    found: dict[str, object] = known.model_dump()
    if memory := (row.get("gpu_mem_gb") or "").strip():
        found["memory_bytes"] = {"value": float(memory) * 1e9, "source": "the row", "confidence": "given"}
    if rate := re.search(r"HBM\w* ([\d.]+)TB/s", gpu):
        found["memory_bandwidth"] = {
            "value": float(rate[1]) * 1e12,
            "source": "the row",
            "confidence": "given",
        }
    changes["device"] = found
    text = f"{row.get('notes') or ''}"
    across = None
    if links_ := re.search(r"(\d+) [\w-]+ links of (\d+)\s*Gb/s per node", text):
        across = int(links_[1]) * float(links_[2]) / each
    elif total := re.search(r"inter (\d+) Gb/s per node|(\d+) Gb/s inter-node \(per node\)", text):
        across = float(total[1] or total[2]) / each
    elif (total := re.search(r"A100 tables: (\d+) Gb/s RoCE per node", text)) and "A100" in gpu:
        across = float(total[1]) / each
    if across:
        changes["across"] = {
            "bandwidth": {"value": across * 1e9 / 8, "source": "the row", "confidence": "given"}
        }
    if "BigScience" in (row.get("source") or ""):
        # Jean Zay. NCCL reaches 40 Gb/s through each of the four Omni-Path interfaces of 100 Gb/s.
        changes["inside"] = {
            "bandwidth": {
                "value": 4 * 25e9,
                "source": "4 NVLink3 between two devices, BLOOM (arXiv 2211.05100) section 3.4",
                "confidence": "secondary",
            }
        }
        changes["across"] = {
            "bandwidth": {
                "value": 4 * 40.5e9 / 8 / each,
                "source": "bigscience-workshop/bigscience experiments/bandwidth/all_reduce_bench-a100-n4.txt",
                "confidence": "measured",
            }
        }
    return overridden(base, changes, f"row {row.get('id')}")


def shape(row: Row) -> ModelShape:
    """The model of a row."""
    if (row.get("kv_heads") or "") == "MLA":
        raise Refused("latent attention: its ranks are not in the file")
    layers, hidden, heads = (_whole(row, name) for name in ("layers", "hidden", "heads"))
    kind = row.get("arch") or "gpt"
    gated = (row.get("gated_mlp") or "0") == "1"
    experts = _whole(row, "experts", 0)
    source = row.get("source") or ""
    alibi = "MPT" in source or "BLOOM" in source
    plain = kind == "gpt" and not gated
    vocabulary = _whole(row, "vocab", 0)
    if not vocabulary:
        # The head is a small part of a large model: the usual size of the family.
        vocabulary = 32000 if kind == "llama" else 50304
    try:
        return ModelShape(
            name=row.get("model") or "model",
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=_whole(row, "kv_heads", heads),
            head_size=_whole(row, "head_dim", hidden // heads),
            inner=_whole(row, "ffn", 4 * hidden),
            gated=gated,
            vocabulary=vocabulary,
            tied=plain,
            positions="alibi" if alibi else "learned" if plain else "rotary",
            max_positions=_whole(row, "seq", 0) if plain and not alibi else 0,
            biases=plain and "MPT" not in source,
            norm="layer" if plain else "rms",
            experts=experts,
            experts_per_token=_whole(row, "topk") if experts else 0,
            expert_inner=_whole(row, "moe_ffn", _whole(row, "ffn", 0)) if experts else 0,
        )
    except ValueError as error:
        raise Refused(str(error).splitlines()[-2].strip() if "\n" in str(error) else str(error)) from None


_PRECISIONS = (("fp4", "fp4"), ("fp8", "fp8"), ("bf16", "bf16"), ("fp16", "fp16"))


def _recompute(text: str) -> tuple[Recompute, int | None]:
    text = text.strip().lower()
    if match := re.fullmatch(r"full/block/(\d+)", text):
        return "full", int(match[1])
    if text.startswith("full"):
        return "full", None
    if "selective op" in text or "config default" in text:
        return "operators", None
    if text.startswith("selective layer"):
        # torchtitan's default: every second layer.
        return "full", -1
    if text.startswith("selective"):
        return "selective", None
    if text in ("none", ""):
        return "none", None
    raise Refused(f"recompute = {text!r} is not known")


def case(file: str, row: Row) -> Case:
    """A row as the planner sees it.

    Raises:
        Refused: what matters is missing.
    """
    complete = (row.get("inputs_complete") or "").strip()
    if complete.startswith("n (") or complete == "n":
        raise Refused(f"inputs are not complete: {complete}")
    if complete.startswith("output"):
        raise Refused(complete)
    model, cluster = shape(row), machine(row)
    tp, cp = _whole(row, "tp"), _whole(row, "cp", 1)
    pp, dp = _whole(row, "pp"), _whole(row, "dp")
    count = _whole(row, "n_gpus")
    if tp * cp * pp * dp != count:
        raise Refused(f"tp x cp x pp x dp = {tp * cp * pp * dp} is not n_gpus = {count}")
    micro, batch = _whole(row, "mbs"), _whole(row, "gbs")
    if batch % (dp * micro):
        raise Refused(f"gbs = {batch} is not a multiple of dp x mbs = {dp * micro}")
    virtual = _whole(row, "vpp", 1) if pp > 1 else 1
    source, kind = row.get("source") or "", (row.get("attention_impl") or "").lower()
    modern = any(
        word in source for word in ("NeMo", "Megatron-Bridge", "MindSpeed", "ModelLink", "Megatron-Core")
    )
    sharded = any(word in source for word in ("MPT", "torchtitan", "fms-fsdp", "Primus"))
    text = (row.get("recompute") or "").strip()
    if not text and not modern:
        raise Refused("recompute is missing")
    recompute, layers = _recompute(text)
    if layers == -1:
        layers = model.layers // 2
    zero_text = (row.get("zero_stage") or "").strip()
    shard = 0
    if zero_text.startswith("HSDP"):
        zero, shard = 3, min(dp, _whole(row, "gpus_per_node", 8))
    else:
        zero = int(zero_text[0]) if zero_text[:1].isdigit() else 0
    precision_text = (row.get("precision") or "").lower()
    precision = next((ours for theirs, ours in _PRECISIONS if theirs in precision_text), None)
    if precision is None:
        raise Refused(
            f"precision {precision_text!r} is not known" if precision_text else "precision is missing"
        )
    # DeepSpeed's and Megatron's fp16 accumulate in fp16; "fp16/bf16" are the prequel's runs before its bf16
    # optimizer "that was just written to accumulate gradients in fp32".
    half_gradients = precision_text.startswith("fp16")
    flash = "flash" in kind
    notes = (row.get("notes") or "").lower()
    given = (row.get("seq_parallel") or "").strip()
    sp = tp > 1 and (given == "1" or (given == "" and modern))
    chunked = virtual > 1
    schedule = "interleaved" if chunked else "1f1b"
    job = Job(
        batch=batch,
        sequence=_whole(row, "seq"),
        precision=precision,  # type: ignore[arg-type]
        master="fp32" if sharded else "split",
        attention="flash" if flash else "materialised",
        dropout=not flash,
        overlap_gradients=modern or sharded,
        overlap_tensor=(
            "NeMo" in source or "Megatron-Bridge" in source or "mc2" in notes or "async tp" in notes
        )
        and tp > 1,
        gradient_bytes=2 if half_gradients and not modern and not sharded else 0,
        reduce_whole=zero == 1 and "BigScience" in source,
        gathers_per_layer=12 if zero == 3 and not sharded and not modern else 1,
        dispatch="tokens" if "Megatron-Bridge" in source else "pairs",
        fused_loss="torchtitan" in source and "2025" in source,
        fused_accumulation=modern,
        adapters="LoRA" in (row.get("locator") or ""),
        blocking="BigScience" in source and count >= _JEAN_ZAY_HANGS,
        compiled="compile" in (row.get("model") or "").lower() or "Megatron-Bridge" in source,
    )
    try:
        layout = Layout(
            tp=tp,
            sp=sp,
            cp=cp,
            pp=pp,
            virtual=virtual,
            ep=_whole(row, "ep", 1) if model.experts else 1,
            dp=dp,
            zero=zero,
            shard=shard,
            micro_batch=micro,
            accumulation=batch // (dp * micro),
            recompute=recompute,
            recompute_layers=layers if layers is None else min(layers, -(-model.layers // pp)),
            schedule=schedule,  # type: ignore[arg-type]
        )
        if not text:
            layout = _fitting(model, cluster, layout, job)
        layout.check(model)
    except UserError as error:
        raise Refused(str(error)) from None
    except ValueError as error:
        raise Refused(str(error).splitlines()[-2].strip() if "\n" in str(error) else str(error)) from None
    return Case(
        file=file,
        id=row.get("id") or "",
        model=model,
        cluster=cluster,
        layout=layout,
        job=job,
        seconds=_seconds(row, model, job),
        memory_gib=float(row.get("mem_gb") or 0),
        conditions=_conditions(row),
    )


def _fitting(model: ModelShape, cluster: Cluster, layout: Layout, job: Job) -> Layout:
    """The least recomputation with which the run fits: a whole number of layers of each stage."""
    per_stage = -(-model.layers // layout.pp)
    room = cluster.device.memory_bytes.value
    for count in sorted({0, *(per_stage * k // 8 for k in range(1, 9))}):
        plan = (
            layout
            if count == 0
            else layout.model_copy(update={"recompute": "full", "recompute_layers": count})
        )
        if max(sum(stage.values()) for stage in stage_memory(model, cluster, plan, job)) <= room:
            return plan
    return layout.model_copy(update={"recompute": "full"})


def _seconds(row: Row, model: ModelShape, job: Job) -> float:
    for name in ("iter_time_s", "iter_time_s_derived"):
        if row.get(name):
            return float(row[name])
    if row.get("tflops_per_gpu") and "hardware" in (row.get("tflops_kind") or ""):
        total = flops_per_token(model, job.sequence, "hardware") * job.batch * job.sequence
        return total / (float(row["tflops_per_gpu"]) * 1e12 * _whole(row, "n_gpus"))
    raise Refused("no time is given")
