"""The attributes, globals and class data that a forward reads, and their places: noted while it runs on fake tensors.

A trace treats all of them as constants. `model_state.py` watches those that were read, so that no change is missed.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import io
import linecache
import os
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from torch import nn

from autopar.frontend.attributes import attribute, dict_of, is_a
from autopar.frontend.trace_modes.batch_values import Specialization
from autopar.frontend.trace_modes.one_process import PLACE

_TORCH = f"{Path(torch.__file__).parent}/"
_HOME = f"{Path(__file__).parents[3]}/"
_SELF_ASKING = (f"{_TORCH}nn/modules/module.py", f"{_HOME}autopar/", f"{_HOME}codegen/")
"""Files that ask modules for attributes on behalf of others."""
_FRAMEWORKS = ("/lightning/", "/pytorch_lightning/", "/accelerate/")
_LIBRARIES = (_TORCH, *_SELF_ASKING, f"{Path(np.__file__).parent}/", *_FRAMEWORKS, "/transformers/")
_STANDARD = f"{sysconfig.get_paths()['stdlib']}/"

Fields = Mapping[type, set[str]]
"""Class -> the attributes of its objects that were read; of other classes all may have been."""

Line = tuple[str, int]
"""A file and the number of a line."""


@dataclass(slots=True)
class Reads:
    """The reads of a forward. is_complete: a whole forward was observed.

    attributes: of modules, by their class, each with the line that read it first. variables: of namespaces (a module's
    globals, or a class), by name. fields: of objects of modules and of the loss. advanced: numbers, flags and texts
    that every forward changes itself, by kinds of places (`ModelState.kind_of`), with their names. deciding: the last
    names of buffers whose values decided what forward does. specialization: values of the batch that did.
    """

    attributes: dict[type, dict[str, Line]] = field(default_factory=dict)
    variables: dict[tuple[Any, str], Line] = field(default_factory=dict)
    fields: dict[type, set[str]] = field(default_factory=dict)
    is_complete: bool = False
    advanced: dict[Any, str] = field(default_factory=dict)
    deciding: set[str] = field(default_factory=set)
    specialization: Specialization = field(default_factory=Specialization)

    def joined(self, other: Reads) -> Reads:
        """Return the union: each read with the line that was noted first."""
        kinds = self.attributes.keys() | other.attributes.keys()
        return Reads(
            attributes={k: {**other.attributes.get(k, {}), **self.attributes.get(k, {})} for k in kinds},
            variables={**other.variables, **self.variables},
            fields=_united(self.fields, other.fields),
            is_complete=self.is_complete and other.is_complete,
            advanced={**other.advanced, **self.advanced},
            deciding=self.deciding | other.deciding,
            specialization=self.specialization if self.specialization.is_traced else other.specialization,
        )

    def depends_on_mode(self) -> bool:
        """Return whether the model's code may behave differently in training and in evaluation."""
        asked = any("training" in read and home_of(kind) != "torch" for kind, read in self.attributes.items())
        return asked or not self.is_complete

    def __getstate__(self) -> Any:
        return tuple(getattr(self, field_.name) for field_ in fields(self))

    def __setstate__(self, state: Any) -> None:
        for field_, value in zip(fields(self), state, strict=True):
            setattr(self, field_.name, value)


def _united(one: Mapping[type, set[str]], other: Mapping[type, set[str]]) -> dict[type, set[str]]:
    return {kind: one.get(kind, set()) | other.get(kind, set()) for kind in one.keys() | other.keys()}


class Globals:
    """The globals of a module; in another process, of the module of that name."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Globals) and other.values is self.values

    def __hash__(self) -> int:
        return id(self.values)

    def __reduce__(self) -> Any:
        return _globals_of, (self.values.get("__name__", ""),)

    @property
    def label(self) -> str:
        return f"the module {self.values.get('__name__', '')}"


def _globals_of(module: str) -> Globals:
    return Globals(vars(sys.modules[module]) if module in sys.modules else {})


@dataclass(frozen=True, slots=True)
class ClassData:
    """Attributes that a class shares with all its instances."""

    kind: type

    @property
    def values(self) -> Mapping[str, Any]:
        return vars(self.kind)

    @property
    def label(self) -> str:
        return f"the class {self.kind.__qualname__}"


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of the process."""

    label = "the environment"

    @property
    def values(self) -> Any:
        return os.environ


