"""Strategies that a person wrote: scored as searched plans are, refused where something is missing, and by profile."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from autopar.cli import app
from autopar.errors import ConstraintError, InfeasibleError
from autopar.frontend.rebatch import BatchedTrace
from autopar.ir.graph import Graph
from autopar.planning.planner import search_plans
from autopar.planning.predict import simulate_plan
from autopar.sharding.scopes import scopes_of
from autopar.strategies import Predictor
from autopar.strategies.fusion import fused_parts
from autopar.strategies.stages import cut
from autopar.strategies.timeline import events_of
from autopar.strategies.trace_file import trace_of
from cost_models.framework_profiles import framework
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from tests.autopar.requests import BATCH, graph_of, hostless, request_for

PLANS = [
    ("llama", {"pp": 1, "dp": 4, "tp": 1, "zero": 0, "micro_batches": 1}),
    ("llama", {"pp": 1, "dp": 2, "tp": 2, "zero": 1, "micro_batches": 2}),
    ("gpt2", {"pp": 1, "dp": 1, "tp": 4, "zero": 0, "micro_batches": 1}),
    ("gpt2", {"pp": 2, "dp": 2, "tp": 1, "zero": 0, "micro_batches": 4, "schedule": "1f1b", "recompute": "none"}),
    ("bert", {"pp": 2, "dp": 1, "tp": 2, "zero": 0, "micro_batches": 4, "schedule": "gpipe", "recompute": "full"}),
    ("llama", {"pp": 1, "dp": 4, "tp": 1, "zero": 3, "micro_batches": 2, "recompute": "full"}),
]


@cache
def predictor(name: str) -> Predictor:
    def traced(rows: int) -> Graph:
        return graph_of(name, rows)

    return Predictor.of_trace(BatchedTrace(traced), BATCH, "fp32")


def predicted(name: str = "llama", cluster: str = "4 a100-80g", profile: Any = "autopar", **strategy: Any) -> Any:
    spec = hostless(Cluster.parse(cluster))
    return predictor(name).predict(spec, strategy, global_batch_size=BATCH, framework=profile)


@pytest.mark.parametrize(
    ("name", "strategy", "kernels"),
    [pytest.param(*plan, "off", marks=pytest.mark.slow if i in (0, 4) else ()) for i, plan in enumerate(PLANS)]
    + [pytest.param(*plan, "on", marks=pytest.mark.slow if i else ()) for i, plan in enumerate(PLANS)],
)
def test_a_searched_plans_strategy_scores_as_the_plan(name: str, strategy: dict[str, Any], kernels: str) -> None:
    """The search may find decisions that are a little better than a strategy's patterns."""
    plan = search_plans(replace(request_for(name, **strategy), kernels=kernels == "on")).best.plan
    found, wanted = predicted(name, **strategy, kernels=kernels), plan.prediction
    assert 0.98 * wanted.step_seconds <= found.step_seconds <= 1.03 * wanted.step_seconds
    assert found.peak_bytes == pytest.approx(wanted.peak_bytes, rel=0.02)
    assert len(found.pipeline_ranks) == len(wanted.pipeline_ranks)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"tp": 4, "zero": 0, "micro_batches": 1}, "does not say dp"),
        ({"dp": 4, "zero": 0}, "does not say micro_batches"),
        ({"dp": 4, "micro_batches": 1}, "does not say zero"),
        ({"dp": 2, "tp": 1, "zero": 0, "micro_batches": 1}, "number of devices"),
        ({"dp": 4, "zero": 0, "micro_batches": 3}, "not divided"),
        ({"dp": 4, "zero": 0, "micro_batches": 1, "ep": 2}, "all experts"),
        ({"dp": 4, "zero": 0, "micro_batches": 1, "attention": "slow"}, "attention is unknown"),
        ({"dp": 4, "zero": 0, "micro_batches": 1, "speed": 3}, "unknown constraint"),
        ({"dp": 1, "pp": 4, "zero": 0, "micro_batches": 8, "schedule": "interleaved", "chunks": 4}, "fewer blocks"),
    ],
)
def test_what_is_missing_or_does_not_multiply_is_named(strategy: dict[str, Any], words: str) -> None:
    with pytest.raises(ConstraintError, match=words):
        predicted(**strategy)


def test_an_unknown_framework_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConstraintError, match="megatron-2021"):
        predicted(profile="megatron", dp=4, zero=0, micro_batches=1)


