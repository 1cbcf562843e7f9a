"""Certificates: what they prove of plans that are right, and that planted defects are found and named."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import autopar
from autopar.certify.counterparts import counterparts
from autopar.certify.cuts import axis_sets, cuts_of
from autopar.certify.decisions import check_decisions, pipeline_ranks
from autopar.certify.edges import check_edges
from autopar.certify.messages import prove_messages
from autopar.certify.miniature import prove_miniature
from autopar.certify.operators import prove_operators
from autopar.certify.reshards import prove_reshards, ways_of
from autopar.certify.schedules import check_schedule
from autopar.certify.small_config import small_fields
from autopar.certify.small_job import layers_needed, train_miniature
from autopar.certify.small_optimizer import LEAST_RATE, MOST_RATE, optimizer_of
from autopar.cli import app
from autopar.compiled import CompiledProgram
from autopar.rules import register_rule
from autopar.rules.registry import default_registry
from autopar.running import folder
from autopar.verify import sgd_with_momentum
from benchmarks.verify_pipelines import mixed_cluster
from codegen.program import Call, PipelineProgram, Program, Raw, Reshard, Var
from codegen.runtime import transfer
from cost_models.mixed import AnyCluster
from cost_models.schedule import placement
from examples.models import EXAMPLES


def compiled(
    name: str, cluster: AnyCluster | str, factory: dict[str, Any] | None = None, precision: str = "fp32", **limits: Any
) -> CompiledProgram:
    example = EXAMPLES[name](**(factory or {}))
    return autopar.compile(
        example.model,
        cluster,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        precision=precision,
        constraints=limits,
    )


@cache
def dense() -> CompiledProgram:
    """Grouped heads under every axis that a dense model has, as a pipeline."""
    return compiled("llama_gqa", "8 h100-sxm", {"layers": 4}, pp=2, dp=2, tp=2, micro_batches=2, schedule="1f1b")


@cache
def megatron() -> CompiledProgram:
    """Tensor parallelism as Megatron has it, which a model as small as this would not choose."""
    cut = {f"*.{name}.weight": {"tp": "S(0)"} for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
    cut |= {f"*.{name}.weight": {"tp": "S(1)"} for name in ("o_proj", "down_proj")}
    return compiled("llama", "2 h100-sxm", None, dp=1, tp=2, parameters=cut)


@cache
def mixture() -> CompiledProgram:
    return compiled("mixtral", "8 h100-sxm", None, dp=4, ep=2, tp=2, micro_batches=1)


@cache
def unlike() -> CompiledProgram:
    """Pipeline ranks of one, one and two ranks, whose optimiser's state the host holds."""
    limits = {"pp": 3, "tp": 1, "zero": 1, "schedule": "1f1b", "micro_batches": 4, "recompute": "selective"}
    return compiled("gpt2", mixed_cluster((2, 1, 1)), {"layers": 4}, **limits, offload="optimizer")


@pytest.fixture
def rules() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(default_registry().additions)
    yield
    default_registry().additions.clear()
    default_registry().additions.update(before)


def test_a_right_plan_is_proven_part_by_part() -> None:
    program = dense()
    operators, reshards = prove_operators(program.best), prove_reshards(program.program)
    edges, schedule = check_edges(program.program, program.best), check_schedule(pipeline(program))
    decisions, messages = check_decisions(program), prove_messages(pipeline(program))
    for part in (operators, reshards, edges, schedule, decisions, messages):
        assert part.ok, part.failures
    assert operators.counts["calls of the plan"] == len(program.best.assignment.operators)
    assert operators.gaps == ()
    assert operators.counts["runs, forward and backward"] >= 40
    assert operators.largest_error is not None and operators.largest_error < 1e-5
    ways = {str(way) for each in program.program.programs for way in ways_of(each)}
    assert ways and reshards.counts["ways of values from placements to others"] >= len(ways)
    assert reshards.largest_error is not None and 0 <= reshards.largest_error < 1e-12
    assert edges.counts["edges"] > 300
    assert schedule.counts["forwards"] == schedule.counts["whole backwards"] == 2 * 2
    assert schedule.counts["messages sent and taken"] == 4  # one activation and one gradient of each micro-batch
    assert decisions.counts["layers, each in its stage"] == 4
    assert messages.counts["boxes moved"] == 2 * 4  # to and from each of four ranks


