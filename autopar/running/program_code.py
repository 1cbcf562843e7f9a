"""Compare the code of a loaded program with another text of it, and exchange it."""

from __future__ import annotations

import ast
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


def differ_in_bodies(old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Return whether the files of two programs differ only inside the bodies of functions."""
    if old.keys() != new.keys():
        return False
    changed = [name for name in old if old[name] != new[name]]
    return all(name.endswith(".py") and _outline(old[name]) == _outline(new[name]) for name in changed)


def _outline(text: str) -> str:
    return ast.dump(_Bodiless().visit(ast.parse(text)))


class _Bodiless(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [ast.Pass()]
        return node


@dataclass(frozen=True, slots=True)
class Literal:
    """A number in a text: its value, its start and its end."""

    value: float
    start: int
    end: int


def literals_of(text: str) -> tuple[str, list[Literal]]:
    """Return a text's syntax without the numbers in the bodies of functions, and those numbers in order."""
    finder = _Numbers(text)
    outline = ast.dump(finder.visit(ast.parse(text)))
    return outline, finder.literals


def with_literals(text: str, values: Mapping[int, float]) -> str:
    """Return a text with other numbers at these positions."""
    _, literals = literals_of(text)
    for position in sorted(values, reverse=True):
        literal = literals[position]
        text = text[: literal.start] + repr(values[position]) + text[literal.end :]
    return text


class _Numbers(ast.NodeTransformer):
    """Collect the numbers in bodies of functions, and put 0 in their places."""

    def __init__(self, text: str) -> None:
        self.literals: list[Literal] = []
        self._starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]
        self._is_inside = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self._is_inside = self._is_inside, True
        self.generic_visit(node)
        self._is_inside = before
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        value = _number(node.operand)
        if self._is_inside and isinstance(node.op, ast.USub) and value is not None:
            return self._note(node, -value)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = _number(node)
        return node if value is None or not self._is_inside else self._note(node, value)

    def _note(self, node: ast.expr, value: float) -> ast.AST:
        last, end = node.end_lineno or node.lineno, node.end_col_offset or 0
        place = self._starts[node.lineno - 1] + node.col_offset, self._starts[last - 1] + end
        self.literals.append(Literal(value, *place))
        return ast.Constant(0)


def _number(node: ast.expr) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def exchange_code(package: str, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Give the functions of a loaded package the code of another text of its files."""
    for file, text in new.items():
        if old.get(file) == text:
            continue
        module = sys.modules[f"{package}.{file.removesuffix('.py').replace('/', '.')}"]
        codes = dict(_codes(compile(text, module.__file__ or file, "exec"), ""))
        functions = dict(_functions(module))
        missing = [name for name in codes if name.count(".") == 1 and "<" not in name and name not in functions]
        assert not missing, f"{file} as it is loaded has no {missing[0]}"
        for place in codes.keys() & functions.keys():
            functions[place].__code__ = codes[place]


def _codes(code: types.CodeType, prefix: str) -> Iterator[tuple[str, types.CodeType]]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield prefix + constant.co_name, constant
            yield from _codes(constant, f"{prefix}{constant.co_name}.")


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions that a module defines, by `function` or `Class.function`."""
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            yield name, value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if isinstance(function, types.FunctionType):
                    yield f"{name}.{inner}", function
