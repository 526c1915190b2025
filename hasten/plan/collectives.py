"""Time of collectives by topology: latency and a saturating bandwidth.

n devices of a group share the fast links, m such islands are joined by one network interface a device.
Formulas: flat ring 2 (g-1)/g S / B and 2 (g-1) steps; tree 2 S / B, its steps inside an island and the
logarithm of the islands; hierarchical: reduce-scatter inside, all-reduce across, all-gather inside (Cho et
al., BlueConnect, MLSys 2019); the pipelined form runs the two tiers side by side; two orders: a part of the
buffer takes the tiers the other way round. A mesh gives a group of g of N devices (g-1)/(N-1) of a device's
links. The constants of a step stand for the one there and the one back.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hasten.plan.cluster import AllReduce, Cluster
from hasten.plan.efficiency import Constants

# Pieces in which a pipelined hierarchy may cut its buffer.
_CHUNKS = (2, 4, 8, 16, 32, 64)
# Of a ring's bandwidth, what NCCL counts on for a tree.
_TREE = 0.92


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

    def _flat(self, group: Group) -> float:
        """Bytes/s out of an island by the interfaces of all its devices, or by its own links if slower."""
        far = group.inside * self.across_bandwidth()
        return min(far, self.inside_bandwidth(group.inside)) if group.inside > 1 else far

    def _ring(self, volume: float, group: Group, passes: int) -> float:
        g = group.size
        if g <= 1 or volume <= 0:
            return 0.0
        if group.islands == 1:
            latency = self.known.inside_s + self.known.inside_step_s * (g - 1)
            return passes * (g - 1) / g * volume / self.inside_bandwidth(g) + latency * passes / 2
        # It meets every device.
        steps = (g - group.islands) * self.known.inside_step_s + group.islands * self.known.across_step_s
        latency = self.known.inside_s + steps
        return passes * (g - 1) / g * volume / self._flat(group) + latency * passes / 2

    def all_reduce(self, volume: float, group: Group) -> float:
        """By the fastest algorithm that the cluster's library has."""
        return self.best_all_reduce(volume, group)[0]

    def best_all_reduce(self, volume: float, group: Group) -> tuple[float, AllReduce]:
        """Seconds and the algorithm: inside an island the ring, across islands the fastest of
        `Cluster.all_reduce`, of which the one named first wins ties."""
        names: tuple[AllReduce, ...] = ("ring",) if group.islands == 1 else self.cluster.all_reduce
        best = (self._all_reduce(names[0], volume, group), names[0])
        for name in names[1:]:
            seconds = self._all_reduce(name, volume, group)
            if seconds < best[0] * 0.999:
                best = (seconds, name)
        return best

    def _all_reduce(self, name: AllReduce, volume: float, group: Group) -> float:
        if name == "ring":
            return self._ring(volume, group, 2)
        if name == "tree":
            return self.tree(volume, group)
        if name == "two_orders":
            return self.two_orders(volume, group)[0] + sum(self._tiers_s(group)) + self.known.inside_s
        chunks = (1,) if name == "hierarchical" else _CHUNKS
        return min(self.hierarchical(volume, group, count) for count in chunks)

    def tree(self, volume: float, group: Group) -> float:
        """All-reduce by a chain in each island and a double binary tree between them (NCCL's `tuning.cc`:
        up and down, 0.92 of a ring's bandwidth)."""
        n, m = group
        if group.size <= 1 or volume <= 0:
            return 0.0
        steps = (n - 1) * self.known.inside_step_s + math.log2(m) * self.known.across_step_s
        return 2 * volume / (_TREE * self._flat(group)) + self.known.inside_s + steps

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
        if m == 1 or volume <= 0:
            return self._ring(volume, group, 2)
        first_s = 2 * (n - 1) / n * volume / self.inside_bandwidth(n) if n > 1 else 0.0
        second_s = 2 * (m - 1) / m * volume / (n * self.across_bandwidth())
        wait_1, wait_2 = self._tiers_s(group)
        a, b = first_s / chunks + wait_1, second_s / chunks + wait_2
        return a + b + (chunks - 1) * max(a, b) + self.known.inside_s

    def _tiers_s(self, group: Group) -> tuple[float, float]:
        """Latency of a ring inside each island, and of those between them."""
        return (group.inside - 1) * self.known.inside_step_s, group.islands * self.known.across_step_s

    def two_orders(self, volume: float, group: Group) -> tuple[float, float]:
        """A part of the buffer goes inside first, the rest across first (Themis, arXiv 2110.04478):
        seconds by bandwidth alone, and the part that makes both tiers end together."""
        n, m = group
        if m == 1:
            return 2 * (n - 1) / n * volume / self.inside_bandwidth(n), 1.0
        if n == 1:
            return 2 * (m * n - 1) / (m * n) * volume / self._flat(group), 1.0

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
