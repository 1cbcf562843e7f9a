"""The verifier of what is emitted: a file must parse, know its names, and call functions with what they take.

It reads the text, not the statements it came from, so that an error anywhere on the way shows before a rank runs it.

    a name        is a builtin, an import, a parameter or a variable that was assigned before
    torch.f, F.f  the Python signature, or one overload of the operator `f`
    x.f(...)      one overload of the operator `f`, with x first (`x` is no name of the above)
    torch.ops...  the overload's schema
    tp.f, self.f  the run time's Axis and Module
    f, m.f        what is imported of the run time and of the kernels, and this file's classes
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional

from codegen.runtime.buffer_updates import UpdatingModule
from codegen.runtime.draw_module import DrawModule
from codegen.runtime.evaluation import LogitsModule
from codegen.runtime.mesh import AXIS_NAMES, Axis, Mesh
from codegen.runtime.whole_sums import SummingModule
from codegen.schemas import EmissionError, Schema, schema_of, schemas_named, signature_of

_VARARGS = frozenset({"view", "reshape", "expand", "permute", "repeat"})
"""Methods that take sizes or dims one by one as well."""


def check_files(sources: Mapping[str, str]) -> None:
    """Raises EmissionError for a program with a file that would fail when it is imported or run. sources: by name."""
    layers = _parsed("layers.py", sources.get("layers.py", ""))
    for file, text in sources.items():
        _File(file, text, _parsed(file, text), _forward_inputs(layers)).check()


def _parsed(file: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        where = f"{file}, line {error.lineno}"
        raise EmissionError(f"not Python ({error.msg})", (error.text or "").strip(), where) from None


def _forward_inputs(tree: ast.Module) -> dict[str, int]:
    return {cls.name: _forward_arguments(cls) for cls in tree.body if isinstance(cls, ast.ClassDef)}


class _File:
    """layers: how many tensors the classes of layers.py take."""

    def __init__(self, file: str, text: str, tree: ast.Module, layers: Mapping[str, int]) -> None:
        self.file, self.text, self.tree = file, text, tree
        self.imported = dict(_imports(tree))
        self.inputs = {**layers, **_forward_inputs(tree)}

    def check(self) -> None:
        names = set(dir(builtins)) | {"__file__", "__name__"}
        for statement in self.tree.body:
            self.statement(statement, names)

    def fail(self, problem: str, node: ast.expr | ast.stmt) -> EmissionError:
        segment = ast.get_source_segment(self.text, node) if isinstance(node, ast.expr) else ""
        return EmissionError(problem, segment or "", f"{self.file}, line {node.lineno}")

    def statement(self, node: ast.stmt, names: set[str]) -> None:
        """Checks a statement; adds what it defines to `known`."""
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
            inner = set(names)
            if isinstance(node, ast.FunctionDef):
                inner |= {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            for child in node.body:
                self.statement(child, inner)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.For):
            self.expression(node.iter, names)
            names |= _targets(node.target)
            called = _layer_class(node.iter)
            for child in node.body:
                self.statement(child, names)
                if called in self.inputs:
                    self.layer(child, called)
        elif isinstance(node, ast.If):
            self.expression(node.test, names)
            for child in (*node.body, *node.orelse):
                self.statement(child, names)
        else:
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.expr) and not isinstance(getattr(part, "ctx", None), ast.Store):
                    self.expression(part, names)
            names |= _stored(node)

    def layer(self, node: ast.stmt, cls: str) -> None:
        """`... = layer(a, b)` gives as many arguments as that class' forward takes."""
        for call in (c for c in ast.walk(node) if isinstance(c, ast.Call)):
            if isinstance(call.func, ast.Name) and len(call.args) != self.inputs[cls]:
                raise self.fail(f"{cls} takes {self.inputs[cls]} arguments", call)

    def expression(self, node: ast.expr, names: set[str]) -> None:
        local = names | _stored(node)
        for part in _without_lambdas(node):
            if isinstance(part, ast.Name) and part.id not in local:
                raise self.fail(f"the name {part.id!r} is not defined", part)
            if isinstance(part, ast.Call) and not _is_open(part):
                self.call(part)

    def call(self, node: ast.Call) -> None:
        path = _path(node.func)
        keywords = {k.arg: k.value for k in node.keywords if k.arg}
        root, _, rest = path.partition(".")
        if path.startswith("torch.ops."):
            schema = schema_of(path.removeprefix("torch.ops."))
            self.bind(node, [schema] if schema else [], node.args, keywords)
        elif root in ("torch", "F") and rest and "." not in rest:
            function = getattr(torch if root == "torch" else torch.nn.functional, rest, None)
            if function is None:
                raise self.fail("torch has no such function", node)
            self.function(node, function, rest, keywords)
        elif root in AXIS_NAMES and "." not in rest and rest:
            self.signature(node, getattr(Axis, rest, None), [None, *node.args], keywords)
        elif path.startswith("self.mesh."):
            self.signature(node, getattr(Mesh, rest.removeprefix("mesh."), None), [None, *node.args], keywords)
        elif root == "self" and "." not in rest and rest:
            methods = (getattr(base, rest, None) for base in (DrawModule, SummingModule, LogitsModule, UpdatingModule))
            method = next(filter(None, methods), None)
            self.signature(node, method, [None, *node.args], keywords)
        elif root in self.imported:
            callee = self.imported[root]
            for name in filter(None, rest.split(".")):
                callee = getattr(callee, name, None)
            self.signature(node, callee, node.args, keywords)
        elif isinstance(node.func, ast.Attribute):
            self.method(node, node.func, keywords)

    def function(self, node: ast.Call, function: Any, name: str, keywords: Mapping[str, ast.expr]) -> None:
        if signature_of(function) is not None:
            self.signature(node, function, node.args, keywords)
        else:
            self.bind(
                node, schemas_named(name), node.args, {("self" if k == "input" else k): v for k, v in keywords.items()}
            )

    def method(self, node: ast.Call, func: ast.Attribute, keywords: Mapping[str, ast.expr]) -> None:
        schemas = schemas_named(func.attr)
        if not schemas or not hasattr(torch.Tensor, func.attr):
            if hasattr(torch.Tensor, func.attr) or isinstance(func.value, ast.Constant):
                return  # a method without an operator of its name, or one of text
            raise self.fail("tensors have no such method", node)
        args = node.args
        if func.attr in _VARARGS and args and not isinstance(args[0], ast.Tuple):
            args = [ast.Tuple(list(args), ast.Load())]
        self.bind(node, schemas, [func.value, *args], keywords)

    def signature(
        self, node: ast.Call, function: Callable[..., Any] | None, args: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        if function is None:
            raise self.fail("there is no such function", node)
        if not callable(function):
            raise self.fail("this is no function", node)
        signature = signature_of(function)
        try:
            if signature is not None:
                signature.bind(*args, **keywords)
        except TypeError as error:
            raise self.fail(str(error), node) from None

    def bind(
        self, node: ast.Call, schemas: Sequence[Schema], args: Sequence[ast.expr], keywords: Mapping[str, ast.expr]
    ) -> None:
        if not schemas:
            raise self.fail("torch has no such operator", node)
        if not any(_binds(schema, args, keywords) for schema in schemas):
            raise self.fail("torch's operator takes no such arguments", node)


def _binds(schema: Schema, args: Sequence[ast.expr], keywords: Mapping[str, ast.expr]) -> bool:
    positional = [argument for argument in schema if not argument.is_keyword]
    if len(args) > len(positional):
        return False
    arguments = {argument.name: value for argument, value in zip(positional, args, strict=False)}
    if set(arguments) & set(keywords) or not set(keywords) <= {argument.name for argument in schema}:
        return False
    arguments |= keywords
    is_complete = all(argument.name in arguments or not argument.is_required for argument in schema)
    return is_complete and all(_fits(a.type, arguments[a.name]) for a in schema if a.name in arguments)


def _fits(kind: str, value: ast.expr) -> bool:
    """Whether a constant may be of a schema's type. A number does for a tensor; other expressions are not judged."""
    if isinstance(value, ast.Tuple):
        return "List" in kind or "Device" in kind
    if not isinstance(value, ast.Constant):
        return True
    if value.value is None:
        return kind.startswith("Optional")
    is_text = isinstance(value.value, str)
    return is_text == ("str" in kind) or (is_text and "Device" in kind)


def _imports(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Name -> what is imported from the run time and the kernels, which live in codegen as they will in the program,
    and from the user's modules."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in sys.modules:
            module = sys.modules[node.module]
            yield from ((alias.asname or alias.name, getattr(module, alias.name, None)) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module and node.module != "layers":
            home = f"codegen.{node.module}"
            for alias in node.names:
                value = getattr(importlib.import_module(home), alias.name, None)
                yield alias.asname or alias.name, value if value is not None else _module(f"{home}.{alias.name}")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _forward_arguments(cls: ast.ClassDef) -> int:
    """Return how many tensors forward takes; -1 if there is none."""
    for node in cls.body:
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            return len(node.args.args) - 1
    return -1


def _layer_class(node: ast.expr) -> str:
    """The class that a loop names: `self.layers_of(Block, ...)` -> `Block`."""
    is_layers = isinstance(node, ast.Call) and _path(node.func) == "self.layers_of"
    return _path(node.args[0]) if is_layers and isinstance(node, ast.Call) and node.args else ""


def _targets(node: ast.expr) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _stored(node: ast.AST) -> set[str]:
    """Return the names assigned anywhere inside; for an expression, the variables of its comprehensions."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _path(node: ast.expr) -> str:
    """`torch.ops.aten.add.Tensor`; "" for what is no chain of names."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join([node.id, *names]) if isinstance(node, ast.Name) else ""


def _is_open(node: ast.Call) -> bool:
    """Whether the number of arguments shows only when it runs."""
    return any(isinstance(arg, ast.Starred) for arg in node.args) or any(k.arg is None for k in node.keywords)


def _without_lambdas(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression but for lambdas: those of guards ran on the example batch."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield from _without_lambdas(child)
