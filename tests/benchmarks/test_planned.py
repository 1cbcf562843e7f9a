"""Published plans beside autopar's: sizes by name, the published plan's price, and the printed table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autopar import predict
from autopar.costs.layer_costs import HOST
from benchmarks import planned as command
from benchmarks.published_runs import models
from benchmarks.published_runs.architectures import completed
from benchmarks.published_runs.machines import cluster_of
from benchmarks.published_runs.planned import Comparison, compare, fastest, pins_of
from tests.benchmarks.test_published import ROW

BRIDGE: dict[str, Any] = {
    "framework": "Megatron-Bridge/Megatron-Core", "gpu": "DGX-H100", "gpus_total": 16, "precision": "BF16", "tp": 1,
    "pp": 1, "cp": 1, "ep": 1, "global_batch": 16, "micro_batch": 1, "seq_len": 64, "iter_time_s": 1.0,
}  # fmt: skip
TINY: dict[str, Any] = {
    **ROW, "arch_family": "Llama", "ffn_gated": True, "layers": 4, "precision": "bf16", "tp": 1, "pp": 1, "dp": 8,
    "schedule": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **TINY, "arch_family": "MoE", "model": "tiny experts", "config": "Qwen3MoeConfig", "experts": 8, "ep": 4,
    "micro_batch": 1, "framework": "Megatron-Bridge",
    "more": {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        # As the models' cards and papers count them.
        ("LLAMA3_8B", 8.03),
        ("Llama3-70B SFT", 70.6),
        ("Qwen3_30B_a3B (tokendrop)", 30.5),
        ("Qwen3-235B-A22B", 235.1),
        ("GPT OSS 120B", 116.8),
        ("Moonlight-16B-A3B", 15.96),
    ],
)
def test_sizes_by_name_make_the_published_parameters(name: str, billions: float) -> None:
    row = completed({**BRIDGE, "model": name})
    model, _ = models.build(row)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)


def test_what_a_page_leaves_out_is_added_and_what_it_says_stays() -> None:
    row = completed({**BRIDGE, "model": "LLAMA3_8B", "fsdp": 8, "vocab": 7})
    assert (row["layers"], row["vocab"], row["dp"], row["zero_stage"]) == (32, 7, 16, 3)
    cluster = cluster_of(row)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    assert cluster.inter_node.bytes_per_second == 50e9
    assert completed(ROW) == ROW
    assert "layers" not in completed({**BRIDGE, "model": "Odd-9B"})


def test_a_configuration_is_compared_with_its_fastest_row() -> None:
    rows = [{**TINY, "id": str(n), "iter_time_s": s, "micro_batch": 2 - n % 2} for n, s in enumerate((3.0, 1.0, 2.0))]
    found, skipped = fastest([*rows, {**TINY, "id": "other", "global_batch": 8}, {**TINY, "status": "OOM"}])
    assert [row["id"] for row in found] == ["1", "other"]
    assert [reason for _, reason in skipped] == ["status OOM"]


def test_experts_whole_on_ranks_of_tp_are_pinned_so() -> None:
    pins = pins_of({**EXPERTS, "tp": 2, "dp": 4, "ep": 8})
    assert (pins["dp"], pins["tp"], pins["ep"], pins["etp"], pins["micro_batches"]) == (4, 2, 4, 1, 4)


def printed_of(rows: list[dict[str, Any]], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert command.main(["--rows", str(path)]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_published_plan_has_the_price_of_its_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`autopar.predict` walks to the same seconds by a path of its own, without a search; a small sum is not there,
    nor its call, for which a host would be waited for."""
    compared = list[Comparison]()

    def kept(row: Any) -> Comparison:
        compared.append(compare(row))
        return compared[-1]

    with mock.patch.object(command, "compare", kept):
        printed = printed_of([TINY, {**TINY, "gpu": "TPUv9"}], tmp_path, capsys)
    assert printed.count("own less published") == 1
    assert "skipped 1: gpu TPUv9 is not in the catalogue" in printed
    (found,) = compared
    model, batch = models.build(TINY)
    strategy = {"dp": 8, "tp": 1, "pp": 1, "zero": 0, "micro_batches": 1}
    alone = predict(model, cluster_of(TINY), strategy, example_inputs=batch, global_batch_size=16)
    priced = found.published.plan.prediction
    for kind in alone.seconds.keys() - {"all_reduce dp", HOST}:
        assert priced.seconds[kind] == pytest.approx(alone.seconds[kind], rel=1e-5)
    assert priced.step_seconds == pytest.approx(alone.step_seconds, rel=0.005)
    assert found.fits and found.ratio >= 1 - 1e-9


@pytest.mark.slow
def test_the_table_of_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_of([TINY, EXPERTS], tmp_path, capsys).count("own less published") == 2


def test_the_record_is_what_the_document_says() -> None:
    """Each configuration of benchmarks/results/planned.csv is a line of the table of docs/published_runs.md."""
    text = (Path(__file__).parents[2] / "docs" / "published_runs.md").read_text(encoding="utf-8")
    record = command.read_record()
    assert len(record) > 10 and len({row["id"] for row in record}) == len(record)
    for row in record:
        published, own = float(row["published_seconds"]), float(row["own_seconds"])
        assert float(row["ratio"]) == pytest.approx(published / own, abs=0.006)
        assert row["fits"] or published > 0.995 * own, "the search has the published plan, too, if it fits"
        profile = "-" if row["profile_seconds"] == "-" else f"{float(row['profile_seconds']):.2f}"
        seconds = (f"{float(row['measured_seconds']):.2f}", profile, f"{published:.2f}", f"{own:.2f}", row["ratio"])
        assert f"| {row['id']} |" in text and f"| {' | '.join(seconds)} |" in text, row


def test_a_configuration_is_written_over_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RESULTS", tmp_path / "planned.csv")
    first, second = (dict.fromkeys(command.FIELDS, text) | {"id": text} for text in ("a", "b"))
    for found in (first, second, first | {"ratio": "1.5"}):
        command.write(found)
    assert command.read_record() == [first | {"ratio": "1.5"}, second]
