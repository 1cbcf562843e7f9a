"""Dropout-add kernel in Triton's interpreter: bit for bit the runtime's dropout and an addition.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from codegen.kernels import dropout_add as module
from codegen.kernels.dropout_add import dropout_add
from codegen.kernels.tile import Tile
from codegen.runtime.dropout import constants, dropout, dropout_key, random_words
from codegen.runtime.layout import Layout, whole

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_bf16")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEY = dropout_key(3, 4, 5)


def mesh(**ranks):
    """Axes of two ranks each."""
    return SimpleNamespace(**{name: SimpleNamespace(size=2, rank=rank) for name, rank in ranks.items()})


def check_bits(x, residual, dy, p, layout, here=None, key=KEY, batch_offset=0):
    """y and both gradients are those of the runtime's dropout and an addition."""
    ours_in, theirs_in = ([t.detach().requires_grad_() for t in (x, residual)] for _ in range(2))
    grid, row_offset = layout.grid(here, "cpu"), layout.row_offset(batch_offset)
    ours = dropout_add(*ours_in, p, key=key, grid=grid, row_offset=row_offset)
    assert type(ours.grad_fn).__name__ == "_DropoutAddBackward", "the reference ran, not the kernel"
    dropped = dropout(theirs_in[0], p, key=key, layout=layout, mesh=here, batch_offset=batch_offset)
    theirs = dropped + theirs_in[1]
    grads, grads_theirs = torch.autograd.grad(ours, ours_in, dy), torch.autograd.grad(theirs, theirs_in, dy)
    reference = module.dropout_add_reference(*ours_in, p, key=key, grid=grid, row_offset=row_offset)
    grads_reference = torch.autograd.grad(reference, ours_in, dy)
    for actual in ((ours, *grads), (reference, *grads_reference)):
        for a, w in zip(actual, (theirs, *grads_theirs), strict=True):
            assert a.dtype == x.dtype
            torch.testing.assert_close(a, w, rtol=0, atol=0)
    share = (dropped == 0).float().mean()
    assert x.numel() < 100 or abs(share - p) < 0.2, "nothing to see in a mask that keeps or drops nearly all"


@pytest.fixture
def small_tiles(monkeypatch):
    """Several blocks to a row, several rows to a tile where rows are short."""
    monkeypatch.setattr(module, "TILES", (Tile(16, least=16),))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (3, 6), (5, 6, 7), (2, 3, 130)])
def test_is_dropout_and_an_addition(shape, dtype):
    """Sizes that pair and sizes that do not."""
    torch.manual_seed(0)
    check_bits(*(torch.randn(shape).to(dtype) for _ in range(3)), 0.3, whole(shape))


@pytest.mark.parametrize("shape", [(3, 5), (3, 6)])
def test_a_key_on_the_device_gives_the_same_masks(shape):
    torch.manual_seed(0)
    check_bits(*torch.randn(3, *shape), 0.3, whole(shape), key=torch.tensor(constants(KEY)))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [(5, 38), (5, 37), (11, 6), (3, 37, 2)])
def test_several_blocks(shape):
    torch.manual_seed(1)
    check_bits(*torch.randn(3, *shape), 0.5, whole(shape))


@pytest.mark.parametrize(
    "layout",
    [
        Layout((4, 6, 12), dp="S(0)", tp="S(2)"),
        Layout((4, 6, 12), dp="S(0)", tp="S(2/3)"),
        Layout((4, 4, 12), dp="S(1)", tp="S(1)"),
        Layout((4, 6, 9), dp="S(1)", tp="S(0)"),
        Layout((4, 4, 6), tp="S(2)", dp="Rp"),
    ],
    ids=str,
)
def test_every_ranks_part(layout):
    """Where parts of odd width do not pair, too."""
    torch.manual_seed(2)
    for dp, tp in itertools.product(range(2), range(2)):
        here = mesh(dp=dp, tp=tp)
        check_bits(*torch.randn(3, *layout.local_shape(here)), 0.4, layout, here)


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4)])
@pytest.mark.parametrize("batch_offset", [1, 2, 1 << 40])
def test_later_micro_batches(shape, batch_offset):
    """Indices beyond 2 ** 32; an odd offset parts the pairs."""
    torch.manual_seed(3)
    check_bits(*torch.randn(3, *shape), 0.4, whole(shape), batch_offset=batch_offset)


