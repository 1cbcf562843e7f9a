"""Updates and gradient norms of whole steps by kernels in Triton's interpreter, against torch's AdamW.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen.kernels.dispatch import INTERPRETING
from codegen.runtime import checkpoint
from codegen.runtime.fused_adamw import FusedAdamW
from codegen.runtime.mesh import Mesh
from codegen.runtime.step import Step
from tests.codegen.runtime.features import features
from tests.codegen.runtime.mlp_program import EagerTraining, make_program, whole_batch, whole_state
from tests.codegen.runtime.ranks import run_ranks

adamw_module = importlib.import_module("codegen.kernels.adamw")
norm_module = importlib.import_module("codegen.kernels.grad_norm")

ROWS, STEPS = 8, 3
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
TORCHS = partial(torch.optim.AdamW, **OPTIONS, fused=True)
OURS = partial(FusedAdamW, **OPTIONS)
MESHES = {1: [((), ())], 2: [(("dp",), (2,)), (("tp",), (2,)), (("cp",), (2,))]}


def test_kernels_are_interpreted() -> None:
    assert INTERPRETING


def initial() -> dict[str, Tensor]:
    return {name: value.float() for name, value in whole_state().items()}


def make_step(mesh: Mesh, zero: int, factory: Any = OURS, micro: int = 1, **options: Any) -> Step:
    program = make_program(zero, ROWS // micro, "float32")
    options = features(mesh, kernels=factory is OURS, **options)
    step = Step(program, mesh, optimizer_factory=factory, num_micro_batches=micro, **options)
    step.load(initial())
    assert (options["kernels"] is not None and options["kernels"].optimizer is not None) == (factory is OURS)
    return step


def moments(step: Step) -> dict[str, Tensor]:
    """All that the optimiser holds on this rank."""
    held = step.stored_parameters()
    found = {f"{n}.{key}": v for n, p in held.items() for key, v in step.optimizer.state.get(p, {}).items()}
    assert found
    return {name: value.clone() for name, value in found.items()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, where: str) -> None:
    """Of each tensor's largest element."""
    for name, value in found.items():
        truth = expected[name].detach().double()
        error, size = (value.detach().double() - truth).abs().max(), truth.abs().max()
        assert error <= tolerance * size, f"{where}: {name} is off by {error / size:.1e}"


def check_training(rank: int, world_size: int) -> None:
    """Losses, norms, parameters and state of a few steps, with and without clipping, as torch's fp32 and fp64."""
    for axes, sizes in MESHES[world_size]:
        mesh = Mesh.create(axes, sizes)
        for zero, max_norm in itertools.product((0, 1, 2, 3), (None, 0.05, float("inf"))):
            where, micro = f"zero {zero}, {mesh}, max_grad_norm {max_norm}", 2 if zero == 1 else 1
            fused, plain = (make_step(mesh, zero, f, micro, max_grad_norm=max_norm) for f in (OURS, TORCHS))
            exact = EagerTraining("adamw", max_norm)
            for seed in range(STEPS):
                batch = whole_batch(ROWS, seed)
                loss, expected = (step(step.local_batch(batch)) for step in (fused, plain))
                torch.testing.assert_close(loss, expected, rtol=2e-6, atol=0)
                torch.testing.assert_close(loss.double(), exact.step(batch), rtol=1e-5, atol=0)
                if max_norm is not None:
                    assert fused.grad_norm is not None and plain.grad_norm is not None
                    torch.testing.assert_close(fused.grad_norm, plain.grad_norm, rtol=1e-5, atol=0)
                    torch.testing.assert_close(fused.grad_norm.double(), exact.grad_norm, rtol=1e-5, atol=0)
            state = {n: v for n, v in fused.full_state_dict().items() if n in exact.state}
            assert_near(state, exact.state, 2e-5, f"{where}, fp64")
            assert_near(state, plain.full_state_dict(), 1e-5, f"{where}, fp32")
            assert_near(moments(fused), moments(plain), 1e-5, f"{where}, state")


def test_one_process() -> None:
    check_training(0, 1)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(check_training, 2)


