"""What the tests of single spellings share: one function through all passes, compared with itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hasten.graph.canonical import trace
from hasten.graph.passes import PassLog, run_passes


def rewrite(function: Callable[..., Any], *examples: torch.Tensor) -> tuple[fx.GraphModule, list[PassLog]]:
    """The graph of `function` behind all passes, and what they did or declined."""
    with FakeTensorMode() as mode:
        module = trace(function, [mode.from_tensor(e) for e in examples])
    log = run_passes(module, 3, None)
    return module, log


def operators(module: fx.GraphModule) -> Counter[str]:
    """How many of each of hasten's operators stand in the graph."""
    calls = (n for n in module.graph.nodes if getattr(n.target, "namespace", "") == "hasten")
    return Counter(n.target.overloadpacket.__name__ for n in calls)


def assert_same(
    module: fx.GraphModule,
    function: Callable[..., Any],
    *examples: torch.Tensor,
    tolerance: float = 1e-5,
    constants: int = 0,
) -> None:
    """Value and the gradient of every floating input but the last `constants`, from random seeds."""
    results = []
    for call in (module, function):
        inputs = [e.detach().clone() for e in examples]
        leaves = [i.requires_grad_() for i in inputs[: len(inputs) - constants] if i.is_floating_point()]
        out = call(*inputs)
        seeds = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
        grads = torch.autograd.grad(out, leaves, seeds, allow_unused=True)
        found = [torch.zeros_like(i) if g is None else g for i, g in zip(leaves, grads, strict=True)]
        results.append([out, *found])
    for ours, own in zip(*results, strict=True):
        assert ours.dtype == own.dtype
        torch.testing.assert_close(ours, own, rtol=tolerance, atol=tolerance)