@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 1, dropout_key(0, 0, 0), dropout_key(-1, 7, 3)])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.9, 1 - 1e-9])
def test_keys_and_probabilities(key, p):
    torch.manual_seed(4)
    x, residual = torch.randn(2, 6, 10)
    layout = whole(x.shape)
    wanted = dropout(x, p, key=key, layout=layout, mesh=None) + residual
    actual = dropout_add(x, residual, p, key=key, grid=layout.grid(None, "cpu"))
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0)


def test_mask_is_the_definitions():
    x = torch.ones(40, 50)
    y = dropout_add(x, torch.zeros_like(x), 0.25, key=KEY, grid=whole(x.shape).grid(None, "cpu"))
    words = random_words(KEY, torch.arange(2000).view(40, 50))
    assert torch.equal(y != 0, words >= round(0.25 * 2**32) - 2**31)
    assert abs((y == 0).float().mean() - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_nothing_and_everything_dropped(p):
    x, residual = torch.randn(2, 3, 4)
    layout = whole((3, 4))
    wanted = dropout(x, p, key=KEY, layout=layout, mesh=None) + residual
    assert torch.equal(dropout_add(x, residual, p, key=KEY, grid=layout.grid(None, "cpu")), wanted)


def test_strided_inputs_surrounded_by_nan():
    """A read outside the given elements would turn the result into nan."""
    torch.manual_seed(5)
    buffer = torch.full((3, 8, 30), float("nan"))
    buffer[:, ::2, 4:-4] = torch.randn(3, 4, 22)
    check_bits(*buffer[:, ::2, 4:-4], 0.3, whole((4, 22)))
    # No unit stride, a residual of zero strides, and a gradient as `sum().backward()` makes it.
    one = torch.ones(()).expand(4, 22)
    check_bits(torch.randn(22, 4).t(), torch.randn(22).expand(4, 22), one, 0.3, whole((4, 22)))


def test_what_is_not_finite_and_dropped_is_gone():
    x = torch.full((8, 8), float("nan"))
    x[:, 4:] = float("inf")
    y = dropout_add(x, torch.ones(8, 8), 0.5, key=KEY, grid=whole((8, 8)).grid(None, "cpu"))
    kept = random_words(KEY, torch.arange(64).view(8, 8)) >= 0
    torch.testing.assert_close(y, torch.where(kept, x, 1.0), equal_nan=True, rtol=0, atol=0)
    assert 0 < kept.sum() < 64


def test_rounds_between_dropout_and_addition():
    """bf16 and fp16: one rounding at the end would give something else."""
    torch.manual_seed(6)
    layout = whole((16, 16))
    for dtype in (torch.bfloat16, torch.float16):
        x, residual = torch.randn(2, 16, 16).to(dtype)
        y = dropout_add(x, residual, 0.3, key=KEY, grid=layout.grid(None, "cpu"))
        wide = dropout(x.float(), 0.3, key=KEY, layout=layout, mesh=None) + residual.float()
        assert (y != wide.to(dtype)).any()


def test_only_one_gradient_wanted_and_nothing_saved():
    saved = []
    x, residual = torch.randn(2, 4, 6)
    grid = whole((4, 6)).grid(None, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        y = dropout_add(x.requires_grad_(), residual, 0.5, key=KEY, grid=grid)
        z = dropout_add(x.detach(), residual.requires_grad_(), 0.5, key=KEY, grid=grid)
    assert not saved
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert set(dx.unique().tolist()) == {0.0, 2.0}
    (dresidual,) = torch.autograd.grad(z.sum(), residual)
    assert torch.equal(dresidual, torch.ones(4, 6))


def test_empty_and_wrong_arguments():
    empty = torch.zeros(0, 4)
    assert dropout_add(empty, empty, 0.5, key=KEY, grid=whole((0, 4)).grid(None, "cpu")).shape == (0, 4)
    x, grid = torch.zeros(3, 4), whole((3, 4)).grid(None, "cpu")
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout_add(x, x, 1.5, key=KEY, grid=grid)
    with pytest.raises(ValueError, match="agree in shape and dtype"):
        dropout_add(x, x.half(), 0.5, key=KEY, grid=grid)
    with pytest.raises(ValueError, match="3 rows of 4 elements"):
        dropout_add(x[:2], x[:2], 0.5, key=KEY, grid=grid)
