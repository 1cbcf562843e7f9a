"""A planned and generated program, as data; `compiled.py` adds the methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from autopar.frontend.admission import require_traits
from autopar.frontend.inputs import BatchForm
from autopar.frontend.state.forward_numbers import ForwardOf
from autopar.frontend.state.model_state import ModelState
from autopar.plan import Plan
from autopar.planning.planner import SearchResult
from autopar.planning.request import Request
from autopar.settings.backend import require_backend
from autopar.sharding.assignment import Candidate
from autopar.units import bytes_text
from codegen.program import PipelineProgram, Program
from codegen.runtime.optimizer_probe import Needs
from cost_models.mixed_cluster import AnyCluster


class Remaking(Protocol):
    """Makes a program again by its plan, for the model's present state."""

    def __call__(self, program: GeneratedProgram) -> GeneratedProgram:
        """Return a program of the same plan. Collective where ranks run. Raises AutoparError where there is none."""
        ...

    def forward(self, program: GeneratedProgram) -> ForwardOf:
        """Return the forward that the program is made of."""
        ...


@dataclass(frozen=True)
class GeneratedProgram:
    """A planned and generated program, as data, for reports, folders and processes.

    best: the chosen candidate (plan, graph, assignment). result: it and its runner-ups. files: the text of model.py, or
    of a pipeline's stages, by name. A rank that gets the program writes them as they are, and so need not know every
    operator that the model calls.
    request: what was planned for; it is dropped when the program is sent to another process. traits: the model's when
    it was traced (`frontend/admission.traits_of`). form: how the example batch went into model and loss. needs: what
    the optimizer's update must see whole. state: what the trace read of the model besides its parameters, as it was.
    remake: makes the program again by its plan, for the model's present state.
    """

    model: nn.Module
    cluster: AnyCluster
    optimizer: Callable[..., torch.optim.Optimizer]
    best: Candidate
    result: SearchResult
    program: Program | PipelineProgram
    files: dict[str, str]
    traits: dict[str, str]
    form: BatchForm
    loss_fn: Callable[..., torch.Tensor] | None = None
    request: Request | None = None
    needs: Needs = Needs()
    state: ModelState | None = None
    remake: Remaking | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "request": None, "result": replace(self.result, solved=None)}

    @property
    def plan(self) -> Plan:
        """The plan that was chosen, or that the user gave."""
        return self.best.plan

    @property
    def source(self) -> str:
        """All generated Python text of the model; of a pipeline, its files one after another."""
        sources = {name: text for name, text in self.files.items() if name.endswith(".py")}
        if len(sources) == 1:
            return next(iter(sources.values()))
        return "\n\n".join(f"# {name}\n{text}" for name, text in sources.items())

    @property
    def backend(self) -> str:
        """The runner of the layers: "eager", "inductor" or "async-tp"."""
        return self.program.any.backend

    def require_runnable(self) -> None:
        """Raise ModelError for a model that changed since, ConstraintError for a backend that is missing here."""
        require_traits(self.model, self.traits)
        require_backend(self.program, self.cluster)

    def __repr__(self) -> str:
        plan, prediction = self.plan, self.plan.prediction
        figures = f"{prediction.step_seconds:.4g} s, {bytes_text(prediction.peak_bytes)}"
        return f"<{type(self).__name__} {plan.model} on {plan.mesh_text}: {figures}>"
