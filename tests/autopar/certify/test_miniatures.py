"""Miniatures: what they are made of, and that they fail with a defect of the run time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import autopar
from autopar.certify.cuts import axis_sets, cuts_of
from autopar.certify.miniature import prove_miniature
from autopar.certify.miniature_config import small_fields
from autopar.certify.miniature_plan import counterparts
from autopar.certify.miniature_run import (
    LEAST_RATE,
    MOST_RATE,
    constraints_of,
    layers_needed,
    optimizer_of,
    train_miniature,
)
from autopar.compiled import CompiledProgram
from autopar.frontend.inputs import name_inputs
from autopar.frontend.trace import trace
from autopar.ir.mesh import Mesh
from autopar.running import folder
from autopar.verify import sgd_with_momentum
from examples.models import EXAMPLES
from tests.autopar.certify.programs import compiled, dense, megatron, mixture, unlike


def test_axes_are_paired_in_few_miniatures() -> None:
    assert axis_sets(("pp", "dp", "tp")) == [("pp", "dp", "tp")]
    sets = axis_sets(("pp", "dp", "ep", "tp"))
    pairs = {pair for axes in sets for pair in itertools.combinations(axes, 2)}
    assert len(sets) == 3 and pairs == set(itertools.combinations(("pp", "dp", "ep", "tp"), 2))


def test_a_miniature_is_pinned_to_the_degrees_of_its_mesh() -> None:
    """As constraints name them: dp are the ranks of one ZeRO group, with those of ep."""
    inputs = (torch.randn(16, 64),)

    def program(pins: dict[str, Any]) -> CompiledProgram:
        return autopar.compile(
            nn.Linear(64, 8), "4 cpu", example_inputs=inputs, loss_fn=lambda output: output.sum(), constraints=pins
        )

    large = program({"ddp": 2, "dp": 2, "zero": 1})
    small = program(constraints_of(large, {"ddp": 2, "dp": 2}, ""))
    assert small.plan.mesh == large.plan.mesh == Mesh(("ddp", "dp"), (2, 2))


@pytest.mark.slow
def test_unlike_pipeline_ranks_have_a_miniature_of_their_own() -> None:
    cuts, left = cuts_of(unlike().plan)
    assert [str(cut) for cut in cuts] == ["pp2 x dp2", "pp2 (single, dp2)"] and not left
    assert [cut.num_ranks for cut in cuts] == [4, 3]


@pytest.mark.slow
def test_calls_have_counterparts_whatever_their_names_and_casts() -> None:
    small = mixture().best.graph
    model, inputs = EXAMPLES["mixtral"]().model, EXAMPLES["mixtral"]().inputs
    large = trace(model, name_inputs(model, inputs), None, batch_size=small.batch_size, param_dtype=torch.bfloat16)
    pairs = counterparts(large, small)
    assert pairs.keys() == mixture().best.operators.keys()
    experts = [
        (one, two)
        for one, two in pairs.items()
        if mixture().best.operators[one].node.op == "autopar.expert_linear.default"
    ]
    assert experts and all(one != two for one, two in experts), "versions of an operator are called otherwise"


def test_a_configuration_keeps_its_first_layers_kinds() -> None:
    from transformers import DeepseekV3Config, Llama4TextConfig

    llama = Llama4TextConfig(num_hidden_layers=24, interleave_moe_layer_step=2, attention_chunk_size=64)
    shrunk = Llama4TextConfig(**small_fields(llama, 4, {}))
    assert shrunk.moe_layers == [1, 3] and shrunk.num_hidden_layers == 4 and shrunk.attention_chunk_size < 16
    assert (shrunk.layer_types, shrunk.no_rope_layers) == (llama.layer_types[:4], llama.no_rope_layers[:4])
    deepseek = DeepseekV3Config(num_hidden_layers=61, first_k_dense_replace=3)
    small = DeepseekV3Config(**small_fields(deepseek, 4, {}))
    assert small.first_k_dense_replace == 3 and small.n_routed_experts % small.n_group == 0
    assert DeepseekV3Config(**small_fields(deepseek, 2, {})).first_k_dense_replace == 1


@pytest.mark.parametrize(("num_tokens", "window"), [(8192, 6), (4096, 16), (2048, 32)])
def test_a_window_hides_keys_where_the_plans_does(num_tokens: int, window: int) -> None:
    """transformers gives attention no mask where a row is shorter than the window, and one where it is as long."""
    from transformers import Llama4TextConfig, MistralConfig

    chunks = Llama4TextConfig(num_hidden_layers=2, attention_chunk_size=4096)
    for config in (chunks, MistralConfig(sliding_window=4096)):
        fields = small_fields(config, 2, {}, num_tokens)
        assert (fields.get("sliding_window") or fields.get("attention_chunk_size")) == window
        assert window == 6 or window <= fields["max_position_embeddings"]


def test_there_are_layers_for_every_mode_of_recomputation() -> None:
    best = dense().best
    stages = best.plan.pipeline.stages
    assert layers_needed(best, 2) == 2
    modes = (("full", 1), ("none", 1)), (("selective", 2),)
    recomputing = tuple(replace(s, recompute={"LlamaDecoderLayer": m}) for s, m in zip(stages, modes, strict=True))
    plan = replace(best.plan, pipeline=replace(best.plan.pipeline, stages=recomputing))
    assert layers_needed(replace(best, plan=plan), 2) == 3


@pytest.mark.parametrize(("rate", "taken"), [(0.0, LEAST_RATE), (5.0, MOST_RATE), (torch.tensor(0.01), 0.01)])
def test_miniatures_are_trained_by_the_plans_optimizer(rate: Any, taken: float) -> None:
    """Of its class and groups, at a rate that shows; by another only where it does not take the small parameters."""

    def grouped(named_parameters: Any) -> torch.optim.Optimizer:
        few, many = [], []
        for name, parameter in named_parameters:
            (few if "norm" in name else many).append(parameter)
        groups: list[dict[str, Any]] = [{"params": few, "weight_decay": 0.0}, {"params": many}]
        return torch.optim.AdamW(groups, lr=rate, weight_decay=0.2)

    model = EXAMPLES["llama"]().model
    factory, reason = optimizer_of(replace(megatron(), optimizer=grouped), model)
    optimizer = factory(list(model.named_parameters()))
    assert not reason and type(optimizer) is torch.optim.AdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.2]
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([taken] * 2)
    strange = [torch.nn.Parameter(torch.zeros(2))]
    factory, reason = optimizer_of(replace(megatron(), optimizer=lambda _: torch.optim.Adam(strange)), model)
    assert factory is sgd_with_momentum and "does not take the miniature's parameters" in reason


@pytest.mark.slow
@pytest.mark.distributed
def test_unlike_pipeline_ranks_train_with_what_the_host_holds() -> None:
    program = unlike()
    trained = train_miniature(program, cuts_of(program.plan)[0][1], None)
    assert trained.text == "pp2 (single, dp2), 1f1b" and trained.left == ()
    assert trained.kept == trained.calls and trained.report.ok(), str(trained.report)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_miniature_trains_with_the_plans_own_decisions(tmp_path: Path) -> None:
    certificate = dense().certify()
    assert certificate.ok, certificate.failures
    part = certificate.part("miniature")
    assert certificate.verdict == "passed" and certificate.gaps == ()
    assert part.counts["miniatures trained"] == 1 and part.counts["processes of the largest"] == 8
    assert part.counts["calls with the plan's option"] == len(dense().best.operators)
    assert part.largest_error is not None and 0 < part.largest_error < 1e-5
    assert part.worst.startswith("pp2 x dp2 x tp2, 1f1b")
    assert yaml.safe_load(certificate.write(tmp_path).read_text())["proven"]["miniature"]["wrong"] == 0
    assert "Certificate of" in str(certificate)


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
    findings = prove_miniature(program)
    assert any("miniature on dp2: " in text and "tensors are off" in text for text in findings.failures), findings
