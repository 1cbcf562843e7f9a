"""A rank's module, copied or saved as modules are: refused, where parts or freed memory would come along."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import autopar
from autopar.launch import run_ranks
from autopar.running.build import build_step
from examples.models import llama

EXAMPLE = llama(layers=2, width=32, num_heads=2, seq_len=16, vocab_size=64, batch_size=4)


def errors_of(program: autopar.CompiledProgram) -> list[str]:
    step = build_step(program)
    batch = step.local_batch(EXAMPLE.inputs)
    step(batch)
    errors = []
    for use in (
        lambda: copy.deepcopy(step.model),
        lambda: pickle.dumps(step.model),
        lambda: step.model.load_state_dict({}),
        lambda: step.model.state_dict(),
    ):
        try:
            found = use()
        except (TypeError, RuntimeError) as error:
            errors.append(str(error))
    step(batch)
    whole = step.full_state_dict()
    if len(errors) == 3:  # what could be read
        assert whole and all(torch.equal(found[name], value) for name, value in whole.items())
    return errors


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("axes", "refused"),
    [
        ({"zero": 3}, 4),
        pytest.param({"tp": 2, "parameters": {"*.q_proj.weight": {"tp": "S(0)"}}}, 4, marks=pytest.mark.slow),
        ({"zero": 0}, 3),
    ],
)
def test_a_ranks_module_is_neither_copied_nor_read_in_parts(axes: dict[str, Any], refused: int) -> None:
    constraints = {"dp": 2 // axes.get("tp", 1), **axes}
    program = autopar.compile(EXAMPLE.model, "2 cpu", example_inputs=EXAMPLE.inputs, constraints=constraints)
    for errors in run_ranks(errors_of, (program,), 2):
        assert len(errors) == refused
        assert "neither copied nor pickled" in errors[0] and "neither copied nor pickled" in errors[1]
        assert "step.load(state)" in errors[2] and all("full_state_dict" in each for each in errors[3:])