@pytest.mark.parametrize(
    ("name", "factory", "limits"),
    [
        ("mixtral", {}, {"dp": 4, "ep": 2, "tp": 2, "micro_batches": 1}),
        ("llama_gqa", {}, {"dp": 2, "cp": 2, "tp": 2, "context": "ring"}),
        pytest.param("llama", {}, {"dp": 1, "cp": 8, "context": "all_gather"}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"dropout": 0.1}, {"dp": 2, "ttp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("t5", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("bert", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("vit", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_collective_operators_and_other_families(name: str, factory: dict[str, Any], limits: dict[str, Any]) -> None:
    program = compiled(name, "8 h100-sxm", factory, **limits)
    for part in (prove_operators(program.best), prove_reshards(program.program)):
        assert part.ok, part.failures
        assert part.counts["calls of the plan" if part.subject == "operators" else "kinds of collective"]
    edges = check_edges(program.program, program.best)
    assert edges.ok, edges.failures


def test_experts_and_ring_attention_are_among_what_is_run() -> None:
    lowerings = {o.lowering for option in mixture().best.assignment.operators.values() for o in option.axes}
    assert "routed" in lowerings
    assert not any("expert" in text for text in prove_operators(mixture().best).gaps)


# --- planted defects --------------------------------------------------------------------------------------------------


def test_a_wrong_rule_is_caught(rules: None) -> None:
    """Registered as any user's rule is: SiLU is not linear, so SiLU of partial sums is no partial sum of SiLU."""
    register_rule("aten.silu.default", "b* -> b*", linear=("self",))
    program = compiled("llama", "2 h100-sxm", None, dp=1, tp=2, activations={"*.act_fn": {"tp": "P"}})
    assert any(
        axis.label == "P" and program.best.operators[key].node.op == "aten.silu.default"
        for key, option in program.best.assignment.operators.items()
        for axis in option.axes
    ), "the plan uses the wrong option"
    found = prove_operators(program.best)
    assert not found.ok
    assert all("aten.silu.default under tp=P" in text and "differs" in text for text in found.failures)
    assert found.failures[0].startswith("LlamaDecoderLayer.silu")


def without_reshard(program: Program) -> Program:
    """The program with the first reshard of its layer class left out."""
    layer = program.layers[0]
    dropped = next(statement for statement in layer.body if isinstance(statement, Reshard))
    body = tuple(statement for statement in layer.body if statement is not dropped)
    return replace(program, layers=(replace(layer, body=body), *program.layers[1:]))


def relabelled(program: Program) -> Program:
    """Worse: the reshard is left out, and what reads it reads its source, so that every name is there."""
    layer = program.layers[0]
    dropped = next(s for s in layer.body if isinstance(s, Reshard))

    def with_source(value: Any) -> Any:
        if isinstance(value, Var) and (value.name, value.type) == (dropped.result.name, dropped.result.type):
            return dropped.source
        return tuple(map(with_source, value)) if isinstance(value, tuple) else value

    body = []
    for statement in layer.body:
        if statement is dropped:
            continue
        if isinstance(statement, Reshard):
            body.append(replace(statement, source=with_source(statement.source)))
        else:
            members = tuple(replace(m, args=with_source(m.args)) for m in statement.members)
            body.append(replace(statement, args=with_source(statement.args), members=members))
    return replace(program, layers=(replace(layer, body=tuple(body)), *program.layers[1:]))


@pytest.mark.parametrize("defect", [without_reshard, relabelled])
def test_a_dropped_reshard_is_caught(defect: Callable[[Program], Program]) -> None:
    program = megatron()
    assert check_edges(program.program, program.best).ok
    found = check_edges(program.program.map(defect), program.best)
    assert not found.ok
    assert all("LlamaDecoderLayer" in text for text in found.failures), found.failures


def test_a_wrong_reshard_is_caught() -> None:
    """A sum over ranks whose gradient is not summed: forward right, backward wrong."""
    program = megatron()

    def forgetful(each: Program) -> Program:
        layer = each.layers[0]
        body = tuple(
            replace(s, method="first_rank_grad") if isinstance(s, Reshard) and s.method == "for_use" else s
            for s in layer.body
        )
        assert body != layer.body
        return replace(each, layers=(replace(layer, body=body), *each.layers[1:]))

    found = prove_reshards(program.program.map(forgetful))
    assert not found.ok and all("R -> Rp by tp.first_rank_grad" in text for text in found.failures)
    assert "the gradient differs" in found.failures[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda line: line.replace("B1.0 ", "", 1), "need F and B"),
        (lambda line: "B1.0 " + line.replace("B1.0 ", "", 1), "never"),
        (lambda line: line.replace("F1.1", "F1.0", 1), "F1.0 is there twice"),
    ],
)
def test_a_wrong_schedule_line_is_caught(wrong: Callable[[str], str], says: str) -> None:
    program = pipeline(dense())
    lines = (program.schedule[0], wrong(program.schedule[1]))
    assert lines != program.schedule
    found = check_schedule(replace(program, schedule=lines))
    assert not found.ok and says in found.failures[0] and "1f1b" in found.failures[0]


def pipeline(program: CompiledProgram) -> PipelineProgram:
    assert isinstance(program.program, PipelineProgram)
    return program.program


def changed(program: Program, **fields: Any) -> Program:
    return replace(program, **fields)


def without_sum(program: Program) -> Program:
    """The gradient of the first parameter is not summed over dp."""
    layer = program.layers[0]
    name, spec = next(iter(layer.parameters.items()))
    kept = tuple(pair for pair in spec.placements if pair != ("dp", "Rp"))
    assert kept != spec.placements
    parameters = {**layer.parameters, name: replace(spec, placements=kept)}
    return replace(program, layers=(replace(layer, parameters=parameters), *program.layers[1:]))


def without_layer(program: Program) -> Program:
    """The last layer of a stage is left out, and does not belong to it."""
    (run,) = program.runs
    body = tuple(replace(s, count=s.count - 1) if hasattr(s, "count") else s for s in program.root.body)
    assert body != program.root.body
    return replace(program, runs=(replace(run, paths=run.paths[:-1]),), root=replace(program.root, body=body))


@pytest.mark.parametrize(
    ("defect", "says"),
    [
        (without_sum, "q_proj.weight: the program has"),
        (without_layer, "layers LlamaDecoderLayer that are run: the program has 1, the plan says 2"),
        (lambda p: changed(p, num_micro_batches=1), "num_micro_batches: the program has 1, the plan says 2"),
        (lambda p: changed(p, recompute={"LlamaDecoderLayer": (("full", 2),)}), "recomputation of LlamaDecoderLayer"),
        (lambda p: changed(p, offload_optimizer="host"), "offload_optimizer: the program has host"),
    ],
)
def test_what_is_not_as_the_plan_decided_is_caught(defect: Callable[[Program], Program], says: str) -> None:
    program = dense()
    found = check_decisions(replace(program, program=program.program.map(defect)))
    assert any(says in text for text in found.failures), found.failures


def test_a_stage_on_the_wrong_pipeline_rank_is_caught() -> None:
    program = pipeline(dense())
    stages = tuple(replace(stage, pipeline_rank=1 - stage.pipeline_rank) for stage in program.stages)
    found = check_decisions(replace(dense(), program=replace(program, stages=stages)))
    assert any("pipeline ranks of stages: the program has (1, 0)" in text for text in found.failures)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("interleaved", 3), ("zero-bubble-v", None)])
