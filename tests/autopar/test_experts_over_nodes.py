"""Experts shared out over several nodes: rows that cross once per node, exact, and priced as they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers grouped_mm_fallback
from torch import Tensor, nn

import autopar
from autopar.cluster import as_cluster
from autopar.costs.expert_exchange import ID_BYTES, Nodes, nodes_of, parts_of_token, pays
from autopar.costs.expert_rows import RowPrices
from autopar.costs.rates import Training
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.ir.mesh import Mesh
from autopar.planning.request import Request, pricer_for
from autopar.proofs.simulated_ranks import meshes, run_ranks
from autopar.report.facts import facts_of
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.settings.constraints import Constraints
from autopar.sharding.call_options import operators_of, options_of
from autopar.verify import sgd_with_momentum, verify_program
from codegen.runtime.experts_by_node import NodeRoutes, combine_by_node, dispatch_by_node
from cost_models import collective

IDEAL = Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml"
ROWS, LENGTH, CHOICES, EXPERTS, WIDTH = 8, 4, 3, 8, 8


@pytest.fixture
def two_nodes(tmp_path: Path) -> str:
    """Two nodes of two ranks, with a slow link between them."""
    before, inter = IDEAL.read_text(encoding="utf-8").split("[inter_node]")
    inter = inter.replace("bytes_per_second = 1000000000000.0", "bytes_per_second = 1000000.0")
    before = before.replace("num_nodes = 1", "num_nodes = 2").replace("devices_per_node = 4", "devices_per_node = 2")
    path = tmp_path / "nodes.toml"
    path.write_text(f"{before}[inter_node]{inter}", encoding="utf-8")
    return str(path)


class Mixture(nn.Module):
    """A mixture as transformers writes it, whose batch says which experts a token goes to; weights are the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.gate = nn.Linear(WIDTH, CHOICES)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, choices: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens).view(-1, WIDTH)
        weights = self.gate(x).softmax(-1).reshape(-1)
        y = x + self.mixed(x, weights, choices.reshape(-1))
        return F.cross_entropy(self.head(y), labels.view(-1))

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        sorted_ids, order = torch.sort(ids)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        ends = torch.histc(sorted_ids.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        grouped = torch.ops.transformers.grouped_mm_fallback
        rows = F.silu(grouped(x[order // CHOICES], self.up, ends) + self.bias[sorted_ids])
        rows = grouped(rows, self.down, ends) * weights[order].unsqueeze(-1)
        return self.summed(rows[inverse])

    def summed(self, rows: Tensor) -> Tensor:
        return rows.view(-1, CHOICES, WIDTH).sum(1)


class OtherUse(Mixture):
    """One whose weighed rows are read by something else, too."""

    def summed(self, rows: Tensor) -> Tensor:
        return rows.view(-1, CHOICES, WIDTH).sum(1) + rows.square().mean()


class OtherSum(Mixture):
    """One that sums rows of other tokens."""

    def summed(self, rows: Tensor) -> Tensor:
        return rows.view(CHOICES, -1, WIDTH).sum(0)


def batch(routing: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = ROWS, LENGTH, CHOICES
    choices = {
        "balanced": torch.rand(ROWS, LENGTH, EXPERTS, generator=generator).argsort(-1)[..., :CHOICES],
        "skewed": (torch.rand(shape, generator=generator) > 0.9).long() * (EXPERTS - 1),
        "one expert has all": torch.full(shape, 2),
        "nothing leaves a node": torch.zeros(shape, dtype=torch.long),
    }[routing]
    choices[ROWS // 2 :] += 4 * (routing == "nothing leaves a node")
    tokens = torch.randint(16, (2, ROWS, LENGTH), generator=generator)
    return {"tokens": tokens[0], "choices": choices, "labels": tokens[1]}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "pins",
    [
        {"dp": 4, "ep": 4, "zero": 1, "micro_batches": 2},
        {"dp": 2, "ep": 2, "tp": 2, "etp": 1},
    ],
    ids=str,
)
def test_programs_train_as_one_process_does(two_nodes: str, pins: Mapping[str, Any]) -> None:
    torch.manual_seed(0)
    settings = {"example_inputs": batch("balanced"), "constraints": pins, "optimizer": sgd_with_momentum}
    program = autopar.compile(Mixture(), two_nodes, **settings)
    for routing in ("balanced", "skewed", "one expert has all", "nothing leaves a node"):
        report = verify_program(program, batch(routing))
        assert report.ok(1e-5), f"{routing}: {report}"


def planned(model: nn.Module, cluster: str, **constraints: Any) -> autopar.CompiledProgram:
    torch.manual_seed(0)
    return autopar.compile(model, cluster, example_inputs=batch("balanced"), constraints=constraints)


def source(model: nn.Module, cluster: str, **constraints: Any) -> str:
    return str(planned(model, cluster, **constraints).source)


def test_the_report_names_the_way_of_rows_and_what_others_would_take(two_nodes: str) -> None:
    notes = facts_of(planned(Mixture(), two_nodes, dp=4, ep=4)).notes
    told = [note for note in notes if note.startswith("expert rows over ep, per layer and micro-batch: ")]
    assert len(told) == 1, notes
    chosen, others = told[0].split(": ", 1)[1].split("; not in programs: ")
    first, second = chosen.split(", ")
    assert first.startswith("once_per_node ") and first.endswith(" (in this program)") and "all_to_all " in second
    assert [way.split()[0] for way in others.split(", ")][0] == "hybrid_ep_overlapped"
    alone = facts_of(planned(Mixture(), str(IDEAL), dp=4, ep=1)).notes
    assert not any("expert rows" in note for note in alone)


def test_rows_cross_once_where_the_calls_show_that_they_may_and_the_axis_spans_nodes(two_nodes: str) -> None:
    text = source(Mixture(), two_nodes, dp=4, ep=4)
    names = ("NodeRoutes", "dispatch_by_node", "combine_by_node", "Routes", "repeat_interleave")
    assert [text.count(f" {name}(") for name in names] == [1, 1, 1, 0, 0], text
    assert f"EXPERTS, ep, {CHOICES}, neighbors=2)" in text or f"8, ep, {CHOICES}, neighbors=2)" in text, text
    folded = source(Mixture(), two_nodes, ep=2, tp=2, etp=1)
    assert f'8, self.mesh.joint(("ep", "tp")), {CHOICES}, neighbors=2)' in folded, folded
    for model, cluster, pins in (
        (OtherUse(), two_nodes, {"dp": 4, "ep": 4}),
        (OtherSum(), two_nodes, {"dp": 4, "ep": 4}),
        (Mixture(), two_nodes, {"dp": 4, "ep": 2}),  # on one node
        (Mixture(), str(IDEAL), {"dp": 4, "ep": 4}),  # nothing to gain
    ):
        assert " Routes(" in source(model, cluster, **pins), (type(model), pins)


@dataclass(frozen=True)
class Counting:
    """A simulated axis that counts the bytes that leave this rank, by whether they leave its node of two."""

    axis: Any
    sent: dict[str, int] = field(default_factory=lambda: {"inside": 0, "across": 0})

    @property
    def size(self) -> int:
        return int(self.axis.size)

    @property
    def rank(self) -> int:
        return int(self.axis.rank)

    def exchange_parts(self, parts: Tensor) -> Tensor:
        return self.axis.exchange_parts(parts)  # type: ignore[no-any-return]

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        for other, count in enumerate(sent):
            if other != self.rank:
                width = rows[:1].numel() * rows.element_size()
                self.sent["inside" if other // 2 == self.rank // 2 else "across"] += count * width
        return self.axis.exchange_rows(rows, sent, received)  # type: ignore[no-any-return]


def test_as_many_bytes_travel_as_are_priced(monkeypatch: pytest.MonkeyPatch, two_nodes: str) -> None:
    """Of tokens that choose every three of eight experts equally often, forward and backward."""
    every = torch.combinations(torch.arange(EXPERTS), CHOICES)
    tokens = torch.zeros(4, len(every), dtype=torch.long)
    inputs = {"tokens": tokens, "choices": every.expand(4, -1, -1), "labels": tokens}
    graph = trace(Mixture(), inputs, None, batch_size=4)
    mesh = Mesh(("ep",), (4,))
    request = Request(
        BatchedTrace(lambda rows: graph), as_cluster(two_nodes), 4, "fp32", Training(), Constraints.parse({})
    )
    pricer = pricer_for(request, mesh, 1)
    priced = {"inside": 0.0, "across": 0.0}

    def noted(kind: str, num_bytes: float, group: collective.Group, cluster: Any) -> float:
        assert kind == "all_to_all"
        priced["inside" if group.stride == 1 else "across"] += num_bytes * (group.size - 1) / group.size
        return 0.0

    monkeypatch.setattr("cost_models.routing.fullest_load", lambda *_: 1.0)
    layers = [op for op in operators_of(graph).values() if op.node.op == EXPERT_LINEAR]
    assert [op.route.choices for op in layers] == [CHOICES] * 2
    assert all(pricer.contractions.rows.crosses_once(operator, options_of(operator, mesh)[0]) for operator in layers)
    monkeypatch.setattr(RowPrices, "crosses_once", lambda *_: True)
    monkeypatch.setattr(collective, "seconds", noted)
    for id_bytes in (ID_BYTES, 0):  # nodes receive choices forward alone
        monkeypatch.setattr("autopar.costs.expert_rows.ID_BYTES", id_bytes)
        for operator in layers:
            pricer.contractions.rows.exchange(operator, options_of(operator, mesh)[0])

    axes = {rank: Counting(rank_mesh.axes[0]) for rank, rank_mesh in meshes((4,)).items()}

    def work(rank: tuple[int, ...]) -> None:
        routes: Any = NodeRoutes(every.flatten(), EXPERTS, axes[rank], CHOICES, neighbors=2)
        x = torch.randn(len(every), WIDTH, requires_grad=True)
        weights = torch.rand(every.numel(), requires_grad=True)
        combine_by_node(dispatch_by_node(x, routes), weights, routes).sum().backward()

    run_ranks(list(axes), work, together=True)
    measured = {way: sum(axis.sent[way] for axis in axes.values()) / 4 for way in priced}
    assert measured == pytest.approx(priced, rel=1e-12)


def test_a_token_reaches_as_many_nodes_as_chance_says() -> None:
    every = torch.combinations(torch.arange(16), 3) // 4
    mean = sum(len(set(nodes)) for nodes in every.tolist()) / len(every)
    assert parts_of_token(4, 16, 3) == pytest.approx(mean, rel=1e-12)


def test_where_the_axis_spans_nodes_and_what_then_pays() -> None:
    cluster = as_cluster("2x8 h100-sxm")
    assert nodes_of(collective.Group(16, 1), cluster) == Nodes(2, 8, 1)
    assert nodes_of(collective.Group(8, 2), cluster) == Nodes(2, 4, 2)
    assert nodes_of(collective.Group(8, 1), cluster) is None
    assert nodes_of(collective.Group(2, 8), cluster) is None  # one rank on each
    assert pays(Nodes(2, 8, 1), 128, 8, cluster)
    assert not pays(Nodes(2, 8, 1), 128, 1, cluster)  # nothing is sent twice
