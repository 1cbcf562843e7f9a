"""What holds while models are traced: torch is silent about it, and no other thread is disturbed."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.frontend import fakes

ROWS = 8


class Line(nn.Module):
    """A linear layer, and what is done with its rows."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(8, 8), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x)).mean()


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What torch writes to its logs, through handlers such as its own."""
    kept, loggers = Kept(), [logging.getLogger(name) for name in ("torch", "torch._subclasses.fake_tensor")]
    loggers += [logging.getLogger("torch.fx.experimental.symbolic_shapes")]
    for logger in loggers:
        logger.addHandler(kept)
    yield kept.said
    for logger in loggers:
        logger.removeHandler(kept)


def top_rows(y: Tensor) -> Tensor:
    return torch.topk(y, 3, dim=0)[0]


def fourth_row(y: Tensor) -> Tensor:
    return y[3] + y[0]


def too_many(y: Tensor) -> Tensor:
    return torch.topk(y, 9, dim=1)[0]


def by_value(y: Tensor) -> Tensor:
    return y * 2 if y.sum() > 0 else y


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("then", "refusal"),
    [
        (top_rows, ""),
        (fourth_row, ""),
        (too_many, "fails on the example inputs\n.*k (not in|out of) range"),
        (by_value, "could not trace"),
    ],
)
def test_torch_says_nothing_of_what_is_tried(
    then: Callable[[Tensor], Tensor], refusal: str, said: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    """Fewer rows are tried than these models can do with, and what none can do is one error of ours."""
    with pytest.raises(TraceError, match=refusal) if refusal else contextlib.nullcontext():
        autopar.compile(Line(then), "2 cpu", example_inputs={"x": torch.randn(ROWS, 8)})
    assert not said
    assert capfd.readouterr() == ("", "")


def test_torch_is_heard_elsewhere(said: list[str]) -> None:
    """Outside of our probes, and from threads that are not in one."""
    fake = fakes.mode()

    def fails() -> None:
        with pytest.raises(RuntimeError), fake:
            torch.topk(torch.empty(2), 3)

    fails()
    assert len(said) == 1
    with fakes.probing():
        fails()
        assert len(said) == 1
        with ThreadPoolExecutor(1) as pool:
            pool.submit(fails).result()
        assert len(said) == 2
    fails()
    assert len(said) == 3


def compiled(then: Callable[[Tensor], Tensor]) -> str:
    return autopar.compile(Line(then), "2 cpu", example_inputs={"x": torch.randn(ROWS, 8)}).source


def test_threads_compile_what_one_does() -> None:
    alone = {then: compiled(then) for then in (top_rows, fourth_row)}
    barrier = threading.Barrier(2)

    def together(then: Callable[[Tensor], Tensor]) -> str:
        barrier.wait()
        return compiled(then)

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            assert dict(zip(alone, pool.map(together, alone), strict=True)) == alone


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class TorchrunRank:
    """A thread that trains while a model is traced: it runs, start to end, within every forward."""

    def __init__(self) -> None:
        self.gradients: list[float] = []

    def __deepcopy__(self, memo: Any) -> TorchrunRank:
        return self

    def train(self) -> None:
        x = torch.tensor(3.0, requires_grad=True)
        x.register_hook(lambda gradient: gradient + 1)
        Square.apply(x).backward()
        with torch.no_grad():
            assert not torch.is_grad_enabled()
            x -= 1.0
        assert torch.is_grad_enabled() and x.grad is not None
        self.gradients.append(x.grad.item())

    def __call__(self, y: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.train).result()
        return y


def test_another_thread_trains_on() -> None:
    beside = TorchrunRank()
    autopar.compile(Line(beside), "2 cpu", example_inputs={"x": torch.randn(ROWS, 8)})
    assert beside.gradients and set(beside.gradients) == {7.0}
