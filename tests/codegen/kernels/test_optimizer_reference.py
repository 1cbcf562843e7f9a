"""AdamW and the gradient norm in torch operations: against torch's own, and what tables refuse."""

from __future__ import annotations

import pytest
import torch

from codegen.kernels.adamw import adamw_, adamw_table
from codegen.kernels.chunk_table import chunk_table
from codegen.kernels.grad_norm import clip_factor, squared_norm

SHAPES = [(3, 5), (7,), (0,), (1,)]


def zeros(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5)])
def test_is_torchs_clipped_adamw(dtype: torch.dtype, betas: tuple[float, float]) -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    gradients, exp_avgs, exp_avg_sqs, copies = zeros(dtype), zeros(dtype), zeros(dtype), zeros(torch.bfloat16)
    table = adamw_table(parameters, gradients, exp_avgs, exp_avg_sqs, copies, weight_decays=0.2)
    assert not table.chunks.on_kernels
    leaves = [parameter.clone().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(leaves, lr=0.01, betas=betas, eps=1e-6, weight_decay=0.2)
    step = torch.zeros((), dtype=torch.float32)
    for _ in range(5):
        for leaf, gradient in zip(leaves, gradients, strict=True):
            gradient.normal_()
            leaf.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(leaves, 1.5)
        optimizer.step()
        factor = clip_factor(squared_norm(table.chunks, 1), 1.5)
        adamw_(table, step, 0.01, betas, 1e-6, factor)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(parameters, [leaf.detach() for leaf in leaves], rtol=tolerance, atol=tolerance)
    assert all(torch.equal(c, p.to(torch.bfloat16)) for c, p in zip(copies, parameters, strict=True))
    assert step == 5


def test_many_steps_keep_their_bias_corrections() -> None:
    """With one gradient throughout, every step is lr * sign: bias corrections are all that changes with t."""
    parameter, gradient = torch.zeros(3, dtype=torch.float64), torch.tensor([1e-3, -2.0, 50.0], dtype=torch.float64)
    columns = [[parameter], [gradient], [torch.zeros_like(gradient)], [torch.zeros_like(gradient)]]
    table, step = adamw_table(*columns, weight_decays=0.0), torch.zeros(())
    for count in range(1, 201):
        adamw_(table, step, 1e-2, eps=0.0)
        torch.testing.assert_close(parameter, -1e-2 * count * gradient.sign(), rtol=1e-9, atol=0)


def test_nothing_to_update() -> None:
    step = torch.zeros(())
    adamw_(adamw_table([], [], [], []), step, 0.1)
    adamw_(adamw_table(*([torch.zeros(0)] for _ in range(4))), step, 0.1)
    assert step == 2
    assert squared_norm(chunk_table([])) == 0


def test_weights_of_a_norm() -> None:
    table = chunk_table([torch.tensor([3.0]), torch.tensor([4.0, 1.0])])
    assert squared_norm(table, weights=torch.tensor([1.0, 0.5])) == 9 + 17 / 2


def test_tables_refuse_what_does_not_fit() -> None:
    a, b = torch.zeros(4), torch.zeros(5)
    with pytest.raises(ValueError, match=r"one length each, got \[1, 2\]"):
        chunk_table([a], [a, b])
    with pytest.raises(ValueError, match=r"equally many elements"):
        chunk_table([a], [b])
    with pytest.raises(ValueError, match=r"contiguous"):
        chunk_table([torch.zeros(4, 4).t()])
    with pytest.raises(ValueError, match=r"one dtype"):
        chunk_table([a, a.double()])
    with pytest.raises(ValueError, match=r"must be fp32, or all fp64"):
        adamw_table([a.bfloat16()], [a], [a], [a])
    with pytest.raises(ValueError, match=r"1 parameters need as many weight decays, got 2"):
        adamw_table([a], [a], [a], [a], weight_decays=[0.1, 0.2])