def check_copies(rank: int, world_size: int) -> None:
    mesh = Mesh.create(("dp",), (world_size,))
    for zero in (0, 1, 2, 3):
        fused, plain = (make_step(mesh, zero, f, precision="bf16", max_grad_norm=0.05) for f in (OURS, TORCHS))
        for seed in range(STEPS):
            batch = whole_batch(ROWS, seed)
            loss, expected = (step(step.local_batch(batch)) for step in (fused, plain))
            # What rounds to another bf16 number here and there moves the loss by less than one of its digits.
            torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
        assert_near(fused.full_state_dict(), plain.full_state_dict(), 5e-3, f"zero {zero}")
        for bucket in fused.buckets:
            if zero < 3 and bucket.key.requires_grad:
                assert bucket.own_copy is not None
                assert torch.equal(bucket.own_copy, bucket.master.to(torch.bfloat16))
                whole = torch.cat([part.flatten() for part in bucket.whole(bucket.master)])
                assert torch.equal(bucket.flat[: bucket.numel], whole.to(torch.bfloat16))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("exact_bf16")
def test_copies_that_the_model_computes_with(world_size: int) -> None:
    run_ranks(check_copies, world_size)


def check_compressed(rank: int, world_size: int) -> None:
    """What is sent is rounded in the copy, as without kernels; masters are exact."""
    mesh, codes = Mesh.create(("dp",), (world_size,)), {"gather": "int8", "reduce": "int8"}
    fused, plain = (make_step(mesh, 1, factory, compression=codes) for factory in (OURS, TORCHS))
    for step in (fused, plain):
        step(step.local_batch(whole_batch(ROWS, 0)))
    assert_near(fused.full_state_dict(), plain.full_state_dict(), 1e-6, "compressed")
    for ours, torchs in zip(fused.buckets, plain.buckets, strict=True):
        torch.testing.assert_close(ours.flat, torchs.flat, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_compressed_copies() -> None:
    run_ranks(check_compressed, 2)


def check_checkpoints(rank: int, world_size: int, folder: str) -> None:
    """Saved by either optimiser under one stage, continued by either under another."""
    mesh = Mesh.create(("dp",), (world_size,))
    exact = EagerTraining("adamw")
    for seed in range(4):
        exact.step(whole_batch(ROWS, seed))
    for name, saver in (("ours", OURS), ("torchs", TORCHS)):
        step = make_step(mesh, 3, saver)
        for seed in range(2):
            step(step.local_batch(whole_batch(ROWS, seed)))
        checkpoint.save(step, f"{folder}/{name}")
        for other, zero in ((OURS, 0), (OURS, 1), (TORCHS, 1), (OURS, 3)):
            step = make_step(mesh, zero, other)
            step(step.local_batch(whole_batch(ROWS, seed=9)))  # what is loaded must replace this
            checkpoint.load(step, f"{folder}/{name}")
            for seed in range(2, 4):
                step(step.local_batch(whole_batch(ROWS, seed)))
            state = {n: v for n, v in step.full_state_dict().items() if n in exact.state}
            assert_near(state, exact.state, 2e-5, f"{name} into {other} zero {zero}")
            assert all(float(v) == 4 for n, v in moments(step).items() if n.endswith(".step"))


@pytest.mark.slow
def test_checkpoints_of_one_load_into_the_other(tmp_path) -> None:
    run_ranks(check_checkpoints, 2, str(tmp_path))


def test_state_dicts_of_one_load_into_the_other() -> None:
    mesh = Mesh.create((), ())
    steps = {"ours": make_step(mesh, 0), "torchs": make_step(mesh, 0, TORCHS)}
    first, second = (steps[name] for name in ("ours", "torchs"))
    batches = [first.local_batch(whole_batch(ROWS, seed)) for seed in range(4)]
    for step in steps.values():
        step(batches[0])
        step(batches[1])
    ours, torchs = first.optimizer.state_dict(), second.optimizer.state_dict()
    assert ours["param_groups"] == torchs["param_groups"]
    assert [list(s) for s in ours["state"].values()] == [list(s) for s in torchs["state"].values()]
    shapes = ({i: {k: v.shape for k, v in s.items()} for i, s in saved["state"].items()} for saved in (ours, torchs))
    assert next(shapes) == next(shapes)
    values = {name: step.full_state_dict() for name, step in steps.items()}
    continued = []
    for name, saved in (("ours", ours), ("torchs", torchs)):
        for factory in (OURS, TORCHS):
            step = make_step(mesh, 0, factory)
            step.load({**initial(), **values[name]})
            step.optimizer.load_state_dict(copy.deepcopy(saved))
            for batch in batches[2:]:
                step(batch)
            continued.append(step.full_state_dict())
    for state in continued[1:]:
        assert_near(state, continued[0], 1e-5, "continued")


def test_launches(monkeypatch) -> None:
    """One of each kernel per step, whatever the number of buckets and parameters."""
    from codegen.runtime import zero as zero_module

    launches: list[str] = []

    class Counted:
        def __init__(self, module: Any, name: str) -> None:
            self.kernel, self.name = getattr(module, name), name
            monkeypatch.setattr(module, name, self)

        def __getitem__(self, grid: Any) -> Any:
            launches.append(self.name)
            return self.kernel[grid]

    Counted(adamw_module, "_adamw_kernel")
    Counted(norm_module, "_square_kernel")
    monkeypatch.setattr(zero_module, "BUCKET_BYTES", 64)
    step = make_step(Mesh.create((), ()), 0, max_grad_norm=1.0)
    assert sum(bucket.key.requires_grad for bucket in step.buckets) > 3
    for _ in range(2):
        step(step.local_batch(whole_batch(ROWS, 0)))
    assert launches == ["_square_kernel", "_adamw_kernel"] * 2


def grouped(optimizer: Any, parameters: list[Any], **options: Any) -> Any:
    """Every other parameter in a group of its own rate and decay."""
    slow, fast = parameters[::2], parameters[1::2]
    return optimizer([{"params": slow, "weight_decay": 0.3}, {"params": fast, "lr": 3e-3}], lr=1e-2, **options)


def test_groups_and_what_changes_between_steps() -> None:
    mesh, batch = Mesh.create((), ()), whole_batch(ROWS, 0)
    steps = []
    for kind, options in ((FusedAdamW, {}), (torch.optim.AdamW, {"foreach": False})):
        factory = partial(grouped, kind, **options)
        given = features(mesh, kernels=kind is FusedAdamW)
        step = Step(make_program(0, ROWS, "float32"), mesh, optimizer_factory=factory, **given)
        step.load(initial())
        steps.append(step)
        first, second = step.optimizer.param_groups
        for index in range(4):
            step(step.local_batch(batch))
            first["lr"] *= 0.5
            second["betas"], second["eps"] = (0.8, 0.9), 1e-6
            if index == 1:
                second["weight_decay"] = 0.5
            if index == 2:  # one parameter begins anew
                step.optimizer.state[step.stored_parameters()["final.weight"]] = {}
    ours, torchs = steps
    assert_near(ours.full_state_dict(), torchs.full_state_dict(), 1e-5, "groups")
    assert_near(moments(ours), moments(torchs), 1e-5, "state of groups")
    assert float(moments(ours)["final.weight.step"]) == 1
    ours.optimizer.param_groups[0]["amsgrad"] = True
    ours.optimizer.param_groups[0]["weight_decay"] = 0.0
    with pytest.raises(ValueError, match=r"neither amsgrad nor maximize"):
        ours(ours.local_batch(batch))


def test_norms_that_are_not_finite() -> None:
    """What a norm that is nan or infinite makes of the parameters is what torch's clipping makes of them."""
    for value in (float("nan"), float("inf")):
        found = []
        for factory in (OURS, TORCHS):
            step = make_step(Mesh.create((), ()), 0, factory, max_grad_norm=1.0)
            step.forward_backward(step.local_batch(whole_batch(ROWS, 0)))
            step.buckets[0].gradient[3] = value
            step.update()
            found.append({name: v.isnan() for name, v in step.full_state_dict().items()})
        assert all(torch.equal(mask, found[1][name]) for name, mask in found[0].items())
