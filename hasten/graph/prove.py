"""Proof and measurement of one rewritten graph on its first real inputs.

The original runs in the caller's precision and once more in a higher one (fp32 for low precision, float64 for
fp32); the rewritten graph passes if its error against that truth is at most twice the original's, plus a
floor. Both are timed; where the rewritten graph is clearly slower, the original is kept.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hasten.base.errors import ShapeError, first_line
from hasten.graph.records import GraphRecord, Proof

Callee = Callable[..., Sequence[Any]]

# Relative error that rounding alone explains over one layer, by the least precise dtype at work.
_FLOORS = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# An original that is off by more than so many floors was not run in the same sense in the wider dtype.
_SANE = 10
_MIN_TOKENS_TO_MEASURE = 256
_SLOWER = 1.10
# Share of the largest gradient's root mean square below which a gradient counts as having no scale of its
# own.
_NO_SCALE = 1e-2
_ROUNDS = 2


class Proved:
    """Callable that stands for one graph: proves it on its first call, then runs whichever was chosen."""

    def __init__(
        self,
        original: Callee,
        rewritten: Callee,
        record: GraphRecord,
        *,
        autocast: torch.dtype | None,
        verify: bool,
        measure: bool,
        mutates: bool,
        runs: Callee | None = None,
    ) -> None:
        """runs: the form of `rewritten` that runs once it is proved, if that is another one."""
        self._original, self._rewritten, self._record = original, rewritten, record
        self._autocast = autocast
        # A graph that writes its inputs cannot be run twice: it is neither proved nor timed here.
        self._verify, self._measure = verify and not mutates, measure and not mutates
        self._chosen = rewritten if runs is None else runs

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self._verify or self._measure:
            self._judge(args)
        return self._chosen(*args)

    def _judge(self, args: Sequence[Any]) -> None:
        verify, self._verify = self._verify, False
        enough = _tokens(args) >= _MIN_TOKENS_TO_MEASURE
        measure = self._measure and enough
        self._measure = self._measure and not enough
        if not (verify or measure):
            return
        grad, autocast = torch.is_grad_enabled(), self._autocast

        def work() -> None:
            with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(grad), _autocast(autocast):
                if verify:
                    self._record.proof = prove(self._original, self._rewritten, args, autocast)
                if measure:
                    self._time(args)

        # Hooks on saved tensors (gradient checkpointing) belong to the caller's thread and must not see this.
        _apart(work) if hooks_active() else work()
        proof = self._record.proof
        if proof is not None and not proof.passed:
            self._keep_original(f"the proof failed: {proof.reason}")

    def _time(self, args: Sequence[Any]) -> None:
        best: dict[Callee, float] = {}
        for _ in range(_ROUNDS):
            for callee in (self._original, self._rewritten):
                started = time.perf_counter()
                _run(callee, _leaves(args, None), None)
                best[callee] = min(best.get(callee, float("inf")), time.perf_counter() - started)
        self._record.original_s, self._record.rewritten_s = best[self._original], best[self._rewritten]
        if best[self._rewritten] > _SLOWER * best[self._original]:
            self._keep_original("measured slower than the original")

    def _keep_original(self, reason: str) -> None:
        self._chosen = self._original
        self._record.runs, self._record.reason = "original", reason


def prove(original: Callee, rewritten: Callee, args: Sequence[Any], autocast: torch.dtype | None) -> Proof:
    """Compares outputs and, where gradients are on, the gradients of every input that requires one."""
    low = autocast or _least_precise(args)
    wide = torch.float64 if low in (torch.float32, torch.float64) else torch.float32
    floor = _FLOORS.get(low, 2e-2)
    seeds: list[torch.Tensor] = []
    try:
        ours = _run(rewritten, _leaves(args, None), seeds)
    except Exception as error:
        # Nothing is hidden: the original runs next, and raises whatever is the caller's own mistake.
        return Proof(False, float("nan"), None, float("nan"), f"it raised {first_line(error)}")
    theirs = _run(original, _leaves(args, None), seeds)
    with _autocast(None):
        try:
            truth = _run(original, _leaves(args, wide), seeds)
        except (RuntimeError, ShapeError):
            truth = theirs
    if truth is theirs or not _wider_is_nearer(theirs, truth, floor):
        # The model casts to a fixed dtype inside, so it cannot run wider: compare with the original itself.
        # The rounding of both sides shows in the difference then.
        truth, floor = theirs, 2 * floor
    worst = {"output": 0.0, "gradient": 0.0}
    base = 0.0
    for kind, index in (("output", 0), ("gradient", 1)):
        # A gradient that is zero in exact arithmetic (the bias of keys) has no scale of its own.
        typical = max((_rms(t) for t in truth[index] if t is not None), default=0.0)
        for position, (a, b, t) in enumerate(zip(ours[index], theirs[index], truth[index], strict=True)):
            if a is None or b is None or t is None:
                if (a is None) != (b is None):
                    return Proof(
                        False, worst["output"], None, base, f"{kind} {position} is missing on one side"
                    )
                continue
            if a.shape != b.shape or a.dtype != b.dtype:
                return Proof(
                    False, worst["output"], None, base,
                    f"{kind} {position}: {tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}",
                )  # fmt: skip
            scale = max(_rms(t), _NO_SCALE * typical)
            off, own = _relative(a, t, scale), _relative(b, t, scale)
            worst[kind] = max(worst[kind], off)
            base = max(base, own) if kind == "output" else base
            if not off <= 2 * own + floor:
                return Proof(
                    False, worst["output"], worst["gradient"], base,
                    f"{kind} {position}: error {off:.1e}, original {own:.1e}, floor {floor:.0e}",
                )  # fmt: skip
    with_gradient = any(g is not None for g in ours[1])
    return Proof(True, worst["output"], worst["gradient"] if with_gradient else None, base)


def _wider_is_nearer(theirs: Any, truth: Any, floor: float) -> bool:
    """Whether the wider run is a truth at all: a mask for one dtype may mean another thing in a wider one."""
    pairs = [(a, t) for a, t in zip(theirs[0], truth[0], strict=True)]
    return all(_relative(a, t, _rms(t)) <= _SANE * floor for a, t in pairs)


def _run(callee: Callee, args: list[Any], seeds: list[torch.Tensor] | None) -> tuple[list[Any], list[Any]]:
    """(floating outputs, gradients of the leaves that require one); `seeds` fixes the incoming gradients."""
    torch.manual_seed(0)
    outputs = callee(*args)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    floating = [o for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()]
    differentiable = [o for o in floating if o.requires_grad]
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    if not torch.is_grad_enabled() or not differentiable or not leaves:
        return [o.detach() for o in floating], []
    if seeds is not None and not seeds:
        generator = torch.Generator().manual_seed(1)
        seeds.extend(torch.randn(o.shape, generator=generator, dtype=torch.float32) for o in differentiable)
    incoming = [
        (torch.ones_like(o) if seeds is None else s.to(o.dtype).to(o.device))
        for o, s in zip(differentiable, seeds or differentiable, strict=True)
    ]
    grads = torch.autograd.grad(differentiable, leaves, incoming, allow_unused=True)
    return [o.detach() for o in floating], list(grads)


def _leaves(args: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """The arguments as fresh leaves of autograd, cast to `dtype`; what the caller holds is not touched."""
    fresh = []
    for a in args:
        if isinstance(a, torch.Tensor):
            leaf = a.detach()
            if dtype is not None and leaf.is_floating_point():
                leaf = leaf.to(dtype)
            fresh.append(leaf.requires_grad_(a.requires_grad) if leaf.is_floating_point() else leaf)
        else:
            fresh.append(a)
    return fresh


def _rms(a: torch.Tensor) -> float:
    """Root mean square of the finite elements."""
    if not a.numel():
        return 0.0
    norm = a.double().norm().item()
    if not math.isfinite(norm):
        finite = a[torch.isfinite(a)]
        if finite.numel() < a.numel():
            return _rms(finite)
    return norm / math.sqrt(a.numel())


def _relative(a: torch.Tensor, truth: torch.Tensor, scale: float) -> float:
    """RMS of the difference over `scale`; infinite where one side is not finite and the other is."""
    difference = a.double() - truth.double()
    if not math.isfinite(difference.sum().item()):
        finite = torch.isfinite(truth)
        if not torch.equal(torch.isfinite(a), finite):
            return float("inf")
        difference = difference[finite]
    return _rms(difference) / scale if scale > 0 else _rms(difference)


def _least_precise(args: Sequence[Any]) -> torch.dtype:
    floating = [a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return min(floating, key=lambda d: torch.finfo(d).bits, default=torch.float32)


def _tokens(args: Sequence[Any]) -> int:
    """Rows of the largest activation: the first floating argument of three or more dims."""
    for a in args:
        if isinstance(a, torch.Tensor) and a.is_floating_point() and a.dim() >= 3:
            return a.numel() // max(a.shape[-1], 1)
    return 0


def _autocast(dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def hooks_active() -> bool:
    """Whether hooks on saved tensors are in force: non-reentrant checkpointing, offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _apart(work: Callable[[], None]) -> None:
    """Runs `work` in a thread of its own and re-raises what it raises."""
    failure: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # re-raised in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=guarded, name="hasten-proof")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
