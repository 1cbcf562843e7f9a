"""The text of a file without the branches that absent features decide, and without the arguments for them."""

from __future__ import annotations

import ast
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from codegen.saved_folder.reachability import is_text
from codegen.saved_folder.values import UNKNOWN, default_of_empty, is_false, iterated, name_of, value_of
from codegen.saved_folder.wording import without_words

_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_Edit = tuple[int, int, str]
"""Characters from, to, and the text in their place."""


class FoldedFile:
    """A file that is edited. constants: names of absent features with their values."""

    def __init__(self, text: str, constants: Mapping[str, Any]) -> None:
        self.text, self.constants = text, constants
        self.starts = [0, *itertools.accumulate(map(len, text.splitlines(keepends=True)))]

    def folded(self, tree: ast.Module) -> str:
        """Return the text with all edits made."""
        return self._edited(0, len(self.text), self._block(tree.body))

    def _edited(self, start: int, end: int, edits: Iterable[_Edit]) -> str:
        """Return a part of the text after edits inside of it."""
        text = self.text[start:end]
        for first, last, new in sorted(edits, reverse=True):
            text = text[: first - start] + new + text[last - start :]
        return text

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
        return self._edited(self._start(node), self._end(node), self._expression(node))

    # Edits

    def _edits(self, node: ast.AST) -> Iterator[_Edit]:
        if isinstance(node, ast.expr):
            yield from self._expression(node)
        elif isinstance(node, ast.If):
            yield from self._if(node)
        elif isinstance(node, ast.With) and self._is_null(node):
            body = self._block_at(node.body, " " * node.col_offset)
            yield self.starts[node.lineno - 1], self._end(node), body
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
            name_of(t) in self.constants for t, _ in assigned_pairs(node)
        ):
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
            if has_ended or self._is_gone(node) or (is_text(node) and position and self._is_gone(body[position - 1])):
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
            targets = [name_of(target) for target, _ in assigned_pairs(node)]
            return bool(targets) and all(name in self.constants for name in targets)
        if isinstance(node, ast.AugAssign):
            return self._value(node.value) in ("", ())
        if isinstance(node, ast.If):
            value = self._value(node.test)
            return value is not UNKNOWN and all(map(self._is_gone, node.body if value else node.orelse))
        if isinstance(node, ast.For) and not node.orelse:
            return is_false(iterated(node.iter), self.constants) or all(map(self._is_gone, node.body))
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
        body = self._edited(self.starts[chosen[0].lineno - 1], self._end(chosen[-1]), self._block(chosen))
        if is_chain:
            body = body if is_elif else body.replace("elif", "if", 1)
        elif is_elif:
            body = f"{indent}else:\n{body}"
        else:
            body = self._block_at(chosen, indent)
        yield start, end, body

    def _block_at(self, chosen: Sequence[ast.stmt], indent: str) -> str:
        """Return the text of statements as it is without what encloses them."""
        body = self._edited(self.starts[chosen[0].lineno - 1], self._end(chosen[-1]), self._block(chosen))
        return textwrap.indent(textwrap.dedent(body), indent)

    def _is_null(self, node: ast.With) -> bool:
        """Whether nothing is left of a context: `nullcontext() if host is None else host.stream()`."""
        context = node.items[0].context_expr
        if len(node.items) > 1 or not isinstance(context, ast.IfExp) or not self._is_decided(context.test):
            return False
        chosen = context.body if self._value(context.test) else context.orelse
        return isinstance(chosen, ast.Call) and name_of(chosen.func) == "nullcontext"

    def _assignment(self, node: ast.Assign | ast.AnnAssign) -> Iterator[_Edit]:
        kept = [(target, value) for target, value in assigned_pairs(node) if name_of(target) not in self.constants]
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
        if gone and is_text(body[0]):
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
        elif (default := default_of_empty(node, self.constants)) is not None:
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
    names = {name_of(target) for member in node.body for target, _ in assigned_pairs(member)}
    for member in node.body:
        if isinstance(member, ast.FunctionDef) and member.name == "__init__":
            names |= _own_names(member)
    return names


def _without(gone: Sequence[bool], places: Sequence[tuple[int, int]]) -> Iterator[_Edit]:
    """Remove members of a list with their commas."""
    num_kept = max((index + 1 for index, is_gone in enumerate(gone) if not is_gone), default=0)
    for index, (start, _) in enumerate(places[:num_kept]):
        if gone[index]:
            yield start, places[index + 1][0], ""
    if num_kept < len(places):
        yield places[num_kept - 1][1] if num_kept else places[0][0], places[-1][1], ""


def assigned_pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the targets of an assignment with their values."""
    if isinstance(node, ast.AnnAssign):
        yield node.target, node.value
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value
