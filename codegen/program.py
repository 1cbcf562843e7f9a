"""The lowered program: frozen values that `emit.py` turns into source. No torch, no graph, no plan.

A program has one class per layer class and one root class. A class' body is a list of statements on local tensors:
calls, reshards, and (in the root) loops over layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Var:
    """A local variable or attribute path, printed as it is: `hidden`, `self.mlp.up_proj.weight`."""

    name: str


@dataclass(frozen=True, slots=True)
class Raw:
    """A Python expression, printed as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Operand:
    """What a variable holds where a call reads it: global shape, dtype name ("float32")."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Call:
    """`results = target(*args, **kwargs)`, divided by `divisor`.

    target: an operator ("aten.linear.default"), a runtime function ("runtime.dropout") or a fused kernel
    ("kernels.swiglu"). A result that nothing uses is "". section: the module that made the call, for a comment where it
    changes. operands: (variable, what it holds) of what the call reads; fusion.py decides by them.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[str, ...]
    section: str = ""
    divisor: int = 1
    operands: tuple[tuple[str, Operand], ...] = ()


@dataclass(frozen=True, slots=True)
class Reshard:
    """`result = axis.method(source, **kwargs)  # comment`: one step on one axis."""

    axis: str
    method: str
    source: Var
    kwargs: tuple[tuple[str, Any], ...]
    result: str
    comment: str
    section: str = ""


@dataclass(frozen=True, slots=True)
class LayerLoop:
    """`for layer in self.layers_of(Layer, first, first + count): carried = layer(...)`.

    args: what the first layer gets, one variable per formal input. carried: (argument position, output position).
    results: a name per output of a layer ("" if only carried on); they hold the last layer's after the loop.
    """

    layer: str
    first: int
    count: int
    args: tuple[Var, ...]
    carried: tuple[tuple[int, int], ...]
    results: tuple[str, ...]


Statement = Call | Reshard | LayerLoop


@dataclass(frozen=True, slots=True)
class Spec:
    """A stored tensor or a batch input: global shape, dtype name ("float32"), placement text per axis (R left out)."""

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[tuple[str, str], ...] = ()
    zero: int = 0
    aliases: tuple[str, ...] = ()
    requires_grad: bool = True
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor's local part lies in the whole: a module-level constant of the generated file."""

    name: str
    shape: tuple[int, ...]
    placements: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ModuleClass:
    """One generated class: parameters and buffers by (relative) name, `forward`'s arguments, body and results."""

    name: str
    doc: str
    parameters: Mapping[str, Spec]
    buffers: Mapping[str, Spec]
    inputs: tuple[str, ...]
    body: tuple[Statement, ...]
    outputs: tuple[str, ...]
    layouts: tuple[Layout, ...] = ()
    num_dropout_calls: int = 0


@dataclass(frozen=True, slots=True)
class LayerRunSpec:
    """Where layers of a class live: module paths, and the number of the first layer's first dropout call."""

    layer: str
    paths: tuple[str, ...]
    dropout_base: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that is emitted.

    count_targets: statements that compute, from the batch, this rank's number of valid targets per cross-entropy; its
    outputs are those variables. inputs: the batch's specs at the global micro-batch size. vocabulary: integer inputs
    stay below it.
    """

    name: str
    axes: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    cluster: str
    precision: str
    global_batch_size: int
    num_micro_batches: int
    inputs: Mapping[str, Spec]
    layers: tuple[ModuleClass, ...]
    root: ModuleClass
    runs: tuple[LayerRunSpec, ...]
    count_targets: tuple[Statement, ...] = ()
    target_counts: tuple[str, ...] = ()
    vocabulary: int = 2
    notes: tuple[str, ...] = field(default=())

    @property
    def mesh_text(self) -> str:
        """`dp2 x tp2`, or `one rank`."""
        return " x ".join(f"{a}{n}" for a, n in zip(self.axes, self.axis_sizes, strict=True)) or "one rank"

    @property
    def num_ranks(self) -> int:
        ranks = 1
        for size in self.axis_sizes:
            ranks *= size
        return ranks
