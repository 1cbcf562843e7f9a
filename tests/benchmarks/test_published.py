"""Predictions of published runs: from a row to its model, cluster and strategy, and the figures that are printed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.frontend.trace import trace
from autopar.ir.plan_data import Prediction
from benchmarks import published as command
from benchmarks.published_runs import models, tables
from benchmarks.published_runs.accuracy import measured_bytes, predicted_bytes, tau
from benchmarks.published_runs.machines import cluster_of, device_of, precision_of
from benchmarks.published_runs.predictions import Outcome, predict_rows
from benchmarks.published_runs.rates import fit_rates, left_out_seconds
from benchmarks.published_runs.rows import SkippedError
from benchmarks.published_runs.strategies import assumptions, profile_of, strategy_of

ROW: dict[str, Any] = {
    "id": "r1", "source": "a", "framework": "Megatron-LM v2", "model": "GPT-small", "arch_family": "GPT", "layers": 6,
    "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "ffn_gated": False, "bias": True, "vocab": 1024,
    "tied_embeddings": True, "seq_len": 128, "precision": "fp16-mixed", "gpu": "A100-80GB", "gpus_total": 8,
    "gpus_per_node": 8, "intra_node": "NVLink3 600GB/s", "intra_bw_gbs": 600, "dp": 2, "tp": 2, "pp": 2, "vpp": 1,
    "cp": 1, "ep": 1, "zero_stage": 0, "micro_batch": 2, "grad_accum": 4, "global_batch": 16, "recompute": "none",
    "offload": "none", "schedule": "1F1B", "iter_time_s": 1.0, "status": "ok",
}  # fmt: skip


def test_a_model_built_shallow_traces_as_the_whole() -> None:
    model, batch = models.build(ROW)
    assert models.graph_of(ROW, 2) == trace(model, batch, batch_size=2, param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"hidden": None}, "missing hidden"),
        ({"iter_time_s": None}, "missing iter_time_s"),
        ({"status": "OOM"}, "status OOM"),
        ({"gpu": "TPUv9"}, "gpu TPUv9 is not in the catalogue"),
        ({"dp": 4}, "global_batch is not|dp x tp x pp"),
        ({"global_batch": 17}, "global_batch is not"),
        ({"cp": 2}, "dp x tp x pp x cp is not gpus_total"),
        ({"ep": 2}, "ep needs a mixture of experts"),
        ({"dp": 1, "tp": 1, "pp": 1, "gpus_total": 3, "gpus_per_node": 3, "cp": 3}, "does not divide"),
        ({"recompute": "half"}, "recompute 'half'"),
        ({"precision": "posit"}, "precision 'posit'"),
        ({"arch_family": "Mamba"}, "architecture Mamba"),
        ({"arch_family": "Mixtral", "ffn_gated": True}, "architecture Mixtral"),
        ({"arch_family": "Odd", "ffn_gated": None}, "architecture Odd"),
        ({"schedule": "V-Half"}, "schedule 'V-Half' is not modelled"),
        ({"schedule": "sideways"}, "schedule 'sideways' is not known"),
        ({"gpus_per_node": 4}, "link between nodes"),
        ({"intra_node": None, "intra_bw_gbs": None}, "neither intra_node"),
        ({"iter_time_s": 1e-9}, "more FLOP/s"),
    ],
)
def test_rows_that_lack_something_are_skipped_with_the_reason(changed: dict[str, Any], words: str) -> None:
    row = {key: value for key, value in {**ROW, **changed}.items() if value is not None}
    outcomes, skipped, _ = predict_rows([row])
    assert not outcomes
    ((_, reason),) = skipped
    assert re.search(words, reason)


@pytest.mark.slow
def test_a_row_with_context_parallelism_is_predicted_at_its_part_of_the_tokens() -> None:
    flash = {**ROW, "pp": 1, "zero_stage": 1, "attention_impl": "flash 2"}
    rows = [{**flash, "dp": 4}, {**flash, "dp": 2, "cp": 2, "global_batch": 8}]
    outcomes, skipped, _ = predict_rows(rows)
    assert not skipped
    first, second = (o.prediction for o in outcomes)  # as many rows on each rank, with half of the tokens
    assert second.num_bytes["activations"] == pytest.approx(first.num_bytes["activations"] / 2, rel=0.01)
    assert second.num_bytes["optimizer state"] == pytest.approx(first.num_bytes["optimizer state"], rel=0.02)
    assert second.seconds["p2p cp"] > 0


def test_a_row_becomes_a_strategy_and_a_cluster() -> None:
    row = {**ROW, "dp": 8, "tp": 2, "pp": 1, "gpus_total": 16, "zero_stage": 1, "zero_group": 4, "global_batch": 64}
    row |= {"inter_node": "4x100Gb RoCE per node", "inter_bw_gbps_per_node": 400, "sp": True}
    strategy = strategy_of(row)
    wanted = {"pp": 1, "ddp": 2, "dp": 4, "tp": 2, "zero": 1, "micro_batches": 4, "recompute": "none", "sp": True}
    assert strategy == wanted
    cluster = cluster_of(row)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.inter_node.bytes_per_second == pytest.approx(400e9 / 8 / 8)


def test_what_is_assumed_is_told() -> None:
    assert set(assumptions(ROW)) == {
        "sp absent, taken as false",
        "attention_impl absent, taken as unfused",
    }
    strange = set(assumptions({**ROW, "framework": "unheard of", "tp": 1}))
    other = {**ROW, "arch_family": "Qwen2", "ffn_gated": True}
    assert "architecture Qwen2 built as a Llama" in assumptions(other)
    assert models.model_key(other) == models.model_key({**ROW, "arch_family": "Llama"})
    assert strategy_of({**ROW, "schedule": "ZB-H1"})["schedule"] == "zero-bubble"
    assert "framework unheard of under the profile megatron-2021" in strange


def test_how_rows_of_experts_travel_is_read_from_what_a_row_says() -> None:
    bridge = {**ROW, "framework": "Megatron-Bridge", "experts": 8}

    def of(**said: str) -> tuple[str, ...]:
        return profile_of({**bridge, **said}).dispatches

    hybrid = "HybridEP, force balance"
    assert (of(), of(notes=hybrid, variant="EP overlap off")) == (("deep_ep",), ("hybrid_ep",))
    assert of(notes=hybrid, variant="EP overlap on (search)") == ("hybrid_ep_overlapped",)
    assert of(variant="alltoall fallback smoke") == ("all_to_all",)
    assert profile_of({**ROW, "framework": "Megatron-Core", "experts": 8}).dispatches == ("all_to_all",)


def test_devices_by_name_or_by_memory() -> None:
    def of(gpu: str, size: str) -> str:
        return device_of({**ROW, "gpu": gpu, "gpu_mem_gb": size}).name

    assert of("A100-80GB-PCIe", "80") == "a100-80g-pcie" and of("A100-SXM4", "40") == "a100-40g"
    assert of("A800-SXM4", "80") == "a800-80g" and of("H800", "80") == "h800-sxm"  # fewer links
    with pytest.raises(SkippedError, match="not in the catalogue"):
        of("A100-SXM4", "20")


def test_precisions() -> None:
    def of(text: str, gpu: str = "A100-80GB") -> str:
        return precision_of({**ROW, "precision": text, "gpu": gpu})

    tf32 = "fp32 (TF32 on Ampere+ default)"
    assert [of("amp_bf16/DEFAULT"), of("fp16-mixed"), of("tf32"), of("fp32")] == ["bf16", "fp16", "tf32", "fp32"]
    assert (of(tf32), of(tf32, "V100-32GB"), of("amp_fp8/DEFAULT")) == ("tf32", "fp32", "fp8")
    assert [of("MXFP8"), of("FP8-MX"), of("FP8-CS")] == ["mxfp8", "mxfp8", "fp8"]


def test_tau_counts_pairs_of_one_group_and_leaves_ties_out() -> None:
    rows = [("a", 1.0, 10.0), ("a", 2.0, 30.0), ("a", 3.0, 20.0), ("a", 3.0, 5.0), ("b", 9.0, 1.0)]
    # 1-2 agree, 1-3 agree, 2-3 not, 1-4 not, 2-4 not; 3-4 are measured equal.
    assert tau(rows) == (pytest.approx(-1 / 5), 5)
    assert math.isnan(tau([("a", 1.0, 1.0)])[0])


def outcome(source: str, number: int, measured: float, matmuls: float, memory: float) -> Outcome:
    seconds = {
        "forward matmuls": matmuls / 3,
        "backward matmuls": matmuls * 2 / 3,
        "backward memory-bound kernels": memory,
    }
    row = {**ROW, "id": f"{source}{number}", "source": source, "iter_time_s": measured}
    return Outcome(row, Prediction(seconds, {}), "ampere")


def test_fitted_rates_find_what_measurements_were_made_with() -> None:
    rows = [
        outcome(source, i, 1.3 * matmuls + 0.8 * memory, matmuls, memory)
        for source in "abc"
        for i, (matmuls, memory) in enumerate([(1.0, 0.1), (0.2, 1.0), (1.0, 1.0)])
    ]
    rates = fit_rates(rows)
    assert rates["ampere", "matmuls"] == pytest.approx(1.3, rel=0.05)
    assert rates["ampere", "memory-bound kernels"] == pytest.approx(0.8, rel=0.05)


def test_a_source_that_is_left_out_does_not_fit_itself(capsys: pytest.CaptureFixture[str]) -> None:
    own = [outcome("odd", i, 2.0, 1.0, 0.0) for i in range(3)]
    others = [outcome(source, i, 1.0, 1.0, 0.0) for source in ("b", "c") for i in range(3)]
    rows = own + others
    found = left_out_seconds(rows)
    assert found["odd0"] == pytest.approx(1.0)
    tables.show_left_out(rows, fit_rates(rows), found)
    assert "odd" in capsys.readouterr().out


def test_memory_is_compared_by_what_was_measured() -> None:
    bytes_by_kind = {"parameters": 4e9, "transient": 1e9, "workspace": 1.5e9}
    row = {**ROW, "mem_gb": 6.0, "mem_unit": "GB"}
    smi = Outcome({**row, "mem_kind": "nvidia-smi, rounded up"}, Prediction({}, bytes_by_kind), "ampere")
    both = {**row, "mem_unit": "GiB", "mem_kind": "peak reserved (max allocated 5.5 GiB)"}
    allocated = Outcome(both, Prediction({}, bytes_by_kind), "ampere")
    assert predicted_bytes(smi) == 6.5e9 and measured_bytes(smi.row) == 6e9
    assert predicted_bytes(allocated) == 5e9
    assert measured_bytes(allocated.row) == 5.5 * 2**30


def test_memory_of_nanotron_is_what_its_first_rank_reserved() -> None:
    """Beside the fuller second rank, in units of 2^30, with what the allocator holds of what comes and goes."""
    first = {"parameters": 4e9, "activations": 2e9, "transient": 1e9, "workspace": 1.5e9}
    fuller = {**first, "activations": 9e9}
    row = {**ROW, "framework": "nanotron", "mem_gb": 7.5, "mem_unit": "GB (as printed)"}
    found = Outcome(row, Prediction({}, fuller, (first, fuller)), "hopper")
    assert predicted_bytes(found) == pytest.approx(7e9 + 0.15 * 3e9)
    assert measured_bytes(row) == 7.5 * 2**30


@pytest.mark.parametrize(
    ("num_gpus", "tp", "pp", "gathers_again"),
    [(16, 8, 2, False), (64, 8, 1, False), (64, 8, 2, True), (64, 32, 1, True)],
)
def test_later_runs_of_nanotron_gather_again(num_gpus: int, tp: int, pp: int, gathers_again: bool) -> None:
    row = {**ROW, "framework": "nanotron", "gpus_total": num_gpus, "tp": tp, "pp": pp}
    assert profile_of(row).gathers_again == gathers_again


def test_the_command_prints_every_source_and_writes_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW, {**ROW, "id": "r2", "recompute": "full"}, {**ROW, "id": "r3", "source": "b", "status": "OOM"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "out.csv")
    monkeypatch.setattr(command, "DRAWING", tmp_path / "out.svg")
    monkeypatch.setattr("sys.argv", ["published", "--rows", str(file), "--csv", "--svg"])
    assert command.main() == 0
    printed = capsys.readouterr().out
    assert "skipped 1: status OOM" in printed and "1 models traced" in printed
    written = (tmp_path / "out.csv").read_text().splitlines()
    assert len(written) == 4 and written[3].endswith("status OOM")
    seconds = [float(line.split(",")[6]) for line in written[1:3]]
    assert seconds[1] > seconds[0]
