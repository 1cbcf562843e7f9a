"""What a model and its loss hold beside parameters' values, as a trace read it; and what has changed since.

A program is made of constants that may change between steps: numbers, flags, plain tensors, buffers, submodules, modes.
`ModelState` keeps what the trace read (`state_reads.py`), asks in some hundred microseconds whether all of it is the
same, and says what is not. Large tensors that are written through `.data` in place are not seen: torch counts no such
write.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.admission import where
from autopar.frontend.state_reads import ClassData, Globals, Line, Reads, text_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_FOREIGN = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "numpy", "logging", "threading"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
_MOST_LEAVES, _MOST_DEPTH = 2000, 6
_SMALL, _MOST_SMALL = 4096, 16
"""Elements of tensors whose values are compared, and how many tensors are."""

Key = tuple[str, str, tuple[Any, ...]]
"""Where a value is: a kind of place, the path of it, and the steps within what is there."""


@dataclass(frozen=True)
class Change:
    """One thing that is no longer as it was. name: in words. old, new: the values. line: that read it.

    key: where another process has it; None for what cannot be moved there. buffer: its name, of a buffer. is_of_parts:
    of what the model is made of, and not of what is in it.
    """

    name: str
    old: Any
    new: Any
    line: str = ""
    key: Key | None = None
    buffer: str = ""
    is_of_parts: bool = False

    @property
    def is_followable(self) -> bool:
        return self.is_number or self.is_tensor

    @property
    def is_movable(self) -> bool:
        """Whether another process can be given it."""
        return self.key is not None and (_is_plain(self.new) or isinstance(self.new, Tensor))

    @property
    def is_number(self) -> bool:
        return all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (self.old, self.new))

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.old, Tensor) and isinstance(self.new, Tensor)

    def __str__(self) -> str:
        at = f", read at {self.line}" if self.line else ""
        return f"{self.name}: {_shown(self.old)} then, {_shown(self.new)} now{at}"


class Missing:
    """Stands for the value of something that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class ModelState:
    """A model's state and its loss's. reads: what a trace read of it, all of it where that is not known."""

    def __init__(self, model: nn.Module, loss_fn: Any = None, reads: Reads | None = None) -> None:
        self.model, self.loss_fn, self.reads = model, loss_fn, reads or Reads()
        self.note()

    def __getstate__(self) -> Any:
        return self.model, self.loss_fn, self.reads

    def __setstate__(self, state: Any) -> None:
        self.model, self.loss_fn, self.reads = state
        self.note()

    # What there is ----------------------------------------------------------------------------------------------------

    def twin(self) -> ModelState:
        """Another state, of the same model, which takes it as this one has."""
        made = object.__new__(ModelState)
        vars(made).update(vars(self))
        return made

    def note(self, keep_modes: bool = False) -> None:
        """Take all of it as it is now. keep_modes: but for the modes of modules."""
        modes = self._modes if keep_modes else None
        self._attributes: list[_Attributes] = []
        self._tables: list[tuple[str, str, dict[str, Any], tuple[Any, ...]]] = []
        self._roots: dict[Key, _Root] = {}
        self._aliases: list[tuple[Any, Any, str, Any]] = []
        self._deep: set[int] = set()
        modules = dict(self._modules())
        for path, module in modules.items():
            self._watch(path, module)
        for (space, name), line in self.reads.variables.items():
            if name in space.values:
                self._watch_value(("variable", name, (space,)), f"{name} of {space.label}", line, space)
        self._watch_loss()
        parameters = [p for _, kind, _, held in self._tables if kind == "_parameters" for p in held if p is not None]
        self._parameters, self._is_trained = parameters, [p.requires_grad for p in parameters]
        self._buffers = {
            name: b for path, m in modules.items() for name, b in _named(path, m._buffers) if not b.is_inference()
        }
        self._versions = [b._version for b in self._buffers.values()]
        self._places = [_place(b) for b in self._buffers.values()]
        small = [(name, b) for name, b in self._buffers.items() if b.numel() <= _SMALL and not b.is_meta]
        self._copies = [(name, b, b.detach().clone()) for name, b in small[:_MOST_SMALL]]
        self._modes = modes or {path: module.training for path, module in modules.items()}
        self._hooks = [vars(module)[table] for module in modules.values() for table in _HOOKS]
        self._num_hooks = sum(map(len, self._hooks))

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self.model.named_modules()
        if isinstance(self.loss_fn, nn.Module):
            yield from self.loss_fn.named_modules(prefix="loss_fn")

    def _lines(self, module: nn.Module) -> Mapping[str, Line | None]:
        """The attributes of a module that were read; all where that is not known."""
        known = self.reads.attributes.get(type(module), {})
        if self.reads.is_complete:
            return known
        return {**dict.fromkeys(name for name in vars(module) if not name.startswith("_")), **known}

    def _watch(self, path: str, module: nn.Module) -> None:
        own, lines, plain = vars(module), self._lines(module), ["training"]
        inherited = []
        for name, line in lines.items():
            if name in _INTERNAL or name == "training":
                continue
            if name not in own:
                inherited.append(name)
                self._watch_class(type(module), name, line)
            elif _is_plain(own[name]):
                plain.append(name)
            else:
                self._watch_value(("attribute", path, (name,)), f"{name} of {where(path)}", line, own)
        self._attributes.append(_Attributes(path, module, tuple(plain), tuple(inherited)))
        for table in ("_modules", "_parameters", "_buffers"):
            held = own[table]
            if held:
                self._tables.append((path, table, held, tuple(held.values())))

    def _watch_class(self, kind: type, name: str, line: Line | None) -> None:
        owner = next((each for each in kind.__mro__ if name in vars(each)), None)
        if owner is None or owner.__module__.partition(".")[0] in _FOREIGN or not _is_value(vars(owner)[name]):
            return
        space = ClassData(owner)
        self._watch_value(("variable", name, (space,)), f"{name} of {space.label}", line, space)

    def _watch_value(self, key: Key, name: str, line: Line | None, holder: Any) -> None:
        """Watch what `holder` (attributes of a module, a namespace) has under the key's name."""
        own, at = (holder, key[2][0]) if key[0] == "attribute" else (holder.values, key[1])
        value = own[at]
        self._aliases.append((own if key[0] == "attribute" else None, holder, at, value))
        is_opaque = _is_plain(value) or isinstance(value, Tensor)
        if key in self._roots or (not is_opaque and id(value) in self._deep):
            return
        self._deep.add(id(value))
        if key[0] == "attribute":
            root = _Root(key, name, line, functools.partial(own.get, at, MISSING), None)
        else:
            root = _Root(key, name, line, lambda: holder.values.get(at, MISSING), None)
        self._roots[key] = root

    def _watch_loss(self) -> None:
        """Closures, arguments and attributes of a loss that is no module, and of functions that modules hold."""
        functions: list[tuple[str, Any]] = []
        if not isinstance(self.loss_fn, nn.Module):
            functions.append(("loss_fn", self.loss_fn))
        for path, module in self._modules():
            held = vars(module).items()
            functions += [(f"{name} of {where(path)}", value) for name, value in held if callable(value)]
        for label, function in functions:
            for name, get, put in _held_by(label, function):
                key = ("loss", name, (label,))
                if key not in self._roots:
                    self._roots[key] = _Root(key, name, None, get, put)

    # What has changed -------------------------------------------------------------------------------------------------

    def is_same(self, is_training: bool = True) -> bool:
        """Whether nothing has changed; quick. is_training: modes count."""
        return (
            all(each.is_same(is_training) for each in self._attributes)
            and all(_are_same(table.values(), held) for _, _, table, held in self._tables)
            and list(map(_REQUIRES_GRAD, self._parameters)) == self._is_trained
            and [b._version for b in self._buffers.values()] == self._versions
            and [_place(b) for b in self._buffers.values()] == self._places
            and all(torch.equal(b, copy) for _, b, copy in self._copies)
            and not any(self._replaced())
            and all(root.is_same() for root in self._roots.values())
            and sum(map(len, self._hooks)) == self._num_hooks
        )

    def _replaced(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """(holder, name, old, new) of values that another one stands in the place of."""
        for own, holder, name, value in self._aliases:
            now = (holder.values if own is None else own).get(name, MISSING)
            if now is not value:
                yield holder, name, value, now

    def changes(self, is_training: bool = True) -> list[Change]:
        """What has changed, one by one. is_training: modes count."""
        if self.is_same(is_training):
            return []
        modes = self._changed_modes() if is_training else ()
        found = [*modes, *self._changed_attributes(), *self._changed_tables(), *self._changed_roots()]
        if sum(map(len, self._hooks)) != self._num_hooks:
            found.append(Change("hooks of modules", self._num_hooks, sum(map(len, self._hooks)), is_of_parts=True))
        return found

    def _changed_modes(self) -> Iterator[Change]:
        now = {path: module.training for path, module in self._modules()}
        if any(self._modes.values()) and not any(now.values()):
            line = next((lines["training"] for lines in self.reads.attributes.values() if "training" in lines), None)
            if line is not None or not self.reads.is_complete:
                yield Change("mode of the model", "training", "evaluation", text_of(line), is_of_parts=True)
            return
        if _alike_modes(now) == _alike_modes(self._modes):
            return
        for path in self._modes:
            if path in now and now[path] != self._modes[path]:
                words = {True: "training", False: "evaluation"}
                yield Change(f"mode of {where(path)}", words[self._modes[path]], words[now[path]])

    def _changed_attributes(self) -> Iterator[Change]:
        for each in self._attributes:
            lines = self._lines(each.module)
            for name, old, new in each.changed():
                key = None if new is MISSING else ("attribute", each.path, (name,))
                yield Change(f"{name} of {where(each.path)}", old, new, text_of(lines.get(name)), key)

    def _changed_tables(self) -> Iterator[Change]:
        buffers: set[str] = set()
        for path, kind, table, held in self._tables:
            if _are_same(table.values(), held):
                continue
            what = {"_modules": "submodules", "_parameters": "parameters", "_buffers": "buffers"}[kind]
            now = tuple(table.values())
            is_kept = len(now) == len(held) and all(isinstance(each, Tensor) for each in (*now, *held))
            if kind == "_buffers" and is_kept:
                names = [name for name, old, new in zip(_names(path, table), held, now, strict=True) if old is not new]
                buffers.update(names)
                continue
            yield Change(f"the {what} of {where(path)}", *_unlike(held, now), is_of_parts=True)
        for parameter, was in zip(self._parameters, self._is_trained, strict=True):
            if parameter.requires_grad != was:
                name = next((n for n, p in self.model.named_parameters() if p is parameter), "a parameter")
                yield Change(f"requires_grad of {name}", was, not was, is_of_parts=True)
        pairs = zip(self._buffers.items(), self._versions, self._places, strict=True)
        buffers |= {name for (name, b), version, place in pairs if b._version != version or _place(b) != place}
        buffers |= {name for name, b, copy in self._copies if not torch.equal(b, copy)}
        now_there = {name: b for path, m in self._modules() for name, b in _named(path, m._buffers)}
        for name in sorted(buffers & now_there.keys()):
            path, _, leaf = name.rpartition(".")
            yield Change(name, self._buffers.get(name, MISSING), now_there[name], "", ("buffer", path, (leaf,)), name)

    def _changed_roots(self) -> Iterator[Change]:
        for root in self._roots.values():
            if not root.is_same():
                yield from root.changes()
        for _, name, old, new in self._replaced():
            # What several hold is looked into once; another in one of the places is told here.
            if isinstance(old, Tensor) or _is_plain(old) or any(root.value is old for root in self._roots.values()):
                continue
            if _leaves(old) != _leaves(new):
                yield Change(name, _Held(old), _Held(new))

    # Places -----------------------------------------------------------------------------------------------------------

    def apply(self, key: Key, value: Any) -> None:
        """Put a value of another process where it is there."""
        kind, path, steps = key
        if kind in ("attribute", "buffer"):
            owner: Any = self._module(path)
        elif kind == "variable":
            owner, steps = steps[0], (path, *steps[1:])
        else:
            root = self._roots[(kind, path, steps[:1])]
            owner, steps = root.get(), steps[1:]
            if not steps:
                assert root.put is not None
                root.put(value)
                return
        *inner, last = steps
        for step in inner:
            owner = _get(owner, step)
        if kind == "buffer":
            with torch.no_grad():
                owner._buffers[last].copy_(value)
        else:
            _set(owner, last, value)

    def _module(self, path: str) -> nn.Module:
        if isinstance(self.loss_fn, nn.Module) and (path == "loss_fn" or path.startswith("loss_fn.")):
            return self.loss_fn.get_submodule(path.removeprefix("loss_fn").removeprefix("."))
        return self.model.get_submodule(path)


_REQUIRES_GRAD = operator.attrgetter("requires_grad")


class _Attributes:
    """A module's plain attributes."""

    def __init__(self, path: str, module: nn.Module, names: tuple[str, ...], inherited: tuple[str, ...]) -> None:
        self.path, self.module, self.names, self.inherited = path, module, names, inherited
        own = vars(module)
        self._own, self._length = own, len(own)
        self._get: Callable[[Any], Any] = operator.itemgetter(*names, *(("training",) if len(names) == 1 else ()))
        self._values: tuple[Any, ...] = self._get(own)

    def is_same(self, is_training: bool) -> bool:
        own = self._own
        if len(own) != self._length and any(name in own for name in self.inherited):
            return False
        try:
            if all(map(operator.is_, self._get(own), self._values)):
                return True
        except KeyError:
            return False
        return (own["training"] == self._values[0] or not is_training) and not any(self.changed())

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """(name, old, new) of each, but for the mode."""
        for name, old in zip(self.names, self._values, strict=False):
            new = self._own.get(name, MISSING)
            if name != "training" and new is not old and not _is_equal(old, new):
                yield name, old, new
        for name in self.inherited:
            if name in self._own:
                yield name, getattr(type(self.module), name, MISSING), self._own[name]


class _Root:
    """A value that holds others: where it is, and what was in it. get, put: read and replace it."""

    def __init__(
        self, key: Key, name: str, line: Line | None, get: Callable[[], Any], put: Callable[[Any], None] | None
    ) -> None:
        self.key, self.name, self.line, self.get, self.put = key, name, line, get, put
        self.value = get()
        self.leaves = _leaves(self.value)
        self.is_opaque = isinstance(self.leaves.get(()), _Held) or _is_plain(self.value)

    def is_same(self) -> bool:
        now = self.get()
        return (self.is_opaque and now is self.value) or _leaves(now) == self.leaves

    def changes(self) -> Iterator[Change]:
        now = _leaves(self.get())
        for steps in dict.fromkeys((*self.leaves, *now)):
            old, new = self.leaves.get(steps, MISSING), now.get(steps, MISSING)
            if old == new:
                continue
            old, new = (each.tensor if isinstance(each, _Seen) else each for each in (old, new))
            kind, path, own = self.key
            inner = "".join(f".{step}" if how == "." else f"[{step!r}]" if how == "[" else "" for how, step in steps)
            head, _, rest = self.name.partition(" ")
            is_movable = new is not MISSING and not any(how == "#" for how, _ in steps)
            key = (kind, path, (*own, *steps)) if is_movable else None
            yield Change(f"{head}{inner} {rest}".strip(), old, new, text_of(self.line), key)


class _Seen:
    """A tensor as it was: another one, or another number of writes to it, is not equal."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version, self._place = tensor, _version(tensor), _place(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen):
            return False
        return (self.tensor is other.tensor) and (self._version, self._place) == (other._version, other._place)

    __hash__ = None  # type: ignore[assignment]


def _leaves(value: Any) -> dict[tuple[Any, ...], Any]:
    """What is in a value, by the steps to it: plain values, tensors, and the identities of all else."""
    found: dict[tuple[Any, ...], Any] = {}
    seen: set[int] = set()

    def visit(each: Any, steps: tuple[Any, ...]) -> None:
        if _is_plain(each):
            found[steps] = each
        elif isinstance(each, Tensor):
            found[steps] = _Seen(each)
        elif len(found) > _MOST_LEAVES or len(steps) >= _MOST_DEPTH or id(each) in seen:
            found[steps] = id(each)
        elif (items := _items(each)) is not None:
            seen.add(id(each))
            found[(*steps, ("#", "length"))] = (type(each), len(items))
            for step, inner in items:
                visit(inner, (*steps, step))
        else:
            found[steps] = _Held(each)

    visit(value, ())
    return found


class _Held:
    """An object of which only the identity counts."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and (other.value is self.value or _is_same_method(self.value, other.value))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def _is_same_method(one: Any, other: Any) -> bool:
    return isinstance(one, types.MethodType) and isinstance(other, types.MethodType) and one == other


def _items(value: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    """The parts of a container or of an object that is made of plain attributes; None of all else."""
    if isinstance(value, Mapping):
        return [(("[", key), inner) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [(("[", index), inner) for index, inner in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [(("[", key), True) for key in value if isinstance(key, _PLAIN)]
    home = type(value).__module__.partition(".")[0]
    is_namespace = isinstance(value, (types.SimpleNamespace, argparse.Namespace))
    if isinstance(value, (type, nn.Module)) or (callable(value) and not hasattr(value, "__dict__")):
        return None
    if home in _FOREIGN or (home == "transformers" and "Config" not in type(value).__name__):
        return None
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, types.ModuleType)):
        return None
    if dataclasses.is_dataclass(value):
        return [((".", each.name), getattr(value, each.name, MISSING)) for each in dataclasses.fields(value)]
    if is_namespace or hasattr(value, "__dict__"):
        return [((".", name), inner) for name, inner in vars(value).items()]
    return None


def _held_by(label: str, function: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None] | None]]:
    """(name, how to get it, how to replace it) of what a function brings with it."""
    if isinstance(function, functools.partial):
        yield f"the arguments of {label}", lambda: (function.args, function.keywords), None
        yield from _held_by(label, function.func)
    elif isinstance(function, types.MethodType):
        if not isinstance(function.__self__, nn.Module):
            yield f"self of {label}", lambda: function.__self__, None
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = f"{name} in the closure of {label}"
            yield place, functools.partial(_cell, cell), functools.partial(setattr, cell, "cell_contents")
        if function.__defaults__ or function.__kwdefaults__:
            yield f"the defaults of {label}", lambda: (function.__defaults__, function.__kwdefaults__), None
    elif function is not None and not isinstance(function, (type, nn.Module, types.BuiltinFunctionType)):
        yield label, lambda: function, None


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it holds nothing yet
        return MISSING


