"""Fake tensors made from remembered layouts lie in memory as real ones do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.frontend import fakes


class Answered(TorchDispatchMode):
    """Every operator by `Results`, as a recorded forward does it."""

    def __init__(self, results: fakes.Results) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.call(func, args, kwargs or {})


CALLS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, i: x + x.transpose(0, 1),
    lambda x, i: x[1:, 2:5],
    lambda x, i: x[:, ::2].contiguous(),
    lambda x, i: x.unsqueeze(0).expand(3, -1, -1),
    lambda x, i: x.transpose(0, 1).reshape(-1),
    lambda x, i: x.split([2, 4]),
    lambda x, i: torch.broadcast_tensors(x, x),
    lambda x, i: torch.broadcast_tensors(x[:1], x),
    lambda x, i: F.linear(x, x),
    lambda x, i: F.layer_norm(x, (6,)),
    lambda x, i: F.embedding(i, x),
    lambda x, i: F.cross_entropy(x, i[:, 0]),
    lambda x, i: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    lambda x, i: (i + 1, i + 1.0, i + True, i.float(), i / 2),
    lambda x, i: (x.to(torch.float32), x.bfloat16() + x),
    lambda x, i: (torch.arange(5), torch.zeros(2, 3, dtype=torch.bool), x.new_ones(4)),
    lambda x, i: x.clone().add_(1)[2],
    lambda x, i: torch.tensor(2.5) * x,
]


def layouts(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [layouts(item) for item in value]
    return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("inference", [False, True])
def test_results_lie_as_real_ones(call: Callable[[Tensor, Tensor], Any], inference: bool) -> None:
    want = layouts(call(torch.randn(6, 6), torch.zeros(6, 6, dtype=torch.int64)))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    x, index = fakes.empty(fake, (6, 6), torch.float32), fakes.empty(fake, (6, 6), torch.int64)
    with torch.inference_mode(inference), fake, Answered(fakes.Results(fake)):
        for _ in range(2):  # the second time from memory
            assert layouts(call(x, index)) == want


def identities(x: Tensor, y: Tensor) -> list[tuple[bool, bool]]:
    """For some calls, whether what comes back is the first or the second operand itself."""
    results = [*torch.broadcast_tensors(x, y), *torch.broadcast_tensors(y, x), *torch.broadcast_tensors(x, x)]
    results += [x.contiguous(), y.to(torch.float32), y.to(torch.float64), x.reshape(4, 4), x.view(4, 4), x.tanh()]
    return [(result is x, result is y) for result in results]


def test_an_operand_that_comes_back_is_itself() -> None:
    fake = FakeTensorMode()
    x, y = (fakes.empty(fake, (4, 4), torch.float32) for _ in range(2))
    with torch.inference_mode():
        want = identities(torch.randn(4, 4), torch.randn(4, 4))
        with fake, Answered(fakes.Results(fake)):
            assert identities(x, y) == identities(x, y) == want
    assert (True, False) in want and (False, True) in want and (False, False) in want


def test_results_are_new_each_time() -> None:
    fake = FakeTensorMode()
    x = fakes.empty(fake, (4, 4), torch.float32)
    with torch.inference_mode(), fake, Answered(fakes.Results(fake)):
        made = [x.tanh() for _ in range(3)]
    assert len({id(tensor) for tensor in made}) == 3 and all(isinstance(tensor, FakeTensor) for tensor in made)


def test_a_value_is_not_made_up() -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    x = fakes.empty(fake, (), torch.float32)
    with fake, Answered(fakes.Results(fake)):
        assert (torch.tensor(2.0) + 1).item() == 3.0
        with pytest.raises(Exception, match="_local_scalar_dense"):
            x.item()


def test_parameters() -> None:
    fake = FakeTensorMode()
    like = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64), requires_grad=False)
    made = fakes.parameter(fake, like, torch.bfloat16)
    assert isinstance(made, torch.nn.Parameter) and isinstance(made, FakeTensor)
    assert (made.shape, made.dtype, made.requires_grad, made.device) == ((3, 4), torch.bfloat16, False, like.device)
    assert fakes.parameter(fake, torch.nn.Parameter(torch.randn(2)), torch.float32).requires_grad


PLANNED_THEN_FORKED = """
import os, torch, autopar
model = torch.nn.Linear(4, 4)
autopar.compile(model, "1 cpu", example_inputs=(torch.ones(2, 4),), loss_fn=lambda y: y.sum())
model(torch.ones(2, 4)).sum().backward()
child = os.fork()
if child == 0:
    model(torch.ones(2, 4)).sum().backward()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_a_process_that_has_planned_and_trained_may_fork_ranks() -> None:
    """Where torch is built for GPUs and there is none, fake tensors let one appear to be there."""
    subprocess.run([sys.executable, "-c", PLANNED_THEN_FORKED], check=True, timeout=600)
