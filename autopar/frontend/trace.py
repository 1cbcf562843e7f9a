"""Model -> Graph: torch.export on a skeleton of the model, then simplification and layer folding.

The skeleton is a deep copy whose parameters and buffers are fake (shapes without memory) on the CPU, so that tracing
neither needs the memory of a 175B model nor touches the user's modules. Runs of equal blocks are traced at reduced
depth and extended (`depth.py`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import TraceError
from autopar.frontend import fakes
from autopar.frontend.admission import check_model
from autopar.frontend.depth import Truncation, equal_runs, shorten
from autopar.frontend.depth_check import verified
from autopar.frontend.eager import runs
from autopar.frontend.effects import is_random
from autopar.frontend.evaluation import difference
from autopar.frontend.export import export, forward_and_loss
from autopar.frontend.fakes import Results
from autopar.frontend.fx_import import LOGITS, FlatGraph, import_program
from autopar.frontend.inputs import Batch, NamedBatch, common_batch, example_values, fake_input, has_rows, name_inputs
from autopar.frontend.layers import fold_layers
from autopar.frontend.loss_module import LossModule
from autopar.frontend.other_rows import with_rows_of
from autopar.frontend.rebatch import LEAST_ROWS
from autopar.frontend.recorder import Record, record
from autopar.frontend.simplify import simplify
from autopar.frontend.skeleton import loss_skeleton, skeleton_of
from autopar.frontend.state.function_caches import without_fakes
from autopar.frontend.state.reads import Reads
from autopar.frontend.state.repeatable import check_repeats
from autopar.frontend.trace_modes.batch_values import Specialization
from autopar.frontend.trace_modes.specialization import specializing
from autopar.frontend.training_only import write_training_only
from autopar.frontend.untraceable import UntraceableError, failing
from autopar.ir.graph import Graph, Input, Node, batch_key


class Cuts(tuple[Truncation, ...]):
    """Runs of equal blocks that may be shortened, and results of the first trace with them, for traces of other sizes.

    One object belongs to one model, batch and loss_fn, and is handed to traces of these only.
    """

    first: _FirstExport | None = None
    is_repeatable: bool = False  # forward was tested to do the same each time
    reads: Reads
    """The reads of that forward: of the model, the loss and the script."""

    def __new__(cls, cuts: Iterable[Truncation] = ()) -> Cuts:
        instance = super().__new__(cls, cuts)
        instance.reads = Reads()
        return instance

    def __init__(self, *runs: Any) -> None:
        # Results of running the model in one process, by the dtype that it was cast to (`eager.py`).
        self.outcomes: dict[torch.dtype | None, bool | Exception | None] = {}

    def uncut(self) -> Cuts:
        """Return cuts for one trace of the whole model, which has the same reads."""
        uncut_model = Cuts()
        uncut_model.reads, uncut_model.outcomes = self.reads, self.outcomes
        return uncut_model


@dataclass(frozen=True, slots=True)
class _FirstExport:
    """The export of the model at one number of rows, before any simplification."""

    flat: FlatGraph
    batch: NamedBatch
    param_dtype: torch.dtype | None


@fakes.probing()
def trace(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Batch,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    batch_size: int | None = None,
    param_dtype: torch.dtype | None = None,
    cuts: tuple[Truncation, ...] | None = None,
) -> Graph:
    """Trace `model` (and `loss_fn`) up to the scalar loss, in training mode.

    example_inputs: the model's inputs, plus the arguments of `loss_fn(output, ...)` after the output. Only shapes and
    dtypes of tensors matter. batch_size: rows of dim 0 to trace at, the example's own by default. param_dtype: cast
    parameters first (bf16 training), and operands as `operand_dtypes.py` does. cuts: runs of equal blocks to shorten,
    by default all that may be (`find_cuts`); () traces the whole model. Raises TraceError with torch's reason and the
    user's line.
    """
    check_model(model, param_dtype)
    batch = name_inputs(model, example_inputs, loss_fn)
    specialization = cuts.reads.specialization if isinstance(cuts, Cuts) else Specialization()
    try:
        with specializing(specialization):
            graph = _traced(model, batch, loss_fn, batch_size, param_dtype, cuts)
        specialization.is_traced = True
        return graph
    except TraceError as error:
        if not (specialization.is_traced or specialization.is_on) and example_values(batch):
            specialization.is_on = True  # without values of the batch there is no trace
            if isinstance(cuts, Cuts):
                cuts.is_repeatable = False
            with contextlib.suppress(TraceError), specializing(specialization):
                graph = _traced(model, batch, loss_fn, batch_size, param_dtype, cuts)
                specialization.is_traced = True
                return graph
            specialization.is_on = False
            specialization.guards.clear()
        if isinstance(error, UntraceableError):
            raise _reason(error, model, loss_fn, batch, param_dtype, cuts) from error
        raise


def _traced(
    model: nn.Module,
    batch: NamedBatch,
    loss_fn: Callable[..., torch.Tensor] | None,
    batch_size: int | None,
    param_dtype: torch.dtype | None,
    cuts: tuple[Truncation, ...] | None,
) -> Graph:
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    rows = common_batch(tensors)
    fake = fakes.mode()
    fake_batch = batch.map(lambda value: fake_input(value, fake, rows, batch_size))
    if cuts is None:
        skeletons = (skeleton_of(model, fake, param_dtype) for _ in itertools.count())
        cuts = _sound_cuts(skeletons, loss_fn, fake_batch, fake, param_dtype)
    try:
        flat = _flat_graph(model, loss_fn, fake_batch, fake, param_dtype, cuts)
        graph = _to_graph(flat, fake_batch, rows, batch_size, cuts)
    except (TraceError, IndexError):
        if not cuts:
            raise
        graph = None
    if graph is None:  # the model counts its blocks itself: trace all of them
        return _traced(model, batch, loss_fn, batch_size, param_dtype, cuts.uncut() if isinstance(cuts, Cuts) else ())
    return graph


def _reason(
    error: UntraceableError,
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    batch: NamedBatch,
    param_dtype: torch.dtype | None,
    cuts: tuple[Truncation, ...] | None,
) -> TraceError:
    """Return the error to raise for an error of tracing: it says that forward fails only if it fails in one process,
    too.
    """
    outcomes = cuts.outcomes if isinstance(cuts, Cuts) else {}
    for dtype in dict.fromkeys((None, param_dtype)):
        if dtype not in outcomes:
            outcomes[dtype] = runs(model, loss_fn, batch, dtype)
        if isinstance(outcome := outcomes[dtype], Exception):
            return failing(outcome, dtype)
    return error


def _flat_graph(
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    batch: NamedBatch,
    fake: FakeTensorMode,
    param_dtype: torch.dtype | None,
    cuts: tuple[Truncation, ...],
) -> FlatGraph:
    """Return the export of the shortened model: a second size is derived from the first (`Cuts`)."""

    def short(is_training: bool = True) -> nn.Module:
        skeleton = skeleton_of(model, fake, param_dtype, cuts)
        if not is_training:
            skeleton.eval()
        shorten(skeleton, cuts)
        return skeleton

    def recorded(
        candidate: nn.Module, named_batch: dict[str, Any], loss: Any = None, keeps_caches: bool = False
    ) -> Record:
        loss = loss or loss_skeleton(loss_fn, fake)
        forward = partial(forward_and_loss, loss_fn=loss, batch=named_batch, dtype=param_dtype)
        return record(candidate, (), named_batch, forward, results, loss, keeps_caches=keeps_caches)

    def followed(flat: FlatGraph, training: Record | None = None) -> FlatGraph:
        if depends_on_mode or any(is_random(node) for node in flat.nodes):
            _follow_evaluation(flat, training, lambda mode: recorded(short(mode), batch))
        return flat

    results = Results(fake)
    if not (isinstance(cuts, Cuts) and cuts.is_repeatable):
        reads = cuts.reads if isinstance(cuts, Cuts) else None
        own_loss = loss_skeleton(loss_fn, fake)
        with without_fakes(model, (loss_fn,)):
            check_repeats(
                short(), (own_loss,), lambda candidate: recorded(candidate, batch, own_loss, keeps_caches=True), reads
            )
        if isinstance(cuts, Cuts):
            cuts.is_repeatable = True
    depends_on_mode = not isinstance(cuts, Cuts) or cuts.reads.depends_on_mode()
    first = cuts.first if isinstance(cuts, Cuts) else None
    if first is not None and first.param_dtype == param_dtype:
        # Forward cannot be recorded: an export may succeed, or says why not.
        with contextlib.suppress(Exception):
            before = first.batch.map(lambda value: fake_input(value, fake, 0, None))
            exported, training = recorded(short(), before), recorded(short(), batch)
            return followed(with_rows_of(first.flat, exported, training, batch), training)
    module = LossModule(short(), loss_skeleton(loss_fn, fake), batch, with_logits=True, dtype=param_dtype)
    unchecked: dict[str, None] = {}
    with without_fakes(model, (loss_fn,)):
        flat = import_program(export(module, batch, unchecked), module, batch, model)
    flat.unchecked = tuple(unchecked)
    rows = common_batch({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)})
    if isinstance(cuts, Cuts) and rows >= LEAST_ROWS:
        cuts.first = _FirstExport(flat.copy(), batch, param_dtype)
    return followed(flat)


def _follow_evaluation(flat: FlatGraph, training: Record | None, recorded: Callable[[bool], Record]) -> None:
    """Make an evaluation follow the graph, too, where it can.

    training: the record of this forward, if known. recorded: makes records in training or in evaluation.
    """
    try:
        training, evaluation = training or recorded(True), recorded(False)
        if difference(training, evaluation):
            write_training_only(flat, training, evaluation)
    except Exception as error:  # any failure of forward while it is recorded
        flat.no_evaluation = f"what training does alone is not found in the exported graph: {error}"


@fakes.probing()
def find_cuts(
    model: nn.Module,
    example_inputs: tuple[Any, ...] | Batch,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    param_dtype: torch.dtype | None = None,
) -> Cuts:
    """Return the runs of equal blocks of `model` that a trace may shorten, whatever the batch size.

    Traces that get the same object share an export where they can.
    """
    fake = fakes.mode()
    check_model(model, param_dtype)
    batch = name_inputs(model, example_inputs, loss_fn)
    fake_batch = batch.map(lambda value: fake_input(value, fake, 0, None))
    return Cuts(_sound_cuts((skeleton_of(model, fake) for _ in itertools.count()), loss_fn, fake_batch, fake))


def _sound_cuts(
    skeletons: Iterator[nn.Module],
    loss_fn: Callable[..., torch.Tensor] | None,
    batch: Batch,
    fake: FakeTensorMode,
    dtype: torch.dtype | None = None,
) -> tuple[Truncation, ...]:
    """Return the runs of equal blocks in a model that behave equally. skeletons: of the model; some are used up."""
    skeleton = next(skeletons)
    cuts = equal_runs(skeleton)
    if not cuts:
        return ()
    models = itertools.chain([skeleton], skeletons)
    forward = partial(forward_and_loss, loss_fn=loss_skeleton(loss_fn, fake), batch=batch, dtype=dtype)
    return verified(models, cuts, batch, forward, fake)


def _to_graph(
    flat: FlatGraph, fake_batch: Batch, rows: int, batch_size: int | None, cuts: tuple[Truncation, ...]
) -> Graph:
    simplify(flat)
    inputs = tuple(
        Input(name, meta, 0 if has_rows(fake_batch[batch_key(name)], batch_size or rows) else None)
        for name, meta in flat.inputs.items()
    )
    folded = fold_layers(flat, inputs, cuts, batch_size or rows)
    graph = replace(folded, unchecked=flat.unchecked, no_evaluation=flat.no_evaluation)
    return _with_logits(graph)


def _with_logits(graph: Graph) -> Graph:
    """Return the graph with the operand of the node LOGITS, if there is one, as its logits in place of the node."""
    marks = [piece for piece in graph.body if isinstance(piece, Node) and piece.op == LOGITS]
    if not marks:
        return graph
    (logits,) = marks[0].inputs
    body = tuple(piece for piece in graph.body if piece not in marks)
    is_made = any(piece.name == logits.node for piece in body)
    return replace(graph, body=body, logits=logits if is_made else None)
