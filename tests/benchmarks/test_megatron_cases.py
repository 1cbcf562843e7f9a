"""Megatron-LM's own cases: from their arguments to the last rank's blocks, and the table that is printed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.published_runs.case_memory import predict_cases
from benchmarks.published_runs.megatron_cases import case_of, kind_of, on_gpus_of
from cost_models.megatron_core import rank_memory

ARGS = {
    "num-layers": "12", "hidden-size": "512", "num-attention-heads": "8", "micro-batch-size": "4",
    "global-batch-size": "32", "seq-length": "1024", "max-position-embeddings": "1024", "bf16": "true",
    "transformer-impl": "transformer_engine", "attention-backend": "unfused", "deterministic-mode": "true",
    "no-gradient-accumulation-fusion": "true",
}  # fmt: skip
ROW: dict[str, Any] = {
    "id": "c1", "source": "functional tests", "source_ref": "x/golden_values_dev_dgx_a100.json", "model": "gpt/small",
    "gpu": "DGX-A100 80GB", "gpus_total": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "distributed_optimizer": True,
    "mem_allocated_gb": 0.5142, "mem_peak_gb": 4.3521, "args": ARGS,
}  # fmt: skip


def with_args(row: dict[str, Any] | None = None, /, **changes: str) -> dict[str, Any]:
    """ROW with arguments changed, whose names have _ for -."""
    args = {**ARGS, **{key.replace("_", "-"): value for key, value in changes.items()}}
    return {**ROW, **(row or {}), "args": args}


def kinds(row: dict[str, Any]) -> list[str]:
    """The blocks of each virtual stage of the last rank, by first letters."""
    _, setup = case_of(row)
    return ["".join(block.kind[:2] for block in chunk) for chunk in setup.chunks]


def test_the_last_rank_has_the_layers_of_its_virtual_stages() -> None:
    pp4 = {"pp": 4}
    assert kinds(with_args(pp4)) == ["atml" * 3]
    assert kinds(with_args(pp4, num_layers_per_virtual_pipeline_stage="1")) == ["atml"] * 3
    uneven = {"decoder_first_pipeline_num_layers": "2", "decoder_last_pipeline_num_layers": "2"}
    assert kinds(with_args(pp4, **uneven)) == ["atml" * 2]
    # six layers, the embedding and the loss in eight virtual stages: the last one has the loss alone
    assert kinds(with_args(pp4, num_layers="6", num_virtual_stages_per_pipeline_rank="2")) == ["atml", ""]
    layout = {"pipeline_model_parallel_layout": "Et*3|(tt|)*4mL", "num_layers": "11", "mtp_num_layers": "1"}
    moe = {"num_experts": "8", "moe_layer_freq": "([0]*3+[1]*8)"}
    stages = ["atml" * 3, *["atmo" * 2] * 4, "pratmo"]
    assert kinds(with_args(**layout, **moe)) == stages
    assert kinds(with_args({"pp": 2}, **layout, **moe)) == stages[1::2]
    hybrid = with_args({"pp": 2, "model": "hybrid/x"}, hybrid_layer_pattern="M-M*|MEM-")
    assert kinds(hybrid) == ["mamomaml"] and kind_of(hybrid) == "hybrid"
    t5 = {"encoder_num_layers": "1", "decoder_num_layers": "1", "encoder_seq_length": "64", "decoder_seq_length": "16"}
    assert kinds(with_args({"model": "t5/x"}, **t5)) == ["atmlatcrml"]


@pytest.mark.parametrize(
    ("row", "args", "words"),
    [
        ({}, {"use_torch_fsdp2": "true"}, "torch's FSDP"),
        ({"gpu": "TPUv9"}, {}, "gpu TPUv9"),
        ({"tp": 3}, {}, "whole number of replicas"),
        ({"pp": 8}, {"num_layers": "12"}, "do not divide"),
        ({}, {"bf16": "false"}, "neither bf16"),
        ({}, {"recompute_granularity": "selective", "recompute_modules": "[everything]"}, "modules must be"),
        ({"mem_allocated_gb": None}, {}, "no memory was measured"),
    ],
)
def test_rows_that_cannot_be_read_are_skipped_with_the_reason(
    row: dict[str, Any], args: dict[str, str], words: str
) -> None:
    found, ((_, reason),) = predict_cases([with_args(row, **args)])
    assert not found
    assert words in reason


def test_where_gpus_are_not_given_what_is_allocated_tells_their_number_and_is_not_judged() -> None:
    lacking = with_args({"gpus_total": None, "mem_allocated_gb": 0.9}, train_samples="1000", vocab_size="50257")
    (case,), _ = predict_cases([lacking])
    assert case.allocated_error is None and case.peak_error is not None
    model, setup = case_of(lacking)
    assert setup.dp == 8 // (lacking["tp"] * lacking["pp"] * lacking["cp"])  # a node; nothing measured is looked at
    chosen = on_gpus_of(lacking, model, setup)
    assert chosen.dp in [setup.dp * 2**power for power in range(8)]
    assert rank_memory(model, chosen).peak == case.memory.peak


def test_the_command_prints_families_skipped_rows_and_rows_that_are_far_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW, {**ROW, "id": "c2", "mem_peak_gb": 8.7042}, with_args({"gpu": "TPUv9"})]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setattr(sys, "argv", ["published.py", "--rows", str(file)])
    assert published.main() == 0
    text = capsys.readouterr().out
    assert "allocated, dense              2     0.0%" in text
    assert re.search(r"far off c2 small dev_dgx_a100: [-+]0\.0%, -50\.0%", text)
    assert "skipped 1: gpu TPUv9 is not known" in text
