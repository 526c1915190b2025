"""Narrow copies of wide weights, so that a weight is cast once a step and not once a use.

Two ways, for the parameters of a model that `register` was called for:

- **Forward to backward.** The forward pass casts a weight (`narrow`) and the operator saves the copy beside
  the weight for its backward pass (`claim`), as long as the copies alive are under the model's `limit_bytes`.
  The copy belongs to one node of the autograd graph and is freed with it: it cannot be out of date.
- **Lasting.** An optimizer that asks for it (`follow`) writes the copy in the pass that writes the weight
  (`rewritten`), and no forward pass casts. Such a copy is used while the weight's version counter and address
  are those of that write. An in-place change moves the counter, an exchange of `.data` moves the address; but
  a write through `param.data` (`param.data.clamp_()`) moves neither, and would go unseen: so this way is only
  taken where the caller promises that there are none between the optimizer's step and the forward passes.

Weights are held by weak references beside the parameters: nothing of this is copied, pickled or saved with
them. A parameter that is not registered is cast at each use.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

WAITING_SHARE = 0.0
"""Default limit of the copies that wait for a backward pass, as a share of the parameters' bytes; 0.5 is room
for all. They gave 0.4 % of a step's time for 3 % more memory (docs/LOG.md, 2026-11-29): none wait."""
FOLLOWED = torch.bfloat16
"""The dtype of lasting copies."""


class Copies:
    """What the copies of one model's weights take."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """Most bytes of copies that wait for a backward pass."""
        self.waiting_bytes = 0
        self._lock = threading.Lock()

    def take(self, copy: Tensor) -> bool:
        """Counts `copy` until it is freed; False if it does not fit under the limit."""
        size = copy.numel() * copy.element_size()
        with self._lock:
            if self.waiting_bytes + size > self.limit_bytes:
                return False
            self.waiting_bytes += size
        weakref.finalize(copy, self._give_back, size).atexit = False
        return True

    def _give_back(self, size: int) -> None:
        with self._lock:
            self.waiting_bytes -= size

    def lasting_bytes(self) -> int:
        """Bytes of the copies that an optimizer keeps up to date."""
        copies = [w.lasting for w in _WEIGHTS.values() if w.owner is self and w.lasting is not None]
        return sum(copy.numel() * copy.element_size() for copy in copies)

    def release(self) -> None:
        """Forgets the model's weights and frees the lasting copies."""
        for weight, entry in list(_WEIGHTS.items()):
            if entry.owner is self:
                del _WEIGHTS[weight]

    def __str__(self) -> str:
        lasting = self.lasting_bytes()
        if lasting:
            return f"{lasting / 1e6:.0f} MB of bf16 weights, written by the optimizer's step"
        if self.limit_bytes:
            return (
                f"bf16 weights of a forward pass wait for its backward, up to {self.limit_bytes / 1e6:.0f} MB"
            )
        return "bf16 weights are cast in the forward and in the backward pass"


@dataclass
class _Weight:
    owner: Copies
    followed: bool = False
    lasting: Tensor | None = None
    version: int = -1
    address: int = 0

    def valid(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        copy = self.lasting
        if copy is None or copy.dtype != dtype or copy.shape != weight.shape:
            return None
        same = self.version == weight._version and self.address == weight.data_ptr()
        return copy if same else None


class _Made(threading.local):
    """The copies that this thread's last operator made, until it saves them or the next one runs."""

    def __init__(self) -> None:
        self.copies: list[tuple[weakref.ref[Tensor], Copies, Tensor]] = []


_WEIGHTS: WeakIdKeyDictionary = WeakIdKeyDictionary()
_MADE = _Made()


def register(model: torch.nn.Module, limit_bytes: int | None = None) -> Copies:
    """Copies of the model's float32 matrices may be kept; see `Copies`. The limit's default is a share."""
    weights = [p for p in model.parameters() if p.dtype == torch.float32 and p.dim() == 2]
    if limit_bytes is None:
        limit_bytes = int(WAITING_SHARE * sum(p.numel() * p.element_size() for p in model.parameters()))
    owner = Copies(limit_bytes)
    for weight in weights:
        _WEIGHTS[weight] = _Weight(owner)
    return owner


def narrow(weights: Sequence[Tensor], dtype: torch.dtype, *, claimable: bool = True) -> list[Tensor]:
    """The weights in `dtype`, from lasting copies where they are valid; `claim` may follow."""
    _MADE.copies = []
    narrowed = []
    for weight in weights:
        entry = _WEIGHTS.get(weight) if weight.dtype != dtype and not weight.is_inference() else None
        copy = None if entry is None else entry.valid(weight, dtype)
        if copy is None:
            copy = weight.to(dtype)
            if entry is not None and claimable and entry.owner.limit_bytes:
                _MADE.copies.append((weakref.ref(weight), entry.owner, copy))
        narrowed.append(copy)
    return narrowed


def claim(weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor | None]:
    """For each weight the copy to save for the backward pass, or None to cast it again there."""
    made, _MADE.copies = _MADE.copies, []
    copies: list[Tensor | None] = []
    for weight in weights:
        entry = _WEIGHTS.get(weight) if weight.dtype != dtype and not weight.is_inference() else None
        found = None if entry is None else entry.valid(weight, dtype)
        if found is None:
            for reference, owner, copy in made:
                if reference() is weight and copy.dtype == dtype and owner.take(copy):
                    found = copy
                    break
        copies.append(found)
    return copies


def saved(weights: Sequence[Tensor], copies: Sequence[Tensor | None]) -> list[Tensor]:
    """The saved copy of each weight, or the weight."""
    return [weight if copy is None else copy for weight, copy in zip(weights, copies, strict=True)]


def follow(parameters: Iterable[Tensor]) -> None:
    """From now on `rewritten` gives the registered ones of these parameters lasting copies."""
    for parameter in parameters:
        if (entry := _WEIGHTS.get(parameter)) is not None:
            entry.followed = True


@contextlib.contextmanager
def rewritten(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """A bfloat16 buffer for each parameter (empty: none is wanted), for the writer to fill inside."""
    entries = [_WEIGHTS.get(parameter) for parameter in parameters]
    buffers = [_buffer(entry, parameter) for entry, parameter in zip(entries, parameters, strict=True)]
    yield buffers
    for entry, parameter, buffer in zip(entries, parameters, buffers, strict=True):
        if entry is not None and buffer.numel():
            # A graph that saved the old copy must notice.
            torch.autograd.graph.increment_version(buffer)
            entry.lasting, entry.version, entry.address = buffer, parameter._version, parameter.data_ptr()


def _buffer(entry: _Weight | None, parameter: Tensor) -> Tensor:
    if entry is None or not entry.followed or parameter.is_inference() or not parameter.is_contiguous():
        return parameter.new_empty(0, dtype=FOLLOWED)
    if entry.lasting is not None and entry.lasting.shape == parameter.shape:
        return entry.lasting
    return torch.empty_like(parameter, dtype=FOLLOWED, requires_grad=False)
