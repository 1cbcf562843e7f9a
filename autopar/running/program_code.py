"""The code of a generated program that is loaded, compared with and exchanged for that of another text of it."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator, Mapping


class UnlikeTextError(ValueError):
    """Two texts of a program differ in more than what functions compute."""


def require_alike(old: Mapping[str, str], new: Mapping[str, str], in_numbers: bool) -> None:
    """Raises UnlikeTextError unless the files of a program differ in the bodies of functions alone.

    in_numbers: unless these bodies differ in the numbers that they hold alone.
    """
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name, ""), new.get(name, "")
        if before == after:
            continue
        if not name.endswith(".py") or not before or not after:
            raise UnlikeTextError(f"another {name}")
        one, other = (_Outline(in_numbers).visit(ast.parse(text)) for text in (before, after))
        if ast.dump(one) != ast.dump(other):
            what = "other calls, not other numbers alone" if in_numbers else "other parts"
            raise UnlikeTextError(f"with it the program has {what}")


class _Outline(ast.NodeTransformer):
    """Leaves out the bodies of functions, or the numbers in them."""

    def __init__(self, in_numbers: bool) -> None:
        self._in_numbers, self._is_inside = in_numbers, False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not self._in_numbers:
            node.body = [ast.Pass()]
            return node
        before, self._is_inside = self._is_inside, True
        self.generic_visit(node)
        self._is_inside = before
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        is_negative = isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
        return self.visit(node.operand) if self._is_inside and is_negative else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_number = isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
        return ast.Constant(0) if self._is_inside and is_number else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # How inf and nan are written.
        is_float = isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1
        return ast.Constant(0) if self._is_inside and is_float else self.generic_visit(node)


def exchange_code(package: str, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Give the functions of a loaded package the code of another text of its files."""
    for name, text in new.items():
        module = sys.modules.get(f"{package}.{name.removesuffix('.py').replace('/', '.')}")
        if old.get(name) == text or module is None:
            continue
        codes = dict(_codes(compile(text, module.__file__ or name, "exec"), ""))
        for function, place in _functions(module):
            if place in codes:
                function.__code__ = codes[place]


def _codes(code: types.CodeType, prefix: str) -> Iterator[tuple[str, types.CodeType]]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield prefix + each.co_name, each
            yield from _codes(each, f"{prefix}{each.co_name}.")


def _functions(module: types.ModuleType) -> Iterator[tuple[types.FunctionType, str]]:
    """The functions that a module defines, with the names of their classes and their own."""
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
            yield value, name
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for inner, held in vars(value).items():
                function = getattr(held, "__func__", held)
                if isinstance(function, types.FunctionType):
                    yield function, f"{name}.{inner}"