def _get(owner: Any, step: Any) -> Any:
    how, name = step if isinstance(step, tuple) else (".", step)
    if how == "[":
        return owner[name]
    return owner.values[name] if isinstance(owner, (Globals, ClassData)) else getattr(owner, name)


def _set(owner: Any, step: Any, value: Any) -> None:
    how, name = step if isinstance(step, tuple) else (".", step)
    if how == "[":
        owner[name] = value
    elif isinstance(owner, ClassData):
        setattr(owner.kind, name, value)
    elif isinstance(owner, Globals):
        vars(sys.modules[owner.module])[name] = value
    else:
        setattr(owner, name, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)


def _is_value(value: Any) -> bool:
    """Whether a class attribute is data."""
    return _is_plain(value) or isinstance(value, (list, dict, set, Tensor, types.SimpleNamespace))


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    try:
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    except Exception:  # whatever a class's own comparison raises
        return False


def _are_same(now: Any, then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))


def _names(path: str, table: Mapping[str, Any]) -> list[str]:
    return [f"{path}.{name}" if path else name for name in table]


def _named(path: str, table: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in zip(_names(path, table), table.values(), strict=True):
        if tensor is not None:
            yield name, tensor


def _alike_modes(modes: Mapping[str, bool]) -> Mapping[str, bool]:
    """A model that is in evaluation mode as a whole is trained in training mode."""
    return modes if any(modes.values()) else dict.fromkeys(modes, True)


def _unlike(then: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[Any, Any]:
    pair = next(((a, b) for a, b in zip(then, now, strict=False) if a is not b), None)
    return pair if pair is not None else (f"{len(then)} of them", f"{len(now)} of them")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory
        return 0


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
