"""What a host takes to issue calls of generated programs: the ratios of autopar/costs/host_calls.py.

    OMP_NUM_THREADS=1 python -m benchmarks.host_calls

CPU microseconds of one call on tensors of a few hundred elements, forward and backward, in chains of 4 and of 20 calls
that are taken in turn: per call, what the longer one takes more. Nothing is left of the kernels but their launch, which
on a CPU is a function call. On a GPU it is the driver's, so each kernel counts LAUNCH more here. Triton's kernels are
replaced by nothing, so that theirs counts TRITON more; collectives go to torch's process group that moves nothing, and
NCCL's enqueueing counts NCCL more.

What parameters take is told by two perceptrons of 4 and of 20 layers: a generated program's step less that of plain
torch. Figures are the least of several rounds, of CPU seconds; the unit is an elementwise call with its autograd.
"""

from __future__ import annotations

import datetime
import importlib
import pkgutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import autopar
import codegen.kernels
from benchmarks.table import append
from codegen.runtime.mesh import Axis
from examples.models import mlp

RESULTS = Path(__file__).resolve().parent / "results" / "host_calls.csv"
LAUNCH = 3.0
"""Microseconds of cuLaunchKernel (meta-pytorch/tritonbench, pull request 1017: 3.0 on a GB200's host)."""
TRITON = 11.0
"""Of a launch of a Triton kernel from Python (meta-pytorch/tritonbench, pull request 1002: about 11)."""
NCCL = 20.0
"""Of record_param_comms, the part of a collective below the dispatcher (pytorch/pytorch, issue 102434: 20.4)."""
SHORT, LONG = 4, 20
ROUNDS, REPEATS = 9, 40
Chain = Callable[[Tensor], Tensor]


class _NoKernel:
    """A Triton kernel that launches nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class _Nothing(torch.autograd.Function):
    """An autograd function of Python that keeps a tensor, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        return grad, None


def microseconds(*calls: Callable[[], object]) -> list[float]:
    """CPU time of each, the least of rounds in which they are taken in turn."""
    least = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for index, call in enumerate(calls):
            start = time.process_time()
            for _ in range(REPEATS):
                call()
            least[index] = min(least[index], (time.process_time() - start) / REPEATS * 1e6)
    return least


def of_call(call: Chain, x: Tensor) -> tuple[float, float]:
    """(forward, backward) of one call, by chains."""

    def forward(count: int) -> Tensor:
        y = x
        for _ in range(count):
            y = call(y)
        return y

    gradient = torch.ones_like(x)

    def both(count: int) -> None:
        torch.autograd.grad(forward(count), [x], gradient)

    lone = [lambda n=n: forward(n) for n in (SHORT, LONG)]
    pairs = [lambda n=n: both(n) for n in (SHORT, LONG)]
    for each in (*lone, *pairs):
        each()
    a, b, c, d = microseconds(*lone, *pairs)
    return (b - a) / (LONG - SHORT), (d - c - (b - a)) / (LONG - SHORT)


def calls() -> dict[str, tuple[Chain, Tensor, tuple[float, float]]]:
    """Name -> the call, what it begins with, and microseconds that a GPU's launches take more (forward, backward)."""
    for found in pkgutil.iter_modules(codegen.kernels.__path__):
        module: Any = importlib.import_module(f"codegen.kernels.{found.name}")
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, _NoKernel())
        for name, value in (("use_triton", True), ("num_processors", 132)):
            if hasattr(module, name):
                setattr(module, name, lambda *_, value=value: value)
    swiglu: Any = importlib.import_module("codegen.kernels.swiglu").swiglu
    rms_norm: Any = importlib.import_module("codegen.kernels.rms_norm").rms_norm
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    axis = Axis("tp", 2, 0, dist.group.WORLD)
    x, fixed = torch.ones(8, 32, requires_grad=True), torch.ones(8, 32)
    trained, scale = torch.ones(32, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    return {
        "elementwise": (lambda y: y * fixed, x, (LAUNCH, LAUNCH)),
        "elementwise of two": (lambda y: y * y, x, (LAUNCH, 3 * LAUNCH)),
        "linear": (lambda y: F.linear(y, trained), x, (LAUNCH, LAUNCH)),
        "view": (lambda y: y.view(8, 32), x, (0.0, 0.0)),
        "autograd function": (lambda y: _Nothing.apply(y, fixed), x, (0.0, 0.0)),
        "kernel, one launch": (lambda y: swiglu(y, fixed), x, (TRITON, TRITON)),
        "kernel, norm": (lambda y: rms_norm(y, scale, 1e-6), x, (TRITON, TRITON)),
        "all_reduce both ways": (
            lambda y: axis.all_reduce(y, grad="partial"),
            x,
            (LAUNCH + NCCL, LAUNCH + NCCL),
        ),
    }


def of_parameters() -> dict[str, float]:
    """Microseconds per parameter of a micro-batch and of an update, and of a step without either."""
    found: dict[int, list[float]] = {}
    for layers in (SHORT, LONG):
        example = mlp(layers=layers)
        program = autopar.compile(example.model, "1 cpu", example_inputs=example.inputs, loss_fn=example.loss_fn)
        step = program.build()
        local = step.local_batch(example.inputs)
        step(local)

        def plain(example: Any = example) -> None:
            example.loss().backward()
            for parameter in example.model.parameters():
                parameter.grad = None

        def train(step: Any = step, local: Any = local) -> None:
            step.forward_backward(local)
            step.optimizer.zero_grad()

        def whole(step: Any = step, local: Any = local) -> None:
            step(local)

        found[layers] = microseconds(plain, train, whole)
    few, many = found[SHORT], found[LONG]
    count = 2 * (LONG - SHORT)
    plain_more, train_more, whole_more = (b - a for a, b in zip(few, many, strict=True))
    gradient, update = (train_more - plain_more) / count, (whole_more - train_more) / count
    return {
        "gradient of a parameter": gradient,
        "update of a parameter": update,
        "micro-batch": few[1] - few[0] - 2 * SHORT * gradient,
        "step": few[2] - few[1] - 2 * SHORT * update,
    }


def main() -> None:
    """Prints and records all."""
    torch.set_num_threads(1)
    parameters = of_parameters()
    found = {name: (*of_call(call, x), more) for name, (call, x, more) in calls().items()}
    unit = found["elementwise"][0] + LAUNCH
    rows: list[dict[str, Any]] = []
    own = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "torch": torch.__version__}
    for name, (forward, backward, more) in found.items():
        for direction, seconds, launch in (("forward", forward, more[0]), ("backward", backward, more[1])):
            rows.append(own | {"call": f"{name} {direction}", "us": seconds, "with_launch_us": seconds + launch})
    rows += [own | {"call": name, "us": each, "with_launch_us": each} for name, each in parameters.items()]
    for row in rows:
        row["units"] = row["with_launch_us"] / unit
        row |= {key: f"{row[key]:.2f}" for key in ("us", "with_launch_us", "units")}
        print(f"{row['call']:<32}{row['us']:>10}{row['with_launch_us']:>10}{row['units']:>8}")
    append(rows, RESULTS)


if __name__ == "__main__":
    main()
