"""The docstrings and the layout of source of which parts were cut out."""

from __future__ import annotations

import re
import textwrap

from codegen.source.columns import COLUMNS

_ENTRY = re.compile(r"(?<![\w`])(\w+(?:,\s+\w+)*)(?:\s\([^)]*\))?: ")


def without_words(text: str, names: set[str], column: int) -> str:
    """Return a docstring without what it says about arguments: "name: ..." up to the next sentence that begins so."""
    while True:
        entries = [m for m in _ENTRY.finditer(text) if re.search(r'(?:[.)]|"""|\n)\s*\Z', text[: m.start()])]
        gone = [index for index, entry in enumerate(entries) if names.issuperset(re.split(r",\s+", entry[1]))]
        if not gone:
            break
        first, following = entries[gone[0]].start(), entries[gone[0] + 1 : gone[0] + 2]
        blank = text.find("\n\n", first)
        ends = [*(entry.start() for entry in following), *([blank] if blank >= 0 else [])]
        last = min([*ends, len(text.removesuffix('"""').rstrip())])
        before, after = text[:first].rstrip(" \n"), text[last:].lstrip(" ")
        space = text[len(before) : first]  # before the entry: a new paragraph or line stays one
        is_kept = "\n\n" in space or ("\n" in space and text[:last].rstrip(" ").endswith("\n"))
        has_words = after[:1].strip('"\n') != ""
        joint = "" if not has_words else space if is_kept else " "
        text = _wrapped(before + joint + after, column)
    body = text.removesuffix('"""').rstrip()
    return f'{body}\n{" " * column}"""' if "\n" in body else f'{body}"""'


def _wrapped(text: str, column: int) -> str:
    """Wrap lines that have become too long, with those that follow them."""
    lines, indent, index = text.split("\n"), " " * column, 0
    while index < len(lines):
        first, *rest = textwrap.wrap(lines[index].strip(), COLUMNS - column, break_on_hyphens=False) or [""]
        if rest:
            lines[index] = (indent if index else "") + first
            following = lines[index + 1].strip() if index + 1 < len(lines) else ""
            is_joined = following not in ("", '"""') and not _ENTRY.match(following)
            lines[index + 1 : index + 1 + is_joined] = [indent + " ".join([*rest, *([following] * is_joined)])]
        index += 1
    return "\n".join(lines)


_CALL = re.compile(r"^(?P<head>[^\n#]*\()\n\s+(?P<inside>[^\n#]*[^,\n#(\[{])\n\s*(?P<tail>\)[^\n#]*)$", re.MULTILINE)
_ARGUMENT = r"(?P=indent)    [^\s#][^\n#]*,\n"
_LISTED = re.compile(
    rf"^(?P<head>(?P<indent> *)[^\n#]*\w\()\n(?P<inside>(?:{_ARGUMENT})+)(?P=indent)(?P<tail>\)[^\n#]*)$", re.MULTILINE
)
"""A call or a signature with each argument in a line. A tuple is none: its last comma may be what makes it one."""


def tidied(text: str) -> str:
    """Return source as a formatter leaves it: one blank line between statements, calls in one line where they fit."""
    text = re.sub(r"\n{3,}(?=[ )\]}])", "\n\n", text)
    text = re.sub(r"(?<=\n)((?:from|import) [^\n]*\n|\)\n)\n{2,}(?!def |class |@|#|if |\n)", r"\1\n", text)

    def joined(match: re.Match[str]) -> str:
        inside = " ".join(map(str.strip, match["inside"].splitlines())).removesuffix(",")
        line = match["head"] + inside + match["tail"]
        is_whole = all(inside.count(one) == inside.count(other) for one, other in ("()", "[]", "{}"))
        return line if len(line) <= COLUMNS and is_whole else match[0]

    return _LISTED.sub(joined, _CALL.sub(joined, text)).rstrip("\n") + "\n"
