"""Time of collectives by topology: latency and a saturating bandwidth.

n devices of a group share the fast links, m such islands are joined by one network interface a device.
Formulas: flat ring 2 (g-1)/g S / B and 2 (g-1) steps; hierarchical: reduce-scatter inside, all-reduce across,
all-gather
inside (Cho et al., BlueConnect, MLSys 2019); the pipelined form runs the two tiers side by side; a mesh
gives a group of g of N devices (g-1)/(N-1) of a device's links.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from hasten.plan.cluster import Cluster
from hasten.plan.efficiency import Constants


class Group(NamedTuple):
    """The devices of one collective: `inside` of them share fast links, in `islands` of such."""

    inside: int
    islands: int

    @property
    def size(self) -> int:
        """All of them."""
        return self.inside * self.islands


def place(cluster: Cluster, size: int, stride: int = 1) -> Group:
    """A group of `size` devices, `stride` apart in the order tp, cp, dp, pp (the innermost first)."""
    near = max(1, min(size, cluster.joined // stride)) if stride <= cluster.joined else 1
    while size % near:
        near -= 1
    return Group(near, size // near)


class Network:
    """Seconds of collectives on one cluster. Volumes are the bytes of the whole buffer on one device."""

    def __init__(self, cluster: Cluster, known: Constants) -> None:
        self.cluster, self.known = cluster, known

    def inside_bandwidth(self, size: int) -> float:
        """Bytes/s one way of one device in a group of so many that share fast links."""
        link = self.cluster.inside
        reach = link.bandwidth.value * self.known.inside
        if link.kind == "mesh" and self.cluster.joined > 1:
            reach *= min(1.0, (size - 1) / (self.cluster.joined - 1))
        return reach

    def across_bandwidth(self) -> float:
        """Bytes/s one way of one device's interface."""
        return self.cluster.across.bandwidth.value * self.known.across

    def _ring(self, volume: float, group: Group, passes: int) -> float:
        g = group.size
        if g <= 1 or volume <= 0:
            return 0.0
        if group.islands == 1:
            latency = self.known.inside_s + self.known.inside_step_s * (g - 1)
            return passes * (g - 1) / g * volume / self.inside_bandwidth(g) + latency * passes / 2
        # One interface a device: a ring that leaves the island in `inside` lanes; inside, the other link.
        rate = group.inside * self.across_bandwidth()
        if group.inside > 1:
            rate = min(rate, self.inside_bandwidth(group.inside))
        # A ring meets every device; for all-reduce a library takes trees beyond some tens of devices.
        ring = (g - group.islands) * self.known.inside_step_s + group.islands * self.known.across_step_s
        tree = (group.inside * self.known.inside_step_s + 2 * self.known.across_step_s) * math.log2(g)
        latency = self.known.inside_s + (min(ring, tree) if passes == 2 else ring)
        return passes * (g - 1) / g * volume / rate + latency * passes / 2

    def all_reduce(self, volume: float, group: Group) -> float:
        """The library's own: the flat ring."""
        return self._ring(volume, group, 2)

    def all_gather(self, volume: float, group: Group) -> float:
        """`volume` is that of the gathered buffer."""
        return self._ring(volume, group, 1)

    def reduce_scatter(self, volume: float, group: Group) -> float:
        """`volume` is that of the buffer before it is scattered."""
        return self._ring(volume, group, 1)

    def all_to_all(self, volume: float, group: Group) -> float:
        """`volume` leaves each device, an equal part for each of the group."""
        g = group.size
        if g <= 1 or volume <= 0:
            return 0.0
        near = (group.inside - 1) / g * volume / self.inside_bandwidth(max(2, group.inside))
        far = (g - group.inside) / g * volume / self.across_bandwidth() if group.islands > 1 else 0.0
        latency = self.known.inside_s + (self.known.across_step_s * math.log2(g) if far else 0.0)
        return max(near, far) + latency

    def dispatch(self, token_bytes: float, choices: int, group: Group) -> float:
        """Every token goes to the devices of `choices` experts, drawn evenly, once to each node and once to
        each device (DeepEP's kernels), however many of its experts are there. `token_bytes`: of all tokens of
        one device, one copy of each."""
        g, m = group.size, group.islands
        if g <= 1 or token_bytes <= 0:
            return 0.0
        devices = g * (1 - (1 - 1 / g) ** choices)
        nodes = (m - 1) * (1 - (1 - 1 / m) ** choices)
        near = devices * (group.inside - 1) / group.inside * token_bytes
        near /= self.inside_bandwidth(max(2, group.inside))
        far = nodes * token_bytes / self.across_bandwidth() if m > 1 else 0.0
        latency = self.known.inside_s + (self.known.across_step_s * math.log2(g) if far else 0.0)
        return max(near, far) + latency

    def send(self, volume: float, near: bool) -> float:
        """From one device to another."""
        if volume <= 0:
            return 0.0
        link = self.cluster.inside if near else self.cluster.across
        rate = link.bandwidth.value * self.known.point
        if near and link.kind == "mesh" and self.cluster.joined > 1:
            rate /= self.cluster.joined - 1
        return volume / rate + link.latency_s.value

    def hierarchical(self, volume: float, group: Group, chunks: int = 1) -> float:
        """All-reduce in tiers: inside, across, inside. chunks = 1 is serial, more run the tiers side by
        side."""
        n, m = group
        if m == 1:
            return self.all_reduce(volume, group)
        first_s = 2 * (n - 1) / n * volume / self.inside_bandwidth(n) if n > 1 else 0.0
        second_s = 2 * (m - 1) / m * volume / (n * self.across_bandwidth())
        wait_1 = 2 * (n - 1) * self.known.inside_step_s
        wait_2 = 2 * (m - 1) * self.known.across_step_s
        a, b = first_s / chunks + wait_1, second_s / chunks + wait_2
        return a + b + (chunks - 1) * max(a, b) + self.known.inside_s

    def two_orders(self, volume: float, group: Group) -> tuple[float, float]:
        """A part of the buffer goes inside first, the rest across first (Themis, arXiv 2110.04478):
        seconds by bandwidth alone, and the part that makes both tiers end together."""
        n, m = group
        if m == 1 or n == 1:
            return self.all_reduce(volume, group), 1.0

        def loads(x: float) -> tuple[float, float]:
            near = 2 * (n - 1) / n * volume * (x + (1 - x) / m) / self.inside_bandwidth(n)
            far = 2 * (m - 1) / m * volume * (x / n + 1 - x) / self.across_bandwidth()
            return near, far

        low, high = 0.0, 1.0
        if loads(1.0)[0] <= loads(1.0)[1]:
            return max(loads(1.0)), 1.0
        for _ in range(60):
            x = (low + high) / 2
            near, far = loads(x)
            low, high = (low, x) if near > far else (x, high)
        return max(loads(high)), high

    def best_all_reduce(
        self, volume: float, group: Group
    ) -> tuple[float, Literal["ring", "hierarchical"], int]:
        """The fastest of the library's own and the pipelined hierarchy; the library's own wins ties."""
        best: tuple[float, Literal["ring", "hierarchical"], int] = (self.all_reduce(volume, group), "ring", 1)
        if group.islands > 1 and group.inside > 1:
            for chunks in (1, 2, 4, 8, 16, 32, 64):
                seconds = self.hierarchical(volume, group, chunks)
                if seconds < best[0] * 0.999:
                    best = (seconds, "hierarchical", chunks)
        return best
