"""torch.distributed in a forward or a loss: the answers of one process, or a refusal that names the call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed import all_gather_into_tensor, get_world_size

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace_modes.one_process import as_one_process
from autopar.launch import run_ranks

Forward = Callable[["Net"], Callable[[Tensor], Tensor]]


class Net(nn.Module):
    """A linear layer with a synchronized norm, whose loss is a function of its output."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.loss = nn.Linear(8, 8), nn.SyncBatchNorm(8), loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.norm(self.linear(x)) + self.linear(x))


def scaled(y: Tensor) -> Tensor:
    return y.square().mean() / (get_world_size() if dist.is_initialized() else 1) * (dist.get_rank() + 1)


def contrastive(y: Tensor) -> Tensor:
    return (torch.cat(differentiable.all_gather(y)) @ y.T).logsumexp(1).mean()


def gathered(y: Tensor) -> Tensor:
    whole = y.new_empty(get_world_size() * len(y), *y.shape[1:])
    all_gather_into_tensor(whole, y.detach())
    return (y - whole.mean(0)).square().mean()


def reduced(y: Tensor) -> Tensor:
    mean = y.detach().mean(0)
    handle = dist.all_reduce(mean, async_op=True)
    assert handle is not None
    handle.wait()
    return (y - mean / dist.get_world_size()).square().mean()


def by_environment(y: Tensor) -> Tensor:
    return y.square().mean() * (int(os.environ.get("RANK", "0")) + 1) * int(os.environ.get("WORLD_SIZE", "1"))


LOSSES = {
    scaled: lambda y: y.square().mean(),
    contrastive: lambda y: (y @ y.T).logsumexp(1).mean(),
    gathered: lambda y: (y - y.detach().mean(0)).square().mean(),
    reduced: lambda y: (y - y.detach().mean(0)).square().mean(),
    by_environment: lambda y: y.square().mean(),
}
"""By losses that ask torch.distributed, what they are on one process."""


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}


def losses(loss: Callable[[Tensor], Tensor], cluster: str) -> list[float]:
    """Of two steps of a program."""
    program = autopar.compile(
        Net(loss), cluster, example_inputs=batch(), optimizer=lambda given: torch.optim.SGD(given, lr=0.1)
    )
    step = program.build()
    return [float(step(step.local_batch(batch()))) for _ in range(2)]


def expected(loss: Callable[[Tensor], Tensor]) -> list[float]:
    model, found = Net(LOSSES[loss]), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        value = model(**batch())
        value.backward()
        optimizer.step()
        found.append(float(value))
    return found


@pytest.mark.parametrize("loss", [contrastive, by_environment])
def test_collectives_and_the_environment_are_those_of_one_process(
    loss: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert losses(loss, "1 cpu") == pytest.approx(expected(loss), rel=1e-5)
    assert os.environ["RANK"] == "3"


def ranks_losses() -> list[list[float]]:
    return [losses(loss, "2 cpu") for loss in LOSSES]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_compile_and_train_what_one_process_does() -> None:
    right = [expected(loss) for loss in LOSSES]
    for found in run_ranks(ranks_losses, (), 2):
        for own, wanted in zip(found, right, strict=True):
            assert own == pytest.approx(wanted, rel=1e-4)


def sends(y: Tensor) -> Tensor:
    dist.send(y, 1)
    return y.mean()


def meshes(y: Tensor) -> Tensor:
    return y.mean() * dist.device_mesh.init_device_mesh("cpu", (2,)).size()


def splits(y: Tensor) -> Tensor:
    dist.new_subgroups(1)
    return y.mean()


@pytest.mark.parametrize(("loss", "name"), [(sends, "send"), (meshes, "init_device_mesh"), (splits, "new_subgroups")])
def test_what_one_process_does_not_have_is_refused_with_its_line(loss: Any, name: str) -> None:
    with pytest.raises(TraceError, match=r"torch\.distributed") as caught:
        autopar.compile(Net(loss), "1 cpu", example_inputs=batch())
    assert name in str(caught.value) and "test_one_process.py" in str(caught.value)


def test_the_functions_are_themselves_again_afterwards() -> None:
    with warnings.catch_warnings(action="error"), as_one_process():
        assert get_world_size() == 1 and not dist.is_initialized()
        with as_one_process():
            assert dist.get_rank() == 0
        assert dist.get_rank() == 0
    with pytest.raises(ValueError, match="process group"):
        get_world_size()
