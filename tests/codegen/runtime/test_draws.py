"""Counter-based draws: the generator against integers, distributions, and equality under every sharding."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from codegen.runtime import dropout as dropout_module
from codegen.runtime.draws import DISTRIBUTIONS, draw
from codegen.runtime.dropout import dropout_key, split_mix
from codegen.runtime.layout import Layout, whole

M = (1 << 64) - 1
COUNT = 1 << 15
KS_LIMIT = 1.95
"""Of the largest distance of distribution functions times the root of the count: exceeded once in 1,000 samples."""


def of(distribution: str, shape: tuple[int, ...] = (COUNT,), key: int = 5, **others: object) -> Tensor:
    return draw(distribution, key=key, layout=whole(shape), mesh=None, device="cpu", **others)  # type: ignore[arg-type]


def bits(key: int, index: int) -> int:
    """The generator in exact integers: unsigned 64 bits."""
    multiplier = split_mix(key) | 1
    y = (index * multiplier + split_mix(split_mix(key))) & M
    x = (y * y + y) & M
    for _ in range(2):
        x = ((x >> 32) | (x << 32)) & M
        x = (x * x + y) & M
    return x


def distance(sample: Tensor, function: object) -> float:
    """The Kolmogorov-Smirnov statistic times the root of the count."""
    values = sample.double().flatten().sort().values
    expected, count = function(values), len(values)  # type: ignore[operator]
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return float(torch.maximum(steps[1:] - expected, expected - steps[:-1]).max()) * math.sqrt(count)


def test_numbers_are_those_of_the_generator_in_exact_integers() -> None:
    expected = [bits(dropout_key(1, 2, 3), i) for i in range(12)]
    key = dropout_key(1, 2, 3)
    assert of("uniform", (3, 4), key).flatten().tolist() == [(x >> 40) / 2**24 for x in expected]
    drawn = of("integers", (12,), key, low=-7, high=93, dtype=torch.int64)
    assert drawn.tolist() == [((x >> 32) * 100 >> 32) - 7 for x in expected]
    inside = [((x >> 40) | 1) / 2**24 for x in expected]
    torch.testing.assert_close(of("exponential", (12,), key), torch.tensor([-math.log(u) for u in inside]))
    angles = [2 * math.pi * ((x >> 8) & 0xFFFFFF) / 2**24 for x in expected]
    normal = [math.sqrt(-2 * math.log(u)) * math.cos(a) for u, a in zip(inside, angles, strict=True)]
    torch.testing.assert_close(of("normal", (12,), key), torch.tensor(normal), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("distribution", "function", "moments"),
    [
        ("uniform", lambda x: x, (1 / 2, 1 / 3, 1 / 4, 1 / 5)),
        ("normal", torch.special.ndtr, (0, 1, 0, 3)),
        ("exponential", lambda x: -torch.expm1(-x), (1, 2, 6, 24)),
    ],
)
def test_continuous_distributions(distribution: str, function: object, moments: tuple[float, ...]) -> None:
    for key in (1, dropout_key(0, 0, 0)):
        sample = of(distribution, key=key).double()
        assert distance(sample, function) < KS_LIMIT
        for power, moment in enumerate(moments, 1):
            error = sample.pow(power).std() / math.sqrt(COUNT)
            assert abs(float(sample.pow(power).mean()) - moment) < 4 * error


def test_the_statistic_finds_what_is_no_such_distribution() -> None:
    assert distance(of("normal") * 1.02 + 0.02, torch.special.ndtr) > KS_LIMIT
    assert distance(of("uniform") ** 1.03, lambda x: x) > KS_LIMIT


def test_counted_distributions() -> None:
    for p in (0.0, 0.1, 0.5, 0.93, 1.0):
        kept = of("bernoulli", p=p)
        assert set(kept.unique().tolist()) <= {0.0, 1.0}
        assert abs(float(kept.mean()) - p) <= 4 * math.sqrt(p * (1 - p) / COUNT)
    counts = of("integers", low=0, high=10, dtype=torch.int64).bincount(minlength=10).double()
    assert float(((counts - COUNT / 10) ** 2 / (COUNT / 10)).sum()) < 27.9  # chi-square, 9 degrees: 1 in 1,000
    wide = of("integers", low=0, high=1 << 62, dtype=torch.int64)
    assert len(wide.unique()) == COUNT
    assert distance(wide.double() / 2**62, lambda x: x) < KS_LIMIT


def test_neighbors_and_calls_are_independent() -> None:
    samples = [of("normal", key=dropout_key(0, step, call)) for step, call in ((0, 0), (0, 1), (1, 0))]
    pairs = [(samples[0][:-k], samples[0][k:]) for k in (1, 2, 64)] + list(itertools.combinations(samples, 2))
    for one, other in pairs:
        assert abs(float((one * other).mean())) < 4 / math.sqrt(len(one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_ranges_hold_in_every_dtype(dtype: torch.dtype) -> None:
    uniform = of("uniform", dtype=dtype)
    assert uniform.dtype == dtype and float(uniform.min()) >= 0 and float(uniform.max()) < 1
    exponential = of("exponential", dtype=dtype)
    assert float(exponential.min()) > 0 and bool(exponential.isfinite().all())
    assert bool(of("normal", dtype=dtype).isfinite().all())


def test_a_model_in_fp64_draws_the_same_numbers() -> None:
    for distribution in ("uniform", "normal", "exponential", "bernoulli"):
        assert torch.equal(of(distribution).double(), of(distribution, dtype=torch.float64))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    "layout",
    [
        Layout((4, 6, 5), dp="S(0)"),
        Layout((4, 6, 5), dp="S(1)", tp="S(1)"),
        Layout((4, 12, 3), dp="S(0)", tp="S(1/2)"),
        Layout((8,), dp="S(0)", tp="S(0)"),
    ],
)
def test_parts_are_parts_of_the_whole(distribution: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {name: 3 if layout.global_shape[dim] % 6 == 0 and name == "tp" else 2 for name, dim, _ in layout.shards}
    expected = of(distribution, layout.global_shape)
    for chunk in (1 << 15, 2):  # the numbers do not depend on how they are computed
        monkeypatch.setattr(dropout_module, "_PAIRS_PER_CHUNK_CPU", chunk)
        for ranks in itertools.product(*map(range, sizes.values())):
            axes = zip(sizes.items(), ranks, strict=True)
            mesh = SimpleNamespace(**{name: SimpleNamespace(size=n, rank=r) for (name, n), r in axes})
            part = draw(distribution, key=5, layout=layout, mesh=mesh, device="cpu")
            assert torch.equal(part.flatten(), expected.flatten()[layout.index(mesh).flatten()])


def test_micro_batches_are_rows_of_the_whole_batch() -> None:
    expected = of("normal", (6, 3))
    parts = [
        draw("normal", key=5, layout=whole((2, 3)), mesh=None, device="cpu", batch_offset=2 * index)
        for index in range(3)
    ]
    assert torch.equal(torch.cat(parts), expected)


def test_empty_and_single_draws() -> None:
    assert of("normal", (0, 3)).shape == (0, 3)
    assert of("uniform", ()).shape == ()
    with pytest.raises(ValueError, match="'gamma' is none of the distributions"):
        of("gamma")
