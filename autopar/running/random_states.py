"""The random states of Python, numpy and torch, from which a forward or a loader may draw."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_random_states(device: torch.device | None = None) -> Iterator[None]:
    """Leaves the random states of Python, numpy and torch as they were: of the CPU, and of a GPU that is given."""
    before, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(of_numpy)


def seed_all(seed: int) -> None:
    """Begins all three anew."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
