"""Seconds of one layer, of the ends of the model, and of what happens once a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hasten.plan.cluster import Cluster
from hasten.plan.collectives import Group, Network, place
from hasten.plan.efficiency import Clock, Constants, constants
from hasten.plan.flops import Product, attention_widths, layer_products, seen_tokens
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.memory import held
from hasten.plan.model import ModelShape

# Kernels that an eager framework starts for one layer's forward pass: counted in Megatron-LM's and
# transformers' modules. Autograd's backward pass starts about 1.6 times as many, without Python between them.
_OPERATORS, _OPERATORS_ATTENTION, _OPERATORS_ROTARY, _OPERATORS_DROPOUT = 16.0, 6.0, 6.0, 3.0
_BACKWARD_OPERATORS = 1.6
# Of those, what remains after fusion by a compiler.
_COMPILED = 0.4
# A table that is cut is padded first (Megatron-LM's make-vocab-size-divisible-by, times tp).
_VOCABULARY_UNIT = 128
# Megatron-LM's fused softmax takes (sequences x heads of a device) in fours and rows of at most so many keys
# (`FusedScaleMaskSoftmax.is_kernel_available`); elsewhere it is a cast, a mask, a softmax and a cast, with so
# many operators more.
_SOFTMAX_BATCHES, _SOFTMAX_KEYS, _OPERATORS_SOFTMAX = 4, 4096, 6.0


@dataclass
class Piece:
    """Seconds by part of something that runs as a whole; `host` is the host's side of it."""

    parts: dict[str, float] = field(default_factory=dict)
    host: float = 0.0

    @property
    def device(self) -> float:
        """Seconds that the device needs for it."""
        return sum(self.parts.values())

    def add(self, part: str, seconds: float) -> None:
        """More of one part."""
        self.parts[part] = self.parts.get(part, 0.0) + seconds


