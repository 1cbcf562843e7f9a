"""The report: its words against the plan, its sums against the prediction, and two whole reports as golden files."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiled import CompiledProgram
from autopar.costs.layer_costs import HIDDEN
from autopar.costs.updates import training_of
from autopar.ir.graph import Ref
from autopar.ir.placement import S
from autopar.models.loading import load_model
from autopar.planning.planner import search_plans
from autopar.report.costs import RunnerUp, runner_ups, tie_words, time_rows
from autopar.report.dims import name_dims
from autopar.report.sharding import parameter_rows
from autopar.report.terminal import render_report
from autopar.report.traffic import parameter_traffic, reshard_rows
from autopar.sharding.scopes import scopes_of
from codegen.program import Reshard
from tests.autopar.requests import request_for

SIZES = {"layers": 4, "width": 2048, "num_heads": 16, "seq_len": 1024, "batch_size": 16, "vocab_size": 32000}


def compiled(name: str, cluster: str, constraints: dict[str, Any] | None = None, **options: Any) -> CompiledProgram:
    loaded = load_model(f"examples.models:{name}", meta=True, **(options or SIZES))
    return autopar.compile(
        loaded.model,
        cluster,
        example_inputs=loaded.inputs,
        loss_fn=loaded.loss_fn,
        precision="bf16",
        constraints=constraints,
    )


@pytest.fixture(scope="module")
def llama() -> CompiledProgram:
    return compiled("llama", "4 h100-sxm", {"dp": 2, "tp": 2})


@pytest.fixture(scope="module")
def gpt2() -> CompiledProgram:
    fused = {"*.c_attn.weight": {"tp": "S(1/3)"}, "*.mlp.c_fc.weight": {"tp": "S(1)"}}
    return compiled("gpt2", "4 h100-sxm", {"tp": 4, "zero": 0, "parameters": fused})


@pytest.fixture(scope="module")
def free() -> CompiledProgram:
    return compiled("gpt2", "4 h100-sxm")


def test_golden_llama(llama: CompiledProgram, golden: Callable[[str, str], None]) -> None:
    golden("report/llama_dp2_tp2.txt", llama.report())


def test_golden_gpt2(free: CompiledProgram, golden: Callable[[str, str], None]) -> None:
    golden("report/gpt2_free.txt", free.report())


def test_dims_are_named_by_what_uses_them(llama: CompiledProgram, gpt2: CompiledProgram) -> None:
    names = name_dims(llama.best.graph, llama.best.operators)
    layer = "LlamaDecoderLayer"
    for projection in ("q_proj", "k_proj", "v_proj"):
        assert names.of(layer, Ref(f"self_attn.{projection}.weight"), S(0), 2) == "heads"
    assert names.of(layer, Ref("self_attn.o_proj.weight"), S(1), 2) == "heads"
    assert names.of(layer, Ref("self_attn.o_proj.weight"), S(0), 2) == "width"
    assert names.of(layer, Ref("mlp.up_proj.weight"), S(0), 2) == "output features"
    assert names.of(layer, Ref("mlp.down_proj.weight"), S(1), 2) == "input features"
    assert names.of("", Ref("model.embed_tokens.weight"), S(0), 2) == "vocabulary"
    assert names.of("", Ref("lm_head.weight"), S(0), 2) == "vocabulary"
    assert names.of(layer, Ref("hidden"), S(1), 3) == "sequence"
    fused = name_dims(gpt2.best.graph, gpt2.best.operators)
    assert fused.of("GPT2Block", Ref("attn.c_attn.weight"), S(1, 3), 2) == "heads"
    assert fused.of("GPT2Block", Ref("attn.c_attn.weight"), S(1), 2) != "heads"
    assert fused.of("", Ref("transformer.wpe.weight"), S(0), 2) == "positions"


def test_every_parameter_has_one_row(llama: CompiledProgram) -> None:
    names = name_dims(llama.best.graph, llama.best.operators)
    scope = next(s for s in scopes_of(llama.best.graph) if s.layer)
    rows = parameter_rows(scope, llama.best.assignment, llama.plan.mesh, names)
    listed = [name.rpartition(".")[2] for row in rows for name in row.what.split(", ")]
    expected = [n.split(".")[-2] for owner, n in llama.best.assignment.parameters if owner == scope.name]
    assert sorted(listed) == sorted(expected)


def test_fused_projection_in_words(gpt2: CompiledProgram) -> None:
    text = " ".join(gpt2.report().split())
    assert "attn.c_attn sharded by heads over tp, 3 fused parts alike" in text
    assert "mlp.c_fc sharded by output features over tp" in text


@pytest.mark.parametrize("which", ["llama", "gpt2", "free"])
def test_reshards_are_those_of_the_source(which: str, request: pytest.FixtureRequest) -> None:
    """Times a step, counted on the lines of the generated text: in a layer's class once per layer."""
    program: CompiledProgram = request.getfixturevalue(which)
    names = name_dims(program.best.graph, program.best.operators)
    forward, _, _ = program.source.partition("def count_targets")
    for scope in scopes_of(program.best.graph):
        class_name = scope.name or program.program.root.name
        body = re.split(r"^class ", forward.partition(f"class {class_name}(")[2], flags=re.MULTILINE)[0]
        body = re.sub(r"^        if self\.gives_logits:.*\n(?:            .*\n)+", "", body, flags=re.MULTILINE)
        lines = re.findall(r"(?<![.\w])(?:ddp|dp|tp)\.\w+\(", body)
        module = next((m for m in program.program.layers if m.name == scope.name), program.program.root)
        rows = reshard_rows(scope, module, names, program.plan.num_micro_batches)
        assert sum(row.count for row in rows) == len(lines) * scope.count
        assert sum(isinstance(s, Reshard) for s in module.body) == len(lines)


