"""`autopar doctor`: every check says what it must on a machine that lacks something."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar.cli import app
from autopar.cli import running as command
from autopar.launch import RankError
from autopar.running import doctor

Usage = namedtuple("Usage", "total used free")


def test_versions_of_torch() -> None:
    assert doctor.torch_version("2.10.1+cu126").status == "problem"
    assert doctor.torch_version("2.11.0").status == "ok"
    assert doctor.torch_version("2.99.0a0+git123").status == "warning"


def test_little_shared_memory_disk_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**26, 0, 2**26))
    small = doctor.shared_memory(tmp_path)
    assert small.status == "warning" and "64 MiB" in small.found and "--shm-size" in small.advice
    assert doctor.disk(tmp_path / "not" / "there").status == "warning"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 0, 2**40))
    assert doctor.shared_memory(tmp_path).status == doctor.disk(tmp_path / "not" / "there").status == "ok"
    assert doctor.open_files(1024, 2**20).advice == "ulimit -n 4096"
    assert "limits.conf" in doctor.open_files(1024, 1024).advice
    assert doctor.open_files(2**16, 2**16).status == "ok"


def test_threads_of_all_local_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_cores", lambda: 8.0)
    assert doctor.threads({}).status == "ok"
    assert doctor.threads({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}).status == "ok"
    assert doctor.threads({"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "4"}).advice == "OMP_NUM_THREADS=2"
    assert doctor.threads({"OMP_NUM_THREADS": "many"}).status == "warning"


def test_processes_that_do_not_meet_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(seconds: float) -> None:
        raise RankError("rank 1 did not answer")

    monkeypatch.setattr(command, "meet", refused)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    line = next(check for check in found["checks"] if check["name"] == "two processes")
    assert found["kind"] == "doctor" and line["status"] == "problem" and "rank 1" in line["found"] and line["advice"]


def test_this_machine_is_examined() -> None:
    """Two real processes meet."""
    result = CliRunner().invoke(app, ["doctor"])
    assert "ok      two processes: met and added over gloo" in result.output
    assert (result.exit_code == 1) == any(line.startswith("problem ") for line in result.output.splitlines())
