"""Pipelines against the single-process model, and what happens when a rank dies or a schedule cannot work.

A small selection; the whole matrix is benchmarks/verify_pipelines.py.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import autopar
from autopar.compiled import CompiledProgram
from autopar.errors import PlanError
from autopar.launch import RankError, run_ranks
from autopar.lowering.assembly import files_of
from autopar.verify import sgd_with_momentum
from benchmarks.verify_pipelines import TOLERANCE, Case, cluster_of, compiled, run
from codegen.program import PipelineProgram
from cost_models.schedule import SCHEDULES
from examples.models import EXAMPLES


def slow(case: Case) -> Any:
    return pytest.param(case, marks=pytest.mark.slow, id=case.text)


CASES = (
    Case(
        "gpt2",
        {"pp": 4, "dp": 1, "tp": 1, "schedule": "zero-bubble", "micro_batches": 4},
        True,
        factory={"layers": 4},
    ),
    slow(
        Case(
            "llama",
            {"pp": 2, "dp": 2, "tp": 1, "zero": 3, "schedule": "interleaved", "chunks": 2, "micro_batches": 4},
            True,
            "adamw",
            {"layers": 4},
        )
    ),
    slow(
        Case(
            "qwen2",
            {"pp": 2, "dp": 1, "tp": 2, "schedule": "zero-bubble-v", "micro_batches": 4, "recompute": "selective"},
            factory={"layers": 4},
        )
    ),
    # The t5's stages are test_emit_pipeline's too, and skips over pipeline ranks pipeline_program.py's.
    slow(Case("t5", {"pp": 4, "dp": 1, "tp": 1, "schedule": "1f1b", "micro_batches": 4}, True, factory={"layers": 3})),
    slow(
        Case(
            "opt",
            {"pp": 2, "dp": 2, "tp": 1, "zero": 2, "recompute": "full", "offload": "optimizer", "micro_batches": 2},
            True,
            factory={"layers": 2},
        )
    ),
    slow(Case("bert", {"pp": 2, "dp": 1, "tp": 2, "schedule": "gpipe", "micro_batches": 2}, factory={"layers": 2})),
    slow(
        Case(
            "gpt2",
            {"pp": 2, "dp": 2, "tp": 2, "zero": 1, "schedule": "1f1b", "micro_batches": 4},
            True,
            factory={"layers": 2},
        )
    ),
)


SMALL = {"layers": 4, "seq_len": 4, "width": 16, "num_heads": 2, "vocab_size": 32}


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
def test_pipelines_equal_the_single_process_model(case: Case) -> None:
    wrong, report = run(case, cluster_of(case.num_ranks))
    assert not wrong, f"{wrong}: {report}"
    assert report is not None and report.gradients and len(report.losses) == 3


def _trained(programs: list[CompiledProgram], batch: dict[str, torch.Tensor]) -> list[list[float]]:
    """Return the losses of each program's first three steps."""
    losses = []
    for program in programs:
        step, local = program.build(), program.local_batch(batch)
        losses.append([float(step(local)) for _ in range(3)])
    return losses


@pytest.mark.distributed
def test_every_schedule_trains_several_steps_as_one_process() -> None:
    """A loss depends on the updates of all steps before; the gradients of single steps are compared above."""
    pins = {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 4}
    chunks = {name: {"chunks": 2} if schedule.chooses_chunks else {} for name, schedule in SCHEDULES.items()}
    cases = [Case("gpt2", pins | {"schedule": name} | chunks[name], factory=SMALL) for name in SCHEDULES]
    programs = [compiled(case, cluster_of(2))[0] for case in cases]
    assert [program.plan.pipeline.schedule for program in programs] == list(SCHEDULES)
    example = EXAMPLES["gpt2"](**SMALL)
    optimizer, expected = sgd_with_momentum(example.model.parameters()), []
    for _ in range(3):
        loss = example.loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for losses in run_ranks(_trained, (programs, example.inputs), 2):
        assert dict(zip(SCHEDULES, losses, strict=True)) == {
            name: pytest.approx(expected, rel=TOLERANCE) for name in SCHEDULES
        }


# --- a rank that dies -------------------------------------------------------------------------------------------------

THREE = Case("gpt2", {"pp": 3, "dp": 1, "tp": 1, "micro_batches": 4, "schedule": "1f1b"}, factory={"layers": 3})
VICTIM = 1


