"""What one layer keeps for its backward pass: pointwise results are rebuilt, not stored."""

from __future__ import annotations

import pytest
import torch
from comparing import original_of
from torch import nn

import hasten
from hasten.models.tiny import tiny_model

# A layer in the proportions of SmolLM2-135M (hidden 576, MLP 1536, 9 query and 3 KV heads), narrower.
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
SHAPE = (2, 128)


def stored_bytes(model: nn.Module, autocast: bool) -> int:
    """Bytes of the distinct storages that autograd holds; weights and casts of them do not count."""
    layer = model.model.layers[0]
    hidden = torch.randn(*SHAPE, 192, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(SHAPE[1])[None])
    weight_shapes = {tuple(p.shape) for p in layer.parameters()}
    weight_shapes |= {shape[::-1] for shape in weight_shapes}
    held: dict[int, int] = {}
    keep: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if tuple(t.shape) not in weight_shapes and t.untyped_storage().nbytes() not in shared:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        keep.append(t)  # so that no address is used twice
        return t

    # Weights held in one piece for a grouped projection (q, k, v; gate, up).
    shared = {192 * rows * size for rows in (192 + 64 + 64, 1024, 64 + 64) for size in (2, 4)}

    def call() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = layer(hidden, attention_mask=None, position_embeddings=positions)
        return out[0] if isinstance(out, tuple) else out

    call().sum().backward()  # captured and proved here
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call()
    return sum(held.values())


@pytest.mark.parametrize(("autocast", "share"), [(False, 0.61), (True, 0.61)], ids=["fp32", "bf16"])
def test_pointwise_results_of_a_layer_are_not_stored(autocast: bool, share: float) -> None:
    model = tiny_model("llama", **SIZES)
    original = original_of(model)
    eager = stored_bytes(original, autocast)
    hasten.optimize(model, measure=False)
    ours = stored_bytes(model, autocast)
    assert hasten.report(model).operator_counts()["activation_linear"] >= 1
    assert 0 < ours <= share * eager, f"{ours} of {eager} bytes: {ours / eager:.2f}"
