"""The same stages under torch.distributed.pipelining: equal gradients under its GPipe and 1F1B."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from codegen.runtime.parameters import Module, Param
from codegen.runtime.pipeline import Pipeline, Stage
from codegen.runtime.step import Step
from tests.codegen.runtime.features import staged
from tests.codegen.runtime.ranks import run_ranks
from tests.codegen.runtime.test_pipeline_step import lines

WIDTH, ROWS, MICRO, NUM_LAYERS = 5, 8, 4, 4
ROW = Param((ROWS // MICRO, WIDTH), dtype="float64")


class Layer(Module):
    PARAMETERS = {"weight": Param((WIDTH, WIDTH), dtype="float64"), "bias": Param((WIDTH,), dtype="float64")}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight, self.bias))


class First(Module):
    LAYERS = {Layer: ("0", "1")}
    INPUTS = {"x": ROW}
    SENDS = {"h": ROW}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers_of(Layer):
            x = layer(x)
        return x


class Last(Module):
    LAYERS = {Layer: ("2", "3")}
    RECEIVES = {"h": ROW}
    INPUTS = {"target": ROW}

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers_of(Layer):
            h = layer(h)
        return F.mse_loss(h, target)


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = {
        f"{i}.{name}": shape
        for i in range(NUM_LAYERS)
        for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def torch_gradients(rank: int, kind: type, x: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Of this rank's stage."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh()) for _ in range(2)]
    own = weights()
    for index, layer in enumerate(layers):
        linear = layer[0]
        linear.load_state_dict({name: own[f"{2 * rank + index}.{name}"] for name in ("weight", "bias")})
    stage = PipelineStage(nn.Sequential(*layers), rank, 2, torch.device("cpu"))
    schedule = kind(stage, MICRO, loss_fn=F.mse_loss)
    schedule.step(x) if rank == 0 else schedule.step(target=target)
    found = {}
    for index, layer in enumerate(layers):
        for name in ("weight", "bias"):
            gradient = getattr(layer[0], name).grad
            found[f"{2 * rank + index}.{name}"] = gradient
    return found


def compare(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    pipeline = Pipeline((Stage(First, 0), Stage(Last, 1)))
    for name, kind in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        step = Step(
            pipeline,
            pipeline.create_mesh(),
            optimizer_factory=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            num_micro_batches=MICRO,
            executor=staged(lines(name, 2, MICRO)),
        )
        step.load(weights())
        step.forward_backward(step.local_batch({"x": x, "target": target}))
        ours = step.gradients()
        theirs = torch_gradients(rank, kind, x, target)
        assert len(ours) == 2 * NUM_LAYERS and len(theirs) == NUM_LAYERS
        for each, gradient in theirs.items():
            torch.testing.assert_close(ours[each], gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.distributed
def test_gradients_equal_those_of_torch() -> None:
    run_ranks(compare, 2)
