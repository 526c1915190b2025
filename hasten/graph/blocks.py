"""Which modules of a model are its repeated blocks: found by structure, not by class name."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_MIN_MATRICES = 2


def repeated_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of the model: members of its outermost lists that hold at least two weight matrices each.

    A list inside such a layer (experts of a mixture) belongs to the layer and is not looked into. A
    layer that stands in several lists comes once.
    """
    yield from dict.fromkeys(layer for layers in lists_of_blocks(model) for layer in layers)


def lists_of_blocks(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The lists that `repeated_blocks` are members of, each in the order in which a model runs it."""
    if isinstance(model, (nn.ModuleList, nn.Sequential)):
        layers = [child for child in model.children() if _is_layer(child)]
        if layers and len(layers) == len(list(model.children())):
            yield layers
            return
    for child in model.children():
        yield from lists_of_blocks(child)


def _is_layer(module: nn.Module) -> bool:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) or not any(True for _ in module.children()):
        return False
    matrices = sum(1 for parameter in module.parameters() if parameter.dim() >= 2)
    return matrices >= _MIN_MATRICES