def test_stages_run_where_the_schedule_has_them(schedule: str, chunks: int | None) -> None:
    wanted = placement(schedule, 4, chunks)
    assert pipeline_ranks(schedule, len(wanted), 4) == wanted


@pytest.mark.parametrize("axis", [Raw("dp"), Raw("self.mesh.joint(('ep', 'tp'))", joint=("ep", "tp")), None])
def test_rows_of_experts_over_the_wrong_ranks_are_caught(axis: Raw | None) -> None:
    program = mixture()

    def elsewhere(each: Program) -> Program:
        layer = each.layers[0]
        body = tuple(
            replace(s, args=(*s.args[:2], *(() if axis is None else (axis,))))
            if isinstance(s, Call) and s.target == "runtime.Routes"
            else s
            for s in layer.body
        )
        assert body != layer.body
        return replace(each, layers=(replace(layer, body=body),))

    assert check_edges(program.program, program.best).ok
    found = check_edges(program.program.map(elsewhere), program.best)
    assert [text for text in found.failures if "routes = runtime.Routes: goes over" in text and "over ep" in text]


def test_a_message_to_the_wrong_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    program = pipeline(unlike())
    right = prove_messages(program)
    assert right.ok and right.counts["boxes moved"] > right.counts["distinct ways, there and back"]
    monkeypatch.setattr(transfer, "_choose", lambda rank, holders, source, target, load: source.first_rank)
    found = prove_messages(program)
    assert found.failures and all("other elements than its own" in text for text in found.failures)


