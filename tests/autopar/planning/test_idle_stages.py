"""Stages that would only repeat what every stage makes itself, and plans that split nothing."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.cluster import as_cluster
from autopar.errors import ConstraintError
from autopar.ir.chain import chain, most_stages, uncut
from autopar.planning.make_request import request_of
from autopar.settings.compile_options import CompileOptions
from search.inter_op import solve_pipeline
from search.pipeline_problem import PipelineInfeasibleError, PipelineProblem, Point, Submesh
from tests.search.pipeline_problems import one_forward_one_backward


class Padded(nn.Module):
    """Pads the batch ahead of every layer; `layer` gives each of them another form, so that none repeats."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = {
            "conv": lambda i: nn.Conv1d(4, 4, 3, dilation=i + 1),
            "pool": lambda i: nn.Sequential(nn.Conv1d(4, 4, 3, dilation=i + 1), nn.Tanh()),
            "norm": lambda i: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3, dilation=i + 1)),
        }[kind]
        self.layers, self.out = nn.ModuleList(made(i) for i in range(3)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = x + F.relu(layer(F.pad(x, (2 * (i + 1), 0))))
        return self.out(x[:, :, -1])


BATCH = {"x": torch.randn(4, 4, 16), "y": torch.randn(4, 2)}
OPTIONS = {"example_inputs": BATCH, "loss_fn": F.mse_loss}


@pytest.mark.parametrize(
    "kind", ["conv", pytest.param("pool", marks=pytest.mark.slow), pytest.param("norm", marks=pytest.mark.slow)]
)
def test_no_stage_is_cut_that_only_pads_the_batch(kind: str) -> None:
    compiled = autopar.compile(Padded(kind), "2 cpu", constraints={"pp": 2}, **OPTIONS)
    graph = compiled.best.graph
    assert compiled.plan.pipeline.num_pipeline_ranks == 2
    assert not {stage.first for stage in compiled.plan.pipeline.stages} & set(uncut(graph))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.new_empty(len(x), 1).bernoulli_(0.9)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * kept


class Noisy(nn.Module):
    """Draws the noise of its weights into a buffer ahead of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(Residual() for _ in range(2)), nn.Linear(4, 2)
        self.register_buffer("noise", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noise.normal_()
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.out.weight + 0.1 * self.noise)


def test_no_stage_is_cut_that_only_draws_into_a_buffer() -> None:
    batch = {"x": torch.randn(4, 4), "y": torch.randn(4, 2)}
    options = {"example_inputs": batch, "loss_fn": F.mse_loss, "constraints": {"pp": 2, "micro_batches": 2}}
    graph = autopar.compile(Noisy(), "2 cpu", **options).best.graph
    assert 1 in uncut(graph) and chain(graph)[0] == "top 0"


@pytest.mark.slow
def test_more_stages_than_there_is_work_for_are_refused_by_number() -> None:
    request = request_of(Padded("norm"), as_cluster("2 cpu"), CompileOptions(**OPTIONS))
    graph = request.trace(4)
    stages = most_stages(graph)
    assert stages == len(chain(graph)) - len(uncut(graph)) < len(chain(graph))
    with pytest.raises(ConstraintError, match="more ranks than the model has blocks"):
        autopar.compile(Padded("norm"), f"1x{stages + 1} cpu", constraints={"pp": stages + 1}, **OPTIONS)


@pytest.mark.parametrize("not_ahead_of", [(1,), (2, 3), (1, 4)])
def test_stages_begin_where_they_may(not_ahead_of: tuple[int, ...]) -> None:
    """Against all cuts of five units into two and three stages."""
    seconds = (5.0, 1.0, 4.0, 2.0, 3.0)
    units = tuple(f"u{i}" for i in range(5))
    points = {(unit, "one"): (Point("none", t, t, 0.0, 0.0, 0.0, 0.0),) for unit, t in zip(units, seconds, strict=True)}
    for count in (2, 3):
        problem = PipelineProblem(
            units=units,
            submeshes=(Submesh("one", "all", 1, 1.0),),
            groups={"all": count},
            points=points,
            in_flight=one_forward_one_backward(4),
            num_micro_batches=4,
            num_stages=(count,),
            uncut=not_ahead_of,
        )
        cuts = [c for c in itertools.combinations(range(1, 5), count - 1) if not set(c) & set(not_ahead_of)]
        if not cuts:
            with pytest.raises(PipelineInfeasibleError):
                solve_pipeline(problem)
            continue
        stages = [[sum(seconds[a:b]) for a, b in itertools.pairwise((0, *cut, 5))] for cut in cuts]
        assert solve_pipeline(problem).objective == pytest.approx(min(sum(own) + 3 * max(own) for own in stages))


@pytest.mark.parametrize(
    "devices", [7, pytest.param(3, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)]
)
def test_a_plan_that_splits_nothing_is_legal_and_says_so(devices: int) -> None:
    """A batch of 8 and widths 30 and 6 that no such number divides, or where dividing costs more."""
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 6))
    batch = (torch.randn(8, 30), torch.randn(8, 6))
    with pytest.warns(UserWarning, match="every rank repeats all of the work"):
        compiled = autopar.compile(model, f"1x{devices} cpu", example_inputs=batch, loss_fn=F.mse_loss)
    assert f"nothing over {devices} devices" in " ".join(str(compiled.report()).split())


def test_a_plan_that_splits_the_batch_says_nothing() -> None:
    model = nn.Linear(30, 6)
    batch = (torch.randn(8, 30), torch.randn(8, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = autopar.compile(
            model, "2 cpu", example_inputs=batch, loss_fn=F.mse_loss, constraints={"dp": 2, "tp": 1}
        )
    assert not compiled.best.repeated_work
