"""What kinds of exchange take: term by term, against published kernels, and which one is the fastest."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cluster import as_cluster
from autopar.costs.evaluate import _hide
from autopar.costs.expert_exchange import Mixture, parts_of_token
from autopar.costs.layer_costs import HIDDEN, LayerCost
from cost_models import collective
from cost_models.catalog import device
from cost_models.dispatch import dispatch, dispatches
from cost_models.hardware import Link
from cost_models.machine import Cluster

NVLINK, NETWORK = (Link(name, rate, 0.0, "bytes alone") for name, rate in (("in", 400e9), ("out", 50e9)))
TWO_NODES = Cluster(device("h100-sxm"), 2, 2, NVLINK, NETWORK)
MIXTURE = Mixture(collective.Group(4, 1), num_experts=8, choices=2, tokens=3000.0, row_bytes=1000.0)


def test_seconds_of_each_kind_term_by_term() -> None:
    """Two choices of eight experts, two on each of four ranks on two nodes: on 11/7 nodes and 13/7 ranks."""
    sent, memory = 3000 * 1000, TWO_NODES.device
    memory_rate = memory.memory_bytes_per_second * memory.memory_efficiency
    nodes, ranks = 11 / 7, 13 / 7
    assert parts_of_token(2, 8, 2) == pytest.approx(nodes) and parts_of_token(4, 8, 2) == pytest.approx(ranks)
    found = {name: MIXTURE.seconds(kind, TWO_NODES) for name, kind in dispatches().items()}
    sort = 2 * sent / memory_rate
    across, inside = nodes * sent / 2 / 50e9, sent / 2 / 400e9
    expected = {
        "all_to_all": 2 * sent / 2 / 50e9 + 2 * sort,
        "once_per_node": across + 2 * inside + (2 + 2 * nodes) * sort,
        "deep_ep": math.hypot(across, ranks * inside) + ranks * sort,
        "hybrid_ep": math.hypot(across, ranks * inside),
        "hybrid_ep_overlapped": math.hypot(across, ranks * inside),
        "all_gathered": 3 * sent / 2 / 50e9,  # a ring that leaves each node by two interfaces
    }
    assert found == pytest.approx(expected, rel=0.03)  # but for chance, by which one node gets a bit more


@pytest.mark.parametrize(
    ("spec", "ranks", "measured"),
    [
        # deepseek-ai/DeepEP, docs/README_Hybrid-EP.md, torch API in bf16 with 16 SMs: bytes of all nodes (ranks, within
        # one) that a token goes to, of 4,096 tokens of 7,168 features with 8 choices, by dispatch and combine in GB/s.
        ("2x8 h100-sxm", 16, (54.47, 53.35)),
        ("4x8 h100-sxm", 32, (47.36, 52.53)),
        ("8x8 h100-sxm", 64, (41.24, 46.57)),
        ("8 b200", 8, (535.94, 530.86)),
    ],
)
def test_published_kernels_take_as_long_as_predicted(spec: str, ranks: int, measured: tuple[float, float]) -> None:
    """Links and memory are the catalogue's; only the power of both kinds of links together was read off these."""
    cluster = as_cluster(spec)
    mixture = Mixture(collective.Group(ranks, 1), 8 * ranks, 8, 4096.0, 7168 * 2.0)
    parts = cluster.num_nodes if cluster.num_nodes > 1 else ranks
    moved = 4096 * 7168 * 2 * parts_of_token(parts, 8 * ranks, 8)
    mean = sum(moved / rate / 1e9 for rate in measured) / 2
    assert mixture.seconds(dispatch("deep_ep"), cluster) == pytest.approx(mean, rel=0.12)


def test_the_fastest_kind_depends_on_nodes_and_choices() -> None:
    qwen = Mixture(collective.Group(16, 1), 128, 8)
    two, one = as_cluster("2x8 h100-sxm"), as_cluster("8 h100-sxm")
    programs = ("all_to_all", "once_per_node")
    assert qwen.fastest(programs, two).name == "once_per_node"
    assert qwen.fastest(dispatches(), two).name == "hybrid_ep_overlapped"
    assert replace(qwen, group=collective.Group(8, 1)).fastest(programs, one).name == "all_to_all"
    assert replace(qwen, choices=1).fastest(programs, two).name == "all_to_all"


def test_two_exchanges_hide_behind_one_computation() -> None:
    """Each of the two would hide 4 s, but the unit computes 5 s. An exchange alone hides its whole share."""
    alone = LayerCost(forward={"a": 8.0, "matmul": 5.0, HIDDEN: 0.0}, backward={"a": 0.0, HIDDEN: 0.0})
    both = LayerCost(
        forward={"a": 8.0, "b": 2.0, "matmul": 5.0, HIDDEN: 0.0}, backward={"a": 0.0, "b": 6.0, HIDDEN: 0.0}
    )
    _hide(alone, {"a": 0.5})
    _hide(both, {"a": 0.5, "b": 0.5})
    assert alone.forward == {"a": 4.0, "matmul": 5.0, HIDDEN: 4.0}
    assert both.forward[HIDDEN] + both.backward[HIDDEN] == pytest.approx(5.0)
    assert both.forward_seconds + both.backward_seconds == pytest.approx(16.0)
