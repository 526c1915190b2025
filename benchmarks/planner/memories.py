"""Memory figures of papers and runs beside what the planner says: GiB, GB, bytes or per cent, as the row
has it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping

from benchmarks.planner.adapters import Refused, Row, case
from hasten.plan.cluster import preset
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.memory import held, layer_activations, stage_memory
from hasten.plan.model import ModelShape

_GIB = 2.0**30


def memory_pairs(file: str, row: Row) -> list[tuple[float, float]]:
    """(predicted, published) of one row.

    Raises:
        Refused: the row has no memory figure, or lacks what matters.
    """
    if file == "zero_memory":
        return _zero(row)
    if file == "actmem":
        return _activations(row)
    if not (row.get("mem_gb") or "").strip():
        raise Refused("no memory is given")
    one = case(file, row)
    found = max(sum(stage.values()) for stage in stage_memory(one.model, one.cluster, one.layout, one.job))
    return [(found / _GIB, one.memory_gib)]


def _zero(row: Row) -> list[tuple[float, float]]:
    count, ways = float(row["params_b"]), int(float(row["dp"]))
    moments = float(row.get("adam_K_bytes") or 12)
    per = held(Job(batch=ways, sequence=1, gradient_bytes=2))
    if per.optimizer != moments:
        raise Refused(f"K = {moments} is not that of Adam with fp32 masters")
    found = []
    for level, name in ((1, "p_os_gb"), (2, "p_os_g_gb"), (3, "p_os_g_p_gb")):
        if not row.get(name):
            continue
        cut = [ways if level >= wanted else 1 for wanted in (3, 2, 1)]
        predicted = count * sum(bytes_ / ways_ for bytes_, ways_ in zip(per, cut, strict=True))
        found.append((predicted, float(row[name])))
    return found


def _gpt(values: Mapping[str, int]) -> ModelShape:
    return ModelShape(
        layers=values["layers"],
        hidden=values["hidden"],
        heads=values["heads"],
        inner=4 * values["hidden"],
        gated=False,
        vocabulary=values["vocab"],
        tied=True,
        positions="learned",
        max_positions=values["seq"],
        biases=True,
        norm="layer",
    )


def _technique(text: str, tp: int) -> tuple[bool, str]:
    sequence = "sequence" in text
    recompute = "full" if "full" in text else "selective" if "selective" in text else "none"
    return sequence and tp > 1, recompute


def _activations(row: Row) -> list[tuple[float, float]]:
    quantity, technique = row.get("quantity") or "", row.get("technique") or ""
    if row.get("model") == "formula":
        return [_formula(row)]
    if row.get("unit") == "ms" or "overhead" in quantity:
        raise Refused("a time, not a memory")
    sizes = {name: int(float(row[name])) for name in ("layers", "hidden", "heads", "vocab", "seq")}
    tp, pp, virtual, micro = (int(float(row[name])) for name in ("tp", "pp", "vpp", "mbs"))
    batch = int(float(row["gbs"]))
    model, job = _gpt(sizes), Job(batch=batch, sequence=sizes["seq"], attention="materialised", dropout=True)
    sp, recompute = _technique(technique, tp)
    cluster = preset("dgx-a100-80g", nodes=max(1, tp * pp // 8))

    def peak(sp: bool, recompute: str) -> tuple[float, float]:
        layout = Layout(
            tp=tp,
            sp=sp,
            pp=pp,
            virtual=virtual if pp > 1 else 1,
            micro_batch=micro,
            accumulation=batch // micro,
            recompute=recompute,  # type: ignore[arg-type]
            schedule="interleaved" if virtual > 1 and pp > 1 else "1f1b",
        )
        first = stage_memory(model, cluster, layout, job)[0]
        # The mask of the embedding's dropout is no layer's.
        return first["weights"] + first["gradients"] + first["optimizer"], first["activations"]

    measured = float(row["value"])
    if quantity.startswith("parameters"):
        return [(peak(sp, "none")[0] / _GIB, measured)]
    if row.get("unit") == "GiB":
        return [(peak(sp, recompute)[1] / _GIB, measured)]
    if row.get("unit") == "%":
        return [(100 * peak(sp, recompute)[1] / peak(False, "none")[1], measured)]
    raise Refused(f"quantity {quantity!r} is not known")


def _formula(row: Row) -> tuple[float, float]:
    """The formula at one shape, beside the planner at the same."""
    technique = row.get("technique") or ""
    t, p, m = 8, 4, 2
    layers, h, a, s, b = 8, 4096, 32, 2048, 2
    values = {"s": s, "b": b, "h": h, "a": a, "t": t, "p": p, "m": m, "L": layers}
    model = _gpt({"layers": layers, "hidden": h, "heads": a, "vocab": 51200, "seq": s})
    job = Job(batch=64, sequence=s, attention="materialised", dropout=True)
    sp, recompute = _technique(technique, t)
    published = arithmetic(row["value"], {k: float(v) for k, v in values.items()})
    cluster = preset("dgx-a100-80g", nodes=4)

    def first(virtual: int) -> float:
        layout = Layout(
            tp=t,
            sp=True,
            pp=p,
            virtual=virtual,
            micro_batch=b,
            accumulation=32,
            schedule="interleaved" if virtual > 1 else "1f1b",
        )
        mask = s * b * h / t * (p if virtual == 1 else p * (1 + (p - 1) / (p * virtual)))
        return stage_memory(model, cluster, layout, job)[0]["activations"] - mask

    if technique.startswith("total"):
        return first(1), published
    if technique.startswith("interleaved"):
        return first(m) / first(1), published
    if technique.startswith("embedding"):
        layout = Layout(tp=t, sp=True, pp=p, micro_batch=b, accumulation=32)
        kept = stage_memory(model, cluster, layout, job)[0]["activations"]
        return kept - first(1), published
    ways = 1 if technique.startswith("no ") else t
    layout = Layout(tp=ways, sp=sp and ways > 1, micro_batch=b, accumulation=32, recompute=recompute)  # type: ignore[arg-type]
    return layer_activations(model, layout, job, 0), published


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def arithmetic(text: str, values: dict[str, float]) -> float:
    """A formula of + - * / over named values.

    Raises:
        Refused: anything else.
    """

    def walk(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return float(_OPERATORS[type(node.op)](walk(node.left), walk(node.right)))
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        raise Refused(f"formula {text!r} cannot be read")

    try:
        return walk(ast.parse(text, mode="eval").body)
    except SyntaxError:
        raise Refused(f"formula {text!r} cannot be read") from None