class _Stamps(dict[str, Any]):
    """Times of the last write to files, and their sizes: read from the disk each time."""

    def get(self, path: str, default: Any = None) -> Any:
        try:
            status = os.stat(path)
        except OSError:
            return default
        return f"{status.st_size} bytes of {status.st_mtime_ns}"


@dataclass(frozen=True, slots=True)
class Files:
    """The files that forward opens."""

    label = "the disk"

    @property
    def values(self) -> Any:
        return _Stamps()


_noting = threading.local()


def note_deciding(names: Iterable[str]) -> None:
    """Note that forward asked for values of buffers, which decide what it does."""
    if (reads := getattr(_noting, "reads", None)) is not None:
        reads.deciding.update(name.rpartition(".")[2] for name in names)


@contextlib.contextmanager
def noting_reads(reads: Reads, kinds: Iterable[type] = ()) -> Iterator[None]:
    """Context manager that adds the reads of this thread's forwards to `reads`. kinds: classes of
    objects to observe.
    """
    thread, seen = threading.get_ident(), set[CodeType]()

    def read(module: nn.Module, name: str) -> Any:
        lines = reads.attributes.get(type(module))
        if (lines is None or name not in lines) and not name.startswith("__") and threading.get_ident() == thread:
            _note_attribute(reads, type(module), name, sys._getframe(1))
        return object.__getattribute__(module, name)

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code not in seen:
            seen.add(frame.f_code)
            _note_variables(reads, frame)

    # A debugger or coverage may be tracing already; profilers get more events, which takes longer.
    is_free = sys.gettrace() is None
    switch: Any = sys.settrace if is_free else sys.setprofile
    before = None if is_free else sys.getprofile()
    original = nn.Module.__dict__.get("__getattribute__")
    nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
    switch(called)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_noting_environment(reads))
            stack.enter_context(_noting_files(reads))
            for kind in kinds:
                stack.enter_context(_noting_attributes(kind, reads))
            _noting.reads = reads
            yield
        reads.is_complete = True
    finally:
        _noting.reads = None
        switch(before)
        if original is None:
            del nn.Module.__getattribute__
        else:
            nn.Module.__getattribute__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _noting_attributes(kind: type, reads: Reads) -> Iterator[None]:
    """Context manager that notes reads of attributes of a class's objects, where the class can be changed."""
    original, ask = vars(kind).get("__getattribute__"), cast(Any, kind.__getattribute__)

    def read(value: Any, name: str) -> Any:
        reads.fields.setdefault(type(value), set()).add(name)
        return ask(value, name)

    try:
        kind.__getattribute__ = read  # type: ignore[method-assign, assignment]
    except TypeError:
        yield
        return
    reads.fields.setdefault(kind, set())
    try:
        yield
    finally:
        if original is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _noting_environment(reads: Reads) -> Iterator[None]:
    """Context manager that notes environment variables that the user's code of this thread reads, except torchrun's."""
    kind, thread = type(os.environ), threading.get_ident()
    owns = {name: vars(kind).get(name) for name in ("__getitem__", "__contains__")}

    def noting(ask: Any) -> Any:
        def read(environment: Any, name: Any) -> Any:
            if environment is os.environ and type(name) is str and threading.get_ident() == thread:
                _note_environment(reads, name, sys._getframe(1))
            return ask(environment, name)

        return read

    for name in owns:
        setattr(kind, name, noting(getattr(kind, name)))
    try:
        yield
    finally:
        for name, original in owns.items():
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)


def _note_environment(reads: Reads, name: str, frame: FrameType) -> None:
    if name not in PLACE and (line := _calling_line(frame)) is not None:
        reads.variables.setdefault((Environment(), name), line)


def _calling_line(frame: FrameType) -> Line | None:
    """Return the line that makes a call, perhaps through the standard library, if it is the user's."""
    caller: FrameType | None = frame
    while caller is not None and _is_standard(caller.f_code.co_filename):
        caller = caller.f_back
    if caller is None or any(part in caller.f_code.co_filename for part in _LIBRARIES):
        return None
    return caller.f_code.co_filename, caller.f_lineno


