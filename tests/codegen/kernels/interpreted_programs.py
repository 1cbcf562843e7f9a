"""Compiled programs whose updates and gradient norms run in Triton's interpreter, against the eager models.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.launch import run_ranks
from autopar.verify import verify_program
from examples.models import EXAMPLES


def optimizer_of(compiled: Any, batch: Any) -> tuple[bool, str]:
    step = compiled.build(max_grad_norm=0.1)
    step(compiled.local_batch(batch))
    kernels = step._update.kernels
    return kernels is not None and kernels.optimizer is step.optimizer, type(step.optimizer).__name__


@pytest.mark.parametrize(("constraints", "ranks"), [({"dp": 2, "zero": 1}, 2), ({"tp": 2}, 2), ({"pp": 2}, 2)], ids=str)
def test_compiled_programs(constraints: dict[str, Any], ranks: int) -> None:
    example = EXAMPLES["gpt2"](layers=2, width=16, num_heads=2, seq_len=8, batch_size=4, vocab_size=32)
    options = {"example_inputs": example.inputs, "constraints": constraints, "kernels": "on"}
    compiled = autopar.compile(example.model, f"{ranks} cpu", **options)
    assert run_ranks(optimizer_of, (compiled, example.inputs), ranks) == [(True, "FusedAdamW")] * ranks
    report = verify_program(compiled, example.inputs, steps=2, max_grad_norm=0.1)
    assert report.ok(1e-5), report
    given = autopar.compile(example.model, f"{ranks} cpu", optimizer=torch.optim.AdamW, **options)
    assert run_ranks(optimizer_of, (given, example.inputs), ranks) == [(False, "AdamW")] * ranks
