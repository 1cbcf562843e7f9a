"""Counter-based dropout: the generator against integers, its statistics, and equality under every sharding."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from codegen.runtime import dropout as dropout_module
from codegen.runtime.dropout import dropout, dropout_key, keep_mask, random_words
from codegen.runtime.layout import Layout, whole

M = (1 << 64) - 1


def mesh(**axes: tuple[int, int]) -> SimpleNamespace:
    """Axes of given (size, rank)."""
    return SimpleNamespace(**{name: SimpleNamespace(size=n, rank=r) for name, (n, r) in axes.items()})


def split_mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & M
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
    return z ^ (z >> 31)


def word(key: int, index: int) -> int:
    """The generator in exact integers: unsigned 32 bits."""
    multiplier = split_mix(key) | 1
    y = ((index >> 1) * multiplier + split_mix(split_mix(key))) & M
    x = (y * y + y) & M
    for _ in range(2):
        x = ((x >> 32) | (x << 32)) & M
        x = (x * x + y) & M
    return x >> 32 if index & 1 else x & 0xFFFFFFFF


def test_split_mix_and_keys_against_published_values() -> None:
    # The first outputs of SplitMix64 seeded with 1234567 (rosettacode.org, "Pseudo-random numbers/Splitmix64").
    gamma = 0x9E3779B97F4A7C15
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [dropout_module.split_mix((1234567 + i * gamma) & M) for i in range(3)] == published
    keys = {dropout_key(*k) for k in itertools.product(range(20), range(50), range(20))}
    assert len(keys) == 20 * 50 * 20


@pytest.mark.parametrize("key", [0, 1, dropout_key(3, 4, 5), M])
def test_words_are_those_of_exact_integer_arithmetic(key: int) -> None:
    index = torch.tensor([0, 1, 2, 3, 17, 2**31 - 1, 2**31, 2**32 + 5, 2**40 + 1, 2**62 - 1])
    got = [int(w) & 0xFFFFFFFF for w in random_words(key, index)]
    assert got == [word(key, int(i)) for i in index]


@pytest.mark.parametrize(
    "shape",
    [(), (7,), (8,), (3, 5), (3, 6), (2, 3, 4), (1, 70000), (40000, 2), (300, 260), (0, 4), (5, 6, 7), (9, 3001)],
)
def test_the_fast_mask_equals_the_definition(shape: tuple[int, ...]) -> None:
    key, p = dropout_key(1, 2, 3), 0.3
    index = torch.arange(math.prod(shape)).view(shape)
    expected = random_words(key, index).long() >= round(p * 2**32) - 2**31
    assert torch.equal(keep_mask(p, key=key, layout=whole(shape), mesh=None, device="cpu"), expected)


LAYOUTS = [
    Layout((8, 6, 12), dp="S(0)", tp="S(2)"),
    Layout((8, 6, 12), dp="S(0)", tp="S(2/3)"),
    Layout((8, 4, 12), dp="S(1)", tp="S(1)"),
    Layout((8, 6, 24), dp="S(2)", tp="S(2/2)"),
    Layout((8, 6, 9), dp="S(1)", tp="S(0)"),
    Layout((4, 4), tp="S(1)", dp="Rp"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_ranks_part_equals_the_one_rank_run(layout: Layout) -> None:
    key = dropout_key(0, 1, 2)
    x = torch.randn(layout.global_shape)
    expected = dropout(x, 0.4, key=key, layout=whole(x.shape), mesh=None).flatten()
    for dp, tp in itertools.product(range(2), range(2)):
        here = mesh(dp=(2, dp), tp=(2, tp))
        index = layout.index(here)
        got = dropout(x.flatten()[index], 0.4, key=key, layout=layout, mesh=here)
        assert torch.equal(got, expected[index])


@pytest.mark.parametrize("columns", [10, 5])
def test_micro_batches_meet_the_masks_of_the_whole_batch(columns: int) -> None:
    key = dropout_key(0, 1, 2)
    x = torch.ones(12, 3, columns)
    expected = dropout(x, 0.5, key=key, layout=whole(x.shape), mesh=None)
    got = [
        dropout(part, 0.5, key=key, layout=whole(part.shape), mesh=None, batch_offset=3 * i)
        for i, part in enumerate(x.split(3))
    ]
    assert torch.equal(torch.cat(got), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_and_gradients_are_the_mask_times_the_scale(dtype: torch.dtype) -> None:
    p, key = 0.1, dropout_key(5, 0, 0)
    x = torch.randn(16, 32, dtype=dtype, requires_grad=True)
    out = dropout(x, p, key=key, layout=whole(x.shape), mesh=None)
    grad = torch.randn(16, 32, dtype=dtype)
    out.backward(grad)
    kept = keep_mask(p, key=key, layout=whole(x.shape), mesh=None, device="cpu").double()
    assert out.dtype == dtype and x.grad is not None and x.grad.dtype == dtype
    # Half precision: the exact product, rounded once. Else the scale is rounded too (and in float64 the reference).
    roundings = {torch.float64: 3.0, torch.float32: 2.0}.get(dtype, 1.0)
    bound = torch.finfo(dtype).eps / 2 * 1.01 * roundings
    for got, whole_value in ((out, x), (x.grad, grad)):
        exact = whole_value.detach().double() * kept / (1 - p)
        assert ((got.detach().double() - exact).abs() <= bound * exact.abs() + 1e-7 * bound).all()


def test_only_the_mask_is_saved() -> None:
    saved: list[torch.Tensor] = []
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        dropout(x, 0.1, key=1, layout=whole(x.shape), mesh=None)
    assert sum(t.numel() * t.element_size() for t in saved) == x.numel()


def test_edges() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    assert dropout(x, 0.0, key=1, layout=whole(x.shape), mesh=None) is x
    all_dropped = dropout(x, 1.0, key=1, layout=whole(x.shape), mesh=None)
    all_dropped.sum().backward()
    assert not all_dropped.any() and x.grad is not None and not x.grad.any()
    with pytest.raises(ValueError, match="between 0 and 1"):
        dropout(x, 1.5, key=1, layout=whole(x.shape), mesh=None)
    with pytest.raises(ValueError, match="shape"):
        dropout(x, 0.5, key=1, layout=whole((4, 5)), mesh=None)


# Statistics. All are normal deviates under the hypothesis of independent uniform words, and the samples are fixed, so
# a bound of 5 standard deviations over a few thousand of them (one in 1.7 million each) fails for a reason.
LIMIT = 5.0
KEYS = [
    dropout_key(seed, step, call) for seed, step, call in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (7, 10**6, 63)]
]
SIDE = 1024


def deviates(p: float, key: int) -> torch.Tensor:
    """The mask of a SIDE x SIDE tensor, scaled to mean 0 and variance 1."""
    kept = keep_mask(p, key=key, layout=whole((SIDE, SIDE)), mesh=None, device="cpu").double()
    return (kept - (1 - p)) / math.sqrt(p * (1 - p))


@pytest.mark.parametrize("p", [0.01, 0.1, 1 / 3, 0.5, 0.9])
def test_rate_of_the_whole_and_of_rows_and_columns(p: float) -> None:
    for key in KEYS:
        z = deviates(p, key)
        assert abs(z.sum().item()) / SIDE < LIMIT
        for dim in (0, 1):
            sums = z.sum(dim) / math.sqrt(SIDE)
            # A sum of squares of SIDE deviates has variance about 2 SIDE: neither streaky nor too even.
            assert abs((sums.square().sum().item() - SIDE) / math.sqrt(2 * SIDE)) < LIMIT
            assert sums.abs().max().item() < (LIMIT if p > 0.05 else 7.0)  # few events: heavier tails


def test_no_correlation_within_a_mask() -> None:
    lags = [1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 256, 512, 768, 1023, 1024, 1025, 2048, 4096, 65536]
    for key, p in itertools.product(KEYS, (0.1, 0.5)):
        z = deviates(p, key).flatten()
        for lag in lags:
            assert abs((z[lag:] * z[:-lag]).sum().item()) / math.sqrt(z.numel() - lag) < LIMIT, (p, lag)
        for first, second in [(1, 2), (1, 3), (2, 4), (64, 128), (1024, 2048)]:
            triple = z[:-second] * z[first : first - second] * z[second:]
            assert abs(triple.sum().item()) / math.sqrt(triple.numel()) < LIMIT * 1.2, (p, first, second)


def test_no_correlation_between_calls_steps_and_seeds() -> None:
    names = list(itertools.product(range(2), range(4), range(4)))
    z = torch.stack([deviates(0.1, dropout_key(*name)).flatten() for name in names])
    correlation = (z @ z.T) / SIDE
    correlation.fill_diagonal_(0.0)
    assert correlation.abs().max().item() < LIMIT
    shifted = (z[:, 2:] @ z[:, :-2].T) / SIDE
    assert shifted.abs().max().item() < LIMIT


def test_each_index_bit_flips_each_word_bit_half_of_the_time() -> None:
    size = 1 << 17
    index = torch.arange(size)
    for key in KEYS[:3]:
        words = random_words(key, index)
        for bit in [*range(0, 17), 20, 24, 31, 32, 40]:
            # Each pair (i, i ^ bit) is met twice for a bit below 17.
            pairs = size / (2 if bit < 17 else 1)
            flips = words ^ random_words(key, index ^ (1 << bit))
            for out in range(16, 32):
                rate = ((flips >> out) & 1).double().mean().item()
                assert abs(rate - 0.5) < LIMIT * 0.5 / math.sqrt(pairs), (bit, out)


def test_neighboring_words_fill_the_unit_square_evenly() -> None:
    for key in KEYS:
        words = random_words(key, torch.arange(1 << 20)).long() + 2**31
        for first, second in [(words[0::2], words[1::2]), (words[0:-2:2], words[2::2]), (words[1:-2:2], words[3::2])]:
            cells = torch.bincount((first >> 24) * 256 + (second >> 24), minlength=1 << 16).double()
            expected = first.numel() / (1 << 16)
            chi_square = ((cells - expected) ** 2 / expected).sum().item()
            assert abs(chi_square - 65535) / math.sqrt(2 * 65535) < LIMIT
