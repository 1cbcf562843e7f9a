"""What the planner knows of fused kernels: which calls are one, what that takes and keeps, and that programs agree."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar.costs.emitted import emitted, priced
from autopar.costs.events import Ran, Reader
from autopar.frontend.trace import trace
from autopar.ir.chain import chain, segments
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import Mesh
from autopar.ir.placement import P
from autopar.lowering.lower import lower
from autopar.plan import Plan
from autopar.planning.planner import search_plans
from autopar.planning.predict import one_stage_costs
from autopar.planning.request import Request, pricer_for
from autopar.planning.search_space import build_search_space
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, Option, operators_of, options_of
from autopar.sharding.scopes import Scope, scopes_of
from codegen.fusion import fuse
from codegen.program import Call
from cost_models import compute
from examples.models import EXAMPLES
from search.problem import evaluate
from tests.autopar.requests import (
    BATCH,
    Setting,
    graph_of,
    request_for,
    searched_activation_bytes,
    shared_reshard_seconds,
    take_nothing_for_parted,
)

WRITTEN_OUT = ("aten.gelu.default", "aten.tanh.default")
"""GPT-2 writes GELU operation by operation, which becomes one call."""

NARROW = 128
"""So narrow that the rows of a batch pay for a head without logits."""


@cache
def dropping(name: str, width: int, options: str) -> Graph:
    """`graph_of` a model with dropout. options: more of them as keyword=value."""
    more = dict(option.split("=") for option in options.split())
    with torch.device("meta"):
        own = {"layers": 3, "batch_size": BATCH, "seq_len": 32, "width": width, "vocab_size": 1024, "dropout": 0.1}
        example = EXAMPLES[name](**own, **more)
    return trace(example.model, example.inputs, example.loss_fn, batch_size=BATCH)


@cache
def fused_setting(
    name: str, mesh: str, width: int = NARROW, cluster: str = "4 a100-80g", options: str | None = None
) -> Setting:
    """options: see `dropping`; without them there is no dropout."""
    request: Request = replace(request_for(name, cluster), kernels=True)
    graph = graph_of(name, BATCH, width) if options is None else dropping(name, width, options)
    operators = operators_of(graph)
    pricer = pricer_for(request, Mesh.parse(mesh), 1)
    return Setting(graph, operators, pricer, build_search_space(graph, operators, pricer, request.constraints))


def operator_of(it: Setting, op: str, scope: str) -> Operator:
    """The last call of that operator in a scope that is part of a run."""
    own = [o for (where, _), o in it.operators.items() if where == scope and o.node.op.startswith(op) and o.fusions]
    return own[-1]


def whole(it: Setting, operator: Operator) -> Option:
    """The option that shards nothing."""
    return next(o for o in options_of(operator, it.pricer.mesh) if all(p.is_replicated for p in sum(o.inputs, ())))


# --- which calls are one ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "dp2 x tp2"),
        ("gpt2", "dp4"),
        pytest.param("qwen3", "tp4", marks=pytest.mark.slow),
        pytest.param("t5", "tp2", marks=pytest.mark.slow),
    ],
)
def test_the_calls_that_are_counted_as_one_are_one_in_the_program(name: str, mesh: str, seed: int) -> None:
    """Also under random decisions, of which some part a run by a reshard or cut what a kernel needs whole."""
    counts_what_is_written(fused_setting(name, mesh), name, seed)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt2", "dp2 x tp2", ""),
        ("bert", "tp4", ""),
        pytest.param("t5", "tp2", "feed_forward_proj=gated-gelu", marks=pytest.mark.slow),
    ],
)
def test_the_same_where_patterns_share_calls(name: str, mesh: str, options: str, seed: int) -> None:
    """With dropout: an addition is its, or the norm's."""
    counts_what_is_written(fused_setting(name, mesh, options=options), name, seed)


def calls_of(it: Setting, scope: Scope, assignment: Assignment) -> tuple[Node, ...]:
    """What predictions count of a scope."""
    program = emitted(it.graph, it.operators, it.pricer, assignment, {}).program
    kernels = priced(program, it.graph, it.operators, it.pricer).kernels
    assert kernels is not None and kernels.fusions is not None
    own = it.operators, assignment, kernels.fusions, segments(it.graph)
    cls = next((layer for layer in program.layers if layer.name == scope.name), program.root)
    units = Reader(scope, it.pricer.mesh, *own).units(cls)
    return tuple(event.operator.node for unit in units.values() for event in unit.events if isinstance(event, Ran))


