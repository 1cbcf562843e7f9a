"""The run time's source without what a plan does not have: branches on absent features, and the arguments for them.

A feature that a program may have is an argument and an attribute of one name in all modules, and None, False or empty
where a program lacks it. A name is folded only if no module binds it to anything else. What is left reads as written.
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from codegen.saved_folder.wording import without_words

UNKNOWN: Any = object()
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_Edit = tuple[int, int, str]
"""Characters from, to, and the text in their place."""


ABSENT: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "host",
            "host_optimizer",
            "offload_optimizer",
            "kernels",
            "fused_optimizer",
            "compiled",
            "_compiled",
        )
    ),
    **dict.fromkeys(("captured", "_captured", "on_device")),
    **dict.fromkeys(("offload", "loss_scaling", "begun_scaling", "trial", "_trial", "wholes", "_wholes")),
    # Of steps that autopar builds in a process of its own.
    **dict.fromkeys(("_programs", "shared", "first_check", "comparison", "state_check", "after_forward")),
    **dict.fromkeys(("tied", "result_rank", "begun", "grow")),
    **dict.fromkeys(("guards", "GUARDS", "fixed", "FIXED_INPUTS", "ARGUMENTS"), {}),
    **dict.fromkeys(("RECOMPUTE", "OFFLOAD", "RECEIVES", "SENDS", "FIRST_LAYER"), {}),
    **dict.fromkeys(("unused", "UNUSED_INPUTS", "JOINTS"), ()),
    **dict.fromkeys(("needs_first_pass", "_defers"), False),
    "NO_EVALUATION": "",
    "padding": 0,
    "padded": "S(0)",
}
"""Names of features, with their values in programs that lack them."""


def folded(
    sources: Mapping[str, str], modules: Mapping[str, str], absent: Mapping[str, Any] = ABSENT
) -> dict[str, str]:
    """Return the modules without features that neither they nor the sources have. Both are texts by file name."""
    trees = {name: ast.parse(text) for name, text in {**sources, **modules}.items()}
    constants = dict(absent)
    while strange := {name for tree in trees.values() for name in _bound_otherwise(tree, constants)}:
        constants = {name: value for name, value in constants.items() if name not in strange}
    word = re.compile(rf"\b({'|'.join(map(re.escape, constants))})\b") if constants else None
    return {
        name: _File(text, constants).folded(trees[name]) if word is not None and word.search(text) else text
        for name, text in modules.items()
    }


# Names that are bound -------------------------------------------------------------------------------------------------


def _bound_otherwise(tree: ast.Module, constants: Mapping[str, Any]) -> Iterator[str]:
    simple = {
        id(target) for node in ast.walk(tree) for target, value in _pairs(node) if _is_same(target, value, constants)
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            if (name := _name(node)) in constants and id(node) not in simple:
                yield name
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in constants:
            yield node.name
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                name = keyword.arg or ""
                if name in constants and not _is_same_value(keyword.value, name, constants):
                    yield name
            if _name(node.func) == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
                yield from (name for name in (str(node.args[1].value),) if name in constants)
        elif isinstance(node, ast.Dict):
            # Such as the attributes of a class that `type` makes.
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            yield from (key for key in keys if isinstance(key, str) and key in constants)
        elif isinstance(node, ast.arguments):
            # By position an argument has no name.
            others = (*node.posonlyargs, *node.args, node.vararg, node.kwarg)
            yield from (arg.arg for arg in others if arg is not None and arg.arg in constants)
            for arg, default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                if arg.arg in constants and default is not None and not _is_same_value(default, arg.arg, constants):
                    yield arg.arg
        else:
            yield from (name for name in _names_bound(node) if name in constants)


def _names_bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that an import, an `except`, a `case` or a deletion binds or unbinds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, ast.Delete):
        yield from map(_name, node.targets)


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the targets of an assignment with their values."""
    if isinstance(node, ast.AnnAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def _is_same(target: ast.expr, value: ast.expr | None, constants: Mapping[str, Any]) -> bool:
    name = _name(target)
    return name in constants and (value is None or _is_same_value(value, name, constants))


def _is_same_value(value: ast.expr, name: str, constants: Mapping[str, Any]) -> bool:
    return bool(value_of(value, constants) == constants[name])


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


# Values ---------------------------------------------------------------------------------------------------------------


def value_of(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or one that is as true or false; UNKNOWN if neither is known."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.Dict)):
        is_empty = not (node.elts if isinstance(node, ast.Tuple) else node.values)
        return UNKNOWN if not is_empty else () if isinstance(node, ast.Tuple) else {}
    if isinstance(node, (ast.Name, ast.Attribute)):
        return constants.get(_name(node), UNKNOWN)
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
        if node.func.id == "any" and isinstance(values, ast.GeneratorExp) and _is_false(values.elt, constants):
            return False
    return UNKNOWN


def _is_empty(node: ast.ListComp | ast.GeneratorExp | ast.DictComp, constants: Mapping[str, Any]) -> bool:
    return any(
        _is_false(_iterated(g.iter), constants) or any(_is_false(t, constants) for t in g.ifs) for g in node.generators
    )


def _iterated(node: ast.expr) -> ast.expr:
    """Return the mapping of `mapping.items()`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "items":
        return node.func.value
    return node


def _default_of_empty(node: ast.expr, constants: Mapping[str, Any]) -> ast.expr | None:
    """Return the default of `mapping.get(key, default)` where the mapping is empty."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"):
        return None
    return node.args[1] if len(node.args) == 2 and value_of(node.func.value, constants) == {} else None


def _is_false(node: ast.expr, constants: Mapping[str, Any]) -> bool:
    value = value_of(node, constants)
    return value is not UNKNOWN and not value


def _bool_op(node: ast.BoolOp, constants: Mapping[str, Any]) -> Any:
    is_and = isinstance(node.op, ast.And)
    values = [value_of(value, constants) for value in node.values]
    for number, value in enumerate(values):
        if any(isinstance(inner, ast.Call) for inner in ast.walk(node.values[number])) and value is UNKNOWN:
            return UNKNOWN  # The call is made, whatever follows.
        if value is not UNKNOWN and bool(value) != is_and:
            return value
    return UNKNOWN if UNKNOWN in values else values[-1]


# A file ---------------------------------------------------------------------------------------------------------------


class _File:
    """Edits one file."""

    def __init__(self, text: str, constants: Mapping[str, Any]) -> None:
        self.text, self.constants = text, constants
        self.starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]

    def folded(self, tree: ast.Module) -> str:
        return _applied(self.text, list(self._block(tree.body)))

    # Places

    def _start(self, node: ast.AST) -> int:
        line: Any = node
        return self._offset(line.lineno, line.col_offset)

    def _end(self, node: ast.AST) -> int:
        line: Any = node
        return self._offset(line.end_lineno, line.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        start = self.starts[line - 1]
        content = self.text[start : self.starts[line]]
        return start + (column if content.isascii() else len(content.encode()[:column].decode()))

    def _value(self, node: ast.expr) -> Any:
        return value_of(node, self.constants)

    def _is_decided(self, node: ast.expr) -> bool:
        """Whether an expression has a value only because features are absent."""
        return self._value(node) is not UNKNOWN and value_of(node, {}) is UNKNOWN

    def _new(self, node: ast.expr) -> str:
        """The text of an expression."""
        start = self._start(node)
        edits = [(first - start, last - start, text) for first, last, text in self._expression(node)]
        return _applied(self.text[start : self._end(node)], edits)

    # Edits

    def _edits(self, node: ast.AST) -> Iterator[_Edit]:
        if isinstance(node, ast.expr):
            yield from self._expression(node)
        elif isinstance(node, ast.If):
            yield from self._if(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and any(_name(t) in self.constants for t, _ in _pairs(node)):
            yield from self._assignment(node)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from self._definition(node)
        else:
            yield from self._children(node)

    def _children(self, node: ast.AST) -> Iterator[_Edit]:
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                yield from self._block(value)
            else:
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, ast.AST):
                        yield from self._edits(item)

    def _block(self, body: Sequence[ast.stmt]) -> Iterator[_Edit]:
        """Edit statements that follow one another; those that are never reached go."""
        edits, num_gone, has_ended = list[_Edit](), 0, False
        for position, node in enumerate(body):
            if has_ended or self._is_gone(node) or (_is_text(node) and position and self._is_gone(body[position - 1])):
                edits.append(self._removal(node))
                num_gone += 1
            else:
                edits += self._edits(node)
                has_ended = isinstance(node, ast.If) and self._always_ends(node)
        if body and num_gone == len(body):
            start, end = self._start(body[0]), self._end(body[-1])
            edits = [(start, end, "pass")]
        yield from edits

    def _is_gone(self, node: ast.stmt) -> bool:
        """Whether nothing is left of a statement."""
        if any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node)):
            return False  # a function without them would be another
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = [_name(target) for target, _ in _pairs(node)]
            return bool(targets) and all(name in self.constants for name in targets)
        if isinstance(node, ast.AugAssign):
            return self._value(node.value) in ("", ())
        if isinstance(node, ast.If):
            value = self._value(node.test)
            return value is not UNKNOWN and all(map(self._is_gone, node.body if value else node.orelse))
        if isinstance(node, ast.For) and not node.orelse:
            return _is_false(_iterated(node.iter), self.constants) or all(map(self._is_gone, node.body))
        return False

    def _always_ends(self, node: ast.If) -> bool:
        value = UNKNOWN if _yields(node) else self._value(node.test)
        if value is UNKNOWN:
            return False
        chosen = node.body if value else node.orelse
        return bool(chosen) and isinstance(chosen[-1], _ENDS)

    def _removal(self, node: ast.stmt) -> _Edit:
        """Remove whole lines, with the comment above."""
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        lines = self.text.splitlines()
        while first and lines[first - 1].lstrip().startswith("# ") and "-----" not in lines[first - 1]:
            first -= 1
        return self.starts[first], self.starts[last], ""

    def _if(self, node: ast.If) -> Iterator[_Edit]:
        value = UNKNOWN if _yields(node) else self._value(node.test)
        is_elif = self.text.startswith("elif", self._start(node))
        if value is UNKNOWN:
            if node.orelse and all(map(self._is_gone, node.orelse)):
                yield from self._expression(node.test)
                yield from self._block(node.body)
                yield self._end(node.body[-1]), self._end(node), ""
            else:
                yield from self._children(node)
            return
        chosen, indent = (node.body if value else node.orelse), " " * node.col_offset
        start, end = self.starts[node.lineno - 1], self._end(node)
        if not chosen:  # an elif, since a statement of its own is gone as a whole
            yield start - 1, end, ""
            return
        is_chain = not value and len(chosen) == 1 and self.text.startswith("elif", self._start(chosen[0]))
        first = self.starts[chosen[0].lineno - 1]
        last = self._end(chosen[-1])
        body = _applied(self.text[first:last], _moved(list(self._block(chosen)), -first))
        if is_chain:
            body = body if is_elif else body.replace("elif", "if", 1)
        elif is_elif:
            body = f"{indent}else:\n{body}"
        else:
            body = textwrap.indent(textwrap.dedent(body), indent)
        yield start, end, body

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> Iterator[_Edit]:
        kept = [(target, value) for target, value in _pairs(node) if _name(target) not in self.constants]
        targets = ", ".join(self._new(target) for target, _ in kept)
        values = ", ".join(self._new(value) for _, value in kept if value is not None)
        yield self._start(node), self._end(node), f"{targets} = {values}"

    def _definition(self, node: ast.FunctionDef | ast.ClassDef) -> Iterator[_Edit]:
        gone = {name for name in self.constants if name in _own_names(node)}
        for decorator in node.decorator_list:
            yield from self._edits(decorator)
        body = node.body
        if isinstance(node, ast.FunctionDef):
            yield from self._arguments(node.args)
            if isinstance(node, ast.FunctionDef) and node.returns is not None:
                yield from self._edits(node.returns)
        if gone and _is_text(body[0]):
            yield from self._docstring(body[0], gone)
            body = body[1:]
        yield from self._block(body)

    def _arguments(self, args: ast.arguments) -> Iterator[_Edit]:
        parts: list[tuple[ast.arg, int]] = []
        defaults = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
        for arg, default in (
            *zip(args.args, defaults, strict=True),
            *zip(args.kwonlyargs, args.kw_defaults, strict=True),
        ):
            parts.append((arg, self._end(default if default is not None else arg)))
        gone = [arg.arg in self.constants for arg, _ in parts]
        yield from _without(gone, [(self._start(arg), end) for arg, end in parts])
        if not args.args and args.vararg is None and gone and all(gone):
            yield self.text.rindex("*", 0, self._start(parts[0][0])), self._start(parts[0][0]), ""

    def _docstring(self, node: ast.stmt, gone: set[str]) -> Iterator[_Edit]:
        text = self.text[self._start(node) : self._end(node)]
        yield self._start(node), self._end(node), without_words(text, gone, node.col_offset)

    def _expression(self, node: ast.expr) -> Iterator[_Edit]:
        start, end = self._start(node), self._end(node)
        if isinstance(node, ast.BoolOp) and self._value(node) is UNKNOWN:
            is_and = isinstance(node.op, ast.And)
            kept = [v for v in node.values if not self._is_decided(v) or bool(self._value(v)) != is_and]
            if len(kept) < len(node.values):
                joint = " and " if is_and else " or "
                yield start, end, joint.join(map(self._new, kept))
                return
        elif isinstance(node, ast.IfExp) and (test := self._value(node.test)) is not UNKNOWN:
            chosen = node.body if test else node.orelse
            is_atom = isinstance(chosen, (ast.Name, ast.Attribute, ast.Constant))
            if is_atom and self.text[start - 1] == "(" and self.text[end] == ")" and not self.text[start - 2].isalnum():
                start, end = start - 1, end + 1
            yield start, end, self._new(chosen)
            return
        elif (default := _default_of_empty(node, self.constants)) is not None:
            yield start, end, self._new(default)
            return
        elif isinstance(node, ast.Call):
            gone = [keyword.arg in self.constants for keyword in node.keywords]
            places = [(self._start(argument), self._end(argument)) for argument in (*node.args, *node.keywords)]
            yield from _without([*(False for _ in node.args), *gone], places)
            for item in (node.func, *node.args, *(k.value for k in node.keywords if k.arg not in self.constants)):
                yield from self._expression(item)
            return
        elif isinstance(node, (ast.Set, ast.Tuple, ast.List)) and any(
            isinstance(item, ast.Starred) for item in node.elts
        ):
            gone = [isinstance(item, ast.Starred) and self._is_decided(item.value) for item in node.elts]
            yield from _without(gone, [(self._start(item), self._end(item)) for item in node.elts])
            for item in itertools.compress(node.elts, (not is_gone for is_gone in gone)):
                yield from self._expression(item)
            return
        elif self._is_decided(node):
            is_list = isinstance(node, ast.ListComp)
            yield start, end, "[]" if is_list else repr(self._value(node))
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from self._expression(child)
            elif isinstance(child, ast.comprehension):
                yield from self._comprehension(child)

    def _comprehension(self, node: ast.comprehension) -> Iterator[_Edit]:
        yield from self._expression(node.iter)
        for before, test in zip([node.iter, *node.ifs], node.ifs, strict=False):
            if self._is_decided(test):
                yield self._end(before), self._end(test), ""
            else:
                yield from self._expression(test)


