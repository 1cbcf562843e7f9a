"""A model as traced for planning: all that follows from it, its example batch, its loss and its optimizer alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from autopar.costs.rates import Training
from autopar.frontend.admission import check_model
from autopar.frontend.evaluation import why_no_evaluation
from autopar.frontend.inputs import NamedBatch, name_inputs
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.state.reads import Reads
from autopar.frontend.trace import find_cuts, trace
from autopar.frontend.trace_modes.specialization import specializing
from autopar.ir.graph import Graph
from autopar.settings.compile_options import CompileOptions
from autopar.settings.optimizers import examine
from codegen.runtime.optimizer_probe import Needs


@dataclass(frozen=True, eq=False)
class TracedModel:
    """The part of a request that does not depend on cluster, constraints or number of rows.

    needs: parameters that the optimizer's update must see whole. inputs: the example batch by name. reads: the inputs
    that forward reads, as the trace shows. evaluation: returns why evaluation differs from training, with logits and
    without them, as records of forward show. trainings: the optimizer's costs by precision and whether on GPUs, filled
    on demand.
    """

    needs: Needs
    inputs: NamedBatch
    trace: BatchedTrace
    reads: Reads
    evaluation: Callable[[], tuple[str, str]]
    trainings: dict[tuple[str, bool], Training] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the inputs that are tensors."""
        return {name: value for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}

    def evaluation_of(self, graph: Graph) -> tuple[str, str]:
        """Return why a program of the graph evaluates otherwise than the model, with logits and without them, or ""."""
        no_logits, reason = self.evaluation()
        return no_logits or graph.no_evaluation, reason or graph.no_evaluation


def traced_of(model: nn.Module, options: CompileOptions) -> TracedModel:
    """Trace the model, for all requests with these options, whatever the batch's rows and the constraints."""
    loss_fn, dtype = options.loss_fn, options.dtype
    check_model(model, dtype)  # before the optimizer is tried on its parameters
    needs = examine(options.factory, model)
    batch = name_inputs(model, options.example_inputs, loss_fn)
    cuts = find_cuts(model, batch, loss_fn, dtype)

    @functools.cache
    def evaluation() -> tuple[str, str]:
        with specializing(cuts.reads.specialization):
            no_logits = why_no_evaluation(model, batch, loss_fn, cuts, with_logits=True)
            return no_logits, no_logits and why_no_evaluation(model, batch, loss_fn, cuts)

    def trace_at(micro_rows: int) -> Graph:
        return trace(model, batch, loss_fn, batch_size=micro_rows, param_dtype=dtype, cuts=cuts)

    return TracedModel(needs, batch, trace=BatchedTrace(trace_at), reads=cuts.reads, evaluation=evaluation)
