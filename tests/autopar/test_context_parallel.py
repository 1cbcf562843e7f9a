"""Attention over sequences that an axis cuts: which calls can, what it takes, and programs against one process."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.costs.context import ContextCall, NearCall, context_call
from autopar.costs.rates import Training
from autopar.errors import ConstraintError, InfeasibleError
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, Graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Rp, S
from autopar.plan import Plan
from autopar.planning import equal_configs
from autopar.planning.planner import search_plans
from autopar.planning.request import Request
from autopar.proofs import prove_rule
from autopar.report.traffic import context_rows
from autopar.rules import combines, rule_for
from autopar.rules.families.attention import EXCHANGES
from autopar.rules.rule import Joint, Rule, axis_options, joint_option, shard_option
from autopar.settings.constraints import Constraints
from autopar.sharding.call_options import Operator, options_of
from autopar.sharding.scopes import scopes_of
from autopar.units import bytes_text
from benchmarks.memory import OVER, UNDER, Pair, measure
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from examples.zoo import ZOO
from tests.autopar.requests import graph_of, request_for
from tests.autopar.rules.handmade_calls import T, bools, f, make_node

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
ATTENTION = "aten.scaled_dot_product_attention.default"


def attention_rule(*args: Any, **kwargs: Any) -> tuple[Any, Any, Rule]:
    node, inputs = make_node(ATTENTION, *args, **kwargs)
    rule = rule_for(node, inputs)
    assert rule is not None
    return node, inputs, rule


Q = f(2, 4, 12, 8)
CAUSAL = (None, 0.0, True)


@pytest.mark.parametrize(
    ("args", "kwargs", "can"),
    [
        ((Q, Q, Q, *CAUSAL), {}, True),
        ((Q, f(2, 2, 12, 8), f(2, 2, 12, 8), *CAUSAL), {"enable_gqa": True}, True),
        ((Q, f(2, 4, 6, 8), f(2, 4, 6, 8)), {}, True),
        ((Q, Q, Q, bools(2, 1, 12, 12)), {}, True),
        ((Q, Q, Q, T((2, 4, 12, 12), grad=False)), {}, True),
        ((Q, Q, Q, f(2, 4, 12, 12)), {}, False),
        ((Q, Q, Q, None, 0.1), {}, False),
        ((Q, f(2, 4, 6, 8), f(2, 4, 6, 8), *CAUSAL), {}, False),
        ((Q, f(2, 1, 12, 8), f(2, 1, 12, 8)), {}, False),
        ((f(4, 12, 8), f(4, 12, 8), f(4, 12, 8)), {}, False),
    ],
    ids=["causal", "grouped", "cross", "mask", "fixed bias", "learned bias", "dropout", "uneven", "broadcast", "3-dim"],
)
def test_which_calls_can_be_cut(args: Any, kwargs: Any, can: bool) -> None:
    node, inputs, rule = attention_rule(*args, **kwargs)
    joints = [o for o in axis_options(rule, 2, inputs, node.outputs) if o.label in rule.joints]
    is_causal = "is_causal" in kwargs or len(args) > 5
    layouts = ["/stripes"] if is_causal else ["", "/stripes"]
    assert {o.label for o in joints} == ({f"s+t/{e}{end}" for e in EXCHANGES for end in layouts} if can else set())
    for option in joints:
        query, keys = (S(2, meta.shape[2] // 2 if "stripes" in option.label else 1) for meta in inputs[:2])
        assert option.inputs[:3] == (query, keys, keys) and option.outputs == (query,)
        assert option.inputs[3:] == ((query,) if len(inputs) > 3 else ())


@pytest.mark.slow
def test_windows_can_be_cut_either_way() -> None:
    """Exact on 2 and 3 ranks, in consecutive parts, whose reach differs, and in stripes."""
    for bounds in ({"before": 3, "after": 0}, {"before": 1, "after": 5}, {"after": 0, "chunk": 5}):
        node, inputs = make_node(WINDOW_ATTENTION, Q, f(2, 2, 12, 8), f(2, 2, 12, 8), enable_gqa=True, **bounds)
        rule = rule_for(node, inputs)
        assert rule is not None
        assert set(rule.joints) == {f"s+t/{e}{end}" for e in EXCHANGES for end in ("", "/stripes")}
        assert not prove_rule(node, inputs, rule, search_missed=False).wrong


@pytest.mark.slow
def test_sinks_travel_nowhere() -> None:
    """Causal, in windows and without a mask, exact under every exchange; the sinks are whole on every rank."""
    for settings in ({"is_causal": True}, {"before": 3, "after": 0}, {}):
        node, inputs = make_node(SINK_ATTENTION, Q, f(2, 2, 12, 8), f(2, 2, 12, 8), f(4), enable_gqa=True, **settings)
        rule = rule_for(node, inputs)
        assert rule is not None
        layouts = ("/stripes",) if "is_causal" in settings else ("", "/stripes")
        assert set(rule.joints) == {f"s+t/{e}{end}" for e in EXCHANGES for end in layouts}
        assert all(joint_option(rule, label, 2).inputs[3] == Rp for label in rule.joints)
        assert not prove_rule(node, inputs, rule, search_missed=False).wrong


def test_neighbors_send_what_windows_reach() -> None:
    """Of 4 ranks with 12 positions each: 5 keys of the rank before; of chunks of 8 half of one, of those of 6 none."""
    for bounds, reached in (({"before": 5, "after": 0}, 5), ({"after": 0, "chunk": 8}, 4), ({"chunk": 6}, 0)):
        long = f(2, 4, 48, 8)
        node, inputs = make_node(WINDOW_ATTENTION, long, long, long, **bounds)
        operator = Operator("", node, inputs, rule_for(node, inputs), True, None, {}, ("s", 1))  # type: ignore[arg-type]
        ring = next(o for o in options_of(operator, Mesh(("cp",), (4,))) if o.labels == ("s+t/ring",))
        call = context_call(operator, ring, Mesh(("cp",), (4,)), on_cpu=True)
        assert isinstance(call, NearCall)
        assert call.near == pytest.approx(call.part * reached / 12)
        free = (lambda kind, axis, num_bytes: num_bytes), (lambda num_bytes: 0.0), (lambda keys, causal: (0.0, 0.0))
        assert call.seconds(*free) == (call.near, call.near + call.wide_near)


def test_a_mask_without_rows_is_whole_and_odd_lengths_are_not_cut() -> None:
    node, inputs, rule = attention_rule(Q, Q, Q, bools(2, 1, 1, 12))
    assert joint_option(rule, "s+t/ring", 2).inputs[3].is_replicated
    assert not [o for o in axis_options(rule, 5, inputs, node.outputs) if o.label in rule.joints]


def test_one_axis_only() -> None:
    _, _, rule = attention_rule(Q, Q, Q)
    both, rows, heads = joint_option(rule, "s+t/ring", 2), shard_option(rule, "s"), shard_option(rule, "h")
    assert combines(rule, (both, heads), (2, 2))
    assert not combines(rule, (both, both), (2, 2))
    assert not combines(rule, (both, rows), (2, 2))


def test_parts_without_an_exchange_are_wrong() -> None:
    node, inputs, rule = attention_rule(f(2, 2, 6, 4), f(2, 2, 6, 4), f(2, 2, 6, 4), *CAUSAL)
    alone = replace(rule, joints={"s+t": Joint(("s", "t", "t"), "s", "")})
    wrong = prove_rule(node, inputs, alone, search_missed=False).wrong
    assert any(text.startswith("s+t: S(2), S(2), S(2) -> S(2) on 2: output 0 differs") for text in wrong)


# --- prices -----------------------------------------------------------------------------------------------------------


def call_of(exchange: str, size: int, is_causal: bool) -> ContextCall:
    return ContextCall(exchange, 0, size, is_causal, 2, 10, 10, 100.0, 200.0, 50.0, 100.0)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_all_ranks_take_as_long(exchange: str, size: int) -> None:
    """With free exchanges: half of the keys of every rank under a causal mask, backward twice as long."""

    def kernel(keys: int, causal: bool) -> tuple[float, float]:
        return (keys / 2, float(keys)) if causal else (float(keys), 2.0 * keys)

    free = (lambda kind, axis, num_bytes: 0.0), (lambda num_bytes: 0.0)
    forward, backward = call_of(exchange, size, True).seconds(*free, kernel)
    assert (forward, backward) == (5 * size, 10 * size)
    assert call_of(exchange, size, False).seconds(*free, kernel) == (10 * size, 20 * size)


def test_exchanges_that_take_longer_than_kernels() -> None:
    """A ring hides its kernels behind its messages, but for the last; a gather hides nothing."""

    def collectives(kind: str, axis: int, num_bytes: float) -> float:
        return {"p2p": 1.0, "all_gather": 10.0, "reduce_scatter": 1000.0}[kind] * num_bytes

    def kernel(keys: int, causal: bool) -> tuple[float, float]:
        return 0.1 * keys, 0.3 * keys

    free = (lambda num_bytes: 0.0), kernel
    forward, backward = call_of("ring", 4, False).seconds(collectives, *free)
    assert (forward, backward) == (pytest.approx(3 * 100 + 1), pytest.approx(3 * 300 + 3 + 200))
    forward, backward = call_of("all_gather", 4, False).seconds(collectives, *free)
    assert (forward, backward) == (pytest.approx(4000 + 4), pytest.approx(4000 + 12 + 400_000))


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_cuts_all_tokens() -> None:
    best = search_plans(request_for("llama_gqa", cp=4, context="ring")).best
    attention = [key for key, operator in best.operators.items() if operator.rule.joints]
    assert attention
    for key in attention:
        option = best.assignment.operators[key]
        assert option.axes[-1].lowering == "ring" and option.outputs[0][-1] == S(2, 8)
        call = context_call(best.operators[key], option, Mesh(("cp",), (4,)), on_cpu=False)
        assert call is not None and (call.queries, call.keys, call.size) == (8, 8, 4)
        assert call.part == 2 * best.operators[key].inputs[1].num_bytes / 4
    linear = [key for key in best.operators if key[0] and best.operators[key].node.op.startswith("aten.linear")]
    assert all(best.assignment.operators[key].outputs[0][-1] == S(1, 8) for key in linear)


@pytest.mark.slow
def test_the_report_tells_what_is_exchanged() -> None:
    """Three times a quarter of all keys and values, and their gradients once more on the way back to their rank."""
    best = search_plans(request_for("llama_gqa", cp=4, context="ring")).best
    (scope,) = (scope for scope in scopes_of(best.graph) if scope.layer)
    rows = context_rows(scope, best.operators, best.assignment, best.plan.mesh, False, 1)
    key, value = next(o.inputs[1:3] for o in best.operators.values() if o.rule.joints)
    shard_bytes = (key.numel + value.numel) * 4 // 4
    assert [row.traffic for row in rows] == [
        f"{bytes_text(3 * shard_bytes)}, backward {bytes_text(3 * shard_bytes + 4 * shard_bytes)} p2p"
    ]
    assert rows[0].count == scope.count
    alone = search_plans(request_for("llama_gqa", tp=4)).best
    assert not any(
        context_rows(s, alone.operators, alone.assignment, alone.plan.mesh, False, 1) for s in scopes_of(alone.graph)
    )


def test_only_cp_exchanges_keys() -> None:
    """Roles of axes: tp never cuts queries and keys together, and cp cuts no weight."""
    best = search_plans(request_for("llama_gqa", cp=2, tp=2)).best
    mesh = best.plan.mesh
    for operator in best.operators.values():
        for option in options_of(operator, mesh):
            assert option.axes[mesh.axes.index("tp")].lowering not in EXCHANGES
    stored = [parameter.placements[mesh.axes.index("cp")] for parameter in best.assignment.parameters.values()]
    assert stored and all(placement.is_replicated for placement in stored)


@pytest.mark.slow
def test_buffers_that_a_call_writes_to_stay_whole() -> None:
    """Batch norm is cut along the sequence on cp, and could be by channel; a moved copy of what is whole would be
    written to."""
    example = ZOO["conformer"].build()
    pins = {"cp": 4, "context": "ring"}
    compiled = autopar.compile(
        example.model, IDEAL, example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=pins
    )
    best = compiled.best
    norms = [key for key, operator in best.operators.items() if "batch_norm" in operator.node.op]
    assert norms and all(best.assignment.operators[key].labels[0] != "c" for key in norms)
    statistics = [buffer for (_, name), buffer in best.assignment.parameters.items() if "running_" in name]
    assert statistics and all(placement.is_replicated for buffer in statistics for placement in buffer.placements)


@functools.cache
def long_trace(length: int) -> BatchedTrace:
    def traced(micro_batch: int) -> Graph:
        with torch.device("meta"):
            example = EXAMPLES["llama_gqa"](layers=2, batch_size=4, seq_len=length, width=256, vocab_size=256)
        return trace(example.model, example.inputs, example.loss_fn, batch_size=micro_batch)

    return BatchedTrace(traced)


def long_request(rows: int, length: int = 512, **constraints: Any) -> Request:
    limits = Constraints.parse(constraints)
    return Request(long_trace(length), Cluster.parse("4 a100-80g"), rows, "fp32", Training(), limits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "length", "pins", "expected"),
    [(2, 512, {}, 1), (1, 8192, {}, 2), (2, 8192, {"tp": 1}, 2), (2, 512, {"memory": "1552MiB"}, 2)],
)
def test_the_search_over_cp_equals_trying_every_degree(
    rows: int, length: int, pins: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """expected: the degree that is fastest of those that fit."""
    monkeypatch.setattr(equal_configs, "MIN_POSITIONS", 8)
    best = search_plans(long_request(rows, length, **pins)).best.plan
    degrees: dict[int, float] = {}
    for cp in (1, 2, 4):
        with contextlib.suppress(InfeasibleError, ConstraintError):
            pinned = search_plans(long_request(rows, length, cp=cp, **pins)).best.plan
            degrees[pinned.mesh.size("cp")] = pinned.prediction.step_seconds
    assert best.prediction.step_seconds == pytest.approx(min(degrees.values()), rel=1e-9), (best.mesh, degrees)
    assert best.mesh.size("cp") == expected


@pytest.mark.slow
def test_refusals() -> None:
    request_for("llama_gqa", cp=4, context="ring").constraints.check(graph_of("llama_gqa"))
    example = EXAMPLES["gpt2"](dropout=0.1)
    with pytest.raises(ConstraintError, match="without dropout"):
        autopar.compile(example.model, IDEAL, example_inputs=example.inputs, constraints={"context": "ring"})
    with pytest.raises(ConstraintError, match="all_gather, ring, heads"):
        request_for("llama_gqa", context="zigzag")
    example = EXAMPLES["llama_gqa"](seq_len=14)
    with pytest.raises(ConstraintError, match=r"14 positions(.|\n)*cp of 2, 7, 14"):
        autopar.compile(example.model, IDEAL, example_inputs=example.inputs, constraints={"cp": 4, "context": "ring"})
    with pytest.raises(ConstraintError, match=r"cannot be sharded like this(.|\n)*all_gather(.|\n)*ring"):
        autopar.compile(
            EXAMPLES["bert"](num_heads=1).model,
            IDEAL,
            example_inputs=EXAMPLES["bert"](num_heads=1).inputs,
            constraints={"cp": 4, "context": "heads"},
        )


@pytest.mark.slow
def test_program_and_plan_file(golden: Any) -> None:
    example = EXAMPLES["llama_gqa"](layers=3)
    pins = {"dp": 2, "cp": 2, "zero": 2, "context": "ring"}
    compiled = autopar.compile(example.model, IDEAL, example_inputs=example.inputs, constraints=pins)
    golden("programs/llama_gqa_context.py.txt", compiled.source)
    text = compiled.plan.to_yaml()
    again = autopar.compile(example.model, IDEAL, example_inputs=example.inputs, plan=Plan.from_yaml(text))
    assert "s+t/ring/stripes" in text and again.source == compiled.source


# --- real processes ---------------------------------------------------------------------------------------------------


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("llama_gqa", {"cp": 4, "context": "ring"}),
        slow("gpt2", {"dp": 2, "cp": 2, "zero": 3, "micro_batches": 2, "context": "all_gather"}),
        slow("llama_gqa", {"cp": 2, "tp": 2, "context": "all_gather"}),
        slow("gpt2", {"cp": 4, "zero": 1, "context": "ring"}),
        slow("bert", {"cp": 4, "context": "ring"}),
        slow("bert", {"cp": 2, "tp": 2, "context": "heads"}),
        slow("llama_gqa", {"dp": 2, "cp": 2, "recompute": "selective", "context": "ring"}),
        slow("llama_gqa", {"pp": 2, "cp": 2, "recompute": "full", "micro_batches": 4, "context": "all_gather"}),
    ],
)
def test_programs_equal_one_process(name: str, constraints: dict[str, Any]) -> None:
    example = EXAMPLES[name](dropout=0.0)
    report = autopar.verify(
        example.model,
        IDEAL,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=constraints,
    )
    assert report.gradients and report.parameters
    assert report.ok(1e-5), str(report)


class Packed(nn.Module):
    """Decoder whose first layer sees a window of its document, and the second all of it: documents end where a batch
    input says, positions are a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(48, 32), nn.Parameter(torch.randn(1, 16, 32))
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))
        self.head = nn.Linear(32, 48)

    def forward(self, ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        x, at = self.tokens(ids) + self.positions, torch.arange(ids.shape[1])
        document = (at[None, :, None] >= ends[:, None]).sum(-1)
        packed = (document[:, None, :, None] == document[:, None, None]) & (at[None] <= at[:, None])
        window = (at[None] <= at[:, None]) & (at[:, None] - at[None] < 6)
        for layer, mask in zip(self.layers, (window, packed), strict=True):
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in layer(x).chunk(3, -1))
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        return self.head(x)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("context", ["ring", "all_gather", "heads"])
def test_windows_and_packed_documents_equal_one_process(context: str) -> None:
    """Ends of documents are no sequence, though a row has three; a table of positions that is a parameter is cut."""
    ids = torch.randint(48, (8, 17), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([[3, 9, 16], [5, 6, 13], [16, 16, 16], [1, 2, 3]]).repeat(2, 1)
    report = autopar.verify(
        Packed(),
        IDEAL,
        example_inputs={"ids": ids[:, :-1], "ends": ends, "target": ids[:, 1:]},
        loss_fn=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        constraints={"cp": 4, "context": context},
    )
    assert report.gradients and report.ok(1e-5), str(report)


LONG = {"layers": 2, "width": 64, "seq_len": 512, "vocab_size": 32, "batch_size": 4}
"""Where attention, not the loss, is the peak."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("exchange", "mode"), [slow("ring", "full"), slow("all_gather", "full"), slow("ring", "selective"),
                           slow("all_gather", "none")]
)  # fmt: skip
def test_predicted_peaks_are_close_to_measured_ones(exchange: str, mode: str) -> None:
    constraints = {"cp": 4, "zero": 0, "micro_batches": 4, "context": exchange, "recompute": mode}
    for row in measure(Pair("gpt2", constraints, sizes=LONG)):
        assert 1 - UNDER <= row.ratio <= 1 + OVER, str(row)


class Recurrence(nn.Module):
    """A linear recurrence over the positions, step by step, with a gate of its input and a parameter per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        gate, state, states = torch.sigmoid(self.gate(x)), torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            state = state * gate[:, position] * self.decay + x[:, position]
            states.append(state)
        logits = self.head(torch.stack(states, 1))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.slow
def test_a_recurrence_has_its_channels_cut() -> None:
    """No rank has all positions of all channels: positions go for channels before the first step, and back after the
    last one."""
    torch.manual_seed(0)
    batch = {name: torch.randint(16, (4, 8)) for name in ("tokens", "labels")}
    pins = {"dp": 2, "cp": 2}
    source = autopar.compile(Recurrence(), IDEAL, example_inputs=batch, constraints=pins).source
    assert "cp.all_gather(" not in source and "cp.all_to_all(" in source
    report = autopar.verify(Recurrence(), IDEAL, example_inputs=batch, constraints=pins)
    assert report.ok(1e-5), report
