"""From Dynamo's graph to a proved, rewritten one; and how repeated blocks enter Dynamo.

`Engine` belongs to one optimised model. It holds one compiled entry for each class of block, so that all
layers of a class share their graphs, and another for layers that are given the two summands of the layer
before (`across_layers.py`): a model of 30 equal layers is captured twice, and once more each when a second
sequence length comes (then with symbolic sizes). Lengths inside `Config.dynamic_shape` are symbolic from the
start.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

from hasten.base.config import Config
from hasten.base.errors import CaptureError, ConfigError
from hasten.graph import across_layers
from hasten.graph.bypass import bypass_reason
from hasten.graph.canonical import trace
from hasten.graph.deferred import plain
from hasten.graph.instance import InstanceForward
from hasten.graph.nodes import aten, full_args, is_call, mutated_nodes, rank_of
from hasten.graph.passes import run_passes
from hasten.graph.prove import Proved, hooks_active
from hasten.graph.recompute import Recompute
from hasten.graph.records import GraphRecord
from hasten.graph.rules import Rule
from hasten.ops import packed

# Distinct graphs of one class of block: autocast on and off, training and evaluation, gradient on and off,
# static and dynamic sizes. Beyond it Dynamo runs the original code.
_GRAPHS_PER_BLOCK = 64


class Engine:
    """Compiles the blocks of one model and remembers what was done."""

    def __init__(self, config: Config, user_rules: Sequence[Rule]) -> None:
        self.config = config
        self.user_rules = tuple(user_rules)
        self.graphs: list[GraphRecord] = []
        self.originals: Counter[str] = Counter()
        self.recompute = Recompute(config.memory_bytes())
        self.lists: list[list[nn.Module]] = []
        """The model's lists of blocks, each in the order in which they run."""

        self.packs = packed.Packs(0)
        self._entries: dict[Any, Callable[..., Any]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        """For a copy of the model: captured graphs hold no weights and are shared; blocks are not."""
        twin = object.__new__(Engine)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.recompute = copy.deepcopy(self.recompute, memo)
        twin.lists = copy.deepcopy(self.lists, memo)
        twin.packs = packed.Packs(0)
        return twin

    def across_layers(self) -> str:
        """Whether layers leave their last sum to the next one, in words for the report."""
        if self.config.level < across_layers.LEVEL:
            return f"off: level {self.config.level}"
        if not any(len(blocks) > 1 for blocks in self.lists):
            return "off: no two repeated blocks follow each other"
        if self.recompute.bound_bytes is not None:
            return "off: with a bound on memory, blocks may be run again in the backward pass"
        return "on in training: a sum that ends a layer is left to the norm of the next"

    def follower(self, block: nn.Module) -> nn.Module | None:
        """The block that runs behind `block` in its list."""
        pairs = (pair for blocks in self.lists for pair in itertools.pairwise(blocks))
        return next((after for before, after in pairs if before is block), None)

    def entry(
        self, function: Callable[..., Any], name: str, place: int | str | None = None
    ) -> Callable[..., Any]:
        """The compiled form of an unbound forward; one for each class of block.

        place: of the argument for which two summands are given, see `across_layers.behind`.
        """
        key = (function, place)
        if key not in self._entries:
            drop_weights = _may_return_weights(function)
            self._entries[key] = torch.compile(
                function if place is None else across_layers.behind(function, place),
                backend=lambda module, examples: self.compile(
                    module, name, drop_weights, layer=True, summands=place is not None
                ),
                isolate_recompiles=True,
                recompile_limit=_GRAPHS_PER_BLOCK,
            )
        return self._entries[key]

    def compile(
        self,
        module: fx.GraphModule,
        name: str,
        drop_weights: bool = False,
        *,
        layer: bool = False,
        summands: bool = False,
    ) -> Callable[..., Any]:
        """Dynamo backend: the rewritten graph under proof, or the original where nothing could be gained.

        drop_weights: return None for attention weights, as transformers' blocks do over fused attention.
        layer: it is one of many, and may leave its last sum to the next; summands: it begins with a sum.
        """
        started = time.perf_counter()
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        record = GraphRecord(name, _state(module, autocast) + (", behind another layer" if summands else ""))
        measured = any(g.block == name and g.original_s is not None for g in self.graphs)
        self.graphs.append(record)
        try:
            rewritten = self._rewrite(module, record, autocast, drop_weights)
        except (CaptureError, ConfigError) as error:
            record.runs, record.reason = "original", str(error)
            return module.forward
        except (AssertionError, RuntimeError, TypeError) as error:
            # A graph of a kind that no pass was written for. The user's step goes on; the fault is shown.
            record.runs, record.reason = "original", f"rewriting failed: {type(error).__name__}: {error}"
            warnings.warn(f"hasten: {name} runs as it was, {record.reason}", stacklevel=2)
            return module.forward
        finally:
            record.capture_s = time.perf_counter() - started
        if not record.operators and not record.rules:
            record.runs, record.reason = "original", "no pattern matched"
            return module.forward
        mutates = _updates_statistics(rewritten.graph) or any(
            n.op in ("placeholder", "get_attr") for n in mutated_nodes(rewritten.graph)
        )
        runs: Callable[..., Any] = rewritten.forward
        proved = runs
        if layer and self.config.level >= across_layers.LEVEL:
            if summands:
                record.note(across_layers.taken_sum(rewritten.graph))
            left, log = across_layers.leave_last_sum(rewritten, module)
            record.note(log)
            if left is not None:
                proved, runs = left.summed, left.deferred
        if not torch.is_grad_enabled():
            proved, runs = packed.allowed()(proved), packed.allowed()(runs)
        return Proved(
            module.forward,
            proved,
            record,
            autocast=autocast,
            verify=self.config.verify,
            # The same layer was timed as the first of its list; the sum costs what it did there.
            measure=self.config.measure and not (summands and measured),
            mutates=mutates,
            runs=runs,
        )

    def _rewrite(
        self, module: fx.GraphModule, record: GraphRecord, autocast: torch.dtype | None, drop_weights: bool
    ) -> fx.GraphModule:
        examples = [node.meta["example_value"] for node in module.graph.nodes if node.op == "placeholder"]
        rewritten = trace(module, examples)
        if drop_weights:
            _drop_weights(module, rewritten)
        gradients = torch.is_grad_enabled()
        log = run_passes(rewritten, self.config.level, autocast, self.user_rules, gradients)
        if _has_own_gradients(module) and _computes_without_gradients(rewritten):
            raise CaptureError("holds an autograd.Function, whose own gradient would be lost")
        record.note(*log)
        for node in rewritten.graph.nodes:
            if node.op == "call_function" and getattr(node.target, "namespace", "") == "hasten":
                record.operators[node.target.overloadpacket.__name__] += 1
        return rewritten


def _updates_statistics(graph: fx.Graph) -> bool:
    """Whether a batch norm moves its running statistics on, which its schema does not tell."""
    norms = (n for n in graph.nodes if is_call(n, aten.batch_norm.default, aten.instance_norm.default))
    return any(args[3] is not None and bool(args[5]) for args in map(full_args, norms))


def _has_own_gradients(module: fx.GraphModule) -> bool:
    return any(
        getattr(node.target, "__name__", "") == "autograd_function_apply" for node in module.graph.nodes
    )


def _computes_without_gradients(module: fx.GraphModule) -> bool:
    """Whether something runs with gradients off: an autograd.Function that no rule replaced."""
    enabled = True
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if getattr(node.target, "__name__", "") == "_set_grad_enabled":
            enabled = bool(node.args[0])
        elif not enabled and node.users:
            return True
    return False


def _may_return_weights(function: Callable[..., Any]) -> bool:
    """A block that is told whether attention weights are wanted returns them for that alone."""
    return "output_attentions" in inspect.signature(function).parameters


def _drop_weights(module: fx.GraphModule, traced: fx.GraphModule) -> None:
    """Outputs that are attention weights become None in both graphs: calls that want them never come here."""
    outputs = traced.graph.output_node().args[0]
    if not isinstance(outputs, (tuple, list)):
        return
    unwanted = {i for i, node in enumerate(outputs) if _is_softmax(node)}
    for graph_module in (module, traced) if unwanted else ():
        node = graph_module.graph.output_node()
        node.args = (tuple(None if i in unwanted else n for i, n in enumerate(node.args[0])),)  # type: ignore[arg-type]
        graph_module.recompile()
        if isinstance(graph_module, _LazyGraphModule):
            graph_module.real_recompile()  # until then its forward prints whatever it raises


def _is_softmax(node: Any) -> bool:
    """A softmax of rank 4 over the last dim, cast or under dropout."""
    while is_call(node, aten.to.dtype, aten._to_copy.default, aten.type_as.default, aten.dropout.default):
        node = node.args[0]
    return is_call(node, aten.softmax.int) and rank_of(node) == 4 and node.args[1] in (-1, 3)


def _state(module: fx.GraphModule, autocast: torch.dtype | None) -> str:
    values = [node.meta.get("example_value") for node in module.graph.nodes if node.op == "placeholder"]
    symbolic = any(isinstance(v, torch.SymInt) for v in values)
    largest = max(
        (v for v in values if isinstance(v, torch.Tensor) and v.dim() >= 3),
        key=lambda v: v.dim(),
        default=None,
    )
    shape = "" if largest is None else " x ".join(str(d) for d in values_shape(values))
    parts = [
        "autocast " + str(autocast).removeprefix("torch.") if autocast is not None else "no autocast",
        "gradients" if torch.is_grad_enabled() else "no gradients",
        "dynamic sizes" if symbolic else f"static {shape}".strip(),
    ]
    return ", ".join(parts)


def values_shape(values: Sequence[Any]) -> tuple[Any, ...]:
    """Shape of the first floating tensor of three dims: the hidden states."""
    for v in values:
        if isinstance(v, torch.Tensor) and v.is_floating_point() and v.dim() == 3:
            return tuple(v.shape)
    return ()


class BlockForward(InstanceForward):
    """Stands in `block.forward`: the compiled entry where it applies, the original code elsewhere.

    It is an attribute of the instance, so other models of the same class are untouched, hooks and gradient
    checkpointing around the block work as before, and `copy.deepcopy` copies it with its block.
    """

    _copied = ("module", "engine")

    def __init__(self, block: nn.Module, engine: Engine) -> None:
        super().__init__(block)
        self.engine = engine
        self._function = _without_checkpointing(type(block).forward)
        self.__signature__ = inspect.signature(self._function.__get__(block))
        self.__doc__ = self._function.__doc__
        self._compiled = engine.entry(self._function, type(block).__name__)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        if self.previous is not None:
            return self.previous(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if self.engine.packs.bytes and torch.is_grad_enabled():
            self.engine.packs.release()
        found = across_layers.only_sum(args, kwargs)
        summands = None if found is None else found[1].summands()
        if found is None or summands is None or self._runs_again() or hooks_active():
            args, kwargs = plain((args, kwargs))
            return self._run(args, kwargs)
        place, deferred = found
        others, named = across_layers.without(place, args, kwargs)
        if self._bypassed((*summands, *others), named):
            args, kwargs = plain((args, kwargs))
            return self.original(*args, **kwargs)
        _mark_lengths((*summands, *others), named, self.engine.config.dynamic_shape)
        compiled = self.engine.entry(self._function, type(self.module).__name__, place)
        output, total = compiled(self.module, *summands, *others, **named)
        deferred.settle(total)
        return self._hand_over(output)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._bypassed(args, kwargs):
            return self.original(*args, **kwargs)
        _mark_lengths(args, kwargs, self.engine.config.dynamic_shape)
        if _checkpoints(self.module):
            # As transformers' own wrapper does, with the compiled block in the place of the original.
            inner = functools.partial(self._summed, self.module, **{**kwargs, **_no_cache(kwargs)})
            return self.module._gradient_checkpointing_func(inner, *args)
        if self._runs_again():
            return self.engine.recompute.run(self.module, self._summed, args, kwargs)
        return self._hand_over(self._compiled(self.module, *args, **kwargs))

    def _bypassed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        reason = (
            bypass_reason(self.module, args, kwargs)
            if self.previous is None
            else "the block's forward was replaced before"
        )
        if reason:
            self.engine.originals[reason] += 1
        return bool(reason)

    def _runs_again(self) -> bool:
        """Whether the block may be called once more in the backward pass, with the same arguments."""
        return _checkpoints(self.module) or self.engine.recompute.bound_bytes is not None

    def _summed(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(self._compiled(block, *args, **kwargs))

    def _hand_over(self, output: Any) -> Any:
        """The output as it is if it goes to the next block unseen, else with ordinary tensors."""
        follower = self.engine.follower(self.module)
        return output if across_layers.may_leave(self.module, follower, BlockForward) else plain(output)


def _without_checkpointing(function: Callable[..., Any]) -> Callable[..., Any]:
    """The forward below the wrapper that transformers puts on each `GradientCheckpointingLayer`."""
    while function.__code__.co_name == "forward_with_checkpointing":
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def _checkpoints(block: nn.Module) -> bool:
    return bool(
        getattr(block, "gradient_checkpointing", False)
        and block.training
        and torch.is_grad_enabled()
        and hasattr(block, "_gradient_checkpointing_func")
    )


def _no_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"use_cache": False} if kwargs.get("use_cache") else {}


def _mark_lengths(args: Sequence[Any], kwargs: dict[str, Any], bounds: tuple[int, int]) -> None:
    """Tells Dynamo that the sequence length may vary, so that a second length needs no second capture."""
    tensors = [
        t
        for given in (*args, *kwargs.values())
        for t in (given if isinstance(given, (tuple, list)) else (given,))
    ]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    hidden = next((t for t in tensors if t.is_floating_point() and t.dim() == 3), None)
    if hidden is None or not bounds[0] <= hidden.shape[1] <= bounds[1]:
        return
    for tensor in tensors:
        for dim, size in enumerate(tensor.shape):
            if size == hidden.shape[1] and dim > 0:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
