"""Lines of generated source broken so that they fit: inside brackets, at commas, else before operators."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

COLUMNS = 120

_BROKEN_BEFORE = re.compile(r"(?:if|else|and|or|for|in|\+|-|\*|/|//|%|@|\||&|==|<=|>=|<|>) ")
_STEP = "    "


def fitted(text: str) -> str:
    """The same source with lines of at most COLUMNS characters, names and texts without a place to break aside."""
    return "\n".join(part for line in text.split("\n") for part in fit(line))


def fit(line: str) -> list[str]:
    """One line, whose brackets are closed in it, as as many as it needs. A comment behind it moves above it."""
    if len(line) <= COLUMNS:
        return [line]
    code = line.lstrip()
    indent = line[: len(line) - len(code)]
    at = next((at for at, char, depth in _outside(code) if depth == 0 and char == "#"), None)
    if at is not None:
        above = textwrap.wrap(code[at + 1 :].strip(), COLUMNS - len(indent) - 2, break_long_words=False)
        return [*(f"{indent}# {part}" for part in above), *(fit(indent + code[:at].rstrip()) if at else [])]
    return _fit_code(indent, code)


def documented(doc: str) -> list[str]:
    """A class' docstring as lines: the quotes on the line of the text where it is one, else the closing ones alone."""
    short = f'{_STEP}"""{doc}"""'
    if len(short) <= COLUMNS:
        return [short]
    lines = textwrap.wrap(doc, COLUMNS - len(_STEP) - 3, break_long_words=False, break_on_hyphens=False)
    return [f'{_STEP}"""{lines[0]}', *(_STEP + line for line in lines[1:]), f'{_STEP}"""']


def _fit_code(indent: str, code: str) -> list[str]:
    """A statement; as it is where there is no place to break it."""
    at = next((at for at, char, depth in _outside(code) if depth == 0 and code.startswith(" = ", at)), 0)
    target, value = code[:at], code[at:]
    if at and not target.startswith(")") and len(indent) + at + len(" = (") > COLUMNS:
        return [f"{indent}(", *_fit_inner(indent + _STEP, target), *_fit_code(indent, f"){value}")]
    lines = _fit_brackets(indent, code)
    if lines:
        return lines
    start = f"{target} = " if at else "return " if code.startswith("return ") else ""
    if not start:
        return [indent + code]
    return [f"{indent}{start}(", *_fit_operators(indent + _STEP, code.removeprefix(start)), f"{indent})"]


def _fit_brackets(indent: str, code: str) -> list[str]:
    """Broken inside the last outermost brackets that leave what is before and behind them short; none without such."""
    if len(indent) + len(code) <= COLUMNS:
        return [indent + code]
    for opening, closing in reversed(_groups(code)):
        if closing > opening + 1 and max(opening + 1, len(code) - closing) + len(indent) <= COLUMNS:
            inner = _fit_inner(indent + _STEP, code[opening + 1 : closing])
            return [indent + code[: opening + 1], *inner, indent + code[closing:]]
    return []


def _fit_inner(indent: str, inner: str) -> list[str]:
    if len(indent) + len(inner) <= COLUMNS:
        return [indent + inner]
    items = _items(inner)
    if len(items) == 1:
        return _fit_brackets(indent, inner) or _fit_operators(indent, inner)
    return [part for item in items for part in _fit_brackets(indent, f"{item},") or _fit_operators(indent, f"{item},")]


def _fit_operators(indent: str, code: str) -> list[str]:
    """Inside brackets: a new line before each operator that would pass the end."""
    lines, start, last = [], 0, 0
    for at, char, depth in _outside(code):
        if depth or char != " ":
            continue
        if len(indent) + at - start > COLUMNS and last > start:
            lines.append(indent + code[start:last].rstrip())
            start = last
        if _BROKEN_BEFORE.match(code, at + 1):
            last = at + 1
    if len(indent) + len(code) - start > COLUMNS and last > start:
        lines.append(indent + code[start:last].rstrip())
        start = last
    return [*lines, indent + code[start:]]


def _items(code: str) -> list[str]:
    """Split at commas outside of brackets. A comprehension or a lambda is one item."""
    if re.search(r"\b(for|lambda)\b", "".join(char for _, char, depth in _outside(code) if depth == 0)):
        return [code]
    commas = [at for at, char, depth in _outside(code) if depth == 0 and char == ","]
    bounds = zip([0, *(at + 1 for at in commas)], [*commas, len(code)], strict=True)
    return [item for a, b in bounds if (item := code[a:b].strip())]


def _groups(code: str) -> list[tuple[int, int]]:
    """(opening, closing) of the outermost brackets."""
    groups, opening = [], 0
    for at, char, depth in _outside(code):
        if char in "([{" and depth == 0:
            opening = at
        elif char in ")]}" and depth == 0:
            groups.append((opening, at))
    return groups


def _outside(code: str) -> Iterator[tuple[int, str, int]]:
    """(place, character, depth of brackets) of what stands in no text; of a bracket, the depth outside of it."""
    depth, quote, is_escaped = 0, "", False
    for at, char in enumerate(code):
        if quote:
            if is_escaped or char == "\\":
                is_escaped = not is_escaped
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        else:
            depth -= char in ")]}"
            yield at, char, depth
            depth += char in "([{"
