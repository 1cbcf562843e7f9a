"""The code of a generated program that is loaded, compared with and exchanged for that of another text of it."""

from __future__ import annotations

import ast
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


def differ_in_bodies(old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether the files of two programs differ in the bodies of functions alone."""
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
    """A number in a text: its value, and where it starts and ends."""

    value: float
    start: int
    end: int


def literals_of(text: str) -> tuple[str, list[Literal]]:
    """A text's syntax without the numbers in the bodies of functions, and these numbers in order."""
    finder = _Numbers(text)
    outline = ast.dump(finder.visit(ast.parse(text)))
    return outline, finder.found


def with_literals(text: str, values: Mapping[int, float]) -> str:
    """A text with other numbers in the places of those of these positions."""
    _, found = literals_of(text)
    for position in sorted(values, reverse=True):
        each = found[position]
        text = text[: each.start] + repr(values[position]) + text[each.end :]
    return text


class _Numbers(ast.NodeTransformer):
    """Collects the numbers in bodies of functions, and puts 0 in their places."""

    def __init__(self, text: str) -> None:
        self.found: list[Literal] = []
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
        self.found.append(Literal(value, *place))
        return ast.Constant(0)


def _number(node: ast.expr) -> float | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def exchange_code(package: str, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Give the functions of a loaded package the code of another text of its files."""
    for name, text in new.items():
        if old.get(name) == text:
            continue
        module = sys.modules[f"{package}.{name.removesuffix('.py').replace('/', '.')}"]
        codes = dict(_codes(compile(text, module.__file__ or name, "exec"), ""))
        found = dict(_functions(module))
        missing = [each for each in codes if each.count(".") == 1 and "<" not in each and each not in found]
        assert not missing, f"{name} as it is loaded has no {missing[0]}"
        for place in codes.keys() & found.keys():
            found[place].__code__ = codes[place]


def _codes(code: types.CodeType, prefix: str) -> Iterator[tuple[str, types.CodeType]]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield prefix + each.co_name, each
            yield from _codes(each, f"{prefix}{each.co_name}.")


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    """The functions that a module defines, by the names of their classes and their own."""
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            yield name, value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner, held in vars(value).items():
                function = getattr(held, "__func__", held)
                if isinstance(function, types.FunctionType):
                    yield f"{name}.{inner}", function
