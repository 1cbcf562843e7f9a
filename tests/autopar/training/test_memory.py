"""The peak of a rank's memory is that of where it trains."""

from __future__ import annotations

import pytest
import torch

from autopar.training.measuring import Memory


def test_on_cpus_beside_gpus_tensors_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with Memory(is_wanted=True, on_cpu=True) as memory:
        kept = torch.ones(1 << 20) + 1
        memory.after_step(1)
    assert memory.peak_bytes is not None and memory.peak_bytes >= kept.nbytes
