"""Building a program leaves a loop's loader as it was: runs shuffle as on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from autopar.frameworks.building import first_step
from autopar.training.loaders import peeking


class Together:
    """Several loaders as one, as Lightning's are given."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __iter__(self) -> Any:
        return zip(*self.parts, strict=True)


def of_loader() -> Any:
    load: Any = DataLoader
    return load(range(12), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))


def of_sampler() -> Any:
    sampler: Any = RandomSampler(range(12), generator=torch.Generator().manual_seed(2))
    load: Any = DataLoader
    return load(range(12), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


def order(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("make", [of_loader, of_sampler])
def test_the_loaders_own_generators_are_as_they_were(make: Any) -> None:
    expected = order(make())
    seen = make()
    assert torch.as_tensor(first_step(seen, 1)).flatten().tolist() == expected[0]
    assert order(seen) == expected
    seen, other = make(), make()
    first_step(Together(seen, other), 1)
    assert order(seen) == order(other) == expected
    seen = make()
    with peeking(seen):
        assert next(iter(seen)).tolist() == expected[0]
    assert order(seen) == expected
