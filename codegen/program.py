"""The lowered program: frozen values that `emit.py` turns into source. No torch, no graph, no plan.

A program has a class per layer class and a root class, whose bodies are calls, reshards and (the root's) layer loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from codegen.guards import Guard
from codegen.runtime.pipeline_ranks import tiled
from codegen.source.text import axes_text, meshes_text


@dataclass(frozen=True, slots=True)
class TensorType:
    """The type of a variable: global shape, dtype name ("float32"), placement text per axis (R left out).

    requires_grad: whether the loss is differentiated through it. tensor: the graph's tensor that it stands for (name of
    a node, parameter or input, number of the output), or "". strides: all that a rank's part may have (strides.py).
    """

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[tuple[str, str], ...] = ()
    requires_grad: bool = False
    tensor: tuple[str, int] = ("", 0)
    strides: frozenset[tuple[int, ...]] | None = field(default=None, compare=False)

    def placement(self, axis: str) -> str:
        """Return the placement on an axis, as text: "R", "Rp", "S(1)", "P"."""
        return dict(self.placements).get(axis, "R")

    def is_alike(self, other: TensorType) -> bool:
        """Whether both have one global shape and dtype, so that nothing is broadcast or promoted between them."""
        return (self.shape, self.dtype) == (other.shape, other.dtype)


@dataclass(frozen=True, slots=True)
class Var:
    """A local variable or attribute path, printed as it is: `hidden`, `self.mlp.up_proj.weight`; and what it holds.

    Variables of one name are equal, whatever they hold.
    """

    name: str
    type: TensorType = field(compare=False)

    @property
    def is_stored(self) -> bool:
        """Whether it is a parameter or buffer of the module."""
        return self.name.startswith(("self.", "self["))


UNREAD = Var("", TensorType((), ""))
"""The result of a call or loop that nothing uses."""


@dataclass(frozen=True, slots=True)
class Raw:
    """A Python expression, printed as it is. reads: the variables in it. joint: axes of the mesh that it is as one."""

    text: str
    reads: tuple[Var, ...] = ()
    joint: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """`results = target(*args, **kwargs)`, divided by `divisor`.

    target: an operator ("aten.linear.default"), a runtime function ("runtime.dropout") or a fused kernel
    ("kernels.swiglu"). section: the module that made the call, for a comment where it changes. members: the calls that
    a pass put this one in the place of, in their order; () for one that stands for itself.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Var, ...]
    section: str = ""
    divisor: int = 1
    members: tuple[Call, ...] = field(default=(), compare=False)

    @property
    def original(self) -> tuple[Call, ...]:
        """The calls of the lowered program that it stands for: its members' members, or itself."""
        return tuple(call for member in self.members for call in member.original) or (self,)


@dataclass(frozen=True, slots=True)
class Reshard:
    """`result = axis.method(source, **kwargs)`: one step on one axis, between the placements that the types say.

    num_bytes: of the buffer that one rank gathers, reduces or exchanges. forward, backward: the collective, "" where
    nothing is sent.
    """

    axis: str
    method: str
    source: Var
    kwargs: tuple[tuple[str, Any], ...]
    result: Var
    num_bytes: float = 0
    forward: str = ""
    backward: str = ""


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """`for layer in self.layers_of(Layer, first, first + count): carried = layer(...)`.

    args: what the first layer gets, one variable per formal input. carried: (argument position, output position).
    results: one per output of a layer; they hold the last layer's after the loop.
    """

    layer: str
    first: int
    count: int
    args: tuple[Var, ...]
    carried: tuple[tuple[int, int], ...]
    results: tuple[Var, ...]


Statement = Call | Reshard | LayerLoop


def reads(statement: Statement) -> tuple[Var, ...]:
    """Return the variables that a statement reads, as often and in the order in which they are written."""
    if isinstance(statement, Reshard):
        return (statement.source,)
    if isinstance(statement, LayerLoop):
        return statement.args
    return tuple(_variables((statement.args, tuple(value for _, value in statement.kwargs))))


def _variables(value: Any) -> Iterator[Var]:
    if isinstance(value, Var):
        yield value
    elif isinstance(value, Raw):
        yield from value.reads
    elif isinstance(value, tuple):
        for item in value:
            yield from _variables(item)


def assigns(statement: Statement) -> tuple[Var, ...]:
    """Return the variables that a statement assigns, without unused ones."""
    results = (statement.result,) if isinstance(statement, Reshard) else statement.results
    return tuple(result for result in results if result != UNREAD)


