"""Bytes on one device of each pipeline stage, by category.

Categories: `weights`, `gradients`, `optimizer` of the layers; `embedding_head` (the same three of the input
table, the head and the last norm); `gathered` (whole layers that ZeRO-3 holds for a moment); `activations`
(kept until the backward pass); `rebuilt` (one layer's while it is recomputed or differentiated); `logits`;
`buffers` (collectives, staging); `context` (what the driver and its libraries keep); `fragmentation`.
Activations follow arXiv 2205.05198 section 4, extended to grouped heads, gated products and flash attention.
"""

from __future__ import annotations

from typing import NamedTuple

from hasten.plan.cluster import Cluster
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape

# Context of a CUDA process with NCCL and cuBLAS: about 0.6 GB and 0.5 GB (ROCm/Megatron-LM#161,
# NVIDIA/Megatron-LM #525 find 1 to 3 GB in all).
_CONTEXT = 1.2e9
# Share of the movable memory that the caching allocator cannot use; PyTorch's expandable segments bring it
# down.
_FRAGMENTATION = 0.03


class Held(NamedTuple):
    """Bytes per parameter: weights, gradients, optimizer."""

    weights: float
    gradients: float
    optimizer: float


def held(job: Job) -> Held:
    """Bytes of each parameter's states before any sharding (ZeRO, arXiv 1910.02054 section 3.1)."""
    if job.adapters:
        return Held(4.0 if job.precision == "fp32" else 2.0, 0.0, 0.0)
    moments = 8.0 if job.optimizer == "adamw" else 4.0
    if job.precision == "fp32" or job.master == "fp32":
        return Held(4.0, float(job.gradient_bytes or 4), moments)
    if job.master == "none":
        return Held(2.0, float(job.gradient_bytes or 2), moments / 2)
    return Held(2.0, float(job.gradient_bytes or 4), moments + 4.0)


def layer_activations(
    model: ModelShape, layout: Layout, job: Job, index: int, recompute: str | None = None
) -> float:
    """Bytes that the forward pass of one layer keeps for one micro batch on one device."""
    recompute = layout.recompute if recompute is None else recompute
    tokens = layout.micro_batch * job.sequence / layout.cp
    size = 4.0 if job.precision == "fp32" else 2.0
    h, t = model.hidden, layout.tp
    # The streams that sequence parallelism splits: inputs and outputs of the norms, masks.
    stream = t if layout.sp else 1
    if recompute == "full":
        return size * tokens * h / stream
    queries = model.heads * model.head_size
    values = queries
    keys = 2 * model.kv_heads * model.head_size
    if model.latent is not None:
        a = model.latent
        queries = model.heads * (a.plain_size + a.rotary_size)
        values = model.heads * a.value_size
        keys = queries + values
    inside = 0.0
    if job.attention == "materialised":
        inside = tokens * job.sequence * model.heads / t * (2 * size + 1 if job.dropout else size)
    else:
        inside = 4.0 * tokens * model.heads / t
    if model.sparse(index):
        routed = tokens * model.experts_per_token
        width = (3 if model.gated else 2) * (routed * model.expert_inner + tokens * model.shared_inner)
        feed = size * (width / t + 2 * routed * h / stream) + 4.0 * tokens * model.experts
    else:
        feed = size * tokens * (3 if model.gated else 2) * model.inner / t
    split = size * tokens * (queries + keys + values) / t
    whole = tokens * h * (4 * size + (2 if job.dropout else 0)) / stream
    if recompute == "selective" and job.attention == "materialised":
        inside = 0.0
    if recompute == "operators":
        outputs = (
            size * tokens * ((queries + keys) / t + h / stream) + feed * 2 / 3 + size * tokens * h / stream
        )
        return size * tokens * (h / stream + values / t) + inside + outputs / 2
    return whole + split + inside + feed


def in_flight(layout: Layout, stage: int) -> float:
    """Micro batches whose activations a stage keeps at its fullest, in units of all its layers."""
    p, v, m = layout.pp, layout.virtual, layout.accumulation
    if p == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(m)
    if v == 1:
        return float(min(p - stage, m))
    return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1) / v


def _shards(layout: Layout) -> int:
    return layout.shard or layout.dp * layout.cp


