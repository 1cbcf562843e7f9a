"""Tensor parallelism on a grid of ranks, ttp x tp: the search against brute force, and programs against one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import autopar
from autopar.costs.rates import Training
from autopar.errors import ConstraintError, PlanError
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.ir.mesh import Mesh
from autopar.ir.placement import S
from autopar.plan import Plan
from autopar.planning.equal_configs import shapes
from autopar.planning.planner import search_plans
from autopar.planning.request import Request, decode, pricer_for
from autopar.planning.search_space import SearchSpace, build_search_space
from autopar.settings.constraints import Constraints
from autopar.sharding.call_options import operators_of
from autopar.strategies.strategy import parse_strategy
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from search.intra_op import solve
from search.problem import InfeasibleError as NothingFits
from search.problem import Problem
from tests.autopar.requests import graph_of, request_for
from tests.search import exhaustive

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
SLOW_LINKS = "4x2 a100-80g pcie4 ethernet-10g"


# --- the search against brute force -----------------------------------------------------------------------------------


def linear(features: int = 4096, bias: bool = False) -> nn.Module:
    return nn.Linear(features, 2 * features, bias=bias)


def mlp(features: int = 4096) -> nn.Module:
    return nn.Sequential(linear(features), nn.ReLU(), nn.Linear(2 * features, features, bias=False))


def space_of(model: nn.Module, mesh: str, cluster: str, shape: tuple[int, ...]) -> SearchSpace:
    graph = trace(model.to("meta"), {"input": torch.empty(shape, device="meta")}, torch.sum, batch_size=shape[0])
    request = request_for("llama", cluster)
    pricer = pricer_for(request, Mesh.parse(mesh), 1)
    return build_search_space(graph, operators_of(graph), pricer, request.constraints)


def brute_force(problem: Problem) -> float:
    """The least costs of all combinations. Of a parameter or input that one call alone bears on, the best option is
    found for each of that call's, which leaves few enough combinations to try them all."""
    variables, edges = dict(enumerate(problem.variables)), list(problem.edges)
    for number, variable in enumerate(problem.variables):
        touching = [edge for edge in edges if number in (edge.a, edge.b)]
        if len(touching) == 1 and variable.name.startswith(("parameter", "tensor")):
            (edge,) = touching
            other, table = (edge.b, edge.costs) if edge.a == number else (edge.a, edge.costs.T)
            least = np.min(variables.pop(number).costs[:, None] + table, axis=0)
            variables[other] = replace(variables[other], costs=variables[other].costs + least)
            edges.remove(edge)
    new = {number: position for position, number in enumerate(variables)}
    left = tuple(replace(edge, a=new[edge.a], b=new[edge.b]) for edge in edges)
    return exhaustive.solve(Problem(tuple(variables.values()), left)).objective


MODELS = {"linear": linear, "with bias": lambda: linear(bias=True), "mlp": mlp, "small mlp": lambda: mlp(64)}


