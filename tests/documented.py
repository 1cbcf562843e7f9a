"""What pages of the documentation show: their blocks in order, and the commands in these.

A block is between fences. What the tests make of it follows from its language:

    python              is executed; all of a page in one namespace, the one of a script
    (with a title)      is a file of that name: written where there is none, else an excerpt of what is there
    (none), console, sh, bash
                        has commands, which are run; in a block with `$ ` other lines are what the command prints
    text                is what the block of Python before it prints, where that is the block before
    yaml, toml          is parsed

A line `*Not run: REASON.*` right before a block leaves it to be parsed: Python is compiled, and what autopar and
torchrun are given goes through their own parsers. Readers see the line as well.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REASON = re.compile(r"^\*Not run: (.+)\*$")
SHELLS = ("", "console", "sh", "bash")
PROGRAMS = ("autopar", "torchrun", "make", "python", "cat", "ls", "sed", "pip", "sbatch", "kubectl")
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
BAR = re.compile(r"[█·]+")
FARTHEST = re.compile(r"\([\w.]+, (?=of \d+ compared\))")
"""The parameter whose round-off is largest: another on processors of another kind."""


@dataclass(frozen=True, slots=True)
class Block:
    """line: of its first fence, from 1. title: the file that it is, or "". reason: why it is not run, or ""."""

    page: str
    line: int
    language: str
    title: str
    reason: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Command:
    """One line as a shell would take it, and the lines that the page shows below it."""

    line: str
    shown: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def pages() -> list[str]:
    """README.md and every page of docs/, by their paths from the project's folder."""
    return ["README.md", *sorted(str(path.relative_to(HOME)) for path in (HOME / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """In the order of the page."""
    text = (HOME / page).read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip().rpartition("\n")[2]
        told = REASON.match(before)
        language, _, rest = match[1].strip().partition(" ")
        title = re.fullmatch(r'title="([^"]+)"', rest)
        assert title or not rest, f"{page}: a fence says {match[1]!r}"
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, language, title[1] if title else "", told[1] if told else "", match[2]))
    return found


def commands(block: Block) -> list[Command]:
    """Of a block of a shell; none of one that shows something else, such as a drawing."""
    if block.language not in SHELLS:
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        starts = [at for at, line in enumerate(lines) if line.startswith("$ ")] + [len(lines)]
        return [
            Command(lines[at][2:], tuple(line for line in lines[at + 1 : end] if line.strip()))
            for at, end in zip(starts, starts[1:], strict=False)
        ]
    return [Command(line, ()) for line in lines if line.split(" ")[0].rpartition("/")[2] in PROGRAMS]


def spans(page: str) -> list[Command]:
    """Commands of autopar within sentences, as `autopar plan MODEL --out plan.yaml`, with or without what they need."""
    text = FENCE.sub("", (HOME / page).read_text(encoding="utf-8"))
    found = [" ".join(span.split()) for span in re.findall(r"`(autopar [^`]+)`", text)]
    return [Command(line, ()) for line in found if re.match(r"autopar [a-z]+", line)]


def plain(line: str) -> str:
    """A line of output without what differs between machines: figures, bars, blanks, where round-off is largest."""
    return " ".join(NUMBER.sub("#", BAR.sub("", FARTHEST.sub("(", line))).split())


def matched(shown: tuple[str, ...], printed: str) -> tuple[list[str], list[str]]:
    """For each shown line the printed one that it stands for, in order; and the shown ones that nothing stands for.

    A shown `...` stands for any number of lines; it is its own match.
    """
    rest = [line.rstrip() for line in printed.splitlines()]
    found, missing = [], []
    for line in shown:
        if line.strip() == "...":
            found.append(line)
            continue
        at = next((at for at, other in enumerate(rest) if plain(other) == plain(line)), None)
        if at is None:
            missing.append(line)
        else:
            found.append(rest[at])
            rest = rest[at + 1 :]
    return found, missing


def excerpt(block: Block, source: str) -> str | None:
    """The part of `source` from the block's first line through its last; None where it has no such part."""
    own, lines = block.text.splitlines(), source.splitlines()
    if own[0] not in lines or own[-1] not in lines[lines.index(own[0]) :]:
        return None
    first = lines.index(own[0])
    return "\n".join(lines[first : lines.index(own[-1], first) + 1]) + "\n"
