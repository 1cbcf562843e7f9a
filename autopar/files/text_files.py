"""Text files of users, read as data. Text that is not data is refused with the file's name and line.

YAML is read without tags, dates and merge keys. A key may occur once. Aliases are allowed, unless they multiply values.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import AutoparError, ConstraintError

MOST_BYTES = 16 * 2**20
"""Largest size of a plan or a configuration; the plan of a model of 405 billion parameters has some thousand bytes."""
MOST_VALUES = 200_000
"""Largest number of values in a YAML text; an alias counts as all its values."""
MOST_NESTED = 40
"""Largest depth of brackets and of indentations: PyYAML takes seconds, and overflows its stack, for thousands."""
LARGEST = 2**63
_COLLECTIONS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}

Keys = tuple[str, ...]
Lines = Mapping[Keys, int]
"""The line of every value, by the keys (and item numbers) that lead to it."""


def read_text(path: str | Path, kind: type[AutoparError] = ConstraintError) -> str:
    """Return the text of a file. Raises `kind` if it cannot be read, is too large, or is not UTF-8."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise kind(f"cannot read {path}", values=error.strerror or str(error)) from None
    except ValueError as error:  # a null character in the name
        raise kind(f"cannot read {shown(str(path))}", values=str(error)) from None
    if len(content) > MOST_BYTES:
        raise kind(f"cannot read {path}", values=f"more than {MOST_BYTES} bytes", alternatives="a smaller text file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise kind(
            f"{path}, line {line}: the file is not UTF-8 text",
            values=f"byte {content[error.start]:#04x}",
            alternatives="the file saved as UTF-8",
        ) from None


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Return the top-level mapping of a YAML or TOML file, by its ending. Raises ConstraintError with the line of an
    error."""
    text = read_text(path)
    try:
        data = tomllib.loads(text) if str(path).endswith(".toml") else parse_yaml(text, str(path))[0]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConstraintError(
            f"{path} is not valid TOML", values=str(error), alternatives='lines such as name = "value"'
        ) from None
    if not isinstance(data, dict):
        raise ConstraintError(
            f"{path} is not a configuration", values=type(data).__name__, alternatives="lines such as name: value"
        )
    return data


def parse_yaml(text: str, source: str, kind: type[AutoparError] = ConstraintError) -> tuple[Any, Lines]:
    """Return the value of a YAML text, and its lines. Raises `kind` with the source and the line of an error."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        line, problem = _problem(error, text)
        raise kind(f"{source}, line {line}: this is not valid YAML", values=problem) from None
    if root is None:
        return None, {}
    builder = _Builder(loader, source, kind)
    return builder.build(root, ()), builder.lines


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid JSON, and for brackets that nest too deep."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets nest too deep") from None


def near(name: object, legal: Iterable[str]) -> list[str]:
    """Return alternatives for an unknown name: the nearest legal one, and all."""
    names = sorted(legal)
    close = difflib.get_close_matches(str(name), names, 1)
    return [*(f"did you mean {match!r}?" for match in close), "one of " + (", ".join(names) or "(none)")]


def shown(value: object, length: int = 80) -> str:
    """Return a value for a message: on one line, and shortened if it is long."""
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


class _Loader(yaml.SafeLoader):
    """The loader of YAML's nodes and scalars. Dates stay text, as autopar reads none. Numbers follow YAML 1.2, in which
    1e-3 is a number."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's own table, narrowed)
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        self.refuse_more(self.flow_level, "nested brackets")
        super().fetch_flow_collection_start(token)

    def add_indent(self, column: int) -> bool:
        self.refuse_more(len(self.indents), "nested indentations")
        return bool(super().add_indent(column))

    def refuse_more(self, depth: int, nesting: str) -> None:
        if depth >= MOST_NESTED:
            mark = self.get_mark()
            raise yaml.MarkedYAMLError(None, None, f"more than {MOST_NESTED} {nesting}", mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+\Z"), list("-+.0123456789")
)


def _problem(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the line and the words of an error of PyYAML."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = getattr(error, "position", None)
    line = mark.line + 1 if mark else text.count("\n", 0, position) + 1 if isinstance(position, int) else 1
    reason = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return line, str(reason)


class _Builder:
    """Builds dicts, lists and scalars from YAML nodes, and records their lines."""

    def __init__(self, loader: _Loader, source: str, kind: type[AutoparError]) -> None:
        self.loader, self.source, self.kind = loader, source, kind
        self.lines: dict[Keys, int] = {}
        self.count = 0
        self.open: set[int] = set()

    def refuse(self, node: yaml.Node, message: str, values: str | None = None) -> AutoparError:
        return self.kind(f"{self.source}, line {node.start_mark.line + 1}: {message}", values=values)

    def build(self, node: yaml.Node, path: Keys) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if self.count > MOST_VALUES:
            raise self.refuse(node, f"there are more than {MOST_VALUES} values (aliases count with all their values)")
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node)
        if node.tag not in _COLLECTIONS:
            raise self.refuse(node, "tags are not supported", node.tag)
        if id(node) in self.open:
            raise self.refuse(node, "an alias refers to a value that contains it")
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            return [self.build(item, (*path, str(number))) for number, item in enumerate(node.value)]
        except RecursionError:
            raise self.refuse(node, "brackets nest too deep") from None
        finally:
            self.open.discard(id(node))

    def mapping(self, node: yaml.MappingNode, path: Keys) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self.refuse(key_node, "a key must be a name")
            key = self.scalar(key_node)
            if key in values:
                raise self.refuse(key_node, f"the key {'.'.join((*path, str(key)))} occurs twice")
            self.lines[*path, str(key)] = key_node.start_mark.line + 1
            values[key] = self.build(value_node, (*path, str(key)))
        return values

    def scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == "tag:yaml.org,2002:merge":
            return node.value
        try:
            value = self.loader.construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError, AttributeError, IndexError) as error:  # `!!int x`, a huge number
            raise self.refuse(node, "this value cannot be read", str(error).splitlines()[0][:200]) from None
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise self.refuse(node, "tags are not supported", node.tag)
        if isinstance(value, int) and abs(value) > LARGEST:
            raise self.refuse(node, "the number is too large", node.value[:40])
        return value