CASES = [
    *(("linear", grid) for grid in ("ttp2 x tp2", "ttp4 x tp2", "ttp2 x tp4")),
    *(("with bias", "ttp2 x tp2"), ("small mlp", "ttp2 x tp4")),
    pytest.param("mlp", "ttp4 x tp2", marks=pytest.mark.slow),
    pytest.param("with bias", "dp2 x ttp2 x tp2", marks=pytest.mark.slow),
]
"""With data-parallel ranks the stages of ZeRO join the two weights of an MLP, and combinations are too many to try."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_the_search_over_both_axes_equals_brute_force(model: str, mesh: str) -> None:
    """On fast and slow links, on rows and on sequences."""
    features = 64 if model == "small mlp" else 4096
    for cluster in ("8 a100-80g", SLOW_LINKS):
        for shape in ((8, features), (8, 2048, features)):
            problem = space_of(MODELS[model](), mesh, cluster, shape).problem
            assert solve(problem).objective == pytest.approx(brute_force(problem), rel=1e-12)


def test_under_a_budget_too() -> None:
    problem = space_of(linear(), "ttp2 x tp2", "4 a100-80g", (8, 4096)).problem
    free = solve(problem)
    for share in (0.95, 0.8, 0.6):
        limited = replace(problem, limit=share * free.usage)
        try:
            least = exhaustive.solve(limited).objective
        except NothingFits:
            with pytest.raises(NothingFits):
                solve(limited)
        else:
            assert solve(limited).objective == pytest.approx(least, rel=1e-12)


def test_a_weight_is_cut_in_both_dims() -> None:
    """A placement that neither tp nor ZeRO gives: rows of the weight over ttp, columns over tp."""
    space = space_of(linear(), "dp2 x ttp2 x tp2", SLOW_LINKS, (8, 2048, 4096))
    stored = decode(space, solve(space.problem).assignment).parameters["", "weight"].placements
    assert stored[1:] == (S(0), S(1))


# --- degrees ----------------------------------------------------------------------------------------------------------


def few_rows(rows: int, **constraints: Any) -> Request:
    limits = Constraints.parse(constraints)
    cluster = Cluster.parse("4x1 a100-80g")
    return Request(BatchedTrace(lambda n: graph_of("llama_gqa", n, 2048)), cluster, rows, "fp32", Training(), limits)


def test_which_grids_are_tried() -> None:
    """Where there are no more rows than nodes, and only such as fill whole nodes."""
    legal = {(shape.ttp, shape.tp) for shape in shapes(few_rows(4), num_units=5)}
    assert legal == {(1, 1), (1, 2)}  # tp of two nodes at most, and a grid as large at most
    legal = {(shape.ttp, shape.tp) for shape in shapes(few_rows(4), num_units=5, most_tp=4)}
    assert legal == {(1, 1), (1, 2), (1, 4), (2, 2)}
    assert {s.ttp for s in shapes(few_rows(8), num_units=5, most_tp=4)} == {1}
    assert {(s.ttp, s.tp) for s in shapes(few_rows(8, ttp=2), num_units=5)} == {(2, 1), (2, 2)}
    assert {s.ttp for s in shapes(few_rows(4, ttp=1), num_units=5, most_tp=4)} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 4])
def test_the_search_equals_the_best_of_pinned_grids(rows: int) -> None:
    best = search_plans(few_rows(rows)).best.plan
    grids = [(1, 1), (1, 2), (1, 4), (2, 2)]
    pinned = [search_plans(few_rows(rows, ttp=ttp, tp=tp)).best.plan for ttp, tp in grids]
    fastest = min(plan.prediction.step_seconds for plan in pinned)
    assert best.prediction.step_seconds == pytest.approx(fastest, rel=1e-9), [str(p.mesh_text) for p in pinned]


def test_texts_and_refusals() -> None:
    mesh = Mesh(("pp", "dp", "ttp", "tp"), (2, 3, 4, 2))
    assert str(mesh) == "pp2 x dp3 x ttp4 x tp2" and Mesh.parse(str(mesh)) == mesh
    with pytest.raises(ConstraintError, match="one axis of tensor parallelism"):
        parse_strategy({"ttp": 2, "tp": 2, "dp": 1, "micro_batches": 1}, Cluster.parse("4 l4"), 8)


@pytest.mark.slow
def test_program_and_plan_file() -> None:
    """A plan goes through its file; an edit is held to what the search offers; axes of explanations are known."""
    example = EXAMPLES["llama_gqa"](layers=3)
    pins = {"ttp": 2, "tp": 2}
    compiled = autopar.compile(example.model, IDEAL, example_inputs=example.inputs, constraints=pins)
    text = compiled.plan.to_yaml()
    again = autopar.compile(example.model, IDEAL, example_inputs=example.inputs, plan=Plan.from_yaml(text))
    assert compiled.plan.mesh_text == "ttp2 x tp2" and again.source == compiled.source
    assert "ttp2 x tp2" in str(compiled.report())
    with pytest.raises(PlanError, match="is not a legal placement"):
        edited = re.sub(r"model.norm.weight: ttp=\S+", "model.norm.weight: ttp=P", text)
        autopar.compile(example.model, IDEAL, example_inputs=example.inputs, plan=Plan.from_yaml(edited))
    with pytest.raises(PlanError, match="contradicts"):
        autopar.compile(example.model, IDEAL, example_inputs=example.inputs, plan=compiled.plan, constraints={"ttp": 4})


# --- real processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("llama_gqa", {"ttp": 2, "tp": 2}),
        ("t5", {"ttp": 2, "tp": 2}),
        ("bert", {"dp": 2, "ttp": 2, "zero": 2}),
        ("gpt2", {"dp": 2, "ttp": 2, "zero": 3}),
        ("llama_gqa", {"pp": 2, "ttp": 2, "micro_batches": 2}),
        ("mixtral", {"ep": 2, "ttp": 2}),
    ],
)
def test_programs_equal_one_process(name: str, constraints: dict[str, Any]) -> None:
    example = EXAMPLES[name](dropout=0.0)
    report = autopar.verify(
        example.model, IDEAL, example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=constraints
    )
    assert report.gradients and report.parameters
    assert report.ok(1e-5), str(report)
