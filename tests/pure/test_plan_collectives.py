"""Collectives by topology: formulas, limits, and a published table."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.base.errors import InputError
from hasten.plan.cluster import Cluster, load, overridden, preset
from hasten.plan.collectives import Group, Network, place
from hasten.plan.efficiency import Constants
from hasten.plan.machine import as_toml

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


def with_library(*algorithms: str, nodes: int = 2) -> Network:
    return Network(overridden(cluster(nodes), {"all_reduce": algorithms}), Constants())


def test_an_all_reduce_costs_what_the_best_of_its_library_costs() -> None:
    group = Group(8, 2)
    names = ("ring", "tree", "hierarchical", "pipelined", "two_orders")
    alone = {name: with_library(name).all_reduce(4e9, group) for name in names}
    assert len(set(alone.values())) == len(names)
    for first in names:
        for second in names:
            seconds, chosen = with_library(first, second).best_all_reduce(4e9, group)
            assert seconds == min(alone[first], alone[second])
            assert chosen == (first if alone[first] <= alone[second] else second)


def test_the_first_of_a_library_wins_ties_and_inside_a_node_the_ring() -> None:
    # One device a node: the hierarchy is the ring between them.
    network = Network(overridden(cluster(4), {"all_reduce": ["ring", "hierarchical"]}), IDEAL)
    assert network.best_all_reduce(1e9, Group(1, 4)) == (pytest.approx(2 * 3 / 4 * 1e9 / 22.5e9), "ring")
    assert with_library("pipelined").best_all_reduce(1e9, Group(8, 1))[1] == "ring"


def test_a_tree_is_for_small_messages_over_many_nodes() -> None:
    # NCCL's own rule: the ring's steps grow with the devices, the tree's with the logarithm of the nodes.
    network = with_library("ring", "tree", nodes=64)
    chosen = [network.best_all_reduce(volume, Group(8, 64))[1] for volume in (1e5, 1e7, 1e9, 1e11)]
    assert chosen[0] == "tree"
    assert chosen[-1] == "ring"
    assert chosen == sorted(chosen, reverse=True)
    small = [with_library("tree", nodes=m).all_reduce(1e3, Group(8, m)) for m in (4, 16, 64)]
    assert small[2] - small[1] == pytest.approx(small[1] - small[0])


def test_what_a_library_has_comes_from_a_file_and_goes_into_one(tmp_path: Path) -> None:
    asked = overridden(cluster(2), {"all_reduce": ["hierarchical", "pipelined"]})
    file = tmp_path / "mine.toml"
    file.write_text(as_toml(asked), encoding="utf-8")
    assert load(file).all_reduce == ("hierarchical", "pipelined")
    with pytest.raises(InputError, match="all_reduce"):
        overridden(cluster(2), {"all_reduce": ["star"]})


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
