"""Certificates as files and commands."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from autopar.cli import app
from autopar.rules import register_rule
from autopar.rules.registry import default_registry


@pytest.fixture
def rules() -> Iterator[None]:
    """Forget the rules that a test registers."""
    before = dict(default_registry().additions)
    yield
    default_registry().additions.clear()
    default_registry().additions.update(before)


def test_the_command_writes_the_certificate_beside_the_plan(tmp_path: Path) -> None:
    words = ["examples.models:mlp", "--cluster", "4 h100-sxm", "--set", "tp=2", "--no-train", "--out", str(tmp_path)]
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


def test_a_plan_on_one_device_has_a_certificate(tmp_path: Path) -> None:
    words = ["examples.models:mlp", "--cluster", "1 h100-sxm", "--no-train", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["certify", *words])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load((tmp_path / "certificate.yaml").read_text())["ranks"] == 1


@pytest.mark.slow
def test_a_wrong_rule_fails_the_certificate(tmp_path: Path, rules: None) -> None:
    """Registered as any user's rule is: SiLU is not linear, so SiLU of partial sums is no partial sum of SiLU."""
    register_rule("aten.silu.default", "b* -> b*", linear=("self",))
    limits = tmp_path / "limits.yaml"
    limits.write_text('{dp: 1, tp: 2, activations: {"*.act_fn": {tp: P}}}')
    words = ["examples.models:llama", "--cluster", "2 h100-sxm", "--constraints", str(limits), "--no-train"]
    result = CliRunner().invoke(app, ["certify", *words, "--out", str(tmp_path / "run")])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output and "aten.silu.default" in result.output
    data = yaml.safe_load((tmp_path / "run" / "certificate.yaml").read_text())
    assert data["certificate"] == "FAILED" and data["proven"]["operators"]["wrong"] == len(data["failures"]) > 0
    assert all("aten.silu.default under tp=P" in text and "differs" in text for text in data["failures"])
    assert data["failures"][0].startswith("LlamaDecoderLayer.silu")


@pytest.mark.slow
@pytest.mark.distributed
def test_a_miniature_of_another_model_leaves_the_certificate_incomplete() -> None:
    """It trains, and shows nothing of the plan."""
    words = ["examples.models:llama", "--cluster", "2 h100-sxm", "--set", "dp=2", "--miniature", "examples.models:mlp"]
    result = CliRunner().invoke(app, ["certify", *words])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "LlamaForCausalLM on dp2: incomplete" in text and "without the plan's layers: LlamaDecoderLayer" in text
