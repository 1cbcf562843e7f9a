"""Test whether forward does the same each time it is called: a graph is one forward, and a program repeats it.

Forward is recorded twice on fake tensors (nothing is computed). Refused are: Python state that it changes (lists,
globals), buffers and parameters that it replaces, Python's and numpy's random numbers, hooks that only observe (a trace
cannot see what they do), and records that differ, as where one forward reads values that the one before has left.
Values that forward computes once and keeps, as tables of positions, are allowed if they depend on constants alone. So
are numbers of modules that it counts or anneals: it does the same again once they are set back, and the program follows
them (`forward_counters.py`).
"""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from autopar.errors import TraceError
from autopar.frontend.admission import where
from autopar.frontend.attributes import (
    INTERNAL,
    SCALARS,
    attributes_of,
    is_a,
    items_of,
    modules_of,
    named_buffers,
    named_modules,
    named_tensors,
    summary,
)
from autopar.frontend.recorder import Record, sources_in
from autopar.frontend.state.cached_values import compute_alike
from autopar.frontend.state.forward_counters import ForwardCounters, changes_state
from autopar.frontend.state.function_caches import is_filled
from autopar.frontend.state.reads import Reads, home_of, noting_reads
from autopar.frontend.state.values import object_kinds
from autopar.frontend.trace_modes.specialization import current_guards

State = dict[tuple[str, str], Any]
"""(module path or function, attribute) -> its value, comparable."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES = frozenset({"torch", "autopar", "transformers", "numpy", "contextlib", "functools", "warnings", "logging"})
_MANY = 100  # items: longer lists are data, not functions
_TRUSTED = ("torch.", "transformers.")
"""Torch's hooks (weight norm) change what forward computes; that is traced. Those of transformers stay on models after
a run, and pass on layers' outputs, which is traced where forward reads them.
"""


def check_repeats(
    model: nn.Module, functions: tuple[Any, ...], run: Callable[[nn.Module], Record], reads: Reads | None = None
) -> None:
    """Raise TraceError, naming the module and the attribute, unless forward repeats. A forward that cannot run so
    passes.

    model: a copy that may be used up, with fake parameters. functions: functions that run besides forward, such as the
    loss. run: one forward of it, recorded. reads: gets the attributes that forward reads.
    """
    silent = _watch_hooks(model)
    names = {id(tensor): name for name, tensor in named_tensors(model)}
    with _own_random_state() as drawn:
        tensors, before, of_classes = _tensors(model), _state(model, functions), _class_state(model, functions)
        numbers = ForwardCounters(model, functions[0] if functions else None)
        try:
            attributes = [member for module in modules_of(model) for member in attributes_of(module).values()]
            with noting_reads(reads or Reads(), object_kinds([*attributes, *functions])):
                first = run(model)
        except TraceError:
            raise
        except Exception:  # failures while it is recorded: the export succeeds, or says why not
            return
        once, kept = _state(model, functions), _tensors(model)
        numbers.note_first(reads or Reads())
        if current_guards():
            changed = (
                _changed(before, once) | _changed(tensors, kept) | _changed(of_classes, _class_state(model, functions))
            )
            _refuse_specialized({*(f"{name} of {path}" for path, name in changed), *numbers.changed_first()})
        replaced = {place for place, member in tensors.items() if id(member) in names and kept.get(place) is not member}
        named = dict(named_tensors(model))
        try:
            second = run(model)
        except Exception:
            _refuse_replaced(replaced, tensors, names)
            raise
        twice = _state(model, functions)
        if numbers.note_second():
            second = run(model)
            numbers.note_third()
        followed = numbers.places() if reads is not None else set()
        if reads is not None:
            reads.advanced |= numbers.kinds()
            _leave_out_caches(reads, model, (_changed(before, once) | _changed(tensors, kept)) - followed)
        kept_on = _tensors(model)
        generator = drawn()
    _refuse_unseen(generator, silent)
    _refuse_state(once, {place: value for place, value in twice.items() if place not in followed})
    stays = {place for place, tensor in kept.items() if place not in tensors and kept_on.get(place) is tensor}
    is_alike = not stays and not replaced and _alike(first.outside, second.outside)
    fixed = [name for name, tensor in named.items() if not tensor.requires_grad]
    if not is_alike and not compute_alike(first, second, named, fixed):
        _refuse_replaced(replaced, tensors, names)
        _refuse_kept(stays, kept, first, _fixed_buffers(model, first))
        raise TraceError(
            "forward computes something else when it is called again",
            values=_difference(first, second),
            alternatives="make forward depend on its inputs, parameters and buffers alone",
        )


# --- what may have changed --------------------------------------------------------------------------------------------


def _state(model: nn.Module, functions: tuple[Any, ...]) -> State:
    """Return plain values of modules and of the globals of their functions, containers one level deep."""
    state: State = {}
    called: list[Any] = [*functions]
    for path, module in _modules(model, functions):
        called.append(type(module).forward)
        for name, value in attributes_of(module).items():
            if name not in INTERNAL:
                state[where(path), name] = _comparable(value)
                called.append(value)
    seen: set[int] = set()
    while called:
        function = called.pop()
        items = items_of(function) if is_a(function, list, tuple) else None
        called += [item for _, item in items] if items and len(items) < _MANY else ()
        function = function.__func__ if is_a(function, types.MethodType) else function
        if is_a(function, types.FunctionType) and id(function) not in seen and not _is_library(function):
            seen.add(id(function))
            used = _used(function)
            called += used.values()
            place = f"{function.__module__}.{function.__qualname__}"
            state |= {(place, name): _comparable(value) for name, value in used.items()}
    return state


def _class_state(model: nn.Module, functions: tuple[Any, ...]) -> State:
    """Return plain values of the user's classes among those of modules."""
    classes = {kind for _, module in _modules(model, functions) for kind in type(module).__mro__}
    return {
        (f"class {kind.__qualname__}", name): value
        for kind in classes
        if home_of(kind) not in ("torch", "builtins")
        for name, value in vars(kind).items()
        if is_a(value, *SCALARS)
    }


