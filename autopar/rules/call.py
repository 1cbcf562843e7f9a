"""One operator call in the form rules read: arguments by their schema names, tensors with their metas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Node, TensorMeta, map_refs
from autopar.operators.schemas import find_op, named_arguments
from autopar.rules.rule import Dims, Joint, Lowering, Rule


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument: its position in `Node.inputs`, and its global meta."""

    index: int
    meta: TensorMeta

    @property
    def shape(self) -> tuple[int, ...]:
        return self.meta.shape


@dataclass(frozen=True, slots=True)
class Call:
    """A node with its arguments under the names of the overload's schema, with defaults.

    Tensors are `Operand`s, also inside tuples. Arguments of an op unknown to torch are called arg0, arg1 ...
    """

    node: Node
    inputs: tuple[TensorMeta, ...]
    arguments: Mapping[str, Any]

    @classmethod
    def of(cls, node: Node, inputs: tuple[TensorMeta, ...]) -> Call:
        """Build the call of a node. Raises ValueError unless there is one meta per entry of `node.inputs`."""
        if len(inputs) != len(node.inputs):
            raise ValueError(f"{node.op} has {len(node.inputs)} tensor arguments, {len(inputs)} metas were given")
        numbers = itertools.count()

        def operand(_: object) -> Operand:
            index = next(numbers)
            return Operand(index, inputs[index])

        args = map_refs(node.args, operand)
        kwargs = {name: map_refs(value, operand) for name, value in node.kwargs}
        op = find_op(node.op)
        if op is None:
            return cls(node, inputs, {**{f"arg{i}": value for i, value in enumerate(args)}, **kwargs})
        return cls(node, inputs, named_arguments(op, args, kwargs))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def tensor(self, name: str) -> Operand:
        """Return the tensor argument `name`. Raises TypeError if it is something else."""
        value = self.arguments[name]
        if not isinstance(value, Operand):
            raise TypeError(f"{self.node.op}: {name} is {value!r}, not a tensor")
        return value

    @property
    def outputs(self) -> tuple[TensorMeta, ...]:
        return self.node.outputs

    @property
    def packet(self) -> str:
        """Return the op's name without namespace, overload and in-place underscore: "aten.add_.Tensor" -> "add"."""
        return packet_name(self.node.op).split(".")[-1].rstrip("_")


def packet_name(op: str) -> str:
    """Shorten "aten.add_.Tensor" to "aten.add_"."""
    return ".".join(op.split(".")[:2])


def linear_sets(call: Call, specs: Iterable[str]) -> tuple[frozenset[int], ...]:
    """Return sets of inputs in which the call is jointly linear, from argument names: ("self other",) for add.

    A set counts only if every named argument is a floating tensor (or a list of them), absent, or the number 0
    (`add(x, 3)` is affine, not linear), and if the outputs are floating. Partial sums of integers are legal but
    useless, so they are not offered.
    """
    if not all(meta.dtype.is_floating_point for meta in call.outputs):
        return ()
    sets = []
    for spec in specs:
        members: list[int] = []
        holds = True
        for name in spec.split():
            value = call.get(name)
            for item in value if isinstance(value, tuple) else (value,):
                if isinstance(item, Operand):
                    members.append(item.index)
                    holds &= item.meta.dtype.is_floating_point
                elif item is not None:
                    holds &= isinstance(item, int | float) and item == 0
        if holds and members:
            sets.append(frozenset(members))
    return tuple(sets)


Groups = Sequence[Sequence[str]]
"""The factors of each dim of one tensor, including those of size 1."""


def make_rule(
    call: Call,
    inputs: Sequence[Groups],
    outputs: Sequence[Groups],
    sizes: Mapping[str, int],
    *,
    blocked: Iterable[str] = (),
    additive: Iterable[int] = (),
    linear: Iterable[str] = (),
    lowerings: Mapping[str, Lowering] | None = None,
    joints: Mapping[str, Joint] | None = None,
) -> Rule:
    """Build a rule without factors of size 1, and check the product of every dim against the call's shapes."""

    def dims(groups: Groups, meta: TensorMeta) -> Dims:
        products = tuple(math.prod(sizes[f] for f in group) for group in groups)
        if products != meta.shape:
            raise ValueError(f"{call.node.op}: factors {groups} of sizes {dict(sizes)} do not give shape {meta.shape}")
        return tuple(tuple(f for f in group if sizes[f] > 1) for group in groups)

    return Rule(
        inputs=tuple(dims(groups, meta) for groups, meta in zip(inputs, call.inputs, strict=True)),
        outputs=tuple(dims(groups, meta) for groups, meta in zip(outputs, call.outputs, strict=True)),
        sizes=dict(sizes),
        blocked=frozenset(blocked),
        additive=frozenset(additive),
        linear=linear_sets(call, linear),
        lowerings=dict(lowerings or {}),
        joints=dict(joints or {}),
    )


def normal_dim(dim: int, rank: int) -> int:
    """Return a dim counted from the front."""
    return dim + rank if dim < 0 else dim


def normal_dims(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return dims counted from the front; None or empty means all dims."""
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(normal_dim(d, rank) for d in dims) if dims else tuple(range(rank))


def broadcast_groups(shape: tuple[int, ...], factors: Sequence[str], sizes: Mapping[str, int]) -> list[list[str]]:
    """Align a tensor's dims to the right of the factors of a result; broadcast dims have no factor."""
    aligned = factors[len(factors) - len(shape) :]
    return [[f] if size == sizes[f] else [] for f, size in zip(aligned, shape, strict=True)]
