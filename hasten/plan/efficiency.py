"""From operators to seconds: roofline with an efficiency that depends on size, head size and format."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import resources

from hasten.base.errors import ConfigError, nearest
from hasten.plan.cluster import Device
from hasten.plan.flops import Product


@dataclass(frozen=True)
class Constants:
    """What was fitted for one device. Shares are of the datasheet's figure; times are seconds.

    The values here are those of a device that nobody has calibrated: orders of magnitude, not measurements.
    """

    matmul: float = 0.75
    """Share of the peak that a large product reaches."""
    matmul_fp8: float = 0.62
    """The same for fp8 and fp4, with its casts."""
    depth: float = 150.0
    """Elements of the inner dimension at which a product reaches half of that share."""
    tall: float = 0.0
    """Rows of the micro batch at which a product reaches half of that share (weights have to be read in)."""
    memory: float = 0.75
    """Share of the memory bandwidth that elementwise operators reach."""
    flash: float = 0.5
    """Share of the peak that flash attention's forward pass reaches at head size 128."""
    flash_backward: float = 0.8
    """Of that share, what the backward pass reaches."""
    flash_narrow: float = 0.8
    """Factor at head size 64."""
    batched: float = 0.45
    """Share of the peak of the batched products of materialised attention."""
    batched_narrow: float = 48.0
    """Head size at which those reach half of it."""
    misaligned: float = 0.35
    """Factor for a head size that is not a multiple of 8: tensor cores load 16 bytes at a time."""
    unaligned: float = 0.6
    """Factor for the output head where a row of logits is no multiple of 16 bytes (GPT-2's 50,257)."""
    kernel_s: float = 4e-6
    """What a kernel takes that has nothing to do."""
    launch_s: float = 9e-6
    """Host time of one operator of an eager framework."""
    collective_launch_s: float = 40e-6
    """Host time of one collective."""
    micro_s: float = 2e-3
    """Host time of one micro batch beyond its layers."""
    step_s: float = 10e-3
    """Of one step: data, loss scale, logging, synchronisation."""
    launch_norm: float = 4.0
    """How sharply host and device times exclude one another: exponent of their norm."""
    inside: float = 0.78
    """Share of the fast links' bandwidth that a large collective reaches."""
    across: float = 0.75
    inside_s: float = 50e-6
    """Latency of a collective inside the fast links; grows with the group by `inside_step_s`."""
    inside_step_s: float = 5e-6
    across_step_s: float = 8e-6
    """Latency of one step between nodes."""
    point: float = 0.6
    """Share of the bandwidth that a transfer between two pipeline stages reaches."""
    hop_s: float = 1e-3
    """What handing a micro batch to the next stage on another node costs both, beyond its transfer."""
    overlap: float = 0.7
    """Share of a collective that is hidden where the framework runs it beside computation."""
    slowdown: float = 1.1
    """What computation slows down by beside a collective (Galvatron measured 1.1 to 1.3)."""
    optimizer: float = 0.6
    """Share of the memory bandwidth of the optimizer."""
    straggle: float = 0.0
    """Relative loss per doubling of the nodes: waiting for the slowest."""


@cache
def _fitted() -> dict[str, dict[str, float]]:
    text = resources.files("hasten.plan").joinpath("presets/fitted.toml").read_text("utf-8")
    return {
        name: {key: float(value) for key, value in table.items() if key != "source"}
        for name, table in tomllib.loads(text).items()
    }


def constants(device: Device) -> Constants:
    """The device's fitted constants, its overrides on top; those of an unknown device where none were fitted.

    Raises:
        ConfigError: an override that is no constant.
    """
    known = {field.name for field in fields(Constants)}
    for name in device.overrides:
        if name not in known:
            raise ConfigError(f"{device.name}: no constant {name!r}; {nearest(name, known)}")
    return replace(Constants(), **{**_fitted().get(device.constants or device.name, {}), **device.overrides})


def calibrated(device: Device) -> bool:
    """Whether the device's constants were fitted or measured."""
    return bool(device.overrides) or (device.constants or device.name) in _fitted()


# Tiles that a matrix-product library chooses from, with the share of the best that one of them reaches. The
# shapes are those of CUTLASS's default kernels; the shares are arithmetic intensity against 128 x 256
# (loads per FLOP grow as 1/rows + 1/columns), softened by the caches.
_TILES = (
    (256.0, 128.0, 1.0),
    (128.0, 256.0, 1.0),
    (128.0, 128.0, 0.94),
    (128.0, 64.0, 0.82),
    (64.0, 64.0, 0.66),
)


