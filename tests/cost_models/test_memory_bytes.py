"""Bytes of the named precisions, and what no tensor can use."""

from __future__ import annotations

import pytest

from cost_models import catalog, memory


def test_bytes_per_parameter_of_the_named_precisions() -> None:
    """Weights, gradients, master: Rajbhandari et al. count 2 + 2 + 12 with Adam; our gradients are summed in fp32."""
    widths = {name: (p.compute_bytes, p.gradient_bytes, p.master_bytes) for name, p in memory.PRECISIONS.items()}
    assert widths == {"fp32": (4, 4, 0), "bf16": (2, 4, 4), "fp16": (2, 4, 4)}
    with pytest.raises(ValueError, match="unknown precision 'fp8'; known: fp32, bf16, fp16"):
        memory.precision("fp8")


def test_the_workspace_of_every_gpu_is_of_the_usual_size() -> None:
    """The workspace is what an empty process shows in nvidia-smi plus NCCL: between 0.3 and 3 GiB on GPUs."""
    for name, device in catalog.devices().items():
        if name != "cpu":
            assert 0.3 * 2**30 <= device.reserved_bytes <= 3 * 2**30 < device.memory_bytes
