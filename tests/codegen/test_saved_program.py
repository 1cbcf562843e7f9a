"""A saved folder runs under torchrun without autopar, and resumes."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autopar
from examples.models import EXAMPLES
from tests import forked

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
    assert found - set(sys.stdlib_module_names) <= {"torch", "safetensors", "autopar_program"}


@pytest.mark.slow
@pytest.mark.distributed
def test_trains_and_resumes_under_torchrun(folder, tmp_path):
    straight = _losses(_torchrun(folder, tmp_path, *_words(tmp_path, 4, "a")))
    first, rest = (_losses(_forked(folder, tmp_path, *_words(tmp_path, 2, "b"))) for _ in range(2))
    assert len(straight) == 4
    assert first + rest == straight
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.slow
def test_one_process_needs_no_launcher(tmp_path):
    """Its first loss is the model's own, of the same batch."""
    example = EXAMPLES["gpt2"](layers=1, width=16, num_heads=2, batch_size=2, seq_len=8)
    compiled = autopar.compile(example.model, "1 cpu", example_inputs=example.inputs)
    folder = compiled.save(tmp_path / "alone")
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(40)))
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK")}
    done = forked.run([str(folder / "main.py"), "--steps", "2", "--data", str(text)], env=environment)
    losses = re.findall(r"loss (\S+)", done.stdout)
    assert done.returncode == 0 and len(losses) == 2, done.stderr[-2000:]
    with torch.no_grad():
        assert float(losses[0]) == pytest.approx(_first_loss(example, text.read_bytes()), abs=1e-4)


def _first_loss(example, data):
    """The model's loss on the batch that main.py reads first: a piece from a drawn start for every row."""
    values, loaded = torch.tensor(list(data)), {}
    for name, whole in example.inputs.items():
        rows, length = whole.shape
        starts = torch.randint(len(values) - length, (rows,), generator=torch.Generator().manual_seed(0))
        loaded[name] = torch.stack([values[s : s + length] for s in starts.tolist()])
    return example.model(**loaded).loss.item()


def test_wrong_number_of_processes_is_said(folder, tmp_path):
    """As one of two processes that torchrun starts."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "PYTHONPATH": ""}
    output = forked.run([str(folder / "main.py"), "--steps", "1"], cwd=tmp_path, env=os.environ | environment)
    assert output.returncode != 0
    assert "for 4 processes, 2 run" in output.stderr


def _words(cwd, steps, checkpoint):
    return "--steps", str(steps), "--checkpoint", str(cwd / checkpoint)


def _losses(done):
    assert done.returncode == 0, done.stderr[-2000:]
    return re.findall(r"step \d+ loss ([\d.]+)", done.stdout)


def _isolated():
    """An environment, so that nothing of the checkout is importable from an empty working directory."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def _torchrun(folder, cwd, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(folder / "main.py")]
    return subprocess.run(
        [*command, *arguments], cwd=cwd, env=_isolated(), capture_output=True, text=True, timeout=900, check=False
    )


def _forked(folder, cwd, *arguments):
    return forked.run([str(folder / "main.py"), *arguments], ranks=4, cwd=cwd, env=_isolated())