# --- miniatures -------------------------------------------------------------------------------------------------------


def test_calls_have_counterparts_whatever_their_names_and_casts() -> None:
    large = compiled("mixtral", "8 h100-sxm", None, "bf16", dp=4, ep=2, tp=2, micro_batches=1).best.graph
    small = mixture().best.graph
    found = counterparts(large, small)
    assert found.keys() == mixture().best.operators.keys()
    experts = [
        (one, two)
        for one, two in found.items()
        if mixture().best.operators[one].node.op == "autopar.expert_linear.default"
    ]
    assert experts and all(one != two for one, two in experts), "versions of an operator are called otherwise"


def test_a_configuration_keeps_its_first_layers_kinds() -> None:
    from transformers import DeepseekV3Config, Llama4TextConfig

    llama = Llama4TextConfig(num_hidden_layers=24, interleave_moe_layer_step=2, attention_chunk_size=64)
    made = Llama4TextConfig(**small_fields(llama, 4, {}))
    assert made.moe_layers == [1, 3] and made.num_hidden_layers == 4 and made.attention_chunk_size < 16
    assert (made.layer_types, made.no_rope_layers) == (llama.layer_types[:4], llama.no_rope_layers[:4])
    deepseek = DeepseekV3Config(num_hidden_layers=61, first_k_dense_replace=3)
    small = DeepseekV3Config(**small_fields(deepseek, 4, {}))
    assert small.first_k_dense_replace == 3 and small.n_routed_experts % small.n_group == 0
    assert DeepseekV3Config(**small_fields(deepseek, 2, {})).first_k_dense_replace == 1


@pytest.mark.parametrize(("num_tokens", "found"), [(8192, 6), (4096, 16), (2048, 32)])
def test_a_window_hides_keys_where_the_plans_does(num_tokens: int, found: int) -> None:
    """transformers gives attention no mask where a row is shorter than the window, and one where it is as long."""
    from transformers import Llama4TextConfig, MistralConfig

    chunks = Llama4TextConfig(num_hidden_layers=2, attention_chunk_size=4096)
    for config in (chunks, MistralConfig(sliding_window=4096)):
        made = small_fields(config, 2, {}, num_tokens)
        assert (made.get("sliding_window") or made.get("attention_chunk_size")) == found
        assert found == 6 or found <= made["max_position_embeddings"]