@dataclass
class Costs:
    """All prices of one (model, cluster, layout, job)."""

    model: ModelShape
    cluster: Cluster
    layout: Layout
    job: Job
    given: Constants | None = None
    """Instead of the device's own constants."""
    known: Constants = field(init=False)
    clock: Clock = field(init=False)
    network: Network = field(init=False)

    def __post_init__(self) -> None:
        self.known = self.given or constants(self.cluster.device)
        self.clock = Clock(self.cluster.device, self.job.precision, self.known)
        self.network = Network(self.cluster, self.known)
        self.replayed = self.cluster.device.replayed
        layout = self.layout
        self.tokens = layout.micro_batch * self.job.sequence / layout.cp
        self.size = 4.0 if self.job.precision == "fp32" else 2.0
        self.tensor = place(self.cluster, layout.tp)
        self.context = place(self.cluster, layout.cp, layout.tp)
        self.data = place(self.cluster, layout.dp * layout.cp, layout.tp)
        self.expert = place(self.cluster, layout.ep) if layout.ep > 1 else Group(1, 1)

    def measured(self, kind: str) -> float:
        """Factor that a profile puts on operators of a kind."""
        return self.replayed.get(kind, 1.0)

    def backward(self, product: Product) -> float:
        """Of a product's backward pass: with adapters alone trained, weights have no gradient."""
        if self.job.adapters:
            return self.clock.forward(product._replace(n=product.k, k=product.n))
        return self.clock.backward(product)

    def launched(self, device_s: float, host_s: float) -> float:
        """Seconds of what takes the device and its host so long."""
        return device_s + host_s if self.job.blocking else self.clock.launched(device_s, host_s)

    # One layer ------------------------------------------------------------------------------------------
    def _attention(self, piece: Piece, backward: bool) -> None:
        model, job, layout = self.model, self.job, self.layout
        queries, values = (width / layout.tp for width in attention_widths(model))
        rows = job.sequence / layout.cp
        if job.attention == "flash":
            seen = seen_tokens(model, job.sequence, job.causal)
            flops = 2.0 * self.tokens * seen * (queries + values)
            seconds = self.clock.flash(flops, model.head_size, rows, backward)
            piece.add("attention", seconds * self.measured("attention"))
            return
        batch = layout.micro_batch * model.heads / layout.tp
        head = queries * layout.tp / model.heads
        inside = self.clock.materialised(batch, rows, job.sequence, head, inner=True)
        beside = self.clock.materialised(batch, rows, job.sequence, head, inner=False)
        square = batch * rows * job.sequence
        # Scaled, masked softmax in one kernel; dropout reads, writes and keeps a mask.
        volume, kernels = (3 if backward else 2) * self.size, 1.0
        if not self._softmax_is_fused():
            # Through fp32: cast, mask of one byte, softmax, cast back; backward the same the other way.
            volume, kernels = 2 * (self.size + 4) + (9 + 12 if backward else 9 + 8), 4.0
        if job.dropout:
            volume, kernels = volume + 2 * self.size + 1, kernels + 1
        volume *= square
        # Scores, scores times values; back the gradients of values, of scores, of queries and of keys.
        seconds = inside + (3 if backward else 1) * beside + self.clock.moved(volume, kernels)
        piece.add("attention", seconds * self.measured("attention"))

    def _softmax_is_fused(self) -> bool:
        layout, job = self.layout, self.job
        batches = layout.micro_batch * self.model.heads / layout.tp
        return job.compiled or (batches % _SOFTMAX_BATCHES == 0 and job.sequence <= _SOFTMAX_KEYS)

    def _elementwise(self, index: int, backward: bool) -> float:
        model, job, layout = self.model, self.job, self.layout
        stream = layout.tp if layout.sp else 1
        queries, values = attention_widths(model)
        keys = model.kv_heads * model.head_size
        # Two norms (read, write), two residual sums (two reads, one write), a mask of one byte where there is
        # dropout.
        per_token = model.hidden / stream * (10 * self.size + (2 if job.dropout else 0))
        if model.positions == "rotary":
            per_token += (queries + keys) / layout.tp * 2 * self.size
        # Attention reads queries, keys and values where the product put them; what it made is laid out for
        # the next product.
        per_token += values / layout.tp * 2 * self.size
        width = model.inner
        if model.sparse(index):
            width = model.experts_per_token * model.expert_inner + model.shared_inner
            # Tokens are gathered for their experts and summed from them.
            per_token += model.experts_per_token * model.hidden * 4 * self.size
        per_token += width / layout.tp * (3 if model.gated else 2) * self.size
        kernels = 8.0 if model.positions == "rotary" else 6.0
        if backward:
            per_token, kernels = 1.6 * per_token, 1.6 * kernels
            # The three gradients are put side by side; each bias reads its output's.
            wide = (queries + 2 * keys) / layout.tp
            per_token += wide * 2 * self.size
            if model.biases:
                per_token += (wide + 2 * model.hidden + width / layout.tp) * self.size
        seconds = self.clock.moved(self.tokens * per_token, kernels)
        return seconds * (0.7 if job.compiled else 1.0) * self.measured("elementwise")

    def _collectives(self, piece: Piece, index: int, backward: bool) -> float:
        """Adds a layer's collectives; returns how many there are."""
        model, job, layout = self.model, self.job, self.layout
        count = 0.0
        if layout.tp > 1:
            volume = self.tokens * model.hidden * self.size
            if layout.sp:
                each = self.network.all_gather(volume, self.tensor) + self.network.reduce_scatter(
                    volume, self.tensor
                )
                # The input that was split is gathered once more for the gradient of the weights.
                more = (
                    self.network.all_gather(volume, self.tensor) * (1 - self.known.overlap)
                    if backward
                    else 0.0
                )
                total, count = 2 * (each + more), 4.0 + (2.0 if backward else 0.0)
            else:
                total, count = 2 * self.network.all_reduce(volume, self.tensor), 2.0
                if backward:
                    # The input's gradient is reduced while the weight's is computed.
                    total *= 1 - 0.5 * self.known.overlap if job.overlap_gradients else 1.0
            piece.add("tensor_parallel", total * (1 - self.known.overlap if job.overlap_tensor else 1.0))
        if layout.cp > 1:
            keys = 2 * model.kv_heads * model.head_size / layout.tp
            near = self.context.islands == 1
            each = self.network.send(self.tokens * keys * self.size * (2 if backward else 1), near)
            ring = each * (layout.cp - 1)
            hidden = piece.parts.get("attention", 0.0) * (layout.cp - 1) / layout.cp
            piece.add("context_parallel", max(ring - hidden, ring * (1 - self.known.overlap) * 0.2))
            count += layout.cp - 1
        if layout.ep > 1 and model.sparse(index):
            volume = self.tokens / layout.tp * model.hidden * self.size
            if job.dispatch == "tokens":
                each = self.network.dispatch(volume, model.experts_per_token, self.expert)
            else:
                each = self.network.all_to_all(volume * model.experts_per_token, self.expert)
            piece.add("expert_parallel", 2 * each)
            count += 2
        return count

    def layer(self, index: int, backward: bool) -> Piece:
        """One layer's forward or backward pass, nothing recomputed."""
        model, job, layout = self.model, self.job, self.layout
        piece = Piece()
        products = layer_products(model, index, self.tokens, layout.tp, layout.ep)
        price = self.backward if backward else self.clock.forward
        piece.add("matmul", sum(price(p) for p in products) * self.measured("matmul"))
        self._attention(piece, backward)
        piece.add("elementwise", self._elementwise(index, backward))
        collectives = self._collectives(piece, index, backward)
        count = _OPERATORS + (_OPERATORS_ATTENTION if job.attention == "materialised" else 0.0)
        if job.attention == "materialised" and not self._softmax_is_fused():
            count += _OPERATORS_SOFTMAX
        count += _OPERATORS_ROTARY if model.positions == "rotary" else 0.0
        count += _OPERATORS_DROPOUT if job.dropout else 0.0
        count += 3.0 * min(model.experts / layout.ep, 8.0) + 12.0 if model.sparse(index) else 0.0
        # How many tokens an expert gets is known on the device alone: no graph of kernels holds it.
        captured = job.compiled and not model.sparse(index)
        count *= (_COMPILED if captured else 1.0) * (_BACKWARD_OPERATORS if backward else 1.0)
        piece.host = count * self.known.launch_s + collectives * self.known.collective_launch_s
        return piece

    def recomputed(self, index: int) -> Piece:
        """What of a layer's forward pass is done again in the backward pass."""
        layout, job = self.layout, self.job
        piece = Piece()
        if layout.recompute == "none" or (layout.recompute == "selective" and job.attention == "flash"):
            return piece
        if layout.recompute == "selective":
            self._attention(piece, backward=False)
            piece.host = 6 * self.known.launch_s
            return piece
        whole = self.layer(index, backward=False)
        if layout.recompute == "operators":
            whole.parts["matmul"] *= 0.5
            whole.parts.pop("attention", None)
        return whole

    # The ends -------------------------------------------------------------------------------------------
    def embedding(self, backward: bool) -> Piece:
        """Look-up of the input table (and its gradient)."""
        model, layout = self.model, self.layout
        piece = Piece()
        volume = self.tokens * model.hidden * self.size * (4 if backward else 3)
        if backward and not self.job.adapters:
            # The table's gradient begins as zeros; where the table is tied it is added to the head's.
            table = model.embedding_parameters / layout.tp * self.size
            volume += table * (4 if model.tied and layout.pp == 1 else 1)
        seconds = self.clock.moved(volume, 3.0)
        piece.add("embedding", seconds * self.measured("elementwise"))
        if layout.tp > 1 and not backward:
            piece.add("tensor_parallel", self.network.all_reduce(volume, self.tensor))
        piece.host = 8 * self.known.launch_s
        return piece

    def head(self, backward: bool) -> Piece:
        """The last norm, the logits and the cross-entropy."""
        model, layout = self.model, self.layout
        piece = Piece()
        width = model.vocabulary / layout.tp
        if layout.tp > 1:
            width = math.ceil(width / _VOCABULARY_UNIT) * _VOCABULARY_UNIT
        logits = Product("router", self.tokens, width, model.hidden)
        # torch's cross_entropy: logits to fp32, their maximum, exponentials and sum; back: a gradient of
        # zeros, log-softmax's (reads two, writes one), the cast.
        per = (self.size + 4) + (4 + 4) + 4 if not backward else 4 + 12 + (4 + self.size)
        if self.job.master == "split":
            # Megatron-LM's vocab_parallel_cross_entropy, a pass each: cast, maximum, difference, exponential,
            # sum, quotient; back: times the gradient, cast.
            per = (self.size + 4) + 4 + 8 + 8 + 4 + 8 if not backward else 8 + (4 + self.size)
        if self.job.fused_loss:
            per = self.size if not backward else 2 * self.size
        volume = self.tokens * width * per
        price = self.backward if backward else self.clock.forward
        product_s = price(logits)
        if width * self.size % 16 and self.size < 4:
            product_s /= self.known.unaligned
        moved = self.clock.moved(volume * (0.5 if self.job.compiled else 1.0), 6.0)
        piece.add("head", product_s * self.measured("matmul") + moved * self.measured("elementwise"))
        if layout.tp > 1:
            piece.add(
                "tensor_parallel",
                self.network.all_reduce(self.tokens * model.hidden * self.size, self.tensor),
            )
        piece.host = 15 * self.known.launch_s
        return piece

    # Once a step ----------------------------------------------------------------------------------------
    def parameters(self, layers: list[int], first: bool, last: bool) -> tuple[float, float]:
        """Parameters of a stage on one device before ZeRO: (shared by data parallelism, routed experts)."""
        model, layout = self.model, self.layout
        dense = sum(model.shared_layer_parameters(i) for i in layers) / layout.tp
        routed = sum(model.expert_parameters(i) for i in layers) / max(layout.ep, layout.tp)
        ends = model.embedding_parameters if first else 0
        ends += model.head_parameters if last and not (model.tied and first) else 0
        return dense + ends / layout.tp, routed

    def reduce_gradients(self, count: float) -> float:
        """Seconds of the data-parallel reduction (and, with ZeRO-1 and 2, of gathering the new weights)."""
        layout, job = self.layout, self.job
        if self.data.size == 1 or job.adapters:
            return 0.0
        gradient = held(job).gradients if job.master != "split" or job.gradient_bytes else 2.0
        if layout.zero == 0:
            return self.network.all_reduce(count * gradient, self.data)
        group = self.shard_group()
        if layout.zero == 1 and job.reduce_whole:
            kept = held(job).gradients
            return self.network.all_reduce(count * kept, self.data) + self.network.all_gather(
                count * self.size, group
            )
        seconds = self.network.reduce_scatter(count * gradient, group)
        if group.size < self.data.size:
            outer = Group(1, self.data.size // group.size)
            seconds += self.network.all_reduce(count * gradient / group.size, outer)
        return seconds + (self.network.all_gather(count * self.size, group) if layout.zero < 3 else 0.0)

    def shard_group(self) -> Group:
        """The devices over which ZeRO shards."""
        shards = self.layout.shard or self.layout.dp * self.layout.cp
        return place(self.cluster, shards, self.layout.tp)

    def gather_weights(self, count: float) -> float:
        """Seconds of gathering so many parameters with ZeRO-3."""
        size = 1.0 if self.job.precision in ("fp8", "fp4") else self.size
        parts = self.job.gathers_per_layer
        return parts * self.network.all_gather(count * size / parts, self.shard_group())

    def scatter_gradients(self, count: float) -> float:
        """Seconds of reducing so many parameters' gradients with ZeRO-3."""
        if self.job.adapters:
            return 0.0
        gradient = 4.0 if self.job.master == "fp32" else 2.0
        parts = self.job.gathers_per_layer
        return parts * self.network.reduce_scatter(count * gradient / parts, self.shard_group())

    def accumulate(self, count: float) -> float:
        """Seconds of adding one micro batch's gradient of so many parameters to the kept one, and of its cast
        where autocast made it in 16 bits for a weight of 32."""
        if self.job.fused_accumulation or self.job.adapters:
            return 0.0
        if self.job.master == "fp32" and self.layout.zero == 0:
            moved = 6.0 if self.size == 2.0 else 0.0
            moved += 12.0 if self.layout.accumulation > 1 else 0.0
            return self._elements(count * moved)
        if self.layout.accumulation == 1:
            return 0.0
        if self.layout.zero == 3:
            count /= self.shard_group().size
        kept = held(self.job).gradients
        return self._elements(count * (self.size + 2 * kept))

    def _elements(self, volume: float) -> float:
        return volume / (self.clock.bandwidth * self.known.memory) * self.measured("elementwise")

    def optimizer(self, count: float) -> float:
        """Seconds of updating so many parameters: weight, gradient and moments are read and written."""
        if self.job.adapters:
            return 0.0
        layout, per = self.layout, held(self.job)
        shards = self.shard_group().size if layout.zero else 1
        volume = count / shards * (2 * (per.optimizer + per.weights) + 2 * per.gradients)
        if self.job.precision == "fp16" and self.job.master == "split":
            # Passes over all of it: gradients to fp32, their norm, the update (apex's FusedAdam unscales and
            # clips as it reads), masters to fp16.
            volume = count / shards * ((2 + 4) + 4 + (16 + 12) + (4 + 2))
        if layout.offload == "optimizer":
            # Gradients go out and weights come back; the host reads and writes the states in its own memory,
            # of which a device's share is about as fast as its link (eight channels of DDR5, eight devices).
            moved = 2 * (per.gradients + per.weights + per.optimizer)
            return count / shards * moved / self.cluster.host_bandwidth.value
        seconds = volume / (self.cluster.device.memory_bandwidth.value * self.known.optimizer)
        return seconds * self.measured("optimizer")
