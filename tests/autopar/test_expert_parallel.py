"""Experts shared out over ranks: exact under any routing, as many bytes as priced, and found by the search."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers grouped_mm_fallback
from torch import Tensor, nn

import autopar
from autopar.costs.rates import Rates
from autopar.errors import ConstraintError, InfeasibleError, PlanError
from autopar.frontend.trace import trace
from autopar.ir.mesh import Mesh
from autopar.planning.planner import search_plans
from autopar.planning.request import pricer_for
from autopar.planning.search_space import build_search_space
from autopar.proofs.simulated_ranks import meshes, run_ranks
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.sharding.call_options import operators_of, options_of, routed_axes
from autopar.verify import sgd_with_momentum, verify_program
from codegen.runtime.experts import Routes, combine, dispatch, expert_linear
from examples.zoo import ZOO
from search.intra_op import solve
from tests.autopar.requests import graph_of, request_for
from tests.autopar.test_tensor_grid import brute_force

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
ROWS, LENGTH, CHOICES, EXPERTS, WIDTH = 8, 4, 2, 4, 8


class Routed(nn.Module):
    """A mixture whose batch says which experts every token goes to, written with a sort as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, choices: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens).view(-1, WIDTH)
        ids = choices.reshape(-1)
        sorted_ids, order = torch.sort(ids)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        ends = torch.histc(sorted_ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        grouped = torch.ops.transformers.grouped_mm_fallback
        rows = F.silu(grouped(x[order // CHOICES], self.up, ends) + self.bias[sorted_ids])
        rows = grouped(rows, self.down, ends)[inverse]
        y = x + rows.view(-1, CHOICES, WIDTH).sum(1)
        return F.cross_entropy(self.head(y), labels.view(-1))


class AddedToTokens(Routed):
    """Rows are weighed before, have elements dropped by their places in the order of the experts, and are added to what
    their tokens are."""

    def forward(self, tokens: Tensor, choices: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens).view(-1, WIDTH)
        order = torch.argsort(choices.view(-1), stable=True)
        ends = torch.histc(choices.view(-1).float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        token = order // CHOICES
        rows = x.gather(0, token.view(-1, 1).expand(-1, WIDTH)) * torch.tanh(self.bias[:, :1][choices.view(-1)[order]])
        grouped = torch.ops.transformers.grouped_mm_fallback
        rows = F.dropout(F.silu(grouped(rows, self.up, ends)), 0.25, self.training)
        rows = grouped(rows, self.down, ends)
        return F.cross_entropy(self.head(x.index_add(0, token, rows)), labels.view(-1))


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("model", [Routed, AddedToTokens])
def test_rows_of_a_mixture_stay_sorted_for_any_number_of_rows(model: type[Routed]) -> None:
    """One row, too, whose batch cannot be told from its other dims of size one."""
    kinds = []
    for rows in (1, 2, ROWS):
        inputs = {name: value[:rows] for name, value in batch("mixed").items()}
        operators = operators_of(trace(model(), inputs, None, batch_size=rows)).values()
        kinds.append([(op.node.op, op.route) for op in operators])
    assert any(route.arrives for _, route in kinds[0]) == (model is Routed)
    assert kinds[0] == kinds[1] == kinds[2]


def batch(routing: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = ROWS, LENGTH, CHOICES
    choices = {
        "mixed": torch.randint(EXPERTS, shape, generator=generator),
        "skewed": (torch.rand(shape, generator=generator) > 0.9).long() * 3,
        "one expert has all": torch.full(shape, 2),
    }[routing]
    tokens = torch.randint(16, (2, ROWS, LENGTH), generator=generator)
    return {"tokens": tokens[0], "choices": choices, "labels": tokens[1]}


def check(model: type[Routed], pins: dict[str, Any], *routings: str) -> None:
    """One program, under each routing."""
    torch.manual_seed(0)
    settings = {"example_inputs": batch("mixed"), "constraints": pins, "optimizer": sgd_with_momentum}
    program = autopar.compile(model(), IDEAL, **settings)
    assert all(f"{axis}{pins[axis]}" in program.plan.mesh_text for axis in ("ep", "cp", "tp") if axis in pins)
    for routing in routings:
        report = verify_program(program, batch(routing))
        assert report.ok(1e-5), f"{routing}: {report}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [
        {"ep": 4},
        {"ep": 2, "tp": 2},
        {"ep": 2, "tp": 2, "etp": 1},
        {"tp": 4, "etp": 1},
        {"dp": 2, "tp": 2, "etp": 1, "zero": 3, "micro_batches": 2},
        {"cp": 2, "tp": 2, "etp": 1, "parameters": dict.fromkeys(("up", "bias", "down"), {"cp": "S(0)"})},
        {"dp": 4, "ep": 2, "zero": 0},
        {"dp": 4, "ep": 2, "zero": 1, "micro_batches": 2},
        {"dp": 4, "ep": 2, "zero": 3},
        {"dp": 2, "tp": 2, "micro_batches": 4},
        {"cp": 2, "tp": 2, "etp": 1, "micro_batches": ROWS},
        {"tp": 4, "etp": 1, "micro_batches": ROWS},
    ],
    ids=str,
)
def test_programs_train_as_one_process_does(pins: dict[str, Any]) -> None:
    check(Routed, pins, "mixed", "skewed", "one expert has all")


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", [{"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "tp": 2, "etp": 1}, {"dp": 4, "ep": 2, "zero": 3}], ids=str
)
def test_rows_that_are_added_to_their_tokens_travel(pins: dict[str, Any]) -> None:
    check(AddedToTokens, pins, "skewed", "one expert has all")


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", [{"ep": 4}, {"ep": 2, "tp": 2, "etp": 1}, {"dp": 4, "ep": 2, "micro_batches": 2}], ids=str
)
def test_rows_travel_to_matrices_that_the_model_looks_up_for_each(pins: dict[str, Any]) -> None:
    example = ZOO["gpt_oss"].build()
    example.model.set_experts_implementation("batched_mm")
    settings = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "optimizer": sgd_with_momentum}
    program = autopar.compile(example.model, IDEAL, constraints=pins, **settings)
    report = verify_program(program, example.inputs)
    assert report.ok(1e-5), report
    layer = program.source.split("\nclass ")[1]
    assert [layer.count(f" {name}(") for name in ("Routes", "dispatch", "expert_linear", "combine")] == [1, 1, 2, 1]


