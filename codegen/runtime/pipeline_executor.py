"""A pipeline's training step on one rank: the action line of its pipeline rank, run in order.

F takes what earlier stages sent (as leaves), runs the stage and sends its results. B takes the results' gradients, runs
the backward and sends the gradients of the leaves. I and W are a backward in two halves (`deferred.py`). Receives
are asked for one action ahead, sends are not waited for before the step's end, or before the gradient of what was sent
is there.

Gradients: where a stage's backwards are whole, the first sets and the others add, as micro-batches do without a
pipeline. Where they are split, everything adds up from zero. After the last line, tied weights' gradients are summed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from . import collectives
from .actions import Action, Lines, check_lines, digest, forward_only, parse_lines
from .mesh import Mesh
from .parameters import Module, classes_of
from .pipeline import Pipeline
from .rng_state import RngState
from .stage_module import Batches, Part, PartOptions, What, loss_gradient, mean_loss
from .tied_gradients import TiedGradients
from .transfer import Channels, Edge, Mailbox, Message, Transfer, incoming_to

if TYPE_CHECKING:
    # Only programs that defer weight gradients have it beside them.
    from .deferred import DeferredGradients


@dataclass(frozen=True, slots=True)
class _Output:
    """The start of a result's backward; the result itself is not kept. gradient: known for the loss only."""

    root: GradientEdge
    dtype: torch.dtype
    gradient: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """A stage's tensors of a micro-batch, kept from its forward to its backward besides those of autograd."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, _Output]


@dataclass(slots=True)
class _StageRun:
    """One of this rank's stages. takes, gives: the edges that end and begin here."""

    number: int
    part: Part
    takes: tuple[Edge, ...]
    gives: tuple[Edge, ...]
    defers: bool
    deferred: DeferredGradients | None
    batches: Batches = field(default_factory=lambda: ([], {}))
    in_flight: dict[int, _MicroBatch] = field(default_factory=dict)
    num_backward: int = 0


