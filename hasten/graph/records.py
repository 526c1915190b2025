"""What the engine remembers about a model, and the report made of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hasten.graph.passes import PassLog


@dataclass
class Proof:
    """One rewritten graph against the original: relative errors against a run in higher precision."""

    passed: bool
    worst_output: float
    worst_gradient: float | None
    original_output: float
    reason: str = ""


@dataclass
class GraphRecord:
    """One captured graph."""

    block: str
    state: str
    """Short text: autocast dtype, grad mode, static or dynamic sizes."""

    operators: Counter[str] = field(default_factory=Counter)
    """Operators of hasten in the rewritten graph."""

    rules: Counter[str] = field(default_factory=Counter)
    log: list[PassLog] = field(default_factory=list)
    capture_s: float = 0.0
    proof: Proof | None = None
    original_s: float | None = None
    rewritten_s: float | None = None
    runs: str = "rewritten"
    """`rewritten` or `original`."""

    reason: str = ""
    """Why the original runs."""

    def note(self, *entries: PassLog) -> None:
        """Adds what passes did; what they replaced counts from level 1 on."""
        for entry in entries:
            if not (entry.count or entry.declined or entry.level == 0):
                continue
            self.log.append(entry)
            if entry.level >= 1 and entry.count:
                self.rules[entry.name] += entry.count

    def as_dict(self) -> dict[str, Any]:
        return {
            "block": self.block,
            "state": self.state,
            "operators": dict(self.operators),
            "rules": dict(self.rules),
            "passes": [entry.as_dict() for entry in self.log],
            "capture_s": self.capture_s,
            "proof": None if self.proof is None else dict(self.proof.__dict__),
            "original_s": self.original_s,
            "rewritten_s": self.rewritten_s,
            "runs": self.runs,
            "reason": self.reason,
        }


@dataclass
class Report:
    """What was recognised, what was replaced by what, what was left and why."""

    model: str
    blocks: Counter[str]
    """Class name of each repeated block -> how many of them run through the engine."""

    settings: dict[str, Any]
    sources: dict[str, str]
    graphs: list[GraphRecord]
    doors: dict[str, str]
    """`attention`, `output head`, `buffers`: on, or why not."""

    originals: Counter[str]
    """Reason -> calls of a block that ran the original code."""

    buffers: dict[str, int] = field(default_factory=dict)
    """The arena's counters (`hasten.ops.buffers.Usage`); empty where there is none."""

    def rule_counts(self) -> Counter[str]:
        """Over the distinct captured graphs: how often each rule replaced something."""
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(graph.rules)
        return total

    def operator_counts(self) -> Counter[str]:
        """Over the distinct captured graphs: how many of each operator stand in the rewritten graph."""
        total: Counter[str] = Counter()
        for graph in self.graphs:
            total.update(graph.operators)
        return total

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "blocks": dict(self.blocks),
            "settings": self.settings,
            "sources": self.sources,
            "doors": self.doors,
            "buffers": self.buffers,
            "graphs": [graph.as_dict() for graph in self.graphs],
            "originals": dict(self.originals),
        }

    def __str__(self) -> str:
        lines = [f"hasten report: {self.model}"]
        shown = ", ".join(
            f"{name}={value} ({self.sources.get(name, '?')})" for name, value in self.settings.items()
        )
        lines.append(f"  settings: {shown}")
        blocks = ", ".join(f"{count} x {name}" for name, count in self.blocks.items()) or "none found"
        lines.append(f"  repeated blocks: {blocks}")
        lines += [f"  {door}: {state}" for door, state in self.doors.items()]
        if not self.graphs:
            lines.append("  no graph captured yet: the first forward captures")
        for graph in self.graphs:
            lines += _graph_lines(graph)
        lines += [f"  original block ran {count} times: {reason}" for reason, count in self.originals.items()]
        return "\n".join(lines)


def _graph_lines(graph: GraphRecord) -> list[str]:
    lines = [
        f"  graph of {graph.block} [{graph.state}], captured in {graph.capture_s:.2f} s, runs {graph.runs}"
    ]
    if graph.reason:
        lines.append(f"    because: {graph.reason}")
    if graph.operators:
        lines.append(
            "    operators: " + ", ".join(f"{n} x {name}" for name, n in sorted(graph.operators.items()))
        )
    for entry in graph.log:
        if entry.count:
            lines.append(
                f"    level {entry.level} {entry.name}: {entry.count} replaced, {entry.seconds * 1e3:.0f} ms"
            )
        lines += [
            f"    level {entry.level} {entry.name}: left, because {reason}" for reason in entry.declined
        ]
    if graph.proof is not None:
        proof = graph.proof
        gradient = "" if proof.worst_gradient is None else f", gradients {proof.worst_gradient:.1e}"
        verdict = "equal within budget" if proof.passed else f"NOT equal ({proof.reason})"
        lines.append(
            f"    proof: {verdict}; relative error of outputs {proof.worst_output:.1e} "
            f"(original {proof.original_output:.1e}){gradient}"
        )
    if graph.original_s is not None and graph.rewritten_s is not None:
        lines.append(
            f"    measured: {graph.rewritten_s * 1e3:.1f} ms against {graph.original_s * 1e3:.1f} ms, "
            f"{graph.original_s / max(graph.rewritten_s, 1e-9):.2f}x"
        )
    return lines