@dataclass(frozen=True, slots=True)
class Spec:
    """A stored tensor or a batch input: global shape, dtype name ("float32"), placement text per axis (R left out).

    increment: what every step adds to a buffer that counts. padding: zeros that follow each section of a dim;
    padded: which, as a placement.
    """

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[tuple[str, str], ...] = ()
    zero: int = 0
    aliases: tuple[str, ...] = ()
    requires_grad: bool = True
    persistent: bool = True
    increment: float = 0
    padding: int = 0
    padded: str = "S(0)"


@dataclass(frozen=True, slots=True)
class Layout:
    """The place of a tensor's local part in the whole: a module-level constant of the generated file."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ModuleClass:
    """One generated class: parameters and buffers by (relative) name, `forward`'s arguments, body and results.

    dropout_base: of the first layer's first dropout call, or of each layer's (layer classes only). written_buffers,
    updated_buffers: those that a forward in training, and a step after it, changes.
    """

    name: str
    doc: str
    parameters: Mapping[str, Spec]
    buffers: Mapping[str, Spec]
    inputs: tuple[Var, ...]
    body: tuple[Statement, ...]
    outputs: tuple[Var, ...]
    layouts: tuple[Layout, ...] = ()
    num_dropout_calls: int = 0
    dropout_base: int | tuple[int, ...] = 0
    written_buffers: tuple[str, ...] = ()
    updated_buffers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """A tensor that crosses from one pipeline stage to others: what it is, and one rank's bytes of it."""

    spec: Spec
    num_bytes: float


