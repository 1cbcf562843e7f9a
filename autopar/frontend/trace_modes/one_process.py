"""Answer torch.distributed as for one process, while forward is traced or run for comparison.

A program distributes one process's computation, so forward and the loss get the answers of one process: rank 0 of 1,
and collectives that return their operands. Calls without such a meaning (messages to another rank, groups, device
meshes) are refused with the user's line. The code of the functions themselves is exchanged, for this thread and while
the context lasts, so that names that a script imported are answered, too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from autopar.errors import TraceError
from autopar.frontend.fakes import in_this_thread
from autopar.frontend.user_line import called_at
from codegen.runtime.processes import is_own_group

PLACE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "ROLE_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "1",
}
"""Environment variables that torchrun sets for the only process of a run."""

_MODULES = (
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.functional",
    "torch.distributed._functional_collectives",
    "torch.distributed.device_mesh",
)
_MESH_METHODS = ("__init__", "get_group", "get_all_groups", "get_rank", "get_local_rank", "get_coordinate", "size")
_LEFT = frozenset(
    (
        "is_available",
        "is_torchelastic_launched",
        "supports_complex",
        "get_default_backend_for_device",
        "get_backend_config",
        "get_pg_count",
        *(f"is_{name}_available" for name in ("backend", "gloo", "mpi", "nccl", "ucc", "xccl")),
    )
)
"""Functions that need nothing from other ranks."""


class _FinishedWork:
    """Handle of a finished collective."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _SelfGroup:
    """Process group whose only member is this process."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _ended(is_asynchronous: bool) -> _FinishedWork | None:
    return _FinishedWork() if is_asynchronous else None


def _in_place(tensor: Any, *args: Any, async_op: bool = False, **named: Any) -> Any:
    return _ended(async_op)


def _to_list(outputs: Any, value: Any, *args: Any, async_op: bool = False, **named: Any) -> Any:
    outputs[0].copy_(value)
    return _ended(async_op)


def _to_tensor(output: Tensor, value: Tensor, *args: Any, async_op: bool = False, **named: Any) -> Any:
    output.copy_(value.reshape(output.shape))
    return _ended(async_op)


def _from_list(output: Tensor, values: Any, *args: Any, async_op: bool = False, **named: Any) -> Any:
    output.copy_(values[0])
    return _ended(async_op)


def _all_to_all(outputs: Any, values: Any, *args: Any, async_op: bool = False, **named: Any) -> Any:
    return _to_list(outputs, values[0], async_op=async_op)


def _gather(value: Tensor, gather_list: Any = None, *args: Any, async_op: bool = False, **named: Any) -> Any:
    return _to_list(gather_list, value, async_op=async_op)


def _scatter(output: Tensor, scatter_list: Any = None, *args: Any, async_op: bool = False, **named: Any) -> Any:
    return _from_list(output, scatter_list, async_op=async_op)


def _objects(outputs: list[Any], value: Any, *args: Any, **named: Any) -> None:
    outputs[0] = value


def _first(value: Any, *args: Any, **named: Any) -> Any:
    return value


def _none(*args: Any, **named: Any) -> None:
    return None


def _is_initialized() -> bool:
    # A group that autopar started is invisible to the script, which would have had none on one process.
    return dist.GroupMember.WORLD is not None and not is_own_group()


_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_initialized": _is_initialized,
    "get_rank": lambda *args, **named: 0,
    "get_node_local_rank": lambda *args, **named: 0,
    "get_group_rank": lambda *args, **named: 0,
    "get_global_rank": lambda *args, **named: 0,
    "get_world_size": lambda *args, **named: 1,
    "get_process_group_ranks": lambda *args, **named: [0],
    "get_backend": lambda *args, **named: "gloo",
    "new_group": lambda *args, **named: _SelfGroup(),
    "barrier": lambda *args, async_op=False, **named: _ended(async_op),
    "monitored_barrier": _none,
    "all_reduce": _in_place,
    "broadcast": _in_place,
    "reduce": _in_place,
    "all_reduce_coalesced": _in_place,
    "all_gather": _to_list,
    "all_gather_into_tensor": _to_tensor,
    "all_gather_single": _to_tensor,
    "_all_gather_base": _to_tensor,
    "reduce_scatter": _from_list,
    "reduce_scatter_tensor": _to_tensor,
    "reduce_scatter_single": _to_tensor,
    "_reduce_scatter_base": _to_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _to_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather_object": _objects,
    "broadcast_object_list": _none,
    "gather_object": lambda value, object_gather_list=None, *args, **named: _objects(object_gather_list, value),
    "scatter_object_list": lambda outputs, values, *args, **named: _objects(outputs, values[0]),
}
"""Answers by functions of torch.distributed."""

_DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "broadcast": _first,
    "reduce": _first,
    "all_reduce": _first,
    "all_gather": lambda value, *args, **named: (value,),
    "gather": lambda value, *args, **named: [value],
    "scatter": lambda values, *args, **named: values[0],
    "reduce_scatter": lambda output, values, *args, **named: values[0],
    "all_to_all": lambda outputs, values, *args, **named: tuple(values),
    "all_to_all_single": lambda output, value, *args, **named: value,
    "_all_gather_base": lambda output, value, *args, **named: value,
}
"""Answers by functions of torch.distributed.nn.functional."""

_FUNCTIONAL: dict[str, Callable[..., Any]] = dict.fromkeys(
    (
        "wait_tensor",
        "broadcast",
        "all_reduce",
        "all_gather_tensor",
        "all_gather_tensor_autograd",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_autograd",
        "all_to_all_single",
        "all_to_all_single_autograd",
        "permute_tensor",
    ),
    _first,
)
"""Answers by functions of torch.distributed._functional_collectives."""


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """Context manager in which torch.distributed and torchrun's environment answer this thread as for one process."""
    if not dist.is_available():
        yield
        return
    place = {name: value for name, value in PLACE.items() if name in os.environ}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, place))
        for function, answer in _answers():
            stack.enter_context(_answered(function, answer))
        mesh = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
        for name in _MESH_METHODS:
            if inspect.isfunction(original := getattr(mesh, name, None)):
                call = in_this_thread(_refused(f"device_mesh.DeviceMesh.{name}"), original)
                stack.enter_context(mock.patch.object(mesh, name, call))
        yield


