"""Tune the launch parameters of a saved program's kernels: `autopar tune`. Read files of such parameters.

codegen/kernels/tuning.py measures and chooses them when a kernel first meets a case, and explains how.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from autopar.errors import AutoparError
from autopar.files.text_files import parse_json
from autopar.launch import launch_main
from autopar.plan import Plan
from autopar.running.folder import TUNING_FILE


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel's case on a device. milliseconds: of every candidate tile; None for one that does not run."""

    device: str
    case: str
    tile: str
    milliseconds: dict[str, float | None]

    def __str__(self) -> str:
        times = [time for time in self.milliseconds.values() if time is not None]
        spread = f"{min(times):.4f} to {max(times):.4f} ms" if times else "not timed"
        chosen = self.milliseconds.get(self.tile)
        suffix = "" if chosen is None else f"  {chosen:.4f} ms"
        return f"{self.case}: {self.tile}{suffix} ({len(self.milliseconds)} candidates, {spread})"


def tune(folder: str | Path, steps: int = 1) -> tuple[list[Choice], list[Choice]] | None:
    """Run a saved program's first steps on this machine's GPUs, which fills its tuning.json.

    Returns (new choices, earlier choices in the file); None on a machine without a GPU, where there is nothing to tune.
    Raises AutoparError where the folder is no program with kernels, RankError where a step fails.
    """
    from codegen.kernels.tuning import VARIABLE  # heavy: triton comes with it

    home = Path(folder).absolute()
    main, plan = home / "main.py", home / "plan.yaml"
    if not (main.exists() and plan.exists()):
        raise AutoparError(
            "this is no saved program", values=str(home), alternatives="a folder of `autopar plan --code`"
        )
    path = home / TUNING_FILE
    if not (home / "kernels").exists():
        raise AutoparError("the program has no kernels to tune", values=str(home), alternatives="a plan for GPUs")
    if not torch.cuda.is_available():
        return None
    if not path.exists():
        path.write_text("{}\n", encoding="utf-8")
    before = read_choices(path)
    with mock.patch.dict(os.environ, {VARIABLE: str(path)}):
        launch_main(main, ["--steps", str(steps)], Plan.from_file(plan).num_ranks)
    return [choice for choice in read_choices(path) if choice not in before], before


def read_choices(path: Path) -> list[Choice]:
    """Return all entries of a file of launch parameters; none where the file cannot be parsed."""
    try:
        sections = parse_json(path.read_text(encoding="utf-8"))
        return [
            Choice(device, case, entry["tile"], entry["milliseconds"])
            for device, section in sections.items()
            for case, entry in section.items()
        ]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return []
