"""A link's factors per kind of collective: what they multiply, and that they survive TOML."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.catalog import link
from cost_models.collective import Group, seconds
from cost_models.hardware import COLLECTIVES, Link
from cost_models.machine import Cluster

PLAIN = Link("plain", bytes_per_second=1e9, latency_seconds=1e-3, startup_seconds=2e-3, source="test")


def joined(between: Link, num_nodes: int = 1) -> Cluster:
    return replace(Cluster.parse(f"{num_nodes}x{4 // num_nodes} cpu"), intra_node=between, inter_node=between)


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_the_closed_form_of_a_ring_with_factors(num_nodes: int) -> None:
    """Startup 2 ms and 3 hops of 1 ms doubled; 3/4 of 4 MB at half of 1 GB/s."""
    slower = replace(PLAIN, latency_factors={"all_gather": 2.0}, rate_factors={"all_gather": 0.5})
    expected = 2 * (2e-3 + 3 * 1e-3) + 3e6 / 0.5e9
    assert seconds("all_gather", 4e6, Group(4, 1), joined(slower, num_nodes)) == pytest.approx(expected)


@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_doubling_every_cost_of_one_kind_doubles_its_time_alone(kind: str, num_nodes: int) -> None:
    slower = joined(replace(PLAIN, latency_factors={kind: 2.0}, rate_factors={kind: 0.5}), num_nodes)
    for other in COLLECTIVES:
        plain = seconds(other, 1e6, Group(4, 1), joined(PLAIN, num_nodes))
        factor = 2.0 if other == kind else 1.0
        assert seconds(other, 1e6, Group(4, 1), slower) == pytest.approx(factor * plain)


def test_factors_survive_toml_and_make_another_link() -> None:
    cluster = joined(replace(link("loopback"), latency_factors={"all_to_all": 0.25}, rate_factors={"p2p": 1.5}))
    back = Cluster.from_toml_text(cluster.to_toml())
    assert back == cluster
    assert back.intra_node.latency_factors == {"all_to_all": 0.25}
    assert back.intra_node != link("loopback")


@pytest.mark.parametrize("field", ["latency_factors", "rate_factors"])
def test_factors_must_be_positive_and_of_known_kinds(field: str) -> None:
    with pytest.raises(ValueError, match=rf"link plain: {field}\.all_reduce must be positive"):
        replace(PLAIN, **{field: {"all_reduce": 0.0}})
    with pytest.raises(ValueError, match=r"unknown collectives \['allreduce'\]; known: all_reduce"):
        replace(PLAIN, **{field: {"allreduce": 2.0}})
