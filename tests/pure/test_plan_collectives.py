"""Collectives by topology: formulas, limits, and a published table."""

from __future__ import annotations

import pytest

from hasten.plan.cluster import Cluster, overridden, preset
from hasten.plan.collectives import Group, Network, place
from hasten.plan.efficiency import Constants

# No latency and the whole bandwidth: what remains are the formulas.
IDEAL = Constants(inside=1.0, across=1.0, inside_s=0.0, inside_step_s=0.0, across_step_s=0.0)


def cluster(nodes: int, kind: str = "switch", inside: float = 234e9, across: float = 22.5e9) -> Cluster:
    changes = {"inside": {"kind": kind, "bandwidth": inside}, "across": {"bandwidth": across}, "nodes": nodes}
    return overridden(preset("dgx-a100-80g"), changes)


def test_inside_a_node_the_ring_is_the_formula() -> None:
    network = Network(cluster(1), IDEAL)
    assert network.all_reduce(1e9, Group(8, 1)) == pytest.approx(2 * 7 / 8 * 1e9 / 234e9)
    assert network.all_gather(1e9, Group(8, 1)) == pytest.approx(7 / 8 * 1e9 / 234e9)
    assert network.all_reduce(1e9, Group(1, 1)) == 0


@pytest.mark.parametrize(
    ("nodes", "ring", "serial", "bound"), [(2, 10.4, 13.0, 7.48), (16, 11.0, 17.9, 10.4)]
)
def test_hierarchy_lies_between_serial_and_its_bound(
    nodes: int, ring: float, serial: float, bound: float
) -> None:
    # Bandwidth-only milliseconds of 1 GB over 8 x A100 a node at 234 and 22.5 GB/s, by the formulas.
    network = Network(cluster(nodes), IDEAL)
    group = Group(8, nodes)
    assert 1e3 * network.all_reduce(1e9, group) == pytest.approx(ring, rel=0.01)
    assert 1e3 * network.hierarchical(1e9, group) == pytest.approx(serial, rel=0.01)
    assert 1e3 * network.hierarchical(1e9, group, 10_000) == pytest.approx(bound, rel=0.01)


def test_two_orders_help_only_where_the_node_is_the_bottleneck() -> None:
    mesh = Network(cluster(2, inside=127e9), IDEAL)
    seconds, share = mesh.two_orders(1e9, Group(8, 2))
    assert (1e3 * seconds, share) == (pytest.approx(12.5, rel=0.01), pytest.approx(0.82, abs=0.01))
    assert Network(cluster(16), IDEAL).two_orders(1e9, Group(8, 16))[1] == 1.0


def test_the_librarys_own_wins_ties() -> None:
    network = Network(cluster(2), Constants())
    assert network.best_all_reduce(1e9, Group(8, 1))[1] == "ring"
    seconds, kind, chunks = network.best_all_reduce(4e9, Group(8, 2))
    assert (kind, chunks > 1) == ("hierarchical", True)
    assert seconds < network.all_reduce(4e9, Group(8, 2))


def test_a_mesh_gives_a_small_group_few_links() -> None:
    # Measured on 910B: 18, 30 and 72 GB/s for 2, 4 and 8 cards; (g - 1) / (n - 1) of the links.
    network = Network(cluster(1, kind="mesh"), IDEAL)
    whole = network.inside_bandwidth(8)
    assert [network.inside_bandwidth(g) / whole for g in (2, 4, 8)] == pytest.approx([1 / 7, 3 / 7, 1])


def test_small_messages_are_latency() -> None:
    network = Network(cluster(1), Constants())
    small, larger = network.all_reduce(1e4, Group(8, 1)), network.all_reduce(1e5, Group(8, 1))
    assert larger < 1.1 * small


def test_groups_are_laid_out_from_the_innermost() -> None:
    wide = cluster(16)
    assert place(wide, 8) == Group(8, 1)
    assert place(wide, 16) == Group(8, 2)
    assert place(wide, 16, stride=4) == Group(2, 8)
    assert place(wide, 4, stride=8) == Group(1, 4)
    assert place(preset("gb200-nvl72", nodes=18), 64) == Group(64, 1)
