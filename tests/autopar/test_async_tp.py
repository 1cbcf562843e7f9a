"""Asynchronous tensor parallelism: whole models train as without it, plainly and with torch's operators on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.settings.backend import NOTHING_ASYNCHRONOUS
from autopar.verify import sgd_with_momentum, verify_program
from codegen.source.program_source import emit_program
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from tests.autopar.requests import hostless
from tests.codegen.runtime.symmetric_on_cpu import GATHER, SCATTER, Emulation

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
COLUMNS = {f"*.{name}_proj.weight": {"tp": "S(0)"} for name in ("q", "k", "v", "gate", "up")}
ROWS = {f"*.{name}_proj.weight": {"tp": "S(1)"} for name in ("o", "down")}
SEQUENCES = {name: {"tp": "S(1)"} for name in ("*layernorm", "model.norm")}
PINS: dict[str, dict[str, Any]] = {
    "llama": {"parameters": COLUMNS | ROWS, "activations": SEQUENCES},
    "gpt2": {
        "parameters": {"*.c_fc.weight": {"tp": "S(1)"}, "*.c_proj.weight": {"tp": "S(0)"}},
        "activations": {name: {"tp": "S(1)"} for name in ("*.ln_1", "*.ln_2", "*.ln_f")},
    },
}
WRITTEN = {
    "llama": {"all_gather_linears(": 2, "all_gather_linear(": 1, "linear_reduce_scatter(": 2},
    "gpt2": {"all_gather_addmm(": 2, "all_gather_linear(": 1, "addmm_reduce_scatter(": 2},
}


def compiled(name: str, backend: str = "async-tp", **more: Any) -> autopar.CompiledProgram:
    example = EXAMPLES[name]()
    return autopar.compile(
        example.model,
        IDEAL,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints={**PINS[name], "dp": 2, "tp": 2, **more},
        optimizer=sgd_with_momentum,
        backend=backend,
    )


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("gpt2", {"recompute": "full"}),
    ],
)
def test_on_ranks_that_share_no_memory(name: str, more: dict[str, Any]) -> None:
    program = compiled(name, **more)
    assert {call: program.source.count(f"async_tp.{call}") for call in WRITTEN[name]} == WRITTEN[name]
    report = verify_program(program, EXAMPLES[name]().inputs)
    assert report.ok(1e-5), str(report)


STEPS = 3


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "more", "per_step"),
    [
        # Of each operator: two per layer and pass; of gathers the head's forward, of scatters its backward.
        ("gpt2", {}, 2 * 4 + 1),
        ("llama", {}, 2 * 4 + 1),
        ("llama", {"zero": 3, "micro_batches": 2, "recompute": "full"}, None),
    ],
)
def test_beside_their_transfers(
    name: str, more: dict[str, Any], per_step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_build = autopar.CompiledProgram.build

    def build(self: autopar.CompiledProgram, **options: Any) -> Any:
        """As on GPUs that share memory; at the end the operators must have run."""
        step = plain_build(self, **options)
        emulation = Emulation("decomposed")
        step.mesh.put(emulation.shared(step.mesh.tp))
        state = step.full_state_dict

        def checked(**kwargs: Any) -> Any:
            counts = emulation.calls[GATHER], emulation.calls[SCATTER]
            assert counts == (STEPS * per_step,) * 2 if per_step else min(counts) > 0
            return state(**kwargs)

        step.full_state_dict = checked
        return step

    monkeypatch.setattr(autopar.CompiledProgram, "build", build)
    report = verify_program(compiled(name, **more), EXAMPLES[name]().inputs, steps=STEPS)
    assert report.ok(1e-5), str(report)


# --- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_switch_changes_no_plan_and_travels_with_the_program() -> None:
    eager, asynchronous = compiled("llama", "eager"), compiled("llama")
    assert eager.plan == asynchronous.plan and "async_tp" not in eager.source
    assert asynchronous.backend == "async-tp" and 'set_up(mesh, "tp")' in emit_program(asynchronous.program)


@pytest.mark.slow
def test_what_overlaps_already_still_does() -> None:
    """On GPUs: what no collective of rows feeds keeps its sum beside its weight gradients."""
    example = EXAMPLES["gpt2"](dropout=0.0, width=1024, num_heads=16, seq_len=512, vocab_size=1024)
    options: dict[str, Any] = {"precision": "bf16", "kernels": "off", "constraints": {"tp": 8}}
    with pytest.warns(UserWarning, match="changes nothing"):
        program = autopar.compile(
            example.model,
            hostless(Cluster.parse("1x8 h100-sxm")),  # else fewer reshards are chosen, as all wait for the host
            example_inputs=example.inputs,
            backend="async-tp",
            **options,
        )
    assert "tp.for_use(" in program.source and program.source.count("overlapped.addmm(") == 2


@pytest.mark.slow
def test_deferred_gradients_stay_deferred() -> None:
    settings = {"pp": 2, "tp": 2, "dp": 1, "schedule": "zero-bubble", "micro_batches": 2}
    example = EXAMPLES["llama"]()
    with pytest.warns(UserWarning, match="changes nothing") as caught:
        program = autopar.compile(
            example.model,
            IDEAL,
            example_inputs=example.inputs,
            constraints={**PINS["llama"], **settings},
            backend="async-tp",
        )
    assert str(caught[0].message) == NOTHING_ASYNCHRONOUS
    assert "deferred.linear(" in program.source and "async_tp." not in program.source