@dataclass(frozen=True, slots=True)
class LayerRunSpec:
    """The module paths of a class's layers."""

    layer: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that is emitted: a whole model, or one stage of a pipeline.

    count_targets: statements that count, from the batch, this rank's valid targets per cross-entropy, as target_counts.
    whole_sums: likewise sums over the batch, the variables sums, which forward takes as `sums`, added over
    micro-batches. inputs: the batch's specs at the global micro-batch size. vocabulary: integer inputs stay below it.
    receives, sends: of a stage, tensors of earlier stages and for later ones; `root.inputs` are what it receives, then
    `inputs`, and the last stage sends nothing. recompute, offload: layer class -> (mode, how many layers in a row);
    offload_optimizer: where the optimizer's state lives ("": on the device); offload_parameters: ZeRO-3's shards too.
    compression (of ZeRO's collectives), backend: as `Step` takes them. kernels: runs of calls, the update and the
    gradient's norm are fused kernels. fp8: linear layers of layer classes multiply in e4m3 (fp8.py). unused_inputs:
    tensors of the batch without effect. fixed_inputs: what of it is no tensor. guards: values of it that decide.
    dims: (layer class or "", tensor of the graph) -> what its dims are known to be, "BATCH", or "". no_evaluation: why
    it cannot evaluate. logits: the model's, which giving_logits makes whole after logits_at statements of forward.
    """

    name: str
    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    precision: str
    global_batch_size: int
    num_micro_batches: int
    inputs: Mapping[str, Spec]
    layers: tuple[ModuleClass, ...]
    root: ModuleClass
    runs: tuple[LayerRunSpec, ...]
    count_targets: tuple[Statement, ...] = ()
    target_counts: tuple[Var, ...] = ()
    vocabulary: int = 2
    receives: Mapping[str, BoundaryTensor] = field(default_factory=dict)
    sends: Mapping[str, BoundaryTensor] = field(default_factory=dict)
    recompute: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    offload: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    offload_optimizer: str = ""
    offload_parameters: bool = False
    compression: Mapping[str, str] = field(default_factory=dict)
    backend: str = "eager"
    kernels: bool = False
    fp8: bool = False
    whole_sums: tuple[Statement, ...] = ()
    sums: tuple[Var, ...] = ()
    unused_inputs: tuple[str, ...] = ()
    fixed_inputs: Mapping[str, Any] = field(default_factory=dict)
    guards: tuple[Guard, ...] = ()
    no_evaluation: str = ""
    dims: Mapping[tuple[str, str, int], tuple[str, ...]] = field(default_factory=dict)
    logits: Var | None = None
    giving_logits: tuple[Statement, ...] = ()
    logits_at: int = 0

    @property
    def programs(self) -> tuple[Program, ...]:
        """The program itself; of a pipeline, those of its stages."""
        return (self,)

    @property
    def any(self) -> Program:
        """The program itself, as `PipelineProgram.any`."""
        return self

    def map(self, function: Callable[[Program], Program]) -> Program:
        """Return the program that the function makes of this one, as `PipelineProgram.map` does."""
        return function(self)

    @property
    def gathers_parameters(self) -> bool:
        """Whether parameters are sharded between uses, as ZeRO-3 has them."""
        return any(spec.zero == 3 for cls in (self.root, *self.layers) for spec in cls.parameters.values())

    @property
    def has_fused_update(self) -> bool:
        """Whether the default optimizer is the run time's FusedAdamW."""
        return self.kernels and not self.offload_optimizer

    @property
    def mesh_text(self) -> str:
        """The mesh as text: `dp2 x tp2`, or `one rank`."""
        return axes_text(self.axes, self.axis_sizes) or "one rank"

    @property
    def num_ranks(self) -> int:
        return math.prod(self.axis_sizes)

    @property
    def layer_names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    def paths(self, layer: str) -> tuple[str, ...]:
        """Module paths of a class' layers."""
        return tuple(path for run in self.runs if run.layer == layer for path in run.paths)


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One stage: its program, the pipeline rank that runs it, and layers of each of its classes in earlier stages."""

    program: Program
    pipeline_rank: int
    first_layer: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PipelineProgram:
    """Stages in model order; stages at one pipeline rank have one mesh, whose ranks are consecutive.

    tied: (parameter, stages that hold a copy). schedule: one line of actions per pipeline rank. first_ranks: the first
    rank of each pipeline rank; empty if they come in the order of pipeline ranks. Raises ValueError for stages of one
    pipeline rank with two meshes, and for pipeline ranks that share ranks or leave some out.
    """

    name: str
    stages: tuple[PipelineStage, ...]
    tied: tuple[tuple[str, tuple[int, ...]], ...]
    schedule_name: str
    schedule: tuple[str, ...]
    first_ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for stage in self.stages:
            mesh, other = (stage.program.axes, stage.program.axis_sizes), self.meshes[stage.pipeline_rank]
            if mesh != other:
                raise ValueError(f"stages of pipeline rank {stage.pipeline_rank} have meshes {mesh} and {other}")
        tiled(self.ranks_of_stage_meshes, self.first_ranks)

    @property
    def programs(self) -> tuple[Program, ...]:
        """The stages' programs."""
        return tuple(stage.program for stage in self.stages)

    @property
    def any(self) -> Program:
        """The last stage's program: what all stages have in common can be read off it."""
        return self.stages[-1].program

    def map(self, function: Callable[[Program], Program]) -> PipelineProgram:
        """The same with every stage's program replaced by `function(program)`."""
        return replace(self, stages=tuple(replace(stage, program=function(stage.program)) for stage in self.stages))

    @property
    def meshes(self) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
        """Axes and their sizes of each pipeline rank."""
        mesh_of = {stage.pipeline_rank: (stage.program.axes, stage.program.axis_sizes) for stage in self.stages}
        return tuple(mesh_of[pipeline_rank] for pipeline_rank in sorted(mesh_of))

    @property
    def ranks_of_stage_meshes(self) -> tuple[int, ...]:
        return tuple(math.prod(sizes) for _, sizes in self.meshes)

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks_of_stage_meshes)

    @property
    def mesh_text(self) -> str:
        """The meshes of all pipeline ranks as text, `pp2 x dp2 x tp2`; see `meshes_text`."""
        return meshes_text(self.meshes)

    def place(self, rank: int) -> tuple[int, int]:
        """Return (pipeline rank, rank within its mesh) of a rank. Raises ValueError for a rank that there is not."""
        counts = self.ranks_of_stage_meshes
        for pipeline_rank, first in enumerate(tiled(counts, self.first_ranks)):
            if first <= rank < first + counts[pipeline_rank]:
                return pipeline_rank, rank - first
        raise ValueError(f"the pipeline has ranks 0 to {self.num_ranks - 1}, got {rank}")

    @property
    def inputs(self) -> Mapping[str, Spec]:
        """The whole batch's specs."""
        return {name: spec for program in self.programs for name, spec in program.inputs.items()}

    def inputs_of(self, pipeline_rank: int) -> Mapping[str, Spec]:
        """Return the inputs of the batch that one pipeline rank's stages read."""
        return dict(i for s in self.stages if s.pipeline_rank == pipeline_rank for i in s.program.inputs.items())

    def source(self, stage: int, name: str) -> int:
        """The stage that sends what `stage` receives as `name`."""
        return max(number for number in range(stage) if name in self.stages[number].program.sends)

    def readers(self, stage: int, name: str) -> tuple[int, ...]:
        """The stages that receive what `stage` sends as `name`."""
        having = [n for n, later_stage in enumerate(self.stages) if n > stage and name in later_stage.program.receives]
        return tuple(n for n in having if self.source(n, name) == stage)
