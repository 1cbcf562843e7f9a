"""Whole batches assembled from the parts of all ranks are those that were cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.compiled import CompiledProgram
from autopar.frontend.inputs import name_inputs
from autopar.running.whole_batch import assemble, share_of_rank
from examples.models import EXAMPLES


def compiled(name: str, ranks: int, **limits: Any) -> tuple[CompiledProgram, dict[str, Any]]:
    example = EXAMPLES[name]()
    program = autopar.compile(
        example.model, f"{ranks} cpu", example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=limits
    )
    return program, name_inputs(example.model, example.inputs, example.loss_fn)


@pytest.mark.parametrize(
    ("name", "ranks", "limits"),
    [
        ("llama", 8, {"dp": 2, "cp": 2, "tp": 2, "context": "ring", "micro_batches": 2}),
        ("mlp", 4, {"dp": 4, "micro_batches": 2}),
        pytest.param("gpt2", 4, {"pp": 2, "dp": 2, "micro_batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_what_was_cut_is_assembled_again(name: str, ranks: int, limits: dict[str, Any]) -> None:
    program, batch = compiled(name, ranks, **limits)
    parts = [program.local_batch(batch, rank) for rank in range(ranks)]
    shares = [share_of_rank(program.program, part, rank) for rank, part in enumerate(parts)]
    whole = assemble(program.program, shares)
    assert whole.keys() == program.program.inputs.keys()
    assert all(torch.equal(value, batch[key]) for key, value in whole.items())
    if limits.get("tp"):  # of ranks that have the same rows one sends them
        assert [bool(share) for share in shares] == [True, False] * 4
    last = next(rank for rank in reversed(range(ranks)) if shares[rank])
    with pytest.raises(ValueError, match="do not make a whole batch"):
        assemble(program.program, [share if rank != last else {} for rank, share in enumerate(shares)])
    wrong = {key: torch.cat([value, value, value]) for key, value in shares[last].items()}
    with pytest.raises(ValueError, match="a part has shape"):
        assemble(program.program, [*shares[:last], wrong, *shares[last + 1 :]])
