"""The docstrings and the layout of source of which parts were cut out."""

from __future__ import annotations

import re
import textwrap

from codegen.source.columns import COLUMNS

_ENTRY = re.compile(r"(?<![\w`])(\w+(?:,\s+\w+)*)(?:\s\([^)]*\))?: ")


def without_words(text: str, names: set[str], column: int) -> str:
    """Return a docstring without what it says about arguments: "name: ..." up to the next sentence that begins so."""
    starts = [match for match in _ENTRY.finditer(text) if re.search(r'(?:[.)]|"""|\n)\s*\Z', text[: match.start()])]
    for match in reversed(starts):
        if not names.issuperset(re.split(r",\s+", match[1])):
            continue
        later = [other.start() for other in starts if other.start() > match.start()]
        blank = text.find("\n\n", match.start())
        end = min([*later, *([blank] if blank >= 0 else []), len(text.removesuffix('"""').rstrip())])
        before, after = text[: match.start()].rstrip(" \n"), text[end:].lstrip(" ")
        is_new_line = text[: match.start()].rstrip(" ").endswith("\n") and text[:end].rstrip(" ").endswith("\n")
        joint = (
            f"\n{' ' * column}" if is_new_line and not after.startswith("\n") else " " if after[:1].strip('"\n') else ""
        )
        text = _wrapped(before + joint + after, column)
        starts = [other for other in starts if other.start() < match.start()]
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


def tidied(text: str) -> str:
    """Return source as a formatter leaves it: one blank line between statements, calls in one line where they fit."""
    text = re.sub(r"\n{3,}(?=[ )\]}])", "\n\n", text)
    text = re.sub(r"(?<=\n)((?:from|import) [^\n]*\n|\)\n)\n{2,}(?!def |class |@|#|if |\n)", r"\1\n", text)

    def joined(match: re.Match[str]) -> str:
        line = match["head"] + match["inside"] + match["tail"]
        return line if len(line) <= COLUMNS else match[0]

    return _CALL.sub(joined, text).rstrip("\n") + "\n"