def stage_memory(
    model: ModelShape, cluster: Cluster, layout: Layout, job: Job
) -> tuple[dict[str, float], ...]:
    """Bytes by category for each pipeline stage."""
    bytes_of, shards = held(job), _shards(layout)
    zero = layout.zero
    cut = (shards if zero >= 3 else 1, shards if zero >= 2 else 1, shards if zero >= 1 else 1)
    expert_ways = layout.dp * layout.cp * layout.tp // layout.ep
    expert_shards = max(1, min(shards, expert_ways))
    expert_cut = tuple(expert_shards if c > 1 else 1 for c in cut)
    chunks = layout.chunks(model.layers)
    starts = [sum(chunks[:c]) for c in range(len(chunks))]
    size = 4.0 if job.precision == "fp32" else 2.0
    found = []
    for stage in range(layout.pp):
        mine = [
            index
            for c in range(stage, len(chunks), layout.pp)
            for index in range(starts[c], starts[c] + chunks[c])
        ]
        dense = sum(model.shared_layer_parameters(i) for i in mine) / layout.tp
        routed = sum(model.expert_parameters(i) for i in mine) / max(layout.ep, layout.tp)
        ends = 1.0 * (model.embedding_parameters if stage == 0 else 0) + (
            model.head_parameters if stage == layout.pp - 1 and not (model.tied and layout.pp == 1) else 0
        )
        ends /= layout.tp
        out = {
            name: per * (dense / c + routed / e)
            for name, per, c, e in zip(
                ("weights", "gradients", "optimizer"), bytes_of, cut, expert_cut, strict=True
            )
        }
        if layout.offload == "optimizer":
            out["optimizer"] = 0.0
        out["embedding_head"] = ends * sum(
            per / c
            for per, c, name in zip(bytes_of, cut, ("w", "g", "o"), strict=True)
            if not (name == "o" and layout.offload == "optimizer")
        )
        out["gathered"] = 0.0
        if zero >= 3 and shards > 1 and mine:
            largest = max(model.shared_layer_parameters(i) for i in mine) / layout.tp
            largest += max(model.expert_parameters(i) for i in mine) / max(layout.ep, layout.tp)
            # The layer at work, the next one on its way, and the gradient that is being reduced.
            out["gathered"] = largest * (2 * size + (bytes_of.gradients if job.master != "fp32" else size))
            out["gathered"] += ends * size
        alive = in_flight(layout, stage)
        kept = sum(layer_activations(model, layout, job, i) for i in mine)
        if layout.recompute_layers is not None and mine:
            share = min(1.0, layout.recompute_layers / len(mine))
            kept = share * kept + (1 - share) * sum(
                layer_activations(model, layout, job, i, "none") for i in mine
            )
        if layout.offload == "activations":
            kept = min(kept, 2 * kept / max(1, len(mine)))
        out["activations"] = kept * alive
        whole = max((layer_activations(model, layout, job, i, "none") for i in mine), default=0.0)
        tokens = layout.micro_batch * job.sequence / layout.cp
        again = layout.recompute != "none" and layout.recompute_layers != 0
        again &= layout.recompute != "selective" or job.attention == "materialised"
        # A layer's own while it is rebuilt, and the gradients of about half of them.
        out["rebuilt"] = whole * (1.5 if again else 0.5)
        if layout.sp:
            # Inputs of the two blocks, gathered over the tensor-parallel group.
            out["rebuilt"] += 2 * size * tokens * model.hidden
        stream = layout.tp if layout.sp else 1
        if stage == 0 and job.dropout:
            out["activations"] += tokens * model.hidden / stream * alive
        out["logits"] = 0.0
        if stage == layout.pp - 1:
            at_once = min(tokens, job.head_chunk or tokens)
            # Eager: logits, their copy in fp32, its log-softmax and the gradient of that. Compiled: logits,
            # log-softmax, its gradient and the gradient of the logits.
            per = 2 * size if job.fused_loss else 2 * size + 8 if job.compiled else size + 12
            out["logits"] = at_once * model.vocabulary / layout.tp * per
        group = layout.tp * layout.cp * layout.pp * layout.dp
        out["buffers"] = 0.25e9 * sum(d > 1 for d in (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep))
        out["context"] = _CONTEXT if cluster.device.cores else 0.3e9
        if group == 1:
            out["buffers"] = 0.0
        out["fragmentation"] = _FRAGMENTATION * (
            out["activations"] + out["rebuilt"] + out["logits"] + out["gathered"]
        )
        found.append(out)
    return tuple(found)