class PipelineExecutor:
    """The stages of this rank and how they train; `Step` is the rest.

    schedule: a line of actions per pipeline rank. deferred: makes what keeps a stage's weight gradients between I and
    W, for schedules that have them (`deferred.DeferredGradients`). Raises ValueError if the lines do not fit together
    or the ranks' differ.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        mesh: Mesh,
        rng: RngState,
        options: PartOptions,
        *,
        schedule: Sequence[str],
        deferred: Callable[[], DeferredGradients] | None = None,
    ) -> None:
        if mesh.everyone.size != pipeline.num_ranks:
            raise ValueError(f"the pipeline needs {pipeline.num_ranks} processes, {mesh.everyone.size} run")
        self.pipeline, self.mesh, self.rng = pipeline, mesh, rng
        self.programs: tuple[type[Module], ...] = tuple(stage.root() for stage in pipeline.stages)
        self.num_micro_batches = options.num_micro_batches
        self.executed: list[str] = []
        self._rank = mesh.everyone.rank
        last = pipeline.stage_mesh(len(pipeline.stages) - 1)
        self.result_rank: int | None = last.first_rank if mesh.everyone.size > last.num_ranks else None
        self._pipeline_rank = pipeline.pipeline_rank_of(self._rank)
        self._lines = parse_lines(schedule)
        check_lines(self._lines, pipeline.pipeline_ranks, options.num_micro_batches, pipeline.links())
        if deferred is None and any(action.kind == "I" for action in itertools.chain(*self._lines)):
            raise ValueError("the schedule defers weight gradients: PipelineExecutor needs deferred=DeferredGradients")
        self._is_double = False
        self._agree(schedule)
        self.loss_scaling = options.loss_scaling
        self._edges = pipeline.edges()
        self._stages = {
            number: self._make_stage(number, options, deferred)
            for number, pipeline_rank in enumerate(pipeline.pipeline_ranks)
            if pipeline_rank == self._pipeline_rank
        }
        self.parts = tuple(stage.part for stage in self._stages.values())
        self._tied = TiedGradients(pipeline, mesh, {number: stage.part for number, stage in self._stages.items()})
        self._rows: int | None = None
        self._learn_dtype()
        self._channels = Channels.create(mesh)
        self._incoming = self._plan(self._lines)
        self._evaluation = forward_only(self._lines)
        self._incoming_evaluation = self._plan(self._evaluation)
        if mesh.device.type == "cuda":
            edges = (*self._edges, *(edge for tied in pipeline.tied for edge in pipeline.exchanges(*tied)))
            slices = (message_slice for edge in edges for message_slice in (*edge.forward, *edge.backward))
            pairs = (
                (message_slice.source, message_slice.target)
                for message_slice in slices
                if message_slice.source != message_slice.target
            )
            self._channels.connect(pairs, self._rank, mesh.device)

    # Making -----------------------------------------------------------------------------------------------------------

    def _make_stage(
        self, number: int, options: PartOptions, deferred: Callable[[], DeferredGradients] | None
    ) -> _StageRun:
        model = self.programs[number](self.mesh, self.rng)
        part = Part(model, options, tied=self.pipeline.tied_in(number))
        queue = None if deferred is None else deferred()
        if queue is not None:
            queue.attach(model)
        line = self._lines[self._pipeline_rank]
        return _StageRun(
            number=number,
            part=part,
            takes=tuple(edge for edge in self._edges if edge.target == number),
            gives=tuple(edge for edge in self._edges if edge.source == number),
            defers=any(action.kind == "I" and action.stage == number for action in line),
            deferred=queue,
        )

    def _agree(self, schedule: Sequence[str]) -> None:
        if self.mesh.everyone.size == 1:
            return
        digests: list[Any] = [None] * self.mesh.everyone.size
        dist.all_gather_object(digests, digest(schedule, self.pipeline.describe()))
        others = [rank for rank, text in enumerate(digests) if text != digests[0]]
        if others:
            raise ValueError(f"ranks {others} have another schedule or pipeline than rank 0: start all with the same")

    def _learn_dtype(self) -> None:
        """The loss is fp64 everywhere if any stage computes so, else fp32."""
        has_float64 = any(bucket.key.dtype == torch.float64 for part in self.parts for bucket in part.zero.buckets)
        flag = torch.tensor(has_float64, dtype=torch.int32, device=self.mesh.device)
        if self.mesh.everyone.size > 1:
            collectives.all_reduce(flag, self.mesh.everyone.group, largest=True)
        self._is_double = bool(flag.item())

    # What waits for what ----------------------------------------------------------------------------------------------

    def _plan(self, lines: Lines) -> dict[int, list[Transfer]]:
        """Return the messages that this rank gets from each other rank, in the order in which they are sent."""
        messages = (message for action in itertools.chain(*lines) for message in self._makes(action))
        return incoming_to(self._rank, messages)

    def _makes(self, action: Action) -> list[Message]:
        """Return the messages that are sent when an action has ended."""
        stage, index = action.stage, action.micro_batch
        if action.kind == "F":
            return [Message(edge, index) for edge in self._edges if edge.source == stage]
        if action.kind == "W":
            return []
        return [Message(edge, index, True) for edge in self._edges if edge.target == stage and edge.backward]

    def _needs(self, action: Action) -> list[Message]:
        """Return the messages that must be there before an action starts."""
        stage, index = action.stage, action.micro_batch
        if action.kind == "F":
            return [Message(edge, index) for edge in self._edges if edge.target == stage]
        if action.kind == "W":
            return []
        return [Message(edge, index, True) for edge in self._edges if edge.source == stage and edge.backward]

    # Running ----------------------------------------------------------------------------------------------------------

    def train(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """All micro-batches forward and backward, gradients reduced; the global mean loss, equal on all ranks."""
        self._prepare(local_batch)
        for stage in self._stages.values():
            stage.num_backward = 0
            if stage.defers:
                stage.part.zero.begin_deferring_step()
        losses = self._run(self._lines[self._pipeline_rank], self._incoming)
        self._tied.sum(self._channels)
        self._learn_rows()
        return self._share(losses)

    def evaluate(self, local_batch: Mapping[str, Tensor]) -> Tensor:
        """The global mean loss of the forwards alone; gradients must be off."""
        self._prepare(local_batch)
        return self._share(self._forwards())

    def _prepare(self, local_batch: Mapping[str, Tensor]) -> None:
        for stage in self._stages.values():
            stage.in_flight.clear()
            stage.batches = stage.part.prepare(local_batch)
        if any(cls.needs_first_pass for cls in classes_of(self.programs)):
            with ExitStack() as stack:
                for part in self.parts:
                    stack.enter_context(part.first_pass())
                self._forwards()

    def _forwards(self) -> dict[int, Tensor]:
        """The losses by micro-batch of the forwards alone, on the ranks of the last stage; gradients must be off."""
        return self._run(self._evaluation[self._pipeline_rank], self._incoming_evaluation)

    def _run(self, line: Sequence[Action], incoming: Mapping[int, Sequence[Transfer]]) -> dict[int, Tensor]:
        """The losses by micro-batch, on the ranks of the last stage."""
        mailbox = Mailbox(self.mesh, self._channels, incoming)
        losses: dict[int, Tensor] = {}
        self.executed = []
        for place, action in enumerate(line):
            for near in line[place : place + 2]:
                for message in self._needs(near):
                    mailbox.expect(message)
            stage = self._stages[action.stage]
            self.rng.micro_batch = action.micro_batch
            if action.kind == "F":
                loss = self._forward(stage, action.micro_batch, mailbox)
                if loss is not None:
                    losses[action.micro_batch] = loss
            elif action.kind == "W":
                self._deferred(stage, action.micro_batch)
            else:
                self._backward(stage, action, mailbox)
            mailbox.release_finished()
            self.executed.append(str(action))
        mailbox.finish()
        self.mesh.finish()
        return losses

    def _forward(self, stage: _StageRun, index: int, mailbox: Mailbox) -> Tensor | None:
        """Runs an action F; gives the loss, if this is the last stage."""
        inputs = {}
        for edge in stage.takes:
            x = mailbox.receive(Message(edge, index)).detach()
            inputs[edge.name] = x.requires_grad_() if edge.backward and torch.is_grad_enabled() else x
        batches, targets = stage.batches
        stage.part.zero.begin(accumulate=False, is_last=False)
        results = stage.part.model(**inputs, **batches[index], **targets)
        stage.part.zero.end(has_backward=False)
        is_last = stage.number == len(self.pipeline.stages) - 1
        names = ("loss",) if is_last else tuple(stage.part.model.SENDS)
        named = dict(zip(names, results if isinstance(results, (tuple, list)) else (results,), strict=True))
        if torch.is_grad_enabled():
            outputs = {
                name: _Output(
                    get_gradient_edge(x),
                    x.dtype,
                    loss_gradient(x, self.num_micro_batches, loss_scaling=self.loss_scaling) if is_last else None,
                )
                for name, x in named.items()
                if x.requires_grad
            }
            stage.in_flight[index] = _MicroBatch(inputs, outputs)
        if is_last:
            loss: Tensor = named["loss"].detach()
            return loss
        for edge in stage.gives:
            mailbox.send(Message(edge, index), named[edge.name])
        return None

    def _backward(self, stage: _StageRun, action: Action, mailbox: Mailbox) -> None:
        """Runs an action B, or I."""
        index, tensors, zero = action.micro_batch, stage.in_flight.pop(action.micro_batch), stage.part.zero
        gradients: dict[str, Tensor] = {
            name: output.gradient for name, output in tensors.outputs.items() if output.gradient is not None
        }
        for edge in stage.gives:
            if edge.backward:
                gradient = mailbox.receive(Message(edge, index, True))
                mailbox.release(Message(edge, index))
                gradients[edge.name] = gradients[edge.name] + gradient if edge.name in gradients else gradient
        used = [(tensors.outputs[name], gradient) for name, gradient in gradients.items() if name in tensors.outputs]
        roots = [output.root for output, _ in used]
        values = [gradient.to(output.dtype) for output, gradient in used]
        zero.begin_backward(stage.num_backward > 0, stage.num_backward + 1 == self.num_micro_batches)
        if action.kind == "I":
            assert stage.deferred is not None
            with stage.deferred.collecting(index):
                torch.autograd.backward(roots, values)
            zero.end(has_backward=False)
        else:
            torch.autograd.backward(roots, values)
            stage.num_backward += 1
            zero.end()
        for edge in stage.takes:
            if edge.backward:
                leaf = tensors.inputs[edge.name]
                mailbox.send(Message(edge, index, True), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)

    def _deferred(self, stage: _StageRun, index: int) -> None:
        """Runs an action W: the deferred weight gradients of a micro-batch."""
        assert stage.deferred is not None
        stage.num_backward += 1
        stage.part.zero.begin_deferred(stage.num_backward == self.num_micro_batches)
        stage.deferred.run(index)
        stage.part.zero.end()

    # What all ranks know ----------------------------------------------------------------------------------------------

    def _share(self, losses: Mapping[int, Tensor]) -> Tensor:
        """The mean of the losses, which the last stage's ranks have, for everyone."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if losses and self.mesh.rank == 0:
            total = mean_loss([losses[index] for index in sorted(losses)]).double()
        if self.mesh.everyone.size > 1:
            collectives.all_reduce(total, self.mesh.everyone.group)
        return total if self._is_double else total.float()

    def _learn_rows(self) -> None:
        """Rows of a micro-batch, of which stages without batch inputs know nothing; they are asked for once."""
        if self.mesh.everyone.size == 1:
            return
        if self._rows is None:
            rows = torch.tensor(self.rng.micro_batch_rows, device=self.mesh.device)
            collectives.all_reduce(rows, self.mesh.everyone.group, largest=True)
            self._rows = int(rows.item())
        self.rng.micro_batch_rows = self._rows

    def read(self, what: What, rank0_only: bool) -> Iterator[tuple[tuple[str, ...], Tensor]]:
        """Whole tensors of all stages by their names, on every rank or on rank 0. Collective."""
        for number in range(len(self.pipeline.stages)):
            first = self.pipeline.stage_mesh(number).first_rank
            part = self._stages[number].part if number in self._stages else None
            box: list[Any] = [part.describe(what) if part is not None else None]
            if self.mesh.everyone.size > 1:
                dist.broadcast_object_list(box, first, device=self.mesh.device)
            values = part.read(what) if part is not None else itertools.repeat(None)
            for whole, value in zip(box[0], values, strict=False):
                if value is None:
                    value = torch.empty(whole.shape, dtype=whole.dtype, device=self.mesh.device)
                self._bring(value := value.contiguous(), first, rank0_only)
                if self._rank == 0 or not rank0_only:
                    yield whole.names, value

    def reads_others(self, what: What) -> bool:
        """Whether there are other ranks: each has stages of its own."""
        return self.mesh.everyone.size > 1

    def _bring(self, value: Tensor, source: int, rank0_only: bool) -> None:
        """Brings a value from process `source` to all, or to process 0."""
        line = collectives.as_sent(value)
        if self.mesh.everyone.size == 1 or (rank0_only and source == 0):
            return
        if not rank0_only:
            dist.broadcast(line, source)
        elif self._rank == source:
            dist.send(line, 0)
        elif self._rank == 0:
            dist.recv(line, source)
