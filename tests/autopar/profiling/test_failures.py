"""What cannot be measured, or not in time, does not end a profile of one process."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from autopar.profiling import profile as profiling
from autopar.profiling import worker
from autopar.profiling.cases import ROUNDS, Topology, cases
from autopar.profiling.clock import Timing
from autopar.profiling.processes import OutOfTime
from autopar.profiling.samples import Sample, Samples

DEVICE = torch.device("cpu")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Runner:
    """Everything takes a millisecond; what has `bad` in its name does not fit."""

    bad = "linear bf16"

    def __init__(self, *_):
        pass

    def time(self, case):
        if self.bad in case.name:
            raise torch.OutOfMemoryError("no memory\nof any kind")
        return Timing(1e-3, 1)


def test_one_case_that_raises_is_named_and_left_out(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "Runner", Runner)
    out, topology = tmp_path / "samples.jsonl", Topology(1, 1)
    found = worker.run(out, "brief", topology, DEVICE, 0)
    names = {case.name for case in cases(topology, "brief")}
    assert {name for name, _ in found.done} == {name for name in names if Runner.bad not in name} != names
    lines = worker.failures_path(out).read_text().splitlines()
    assert len(lines) == ROUNDS["brief"] and "OutOfMemoryError: no memory" in lines[0]
    with pytest.raises(torch.OutOfMemoryError):
        worker.run(tmp_path / "of two", "brief", Topology(1, 2), DEVICE, 0)


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_out_of_time_what_was_measured_has_to_do(num_rounds, alone, tmp_path, monkeypatch):
    raw, text = tmp_path / "samples.jsonl", io.StringIO()

    def run_processes(*_, timeout_seconds, **__):
        assert timeout_seconds == 7.0
        samples = Samples.open(raw, worker.provenance(Topology(1, 1), DEVICE, 0))
        for number in range(num_rounds):
            samples.add(Sample(cases(Topology(1, 1), "brief")[0], number, Timing(1e-3, 1)))
        worker.failures_path(raw).write_text("a case: an error\n")
        raise OutOfTime("the measuring processes did not finish in time")

    monkeypatch.setattr(profiling, "run_processes", run_processes)
    arguments = 1, raw, "brief", False, Console(file=text, width=200), 7.0
    if num_rounds == 1:
        with pytest.raises(OutOfTime):
            profiling.measure_locally(*arguments)
        return
    assert len(profiling.measure_locally(*arguments).samples) == 2
    assert "did not finish in time" in text.getvalue() and "a case: an error" in text.getvalue()
