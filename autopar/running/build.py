"""Make a generated program runnable in this process: import its folder and build its `Step`."""

from __future__ import annotations

import compileall
import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from autopar.costs.rates import is_cpu
from autopar.costs.updates import DefaultAdamW
from autopar.errors import ConstraintError, PlanError, WorldSizeError
from autopar.files.scratch import lasting_folder
from autopar.plan import Plan
from autopar.profiling.machine import cache_folder
from autopar.program import GeneratedProgram
from autopar.running.first_step import FirstStepCheck
from autopar.running.folder import TUNING_FILE, write_folder
from autopar.running.process_group import join_launched
from autopar.running.process_state import check_training
from autopar.running.state_follower import follow, followed
from autopar.running.weights import Init, ValueSource, tables_of
from autopar.settings.arguments import check_numbers, yes_no_or_none
from autopar.settings.loss_scale import loss_scale_of
from codegen.runtime import watch
from codegen.runtime.loss_scale import LossScale
from codegen.runtime.optimizer_trial import OptimizerTrial
from cost_models.mixed_cluster import AnyCluster

_numbers = itertools.count()
_shared: dict[int, Path] = {}
"""Packages that a process wrote for the ranks that it forks, by the `id` of their program."""


def build_step(
    compiled: GeneratedProgram,
    *,
    device: torch.device | str | None = None,
    max_grad_norm: float | None = None,
    non_finite: str = "skip",
    loss_scale: LossScale | Mapping[str, Any] | None = None,
    seed: int = 0,
    init: Init | None = None,
    also: Sequence[GeneratedProgram] = (),
    first_step_check: bool | None = None,
) -> Any:
    """Build this rank's `step`; call it with this rank's batch. Needs as many ranks as the plan has, under torchrun or
    in a process group that the caller started.

    init: `(name, shape, dtype) -> tensor` for parameters and buffers of a model on meta. It is called once per name and
    must return equal tensors on every rank. non_finite, loss_scale: as in TrainerConfig. The step starts from the
    model's values. Later writes to parameters do not reach it; all other changes are followed or refused
    (state_follower.py). also: programs of the same model and plan for batches of other shapes, `compile(...,
    example_inputs=other, plan=compiled.plan)`. The step then takes their batches too, with the same parameters and
    optimizer. first_step_check: whether the first call compares its loss with the model's own on one process
    (first_step.py). Where they differ, every rank raises TrainingError before an update. None: where the check fits one
    rank and is quick. True: whatever it costs. False: never. The check assembles the whole batch where
    `step.local_batch` did not cut it. Raises WorldSizeError; and ModelError for a model that changed since it was
    compiled (other than in its values), and for values on meta without init.
    """
    check_numbers({"seed": seed, "max_grad_norm": max_grad_norm})
    yes_no_or_none("first_step_check", first_step_check)
    join_launched(on_cpu=is_cpu(compiled.cluster.groups[0]))
    scale = loss_scale_of(loss_scale, compiled.plan.precision)
    _check_world_size(compiled.plan)
    check_training("build")
    watch.start()
    compiled.require_runnable()
    package = load_package(compiled)
    target = device or ("cuda" if torch.cuda.is_available() and not is_cpu(compiled.cluster.groups[0]) else "cpu")
    program = importlib.import_module(f"{package.__name__}.program")
    parameters = importlib.import_module(f"{package.__name__}.runtime.optimizers").parameters_of(compiled.model)
    step = program.create_step(
        program.create_mesh(target),
        _optimizer_factory(compiled, package),
        parameters=parameters,
        trial=None if isinstance(compiled.optimizer, DefaultAdamW) else OptimizerTrial(compiled.needs),
        max_grad_norm=max_grad_norm,
        seed=seed,
        non_finite=non_finite,
        **({} if scale is None else {"loss_scale": scale}),
    )
    step.load(ValueSource(compiled.model, init, compiled.loss_fn, tables_of(compiled.best.graph)))
    follow(compiled, step, _shared_step)
    for other in also:
        _require_one_precision(compiled.plan, other.plan)
        take_also(step, other, init)
    if first_step_check is not False:
        step.first_check = FirstStepCheck(compiled, step, first_step_check)
    return step


