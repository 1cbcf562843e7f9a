"""Bytes per device: the ZeRO paper's table, and what no tensor can use."""

from __future__ import annotations

import pytest

from cost_models import catalog, memory
from cost_models.memory import Precision


def state_bytes(num_parameters: float, precision: Precision, degrees: tuple[int, int, int]) -> float:
    """Model states with (weights, gradients, optimiser) sharded over `degrees` devices, AdamW."""
    weights, gradients, optimizer = degrees
    return (
        num_parameters * precision.compute_bytes / weights
        + memory.gradient_bytes(num_parameters, precision, gradients)
        + memory.optimizer_bytes(num_parameters, memory.optimizer("adamw"), precision, optimizer)
    )


@pytest.mark.parametrize(
    ("degrees", "gigabytes"), [((1, 1, 1), 120), ((1, 1, 64), 31.4), ((1, 64, 64), 16.6), ((64, 64, 64), 1.88)]
)
def test_figure_1_of_the_zero_paper(degrees: tuple[int, int, int], gigabytes: float) -> None:
    """7.5 billion parameters on 64 devices with 2-byte gradients: Rajbhandari et al. (2020), figure 1."""
    paper = Precision("paper", compute_bytes=2, gradient_bytes=2, master_bytes=4)
    assert state_bytes(7.5e9, paper, degrees) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_bytes_per_parameter_of_the_named_precisions() -> None:
    assert state_bytes(1, memory.precision("fp32"), (1, 1, 1)) == 4 + 4 + 8
    assert state_bytes(1, memory.precision("bf16"), (1, 1, 1)) == 2 + 4 + (4 + 8)
    states = {name: item.state_bytes_per_parameter for name, item in memory.OPTIMIZERS.items()}
    assert states["sgd"] == 0 and states["sgd-momentum"] == 4 and states["adamw"] == 8


def test_unknown_names_and_degrees_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown optimizer 'adamx'; known: sgd"):
        memory.optimizer("adamx")
    with pytest.raises(ValueError, match="unknown precision 'fp16'; known: fp32, bf16"):
        memory.precision("fp16")
    with pytest.raises(ValueError, match="at least 1"):
        memory.gradient_bytes(1, memory.precision("fp32"), 0)


def test_the_workspace_of_every_gpu_is_of_the_usual_size() -> None:
    """The workspace is what an empty process shows in nvidia-smi plus NCCL: between 0.3 and 3 GiB on GPUs."""
    for name, device in catalog.devices().items():
        if name != "cpu":
            assert 0.3 * 2**30 <= memory.workspace_bytes(device) <= 3 * 2**30 < device.memory_bytes
