"""One graph of a whole decoder for a single row of tokens, for programs that run it token by token.

Nothing runs: tokens, positions and, if they have none, weights are fake. The level-1 rules rewrite the graph,
so that norms, rotary, attention, activations and linear layers are single operators; masks are named and not
built (`window_ranges`), experts behind a router too (`routed_linear`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hasten.base.errors import CaptureError
from hasten.graph.attention_bridge import AttentionDoor, masks_by_name
from hasten.graph.canonical import trace
from hasten.graph.experts_bridge import experts_by_name
from hasten.graph.passes import run_passes

_LEVEL = 1
_LEAST_TOKENS = 67


@dataclass(frozen=True)
class Whole:
    """logits = module(ids [1, T], positions [1, T]); `tokens` is T, a prime that is no size of the model.

    names: of the parameters behind `get_attr` nodes, by the node's target.
    again: the same for another T, any; what depends on the places of tokens alone is seen further there.
    """

    module: fx.GraphModule
    tokens: int
    names: dict[str, str]
    again: Callable[[int], Whole] | None = None


def capture_whole(model: Any, tokens: int | None = None) -> Whole:
    """Traces a transformers decoder and rewrites it.

    Args:
        model: with a `forward(input_ids, position_ids, attention_mask, use_cache)` that returns logits. Its
            parameters may be on the meta device; its buffers must be real.
        tokens: of the row; default: the first prime from 67 on that divides no size of the model.

    Raises:
        CaptureError: it takes no position_ids where it needs them, a mask is neither causal with at most a
            window nor one that hides nothing, or tracing fails.
    """
    tokens = tokens or _prime_beside(model)
    accepted = inspect.signature(type(model).forward).parameters
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    door, training = AttentionDoor(model), model.training
    model.eval()
    with mode:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        positions = torch.zeros(1, tokens, dtype=torch.long)
    mask = torch.ones(1, tokens, dtype=torch.long)  # keeps transformers from looking for packed documents
    try:
        with _fake_parameters(model, mode) as names, experts_by_name(model):
            given = _settings(accepted, mask)

            def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
                if "position_ids" in accepted:
                    given["position_ids"] = positions
                with masks_by_name(ids):
                    return model(input_ids=ids, **given).logits  # type: ignore[no-any-return]

            with _quiet():
                module = trace(run, [ids, positions], known=set(names))
            found = _named(module, names)
    finally:
        door.leave()
        model.train(training)
    run_passes(module, _LEVEL, None, gradients=False)
    return Whole(module, tokens, found, functools.partial(capture_whole, model))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what fake tensors cannot do with a traceback; the error that follows says it in one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _settings(accepted: Any, mask: torch.Tensor) -> dict[str, Any]:
    wanted = {"attention_mask": mask, "use_cache": False, "return_dict": True}
    return {name: value for name, value in wanted.items() if name in accepted or name == "use_cache"}


def _prime_beside(model: Any) -> int:
    """The first prime from `_LEAST_TOKENS` on that divides no size of the model."""
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    sizes |= {value for value in model.config.to_dict().values() if isinstance(value, int)}
    candidate = _LEAST_TOKENS
    while any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)) or any(
        size and size % candidate == 0 for size in sizes
    ):
        candidate += 2
    return candidate


class _fake_parameters:  # noqa: N801  # a context manager, used as one
    """Inside, parameters on the meta device stand as fake CPU tensors; enters with {id: name} of all."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        self._model, self._mode = model, mode
        self._before: list[tuple[nn.Module, str, nn.Parameter]] = []

    def __enter__(self) -> dict[int, str]:
        names: dict[int, str] = {}
        made: dict[int, nn.Parameter] = {}
        for prefix, module in self._model.named_modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                kept = parameter
                if parameter.is_meta:
                    if id(parameter) not in made:
                        with self._mode:
                            fake = torch.empty(parameter.shape, dtype=parameter.dtype)
                        made[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                    kept = made[id(parameter)]
                    self._before.append((module, name, parameter))
                    module._parameters[name] = kept
                names.setdefault(id(kept), f"{prefix}.{name}" if prefix else name)
        return names

    def __exit__(self, *_: object) -> None:
        for module, name, parameter in self._before:
            module._parameters[name] = parameter


def _named(module: fx.GraphModule, names: dict[int, str]) -> dict[str, str]:
    found = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            held: Any = module
            for part in str(node.target).split("."):
                held = getattr(held, part)
            if id(held) in names:
                found[str(node.target)] = names[id(held)]
            elif isinstance(held, nn.Parameter):
                raise CaptureError(f"a weight of shape {tuple(held.shape)} is no parameter of the model")
    return found