# Columns of the tile in which a batched product makes a result that is one head wide.
_HEAD_TILE = 64.0


class Clock:
    """Seconds of operators on one device, in one format."""

    def __init__(self, device: Device, precision: str, known: Constants | None = None) -> None:
        self.known = known or constants(device)
        self.half = "bf16" if precision in ("fp8", "fp4") else precision
        self.cores = device.cores
        self.bandwidth = device.memory_bandwidth.value
        share = self.known.matmul_fp8 if precision in ("fp8", "fp4") else self.known.matmul
        self.rate = device.peak(precision) * share
        self.half_peak = device.peak(self.half)
        self.element = 1.0 if precision in ("fp8", "fp4") else 4.0 if precision == "fp32" else 2.0

    def product(self, m: float, n: float, k: float, count: float = 1.0, half: bool = False) -> float:
        """Seconds of `count` products; `half`: in the 16-bit format even where the run is in fp8."""
        if min(m, n, k) <= 0:
            return 0.0
        known = self.known
        rate = self.half_peak * known.matmul if half else self.rate
        ramp = k / (k + known.depth) * min(m, n) / (min(m, n) + known.tall)
        best = math.inf
        if self.cores:
            for rows, columns, share in _TILES:
                waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * count / self.cores)
                best = min(best, waves * self.cores * rows * columns / share)
        else:
            best = m * n * count
        compute = 2.0 * best * k / (rate * ramp)
        moved = (
            (2.0 if half else self.element)
            * count
            * (m * k + n * k + m * n)
            / (self.bandwidth * known.memory)
        )
        return max(compute, moved) + known.kernel_s

    def forward(self, product: Product) -> float:
        """Of one product as listed."""
        return self.product(product.m, product.n, product.k, product.times, half=product.name == "router")

    def backward(self, product: Product) -> float:
        """Of the two products that the gradient of one takes."""
        half = product.name == "router"
        return self.product(product.m, product.k, product.n, product.times, half) + self.product(
            product.k, product.n, product.m, product.times, half
        )

    def moved(self, volume: float, kernels: float = 1.0) -> float:
        """Of elementwise operators that move so many bytes through memory."""
        return volume / (self.bandwidth * self.known.memory) + kernels * self.known.kernel_s

    def _head(self, head_size: float) -> float:
        return self.known.misaligned if head_size % 8 else 1.0

    def flash(self, flops: float, head_size: float, rows: float, backward: bool) -> float:
        """Flash attention; `flops` of the forward pass as computed, `rows` the length of a query block's
        sequence. The backward pass has five products where the forward pass has two (arXiv 2307.08691)."""
        narrow = self.known.flash_narrow if head_size <= 64 else 1.0
        # A sequence shorter than a few blocks of 128 does not fill them.
        share = self.known.flash * narrow * self._head(head_size) * rows / (rows + 256.0)
        if backward:
            return (
                2.5 * flops / (self.half_peak * share * self.known.flash_backward) + 2 * self.known.kernel_s
            )
        return flops / (self.half_peak * share) + self.known.kernel_s

    def materialised(self, batch: float, rows: float, columns: float, head_size: float, inner: bool) -> float:
        """One batched product of materialised attention; `inner`: the head is what is summed over (scores),
        else a side of the result, which is made in whole tiles."""
        wide = head_size if inner else math.ceil(head_size / _HEAD_TILE) * _HEAD_TILE
        flops = 2.0 * batch * rows * columns * wide
        share = self.known.batched * self._head(head_size)
        share *= head_size / (head_size + self.known.batched_narrow)
        moved = (
            2.0
            * batch
            * (rows * columns + (rows + columns) * head_size)
            / (self.bandwidth * self.known.memory)
        )
        return max(flops / (self.half_peak * share), moved) + self.known.kernel_s

    def launched(self, device_s: float, host_s: float) -> float:
        """Host and device work side by side: the longer, and a little more where they are alike."""
        if host_s <= 0 or device_s <= 0:
            return max(device_s, host_s)
        p = self.known.launch_norm
        high, low = max(device_s, host_s), min(device_s, host_s)
        return high * (1 + (low / high) ** p) ** (1 / p)
