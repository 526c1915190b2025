"""The doctor's answer for one model: what was replaced in it, what was left, and what that is worth."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hasten.base.errors import InputError
from hasten.base.facts import Facts
from hasten.base.screen import Screen
from hasten.ops import native

_PROBE_TOKENS = 64
_PROBE_STEPS = 3
_STAGES = ("opening it", "first step with hasten", "plain steps", "steps with hasten")
_TINY = "tiny:"
_ADVICE_SHARE = 0.5
_CACHE = "key-value cache"
_CACHE_ADVICE = (
    "Called as it is, the model builds a key-value cache in every training step, and blocks with a cache run "
    "their original code. Set model.config.use_cache = False for training; the times here are without it."
)


def examine(model_id: str, facts: Facts, screen: Screen) -> dict[str, Any]:
    """Opens a model, times one small step before and after `optimize`, and reads the engine's report."""
    with screen.bar(f"examining {model_id}", len(_STAGES)) as bar:
        stages = iter(enumerate(_STAGES))
        return _examine(model_id, facts, lambda: bar.update(*next(stages)))


def _examine(model_id: str, facts: Facts, advance: Callable[[], None]) -> dict[str, Any]:
    import torch

    import hasten

    advance()
    model, note = _open(model_id)
    advance()
    bf16 = facts.bf16_in_hardware.value
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.randint(0, _vocabulary(model), (1, _PROBE_TOKENS))
    model.train()
    probe = _Probe(model, ids, bf16)
    hasten.optimize(model)
    first_s = probe.step()
    cached = any(_CACHE in reason for reason in hasten.report(model).originals)
    if cached and "use_cache" in inspect.signature(model.forward).parameters:
        # As a plain call the blocks run their original code, which says nothing more about this model.
        probe = _Probe(model, ids, bf16, use_cache=False)
    hasten.restore(model)
    advance()
    plain_s = probe.best()
    model.zero_grad(set_to_none=True)
    hasten.optimize(model)
    advance()
    again_s = probe.step()
    if cached:
        # Only now were the blocks captured; otherwise this time torch had warmed up before.
        first_s = again_s
    fused_s = probe.best()
    share = probe.fused_share()
    report = hasten.report(model)
    found = report.as_dict()
    text = str(report)
    hasten.restore(model)
    summary = {
        "class": type(model).__name__,
        "weights": note,
        "parameters": f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} million",
        "probe": f"forward and backward of {_PROBE_TOKENS} tokens, {'bf16 autocast' if bf16 else 'fp32'}",
        "plain step": f"{plain_s * 1e3:.0f} ms",
        "first step with hasten": f"{first_s:.2f} s, capture included",
        "step with hasten": f"{fused_s * 1e3:.0f} ms, {plain_s / fused_s:.2f} times plain speed",
        "forward time inside hasten's operators": f"{share:.0%}",
    }
    return {
        "id": model_id,
        "summary": summary,
        "plain_step_s": plain_s,
        "first_step_s": first_s,
        "step_s": fused_s,
        "fused_share": share,
        "report": found,
        "report_text": text,
        "answers": ([_CACHE_ADVICE] if cached else []) + explain(found, plain_s / fused_s, share, facts),
    }


