"""What commands print for programs and for nobody: JSON against the plan and the report, silence, versions."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from autopar.cli import app, output
from autopar.plan import Plan
from tests import forked

HOME = Path(__file__).resolve().parents[3]
MODEL = ("examples.models:gpt2", "--cluster", "2 cpu", "--batch", "8")


def run(*words: str) -> Result:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def planned(folder: Path) -> Result:
    return run("plan", *MODEL, "--set", "dp=2", "--out", str(folder / "plan.yaml"), "--json")


def test_plan_as_json(planned: Result, folder: Path) -> None:
    found = json.loads(planned.stdout)
    plan = Plan.from_file(folder / "plan.yaml")
    assert (found["schema"], found["kind"], found["mesh"]) == (1, "report", "dp2")
    assert "plan written to" in planned.stderr
    figures = found["figures"]
    assert figures["step_seconds"] == pytest.approx(plan.prediction.step_seconds)
    assert figures["peak_bytes"] == pytest.approx(plan.prediction.peak_bytes)
    assert figures["tokens_per_second"] == pytest.approx(figures["tokens"] / figures["step_seconds"])
    assert sum(row["exposed"] for row in found["seconds"]) == pytest.approx(figures["step_seconds"])
    assert sum(row["num_bytes"] for row in found["memory"]) == pytest.approx(figures["peak_bytes"])
    assert {scope["name"] for scope in found["scopes"]} == {"", "GPT2Block"}
    assert all(scope["parameters"] and scope["results"] for scope in found["scopes"])


def test_a_plan_file_is_priced_for_what_it_says(folder: Path) -> None:
    """Its figures are repeated to the last digit, without flags; a flag that is otherwise is told with both figures."""
    path = folder / "short.yaml"
    run("plan", *MODEL, "--seq", "8", "--set", "tp=2", "--out", str(path), "--quiet")
    found = run("report", str(path), "--model", MODEL[0], "--json")
    plan, figures = Plan.from_file(path), json.loads(found.stdout)["figures"]
    assert plan.basis is not None and plan.basis.inputs["input_ids"] == "int64 [8, 8]"
    assert figures["step_seconds"] == plan.prediction.step_seconds
    assert figures["peak_bytes"] == plan.prediction.peak_bytes
    assert "note" not in found.stderr
    other = run("report", str(path), "--model", MODEL[0], "--seq", "16", "--json")
    assert "the prediction is now" in other.stderr
    assert "input_ids: int64 [8, 16] instead of int64 [8, 8]" in other.stderr


def test_the_plan_of_a_factory_without_arguments_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "bare_factory.py").write_text(
        "import torch\nfrom torch import nn\ndef made():\n"
        "    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))\n"
        "    return net, (torch.zeros(8, 16),), lambda out: out.square().mean()\n"
    )
    monkeypatch.syspath_prepend(folder)
    path = folder / "bare.yaml"
    run("plan", "bare_factory:made", "--cluster", "2 cpu", "--out", str(path), "--quiet")
    found = run("report", str(path), "--model", "bare_factory:made", "--json")
    assert json.loads(found.stdout)["figures"]["step_seconds"] == Plan.from_file(path).prediction.step_seconds


def test_keys_are_documented(planned: Result) -> None:
    """Every key of a report is in docs/cli.md."""
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(keys, value.values()))
        return set().union(*map(keys, value)) if isinstance(value, list) else set()

    known = keys(json.loads(planned.stdout))
    assert len(known) > 40
    assert {key for key in known if f"`{key}`" not in text} == set()


def test_a_plan_file_as_json(planned: Result, folder: Path) -> None:
    found = json.loads(run("report", str(folder / "plan.yaml"), "--json").stdout)
    assert found["kind"] == "plan" and found["plan"].startswith("dp2, 1 micro-batch")
    assert math.fsum(found["memory"].values()) == pytest.approx(found["peak_bytes"])


def test_comparison_as_json(planned: Result, folder: Path) -> None:
    plan = str(folder / "plan.yaml")
    found = json.loads(run("compare", plan, plan, "--json").stdout)
    assert found["kind"] == "comparison" and found["first"] == found["second"]
    assert all(row["first"] == row["second"] for row in found["decisions"])


@pytest.mark.slow
def test_explanation_as_json() -> None:
    found = json.loads(run("explain", *MODEL, "--set", "dp=2", "--seconds", "0", "--json").stdout)
    assert found["kind"] == "explanation" and found["plan"]["mesh"] == "dp2"
    assert found["what_ifs"] and found["not_tried"]


def test_quiet_prints_nothing_but_errors(planned: Result, folder: Path) -> None:
    plan = str(folder / "plan.yaml")
    assert run("report", plan, "--quiet").output == ""
    assert json.loads(run("report", plan, "--quiet", "--json").stdout)["kind"] == "plan"
    failed = CliRunner().invoke(app, ["report", str(folder / "missing.yaml"), "-q"])
    assert failed.exit_code == 2 and "missing.yaml" in failed.stderr and failed.stdout == ""


def test_page_of_the_command_line(planned: Result, folder: Path) -> None:
    plan, page, log = (folder / name for name in ("plan.yaml", "page.html", "metrics.jsonl"))
    log.write_text('{"step": 1, "loss": 4.0, "step_seconds": 1.5}\n{"step": 2, "loss": 3.5, "step_seconds": 1.25}\n')
    words = ("report", str(plan), "--model", MODEL[0], "--cluster", "2 cpu", "--html", str(page), "--log", str(log))
    assert "page written to" in run(*words).output
    assert "1.25 s" in page.read_text() and page.read_text().startswith("<!doctype html>")
    for wrong in (("--log", str(log)), ("--html", str(folder / "other.html"), "--log", str(plan))):
        failed = CliRunner().invoke(app, ["report", *MODEL, *wrong])
        assert failed.exit_code == 2 and "log" in failed.stderr
    assert not (folder / "other.html").exists()


def test_version() -> None:
    assert run("--version").stdout.startswith(f"autopar {metadata.version('autopar')} (torch ")


def test_completion(tmp_path: Path) -> None:
    asked = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": "autopar re", "COMP_CWORD": "1"}
    command = tmp_path / "autopar"
    command.write_text("from autopar.cli import main\nmain()\n")
    done = forked.run(["autopar"], cwd=tmp_path, env={**os.environ, **asked, "PYTHONPATH": str(HOME)})
    assert done.stdout.split() == ["report"]


class Screen(io.StringIO):
    """A terminal, as far as anybody asks."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_work_is_told_of_on_terminals(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen() if is_terminal else io.StringIO()
    for name in ("NO_COLOR", "TERM", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(output, "SECONDS_OF_SILENCE", 0.01)
    with output.working("planning for the moon"):
        time.sleep(0.5)
    assert ("planning for the moon" in screen.getvalue()) is is_terminal
    with output.words_to(quiet=True, as_json=False), output.working("in silence"):
        time.sleep(0.1)
    assert "in silence" not in screen.getvalue()