def _refuse_specialized(changed: Iterable[str]) -> None:
    """Raise TraceError for state that a forward changes while values of the batch decide what it does."""
    if names := sorted(changed):
        raise TraceError(
            "forward changes Python state, and values of the batch decide what it does",
            values=", ".join(names[:3]),
            alternatives="pass the state, or the values behind it, as an input of the batch",
        )


def _modules(model: nn.Module, functions: tuple[Any, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by their paths, and those of a loss."""
    yield from named_modules(model)
    for loss in functions:
        if is_a(loss, nn.Module):
            yield from ((f"loss_fn.{path}".rstrip("."), module) for path, module in named_modules(loss))


def _changed(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> set[tuple[str, str]]:
    """Return the places of modules where a forward left another value; of a container its own place."""
    places = before.keys() | after.keys()
    unlike = (place for place in places if not _is_kept(before.get(place), after.get(place)))
    return {(path, name.partition("[")[0]) for path, name in unlike}


def _is_kept(one: Any, other: Any) -> bool:
    return one is other if is_a(one, Tensor) or is_a(other, Tensor) else bool(one == other)


def _leave_out_caches(reads: Reads, model: nn.Module, changed: set[tuple[str, str]]) -> None:
    """Stop watching values that forward caches in its first call: it computes the same with and without them."""
    for path, module in named_modules(model):
        lines = reads.attributes.get(type(module), {})
        for name in [name for name in lines if {(path, name), (where(path), name)} & changed]:
            del lines[name]
        filled = [name for name in lines if is_filled(getattr(type(module), name, None))]
        for name in filled:
            del lines[name]
    for space, name in [variable for variable in reads.variables if is_filled(variable[0].values.get(variable[1]))]:
        del reads.variables[space, name]


def _is_library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _used(function: types.FunctionType) -> dict[str, Any]:
    """Return globals and enclosing variables that a function names."""
    used = {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            used[name] = cell.cell_contents
    return used


def _comparable(value: Any) -> Any:
    """Return plain data by value, containers by their items and theirs; other values by type and length."""
    return summary(value, lambda item: (type(item), len(items_of(item) or ())), deepest=1)


def _tensors(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return tensors of modules, in attributes, in lists and in dicts."""
    tensors: dict[tuple[str, str], Tensor] = {}
    for path, module in named_modules(model):
        members = {**attributes_of(module), **module._parameters, **module._buffers}
        for name, value in members.items():
            is_table = is_a(value, dict) and name.startswith("_")
            items = [] if is_table else items_of(value) or []
            tensors |= {(path, f"{name}[{_key(key)}]"): item for key, item in items if is_a(item, Tensor)}
            if is_a(value, Tensor):
                tensors[path, name] = value
    return tensors


def _key(key: Any) -> str:
    return repr(key) if is_a(key, *SCALARS) else f"{type(key).__name__} {id(key)}"


def _refuse_replaced(places: Iterable[Any], tensors: Mapping[Any, Tensor], names: Mapping[int, str]) -> None:
    """Refuse a forward that replaces registered tensors."""
    for place in places:
        raise TraceError(
            "forward replaces a buffer or parameter by another tensor, which the program would not keep",
            values=names[id(tensors[place])],
            alternatives=[
                "use a counter that is changed in place (self.count += 1), which is kept",
                "return the value and assign it in the training loop",
            ],
        )


def _refuse_unseen(generator: str, silent: list[str]) -> None:
    """Raise TraceError for draws from a generator and for hooks that only observe, which a trace cannot see."""
    if generator:
        raise TraceError(
            "forward draws random numbers by an unsupported function of Python, which a trace takes for constants",
            values=f"the state of {generator} changes",
            alternatives=[
                "use torch's random numbers, or those of random.random, uniform, gauss, expovariate, randint and "
                "randrange",
                "pass random tensors as inputs of the batch",
            ],
        )
    if silent:
        raise TraceError(
            "a forward hook returns nothing, so the generated program would not run it",
            values=", ".join(silent),
            alternatives=["remove the hook before compiling", "return the output, a new tensor, from the hook"],
        )


def _refuse_state(once: State, twice: State) -> None:
    for (path, name), value in twice.items():
        if once.get((path, name)) != value:
            raise changes_state(f"{name} of {path}")


def _refuse_kept(
    places: set[tuple[str, str]], kept: Mapping[Any, Tensor], record: Record, fixed: frozenset[str]
) -> None:
    """Refuse values kept from the first forward that depend on its batch, on parameters, or on buffers that it writes.

    fixed: the other buffers.
    """
    for place in sorted(places):
        if not _is_constant(kept[place], record, fixed):
            path, name = place
            raise TraceError(
                "forward keeps a tensor of its first batch and uses it later",
                values=f"{name} of {where(path)}",
                alternatives="compute it in every forward, or as a buffer in the constructor",
            )


def _fixed_buffers(model: nn.Module, record: Record) -> frozenset[str]:
    """Return the buffers that a recorded forward does not write to."""
    calls = (entry for entry in record.outside if isinstance(entry[0], OpOverload) and entry[0]._schema.is_mutable)
    written = {source[1] for entry in calls for source in sources_in(entry[1])}
    return frozenset(name for name, _ in named_buffers(model) if ("tensor", name) not in written)


def _is_constant(tensor: Tensor, record: Record, fixed: frozenset[str]) -> bool:
    """Return whether a record's tensor is computed from constants alone."""
    waiting = [record.name_of(tensor)]
    seen: set[Any] = set()
    while waiting:
        name = waiting.pop()
        if name is None or name[0] == "input" or (name[0] == "tensor" and name[1] not in fixed):
            return name is None
        if name[0] == "result" and name not in seen:
            seen.add(name)
            waiting += [source[1] for source in sources_in(record.outside[name[1] - 1][1])]
    return True


def _alike(one: Any, two: Any) -> bool:
    """Return whether two values are equal; nan equals itself, and incomparable values are equal if their types are."""
    if isinstance(one, (tuple, list)) and type(one) is type(two):
        return len(one) == len(two) and all(map(_alike, one, two))
    try:
        return bool(one == two) or (isinstance(one, float) and isinstance(two, float) and one != one and two != two)
    except NotImplementedError:
        return type(one) is type(two)


def _difference(first: Record, second: Record) -> str:
    pairs = zip(first.outside, second.outside, strict=False)
    entry = next((b for a, b in pairs if not _alike(a, b)), None)
    number = f"{len(first.outside)} and then {len(second.outside)} operators"
    return number if entry is None else f"{entry[0]} takes other operands ({number})"


# --- hooks and generators ---------------------------------------------------------------------------------------------


def _watch_hooks(model: nn.Module) -> list[str]:
    """Wrap the forward hooks of `model`; the list fills with those that returned nothing."""
    silent: list[str] = []

    def watched(hook: Callable[..., Any], label: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            if result is None and label not in silent:
                silent.append(label)
            return result

        return call

    for path, module in named_modules(model):
        for table in _HOOKS:
            hooks = getattr(module, table)
            for key, hook in list(hooks.items()):
                home = getattr(hook, "__module__", None) or type(hook).__module__
                if not home.startswith(_TRUSTED) and not type(hook).__module__.startswith(_TRUSTED):
                    name = getattr(hook, "__qualname__", type(hook).__name__)
                    hooks[key] = watched(hook, f"{name} on {where(path)}")
    return silent


@contextlib.contextmanager
def _own_random_state() -> Iterator[Callable[[], str]]:
    """Context manager that restores generators; the yielded function names one that was drawn from."""
    python, numpys, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()

    def drawn() -> str:
        if random.getstate() != python:
            return "random"
        now = np.random.get_state()
        same = all(np.array_equal(a, b) for a, b in zip(numpys, now, strict=True))
        return "" if same else "numpy.random"

    try:
        yield drawn
    finally:
        random.setstate(python)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