def explain(report: Mapping[str, Any], ratio: float, share: float, facts: Facts) -> list[str]:
    """Plain sentences that answer "why is my model not faster?" from an engine's report.

    Args:
        report: `hasten.report(model).as_dict()`.
        ratio: time of a plain step over time of an optimised one.
        share: of the forward's time, the part spent inside hasten's operators, 0 to 1.
        facts: this machine.
    """
    answers = []
    if report["settings"].get("level") == 0:
        answers.append(
            f"Nothing is optimised: level is 0 (from {report['sources'].get('level', 'default')})."
        )
    elif not report["blocks"]:
        answers.append("No repeated block was found: hasten looks for a list of layers of one class.")
    elif ratio >= 1:
        answers.append(
            f"It is {ratio:.2f} times as fast at {_PROBE_TOKENS} tokens. A larger batch gains more, where"
            " attention, the output head and fresh memory take the time; `hasten bench train` measures that."
        )
    else:
        answers.append(
            f"At {_PROBE_TOKENS} tokens it is slower ({ratio:.2f} times plain speed): so small a step is "
            "mostly fixed costs. `hasten bench train` measures a real batch."
        )
    for graph in report["graphs"]:
        if graph["runs"] != "rewritten":
            answers.append(f"{graph['block']} [{graph['state']}] runs its original code: {graph['reason']}.")
    for reason, calls in report["originals"].items():
        answers.append(f"{calls} calls of a block ran the original code: {reason}.")
    left = [
        f"{entry['name']}: {reason}"
        for graph in report["graphs"]
        for entry in graph["passes"]
        for reason in entry["declined"]
    ]
    answers += [f"Left as it was, {reason}." for reason in dict.fromkeys(left)]
    answers += [
        f"{door} is off: {state.removeprefix('off: ')}."
        for door, state in report["doors"].items()
        if state.startswith("off")
    ]
    if report["graphs"] and share < _ADVICE_SHARE:
        answers.append(
            f"Only {share:.0%} of the forward is spent in hasten's operators; the rest is products and code "
            "that it left alone, which bounds what fusing can gain."
        )
    if not facts.bf16_in_hardware.value:
        answers.append(
            f"This processor multiplies in fp32 only ({facts.bf16_in_hardware.source}); bf16 gains nothing."
        )
    kernels = native.state()
    if kernels.level is None:
        answers.append(f"No native kernel runs, every operator is torch code: {kernels.reason}.")
    else:
        answers.append(f"Native kernels are loaded ({kernels.reason}); operators without one are torch code.")
    return answers


def _open(model_id: str) -> tuple[Any, str]:
    """A model and where its weights come from: `tiny:FAMILY`, a folder with a configuration alone, or
    `open_model`.
    """
    from hasten.models import open_model, tiny_model

    if model_id.startswith(_TINY):
        return tiny_model(model_id.removeprefix(_TINY)), "random, tiny"
    folder = Path(model_id).expanduser()
    weights = [file for ending in ("safetensors", "bin") for file in folder.glob(f"*.{ending}")]
    if (folder / "config.json").is_file() and not weights:
        from transformers import AutoConfig, AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder)
        ), "random: the folder has none"
    return open_model(model_id).model, "as published"


def _vocabulary(model: Any) -> int:
    import torch

    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if table is None:
        table = next((module for module in model.modules() if isinstance(module, torch.nn.Embedding)), None)
    if table is None:
        raise InputError(f"{type(model).__name__} has no embedding table, so no tokens can be tried on it")
    return int(table.num_embeddings)


class _Probe:
    """One small training step of a model, called as a user would; `extra` goes to the forward."""

    def __init__(self, model: Any, ids: Any, bf16: bool, **extra: Any) -> None:
        self.model, self.ids, self.bf16, self.extra = model, ids, bf16, extra
        self.labels = "labels" in inspect.signature(model.forward).parameters

    def step(self) -> float:
        """Seconds of one forward and backward."""
        begin = time.perf_counter()
        self._loss().backward()
        return time.perf_counter() - begin

    def best(self) -> float:
        """Seconds of the fastest step of a few, after one that warms up."""
        self.step()
        return min(self.step() for _ in range(_PROBE_STEPS))

    def fused_share(self) -> float:
        """The share of one forward's time that is spent inside hasten's operators, by torch's profiler."""
        # The profiler without Kineto: Kineto prints a line on standard error at each start and stop ("USDT:
        # profiler_start"), above every log level that would leave its errors visible. A dispatch mode would
        # not do: inside one the blocks run their original code.
        from torch.autograd.profiler_legacy import profile

        with profile() as trace:
            self._loss()
        total = fused = 0.0
        for event in trace.function_events:
            if event.cpu_parent is None:
                total += event.cpu_time_total
            if _is_ours(event) and not any(_is_ours(parent) for parent in _ancestors(event)):
                fused += event.cpu_time_total
        return min(1.0, fused / total) if total else 0.0

    def _loss(self) -> Any:
        import torch

        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            if self.labels:
                return self.model(input_ids=self.ids, labels=self.ids, **self.extra).loss
            out = self.model(self.ids, **self.extra)
            logits = out if isinstance(out, torch.Tensor) else out[0]
            return logits.float().square().mean()


def _is_ours(event: Any) -> bool:
    return event.name.startswith("hasten::")


def _ancestors(event: Any) -> Iterator[Any]:
    while (event := event.cpu_parent) is not None:
        yield event