def test_without_sequence_parallelism_activations_are_summed_whole() -> None:
    parts = {"pp": 1, "dp": 1, "tp": 4, "zero": 0, "micro_batches": 1}
    apart = predicted(profile="megatron-2021", sp=False, **parts)
    together = predicted(profile="megatron-2021", sp=True, **parts)
    assert apart.seconds["all_reduce tp"] > 0
    assert apart.seconds.get("reduce_scatter tp", 0.0) < together.seconds["reduce_scatter tp"]
    assert apart.num_bytes["activations"] > together.num_bytes["activations"]


@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_gathered_again_is_kept_as_a_shard(tp: int) -> None:
    """Of the inputs of attention and of the MLP in three layers, and that of the LM head, a rank keeps its part."""
    parts = {"dp": 4 // tp, "tp": tp, "zero": 0, "micro_batches": 1, "sp": True}
    whole, shards = (
        predicted(profile=replace(framework("megatron-2023"), gathers_again=again), **parts) for again in (False, True)
    )
    input_bytes = BATCH * tp // 4 * 32 * 512 * 4
    fewer = whole.num_bytes["activations"] - shards.num_bytes["activations"]
    assert fewer == (2 * 3 + 1) * input_bytes * (tp - 1) / tp
    assert whole.step_seconds == shards.step_seconds


def test_unfused_attention_takes_longer_and_keeps_its_scores() -> None:
    with torch.device("meta"):
        example = EXAMPLES["nanogpt"](layers=3, batch_size=BATCH, seq_len=1024, width=512, vocab_size=1024)
    long = Predictor(example.model, example_inputs=example.inputs, loss_fn=example.loss_fn)
    strategy = {"dp": 4, "zero": 0, "micro_batches": 1}
    flash, unfused = (
        long.predict("4 a100-80g", strategy | {"attention": kernel}, framework="fsdp") for kernel in ("fa2", "unfused")
    )
    assert unfused.seconds["forward attention"] > flash.seconds["forward attention"]
    assert unfused.num_bytes["activations"] > flash.num_bytes["activations"]
    assert unfused.seconds["forward matmuls"] == flash.seconds["forward matmuls"]


def test_fusing_more_never_costs_more() -> None:
    parts = {"dp": 4, "zero": 0, "micro_batches": 1}
    profile = framework("fsdp")
    seconds = [
        predicted(profile=replace(profile, fusion=fusion), **parts).seconds["forward memory-bound kernels"]
        for fusion in ("calls", "modules", "chains")
    ]
    assert seconds[0] > seconds[1] > seconds[2] > 0


def test_a_fused_norm_reads_its_input_once_and_writes_its_result() -> None:
    graph = graph_of("llama")
    layer = next(scope for scope in scopes_of(graph) if scope.layer)
    names = [n.name for n in layer.nodes if n.module == "input_layernorm"]
    if not names:
        names = [n.name for n in layer.nodes if "mean" in n.op][:1]
    parts = fused_parts(graph, "modules")
    norm = {n.module for n in layer.nodes if "mean" in n.op}
    members = [n for n in layer.nodes if n.module == sorted(norm)[0] and (layer.name, n.name) in parts]
    activations = [
        (n.name, ref)
        for n in members
        for ref, own in zip(n.inputs, parts[layer.name, n.name].reads, strict=True)
        if own and len(layer.metas[ref].shape) == 3
    ]
    assert len(members) > 3 and len(activations) == 1
    assert sum(any(parts[layer.name, n.name].writes) for n in members) == 1
    assert sum(parts[layer.name, n.name].is_first for n in members) == 1


def test_a_micro_batch_takes_no_less_than_its_host() -> None:
    parts = {"dp": 4, "zero": 0, "micro_batches": 2}
    slow = replace(framework("fsdp"), host_layer_seconds=1.0)
    found = predicted(profile=slow, **parts)
    assert found.step_seconds >= 2 * 3 * 1.0  # micro-batches x layers
    assert found.seconds["waiting for the host"] > 0
    assert predicted(profile="fsdp", **parts).seconds.get("waiting for the host", 0.0) == 0


def test_the_hosts_seconds_over_nodes_and_once_per_step() -> None:
    """Seconds of a profile whose host is on top of everything: a group over nodes adds its own per layer and rank, a
    pipeline its own once per step."""
    slow = replace(framework("fsdp"), host_layer_seconds=1.0)
    far, step = replace(slow, host_far_seconds=0.5), replace(slow, host_step_seconds=0.25)
    flat, piped = {"dp": 1, "tp": 4, "zero": 0, "micro_batches": 2}, {"pp": 2, "dp": 2, "zero": 0, "micro_batches": 2}
    for cluster, added in (("1x4 h100-sxm", 0.0), ("2x2 h100-sxm", 2 * 3 * 4 * 0.5)):  # micro-batches, layers, ranks
        usual = predicted(profile=slow, cluster=cluster, **flat).step_seconds
        assert predicted(profile=far, cluster=cluster, **flat).step_seconds == pytest.approx(usual + added)
        assert predicted(profile=step, cluster=cluster, **flat).step_seconds == pytest.approx(usual)
    usual = predicted(profile=slow, **piped).step_seconds
    assert predicted(profile=step, **piped).step_seconds == pytest.approx(usual + 0.25)


def test_traffic_hides_only_behind_compute() -> None:
    parts = {"dp": 4, "zero": 0, "micro_batches": 1}
    shown = predicted(profile=replace(framework("fsdp"), overlap=0.0), **parts)
    hidden = predicted(profile=replace(framework("fsdp"), overlap=1.0), **parts)
    kind = "gradient and parameter synchronisation"
    assert hidden.seconds[kind] < shown.seconds[kind]
    whole = hidden.seconds[kind] + hidden.seconds["hidden communication"]
    assert whole == pytest.approx(shown.seconds[kind])


def test_gradients_that_zero_cuts_may_hide_nothing() -> None:
    """Nothing is hidden then of those, and as much as ever of whole ones."""
    late = replace(framework("fsdp"), zero_overlaps=False)
    kind = "gradient and parameter synchronisation"
    for zero in (0, 1):
        parts = {"dp": 4, "zero": zero, "micro_batches": 1}
        usual, found = predicted(profile="fsdp", **parts), predicted(profile=late, **parts)
        whole = usual.seconds[kind] + usual.seconds["hidden communication"]
        assert found.seconds[kind] == pytest.approx(whole if zero else usual.seconds[kind])


def test_async_linears_hide_the_sum_of_half_their_products() -> None:
    """Of the reduce_scatters one in two is of inputs' gradients: on fast links they hide, on slow ones as much of them
    as a quarter of backward's products takes."""
    parts = {"dp": 1, "tp": 4, "zero": 0, "micro_batches": 2, "sp": True}
    plain = replace(framework("megatron-2023"), async_linears=False)
    for cluster in ("1x4 h100-sxm", "4x1 h100-sxm nvlink4 ethernet-10g"):
        usual = predicted(profile=plain, cluster=cluster, **parts)
        found = predicted(profile="megatron-2023", cluster=cluster, **parts)
        hidden = min(usual.seconds["reduce_scatter tp"] / 2, usual.seconds["backward matmuls"] / 4)
        assert hidden > 0
        assert usual.seconds["reduce_scatter tp"] - found.seconds["reduce_scatter tp"] == pytest.approx(hidden)
        assert usual.step_seconds - found.step_seconds == pytest.approx(hidden)


def test_a_framework_that_copies_gradients_holds_four_more_bytes_per_parameter() -> None:
    parts = {"dp": 4, "zero": 0, "micro_batches": 2}
    plain = replace(framework("megatron-2021"), gradient_copy_bytes=0.0)
    trained = sum(p.meta.numel for p in graph_of("gpt2").parameters if not p.is_buffer)
    found = predicted("gpt2", profile="megatron-2021", **parts).num_bytes["gradients"]
    assert found - predicted("gpt2", profile=plain, **parts).num_bytes["gradients"] == 4 * trained


def test_a_loss_moves_what_its_framework_says() -> None:
    parts = {"dp": 1, "tp": 1, "zero": 0, "micro_batches": 1}
    kind = "forward memory-bound kernels"
    low, high = (
        predicted(cluster="1 a100-80g", profile=replace(framework("fsdp"), loss_bytes=size), **parts).seconds[kind]
        for size in (20.0, 40.0)
    )
    logits = BATCH * 32 * 1024
    device = Cluster.parse("1 a100-80g").device
    rate = device.memory_bytes_per_second * device.memory_efficiency
    assert high - low == pytest.approx(10.0 * logits / rate, rel=0.1)


def test_cuts_of_frameworks() -> None:
    blocks = ("top 0", *("Layer",) * 6, "top 1")
    weights = {"top 0": 0.0, "Layer": 1.0, "top 1": 2.0}

    class Cost:
        def __init__(self, seconds: float) -> None:
            self.forward_seconds, self.backward_seconds = seconds / 3, seconds * 2 / 3

    costs: Any = {"top 0": Cost(0.0), "Layer": Cost(1.0), "top 1": Cost(3.0)}
    assert cut(blocks, {"Layer"}, [costs] * 3, weights, "layers") == (0, 3, 5, 8)
    # 8 units in 2 parts of 4: four layers, then two and the head.
    assert cut(blocks, {"Layer"}, [costs] * 2, weights, "weights") == (0, 5, 8)
    # Shares of 2 2/3: the third and the sixth layer pass one. Shares of 2: every second layer has it. Shares of 1 3/5:
    # of 2, 4 and 5 layers the last passes one; then the head would, but comes last, after one layer alone.
    assert cut(blocks, {"Layer"}, [costs] * 3, weights, "weights") == (0, 4, 7, 8)
    assert cut(blocks, {"Layer"}, [costs] * 4, weights, "weights") == (0, 3, 5, 7, 8)
    assert cut(blocks, {"Layer"}, [costs] * 5, weights, "weights") == (0, 3, 5, 6, 7, 8)
    # 9 seconds in 3 parts: three layers, three layers, the head.
    assert cut(blocks, {"Layer"}, [costs] * 3, weights, "time") == (0, 4, 7, 8)
    # Half as long on one of two stages: six layers in 3 seconds before the head, or three of them before 3 + 3 halves.
    fast: Any = {name: Cost(cost.forward_seconds * 3 / 2) for name, cost in costs.items()}
    assert cut(blocks, {"Layer"}, [fast, costs], weights, "time") == (0, 7, 8)
    assert cut(blocks, {"Layer"}, [costs, fast], weights, "time") == (0, 4, 8)


# --- timeline ---------------------------------------------------------------------------------------------------------

STEPS = [
    {"pp": 1, "dp": 4, "zero": 3, "micro_batches": 2},
    {"pp": 2, "dp": 1, "tp": 2, "zero": 0, "micro_batches": 4},
    {"pp": 4, "dp": 1, "zero": 0, "micro_batches": 8, "schedule": "zero-bubble"},
    {"pp": 2, "dp": 2, "zero": 1, "micro_batches": 4, "schedule": "interleaved", "chunks": 2},
]


@pytest.mark.parametrize("strategy", STEPS)
def test_events_obey_the_equations_of_a_pipeline(strategy: dict[str, Any]) -> None:
    """Every chunk starts when the one before it on its pipeline rank has ended and its message has arrived, not
    later."""
    found = predicted(**strategy)
    events = found.timeline
    arrivals = {
        (e.kind[4:], e.stage + (1 if e.kind == "p2p forward" else -1), e.micro_batch, e.target): e.end
        for e in events
        if e.stream == "send"
    }
    for pipeline_rank in range(strategy["pp"]):
        clock = 0.0
        for event in (
            e for e in events if e.pipeline_rank == pipeline_rank and e.stage is not None and e.stream == "compute"
        ):
            way = "forward" if event.kind == "forward" else "backward"
            arrived = arrivals.get((way, event.stage, event.micro_batch, pipeline_rank), 0.0)
            ready = arrived if event.kind != "weight gradients" else 0.0
            own = _made_here(events, event, way)
            assert event.start == pytest.approx(max(clock, ready, own), abs=1e-12)
            clock = event.end
    sends = [e for e in events if e.stream == "send"]
    crossings = (strategy["pp"] * strategy.get("chunks", 1) - 1) if strategy["pp"] > 1 else 0
    assert len(sends) == 2 * crossings * strategy["micro_batches"]
    assert max(e.end for e in events) == pytest.approx(found.step_seconds)
    hidden = sum(e.seconds for e in events if e.stream == "communication" and e.pipeline_rank == _busiest(found))
    assert hidden == pytest.approx(_hidden_of(found, _busiest(found)))


def _made_here(events: Any, event: Any, way: str) -> float:
    """The end of what feeds an event from a stage of its own pipeline rank."""
    if event.kind == "weight gradients":
        return 0.0
    other = event.stage + (-1 if way == "forward" else 1)
    kinds = ("forward",) if way == "forward" else ("backward", "input gradients")
    return max(
        (e.end for e in events if (e.stage, e.micro_batch) == (other, event.micro_batch)
         and e.pipeline_rank == event.pipeline_rank
         and e.kind in kinds and e.stream == "compute"),
        default=0.0,
    )  # fmt: skip


def _busiest(found: Any) -> int:
    timeline = found.simulated.timeline
    return max(range(len(timeline.busy)), key=lambda p: timeline.busy[p])


def _hidden_of(found: Any, pipeline_rank: int) -> float:
    simulated = found.simulated
    micro = found.scenario.strategy["micro_batches"]
    kind = "hidden communication"
    stages = [s for s, home in zip(simulated.stages, simulated.home, strict=True) if home == pipeline_rank]
    return sum(micro * s.micro.get(kind, 0.0) + s.step.get(kind, 0.0) for s in stages)


def test_a_searched_plans_events_are_those_of_its_strategy() -> None:
    name, strategy = PLANS[3]
    request = request_for(name, **strategy)
    best = search_plans(request).best
    simulated = simulate_plan(request, best)
    found = predicted(name, **strategy).timeline

    def counts(events: Any) -> Counter[Any]:
        return Counter((e.kind, e.pipeline_rank, e.stream, e.target) for e in events)

    assert counts(events_of(simulated)) == counts(found)
    assert events_of(simulated)[-1].pipeline_rank == found[-1].pipeline_rank
    trace = trace_of(simulated)["traceEvents"]
    names = Counter(row["ph"] for row in trace)
    assert names["b"] == names["e"] == sum(e.stream != "compute" for e in events_of(simulated))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_only_where_asked_with_what_fits() -> None:
    tight = {"dp": 4, "zero": 0, "micro_batches": 1}
    whole = predicted(**tight)
    assert whole.fits and whole.capacity_bytes == Cluster.parse("4 a100-80g").device.memory_bytes
    limit = int(whole.peak_bytes - 0.3 * (whole.peak_bytes - whole.num_bytes["workspace"]))
    assert not predicted(**tight | {"memory": limit}).fits
    low, high = whole.certainty.low_bytes, whole.certainty.high_bytes
    assert low < whole.peak_bytes < high and whole.certainty.fit == "yes"
    assert predicted(**tight | {"memory": limit}).certainty.fit == "no"
    near = predicted(**tight | {"memory": int(limit + 0.29 * (whole.peak_bytes - whole.num_bytes["workspace"]))})
    assert not near.fits and near.certainty == replace(whole.certainty, fit="within the error")
    with pytest.raises(InfeasibleError, match="does not fit") as caught:
        predictor("llama").predict("4 a100-80g", tight | {"memory": limit}, global_batch_size=BATCH, check=True)
    assert caught.value.needed_bytes == int(whole.peak_bytes)
    assert "optimizer state" in str(caught.value)
    *others, last = caught.value.alternatives
    assert others and last.startswith("memory of")
    for text in others:
        fields = dict(part.split("=") for part in text.partition(":")[0].split(", "))
        changes = {k: int(v) if v.isdigit() else v for k, v in fields.items()}
        assert predicted(**tight | changes).peak_bytes <= limit
    assert predictor("llama").predict("4 a100-80g", tight, global_batch_size=BATCH, check=True).fits


def test_the_command_line_prints_the_prediction_by_kind(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 4, "vocab_size": 1024, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["simulate", f"hf:{tmp_path / 'config.json'}", "--cluster", "4 a100-80g", "--batch", "8", "--seq", "64"]
    words += ["--set", "dp=2", "--set", "tp=2", "--set", "zero=0", "--set", "micro_batches=2"]
    words += ["--framework", "megatron-2023", "--memory", "1MiB", "--timeline", str(tmp_path / "out.json")]
    changes = ["--what-if", "intra_node.bandwidth=x0.5", "--what-if", "batch=16", "--what-if", "recompute=full"]
    result = CliRunner().invoke(app, [*words, *changes])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("step ") and "backward matmuls" in result.output
    assert "gradients" in result.output and "WARNING: does not fit" in result.output
    assert re.search(r"  all_gather tp +\S+ s +\S+ s +\+", result.output)
    assert "rows per second" in result.output
    rows = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    step = float(result.output.split()[1])
    assert max(row["ts"] + row.get("dur", 0.0) for row in rows if "ts" in row) / 1e6 == pytest.approx(step, rel=1e-3)
    failed = CliRunner().invoke(app, [*words, "--check"])
    assert failed.exit_code == 2 and "does not fit" in failed.output