def counts_what_is_written(it: Setting, name: str, seed: int) -> None:
    _, assignment = it.assignment(seed)
    plan = Plan(name, "", it.pricer.mesh, BATCH, 1, "fp32", {})
    program = fuse(lower(it.graph, it.operators, plan, assignment))
    bodies = {"": program.root.body} | {layer.name: layer.body for layer in program.layers}
    for scope in scopes_of(it.graph):
        counted = calls_of(it, scope, assignment)
        written = Counter(s.target for s in bodies[scope.name] if isinstance(s, Call))
        found = Counter(node.op for node in counted if node.op.startswith("kernels.") or node.op in WRITTEN_OUT)
        fused_calls = {t: n for t, n in written.items() if t.startswith("kernels.") or t in WRITTEN_OUT}
        assert found == fused_calls
        assert seed or scope.name or any("cross_entropy" in op for op in found)


def test_few_rows_leave_the_head_to_the_losss_own_kernel() -> None:
    it = fused_setting("llama", "single", width=512)
    _, assignment = it.assignment(0)
    ops = [node.op for node in calls_of(it, scopes_of(it.graph)[0], assignment)]
    assert "kernels.cross_entropy" in ops and "kernels.linear_cross_entropy" not in ops


def test_references_on_a_cpu_are_the_calls_that_they_stand_for() -> None:
    it = fused_setting("llama", "single", cluster="1 cpu")
    _, assignment = it.assignment(0)
    nodes = [n for s in scopes_of(it.graph) for n in calls_of(it, s, assignment)]
    assert [n.op for n in nodes if n.op.startswith("kernels.")] == ["kernels.linear_cross_entropy"]


def test_without_kernels_no_run_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("patterns are matched")

    monkeypatch.setattr("autopar.sharding.fusible_runs.matches", refuse)
    assert search_plans(request_for("llama", "1 a100-80g")).best
    with pytest.raises(AssertionError, match="matched"):
        search_plans(replace(request_for("llama", "1 a100-80g"), kernels=True))


# --- seconds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", "dp2 x tp2"), ("gpt2", "tp4"), pytest.param("t5", "dp4", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_seconds_add_up_to_the_searchs(name: str, mesh: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    it = fused_setting(name, mesh).without_overlap()
    chosen, assignment = it.assignment(seed)
    seconds, num_bytes = evaluate(it.search_space.problem, chosen)
    seconds -= shared_reshard_seconds(it, assignment)
    emitted = one_stage_costs(it.graph, it.operators, it.pricer, assignment).simulated().prediction.step_seconds
    assert emitted >= seconds * (1 - 1e-9)
    take_nothing_for_parted(monkeypatch)
    costs = one_stage_costs(it.graph, it.operators, it.pricer, assignment)
    assert costs.simulated().prediction.step_seconds == pytest.approx(seconds, rel=1e-9)
    own = [costs.ranks[0].costs[unit] for unit in chain(it.graph)]
    kept_bytes = searched_activation_bytes(it, assignment)
    assert sum(cost.fixed_bytes for cost in own) + kept_bytes == pytest.approx(num_bytes, rel=1e-9)


def test_swiglu_reads_two_tensors_and_writes_one() -> None:
    """Each call is charged for what enters the run there: the gate at SiLU, the rest at the product."""
    it = fused_setting("llama", "single")
    device, found = it.pricer.cluster.device, []
    for op, forward, backward in (("aten.silu", 1 / 3, 2 / 5), ("aten.mul", 2 / 3, 3 / 5)):
        operator = operator_of(it, op, "LlamaDecoderLayer")
        size = operator.node.outputs[0].num_bytes
        whole_run = [compute.seconds(compute.Work("memory", 0.0, n * size), device) for n in (3, 5)]
        found.append(it.pricer.operator_seconds(operator, whole(it, operator)))
        assert found[-1] == pytest.approx((forward * whole_run[0], backward * whole_run[1]))


