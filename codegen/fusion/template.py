"""Patterns: a small tree of calls over a lowered program or a traced graph, and the calls that replace it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from codegen.program import Call, TensorType, Var

FLOATS: Final = ("float32", "bfloat16", "float16", "float64")
VIEWS: Final = ("aten.view.default", "aten.reshape.default")
"""Calls that give a tensor another shape."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor that the pattern reads; under one name always the same one."""

    name: str


@dataclass(frozen=True, slots=True)
class Value:
    """An argument that is no variable, whatever it is."""

    name: str


@dataclass(frozen=True, slots=True)
class Is:
    """An argument that equals `value`."""

    value: Any


@dataclass(frozen=True, slots=True)
class Op:
    """The single result of a call of `target` on `args`; commutes: the first two in either order.

    keywords: the keyword arguments that it may have, bound under their own names. name: binds the call itself, and the
    statement that it is; under one name always the same one.
    """

    target: str
    args: tuple[Template, ...]
    commutes: bool = False
    keywords: tuple[str, ...] = ()
    name: str = ""


@dataclass(frozen=True, slots=True)
class Either:
    """Any of the options; the first that leads to a match is taken."""

    options: tuple[Template, ...]


@dataclass(frozen=True, slots=True)
class Behind:
    """`x`, also behind calls of `targets` on it, any number of them."""

    targets: tuple[str, ...]
    x: Template


Template = Leaf | Value | Is | Op | Either | Behind | tuple["Template", ...]
"""A tuple stands for an argument that is one, item by item."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The value of a name of a pattern. origin: the statement that made it (-1: none here); of a call, the statement
    itself."""

    value: Any
    origin: int = -1

    @property
    def type(self) -> TensorType:
        """The type of a Leaf's variable."""
        value_type: TensorType = self.value.type
        return value_type


Bindings = Mapping[str, Bound]


def _always(bound: Bindings, num_token_ranks: int) -> bool:
    return True


def fused(
    target: str, bound: Bindings, names: tuple[str, ...], last: Call, kwargs: tuple[tuple[str, Any], ...] = ()
) -> Call:
    """A call of `target` on what `names` stand for, with the result of `last`."""
    return Call(target, tuple(bound[n].value for n in names), kwargs, last.results, section=last.section)


def on_leaves(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    """The pattern's kernel on its leaves."""
    return (fused(pattern.target, bound, pattern.leaves, last),)


def argument_types(call: Call) -> tuple[TensorType | None, ...]:
    """Types of a call's positional arguments, None for those that are no variables."""
    return tuple(arg.type if isinstance(arg, Var) else None for arg in call.args)


def like_first(call: Call) -> tuple[TensorType | None, ...]:
    """Results of the first argument's shape and dtype."""
    return argument_types(call)[:1] * len(call.results)


ChunkRows = Callable[[int, int, bool], int]
"""(rows, columns, whether on a CPU) -> rows of a chunk of a matrix that a kernel computes chunk by chunk."""


@dataclass(frozen=True, slots=True)
class Result:
    """A result of a kernel beside its last one: of the call that the template names so.

    leaves: what the kernel makes it of. is_call: it is what the call itself makes, which the kernel keeps as its input.
    """

    name: str
    leaves: tuple[str, ...]
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """A run of calls to find, and the kernel that replaces it.

    target: the kernel. leaves: tensors from which it computes its last result, in its order; a match may lack the last.
    template: the last call. beside: calls that stand before it and do not lead to it. results: which of the others have
    results of the kernel; those may be read outside, after the last call. fits: whether it is for these shapes and
    dtypes. build: (the pattern, bindings, the pattern's last call) -> the calls that take its place, of which the last
    makes the same results; one that nobody reads is UNREAD there. result_types: shapes and dtypes of the results of the
    kernel's call, which verify.py checks. pays: whether it is worth it, where so many ranks share the rows of a
    micro-batch; if not, another pattern may have some of the calls.

    saves: leaves that the kernel's autograd function saves for backward, parameters that it does not read left out.
    row_bytes: further bytes that it saves for each row of the first leaf.

    launches: kernels that it starts, forward and backward; in backward, partial sums of a weight's and a bias' gradient
    are added up. products, torch_calls: further calls of torch, forward and backward. chunk_rows: of a linear layer
    with its loss, whose forward also computes the gradients, chunk by chunk. needs_whole: the last dim of its tensors
    may not be cut. on_cpu: it is one call on a CPU too, where references of the others are the calls that they stand
    for. is_linear: in what may be a partial sum, so that intermediates may be one. no_gradient: leaves whose gradient
    is another tensor's, handed on.
    """

    name: str
    target: str
    leaves: tuple[str, ...]
    template: Op
    fits: Callable[[Bindings], bool]
    build: Callable[[Pattern, Bindings, Call], tuple[Call, ...]] = on_leaves
    result_types: Callable[[Call], tuple[TensorType | None, ...]] = like_first
    pays: Callable[[Bindings, int], bool] = _always
    beside: tuple[Op, ...] = ()
    results: tuple[Result, ...] = ()
    saves: tuple[str, ...] = ()
    row_bytes: int = 0
    launches: tuple[int, int] = (1, 1)
    products: tuple[int, int] = (0, 0)
    torch_calls: tuple[int, int] = (0, 0)
    chunk_rows: ChunkRows | None = None
    needs_whole: bool = False
    on_cpu: bool = False
    is_linear: bool = False
    no_gradient: tuple[str, ...] = ()


def is_dtype(bound: Bound, name: str) -> bool:
    """Whether a bound argument is torch's dtype of that name."""
    return str(bound.value) == f"torch.{name}"
