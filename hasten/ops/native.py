"""The native kernels behind torch's operators: whether one can take these tensors, and why not.

`level.py` says which level's library runs; here it is bound to torch. Where there is none, the torch bodies
run and `state().reason` says why.
"""

from __future__ import annotations

import hashlib

import torch

from hasten.ops import level
from hasten.ops.level import FOLDER, State, switched_off

__all__ = ["DTYPES", "State", "brgemm", "build_hash", "launches", "refusal", "state", "switched_off"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _load() -> State:
    found = level.state()
    if found.level is None:
        return found
    binding = FOLDER / "binding.so"
    try:
        torch.ops.load_library(str(binding))
    except OSError as error:  # built against another torch, or removed
        return State(None, f"{binding.name} does not load, install hasten again: {error}")
    torch.ops.hasten_cpu.load(str(found.library), found.bf16, found.amx, found.l2_bytes, found.vnni)
    return found


_STATE = _load()


def state() -> State:
    """What is loaded."""
    return _STATE


def brgemm() -> tuple[int, int]:
    """Addresses of what multiplies with AMX, and of what a thread calls that has done so; see
    `level.lend_product`."""
    product, release = torch.ops.hasten_cpu.brgemm()
    return product, release


def launches() -> int:
    """How often a kernel has run in this process, all kernels together; a difference tells who answered."""
    return level.launches() + (0 if _STATE.level is None else int(torch.ops.hasten_cpu.launches()))


def build_hash() -> str:
    """Of the loaded libraries; empty without."""
    if _STATE.level is None:
        return ""
    files = (FOLDER / "binding.so", FOLDER / "serving.so", _STATE.library)
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def refusal(*tensors: torch.Tensor | None) -> str:
    """Why no kernel can take these tensors; empty if one can."""
    if _STATE.level is None:
        return _STATE.reason
    if reason := level.refusal():
        return reason
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN:  # one that stands for others, as a tracer's fake tensors do
            return f"a {type(tensor).__name__}"
        if tensor.device.type != "cpu":
            return f"a tensor on {tensor.device}"
        if tensor.dtype not in DTYPES:
            return f"no kernel for {tensor.dtype}"
    return ""
