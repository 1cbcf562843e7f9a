"""Placements and meshes: print forms that parse back, and invariants. Their arithmetic is in test_reshard.py."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir.mesh import AXIS_NAMES, Mesh
from autopar.ir.placement import P, Placement, R, Rp, S, divides, local_shape

PLACEMENTS = st.one_of(st.sampled_from([R, Rp, P]), st.builds(S, st.integers(0, 9), st.integers(1, 12)))


@given(PLACEMENTS)
def test_placement_prints_and_parses(placement: Placement) -> None:
    assert Placement.parse(str(placement)) == placement
    assert placement.is_shard + placement.is_replicated + (placement == P) == 1


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(0/0)", "r", "R p", "S(0)/2", "S(1,2)"])
def test_other_text_is_no_placement(text: str) -> None:
    with pytest.raises(ValueError):
        Placement.parse(text)


@pytest.mark.parametrize("arguments", [("S",), ("S", -1), ("S", 0, 0), ("R", 0), ("P", -1, 2), ("Q",)])
def test_meaningless_placements_are_refused(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError):
        Placement(*arguments)  # type: ignore[arg-type]


def test_sections_of_a_fused_qkv() -> None:
    """Three heads-by-width blocks of 8: thirds of the dim over 4 ranks, which 24 / 4 alone would not respect."""
    assert divides((24, 5), (S(0, 3),), (4,)) and local_shape((24, 5), (S(0, 3),), (4,)) == (6, 5)
    assert not divides((24, 5), (S(0, 5),), (4,))
    assert not divides((24, 5), (S(0, 12),), (4,))
    assert not divides((24, 5), (S(1),), (4,))


@pytest.mark.parametrize("placements", [(S(2),), (S(1),)])
def test_local_shape_refuses_what_does_not_divide(placements: tuple[Placement, ...]) -> None:
    with pytest.raises(ValueError, match="does not divide"):
        local_shape((8, 6), placements, (4,))


@given(st.permutations(AXIS_NAMES), st.lists(st.integers(2, 5), max_size=5))
def test_mesh_prints_parses_and_numbers_ranks(names: list[str], sizes: list[int]) -> None:
    mesh = Mesh(tuple(names[: len(sizes)]), tuple(sizes))
    assert Mesh.parse(str(mesh)) == mesh
    expected = list(itertools.product(*(range(n) for n in sizes)))  # row-major: the last axis joins neighbors
    assert mesh.num_ranks == len(expected)
    assert [tuple(mesh.coordinate(rank).values()) for rank in range(mesh.num_ranks)] == expected
    for axis in mesh.axes:
        group = [r for r in range(mesh.num_ranks) if all(v == 0 for a, v in mesh.coordinate(r).items() if a != axis)]
        assert group == [i * mesh.stride(axis) for i in range(mesh.size(axis))]


@given(PLACEMENTS)
def test_equal_placements_are_one_object(placement: Placement) -> None:
    made_again = (
        Placement.parse(str(placement)),
        pickle.loads(pickle.dumps(placement)),
        copy.deepcopy(placement),
        dataclasses.replace(placement),
    )
    assert all(other is placement for other in made_again)


def test_mesh_text() -> None:
    assert str(Mesh(("dp", "tp"), (2, 4))) == "dp2 x tp4"
    assert Mesh.parse("dp1 x tp4") == Mesh(("tp",), (4,))
    assert Mesh.parse("single") == Mesh((), ()) and Mesh((), ()).num_ranks == 1
    assert Mesh(("tp",), (4,)).size("dp") == 1


@pytest.mark.parametrize("text", ["", "dp", "2dp", "dp2 tp4", "dp2 x", "dp2 x dp3"])
def test_other_text_is_no_mesh(text: str) -> None:
    with pytest.raises(ValueError):
        Mesh.parse(text)


@pytest.mark.parametrize(("axes", "sizes"), [(("dp",), (2, 2)), (("dp", "dp"), (2, 2)), (("tp",), (0,))])
def test_meshes_with_wrong_axes_are_refused(axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        Mesh(axes, sizes)