@pytest.mark.slow
def test_a_pipeline_declares_the_axes_that_its_stages_join(tmp_path: Path) -> None:
    eight = tmp_path / "eight.toml"
    eight.write_text(Path(IDEAL).read_text().replace("num_nodes = 1", "num_nodes = 2"))
    torch.manual_seed(0)
    example, pins = ZOO["qwen3_moe"].build(), {"pp": 2, "ep": 2, "tp": 2, "etp": 1}
    report = autopar.verify(example.model, str(eight), example_inputs=example.inputs, constraints=pins)
    assert report.ok(1e-5), report


def test_experts_on_ranks_of_tp_take_tokens_that_these_cut() -> None:
    """Rows go over both axes at once, to the rank whose run of the experts is the one that S(0) on both gives it."""
    torch.manual_seed(0)
    pins = {"ep": 2, "tp": 2, "etp": 1}
    compiled = autopar.compile(Routed(), IDEAL, example_inputs=batch("mixed"), constraints=pins)
    text = compiled.source
    assert 'Routes(reshape, 4, self.mesh.joint(("ep", "tp")))' in text
    assert [text.count(f" {name}(") for name in ("Routes", "dispatch", "expert_linear", "combine")] == [1, 1, 2, 1]
    assert 'Param((4, 8, 16), ep="S(0)", tp="S(0)")' in text and 'Param((4, 16), ep="S(0)", tp="S(0)")' in text


@pytest.mark.slow
def test_stripes_of_cp_have_all_choices_of_a_token() -> None:
    """So rows that are copies of tokens, and weights of choices, are made and summed where the tokens are."""
    example = ZOO["qwen3_moe"].build()
    settings = {"example_inputs": example.inputs, "loss_fn": example.loss_fn}
    source = autopar.compile(example.model, IDEAL, constraints={"cp": 2, "ep": 2}, **settings).source
    mixture = source[source.index("# mlp") : source.index("return residual + total")]
    assert " Routes(" in mixture and "cp.all_gather(" not in mixture and "cp.all_to_all(" not in mixture


def test_rows_in_the_order_of_experts_stay_where_they_are(tmp_path: Path) -> None:
    """An edited plan in which what is between two layers of experts is whole on tp would gather unlike rows."""
    torch.manual_seed(0)
    pins = {"ep": 2, "tp": 2, "etp": 1}
    compiled = autopar.compile(Routed(), IDEAL, example_inputs=batch("mixed"), constraints=pins)
    plan = compiled.plan
    top = plan.scopes[""]
    for call, labels in (("silu", ("d0", "R")), ("grouped_mm_fallback_1", ("n+e", "a"))):
        edited = dataclasses.replace(top, calls={**top.calls, call: labels})
        with pytest.raises(PlanError, match="rows that are sorted by expert"):
            autopar.compile(
                Routed(), IDEAL, example_inputs=batch("mixed"), plan=dataclasses.replace(plan, scopes={"": edited})
            )


