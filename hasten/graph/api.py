"""The doors: `optimize`, `restore`, `report`, `register_fusion_pattern`."""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from hasten.base.config import Config, make_config
from hasten.base.errors import ConfigError, UserError
from hasten.base.facts import detect
from hasten.graph.attention_bridge import AttentionDoor, transformers_roots
from hasten.graph.blocks import lists_of_blocks, repeated_blocks
from hasten.graph.capture import BlockForward, Engine
from hasten.graph.head import HeadForward, find_head
from hasten.graph.instance import InstanceForward, put_back
from hasten.graph.records import Report
from hasten.graph.rules import Context, Rule
from hasten.ops import buffers, packed, shadow

_KEY = "_hasten"
_Model = TypeVar("_Model", bound=nn.Module)

_user_rules: list[Rule] = []
"""Filled by `register_fusion_pattern`; a copy is taken by each `optimize`."""


class _State:
    """What one optimised model carries, in its `__dict__`: neither a module nor a parameter."""

    def __init__(
        self, config: Config, engine: Engine, attention: AttentionDoor | None, doors: dict[str, str]
    ) -> None:
        self.config, self.engine, self.attention, self.doors = config, engine, attention, doors
        self.copies = shadow.Copies(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> _State:
        if self.config.buffers and self.config.level > 0:
            buffers.enable(self.config.memory_bytes(), self.config.buffers == "huge")
        twin = object.__new__(_State)  # copy.copy would go through __reduce__
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        # The copy switches its own configs back, and recomputes its own blocks.
        twin.attention = copy.deepcopy(self.attention, memo)
        twin.copies = shadow.Copies(0)
        twin.engine = copy.deepcopy(self.engine, memo)
        return twin

    def __reduce__(self) -> Any:
        return type(None), ()


def _without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: a training step keeps no key-value cache unless it is asked for by name.

    Transformers make one by default, also in training, where it holds the keys and values of every layer and
    switches packing by `position_ids` off.
    """
    asked = any(kwargs.get(name) is not None for name in ("use_cache", "cache", "past_key_values"))
    if module.training and torch.is_grad_enabled() and not asked:
        return args, {**kwargs, "use_cache": False}
    return None


class _PrecisionForward(InstanceForward):
    """Runs a model's forward under a fixed autocast; stands in `forward` of the instance."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__(model)
        self.dtype = dtype
        self.__signature__ = inspect.signature(type(model).forward.__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next((p.device.type for p in self.module.parameters()), "cpu")
        with torch.autocast(device, dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return type(self.module).forward(self.module, *args, **kwargs)


def optimize(model: _Model, **settings: Any) -> _Model:
    """Makes `model` faster and smaller in place; the same object trains, generates and saves as before.

    The work happens at the first forward: each repeated block is captured, rewritten, proved and timed there.
    Calling it again with other settings starts afresh. Nothing outside this model changes, except that large
    CPU tensors come from an arena while any model is optimised (`buffers=False` leaves torch's allocator).

    Args:
        model: any `nn.Module`; a Hugging Face model, with or without PEFT adapters, gains most.
        **settings: the fields of `hasten.Config`.

    Returns:
        The same object.

    Raises:
        ConfigError: for a setting that is unknown or out of range.
        UserError: if `model` is no `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"optimize: got a {type(model).__name__}; allowed: a torch.nn.Module")
    config = make_config(**settings)
    restore(model)
    engine = Engine(config, _user_rules)
    doors: dict[str, str] = {}
    attention = None
    if config.level == 0:
        doors = dict.fromkeys(
            ("attention", "across layers", "output head", "buffers", "precision"), "off: level 0"
        )
    else:
        # Dynamo looks at `.grad` of every input; where warnings are errors that would end the capture.
        warnings.filterwarnings(
            "ignore", message=r"The \.grad attribute of a Tensor", module=r"torch\.(_dynamo|_subclasses)"
        )
        blocks = list(repeated_blocks(model))
        attention = AttentionDoor(model)
        doors["attention"] = attention.state
        for block in blocks:
            block.__dict__["forward"] = BlockForward(block, engine)
        engine.recompute.blocks = blocks
        engine.packs = _packs(model, config)
        engine.lists = list(lists_of_blocks(model))
        doors["across layers"] = engine.across_layers()
        # A wrapper (data parallel, a training framework's module) has no accessor of its own.
        for owner in transformers_roots(model) or [model]:
            head, doors["output head"] = find_head(owner)
            if head is not None:
                head.__dict__["forward"] = HeadForward(head)
        if _install_without_cache(model):
            doors["key-value cache"] = "none in training steps that do not ask for one"
        doors["precision"] = _set_precision(model, config)
        doors["buffers"] = "off: buffers=False"
        if config.buffers:
            doors["buffers"] = str(buffers.enable(config.memory_bytes(), config.buffers == "huge"))
    state = model.__dict__[_KEY] = _State(config, engine, attention, doors)
    if config.level > 0:
        state.copies = shadow.register(model)
    return model


def _install_without_cache(model: nn.Module) -> bool:
    """Whether there was a model that would make a cache by default."""
    installed = False
    for root in transformers_roots(model):
        if "use_cache" in inspect.signature(root.forward).parameters and getattr(
            root.config, "use_cache", False
        ):
            root.register_forward_pre_hook(_without_cache, with_kwargs=True)
            installed = True
    return installed


def _remove_without_cache(module: nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _without_cache:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _set_precision(model: nn.Module, config: Config) -> str:
    wanted, why = config.precision, ""
    if wanted == "auto":
        fact = detect(config.hardware).default_dtype()
        wanted, why = "bf16" if fact.value == "bf16" else "follow", fact.source
    if wanted == "follow":
        return f"follows the caller's autocast{f' ({why})' if why else ''}"
    if "forward" in model.__dict__:
        raise ConfigError(
            f"precision = {config.precision!r}: the model's forward was replaced by something else; "
            "use precision='follow' and torch.autocast around the call"
        )
    model.__dict__["forward"] = _PrecisionForward(model, torch.bfloat16 if wanted == "bf16" else None)
    return f"{wanted}{f' ({why})' if why else ''}"


def _packs(model: nn.Module, config: Config) -> packed.Packs:
    """Packed weights take an eighth of the memory at most, and none under a bound or below level 3."""
    if config.level < 3 or config.memory is not None:
        return packed.Packs(0)
    limit = detect(config.hardware).memory_limit_bytes.value // 8
    return packed.register(model, limit)


def restore(model: _Model) -> _Model:
    """Undoes `optimize`: bit-equal to the original. A model that is not optimised is left as it is."""
    state = model.__dict__.pop(_KEY, None)
    for module in model.modules():
        _remove_without_cache(module)
        put_back(module)
    if state is not None and state.config.level > 0:
        state.engine.packs.forget()
        state.copies.release()
        if state.attention is not None:
            state.attention.leave()
        if state.config.buffers:
            buffers.disable(state.config.memory_bytes())
    return model


def _state_of(model: nn.Module) -> _State | None:
    for module in model.modules():
        if isinstance(found := module.__dict__.get(_KEY), _State):
            return found
    return None


def report(model: nn.Module) -> Report:
    """What was recognised, what was replaced by what, what was left and why. `print` it, or use `.as_dict()`.

    Raises:
        UserError: if `model` is not optimised.
    """
    state = _state_of(model)
    if state is None:
        raise UserError("report: this model is not optimised; call hasten.optimize(model) first")
    blocks: Counter[str] = Counter(
        type(m).__name__ for m in model.modules() if isinstance(m.__dict__.get("forward"), BlockForward)
    )
    settings = {name: getattr(state.config, name) for name in type(state.config).model_fields}
    doors = {
        **state.doors,
        "packed weights": str(state.engine.packs),
        "bf16 weights": str(state.copies),
        "memory": state.engine.recompute.state,
    }
    used = buffers.usage() if state.config.buffers and state.config.level > 0 else None
    if used is not None:
        doors["buffers"] = f"{buffers.status()}: {used}"
    return Report(
        type(model).__name__,
        blocks,
        settings,
        dict(state.config.sources),
        state.engine.graphs,
        doors,
        state.engine.originals,
        {} if used is None else used.as_dict(),
    )


def register_fusion_pattern(
    pattern: Callable[..., Any],
    *,
    examples: Callable[[], Sequence[torch.Tensor]],
    name: str | None = None,
    level: int = 1,
    reason: str = "given by the user",
    condition: Callable[[Context], str] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A rule of the user's own: decorates the replacement.

        @hasten.register_fusion_pattern(lambda x: x * torch.sigmoid(x), examples=lambda: [torch.empty(2, 8)])
        def fast_silu(x):
            return torch.nn.functional.silu(x)

    Args:
        pattern: plain PyTorch. Each argument matches any tensor; an argument annotated `float` any number.
        examples: makes one small tensor for each tensor argument, used for tracing only.
        name: shown in reports; default the replacement's name.
        level: 1 to 3; `optimize(level=n)` applies rules up to n. User's rules run before the built-in ones.
        reason: why both sides are equal, for the report.
        condition: given the match, returns "" or why the rule does not apply there.

    Models that are optimised afterwards use the rule; it is proved on each of them like the built-in rules.

    Raises:
        ConfigError: if the level is not 1, 2 or 3, or the pattern cannot be traced on the examples.
    """
    if level not in (1, 2, 3):
        raise ConfigError(f"register_fusion_pattern: level = {level!r}; allowed: 1, 2, 3")

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        rule = Rule(name or replacement.__name__, pattern, replacement, examples, level, reason, condition)
        _ = rule.traced  # a pattern that cannot be traced fails here, not inside a forward
        _user_rules.append(rule)
        return replacement

    return register


def registered_rules() -> tuple[Rule, ...]:
    """The user's rules that are registered now."""
    return tuple(_user_rules)


@contextlib.contextmanager
def fusion_patterns() -> Iterator[None]:
    """Rules registered inside the block are forgotten at its end."""
    before = list(_user_rules)
    try:
        yield
    finally:
        _user_rules[:] = before