def _is_standard(file: str) -> bool:
    return file.startswith("<") or (file.startswith(_STANDARD) and "-packages" not in file)


@contextlib.contextmanager
def _noting_files(reads: Reads) -> Iterator[None]:
    """Context manager that notes files that the user's code of this thread opens to read."""
    thread, open_file = threading.get_ident(), io.open

    def opened(file: Any, mode: Any = "r", *args: Any, **named: Any) -> Any:
        is_path = type(file) is str or isinstance(file, Path)
        if is_path and mode in ("r", "rb", "rt") and threading.get_ident() == thread:
            line = _calling_line(sys._getframe(1))
            if line is not None:
                reads.variables.setdefault((Files(), os.path.abspath(file)), line)
        return open_file(file, mode, *args, **named)

    with mock.patch.object(builtins, "open", opened), mock.patch.object(io, "open", opened):
        yield


def _note_attribute(reads: Reads, kind: type, name: str, frame: FrameType) -> None:
    file = frame.f_code.co_filename
    if file.startswith(_SELF_ASKING) or any(part in file for part in _FRAMEWORKS):
        return
    reads.attributes.setdefault(kind, {})[name] = _line_of(frame)


def _line_of(frame: FrameType) -> Line:
    """Return the innermost line of the user's code."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.startswith((_TORCH, _HOME + "autopar/", _STANDARD, "<")):
        caller = caller.f_back
    line_frame = caller or frame
    return line_frame.f_code.co_filename, line_frame.f_lineno


def _note_variables(reads: Reads, frame: FrameType) -> None:
    """Note globals that a user's function names, and the names that it reads of modules and classes among them."""
    code = frame.f_code
    file = code.co_filename
    is_library = file.startswith("<") or any(part in file for part in _LIBRARIES)
    if is_library or (file.startswith(_STANDARD) and "site-packages" not in file):
        return
    space, line = Globals(frame.f_globals), (file, code.co_firstlineno)
    asked = [(instruction.opname, instruction.argval) for instruction in dis.get_instructions(code)]
    parts = {name for how, name in asked if how in ("LOAD_ATTR", "LOAD_METHOD")}
    for name in {name for how, name in asked if how in ("LOAD_GLOBAL", "LOAD_NAME")} & frame.f_globals.keys():
        value = frame.f_globals[name]
        inner = _namespace(value)
        if inner is None and _is_watched(value):
            reads.variables.setdefault((space, name), line)
        if inner is None:
            continue
        for part in parts & inner.values.keys():
            if _is_watched(inner.values[part]):
                reads.variables.setdefault((inner, part), line)


def _namespace(value: Any) -> Globals | ClassData | None:
    """Return a module or class of the user's."""
    if is_a(value, types.ModuleType):
        file = dict_of(value).get("__file__")
        if type(file) is not str or not file or file.startswith(_STANDARD) or any(part in file for part in _LIBRARIES):
            return None
        return Globals(dict_of(value))
    if is_a(value, type) and home_of(value) not in ("torch", "builtins", "enum"):
        return ClassData(value)
    return None


def home_of(kind: type) -> str:
    """Return the package of a class; "" if unknown."""
    module = attribute(kind, "__module__")
    return module.partition(".")[0] if type(module) is str else ""


def _is_watched(value: Any) -> bool:
    """Return whether a script may replace this value: data, and functions."""
    return is_data(value) or is_a(value, types.FunctionType, types.BuiltinFunctionType)


def is_data(value: Any) -> bool:
    """Return whether a value is not code: no function, class, module or property of the interpreter's."""
    if is_a(value, type, types.ModuleType, types.MethodType, types.BuiltinFunctionType, nn.Module):
        return False
    return not (callable(value) or any("__get__" in vars(kind) for kind in type(value).__mro__))


def text_of(line: Line | None) -> str:
    """Return `file:number: text` of a line; "" if unknown."""
    if line is None or line[0].startswith("<"):
        return ""
    return f"{line[0]}:{line[1]}: {linecache.getline(*line).strip()}"
