"""The package of a program, imported: the one that was written for all forked ranks, else one of this process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import autopar
from autopar.launch import run_ranks
from autopar.running.build import load_package, share_packages


def program() -> autopar.CompiledProgram:
    batch = {"x": torch.zeros(4, 8), "target": torch.zeros(4, 2)}
    return autopar.compile(
        nn.Sequential(nn.Linear(8, 2)),
        "2 cpu",
        example_inputs=(batch["x"], batch["target"]),
        loss_fn=nn.functional.mse_loss,
        constraints={"dp": 2},
    )


def home_of(compiled: autopar.CompiledProgram) -> str:
    return str(load_package(compiled).__file__)


def test_ranks_import_the_package_of_their_parent() -> None:
    homes = run_ranks(home_of, (program(),), 2)
    assert homes[0] == homes[1] and not Path(homes[0]).exists()


def test_a_shared_package_is_imported_once_and_compiled(tmp_path: Path) -> None:
    compiled = program()
    with share_packages([compiled], tmp_path):
        (package,) = tmp_path.iterdir()
        assert list((package / "runtime" / "__pycache__").glob("step.*.pyc"))
        first, second = home_of(compiled), home_of(compiled)
    third = home_of(compiled)
    assert Path(first).parent == package
    assert tmp_path not in Path(second).parents and len({first, second, third}) == 3
