"""The values of expressions in a program that lacks features: what a branch decides, before anything runs."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

UNKNOWN: Any = object()
_PURE = frozenset({"isinstance", "hasattr", "callable", "len"})
"""Built-in functions that are not called for an effect."""


def value_of(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or one that is as true or false; UNKNOWN if neither is known."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.Dict)):
        is_empty = not (node.elts if isinstance(node, ast.Tuple) else node.values)
        return UNKNOWN if not is_empty else () if isinstance(node, ast.Tuple) else {}
    if isinstance(node, (ast.Name, ast.Attribute)):
        return constants.get(name_of(node), UNKNOWN)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = value_of(node.operand, constants)
        return UNKNOWN if value is UNKNOWN else not value
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
        left, right = value_of(node.left, constants), value_of(node.comparators[0], constants)
        is_known = left is not UNKNOWN and right is None
        return UNKNOWN if not is_known else (left is None) == isinstance(node.ops[0], ast.Is)
    if isinstance(node, ast.BoolOp):
        return _bool_op(node, constants)
    if isinstance(node, ast.IfExp):
        test = value_of(node.test, constants)
        return UNKNOWN if test is UNKNOWN else value_of(node.body if test else node.orelse, constants)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)) and _is_empty(node, constants):
        return {} if isinstance(node, ast.DictComp) else ()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        if node.func.id == "tuple" and value_of(node.args[0], constants) == ():
            return ()
        values = node.args[0]
        if node.func.id == "any" and isinstance(values, ast.GeneratorExp) and is_false(values.elt, constants):
            return False
    return UNKNOWN


def _is_empty(node: ast.ListComp | ast.GeneratorExp | ast.DictComp, constants: Mapping[str, Any]) -> bool:
    return any(
        is_false(iterated(g.iter), constants) or any(is_false(t, constants) for t in g.ifs) for g in node.generators
    )


def iterated(node: ast.expr) -> ast.expr:
    """Return the mapping of `mapping.items()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
        return node.func.value
    return node


def default_of_empty(node: ast.expr, constants: Mapping[str, Any]) -> ast.expr | None:
    """Return the default of `mapping.get(key, default)` where the mapping is empty."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"):
        return None
    return node.args[1] if len(node.args) == 2 and value_of(node.func.value, constants) == {} else None


def is_false(node: ast.expr, constants: Mapping[str, Any]) -> bool:
    """Whether the value is known, and false."""
    value = value_of(node, constants)
    return value is not UNKNOWN and not value


def is_pure(node: ast.expr) -> bool:
    """Whether evaluating an expression changes nothing: it makes no calls but those of some built-in functions."""
    calls = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
    return all(isinstance(func, ast.Name) and func.id in _PURE for func in calls)


def _bool_op(node: ast.BoolOp, constants: Mapping[str, Any]) -> Any:
    is_and = isinstance(node.op, ast.And)
    values = [value_of(value, constants) for value in node.values]
    for number, value in enumerate(values):
        if value is UNKNOWN and not is_pure(node.values[number]):
            return UNKNOWN  # The call is made, whatever follows.
        if value is not UNKNOWN and bool(value) != is_and:
            return value
    return UNKNOWN if UNKNOWN in values else values[-1]


def name_of(node: ast.expr) -> str:
    """Return the name that a variable or an attribute has; "" for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