@functools.cache
def _answers() -> list[tuple[types.FunctionType, Callable[..., Any]]]:
    """Return each public function of torch.distributed with its answer."""
    return list(_each_answer())


def _each_answer() -> Iterator[tuple[types.FunctionType, Callable[..., Any]]]:
    for module, answers in zip(_MODULES, (_ANSWERS, _DIFFERENTIABLE, _FUNCTIONAL, {}), strict=True):
        functions = vars(importlib.import_module(module))
        public = functions.get("__all__", ()) if answers is _ANSWERS else ("init_device_mesh",) if not answers else ()
        for name in dict.fromkeys((*answers, *public)):
            function = functions.get(name)
            if type(function) is not types.FunctionType:  # isinstance has deprecated names of torch warn
                continue
            if name not in _LEFT and function.__module__ == module:
                yield function, answers.get(name) or _refused(f"{module.removeprefix('torch.distributed.')}.{name}")


def _refused(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        line = called_at()
        raise TraceError(
            "forward or the loss calls a function of torch.distributed that one process cannot answer",
            values=f"torch.distributed.{name.removeprefix('distributed_c10d.')}" + (f" at {line}" if line else ""),
            alternatives=[
                "leave it out: the program distributes the whole batch's computation itself",
                "use dist.get_rank(), dist.get_world_size() and collectives, which answer as in one process",
            ],
        )

    return call


_replaced: dict[str, Callable[..., Any]] = {}
"""Replacements of functions whose code is exchanged, by a key in the new code."""


@contextlib.contextmanager
def _answered(function: types.FunctionType, answer: Callable[..., Any]) -> Iterator[None]:
    """Context manager in which `function`, under any name, gives the answer to calls of this thread."""
    inner = next((cell for cell in function.__closure__ or () if inspect.isfunction(cell.cell_contents)), None)
    if inner is not None:  # torch's decorator, which calls the function in its cell
        original = inner.cell_contents
        inner.cell_contents = in_this_thread(answer, original)
        try:
            yield
        finally:
            inner.cell_contents = original
        return
    if function.__closure__:
        yield
        return
    code, key = function.__code__, f"{function.__module__}.{function.__qualname__}"
    original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    before = _replaced.get(key)
    _replaced[key] = in_this_thread(answer, original)
    function.__code__ = _standing_for(key)
    try:
        yield
    finally:
        function.__code__ = code
        if before is None:
            del _replaced[key]
        else:
            _replaced[key] = before


@functools.cache
def _standing_for(key: str) -> types.CodeType:
    """Return the code of a function that calls `answer`. It runs among torch's globals, so it imports `answer`."""
    text = f"def call(*args, **kwargs):\n from {__name__} import answer\n return answer({key!r}, args, kwargs)\n"
    namespace: dict[str, Any] = {}
    exec(compile(text, __file__, "exec"), namespace)  # constant text except a function's name
    code: types.CodeType = namespace["call"].__code__
    return code


def answer(key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the replacement of a function whose code is exchanged."""
    return _replaced[key](*args, **kwargs)
