"""Sums over tensor-parallel ranks that run beside weight gradients: the same training."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.planning.request import Request
from autopar.verify import verify_program
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from tests.autopar.requests import hostless

IDEAL = str(Path(__file__).resolve().parents[3] / "examples" / "clusters" / "ideal.toml")
GPUS = hostless(Cluster.parse("1x8 h100-sxm"))
MEDIUM = {"layers": 4, "width": 1024, "num_heads": 16, "seq_len": 512, "batch_size": 8, "vocab_size": 1024}
COLUMN_PARALLEL = {
    "gpt2": {"*.c_fc.weight": {"tp": "S(1)"}},
    "llama": {f"*.{name}_proj.weight": {"tp": "S(0)"} for name in ("q", "k", "v", "gate", "up")},
}


def compiled(name: str, cluster: Cluster | str, constraints: dict, **options: object) -> autopar.CompiledProgram:
    sizes, dropout = (MEDIUM, 0.0) if cluster == GPUS else ({}, 0.1 if name == "gpt2" else 0.0)
    example = EXAMPLES[name](dropout=dropout, **sizes)
    return autopar.compile(
        example.model,
        cluster,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=constraints,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {"zero": 3, "micro_batches": 2, "recompute": "full"}),
        ("gpt2", {"zero": 3, "micro_batches": 2, "recompute": "full"}),
        ("llama", {"zero": 2, "recompute": "selective"}),
        ("gpt2", {"zero": 1, "micro_batches": 2}),
    ],
)
def test_with_sequence_parallelism(name: str, more: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "overlaps", True)
    pins = {"parameters": COLUMN_PARALLEL[name]}
    program = compiled(name, IDEAL, {"dp": 2, "tp": 2, **pins, **more})
    layer = program.source.split("class ")[1]
    assert "tp.all_gather(" in layer and "overlapped." in layer
    report = verify_program(program, EXAMPLES[name]().inputs)
    assert report.ok(1e-5), str(report)


@pytest.fixture(scope="module")
def for_use() -> autopar.CompiledProgram:
    """GPT-2 whose residual stream is whole on all of tp."""
    program = compiled("gpt2", GPUS, {"tp": 8}, kernels="off", precision="bf16")
    assert program.source.count("tp.for_use(") == 2
    return program


@pytest.mark.slow
def test_gpus_overlap_and_compiled_layers_do_not(for_use: autopar.CompiledProgram) -> None:
    assert for_use.source.count("overlapped.addmm(") == 2
    options = {"kernels": "off", "precision": "bf16", "plan": for_use.plan}
    inductor = compiled("gpt2", GPUS, {"tp": 8}, backend="inductor", **options)
    assert "overlapped" not in inductor.source and inductor.source.count("tp.for_use(") == 2
