"""The state of a model and its loss beside parameter values, as a trace read it, and its later changes.

A program is made of constants that may change between steps: numbers, flags, plain tensors, buffers, submodules, modes.
`ModelState` keeps those that the trace read (`reads.py`), tests in some hundred microseconds whether all are
unchanged, and names those that changed. A write in place through `.data` to a large tensor goes unnoticed.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.admission import where
from autopar.frontend.attributes import INTERNAL, dict_of, is_a, named_modules, named_parameters
from autopar.frontend.state.constants import Constants
from autopar.frontend.state.modules import Hooks, ModuleAttributes, alike_modes, class_with, is_in_training
from autopar.frontend.state.parameter_values import ParameterValues
from autopar.frontend.state.places import held_by, named, names_in, put_parameter, put_within
from autopar.frontend.state.reads import ClassData, Environment, Files, Line, Reads, home_of, text_of
from autopar.frontend.state.values import (
    FOREIGN,
    MISSING,
    ByIdentity,
    Change,
    Key,
    Root,
    are_alike,
    has_moved,
    is_class_data,
    is_freed,
    is_plain,
    leaves_of,
    place_of,
    unlike,
)

_MODES = ("evaluation", "training")
_SMALL, _MOST_SMALL = 4096, 8
"""The most elements of tensors whose values are compared, and the most such tensors."""


class ModelState:
    """A model's state and its loss's. reads: the attributes that a trace read; without them all are watched."""

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
        """Return a state of the same model with this one's constants; parts, buffers and modes are the present ones."""
        twin = object.__new__(ModelState)
        vars(twin).update(vars(self))
        modules = dict(self._modules())
        twin._attributes = [plain.of(modules.get(plain.path, plain.module)) for plain in self._attributes]
        twin._roots = {key: root.of(_getter(key, root.get, modules)) for key, root in self._roots.items()}
        twin._aliases = [(_getter(key, get, modules), key, value) for get, key, value in self._aliases]
        twin._join_attributes()
        twin._note_parts(None)
        return twin

    def read_also(self, reads: Reads) -> None:
        """Watch the reads of another forward of the model, too, from the next `note` on."""
        self.reads = self.reads.joined(reads)

    @classmethod
    def of_constants(cls, model: nn.Module, loss_fn: Any, reads: Reads) -> ModelState:
        """Return a state for `plain_changes` alone, of a model that may be fake."""
        state = object.__new__(cls)
        state.model, state.loss_fn, state.reads = model, loss_fn, reads
        state._note_constants()
        return state

    def note(self, keep_modes: bool = False) -> None:
        """Take the present state. keep_modes: except the modes of modules."""
        self._note_constants()
        self._note_parts(self._modes if keep_modes else None)

    def _note_constants(self) -> None:
        self._attributes: list[ModuleAttributes] = []
        self._roots: dict[Key, Root] = {}
        self._aliases: list[tuple[Callable[[], Any], Key, Any]] = []
        self._deep: set[int] = set()
        self._methods: dict[tuple[type, str], Any] = {}
        for path, module in self._modules():
            self._watch(path, module)
        for (space, name), line in self.reads.variables.items():
            if name in space.values or type(space) in (Environment, Files):
                self._watch_value(("variable", name, (space,)), f"{name} of {space.label}", line, space)
        self._watch_loss()
        self._join_attributes()

    def note_values(self) -> None:
        """Take the present values of parameters, and nothing else."""
        self._values = ParameterValues(self._named_parameters())

    def deciding_buffers(self) -> dict[str, Tensor]:
        """Return the buffers whose values decide what forward does."""
        names = self.reads.deciding
        buffers = {n: b for p, m in self._modules() for n, b in named(p, m._buffers)} if names else {}
        return {name: buffer for name, buffer in buffers.items() if name.rpartition(".")[2] in names}

    def deciding(self) -> dict[str, Any]:
        """Return the values of these buffers."""
        return {name: buffer.tolist() for name, buffer in self.deciding_buffers().items()}

    def constants(self) -> Constants:
        """Return the model's present values that a program has as constants."""
        return Constants(ModelState(self.model, self.loss_fn, self.reads)._constants())

    def _constants(self) -> Iterator[tuple[Any, Any]]:
        yield from alike_modes(self._modes).items()
        for plain in self._attributes:
            yield from (((plain.path, n), value) for n, value in zip(plain.names[1:], plain.values[1:], strict=False))
        yield from ((("", key), value) for _, key, value in self._aliases)
        for key, root in self._roots.items():
            yield from (((key, steps), leaf) for steps, leaf in root.leaves.items())
        yield from self._methods.items()
        yield from ((("deciding", name), repr(value)) for name, value in self.deciding().items())

    def _join_attributes(self) -> None:
        """Put all plain attributes into one row, which compares faster than one by one."""
        self._getters = [(attributes.get, attributes.attributes) for attributes in self._attributes]
        self._plain = [value for attributes in self._attributes for value in attributes.values]
        self._own = [attributes.attributes for attributes in self._attributes]
        self._own_lengths = [attributes.length for attributes in self._attributes]

    def _note_parts(self, modes: Mapping[str, bool] | None) -> None:
        """Take parts, buffers and hooks as they are now; modes, too, unless `modes` is given."""
        modules = dict(self._modules())
        self._tables: list[tuple[str, str, dict[str, Any], tuple[Any, ...]]] = []
        for path, module in modules.items():
            for table in ("_modules", "_parameters", "_buffers"):
                if members := dict_of(module)[table]:
                    self._tables.append((path, table, members, tuple(members.values())))
        self._held = [table for _, _, table, _ in self._tables]
        self._lengths = list(map(len, self._held))
        self._parts = [part for _, _, _, members in self._tables for part in members]
        parameters = [
            p for _, kind, _, members in self._tables if kind == "_parameters" for p in members if p is not None
        ]
        self._parameters, self._is_trained = parameters, list(map(_REQUIRES_GRAD, parameters))
        self._buffers = {
            name: b for path, m in modules.items() for name, b in named(path, m._buffers) if not b.is_inference()
        }
        self._versions = [b._version for b in self._buffers.values()]
        self._in_memory = [b for b in self._buffers.values() if place_of(b)]
        self._addresses = list(map(_DATA_PTR, self._in_memory))
        small = [(name, b) for name, b in self._buffers.items() if b.numel() <= _SMALL and not b.is_meta]
        self._copies = [(name, b, b.detach().clone()) for name, b in small[:_MOST_SMALL]]
        self._modes = modes or {path: is_in_training(module) for path, module in modules.items()}
        self._hooks = Hooks(modules, parameters)
        self.note_values()

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from named_modules(self.model)
        if is_a(self.loss_fn, nn.Module):
            yield from ((f"loss_fn.{path}".rstrip("."), module) for path, module in named_modules(self.loss_fn))

    def _lines(self, module: nn.Module) -> Mapping[str, Line | None]:
        """Return the attributes of a module that were read; all where unknown."""
        lines = self.reads.attributes.get(type(module), {})
        if self.reads.is_complete:
            return lines
        names = [*dict_of(module), *vars(type(module))]
        return {**dict.fromkeys(name for name in names if not name.startswith("_")), **lines}

    def _watch(self, path: str, module: nn.Module) -> None:
        values, lines, plain = dict_of(module), self._lines(module), ["training"]
        inherited = []
        for name, line in {**lines, "forward": lines.get("forward")}.items():
            if name in INTERNAL:
                continue
            if name not in values:
                inherited.append(name)
                self._watch_class(type(module), name, line)
            elif is_plain(values[name]) or name == "forward":
                plain.append(name)
            else:
                self._watch_value(("attribute", path, (name,)), f"{name} of {where(path)}", line, values)
        self._attributes.append(ModuleAttributes(path, module, tuple(plain), tuple(inherited)))

    def _watch_class(self, kind: type, name: str, line: Line | None) -> None:
        owner = class_with(kind, name)
        if owner is None or home_of(owner) in FOREIGN:
            return
        if not is_class_data(vars(owner)[name]):
            self._methods[owner, name] = vars(owner)[name]
            return
        space = ClassData(owner)
        self._watch_value(("variable", name, (space,)), f"{name} of {space.label}", line, space)

    def _watch_value(self, key: Key, name: str, line: Line | None, holder: Any) -> None:
        """Watch the value in `holder` (attributes of a module, a namespace) under the key's name."""
        at = key[2][0] if key[0] == "attribute" else key[1]
        attributes = holder if key[0] == "attribute" else None

        def get() -> Any:
            return (holder.values if attributes is None else attributes).get(at, MISSING)

        value = get()
        self._aliases.append((get, key, value))
        is_opaque = value is MISSING or is_plain(value) or is_a(value, Tensor)
        if key not in self._roots and (is_opaque or id(value) not in self._deep):
            self._deep.add(id(value))
            self._roots[key] = Root(key, name, line, get, None, self.reads.fields)

    def _watch_loss(self) -> None:
        """Watch closures, arguments and attributes of a loss function, and of functions that modules refer to."""
        functions: list[tuple[str, Any]] = []
        if not is_a(self.loss_fn, nn.Module):
            functions.append(("loss_fn", self.loss_fn))
        for path, module in self._modules():
            attributes = dict_of(module).items()
            functions += [(f"{name} of {where(path)}", value) for name, value in attributes if callable(value)]
        for label, function in functions:
            for name, get, put in held_by(label, function):
                key = ("loss", name, (label,))
                if key not in self._roots:
                    self._roots[key] = Root(key, name, None, get, put, self.reads.fields)

    # What has changed -------------------------------------------------------------------------------------------------

    def is_same(self, is_training: bool = True) -> bool:
        """Return, quickly, whether nothing has changed. is_training: modes count."""
        return (
            self._are_attributes_same(is_training)
            and list(map(len, self._held)) == self._lengths
            and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, self._held)), self._parts))
            and list(map(_REQUIRES_GRAD, self._parameters)) == self._is_trained
            and [b._version for b in self._buffers.values()] == self._versions
            and list(map(_DATA_PTR, self._in_memory)) == self._addresses
            and all(torch.equal(b, copy) for _, b, copy in self._copies)
            and not any(self._replaced())
            and all(root.is_same() for root in self._roots.values())
            and self._hooks.are_same()
            and self._values.are_same()
            and all(vars(owner).get(name) is method for (owner, name), method in self._methods.items())
        )

    def _are_attributes_same(self, is_training: bool) -> bool:
        try:
            now = itertools.chain.from_iterable([get(values) for get, values in self._getters])
            if all(map(operator.is_, now, self._plain)) and list(map(len, self._own)) == self._own_lengths:
                return True
        except KeyError:
            return False
        return all(attributes.is_same(is_training) for attributes in self._attributes)

    def _replaced(self) -> Iterator[tuple[Key, Any, Any]]:
        """Yield (place, old, new) of replaced values."""
        for get, key, value in self._aliases:
            if (now := get()) is not value:
                yield key, value, now

    def changes(self, is_training: bool = True) -> list[Change]:
        """Return the changes, one by one. is_training: modes count."""
        if self.is_same(is_training):
            return []
        modes = self._changed_modes() if is_training else ()
        changes = [*modes, *self._changed_attributes(), *self._changed_tables(), *self._changed_roots()]
        for (owner, name), method in self._methods.items():
            if (now := vars(owner).get(name, MISSING)) is not method:
                changes.append(Change(f"{name} of {ClassData(owner).label}", method, now))
        return [*changes, *self._hooks.changes(self._named_parameters()), *self._values.changes()]

    def plain_changes(self) -> list[Change]:
        """Return the numbers, flags and texts that have changed, anywhere. A new one has MISSING as its old value."""
        changes = itertools.chain(self._changed_attributes(), self._changed_roots())
        return [c for c in changes if is_plain(c.new) and (is_plain(c.old) or c.old is MISSING)]

    def kind_of(self, key: Key) -> Any:
        """Return a key, equal for corresponding places in modules of one class."""
        return (type(self._module(key[1])), key[2]) if key[0] == "attribute" else key

    def _changed_modes(self) -> Iterator[Change]:
        now = {path: is_in_training(module) for path, module in self._modules()}
        if any(self._modes.values()) and not any(now.values()):
            line = next((lines["training"] for lines in self.reads.attributes.values() if "training" in lines), None)
            if line is not None or not self.reads.is_complete:
                yield Change("mode of the model", "training", "evaluation", line=text_of(line), is_of_parts=True)
            return
        if alike_modes(now) == alike_modes(self._modes):
            return
        for path in self._modes:
            if path in now and now[path] != self._modes[path]:
                key = ("mode", path, ())
                yield Change(f"mode of {where(path)}", _MODES[self._modes[path]], _MODES[now[path]], key=key)

    def _changed_attributes(self) -> Iterator[Change]:
        for attributes in self._attributes:
            lines = self._lines(attributes.module)
            for name, old, new in attributes.changed():
                key = None if new is MISSING else ("attribute", attributes.path, (name,))
                yield Change(f"{name} of {where(attributes.path)}", old, new, line=text_of(lines.get(name)), key=key)

    def _changed_tables(self) -> Iterator[Change]:
        buffers = set[str]()
        for path, kind, table, members in self._tables:
            if _are_same(table.values(), members):
                continue
            now, subject = tuple(table.values()), "submodules" if kind == "_modules" else kind[1:]
            is_kept = len(now) == len(members) and all(is_a(member, Tensor) for member in (*now, *members))
            if kind == "_buffers" and is_kept:
                buffers.update(n for at, n in enumerate(names_in(path, table)) if not has_moved(members[at], now[at]))
                continue
            if not (kind == "_parameters" and is_kept and all(map(is_freed, members, now))):
                old, new = unlike(members, now)
                yield Change(f"the {subject} of {where(path)}", old, new, is_of_parts=True)
        for parameter, was in zip(self._parameters, self._is_trained, strict=True):
            if parameter.requires_grad != was:
                name = next((n for n, p in self._named_parameters() if p is parameter), "a parameter")
                key = ("requires_grad", name, ())
                yield Change(f"requires_grad of {name}", was, not was, key=key, parameter=name)
        buffers |= {
            name for (name, b), was in zip(self._buffers.items(), self._versions, strict=True) if b._version != was
        }
        moved = {id(b) for b, was in zip(self._in_memory, self._addresses, strict=True) if place_of(b) != was}
        buffers |= {name for name, b in self._buffers.items() if id(b) in moved}
        buffers |= {name for name, b, copy in self._copies if not torch.equal(b, copy)}
        now_there = {name: b for path, m in self._modules() for name, b in named(path, m._buffers)}
        for name in sorted(buffers & now_there.keys()):
            path, _, leaf = name.rpartition(".")
            old, place = self._buffers.get(name, MISSING), ("buffer", path, (leaf,))
            yield Change(name, old, now_there[name], key=place, buffer=name)

    def _changed_roots(self) -> Iterator[Change]:
        for root in self._roots.values():
            if not root.is_same():
                yield from root.changes()
        for key, old, new in self._replaced():
            # A value that several share is examined once; a replacement at one place is reported here.
            if is_a(old, Tensor) or is_plain(old) or any(root.value is old for root in self._roots.values()):
                continue
            if not are_alike(leaves_of(old, self.reads.fields), leaves_of(new, self.reads.fields)):
                name = f"{key[2][0]} of {where(key[1])}" if key[0] == "attribute" else key[1]
                yield Change(name, ByIdentity(old), ByIdentity(new))

    # Places -----------------------------------------------------------------------------------------------------------

    def apply(self, values: Iterable[tuple[Key, Any]]) -> None:
        """Put values from another process into their places here."""
        for key, value in values:
            self._put(key, value)

    def _put(self, key: Key, value: Any) -> None:
        kind, path, steps = key
        if kind == "mode":
            self._module(path).training = value == _MODES[True]
        elif kind in ("requires_grad", "values"):
            put_parameter(next(p for name, p in self._named_parameters() if name == path), kind, value)
        elif kind in ("attribute", "buffer"):
            put_within(self._module(path), steps, value)
        elif kind == "variable":
            put_within(steps[0], (path, *steps[1:]), value)
        else:
            root = self._roots[(kind, path, steps[:1])]
            if steps[1:]:
                put_within(root.get(), steps[1:], value)
            else:
                assert root.put is not None
                root.put(value)

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from named_parameters(self.model)
        if is_a(self.loss_fn, nn.Module):
            yield from ((f"loss_fn.{name}", parameter) for name, parameter in named_parameters(self.loss_fn))

    def _module(self, path: str) -> nn.Module:
        return next(module for name, module in self._modules() if name == path)


_REQUIRES_GRAD, _DATA_PTR = operator.attrgetter("requires_grad"), operator.methodcaller("data_ptr")


def _getter(key: Key, get: Callable[[], Any], modules: Mapping[str, nn.Module]) -> Callable[[], Any]:
    """Return a function that reads a value from the module that is in its place now."""
    if key[0] != "attribute" or key[1] not in modules:
        return get
    return functools.partial(dict_of(modules[key[1]]).get, key[2][0], MISSING)


def _are_same(now: Any, then: tuple[Any, ...]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))