def test_there_are_layers_for_every_mode_of_recomputation() -> None:
    best = dense().best
    stages = best.plan.pipeline.stages
    assert layers_needed(best, 2) == 2
    modes = (("full", 1), ("none", 1)), (("selective", 2),)
    own = tuple(replace(s, recompute={"LlamaDecoderLayer": m}) for s, m in zip(stages, modes, strict=True))
    plan = replace(best.plan, pipeline=replace(best.plan.pipeline, stages=own))
    assert layers_needed(replace(best, plan=plan), 2) == 3


def test_unlike_pipeline_ranks_have_a_miniature_of_their_own() -> None:
    cuts, left = cuts_of(unlike().plan)
    assert [str(cut) for cut in cuts] == ["pp2 x dp2", "pp2 (single, dp2)"] and not left
    assert [cut.num_ranks for cut in cuts] == [4, 3]


@pytest.mark.slow
@pytest.mark.distributed
def test_unlike_pipeline_ranks_train_with_what_the_host_holds() -> None:
    program = unlike()
    trained = train_miniature(program, cuts_of(program.plan)[0][1], None)
    assert trained.text == "pp2 (single, dp2), 1f1b" and trained.left == ()
    assert trained.kept == trained.calls and trained.report.ok(), str(trained.report)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("runtime/zero.py", "if self._is_last and bucket.others.size > 1:", "if False:"),
        ("runtime/executor.py", "loss_gradient(loss, len(batches), ", "loss_gradient(loss, len(batches) + 1, "),
        ("runtime/update.py", "self.optimizer.step()", "self.optimizer.step(), self.optimizer.state.clear()"),
    ],
    ids=["a gradient that is not summed", "a wrong accumulation factor", "moments that are lost"],
)
def test_a_defect_of_the_run_time_fails_the_miniature(
    monkeypatch: pytest.MonkeyPatch, file: str, right: str, wrong: str
) -> None:
    program, modules = compiled("llama", "2 h100-sxm", dp=2, tp=1, zero=0, micro_batches=2), folder.imported_modules
    monkeypatch.setattr(
        folder, "imported_modules", lambda sources: (m := modules(sources)) | {file: m[file].replace(right, wrong)}
    )
    found = prove_miniature(program)
    assert any("miniature on dp2: " in text and "tensors are off" in text for text in found.failures), found


# --- certificates -----------------------------------------------------------------------------------------------------


def test_axes_are_paired_in_few_miniatures() -> None:
    assert axis_sets(("pp", "dp", "tp")) == [("pp", "dp", "tp")]
    found = axis_sets(("pp", "dp", "ep", "tp"))
    pairs = {pair for each in found for pair in itertools.combinations(each, 2)}
    assert len(found) == 3 and pairs == set(itertools.combinations(("pp", "dp", "ep", "tp"), 2))


def test_the_command_writes_the_certificate_beside_the_plan(tmp_path: Path) -> None:
    words = ["examples.models:llama", "--cluster", "4 h100-sxm", "--set", "tp=2", "--no-train", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["certify", *words])
    assert result.exit_code == 0, result.output
    data = yaml.safe_load((tmp_path / "certificate.yaml").read_text())
    lines = (tmp_path / "plan.yaml").read_text().splitlines(keepends=True)
    assert data["certificate"] == "incomplete", "what was not run has not passed"
    assert data["ranks"] == 4 and data["planning_cpu_seconds"] > 0
    assert data["plan_sha256"] == hashlib.sha256("".join(lines[:-1]).encode()).hexdigest()
    assert data["plan_sha256"] in lines[-1], "the plan file says so itself"
    assert data["proven"]["operators"]["wrong"] == 0 and data["versions"]["torch"] == torch.__version__
    assert any("no miniature was asked for" in text for text in data["not_proven"])


