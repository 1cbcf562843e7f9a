"""The result of `autopar.compile`: a generated program with its methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from autopar.errors import ConstraintError
from autopar.explain import explain, render_explanation
from autopar.frontend.inputs import name_inputs
from autopar.launch import launch_program
from autopar.page import write_page
from autopar.program import GeneratedProgram
from autopar.report import render_report
from autopar.running.build import build_step, load_package
from autopar.running.folder import save_program
from autopar.running.local_batch import local_batch
from autopar.running.state import load_checkpoint, save_checkpoint, update_model, write_pretrained
from autopar.settings.arguments import whole


@dataclass(frozen=True, repr=False)
class CompiledProgram(GeneratedProgram):
    """A generated program; its methods are the functions of other modules that take one."""

    report = render_report
    report_html = write_page
    save = save_program
    build = build_step
    load_package = load_package
    launch = launch_program
    save_checkpoint = save_checkpoint
    load_checkpoint = load_checkpoint
    save_pretrained = write_pretrained
    update_model = update_model
    certify: ClassVar[Callable[..., Any]]
    """`autopar.certify.certify_program`. It compiles miniatures and imports this module, so `autopar/__init__.py` sets
    it, which runs before any of autopar is used."""

    def explain(self, seconds: float = 60.0) -> str:
        """Say why this plan was chosen: what limits it, and what every other decision would cost, by planning again.

        seconds: after which no further question is asked. Raises PlanError on a program that came from another process.
        """
        return render_explanation(explain(self, seconds=seconds))

    def local_batch(
        self, global_batch: tuple[Any, ...] | Mapping[str, Any], rank: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return one rank's part of a whole global batch (this rank's by default): its rows of each micro-batch in
        turn."""
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        elif whole("rank", rank, 0) >= self.plan.num_ranks:
            last = self.plan.num_ranks - 1
            raise ConstraintError("rank is one of the plan's ranks", values=str(rank), alternatives=f"0 to {last}")
        return local_batch(self.program, name_inputs(self.model, global_batch, self.loss_fn), rank)
