"""Faults planted in emitted programs of experts, ZeRO-3 and pipelines: a dry run names the line of each."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.lowering.dry_run import dry_run
from codegen.schemas import EmissionError
from examples.models import EXAMPLES

IDEAL = str(Path(__file__).resolve().parents[3] / "examples" / "clusters" / "ideal.toml")
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"dp": 2, "tp": 2, "zero": 3}, {}),
    "mixtral": ({"dp": 2, "tp": 2, "ep": 2, "etp": 1}, {}),
    "gpt2": ({"pp": 2, "tp": 2, "micro_batches": 2}, {"layers": 3}),
}
"""The constraints, and the options of the example."""
FAULTS: tuple[tuple[str, str, str, str], ...] = (
    ("llama", "model.py", "attention.transpose(1, 2).reshape(", "attention.transpose(1, 2).view("),
    ("llama", "model.py", "rms_norm(hidden, self.input_layernorm.weight, eps=1e-06)", "hidden.bfloat16()"),
    ("llama", "model.py", "concat_dim=2)\n        for", "concat_dim=1)\n        for"),
    ("llama", "model.py", "swiglu(gate_proj, up_proj)", "swiglu(gate_proj, hidden)"),
    ("llama", "model.py", "        input_layernorm = tp.all_gather(input_layernorm, dim=1)\n", ""),
    ("llama", "model.py", "residual = hidden + o_proj", "residual = hidden + o_proj[:, 1:]"),
    ("llama", "model.py", "torch.arange(SEQUENCE, device=self.mesh.device)", "torch.arange(SEQUENCE)"),
    ("mixtral", "model.py", "topk_1 = topk_1.reshape(-1)", "topk_1 = topk_1.reshape(-1).float()"),
    ("mixtral", "model.py", "routes, choices=2)\n", "routes, choices=3)\n"),
    ("mixtral", "model.py", 'joint(("ep", "tp"))', 'joint(("dp", "tp"))'),
    ("mixtral", "model.py", ".chunk(2, -1)", ".chunk(2, 0)"),
    ("gpt2", "stage_0.py", "torch.arange(SEQUENCE,", "torch.arange(LENGTH,"),
    ("gpt2", "stage_0.py", "tp.all_to_all(summed, split_dim=1, concat_dim=2)", "summed"),
    ("gpt2", "stage_3.py", 'Param((4, 16, 32), tp="S(1)")', 'Param((4, 16, 32), tp="S(2)")'),
    ("gpt2", "stage_3.py", "num_targets[0]", "num_targets[1]"),
)
"""The example, the file, what is written there, and what is planted."""


@cache
def compiled(name: str) -> Any:
    pins, options = REQUESTS[name]
    example = EXAMPLES[name](**options)
    inputs: dict[str, Any] = {"example_inputs": example.inputs, "loss_fn": example.loss_fn}
    return autopar.compile(example.model, IDEAL, **inputs, constraints=pins, kernels="off")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file", "old", "new"), FAULTS)
def test_a_planted_fault_is_caught(name: str, file: str, old: str, new: str) -> None:
    program = compiled(name)
    text = program.files[file]
    assert old in text
    with pytest.raises(EmissionError):
        dry_run(program.program, program.files | {file: text.replace(old, new, 1)})