def test_a_failed_certificate_ends_with_1(tmp_path: Path, rules: None) -> None:
    register_rule("aten.silu.default", "b* -> b*", linear=("self",))
    limits = tmp_path / "limits.yaml"
    limits.write_text('{dp: 1, tp: 2, activations: {"*.act_fn": {tp: P}}}')
    words = ["examples.models:llama", "--cluster", "2 h100-sxm", "--constraints", str(limits), "--no-train"]
    result = CliRunner().invoke(app, ["certify", *words])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output and "aten.silu.default" in result.output


@pytest.mark.slow
@pytest.mark.distributed
def test_a_miniature_trains_with_the_plans_own_decisions(tmp_path: Path) -> None:
    found = dense().certify()
    assert found.ok, found.failures
    part = found.part("miniature")
    assert found.verdict == "passed" and found.gaps == ()
    assert part.counts["miniatures trained"] == 1 and part.counts["processes of the largest"] == 8
    assert part.counts["calls with the plan's option"] == len(dense().best.operators)
    assert part.largest_error is not None and 0 < part.largest_error < 1e-5
    assert part.worst.startswith("pp2 x dp2 x tp2, 1f1b")
    assert yaml.safe_load(found.write(tmp_path).read_text())["proven"]["miniature"]["wrong"] == 0
    assert "Certificate of" in str(found)


@pytest.mark.parametrize(("rate", "taken"), [(0.0, LEAST_RATE), (5.0, MOST_RATE), (torch.tensor(0.01), 0.01)])
def test_miniatures_are_trained_by_the_plans_optimiser(rate: Any, taken: float) -> None:
    """Of its class and groups, at a rate that shows; by another only where it does not take the small parameters."""

    def grouped(named_parameters: Any) -> torch.optim.Optimizer:
        few, many = [], []
        for name, parameter in named_parameters:
            (few if "norm" in name else many).append(parameter)
        groups: list[dict[str, Any]] = [{"params": few, "weight_decay": 0.0}, {"params": many}]
        return torch.optim.AdamW(groups, lr=rate, weight_decay=0.2)

    model = EXAMPLES["llama"]().model
    factory, reason = optimizer_of(replace(megatron(), optimizer=grouped), model)
    made = factory(list(model.named_parameters()))
    assert not reason and type(made) is torch.optim.AdamW
    assert [group["weight_decay"] for group in made.param_groups] == [0.0, 0.2]
    assert [float(group["lr"]) for group in made.param_groups] == pytest.approx([taken] * 2)
    strange = [torch.nn.Parameter(torch.zeros(2))]
    factory, reason = optimizer_of(replace(megatron(), optimizer=lambda _: torch.optim.Adam(strange)), model)
    assert factory is sgd_with_momentum and "does not take the miniature's parameters" in reason


@pytest.mark.slow
@pytest.mark.distributed
def test_a_miniature_of_another_model_leaves_the_certificate_incomplete() -> None:
    """It trains, and shows nothing of the plan."""
    words = ["examples.models:llama", "--cluster", "2 h100-sxm", "--set", "dp=2", "--miniature", "examples.models:mlp"]
    result = CliRunner().invoke(app, ["certify", *words])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "LlamaForCausalLM on dp2: incomplete" in text and "without the plan's layers: LlamaDecoderLayer" in text


@pytest.mark.slow
@pytest.mark.distributed
def test_a_wrong_rule_fails_the_certificate_of_a_plan_that_uses_it(rules: None) -> None:
    register_rule("aten.silu.default", "b* -> b*", linear=("self",))
    program = compiled("llama", "2 h100-sxm", None, dp=1, tp=2, activations={"*.act_fn": {"tp": "P"}})
    found = program.certify()
    assert not found.ok and not found.part("operators").ok
    assert any("silu" in failure for failure in found.failures)
