"""What the documentation shows is run as it stands there: Python as one script per page, commands in their order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
PAGES = ("docs/training.md",)


def blocks(page: str, language: str) -> list[str]:
    """The text between fences, of those that name the language."""
    parts = re.split(r"^```(.*)\n", (HOME / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [text for named, text in zip(parts[1::4], parts[2::4], strict=True) if named == language]


def run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, f"{command}\n{found.stdout[-2000:]}{found.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", PAGES)
def test_python_runs(page: str, tmp_path: Path) -> None:
    """Each block is a file: callbacks come back from ranks by the name of their module."""
    found = blocks(page, "python")
    assert found
    for number, block in enumerate(found):
        (tmp_path / f"block_{number}.py").write_text(block, encoding="utf-8")
        run([sys.executable, f"block_{number}.py"], tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("page", PAGES)
def test_commands_run(page: str, tmp_path: Path) -> None:
    for name in ("README.md", "examples"):
        source = HOME / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    found = [line for block in blocks(page, "") for line in block.splitlines() if line.startswith("autopar ")]
    assert found
    for line in found:
        run([sys.executable, "-m", *line.split()], tmp_path)
