"""What is measured: names that tell cases apart, groups of a topology, and work that is what the calls really do."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.profiling.cases import Case, Level, Topology, cases
from autopar.profiling.collectives import group_members
from autopar.profiling.kernels import kernel


@pytest.mark.parametrize("level", ["brief", "quick", "full"])
@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(1, 4), Topology(2, 8, on_gpu=True)])
def test_every_case_has_a_name_of_its_own_and_survives_json(topology: Topology, level: Level) -> None:
    found = cases(topology, level)
    assert len({case.name for case in found}) == len(found)
    assert [Case.from_json(case.to_json()) for case in found] == found


@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        (Topology(1, 1), ()),
        (Topology(1, 2), ((2, 1),)),
        (Topology(1, 4), ((2, 1), (4, 1))),
        (Topology(1, 6), ((2, 1), (6, 1))),
        (Topology(2, 8), ((2, 1), (4, 1), (8, 1), (2, 8), (16, 1))),
        (Topology(3, 1), ((3, 1),)),
    ],
)
def test_groups_lie_inside_nodes_and_across_them(topology: Topology, groups: tuple[tuple[int, int], ...]) -> None:
    assert topology.groups("full") == groups
    for size, stride in groups:
        members = group_members(size, stride, topology.num_devices)
        assert sorted(rank for group in members for rank in group) == list(range(topology.num_devices))
        assert all(len(group) == size for group in members)


def test_strided_groups_are_one_device_of_every_node() -> None:
    assert group_members(2, 4, 8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert group_members(2, 2, 8) == [[0, 2], [1, 3], [4, 6], [5, 7]]


SMALL = [case for case in cases(Topology(1, 1), "full") if case.work and case.work.num_bytes < 2**23]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_work_of_a_kernel_is_what_its_call_does(case: Case) -> None:
    """Matmuls against torch's own count; memory-bound kernels and updates only run."""
    assert case.work is not None
    call = kernel(case, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        call()
    if case.family == "matmul":
        assert counter.get_total_flops() == case.work.flops
        assert case.work.flops == 2 * math.prod(case.work.shape)
    else:
        assert case.work.flops == 0 or case.family == "attention"


def test_backward_of_attention_counts_five_products_to_two() -> None:
    by_name = {case.name: case.work for case in cases(Topology(1, 1), "full") if case.family == "attention"}
    forward, backward = by_name["attention 1x4x256x64"], by_name["attention 1x4x256x64 backward"]
    assert forward is not None and backward is not None
    assert forward.flops == 4 * 1 * 4 * 256 * 256 * 64
    assert backward.flops == 2.5 * forward.flops