def test_time_rows_add_up(llama: CompiledProgram) -> None:
    prediction = llama.plan.prediction
    rows = time_rows(prediction.seconds)
    assert sum(row.exposed for row in rows) == pytest.approx(prediction.step_seconds, rel=1e-12)
    assert sum(row.hidden for row in rows) == pytest.approx(prediction.seconds[HIDDEN], rel=1e-12)


def test_gradient_bytes_are_those_of_the_parameters(free: CompiledProgram) -> None:
    """Under pure data parallelism every trained element is reduced once, in fp32."""
    training = training_of(free.optimizer, "bf16")
    expected = sum(p.numel() for p in free.model.parameters()) * training.gradient_bytes
    found = 0.0
    for scope in scopes_of(free.best.graph):
        for row in parameter_traffic(scope, free.best.assignment, free.plan.mesh, training, 1):
            if row.words.startswith("gradients"):
                value, unit = row.traffic.split()
                found += float(value) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit] * row.count
    assert found == pytest.approx(expected, rel=0.02)  # the words round to three digits


def test_runner_ups_say_why(free: CompiledProgram) -> None:
    rows = runner_ups(free.result)
    tried = {str(mesh) for _, mesh in free.result.skipped} | {str(c.plan.mesh) for c in free.result.candidates[1:]}
    assert tried and {row.plan.split(",")[0] for row in rows} == tried
    assert all(row.why for row in rows)


def test_plans_within_the_error_are_tied() -> None:
    result = search_plans(request_for("gpt2", "8 l4"))
    least, *others = (candidate.plan.prediction.step_seconds for candidate in result.candidates)
    tied = [row.is_tied for row in runner_ups(result)]
    assert tied[: len(others)] == [seconds / least <= 1.04 for seconds in others] and {True, False} == set(tied)


def test_ties_by_hand() -> None:
    two = [RunnerUp("tp4", 1.013, "", 1.0, is_tied=True), RunnerUp("dp2", 1.05, "", 1.0)]
    bounds = [RunnerUp(f"pp{n}", 1 + n / 100, "", is_bound=True) for n in (1, 4, 5)]
    assert tie_words("dp4", 1.0, two[1:]) == tie_words("dp4", 1.0, [RunnerUp("dp2", None, "")]) == ""
    assert tie_words("dp4", 1.0, two).endswith(": dp4 (chosen: predicted fastest), tp4 (+1.3%)")
    assert tie_words("dp4", 1.0, two).startswith("Predictions cannot rank these 2 plans, within 4%")
    assert tie_words("dp4", 1.0, [*two, *bounds]).endswith("tp4 (+1.3%); 2 unsolved plans may be as close")
    assert tie_words("dp4", 1.0, bounds).endswith("within 4% of each other: 2 unsolved plans may be as close")
    many = [RunnerUp(f"tp{n}", 1.01, "", 1.0, is_tied=True) for n in range(5)]
    assert tie_words("dp4", 1.0, many).startswith("Predictions cannot rank these 6 plans") and tie_words(
        "dp4", 1.0, many
    ).endswith(", 2 more")


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.renorm(self.linear(x), 2, 0, 1.0).mean()


def test_unknown_operators_are_noted() -> None:
    program = autopar.compile(Unusual(), "4 cpu", example_inputs={"x": torch.randn(8, 8)})
    assert "aten.renorm.default" in program.report()
    assert "every rank computes these without sharding" in program.report()


@pytest.mark.parametrize("which", ["llama", "gpt2", "free"])
def test_a_page_of_a_terminal(which: str, request: pytest.FixtureRequest) -> None:
    """Under 90 lines of 80 columns, with every kind of time and memory, and the figures that people compare."""
    program: CompiledProgram = request.getfixturevalue(which)
    lines = render_report(program, 80).splitlines()
    assert len(lines) < 90 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    prediction = program.plan.prediction
    assert all(row.kind in text for row in time_rows(prediction.seconds))
    assert all(kind in text for kind in prediction.num_bytes)
    low, high = (float(found) for found in re.findall(r"^fits +yes \(90% interval (\S+)-(\S+) GiB\)$", text, re.M)[0])
    workspace, peak = prediction.num_bytes["workspace"], prediction.peak_bytes
    for figure, factor in ((low, 0.97), (high, 1.13)):  # memory_spread.toml
        assert figure == pytest.approx((workspace + factor * (peak - workspace)) / 2**30, abs=0.05)
    assert re.search(r"a step: \S+ tokens/s, \S+ tokens/s/GPU, \S+ rows/s;\s+MFU\s+\d", text)


def test_plain_text_of_fixed_width(llama: CompiledProgram) -> None:
    text = llama.report()
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 110
