"""A saved folder runs under torchrun without autopar, and resumes."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autopar
from examples.models import EXAMPLES

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    example = EXAMPLES["gpt2"](dropout=0.1)
    constraints = {"dp": 2, "tp": 2, "zero": 3}
    compiled = autopar.compile(example.model, IDEAL, example_inputs=example.inputs, constraints=constraints)
    return compiled.save(tmp_path_factory.mktemp("saved") / "my-run")


def test_imports_torch_only(folder):
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    assert found - set(sys.stdlib_module_names) <= {"torch", "safetensors"}


@pytest.mark.slow
@pytest.mark.distributed
def test_trains_and_resumes_under_torchrun(folder, tmp_path):
    straight = _losses(folder, tmp_path, steps=4, checkpoint="a")
    first = _losses(folder, tmp_path, steps=2, checkpoint="b")
    rest = _losses(folder, tmp_path, steps=2, checkpoint="b")
    assert len(straight) == 4
    assert first + rest == straight
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_wrong_number_of_processes_is_said(folder, tmp_path):
    """As one of two processes that torchrun starts."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": ""}
    output = subprocess.run(
        [sys.executable, str(folder / "main.py"), "--steps", "1"], cwd=tmp_path, env=os.environ | environment,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert output.returncode != 0
    assert "for 4 processes, 2 run" in output.stderr


def _losses(folder, cwd, steps, checkpoint):
    output = _torchrun(folder, cwd, 4, "--steps", str(steps), "--checkpoint", str(cwd / checkpoint))
    assert output.returncode == 0, output.stderr[-2000:]
    return re.findall(r"step \d+ loss ([\d.]+)", output.stdout)


def _torchrun(folder, cwd, ranks, *arguments):
    """In an empty working directory and an isolated environment, so that nothing of the checkout is importable."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(folder / "main.py")]
    return subprocess.run(
        [*command, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