class KilledAfter(TorchFunctionMode):
    """The process is killed, without a chance to say so, at the n-th call of torch."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.left = num_calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return func(*args, **(kwargs or {}))


class Counted(TorchFunctionMode):
    """Counts the calls of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def _train_and_die(program: CompiledProgram, batch: dict[str, torch.Tensor]) -> float:
    """The victim is killed half way through its second step."""
    step = program.build()
    local = program.local_batch(batch)
    with Counted() as calls:
        loss = float(step(local))
    if torch.distributed.get_rank() == VICTIM:
        with KilledAfter(calls.num_calls // 2):
            step(local)
    step(local)
    return loss


@pytest.mark.distributed
def test_a_rank_killed_within_a_step_ends_all_with_an_error() -> None:
    program, batch = compiled(THREE, cluster_of(3))
    started = time.monotonic()
    with pytest.raises(RankError, match=f"rank {VICTIM} died with exit code -9"):
        run_ranks(_train_and_die, (program, batch), 3, group_seconds=900)
    assert time.monotonic() - started < 600  # the process group alone would wait for 900 seconds


# --- schedules that cannot work ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_pipeline_ranks() -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    case = Case("gpt2", {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 2, "schedule": "1f1b"})
    return compiled(case, cluster_of(2))


def _with_schedule(program: CompiledProgram, lines: tuple[str, ...]) -> CompiledProgram:
    assert isinstance(program.program, PipelineProgram)
    edited = replace(program.program, schedule=lines)
    return replace(program, program=edited, files=files_of(edited))


def _refused(program: CompiledProgram, batch: dict[str, torch.Tensor]) -> str:
    try:
        program.build()(program.local_batch(batch))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        # Pipeline rank 0 wants the gradient of micro-batch 0 first, pipeline rank 1 sends it only once it has
        # micro-batch 1.
        (
            ("F0.0 B0.0 F0.1 B0.1", "F1.0 F1.1 B1.0 B1.1"),
            "the schedule never ends: pipeline rank 0: B0.0 waits for B1.0",
        ),
        (("F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1"), "pipeline rank 1: stage 1 and micro-batch 1 need F and B"),
    ],
)
def test_an_edited_schedule_that_would_deadlock_is_refused(
    two_pipeline_ranks: tuple[CompiledProgram, dict[str, torch.Tensor]], lines: tuple[str, ...], message: str
) -> None:
    program, batch = two_pipeline_ranks
    answers = run_ranks(_refused, (_with_schedule(program, lines), batch), 2)
    assert all(message in answer for answer in answers), answers


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schedule: 1f1b", "schedule: 2f2b", "'2f2b'"),
        ("schedule: 1f1b", "schedule: zero-bubble-v", "2 stages on 2 pipeline ranks"),
    ],
    ids=["unknown", "two stages per pipeline rank"],
)
def test_a_plan_whose_schedule_does_not_fit_its_stages_is_refused(
    two_pipeline_ranks: tuple[CompiledProgram, dict[str, torch.Tensor]],
    old: str,
    new: str,
    message: str,
    tmp_path: Path,
) -> None:
    program, batch = two_pipeline_ranks
    text = program.plan.to_yaml()
    assert old in text
    path = tmp_path / "plan.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(PlanError, match=message):
        autopar.compile(program.model, cluster_of(2), example_inputs=batch, plan=str(path))


class FixedPoint(nn.Module):
    """In fp64; each round needs both layers, so that the second pipeline rank has copies of the first's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(5):
                hidden = torch.tanh(self.inner(hidden) + self.outer(x))
        return nn.functional.mse_loss(torch.tanh(self.inner(hidden) + self.outer(x)), target)


def test_gradients_in_fp64_are_clipped_where_a_pipeline_rank_trains_copies_alone() -> None:
    drawn = torch.Generator().manual_seed(0)
    batch = {name: torch.randn(8, 8, dtype=torch.float64, generator=drawn) for name in ("x", "target")}
    pins = {"pp": 2, "micro_batches": 2}
    report = autopar.verify(FixedPoint(), "2 cpu", example_inputs=batch, constraints=pins, max_grad_norm=0.01)
    assert report.ok(1e-9), str(report)
