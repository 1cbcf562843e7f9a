"""Programs whose layers inductor compiles, against the single-process model, and how often they compile.

What a backend needs of the machine, and how a forward is cut, is in tests/codegen/runtime.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import autopar
from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError
from autopar.launch import run_ranks
from autopar.lowering.completion import EAGER
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from autopar.verify import sgd_with_momentum, verify, verify_program
from benchmarks.verify_pipelines import cluster_of
from codegen.program import PipelineProgram
from codegen.source.program_source import emit_program
from examples.models import EXAMPLES

WIDTH, ROWS = 8, 4
COMPILING = 900
"""Seconds for a test whose ranks compile from nothing, on cores that others use too."""


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Imported here, so that no rank does, and before these tests only: it takes two CPU-seconds."""
    importlib.import_module("torch._inductor.compile_fx")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * 0.5


class Tower(nn.Module):
    """A line of equal blocks, of one region each."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(num_blocks)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def tower(num_blocks: int, backend: str, **options: Any) -> CompiledProgram:
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    return autopar.compile(
        Tower(num_blocks),
        cluster_of(1),
        example_inputs=batch,
        loss_fn=squared_error,
        optimizer=sgd_with_momentum,
        backend=backend,
        **options,
    )


def num_compiled() -> int:
    """Graphs that dynamo has handed to inductor since the counters were cleared."""
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing compiled before; in this process, not in a pool of others."""
    torch._dynamo.reset()
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.slow
def test_a_tower_trains_and_evaluates_as_eagerly_compiled_once_for_all_layers() -> None:
    losses = {}
    for backend in ("eager", "inductor"):
        step = tower(5, backend).build()
        x, target = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
        batch = dict(zip(step.model.INPUTS, (x, target), strict=True))
        losses[backend] = [float(step(batch)) for _ in range(3)]
        trained = num_compiled()
        losses[backend] += [float(step.evaluate(batch)), float(step(batch)), float(step.evaluate(batch))]
        # One region; once for training, once more for evaluation, whatever the number of layers and steps.
        assert (trained, num_compiled()) == ((1, 2) if backend == "inductor" else (0, 0))
        with pytest.raises(ValueError, match="the program was made for"):
            step({name: value[:-1] for name, value in batch.items()})
    assert losses["inductor"] == pytest.approx(losses["eager"], rel=1e-6)
    assert losses["eager"][0] > losses["eager"][2]


# --- against the single-process model ---------------------------------------------------------------------------------

CASES = {
    "dp2": ({"dp": 2, "zero": 0}, {}),
    "dp2 zero3": ({"dp": 2, "zero": 3}, {}),
    "tp2": ({"tp": 2, "dp": 1}, {}),
    "pp2 1f1b": ({"pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b", "micro_batches": 2}, {}),
}
MORE = {
    "gpt2 zero3 full": ("gpt2", {"dp": 2, "zero": 3, "recompute": "full"}, {"layers": 3, "dropout": 0.1}, {}),
    "gpt2 offload": ("gpt2", {"tp": 2, "dp": 1, "recompute": "offload", "micro_batches": 2}, {"dropout": 0.1}, {}),
    "gpt2 zero-bubble": (
        "gpt2",
        {"pp": 2, "dp": 1, "tp": 1, "schedule": "zero-bubble", "micro_batches": 4},
        {"layers": 4, "dropout": 0.1},
        {},
    ),
    "llama interleaved": (
        "llama",
        {"pp": 2, "dp": 1, "tp": 1, "schedule": "interleaved", "chunks": 2, "micro_batches": 4, "recompute": "full"},
        {"layers": 4},
        {},
    ),
    "gpt2 kernels": ("gpt2", {"tp": 2, "dp": 1, "micro_batches": 2}, {"dropout": 0.1}, {"kernels": "on"}),
    "t5 host optimizer": ("t5", {"dp": 2, "zero": 3, "offload": "optimizer"}, {"layers": 2}, {}),
}


def check(name: str, constraints: dict[str, Any], factory: dict[str, Any], **options: Any) -> None:
    example = EXAMPLES[name](**factory)
    report = verify(
        example.model,
        cluster_of(2),
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=constraints,
        backend="inductor",
        **options,
    )
    assert report.ok(), f"{report.beyond()}: {report}"
    assert report.gradients and len(report.losses) == 3


@pytest.mark.slow
@pytest.mark.timeout(COMPILING)
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "model"),
    # gpt2 under ZeRO-3 and tp2, llama under dp2 and in a pipeline are in the tests below.
    [("dp2", "gpt2"), ("pp2 1f1b", "gpt2"), ("dp2 zero3", "llama"), ("tp2", "llama")],
)
def test_compiled_programs_equal_the_single_process_model(model: str, case: str) -> None:
    constraints, options = CASES[case]
    check(model, constraints, {"layers": 2}, **options)


