"""Sums that run beside weight gradients: what prices take off is what programs join, and no more than is hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

import autopar
from autopar.costs import evaluate as evaluate_module
from autopar.costs.overlap import Overlaps, joined_layers
from autopar.ir.graph import Node, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import R, Rp, S
from autopar.lowering.lower import lower
from autopar.lowering.scope_lowering import attribute_path
from autopar.planning.planner import search_plans
from autopar.planning.request import HIDDEN_FRACTION, Request, pricer_for
from autopar.planning.user_plans import reprice
from autopar.sharding.call_options import options_of
from autopar.sharding.scopes import scopes_of
from codegen.passes.overlap import overlap
from codegen.program import Call, Program
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from tests.autopar.requests import Setting, hostless, request_for, setting

Layers = tuple[str, frozenset[str]]
"""(class, weights of the layers)"""

GPUS = hostless(Cluster.parse("1x8 h100-sxm"))
SIZES = {"layers": 3, "width": 1024, "num_heads": 16, "seq_len": 512, "batch_size": 8, "vocab_size": 1024}
COLUMNS = {f"*.{name}_proj.weight": {"tp": "S(0)"} for name in ("q", "k", "v", "gate", "up")}


class Recorded(Overlaps):
    """Keeps beside which layers something was taken off."""

    found: set[Layers] = set()  # noqa: RUF012

    def hidden(self, meta, target, last, readers):  # type: ignore[no-untyped-def]
        hidden = super().hidden(meta, target, last, readers)
        if hidden:
            names = frozenset(attribute_path(weight(reader.node).node) for reader in readers)
            Recorded.found.add((readers[0].scope, names))
        return hidden


def weight(node: Node) -> Ref:
    return node.args[2] if node.op == "aten.addmm.default" else node.args[1]


def discounted(graph, operators, pricer, assignment, monkeypatch: pytest.MonkeyPatch) -> set[Layers]:  # type: ignore[no-untyped-def]
    """Layers beside whose weight gradients the plan's prices take sums to run."""
    monkeypatch.setattr(evaluate_module, "Overlaps", Recorded)
    monkeypatch.setattr(Recorded, "found", set())
    evaluate_module.layer_costs(graph, operators, pricer, assignment)
    return Recorded.found


def joined(program: Program) -> set[Layers]:
    """Layers that the program has as one call."""
    found = set()
    for cls in (*program.layers, program.root):
        for call in cls.body:
            if isinstance(call, Call) and call.target.startswith("overlapped."):
                weights = call.args[2] if call.target == "overlapped.addmm" else call.args[1]
                named = weights if isinstance(weights, tuple) else (weights,)
                found.add(("" if cls is program.root else cls.name, frozenset(w.name for w in named)))
    return found