def test_rms_norm_reads_x_and_writes_y() -> None:
    """Backward two kernels: dy, x and dx of all rows, and the weight and its gradient."""
    it = fused_setting("llama", "single")
    scope = "LlamaDecoderLayer"
    runs = {id(f): f for (s, _), o in it.operators.items() if s == scope for f in o.fusions if f.name == "RMSNorm"}
    fusion = next(iter(runs.values()))
    own = [it.operators[scope, member.name] for member in fusion.members]
    seconds = [it.pricer.operator_seconds(operator, whole(it, operator)) for operator in own]
    device, (x, weight) = it.pricer.cluster.device, (fusion.entering[ref].num_bytes for ref in fusion.node.inputs)
    moved = 2 * x + weight, 3 * x + 2 * weight
    expected = [compute.seconds(compute.Work("memory", 0.0, size), device) for size in moved]
    assert sum(f for f, _ in seconds) == pytest.approx(expected[0])
    assert sum(b for _, b in seconds) == pytest.approx(expected[1] + device.kernel_launch_seconds)
    assert len(runs) == 2 and len(own) >= 6


@pytest.mark.parametrize(
    ("model", "options", "name", "forward", "backward", "launches"),
    [
        # In units of the result's bytes, a parameter's, and the angles'. Backward: gradients of both results, the sum
        # that is kept, and one gradient for both terms.
        ("llama", None, "sum and RMSNorm", (4, 1, 0), (4, 2, 0), 2),
        ("gpt2", None, "sum and LayerNorm", (4, 2, 0), (4, 3, 0), 2),
        # cos and sin are all that is kept.
        ("llama", None, "rotary", (4, 0, 2), (4, 0, 2), 1),
        # The residual's gradient is the result's.
        ("gpt2", "", "dropout and sum", (3, 0, 0), (2, 0, 0), 1),
        pytest.param("t5", "feed_forward_proj=gated-gelu", "GeGLU", (3, 0, 0), (5, 0, 0), 1, marks=pytest.mark.slow),
        ("gpt2", None, "GELU", (2, 0, 0), (3, 0, 0), 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_run_moves(model, options, name, forward, backward, launches) -> None:
    it = fused_setting(model, "single", options=options)
    runs = next(o.runs for (scope, _), o in it.operators.items() if scope or model == "t5")
    fusion = next(fusion for fusion in runs.all if fusion.name == name)
    own = [o for o in it.operators.values() if o.runs is runs and o.node in fusion.members]
    seconds = [it.pricer.operator_seconds(operator, whole(it, operator)) for operator in own]
    device, angles = it.pricer.cluster.device, [m.num_bytes for m in fusion.entering.values() if len(m.shape) == 3]
    sizes = fusion.node.meta.num_bytes, 4 * NARROW, angles[-1]
    totals = [sum(each) for each in zip(*seconds, strict=True)]
    for found, moved, more in zip(totals, (forward, backward), (1, launches), strict=True):
        num_bytes = sum(count * size for count, size in zip(moved, sizes, strict=True))
        expected = compute.seconds(compute.Work("memory", 0.0, num_bytes), device)
        assert found == pytest.approx(expected + (more - 1) * device.kernel_launch_seconds)


def test_an_addition_is_charged_for_the_run_that_programs_have() -> None:
    """Of a dropout before it and a norm after it, both of which could be one call with it."""
    it = fused_setting("gpt2", "single", options="")
    runs = next(o.runs for (scope, _), o in it.operators.items() if scope)
    shared = next(fusion for fusion in runs.all if fusion.name == "sum and LayerNorm")
    assert [rival.name for rival in shared.rivals] == ["dropout and sum"]
    pricer = it.pricer
    assert pricer.kernels is not None
    names = {
        member.op: fusion.name
        for member in shared.members
        if (fusion := pricer.fusion(it.operators["GPT2Block", member.name])) is not None
    }
    assert names == {"aten.add.Tensor": "dropout and sum", "aten.layer_norm.default": "LayerNorm"}


def test_a_cut_normalised_dim_is_priced_as_the_program_runs_it() -> None:
    it = fused_setting("llama", "tp2")
    plain = pricer_for(request_for("llama"), Mesh.parse("tp2"), 1)
    operator = operator_of(it, "aten.mean", "LlamaDecoderLayer")
    options = options_of(operator, it.pricer.mesh)
    cut = [
        o for o in options if any(p == P for p in o.outputs[0]) or o.inputs[0][0].is_shard and o.inputs[0][0].dim == 2
    ]
    assert cut
    for option in cut:
        assert it.pricer.operator_seconds(operator, option) == plain.operator_seconds(operator, option) != (0.0, 0.0)


def test_a_heads_products_are_all_in_its_forward() -> None:
    """In one chunk: three products and clearing the sum, three passes over the logits; backward both gradients are
    read and written once more."""
    it = fused_setting("llama", "single")
    lm_head = next(o for (s, _), o in it.operators.items() if not s and o.node.op.startswith("aten.linear"))
    loss = operator_of(it, "aten.cross_entropy_loss", "")
    forward, backward = it.pricer.operator_seconds(lm_head, whole(it, lm_head))
    n, h, v = BATCH * 32, NARROW, 1024
    device = it.pricer.cluster.device

    def memory(elements: float) -> float:
        return compute.seconds(compute.Work("memory", 0.0, 4.0 * elements), device)

    moved = 4.0 * (n * h + v * h + n * v)
    shapes = {(n, v, h): moved, (n, h, v): moved, (v, h, n): moved + 4.0 * v * h}
    works = [compute.Work("matmul", 2.0 * n * h * v, b, "fp32", shape) for shape, b in shapes.items()]
    products = sum(compute.seconds(work, device) for work in works)
    assert (forward, backward) == pytest.approx((products + memory(v * h), memory(2 * n * h) + memory(2 * v * h)))
    passes = memory(n * v) + memory(2 * n * v), 0.0
    assert it.pricer.operator_seconds(loss, whole(it, loss)) == pytest.approx(passes)
    assert it.pricer.weight_seconds(lm_head, whole(it, lm_head), forward + backward) == 0.0


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", ["llama", "qwen3", "t5"])
@pytest.mark.parametrize("mesh", ["dp2 x tp2", "tp4"])
def test_the_search_parts_no_run_for_a_price_that_the_program_would_not_have(name: str, mesh: str) -> None:
    """Every normalisation and the loss of the cheapest plan is a kernel in the program too."""
    it = fused_setting(name, mesh)
    _, assignment = it.assignment(0)
    for scope in scopes_of(it.graph):
        ops = Counter(node.op for node in calls_of(it, scope, assignment))
        own = [it.operators[scope.name, node.name] for node in scope.nodes]
        runs = {id(f) for o in own for f in o.fusions if f.name == "RMSNorm"}
        assert ops["kernels.rms_norm"] + ops["kernels.add_rms_norm"] == len(runs)
        if not scope.name and name != "t5":
            assert ops["kernels.linear_cross_entropy"] == 1


@pytest.mark.parametrize(
    ("cluster", "dtype", "one_without_kernels"),
    [("4 a100-80g", "fp32", False), ("4 a100-80g", "bf16", False), ("4 h100-sxm", "bf16", True)],
    ids=str,
)
def test_experts_are_one_launch_or_one_each(cluster: str, dtype: str, one_without_kernels: bool) -> None:
    """Of equal loads. Where each expert has a kernel of its own, the gradients of their matrices are joined, too."""
    graph = graph_of("mixtral", BATCH)
    operator = next(o for o in operators_of(graph).values() if o.node.op == EXPERT_LINEAR)
    if dtype == "bf16":
        inputs = tuple(replace(m, dtype=torch.bfloat16) if m.dtype.is_floating_point else m for m in operator.inputs)
        outputs = tuple(replace(m, dtype=torch.bfloat16) for m in operator.node.outputs)
        operator = replace(operator, inputs=inputs, node=replace(operator.node, outputs=outputs))
    request, mesh = request_for("mixtral", cluster), Mesh.parse("single")
    option = options_of(operator, mesh)[0]
    (rows, depth), (experts, _, columns) = (meta.shape for meta in operator.inputs[:2])
    tensors = (*operator.inputs, *operator.node.outputs)
    moved, flops = sum(meta.num_bytes for meta in tensors), 2.0 * rows * depth * columns
    shape = rows // experts, columns, depth
    together = compute.Work("matmul", flops, moved, dtype, shape=shape)
    each = compute.Work("matmul", flops / experts, moved / experts, dtype, shape=shape)
    device, weight = pricer_for(request, mesh, 1).cluster.device, operator.inputs[1].num_bytes
    seconds, num_bytes = [], []
    for kernels in (False, True):
        pricer = pricer_for(replace(request, kernels=kernels), mesh, 1)
        seconds.append(pricer.operator_seconds(operator, option)[0])
        num_bytes.append(pricer.backward_bytes(operator, option))
    saved = experts * compute.seconds(each, device) - compute.seconds(together, device)
    assert saved > 0
    assert seconds[0] - seconds[1] == pytest.approx(0.0 if one_without_kernels else saved, rel=1e-6, abs=1e-15)
    assert num_bytes[0] - num_bytes[1] == (0 if one_without_kernels else weight)
