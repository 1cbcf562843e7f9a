"""The GPU benchmarks where there is no GPU: how they are started, what becomes of what fails, what is timed."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import kernels, ranks, train
from benchmarks.gpu.cases.case import BOTH, FORWARD, Case
from benchmarks.gpu.isolated import NO_TIME, Outcome
from tests import forked

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kernels", "train", "profile", "ranks"])
def test_runs_by_its_path_from_anywhere(name, tmp_path):
    script = ROOT / "benchmarks" / "gpu" / f"{name}.py"
    result = forked.run([str(script), "--help"], cwd=tmp_path)
    assert result.returncode == 0 and "--seconds" in result.stdout, result.stderr[-2000:]


# Ranks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_rank_runs_alone_in_a_group_that_moves_nothing():
    case = replace(train.SMOKE[0], num_layers=1)
    found = ranks.measure(ranks.Rank(case, {"dp": 2, "pp": 2, "zero": 1, "micro_batches": 2}, 4, 3, 8, "cpu"))
    assert float(found["allocated_gib"]) == 0 and "parameters" in found["parts"]
    assert not dist.is_initialized()


# Kernels --------------------------------------------------------------------------------------------------------------


class Device:
    """The calls that timing makes, in order, of a device on which everything takes 2 ms."""

    def __init__(self, monkeypatch):
        self.calls, self.clock = [], 0.0
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                device.calls.append("record")

            def synchronize(self):
                device.calls.append("synchronize event")

            def elapsed_time(self, later):
                return 2.0

        class Flush:
            def zero_(self):
                device.calls.append("flush")

        cuda = torch.cuda
        monkeypatch.setattr(cuda, "Event", Event)
        monkeypatch.setattr(cuda, "_sleep", lambda cycles: self.calls.append(("sleep", cycles)))
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(cuda, "get_device_name", lambda: "fake")
        monkeypatch.setattr(kernels.torch, "empty", lambda *_, **__: Flush())
        monkeypatch.setattr(kernels.time, "perf_counter", lambda: self.clock)
        monkeypatch.setattr(kernels, "rates", lambda _: (1e9, 1e12))

    def work(self, host_seconds=0.25):
        self.calls.append("work")
        self.clock += host_seconds


def test_what_is_timed_starts_cold_and_enqueued(monkeypatch):
    device = Device(monkeypatch)
    assert kernels.time_seconds(device.work, 2) == [2e-3, 2e-3]
    assert device.calls[:3] == ["work"] * 3
    once = device.calls[3:9]
    assert [each if isinstance(each, str) else each[0] for each in once] == [
        "flush", "sleep", "record", "work", "record", "synchronize event"
    ]  # fmt: skip
    assert device.calls[9:] == once
    # Longer than the host takes, at any clock of today's GPUs.
    assert once[1][1] / 2e9 > 0.25


def case(**others):
    x = torch.ones(4, requires_grad=True)
    moved = {FORWARD: 32, BOTH: 80}
    return Case("double", (4,), torch.float32, (x,), lambda x: 2 * x, lambda x: x + x, moved, others=others)


@pytest.mark.slow
def test_an_implementation_that_raises_is_a_row(monkeypatch):
    Device(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda formula, dynamic: formula)

    def fails(x):
        raise torch.OutOfMemoryError("no memory\nof any kind")

    rows = list(kernels.measure(case(first=fails, second=torch.Tensor.double), 4, error=1e-7))
    names = [(row["implementation"], row["direction"]) for row in rows]
    timed = [(name, direction) for name in ("triton", "eager", "compile") for direction in (FORWARD, BOTH)]
    assert names == [*timed, ("first", ""), ("second", FORWARD), ("second", BOTH)]
    assert rows[6]["error"] == "OutOfMemoryError: no memory" and not rows[6]["median_seconds"]
    assert all(tuple(row) == kernels.FIELDS and row["error"] == "" for row in rows if row is not rows[6])
    assert float(rows[1]["bytes_per_second"]) == 80 / 2e-3


def test_a_broken_device_ends_the_process(monkeypatch):
    Device(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda formula, dynamic: formula)

    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        list(kernels.measure(case(), 4, error=0.0))


def test_failures_are_rows_and_end_no_other_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "fake")
    monkeypatch.setenv("AUTOPAR_TUNING", "off")
    seen = []

    def outcomes(work, items, item_seconds, deadline):
        for item in items:
            seen.append((work.__name__, kernels.os.environ["AUTOPAR_TUNING"]))
            bad = item == "swiglu" or (item not in ("swiglu", "grad_norm") and item.kernel == "grad_norm")
            yield Outcome(item, error="Traceback\n  line\nRuntimeError: wrong" if bad else "")

    monkeypatch.setattr(kernels, "outcomes", outcomes)
    failed = kernels.run(["swiglu", "grad_norm"], 3, tmp_path / "rows.csv", "chosen.json", deadline=0.0)
    assert failed == ["swiglu, checks: RuntimeError: wrong", "grad_norm (16, 16777216): RuntimeError: wrong"]
    assert sorted(seen) == sorted(2 * [("check_kernel", "off")] + 2 * [("time_shape", "chosen.json")])
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["kernel"], row["shape"], row["error"]) for row in rows] == [
        ("swiglu", "", "checks: RuntimeError: wrong"),
        ("grad_norm", "16x16777216", "RuntimeError: wrong"),
    ]


# Training -------------------------------------------------------------------------------------------------------------


def found(side, losses=(), error=""):
    run = train.Run(train.SMOKE[0], side, torch.device("cpu"), 5)
    return Outcome(run, (list(losses), {"mfu": "0.5"}) if losses else None, error)


def test_sides_that_fail_or_differ_are_rows(tmp_path):
    path, lengths = tmp_path / "rows.csv", []

    def one_by_one():
        yield found("hf", error="Traceback\nOutOfMemoryError: no memory")
        for each in (found("generated", [2.0, 1.0]), found("hf compile", [2.0, 1.5]), found("hf liger", [2.01, 1.0])):
            lengths.append(len(path.read_text().splitlines()))
            yield each
        yield found("generated inductor", error=NO_TIME)

    rows = train.rows_of(one_by_one(), path)
    assert lengths == [2, 3, 4], "rows are not written as they come"
    assert [row["mfu"] for row in rows] == ["", "0.5", "", "0.5", ""]
    assert rows[0]["error"] == "OutOfMemoryError: no memory" and rows[4]["error"] == NO_TIME
    assert rows[2]["error"].startswith("losses") and not rows[1]["error"] and not rows[3]["error"]
    with path.open() as file:
        assert [dict(row) for row in csv.DictReader(file)] == rows
    assert all(tuple(row) == train.FIELDS for row in rows)


def test_all_sides_start_from_one_model_that_stays_as_it_is():
    device = torch.device("cpu")
    model = train.initial(train.SMOKE[0], device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    side = train.hugging_face(train.SMOKE[0], device, compiled=False, liger=False)
    first, second = side.step(), side.step()
    assert second < first
    assert train.initial(train.SMOKE[0], device) is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_flops_need_no_memory_for_weights():
    small = replace(train.SMOKE[0], num_layers=1)
    with torch.device("meta"):
        on_meta = small.model()
    matrices = sum(p.numel() for p in on_meta.parameters() if p.dim() == 2) - 256 * 64
    assert small.flops(on_meta) == small.num_tokens * (6 * matrices + 6 * small.sequence * small.hidden)
