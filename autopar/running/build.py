"""A generated program made runnable in this process: its folder imported, its `Step` built."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from autopar.costs.rates import is_cpu
from autopar.costs.updates import DefaultAdamW
from autopar.errors import WorldSizeError
from autopar.files.scratch import lasting_folder
from autopar.plan import Plan
from autopar.profiling.detect import cache_folder
from autopar.program import GeneratedProgram
from autopar.running.folder import TUNING_FILE, write_folder
from autopar.running.surroundings import check_training
from autopar.running.weights import ValueSource
from autopar.settings.arguments import check_numbers
from codegen.runtime.optimizer_probe import OptimizerTrial
from cost_models.mixed import AnyCluster

_numbers = itertools.count()


def build_step(
    compiled: GeneratedProgram,
    *,
    device: torch.device | str | None = None,
    max_grad_norm: float | None = None,
    non_finite: str = "skip",
    seed: int = 0,
    init: Callable[[str, torch.Size, torch.dtype], torch.Tensor] | None = None,
) -> Any:
    """This rank's `step`: call it with this rank's batch. Needs a process group of as many ranks as the plan has.

    init: `(name, shape, dtype) -> tensor` for parameters and buffers of a model on meta; called once per name,
    with equal results on every rank. non_finite: as in TrainerConfig. The step starts from the model's values;
    what is done to the model later (frozen layers, loaded values) does not reach it.
    Raises WorldSizeError, ModelError for a model that is not as it was compiled (but for its values), and for meta
    values without init.
    """
    check_numbers({"seed": seed, "max_grad_norm": max_grad_norm})
    _check_world_size(compiled.plan)
    check_training("build")
    compiled.require_runnable()
    package = load_package(compiled)
    where = device or ("cuda" if torch.cuda.is_available() and not is_cpu(compiled.cluster.groups[0]) else "cpu")
    program = importlib.import_module(f"{package.__name__}.program")
    parameters = importlib.import_module(f"{package.__name__}.runtime.optimizers").parameters_of(compiled.model)
    step = program.create_step(
        program.create_mesh(where),
        _optimizer_factory(compiled, package),
        parameters=parameters,
        trial=None if isinstance(compiled.optimizer, DefaultAdamW) else OptimizerTrial(is_tried=True),
        max_grad_norm=max_grad_norm,
        seed=seed,
        non_finite=non_finite,
    )
    step.load(ValueSource(compiled.model, init, compiled.loss_fn))
    return step


def _optimizer_factory(compiled: GeneratedProgram, package: ModuleType) -> Callable[..., torch.optim.Optimizer]:
    """The given one; the default's fused form where the program has kernels."""
    given = compiled.optimizer
    if not (isinstance(given, DefaultAdamW) and compiled.program.any.has_fused_update):
        return given
    fused = importlib.import_module(f"{package.__name__}.runtime.fused_adamw").FusedAdamW
    return functools.partial(fused, lr=given.lr, weight_decay=given.weight_decay)


def load_package(compiled: GeneratedProgram) -> ModuleType:
    """Import the generated folder under a name of its own, so that several programs can live in one process."""
    home = lasting_folder()
    name = f"autopar_program_{next(_numbers)}"
    write_folder(compiled, home / name, weights=False, tuned=False)
    if torch.cuda.is_available() and (home / name / "kernels").exists():
        share_choices(home / name, compiled.cluster)
    sys.path.insert(0, str(home))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(home))


def share_choices(package: Path, cluster: AnyCluster) -> None:
    """Let a program that is not saved keep its launch parameters in the user's file of this machine.

    package: its folder. Programs of several nodes keep to the heuristics, since ranks that compute the same must launch
    alike and every node may have a file of its own.
    """
    if sum(group.num_nodes for group in cluster.groups) > 1:
        return
    shared = cache_folder() / TUNING_FILE
    # Where nothing can be written, nothing is tuned.
    with contextlib.suppress(OSError):
        shared.parent.mkdir(parents=True, exist_ok=True)
        shared.touch()
        (package / TUNING_FILE).symlink_to(shared)


def _check_world_size(plan: Plan) -> None:
    """Raises WorldSizeError unless as many processes run as the plan has ranks."""
    running = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if running != plan.num_ranks:
        raise WorldSizeError(
            f"the plan is for {plan.num_ranks} processes ({plan.mesh_text})",
            values=f"{running} running" + ("" if running > 1 else " (torch.distributed is not initialised)"),
            alternatives=[
                f"torchrun --nproc-per-node {plan.num_ranks}, with dist.init_process_group() before build()",
                f"a plan for {running} device{'s' if running > 1 else ''}",
            ],
        )