@pytest.mark.slow
@pytest.mark.timeout(COMPILING)
@pytest.mark.distributed
@pytest.mark.parametrize("case", MORE)
def test_what_acts_on_layers_acts_on_compiled_ones(case: str) -> None:
    model, constraints, factory, options = MORE[case]
    check(model, constraints, factory, **options)


def _count(program: CompiledProgram, batch: dict[str, Tensor]) -> tuple[int, ...]:
    """Graphs compiled after one step, two, an evaluation and another step."""
    step, local = program.build(), program.local_batch(batch)
    found = []
    for run in (step, step, step.evaluate, step):
        run(local)
        found.append(num_compiled())
    return tuple(found)


@pytest.mark.slow
@pytest.mark.timeout(COMPILING)
@pytest.mark.distributed
def test_regions_are_compiled_once_for_all_layers() -> None:
    """With tensor parallelism a layer's reshards are the borders of its regions."""
    for layers in (2, 4):
        example = EXAMPLES["llama"](layers=layers)
        program = autopar.compile(
            example.model,
            cluster_of(2),
            example_inputs=example.inputs,
            constraints={"tp": 2, "dp": 1},
            optimizer=sgd_with_momentum,
            backend="inductor",
        )
        layer = program.source.split("\nclass ")[1]
        assert "model.layers.0" in layer
        num_regions = layer.count("= tp.") + 1
        assert num_regions > 2
        counts = run_ranks(_count, (program, example.inputs), 2)
        assert counts == [(num_regions, num_regions, 2 * num_regions, 2 * num_regions)] * 2


@pytest.mark.slow
@pytest.mark.timeout(COMPILING)
@pytest.mark.distributed
def test_other_rows_than_the_example_has() -> None:
    example = EXAMPLES["llama"](layers=2)
    program = autopar.compile(
        example.model,
        cluster_of(2),
        example_inputs=example.inputs,
        global_batch_size=4,
        constraints={"dp": 2},
        optimizer=sgd_with_momentum,
        backend="inductor",
    )
    assert program.plan.global_batch_size == 4
    report = verify_program(program, example.inputs)
    assert report.ok(), str(report)


# --- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_switch_is_carried_into_the_program() -> None:
    for backend in ("eager", "inductor"):
        program = tower(4, backend)
        assert program.backend == backend
        assert ("compiled=CompiledLayers(mesh.device)" in emit_program(program.program)) == (backend == "inductor")
    example = EXAMPLES["gpt2"](layers=2)
    constraints = {"pp": 2, "dp": 1, "tp": 1, "micro_batches": 2}
    staged = autopar.compile(
        example.model, cluster_of(2), example_inputs=example.inputs, constraints=constraints, backend="inductor"
    )
    assert isinstance(staged.program, PipelineProgram)
    assert {stage.program.backend for stage in staged.program.stages} == {"inductor"}
    assert "compiled=CompiledLayers(mesh.device)" in emit_program(staged.program)


@pytest.mark.parametrize(
    ("num_blocks", "options", "message"),
    [
        (4, {"backend": "jit"}, "got: 'jit'\n  instead: eager, inductor, async-tp"),
        (4, {"backend": "inductor", "constraints": {"recompute": "selective"}}, "recompute=none, offload or full"),
        (1, {"backend": "inductor"}, "no repeated layers"),
    ],
)
def test_what_cannot_be_compiled_is_refused(num_blocks: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(message)):
        tower(num_blocks, **options)


def test_a_machine_without_a_compiler_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    program = tower(4, "inductor")
    monkeypatch.setattr("autopar.launch.mp.get_context", lambda _: pytest.fail("a rank was started"))
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        for start in (program.build, functools.partial(verify_program, program, batch)):
            with pytest.raises(ConstraintError, match="no C\\+\\+ compiler") as failure:
                start()
            assert failure.value.alternatives == EAGER


def test_trainer_refuses_what_it_cannot_do() -> None:
    batches = [(torch.zeros(1),)]
    with pytest.raises(ConstraintError, match="a plain run is eager"):
        Trainer(Tower(2), TrainerConfig(False, backend="inductor"), [{"x": torch.zeros(2, WIDTH)}]).fit()
    config = TrainerConfig(cluster=cluster_of(1), backend="inductor", measure_memory=True)
    with pytest.raises(ConstraintError, match="measure_memory"):
        Trainer(Tower(2), config, batches).compile()  # type: ignore[arg-type]
