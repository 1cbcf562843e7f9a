"""Programs of pipelines whose positions are not alike, on gloo processes, against the single-process model.

A small selection; more of them are in benchmarks/verify_pipelines.py.
"""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.plan import Plan
from autopar.verify import verify_program
from benchmarks.verify_pipelines import Case, cluster_of, compiled, run
from tests import forked


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def on(model: str, groups: tuple[int, ...], pinned: dict[str, Any], full: bool = False, optimizer: str = "sgd") -> Case:
    """Two pipeline ranks, which take a group each."""
    return Case(model, {"pp": 2, "micro_batches": 2} | pinned, full, optimizer, {"layers": 3}, groups)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "case",
    [
        on("llama", (2, 1), {"tp": 1, "zero": 1, "schedule": "1f1b"}),
        slow(on("llama", (4, 2), {"tp": 2, "zero": 3, "schedule": "1f1b"})),
        slow(on("llama", (4, 2), {"tp": 1, "zero": 2, "schedule": "zero-bubble"}, True, "adamw")),
        slow(on("llama", (2, 1), {"tp": 1, "zero": 3, "recompute": "selective"}, True)),
        slow(on("gpt2", (4, 2), {"tp": 1, "zero": 2, "schedule": "1f1b"}, True)),
        slow(on("gpt2", (4, 2), {"micro_batches": 4, "schedule": "gpipe"})),
        slow(on("t5", (2, 1), {"tp": 1, "zero": 1, "schedule": "1f1b"})),
    ],
    ids=lambda case: case.text,
)
def test_unlike_pipeline_ranks_equal_the_single_process_model(case: Case) -> None:
    wrong, report = run(case, case.cluster)
    assert not wrong, f"{wrong}: {report}"
    assert report is not None and report.gradients and len(report.losses) == 3


@pytest.mark.slow
@pytest.mark.distributed
def test_a_written_plan_may_have_unlike_pipeline_ranks_on_equal_devices() -> None:
    """The plan of two groups, its second pipeline rank moved into the first group."""
    case = on("llama", (2, 1), {"tp": 1, "zero": 2, "schedule": "zero-bubble"}, True)
    program, inputs = compiled(case, case.cluster)
    text = program.plan.to_yaml().replace("single of group 1", "single")
    plan = Plan.from_yaml(text)
    assert sorted(map(str, plan.stage_meshes)) == ["dp2", "single"]
    written = autopar.compile(
        program.model, cluster_of(3), example_inputs=inputs, optimizer=program.optimizer, plan=plan
    )
    report = verify_program(written, inputs, max_grad_norm=0.5)
    assert written.plan.num_ranks == 3 and report.ok(1e-5), str(report)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_saved_program_of_unlike_pipeline_ranks_trains_and_resumes(tmp_path: Path) -> None:
    """Its own main.py, without autopar on the path: the losses of one process, with the optimiser compiled in."""
    case = on("gpt2", (2, 1), {"tp": 1, "zero": 1, "schedule": "1f1b"})
    program, inputs = compiled(case, case.cluster)
    assert sorted(map(str, program.plan.stage_meshes)) == ["dp2", "single of group 1"]
    model = copy.deepcopy(program.model)
    optimizer = program.optimizer(list(model.parameters()))
    wanted = eager_losses(model, optimizer, {name: value.shape for name, value in inputs.items()}, steps=4)
    folder = program.save(tmp_path / "program")
    (tmp_path / "text").write_bytes(TEXT)
    straight = trained(folder, tmp_path, 4, "a")
    assert straight == pytest.approx(wanted, abs=2e-4) and straight[-1] < straight[0] - 0.1
    assert trained(folder, tmp_path, 2, "b") + trained(folder, tmp_path, 2, "b") == straight


TEXT = bytes(range(64)) * 200
VOCABULARY = 96


def eager_losses(
    model: nn.Module, optimizer: torch.optim.Optimizer, shapes: dict[str, torch.Size], steps: int
) -> list[float]:
    """Of the text's pieces that main.py takes in each step."""
    text, losses = torch.tensor(list(TEXT)) % VOCABULARY, []
    for step in range(steps):
        batch = {}
        for name, (rows, length) in shapes.items():
            starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(step))
            batch[name] = torch.stack([text[start : start + length] for start in starts])
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(folder: Path, cwd: Path, steps: int, checkpoint: str) -> list[float]:
    """The losses that the program prints."""
    options = ["--steps", str(steps), "--data", str(cwd / "text"), "--checkpoint", str(cwd / checkpoint)]
    environment = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    done = forked.run([str(folder / "main.py"), *options], ranks=3, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout)]
