"""Programs with kernels where none can run: updates are torch's, bit for bit. (interpreted_update.py has the rest.)"""

from __future__ import annotations

import ast
from functools import partial
from typing import Any

import pytest
import torch

import autopar
from autopar.costs.updates import DefaultAdamW
from codegen.kernels.dispatch import INTERPRETING
from codegen.runtime.fused_adamw import FusedAdamW
from codegen.runtime.mesh import Mesh
from codegen.runtime.step import Step
from codegen.source.main_source import emit_main
from codegen.source.program_source import emit_program
from examples.models import EXAMPLES
from tests.codegen.runtime.features import features
from tests.codegen.runtime.mlp_program import make_program, whole_batch, whole_state

ROWS = 4


def trained(factory: Any, **options: Any) -> dict[str, torch.Tensor]:
    mesh = Mesh.create((), ())
    given = features(mesh, max_grad_norm=0.1, **options)
    step = Step(make_program(0, ROWS), mesh, optimizer_factory=factory, **given)
    step.load(whole_state())
    for seed in range(3):
        step(step.local_batch(whole_batch(ROWS, seed)))
    step.close()
    return step.full_state_dict()


@pytest.mark.parametrize("offload", ["", "host"])
def test_updates_are_torchs_where_no_kernel_runs(offload: str) -> None:
    assert not INTERPRETING
    ours = trained(partial(FusedAdamW, lr=1e-2), kernels=True, offload_optimizer=offload)
    torchs = trained(partial(torch.optim.AdamW, lr=1e-2, fused=True), offload_optimizer=offload)
    assert all(torch.equal(value, torchs[name]) for name, value in ours.items())


def mlp(**options: Any) -> autopar.CompiledProgram:
    example = EXAMPLES["mlp"]()
    return autopar.compile(example.model, "2 cpu", example_inputs=example.inputs, loss_fn=example.loss_fn, **options)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_the_programs_own_script(kernels: str) -> None:
    program = mlp(kernels=kernels, constraints={"dp": 2}).program
    text = emit_main(program)
    ast.parse(text)
    assert ("partial(FusedAdamW, lr=args.lr)" in text) == ("runtime.fused_adamw" in text) == (kernels == "on")
    assert ("kernels=FusedUpdate()" in emit_program(program)) == (kernels == "on")
    assert ("partial(torch.optim.AdamW, lr=args.lr, fused=True)" in text) == (kernels == "off")


def test_hosts_update_with_torch() -> None:
    compiled = mlp(kernels="on", constraints={"dp": 2, "offload": "optimizer"})
    assert "torch.optim.AdamW" in emit_main(compiled.program)
    assert not compiled.program.any.has_fused_update


def test_the_default_is_torchs_with_rate_and_decay() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = DefaultAdamW(0.1, 0.2)([parameter])
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.1, 0.2, True)
    (ours,) = FusedAdamW([parameter]).param_groups
    (torchs,) = torch.optim.AdamW([parameter], fused=True).param_groups
    assert ours == torchs
