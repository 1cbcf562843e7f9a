"""What `autopar.compile` returns: the plan, its report, the generated source, and ways to save and run it."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.arguments import check_numbers
from autopar.backend import backend_of, require_backend
from autopar.costs.rates import is_cpu
from autopar.costs.updates import DefaultAdamW
from autopar.errors import WorldSizeError
from autopar.folder import write_folder
from autopar.plan import Plan
from autopar.planning.planner import SearchResult
from autopar.planning.request import Request
from autopar.scratch import lasting_folder
from autopar.sharding.choices import Candidate
from autopar.surroundings import check_starting, check_training
from autopar.tracing.admission import require_traits
from autopar.tracing.inputs import name_inputs
from autopar.units import bytes_text
from autopar.weights import value_source
from codegen.program import PipelineProgram, Program
from codegen.runtime.optimizer_probe import OptimizerTrial
from cost_models.mixed import AnyCluster

_numbers = itertools.count()


@dataclass(frozen=True)
class CompiledProgram:
    """A planned and generated program.

    best: the chosen candidate (plan, graph, choices). result: it and its runner-ups. source: the text of model.py.
    request: what was planned for; it stays behind when the program is sent to another process. traits: what the model
    was when it was traced (`tracing/admission.traits_of`).
    """

    model: nn.Module
    cluster: AnyCluster
    optimizer: Callable[..., torch.optim.Optimizer]
    best: Candidate
    result: SearchResult
    program: Program | PipelineProgram
    source: str
    traits: dict[str, str]
    loss_fn: Callable[..., torch.Tensor] | None = None
    request: Request | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "request": None}

    @property
    def plan(self) -> Plan:
        """What was decided."""
        return self.best.plan

    @property
    def any_stage(self) -> Program:
        """The program, of a pipeline one stage's: what all have in common can be read off it."""
        return self.program.any if isinstance(self.program, PipelineProgram) else self.program

    @property
    def backend(self) -> str:
        """Who runs what layers compute: "eager", "inductor" or "async-tp"."""
        return backend_of(self.program)

    def require_runnable(self) -> None:
        """Raises ModelError for a model that was changed since, ConstraintError for a backend not to be had here."""
        require_traits(self.model, self.traits)
        require_backend(self.program, self.cluster)

    def report(self) -> str:
        """The plan in words: mesh, sharding by layer, predicted time and memory by kind, runner-ups."""
        from autopar.report import render_report

        return render_report(self)

    def explain(self, seconds: float = 60.0) -> str:
        """Why this plan: what binds it and what every other decision would cost, found by planning again.

        seconds: after which no further question is asked. Raises PlanError on a program that came from another process.
        """
        from autopar.explain import explain, render_explanation

        return render_explanation(explain(self, seconds=seconds))

    def save(self, directory: str | Path, *, weights: bool = True) -> Path:
        """Write the program as a folder that needs torch only; returns it.

        weights: also write the model's values to `weights.safetensors`, which `main.py` starts from (not for models on
        meta). The folder is complete or absent: it is written beside its place and renamed. Raises ModelError as build.
        """
        require_traits(self.model, self.traits)
        return write_folder(self, Path(directory), weights, tuned=True)

    def build(
        self,
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
        check_world_size(self.plan)
        check_training("build")
        self.require_runnable()
        package = self.load_package()
        where = device or ("cuda" if torch.cuda.is_available() and not is_cpu(self.cluster.groups[0]) else "cpu")
        program = importlib.import_module(f"{package.__name__}.program")
        parameters = importlib.import_module(f"{package.__name__}.runtime.optimizers").parameters_of(self.model)
        factory = self._optimizer_factory(package)
        step = program.create_step(
            program.create_mesh(where),
            factory,
            parameters=parameters,
            trial=None if isinstance(self.optimizer, DefaultAdamW) else OptimizerTrial(is_tried=True),
            max_grad_norm=max_grad_norm,
            seed=seed,
            non_finite=non_finite,
        )
        step.load(value_source(self.model, init, self.loss_fn))
        return step

    def _optimizer_factory(self, package: ModuleType) -> Callable[..., torch.optim.Optimizer]:
        """The given one; the default's fused form where the program has kernels."""
        given = self.optimizer
        if not (isinstance(given, DefaultAdamW) and self.any_stage.has_fused_update):
            return given
        fused = importlib.import_module(f"{package.__name__}.runtime.fused_adamw").FusedAdamW
        return functools.partial(fused, lr=given.lr, weight_decay=given.weight_decay)

    def load_package(self) -> ModuleType:
        """Import the generated folder under a name of its own, so that several programs can live in one process."""
        home = lasting_folder()
        name = f"autopar_program_{next(_numbers)}"
        write_folder(self, home / name, weights=False, tuned=False)
        if torch.cuda.is_available() and (home / name / "kernels").exists():
            from autopar.tune import share_choices

            share_choices(home / name, self.cluster)
        sys.path.insert(0, str(home))
        try:
            return importlib.import_module(name)
        finally:
            sys.path.remove(str(home))

    def local_batch(
        self, global_batch: tuple[Any, ...] | Mapping[str, Any], rank: int | None = None
    ) -> dict[str, torch.Tensor]:
        """One rank's part of a whole global batch (this rank's by default): rows of each micro-batch in turn."""
        from autopar.batch import local_batch

        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return local_batch(self.program, name_inputs(self.model, global_batch, self.loss_fn), rank)

    def launch(self, function: Callable[..., Any], *args: Any, max_restarts: int = 0) -> list[Any]:
        """Run `function(step, *args)` on every rank, as processes of this machine; returns the results by rank.

        torch's elastic launcher starts them, so a rank that dies ends the others with its error. `function`, `args` and
        the optimiser factory must be picklable (defined at module level).
        """
        from autopar.launch import launch_program

        check_starting("launch")
        self.require_runnable()
        return launch_program(self, function, args, max_restarts)

    def __repr__(self) -> str:
        plan, prediction = self.plan, self.plan.prediction
        figures = f"{prediction.step_seconds:.4g} s, {bytes_text(prediction.peak_bytes)}"
        return f"<CompiledProgram {plan.model} on {plan.layout}: {figures}>"


def check_world_size(plan: Plan) -> None:
    """Raises WorldSizeError unless as many processes run as the plan has ranks."""
    running = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if running != plan.num_ranks:
        raise WorldSizeError(
            f"the plan is for {plan.num_ranks} processes ({plan.layout})",
            values=f"{running} running" + ("" if running > 1 else " (torch.distributed is not initialised)"),
            alternatives=[
                f"torchrun --nproc-per-node {plan.num_ranks}, with dist.init_process_group() before build()",
                f"a plan for {running} device{'s' if running > 1 else ''}",
            ],
        )
