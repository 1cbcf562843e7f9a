"""Values of tensors that forward computes from numbers alone: `if mask.any():` of a mask of ones has a known answer.

Each call whose tensors are all constants also runs on real ones, so that values that forward asks for (`bool`, `item`,
`tolist`) are known. Writes are followed. Not followed are constants of more than MOST_ELEMENTS, random draws, and
uninitialized memory. Small buffers that forward does not write, such as a flag for a filled codebook, answer from their
values: the program is made for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

from autopar.errors import TraceError
from autopar.frontend.attributes import named_modules
from autopar.frontend.skeleton import VALUE
from autopar.frontend.state.reads import note_deciding
from autopar.operators.traits import FILLED_FROM_OPERAND

MOST_ELEMENTS = 1 << 22
ASKS = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "equal", "allclose"}
)
_SHAPED = FILLED_FROM_OPERAND | {"new_tensor"}
"""Operators that use only the shape, dtype and device of their operand."""
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
"""Types of arguments that have no parts."""
_UNSET = ("empty", "new_empty", "resize")
_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset({"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATIONS)})


class Constants(TorchFunctionMode):
    """Context manager in which constants have values, and questions for them are answered."""

    def __init__(self, module: nn.Module | None = None) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # id -> (the tensor, which keeps its id, and its value)
        self._owners = [] if module is None else list(_small_buffers(module))
        self._sources: dict[int, frozenset[str]] = {}  # id of a constant -> the buffers that it was computed from
        self._asked: set[str] = set()
        self._written: set[str] = set()

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        if kind is None and (names := sorted(self._asked & self._written)):
            raise TraceError(
                "a buffer that forward writes decides what forward does, but a program is made for one value",
                values=", ".join(names),
                alternatives=[
                    "use a number or a flag as an attribute of the module, which autopar follows",
                    "use torch.where, which computes both cases",
                ],
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._owners:
            self._find_buffers(tensors)
        if tensors and name not in _SHAPED and not any(id(tensor) in self._known for tensor in tensors):
            return func(*args, **kwargs)
        are_known = all(id(tensor) in self._known for tensor in tensors)
        by_place = self._by_place(func, name, args, kwargs)
        if by_place is not None:
            return by_place
        if name in ASKS and tensors and are_known:
            self._ask(*tensors)
            return run_on_values(func, self._values(args), self._values(kwargs))
        result = func(*args, **kwargs)
        if name in _SHAPED:
            are_known = all(id(tensor) in self._known for tensor in tensors[1:])
        results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        is_small = all(is_static(tensor) for tensor in (*results, *tensors)) and _numel(results) <= MOST_ELEMENTS
        is_followed = are_known and is_small and not name.startswith(_UNSET) and not isinstance(func, OpOverloadPacket)
        if not is_followed or (isinstance(func, OpOverload) and func._schema.is_mutable):
            if may_write(func, name, kwargs):
                self._forget(tensors)
            return result
        if may_write(func, name, kwargs) and (buffers := self._buffers_of(tensors[:1])):
            self._written |= buffers
            self._forget(tensors[:1])
            return result
        if results or name in _WRITES:
            self._follow(func, _shaped(args) if name in _SHAPED else args, kwargs, results, tensors)
        return result

    def _find_buffers(self, tensors: list[Tensor]) -> None:
        """Register buffers among tensors: an export replaces the buffers in the module by others."""
        for tensor in tensors:
            if id(tensor) in self._known or tensor.requires_grad:
                continue
            for attributes, attribute, name, value in self._owners:
                if attributes.get(attribute) is tensor and name not in self._written:
                    self._known[id(tensor)], self._sources[id(tensor)] = (tensor, value), frozenset({name})

    def _buffers_of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        return frozenset().union(
            *(self._sources.get(id(tensor), ()) for tensor in tensors if id(tensor) in self._known)
        )

    def _ask(self, *tensors: Tensor) -> None:
        """Note that forward asks for values of these tensors."""
        names = self._buffers_of(tensors)
        self._asked |= names
        note_deciding(names)

    def _by_place(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return a selection by a mask of known values, which selects a known number of rows; None for other calls."""
        if name in ("nonzero", "where") and len(args) == 1 and self._is_mask(args[0]):
            places = self._places(args[0])
            return places if name == "where" or kwargs.get("as_tuple") else torch.stack(places, -1)
        if name == "masked_select" and len(args) == 2 and self._is_mask(args[1]):
            x, mask = args
            shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
            return self._selected(x.expand(shape), mask, 0, shape)
        if name == "__getitem__" and isinstance(args[0], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            at = next((i for i, part in enumerate(index) if self._is_mask(part)), None)
            if at is None or any(isinstance(part, (Tensor, list)) for i, part in enumerate(index) if i != at):
                return None
            if all(isinstance(part, slice) and part == slice(None) for i, part in enumerate(index) if i != at):
                return self._selected(args[0], index[at], at, index[at].shape)
            return func(args[0], (*index[:at], *self._places(index[at]), *index[at + 1 :]))
        return None

    def _selected(self, x: Tensor, mask: Tensor, start: int, shape: Sequence[int]) -> Tensor:
        """Return x[mask], where the mask's dims begin at `start`. Where all rows have one mask, indices do not depend
        on rows.
        """
        lead, rank = 0, len(shape)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            value = self._value(mask).expand(shape)
            while lead < rank - 1 and value.shape[0] and bool((value == value[:1]).all()):
                lead, value = lead + 1, value[0]
            places = value.reshape(-1).nonzero().view(-1)
        rows = x.flatten(start + lead, start + rank - 1).index_select(start + lead, self._noted(places))
        return rows.flatten(start, start + lead) if lead else rows

    def _is_mask(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0 and id(value) in self._known

    def _places(self, mask: Tensor) -> tuple[Tensor, ...]:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            places = self._value(mask).nonzero(as_tuple=True)
        return tuple(map(self._noted, places))

    def _value(self, mask: Tensor) -> Tensor:
        self._ask(mask)
        return self._known[id(mask)][1]

    def _noted(self, value: Tensor) -> Tensor:
        """Return a tensor of values that were computed while forward is traced."""
        self._known[id(value)] = value, value
        return value

    def _follow(self, func: Any, args: Any, kwargs: Any, results: list[Tensor], tensors: list[Tensor]) -> None:
        """Note the values of results, computed here."""
        try:
            result = run_on_values(func, self._values(args), self._values(kwargs))
        except Exception:  # random, or not computable here (another device): unknown
            self._forget(tensors)
            return
        values = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        if len(values) == len(results):
            self._known |= {id(tensor): (tensor, value) for tensor, value in zip(results, values, strict=True)}
            if buffers := self._buffers_of(tensors):
                self._sources |= {id(tensor): buffers for tensor in results}

    def _values(self, arguments: Any) -> Any:
        return tree_map(lambda leaf: self._known[id(leaf)][1] if id(leaf) in self._known else leaf, arguments)

    def _forget(self, tensors: list[Tensor]) -> None:
        """Drop the values of tensors that share memory with any of `tensors`."""
        self._written |= self._buffers_of(tensors)
        lost = {self._known[id(t)][1].untyped_storage().data_ptr() for t in tensors if id(t) in self._known}
        if lost:
            self._known = {k: v for k, v in self._known.items() if v[1].untyped_storage().data_ptr() not in lost}


def _small_buffers(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, str, Tensor]]:
    """Yield (table of a module, name in it, name in the model, value) of a skeleton's small buffers."""
    for path, part in named_modules(module):
        for name, buffer in part._buffers.items():
            value = getattr(buffer, VALUE, None)
            if value is not None:
                yield part._buffers, name, f"{path}.{name}".lstrip("."), value


class Unwritten(TorchFunctionMode):
    """Context manager after which real tensors that forward writes to have their old values again.

    Fake tensors are not touched. A write that depends on numbers alone would otherwise reach the real tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if may_write(func, str(getattr(func, "__name__", "")), kwargs):
            for tensor in (leaf for leaf in tree_iter((args[:1], kwargs.get("out"))) if isinstance(leaf, Tensor)):
                if type(tensor) is Tensor and not tensor.is_meta and id(tensor) not in self._before:
                    with _disable_current_modes(), torch._C.DisableTorchFunction():
                        self._before[id(tensor)] = tensor, tensor.detach().clone()
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for tensor, value in self._before.values():
                tensor.detach().copy_(value)


def leaves(arguments: Any) -> Iterator[Any]:
    """Yield the leaves as `tree_iter` does, which takes ten times as long for a few tensors and numbers."""
    kind = type(arguments)
    if kind is tuple or kind is list:
        for argument in arguments:
            yield from leaves(argument)
    elif kind is dict:
        for argument in arguments.values():
            yield from leaves(argument)
    elif kind in _PLAIN or issubclass(kind, Tensor):
        yield arguments
    else:
        yield from tree_iter(arguments)


def is_static(tensor: Tensor) -> bool:
    """Return whether a tensor's shape consists of numbers, and of no size that depends on values."""
    return all(isinstance(size, int) for size in tensor.shape)


def _numel(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def may_write(func: Any, name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch called `name` writes to its first operand or to `out`."""
    if isinstance(func, OpOverload):
        return func._schema.is_mutable
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _WRITES or "out" in kwargs or isinstance(func, OpOverloadPacket)


def _shaped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with a real tensor shaped like the first operand, whose values do not count."""
    first, *rest = args
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.empty(first.shape, dtype=first.dtype, device="cpu"), *rest


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse operators that draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


def run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of the call on real tensors, outside all tracing modes."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), _Draws():  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)