def _yields(node: ast.If) -> bool:
    """Whether one of the branches yields, and so decides that the function is a generator."""
    return any(isinstance(inner, (ast.Yield, ast.YieldFrom)) for inner in ast.walk(node))


def _own_names(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    """The names of a function's arguments, or of a class's attributes and of those of its constructor."""
    if isinstance(node, ast.FunctionDef):
        return {arg.arg for arg in (*node.args.args, *node.args.kwonlyargs)}
    names = {_name(target) for member in node.body for target, _ in _pairs(member)}
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            names |= _own_names(member)
    return names


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _moved(edits: Sequence[_Edit], by: int) -> list[_Edit]:
    return [(start + by, end + by, text) for start, end, text in edits]


def _applied(text: str, edits: Sequence[_Edit]) -> str:
    for start, end, new in sorted(edits, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _without(gone: Sequence[bool], places: Sequence[tuple[int, int]]) -> Iterator[_Edit]:
    """Remove members of a list with their commas."""
    num_kept = max((index + 1 for index, is_gone in enumerate(gone) if not is_gone), default=0)
    for index, (start, _) in enumerate(places[:num_kept]):
        if gone[index]:
            yield start, places[index + 1][0], ""
    if num_kept < len(places):
        yield places[num_kept - 1][1] if num_kept else places[0][0], places[-1][1], ""
