"""What a text says of a model's matrices: which inputs they meet, and how much their outputs matter.

For each matrix y = W x the second moments H = E[x x^T] of its inputs and the mean squares F_n of the gradient
of the loss by its outputs, labels drawn from the model's own distribution (the Fisher information). A change
of W by D then changes what the model says by about

    KL per token = 1/2 sum_n F_n (D H D^T)_nn

(second order, different outputs and places taken as independent). Gradients flow through activations alone,
so no memory is taken for gradients of weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasten.base.errors import InputError
from hasten.graph.experts_bridge import Product, expert_stacks, experts_by_name
from hasten.ops.panels import LANES
from hasten.ops.routed_linear.reference import routed_linear

# Moments [K, K] of all matrices together; beyond that only their diagonals are kept.
_MOMENTS_BYTES = 2 << 30
_SEED = 20260101


@dataclass(frozen=True)
class Matrix:
    """A parameter that a program holds in panels, [N, K] after `transposed`."""

    name: str
    N: int
    K: int
    role: str
    """`projection`, `embedding`, `head`, or `tied` for an embedding that is the head as well."""
    transposed: bool = False
    alias: str = ""
    """The name under which a tied parameter is the head."""


@dataclass
class Calibration:
    """By parameter. `moments`: [K, K], or [K] where only the diagonal is kept. `outputs`: F, [N]."""

    tokens: int = 0
    moments: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)


def matrices_of(model: nn.Module) -> list[Matrix]:
    """The matrices of linear layers (`nn.Linear` and GPT-2's `Conv1D`), the embedding, the head and stacks.

    Those of all experts of a layer are one, [E * N, K] with N padded to a panel.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    found: dict[str, Matrix] = {}
    N, K = embedding.weight.shape
    first = names[id(embedding.weight)]
    found[first] = Matrix(first, N, K, "embedding")
    head = model.get_output_embeddings()  # type: ignore[operator]
    for path, module in _linear_layers(model):
        name = names[id(module.weight)]
        role = "head" if module is head else "projection"
        if name in found and found[name].role == "embedding":
            found[name] = Matrix(name, N, K, "tied", alias=f"{path}.weight")
        elif name not in found:
            turned = not isinstance(module, nn.Linear)
            rows, columns = reversed(module.weight.shape) if turned else module.weight.shape
            found[name] = Matrix(name, rows, columns, role, turned)
    for stack, turned in expert_stacks(model):
        E, rows, columns = (stack.transpose(1, 2) if turned else stack).shape
        name = names[id(stack)]
        found[name] = Matrix(name, E * -(-rows // LANES) * LANES, columns, "projection", turned)
    return list(found.values())


def calibrate(
    model: Any,
    chunks: Sequence[Tensor],
    *,
    gradient_chunks: int = 4,
    moments_bytes: int = _MOMENTS_BYTES,
) -> Calibration:
    """Runs a transformers model forward over token sequences (int64 [T] each), and back over the first ones.

    Args:
        gradient_chunks: how many are run back. Moments of inputs need more tokens than mean squares.
        moments_bytes: of all [K, K] moments together; matrices beyond it keep the diagonal.

    The model's parameters, their gradients, its mode and the random state are left as they were. Raises
    InputError where there are no tokens.
    """
    if not chunks or not all(chunk.numel() for chunk in chunks):
        raise InputError("calibration needs sequences of at least one token")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    embedding = model.get_input_embeddings()
    sums = _Sums(moments_bytes, embedding.weight.shape[0])
    layers = {id(module.weight): module for _, module in _linear_layers(model)}
    generator = torch.Generator().manual_seed(_SEED)
    with _as_it_is(model), contextlib.ExitStack() as hooks:
        for key, module in layers.items():
            hooks.enter_context(_removed(module.register_forward_hook(sums.linear(names[key]))))
        hooks.enter_context(_removed(embedding.register_forward_hook(sums.embedding)))
        hooks.enter_context(experts_by_name(model, sums.experts(names)))
        for number, chunk in enumerate(chunks):
            back = number < max(1, gradient_chunks)
            with torch.set_grad_enabled(back):
                logits = model(input_ids=chunk.unsqueeze(0), use_cache=False).logits[0].float()
                if not back:
                    continue
                drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
                torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
    return sums.result(matrices_of(model))


class _Sums:
    """Sums over all tokens of what the hooks see."""

    def __init__(self, moments_bytes: int, vocabulary: int) -> None:
        self._left_bytes = moments_bytes
        self._seen = torch.zeros(vocabulary, dtype=torch.float64)
        self._inputs: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}
        self._entered: Tensor | None = None
        self._back = 0
        # Projections of one input are called after each other: the first of them keeps the moments.
        self._owner: dict[str, str] = {}
        self._last: tuple[Tensor | None, str] = (None, "")

    def linear(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
            x = args[0]
            if x is not self._last[0]:
                self._last = (x, name)
                self._add_input(name, x.detach().reshape(-1, x.shape[-1]).float())
            self._owner[name] = self._last[1]
            if y.requires_grad:
                y.register_hook(lambda gradient: self._add_output(name, gradient))

        return hook

    def experts(self, names: dict[int, str]) -> Product:
        """Moments are of what any expert of a stack meets; mean squares are each expert's own."""

        def product(
            x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool
        ) -> Tensor:
            name, E = names[id(weight)], weight.shape[0]
            self._add_input(name, x.detach().reshape(-1, x.shape[-1]).float())
            self._owner[name] = name
            self._rows[name] = self._rows.get(name, 0) + x.shape[0] * x.shape[1]
            y = routed_linear(x, weight, bias, experts, transposed)

            def add(gradient: Tensor) -> None:
                square = gradient.float().square().flatten(0, 1)
                each = square.new_zeros(E, -(-square.shape[1] // LANES) * LANES)
                each[:, : square.shape[1]].index_add_(0, experts.flatten(), square)
                self._outputs[name] = self._outputs.get(name, 0) + each.flatten()

            if y.requires_grad:
                y.register_hook(add)
            return y

        return product

    def embedding(self, module: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
        ids = args[0].reshape(-1)
        self._seen += torch.bincount(ids, minlength=self._seen.numel())
        if not torch.is_grad_enabled():
            return y
        self._back += len(ids)
        rows, values = module.weight.detach()[ids].double(), y.detach().reshape(len(ids), -1).double()
        # Some models scale what they look up: the gradient by the stored row is larger by that.
        scale = float((rows * values).sum() / rows.square().sum().clamp_min(1e-30))
        leaf = y.detach().requires_grad_()
        leaf.register_hook(lambda gradient: self._add_entered(gradient * scale))
        return leaf

    def result(self, matrices: Sequence[Matrix]) -> Calibration:
        tokens, back = int(self._seen.sum()), max(1, self._back)
        found = Calibration(tokens)
        for matrix in matrices:
            if matrix.role == "embedding":
                if self._entered is not None:
                    found.moments[matrix.name] = self._entered / back
                    found.outputs[matrix.name] = ((self._seen + 1) / (tokens + self._seen.numel())).float()
                continue
            moments = self._inputs.get(self._owner.get(matrix.name, ""))
            if moments is None or matrix.name not in self._outputs:
                continue  # a layer that the text did not reach
            moments = moments / self._rows.get(matrix.name, tokens)
            if matrix.role == "tied" and self._entered is not None:
                # A row counts as often as it is looked up and as it is predicted, nearly the same.
                extra = self._entered / back
                moments = moments + (extra if moments.dim() == 1 else extra.diag())
            found.moments[matrix.name] = moments
            found.outputs[matrix.name] = self._outputs[matrix.name] / back
        return found

    def _add_input(self, name: str, rows_TK: Tensor) -> None:
        known, K = self._inputs.get(name), rows_TK.shape[1]
        if known is None:
            full = self._left_bytes >= 4 * K * K
            self._left_bytes -= 4 * K * K if full else 0
            known = self._inputs[name] = torch.zeros(K, K) if full else torch.zeros(K)
        if known.dim() == 2:
            known.addmm_(rows_TK.t(), rows_TK)
        else:
            known += rows_TK.square().sum(0)

    def _add_output(self, name: str, gradient: Tensor) -> None:
        square = gradient.reshape(-1, gradient.shape[-1]).float().square().sum(0)
        known = self._outputs.get(name)
        self._outputs[name] = square if known is None else known + square

    def _add_entered(self, gradient: Tensor) -> None:
        square = gradient.reshape(-1, gradient.shape[-1]).float().square().sum(0)
        self._entered = square if self._entered is None else self._entered + square


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules():
        # transformers' Conv1D by its name: importing its module takes seconds where no model needs it.
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield path, module


@contextlib.contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _as_it_is(model: nn.Module) -> Iterator[None]:
    """In eval mode and without gradients of parameters while the block runs."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
