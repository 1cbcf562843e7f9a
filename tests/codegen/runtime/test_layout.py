"""`Layout.index` against slicing a whole tensor of indices by hand."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from codegen.runtime.layout import Layout, whole


def mesh(**axes: tuple[int, int]) -> SimpleNamespace:
    """Axes of given (size, rank)."""
    return SimpleNamespace(**{name: SimpleNamespace(size=n, rank=r) for name, (n, r) in axes.items()})


def indices(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


def test_unsharded_index_counts_up_and_the_batch_offset_moves_rows() -> None:
    assert torch.equal(whole((3, 4, 5)).index(None), indices(3, 4, 5))
    assert torch.equal(Layout((2, 4, 5)).index(None, batch_offset=1), indices(3, 4, 5)[1:])
    assert Layout((2, 4, 5)).offset(None, batch_offset=1) == 20
    assert torch.equal(whole(()).index(None), torch.tensor(0))
    assert whole((3, 0)).index(None).shape == (3, 0)


@pytest.mark.parametrize(("dp", "tp"), list(itertools.product(range(2), range(3))))
def test_two_axes_on_two_dims(dp: int, tp: int) -> None:
    layout = Layout((4, 6, 5), dp="S(0)", tp="S(1)")
    expected = indices(4, 6, 5)[2 * dp : 2 * dp + 2, 2 * tp : 2 * tp + 2]
    here = mesh(dp=(2, dp), tp=(3, tp))
    assert torch.equal(layout.index(here), expected)
    assert layout.offset(here) == int(expected[0, 0, 0])
    assert layout.local_shape(here) == (2, 2, 5)


@pytest.mark.parametrize("rank", range(2))
def test_sections_take_a_part_of_each(rank: int) -> None:
    expected = torch.cat([section.chunk(2, -1)[rank] for section in indices(3, 12).chunk(3, -1)], -1)
    assert torch.equal(Layout((3, 12), tp="S(1/3)").index(mesh(tp=(2, rank))), expected)


@pytest.mark.parametrize(("dp", "tp"), list(itertools.product(range(2), range(2))))
def test_two_axes_on_one_dim_major_first(dp: int, tp: int) -> None:
    expected = indices(8, 3).chunk(2)[dp].chunk(2)[tp]
    assert torch.equal(Layout((8, 3), dp="S(0)", tp="S(0)").index(mesh(dp=(2, dp), tp=(2, tp))), expected)


@pytest.mark.parametrize(("dp", "tp"), list(itertools.product(range(2), range(2))))
def test_coarse_and_fine_sections_of_one_dim_form_a_grid(dp: int, tp: int) -> None:
    # 8 = (4, 2): dp halves the 4, tp the 2, whichever is named first.
    expected = indices(4, 2).chunk(2, 0)[dp].chunk(2, 1)[tp].flatten()
    here = mesh(dp=(2, dp), tp=(2, tp))
    assert torch.equal(Layout((8,), dp="S(0)", tp="S(0/4)").index(here), expected)
    assert torch.equal(Layout((8,), tp="S(0/4)", dp="S(0)").index(here), expected)
    assert Layout((8,), dp="S(0)", tp="S(0/4)").local_shape(here) == (2,)


def test_the_ranks_parts_cover_the_whole_once() -> None:
    layout = Layout((4, 6, 8), dp="S(0)", cp="S(1)", tp="S(2/2)")
    parts = [
        layout.index(mesh(dp=(2, a), cp=(3, b), tp=(2, c))).flatten()
        for a, b, c in itertools.product(range(2), range(3), range(2))
    ]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(4 * 6 * 8))


GRIDS = {  # layout on two ranks -> whether its flat local indices are pairs
    Layout((6, 8), tp="S(1)"): True,
    Layout((6, 12), tp="S(1/3)"): True,
    Layout((6, 6), tp="S(1)"): False,
    Layout((2, 12), tp="S(1/2)"): False,
    Layout((6, 7), tp="S(0)"): False,
    Layout((4, 7), tp="S(0)"): True,
    Layout((5, 6, 7)): True,
    Layout((2, 4, 5, 5), tp="S(1)"): True,
    Layout((4, 2, 5, 5), tp="S(1)"): False,
    Layout((3, 5, 7)): False,
    Layout((8,), tp="S(0)"): True,
    Layout((5,)): False,
}


@pytest.mark.parametrize("layout", GRIDS, ids=str)
def test_the_grid_is_the_index_and_knows_its_pairs(layout: Layout) -> None:
    for rank in range(2):
        here = mesh(tp=(2, rank))
        grid = layout.grid(here, "cpu")
        index = layout.index(here)
        # The index again, by slicing: coordinates of every dim of the whole tensor of indices.
        expected = indices(*layout.global_shape)
        for dim in range(expected.dim()):
            expected = expected.index_select(dim, layout.coordinates(dim, here))
        assert torch.equal(index, expected)
        assert torch.equal((grid.rows[:, None] + grid.columns).flatten(), index.flatten())
        assert grid.paired == GRIDS[layout]
        if grid.paired:
            pairs = (grid.rows[:, None] + grid.columns).view(-1, 2)
            assert ((pairs[:, 0] % 2 == 0) & (pairs[:, 1] == pairs[:, 0] + 1)).all()
            assert grid.columns.numel() % 2 == 0


def test_print_form_and_errors() -> None:
    layout = Layout((4, 6), dp="S(0)", cp="R", tp="S(1/3)")
    assert repr(layout) == 'Layout((4, 6), dp="S(0)", tp="S(1/3)")'
    assert eval(repr(layout)) == layout
    with pytest.raises(ValueError, match="does not fit"):
        Layout((4, 6), tp="S(2)")
    with pytest.raises(ValueError, match="must be R"):
        Layout((4, 6), tp="P")
    with pytest.raises(ValueError, match="divide"):
        Layout((4, 6), tp="S(1)").local_shape(mesh(tp=(4, 0)))
    with pytest.raises(ValueError, match="divide"):
        Layout((4, 6), tp="S(1/4)").index(mesh(tp=(2, 0)))


def test_a_dry_run_with_fake_tensors_leaves_nothing_behind() -> None:
    layout = Layout((4, 6))
    with FakeTensorMode():
        assert layout.index(None).shape == (4, 6)
    assert torch.equal(layout.index(None), indices(4, 6))
    with FakeTensorMode():
        assert layout.index(None).shape == (4, 6)