def take_also(step: Any, other: GeneratedProgram, init: Init | None = None) -> None:
    """Let a step that `build_step` made take batches of another program of its plan. Collective.

    Raises PlanError where the two programs place parameters differently, ConstraintError where the other one offloads
    the optimizer.
    """
    if other.program.any.offload_optimizer or other.backend == "async-tp":
        option = "async-tp" if other.backend == "async-tp" else f"offload={other.plan.pipeline.offload}"
        raise ConstraintError(
            "a step takes batches of other shapes only without async-tp and an offloaded optimizer",
            values=option,
            alternatives="compile all programs of the step without it",
        )
    if other.remake is not None and other.state is not None and list(other.state.plain_changes()):
        other = other.remake(other)  # the model was changed since
    shared = _shared_step(step, other)
    step.take_also(shared, ValueSource(other.model, init, other.loss_fn, tables_of(other.best.graph)))
    if (follower := followed(step)) is not None:
        follower.take_also(other, shared)


def _shared_step(step: Any, other: GeneratedProgram) -> Any:
    """Make a step of another program of the same plan that shares the parameters and optimizer of `step`. Collective.

    Raises PlanError where it cannot share them.
    """
    package = load_package(other).__name__
    program, sharing = (importlib.import_module(f"{package}.{name}") for name in ("program", "runtime.sharing"))
    try:
        return program.create_step(step.mesh, other.optimizer, shared=sharing.Shared(step))
    except ValueError as error:
        raise PlanError(
            "the programs of one step share its parameters, so they need one plan",
            values=str(error),
            alternatives="compile(..., plan=program.plan) for the other shapes",
        ) from None


def _optimizer_factory(compiled: GeneratedProgram, package: ModuleType) -> Callable[..., torch.optim.Optimizer]:
    """Return the user's optimizer factory, or the fused form of the default where the program has kernels."""
    factory = compiled.optimizer
    if not (isinstance(factory, DefaultAdamW) and compiled.program.any.has_fused_update):
        return factory
    fused = importlib.import_module(f"{package.__name__}.runtime.fused_adamw").FusedAdamW
    return functools.partial(fused, lr=factory.lr, weight_decay=factory.weight_decay)


def load_package(compiled: GeneratedProgram) -> ModuleType:
    """Import the generated folder under a unique name, so that one process can hold several programs."""
    package = _shared.pop(id(compiled), None) or _write_package(compiled, lasting_folder())
    sys.path.insert(0, str(package.parent))
    try:
        module = importlib.import_module(package.name)
    finally:
        sys.path.remove(str(package.parent))
    watch.share(importlib.import_module(f"{package.name}.runtime.watch"))
    return module


@contextlib.contextmanager
def share_packages(programs: Sequence[GeneratedProgram], home: Path) -> Iterator[None]:
    """Write the programs' packages into `home` and compile them once, for processes that fork inside the context.

    The first `load_package` of each process imports its package from there.
    """
    try:
        for program in programs:
            _shared[id(program)] = package = _write_package(program, home)
            compileall.compile_dir(package, quiet=2)
        yield
    finally:
        for program in programs:
            _shared.pop(id(program), None)


def _write_package(compiled: GeneratedProgram, home: Path) -> Path:
    package = home / f"autopar_program_{next(_numbers)}"
    write_folder(compiled, package, weights=False, is_saved=False)
    if torch.cuda.is_available() and (package / "kernels").exists():
        share_choices(package, compiled.cluster)
    return package


def share_choices(package: Path, cluster: AnyCluster) -> None:
    """Let a program that is not saved keep its launch parameters in the user's cache file of this machine.

    package: its folder. Programs over several nodes keep to the heuristics: ranks that compute the same must launch the
    same kernels, and each node may have a file of its own.
    """
    if sum(group.num_nodes for group in cluster.groups) > 1:
        return
    shared = cache_folder() / TUNING_FILE
    # Without a writable file nothing is tuned.
    with contextlib.suppress(OSError):
        shared.parent.mkdir(parents=True, exist_ok=True)
        shared.touch()
        (package / TUNING_FILE).symlink_to(shared)


def _require_one_precision(plan: Plan, other: Plan) -> None:
    if (other.precision, other.fp8) != (plan.precision, plan.fp8):
        raise PlanError(
            "the programs of one step compute in one precision",
            values=f"{other.precision} and {plan.precision}",
            alternatives="compile(..., plan=program.plan) for the other shapes",
        )


def _check_world_size(plan: Plan) -> None:
    """Raise WorldSizeError unless the number of processes equals the plan's number of ranks."""
    running = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if running != plan.num_ranks:
        raise WorldSizeError(
            f"the plan is for {plan.num_ranks} processes ({plan.mesh_text})",
            values=f"{running} running" + ("" if running > 1 else " (torch.distributed is not initialized)"),
            alternatives=[
                f"torchrun --nproc-per-node {plan.num_ranks}",
                f"a plan for {running} device{'s' if running > 1 else ''}",
            ],
        )