def test_rows_travel_once_there_and_once_back() -> None:
    torch.manual_seed(0)
    compiled = autopar.compile(Routed(), IDEAL, example_inputs=batch("mixed"), constraints={"ep": 4})
    text = compiled.source
    assert [text.count(f" {name}(") for name in ("Routes", "dispatch", "expert_linear", "combine")] == [1, 1, 2, 1]
    assert 'Param((4, 8, 16), ep="S(0)")' in text and 'Param((4, 16), ep="S(0)")' in text


def test_what_is_read_between_two_layers_returns() -> None:
    """The sum over the batch's rows needs them in their own order, and so are they sorted again after it."""

    class Summed(Routed):
        def forward(self, tokens: Tensor, choices: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(tokens).view(-1, WIDTH)
            ids = choices.reshape(-1)
            sorted_ids, order = torch.sort(ids)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
            ends = torch.histc(sorted_ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
            grouped = torch.ops.transformers.grouped_mm_fallback
            rows = grouped(x[order // CHOICES], self.up, ends) + self.bias[sorted_ids]
            more = rows[inverse].square().mean()
            rows = grouped(rows.relu(), self.down, ends)[inverse]
            y = x + rows.view(-1, CHOICES, WIDTH).sum(1)
            return F.cross_entropy(self.head(y), labels.view(-1)) + more

    torch.manual_seed(0)
    compiled = autopar.compile(Summed(), IDEAL, example_inputs=batch("mixed"), constraints={"ep": 4})
    assert [compiled.source.count(f" {name}(") for name in ("dispatch", "combine")] == [2, 2]


@pytest.mark.parametrize(
    ("pins", "says"),
    [
        ({"ep": 5}, "does not divide the experts"),
        ({"ep": 4, "dp": 2, "tp": 2}, "do not multiply"),
        ({"tp": 4, "etp": 2}, "etp must be 1, or all ranks of ttp x tp"),
        ({"etp": 2}, "etp must be 1, or all ranks of ttp x tp"),
        ({"tp": 3, "etp": 1}, "must divide the positions"),
    ],
    ids=str,
)
def test_refused_degrees(pins: dict[str, Any], says: str) -> None:
    with pytest.raises(ConstraintError, match=says):
        autopar.compile(Routed(), IDEAL, example_inputs=batch("mixed"), constraints=pins)


def test_a_model_without_experts_has_no_ranks_for_them() -> None:
    with pytest.raises(ConstraintError, match="no experts that autopar recognizes"):
        autopar.compile(
            nn.Linear(4, 4),
            IDEAL,
            example_inputs=(torch.zeros(8, 4), torch.zeros(8, 4)),
            loss_fn=F.mse_loss,
            constraints={"ep": 2},
        )


@pytest.mark.parametrize("mesh", [Mesh(("ep",), (2,)), Mesh(("ep",), (4,)), Mesh(("ep", "tp"), (2, 2))], ids=str)
def test_as_many_bytes_travel_as_are_priced(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a balanced batch, forward and backward, over all axes that share out the experts as one: what the search asks
    the prices of."""
    graph = graph_of("mixtral", 8)
    pricer = pricer_for(request_for("mixtral"), mesh, 1)
    everything, ranks = tuple(range(len(mesh.axes))), mesh.num_ranks
    asked: list[float] = []

    def noted(rates: Rates, kind: str, axes: tuple[int, ...], num_bytes: float) -> float:
        assert (kind, axes) == ("all_to_all", everything)
        asked.append(num_bytes)
        return 0.0

    monkeypatch.setattr(Rates, "joint_seconds", noted)
    monkeypatch.setattr("autopar.costs.expert_rows.routing.fullest_load", lambda *_: 1.0)
    layer = [op for op in operators_of(graph).values() if op.node.op == EXPERT_LINEAR]
    (rows, width), (num_experts, *_) = layer[0].inputs[0].shape, layer[0].inputs[1].shape
    for operator in layer:
        pricer.contractions.rows.exchange(
            operator, next(o for o in options_of(operator, mesh) if routed_axes(o.axes) == everything)
        )
    sent, lock = [], threading.Lock()

    def work(rank: tuple[int, ...]) -> None:
        axis = simulated[rank].joint(tuple(part.name for part in simulated[rank].axes))
        counting = Counting(axis, sent, lock)
        routes = Routes(torch.arange(rows // ranks) % num_experts, num_experts, counting)  # type: ignore[arg-type]
        x = torch.randn(rows // ranks, width, requires_grad=True)
        inner, outer = (op.inputs[1].shape for op in layer)
        y = expert_linear(dispatch(x, routes), torch.randn(num_experts // ranks, *inner[1:]), routes)
        y = expert_linear(y[:, : outer[1]], torch.randn(num_experts // ranks, *outer[1:]), routes)
        combine(y, routes).sum().backward()

    simulated = meshes(mesh.sizes)
    run_ranks(list(simulated), work, together=True)
    assert sum(sent) / ranks == 2 * sum(asked)  # forward and backward


@dataclasses.dataclass
class Counting:
    """A simulated axis that counts the bytes of the rows that it exchanges."""

    axis: Any
    sent: list[int]
    lock: threading.Lock

    @property
    def size(self) -> int:
        return int(self.axis.size)

    def exchange_parts(self, parts: Tensor) -> Tensor:
        return self.axis.exchange_parts(parts)  # type: ignore[no-any-return]

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        with self.lock:
            self.sent.append(rows.numel() * rows.element_size())
        return self.axis.exchange_rows(rows, sent, received)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_search_over_ep_equals_trying_every_degree() -> None:
    """The free search against the best of all pinned ones, with ample memory and with little."""
    for memory in ({}, {"memory": 1_720_000_000}):
        free = search_plans(request_for("mixtral", "4 a100-80g", **memory)).best.plan.prediction.step_seconds
        tried = []
        for ep in (1, 2, 4):
            try:
                pinned = search_plans(request_for("mixtral", "4 a100-80g", ep=ep, **memory))
                tried.append(pinned.best.plan.prediction.step_seconds)
            except InfeasibleError:
                continue
        assert free == pytest.approx(min(tried), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["4 a100-80g", "2x2 a100-80g"])
def test_the_search_over_foldings_equals_trying_each(devices: str) -> None:
    """Of tp2, the free search against experts on one of its ranks each and on both, over every ep."""
    free = search_plans(request_for("mixtral", devices, tp=2)).best.plan.prediction.step_seconds
    tried = [
        search_plans(request_for("mixtral", devices, tp=2, ep=ep, etp=etp)).best.plan.prediction.step_seconds
        for ep in (1, 2)
        for etp in (1, 2)
    ]
    assert free == pytest.approx(min(tried), rel=1e-9)
    assert len(set(tried)) > 1


class Layers(nn.Module):
    """Layers of experts in a row, of tokens whose experts the batch says."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(8, width, width)) for _ in range(num_layers)])

    def forward(self, x: Tensor, choices: Tensor) -> Tensor:
        sorted_ids, order = torch.sort(choices.reshape(-1))
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        ends = torch.histc(sorted_ids.float(), 8, 0, 7).cumsum(0, dtype=torch.int32)
        rows = x.view(-1, x.shape[-1])[order]
        for weight in self.weights:
            rows = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
        return rows[inverse].sum()


FOLDED = (
    *((1, mesh) for mesh in ("ep2 x tp2", "tp4", "cp2 x tp2", "cp2 x ep2", "dp2 x tp2")),
    *((2, mesh) for mesh in ("ep2 x tp2", "tp4", "cp2 x ep2")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("num_layers", "mesh"), FOLDED)
def test_the_search_over_foldings_equals_brute_force(num_layers: int, mesh: str) -> None:
    """All options of every call with all placements of what they read, wide and narrow, on fast and slow links."""
    for cluster, width in (("8 a100-80g", 64), ("8 a100-80g", 2048), ("4x2 a100-80g pcie4 ethernet-10g", 2048)):
        with torch.device("meta"):
            inputs = {"x": torch.empty(8, 64, width), "choices": torch.empty(8, 64, dtype=torch.int64)}
            graph = trace(Layers(num_layers, width), inputs, None, batch_size=8)
        request = request_for("mixtral", cluster)
        pricer = pricer_for(request, Mesh.parse(mesh), 1)
        problem = build_search_space(graph, operators_of(graph), pricer, request.constraints).problem
        assert solve(problem).objective == pytest.approx(brute_force(problem), rel=1e-12)