@pytest.mark.parametrize(
    ("name", "constraints", "kernels", "count"),
    [
        pytest.param("gpt2", {"tp": 8}, "off", 2, marks=pytest.mark.slow),
        ("gpt2", {"tp": 4, "dp": 2}, "on", 2),
        pytest.param("llama", {"tp": 4, "dp": 2, "parameters": COLUMNS}, "on", 2, marks=pytest.mark.slow),
        pytest.param("llama", {"tp": 8, "parameters": COLUMNS, "recompute": "full"}, "off", 2, marks=pytest.mark.slow),
    ],
)
def test_plans_count_what_their_programs_join(
    name: str, constraints: Mapping, kernels: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = EXAMPLES[name](dropout=0.0, **SIZES)
    own = {"constraints": constraints, "kernels": kernels, "precision": "bf16"}
    program = autopar.compile(example.model, GPUS, example_inputs=example.inputs, loss_fn=example.loss_fn, **own)
    best = program.best
    pricer = pricer_for(program.request, best.plan.mesh, best.plan.num_micro_batches)
    found = discounted(best.graph, best.operators, pricer, best.assignment, monkeypatch)
    assert isinstance(program.program, Program)
    assert found == joined(program.program) and len(found) == count


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", pytest.param("t5", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", ["tp4", "dp2 x tp2"])
def test_under_any_decisions_nothing_is_taken_off_that_the_program_does_not_overlap(
    name: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    it, num_joined = setting(name, mesh), 0
    plan = SimpleNamespace(mesh=it.pricer.mesh, precision="fp32", global_batch_size=8, num_micro_batches=1)
    for seed in range(1, 7):
        _, assignment = it.assignment(seed)
        found = discounted(it.graph, it.operators, it.pricer, assignment, monkeypatch)
        in_program = joined(overlap(lower(it.graph, it.operators, plan, assignment)))
        assert found <= in_program, seed
        num_joined += len(found)
    assert num_joined


def test_what_is_hidden_is_the_shorter_of_sum_and_share_of_the_products() -> None:
    """Queries, keys and values of a Llama behind a gather: 8 x 32 x 512 in fp32, each weight 512 x 512 cut in four."""
    it = setting("llama", "tp4")
    layer = next(scope for scope in scopes_of(it.graph) if scope.layer)
    names = {name for name in joined_layers(it.graph)[_qkv(it)]}
    assert len(names) == 3
    weights = 0.0
    for name in names:
        operator = it.operators[layer.name, name]
        (columns,) = [o for o in options_of(operator, it.pricer.mesh) if o.inputs == ((Rp,), (S(0),))]
        rows, depth, cut = 8 * 32, 512, 512 // 4
        num_bytes = 4.0 * (rows * depth + cut * depth + rows * cut)
        weights += it.pricer.contractions.matmul_seconds(operator, columns, num_bytes)[2]
    whole = it.pricer.rates.collective_seconds("reduce_scatter", 0, 8 * 32 * 512 * 4)
    for share in (0.0, 0.1, 1.0, 100.0):
        priced = Overlaps(
            it.graph, it.operators, replace(it.pricer, rates=replace(it.pricer.rates, overlap_share=share))
        )
        hidden = priced.seconds(_qkv(it), (S(1),), (Rp,), is_kept=True)
        assert hidden == pytest.approx(min(whole, share * weights), rel=1e-9)
    plain = Overlaps(it.graph, it.operators, it.pricer)
    assert plain.seconds(_qkv(it), (S(1),), (R,), is_kept=True) == 0.0  # its backward sums nothing
    assert plain.seconds(_qkv(it), (Rp,), (Rp,), is_kept=True) == 0.0
    assert plain.seconds(_qkv(it), (S(1),), (Rp,)) == 0.0  # for one of three readers


def _qkv(it: Setting) -> tuple[str, Ref]:
    return next(site for site, names in joined_layers(it.graph).items() if site[0] and len(names) == 3)


def test_only_gpus_hide_sums_and_not_for_schedules_that_defer_weights() -> None:
    mesh = Mesh.parse("tp4")
    assert pricer_for(request_for("gpt2"), mesh, 1).rates.overlap_share == HIDDEN_FRACTION
    assert pricer_for(request_for("gpt2", "4 cpu"), mesh, 1).rates.overlap_share == 0.0
    assert pricer_for(request_for("gpt2", schedule="zero-bubble"), mesh, 1).rates.overlap_share == 0.0
    assert pricer_for(replace(request_for("gpt2"), backend="inductor"), mesh, 1).rates.overlap_share == 0.0


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_pipelines_hide_sums_unless_weights_are_deferred(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"pp": 2, "tp": 2, "dp": 1, "micro_batches": 4, "recompute": "none", "schedule": schedule}
    pins = {"parameters": {"*.c_fc.weight": {"tp": "S(1)"}, "*.c_attn.weight": {"tp": "S(1/3)"}}}
    plan = search_plans(request_for("gpt2", **limits, **pins)).best.plan
    # Prices of a request that leaves the schedule open, for the plan that names it.
    found = reprice(request_for("gpt2"), plan).best.plan.prediction
    monkeypatch.setattr(Request, "overlaps", False)
    apart = reprice(request_for("gpt2"), plan).best.plan.prediction
    if schedule == "zero-bubble":
        assert found.step_seconds == pytest.approx(apart.step_seconds, rel=1e-12)
        assert found.seconds == pytest.approx(apart.seconds, rel=1e-9)
        return
    assert found.step_seconds < apart.step_seconds
    less = {kind for kind, value in apart.seconds.items() if found.seconds[kind] < value * (1 - 1e-9)}
    assert less <= {"all_reduce tp", "reduce_scatter tp", "pipeline bubble"} and less & {
        "all_reduce tp",
        "reduce_scatter tp",
    }
    assert found.num_bytes == apart.num_bytes


def test_layers_in_fp8_are_not_joined() -> None:
    it = setting("llama", "tp4")
    fp8 = replace(request_for("llama"), fp8=True)
    priced = Overlaps(it.graph, it.operators, pricer_for(fp8, it.pricer.mesh, 1))
    assert priced.seconds(_qkv(it), (S(1),), (Rp,), is_kept=True) == 0.0


def test_a_head_that_is_fused_with_its_loss_is_not_joined() -> None:
    it = setting("llama", "tp4", width=64)
    (site,) = [site for site in joined_layers(it.graph) if not site[0]]
    fused = pricer_for(replace(request_for("llama"), kernels=True), it.pricer.mesh, 1)
    assert fused.fusion(it.operators["", joined_layers(it.graph)[site][0]]) is not None
    assert Overlaps(it.graph, it.operators, fused).seconds(site, (S(1),), (Rp,)) == 0.0
    assert Overlaps(it.graph, it.operators, it.pricer).seconds(site, (S(1),), (Rp,)) > 0.0
