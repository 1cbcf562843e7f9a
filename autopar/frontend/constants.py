"""Values of tensors that forward makes of nothing but numbers: `if mask.any():` of a mask of ones decides nothing new.

Beside each call whose tensors are all constants the same call runs on real ones, so that a value that forward asks
for (`bool`, `item`, `tolist`) is known. What a call writes to is followed; constants of more than MOST_ELEMENTS are
not, nor is what is drawn at random or left as memory was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map

MOST_ELEMENTS = 1 << 22
_ASKS = frozenset(
    {"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "equal", "allclose"}
)
_LIKE = frozenset(f"{what}_like" for what in ("ones", "zeros", "full"))
_NEW = frozenset(f"new_{what}" for what in ("ones", "zeros", "full", "tensor"))
"""Of which only the shape, dtype and device of the operand count."""
_UNSET = ("empty", "new_empty", "resize")
_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset({"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATIONS)})


class Constants(TorchFunctionMode):
    """Within it values of constants are known, and answered where they are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the tensor, which keeps its id, and its value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(func, "__name__", ""))
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        are_known = all(id(tensor) in self._known for tensor in tensors)
        if name in _ASKS and tensors and are_known:
            return _run(func, self._values(args), self._values(kwargs))
        result = func(*args, **kwargs)
        if name in _LIKE | _NEW:
            are_known = all(id(tensor) in self._known for tensor in tensors[1:])
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        is_small = all(is_static(tensor) for tensor in (*made, *tensors)) and _numel(made) <= MOST_ELEMENTS
        is_followed = are_known and is_small and not name.startswith(_UNSET) and not isinstance(func, OpOverloadPacket)
        if not is_followed or (isinstance(func, OpOverload) and func._schema.is_mutable):
            if may_write(func, name, kwargs):
                self._forget(tensors)
            return result
        if made or name in _WRITES:
            self._follow(func, _shaped(args) if name in _LIKE | _NEW else args, kwargs, made, tensors)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, made: list[Tensor], tensors: list[Tensor]) -> None:
        """Notes the values of what was made, and makes them."""
        try:
            result = _run(func, self._values(args), self._values(kwargs))
        except Exception:  # what is drawn, or cannot be made here (another device): not known
            self._forget(tensors)
            return
        found = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        if len(found) == len(made):
            self._known |= {id(tensor): (tensor, value) for tensor, value in zip(made, found, strict=True)}

    def _values(self, arguments: Any) -> Any:
        return tree_map(lambda leaf: self._known[id(leaf)][1] if id(leaf) in self._known else leaf, arguments)

    def _forget(self, tensors: list[Tensor]) -> None:
        """No longer knows what shares memory with any of `tensors`."""
        lost = {self._known[id(t)][1].untyped_storage().data_ptr() for t in tensors if id(t) in self._known}
        if lost:
            self._known = {k: v for k, v in self._known.items() if v[1].untyped_storage().data_ptr() not in lost}


class Unwritten(TorchFunctionMode):
    """Within it tensors with memory that forward writes to are written to; after it they are as they were.

    Fake tensors are not touched. A write that depends on numbers alone reaches the tensor itself otherwise.
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


def is_static(tensor: Tensor) -> bool:
    """Whether a tensor's shape is of numbers, not of what a value decides."""
    return all(isinstance(size, int) for size in tensor.shape)


def _numel(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def may_write(func: Any, name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of torch called `name` writes to its first operand or to `out`."""
    if isinstance(func, OpOverload):
        return func._schema.is_mutable
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _WRITES or "out" in kwargs or isinstance(func, OpOverloadPacket)


def _shaped(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with a real tensor like the first, whose values do not count."""
    first, *rest = args
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return torch.empty(first.shape, dtype=first.dtype, device="cpu"), *rest


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that draw random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The call on real tensors, outside of all that traces."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad(), _Draws():  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)
