"""The source of the run time without what a program does not reach, as a person would have left it."""

from __future__ import annotations

import ast
import contextlib
import gc
import re
from collections.abc import Iterator, Mapping

from codegen.saved_folder.absent_features import folded
from codegen.saved_folder.reachability import Definition, Module, Path, Reached, is_for_types, module_of, reached
from codegen.saved_folder.wording import tidied
from codegen.source.columns import COLUMNS

_HEADING = re.compile(r"\s*# ?.*-{8,}$")

KEPT = ("evaluate", "full_state_dict", "clip", "perturbed")
"""Methods of a step that main.py does not call, and a loop that takes its place may."""


def pruned(sources: Mapping[str, str], modules: Mapping[str, str]) -> dict[str, str]:
    """Return the modules of the run time with only the definitions, methods and imports that the sources lead to.

    sources: generated Python files by name, which stay whole. modules: text by file name ("runtime/step.py").
    """
    with _paused_collector():
        present = _reached(sources, modules)
        # What a feature that the program lacks would need is reached no more once its branches are gone.
        texts = {name: tidied(text) for name, text in _reached(sources, folded(sources, present)).items()}
    packages = {f"{name.partition('/')[0]}/__init__.py" for name in texts}
    return dict(sorted((texts | {name: modules[name] for name in packages}).items()))


def _reached(sources: Mapping[str, str], modules: Mapping[str, str]) -> dict[str, str]:
    """Return the modules with only what the sources lead to."""
    program = {_path(name): module_of(text, _path(name)[:-1]) for name, text in sources.items()}
    runtime = {_path(name): module_of(text, _path(name)[:-1]) for name, text in modules.items()}
    kept = reached(program, runtime, KEPT)
    return {name: _without(path, runtime[path], kept) for name in modules if (path := _path(name)) in kept.modules}


@contextlib.contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause Python's collector of cycles: syntax trees are many objects, and it would walk a whole model for them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _path(name: str) -> Path:
    return tuple(name.removesuffix(".py").split("/"))


def _without(path: Path, module: Module, kept: Reached) -> str:
    """A module's text without what is not reached."""
    lines = module.text.splitlines()
    cuts, used = list[Definition](), {name for name in module.imports if (path, name) in kept.definitions}
    for name, definition in module.definitions.items():
        if (path, name) not in kept.definitions:
            cuts.append(definition)
            continue
        used |= _names(definition)
        for method, body in definition.methods.items():
            if (path, name, method) in kept.methods:
                used |= _names(body)
            else:
                cuts.append(body)
    used = used.union(*map(_names, module.always))
    nodes = [node for definition in cuts for node in definition.nodes]
    edits = [(*_lines_of(node, lines), "") for node in nodes] + list(_imports(module, used, lines))
    for first, last, text in sorted(edits, reverse=True):
        _replace(lines, first, last, text)
    return "\n".join(_without_empty_headings(lines)).strip("\n") + "\n"


def _names(definition: Definition) -> set[str]:
    return {*definition.uses.names, *(name for name, _ in definition.uses.pairs)}


def _lines_of(node: ast.stmt, lines: list[str]) -> tuple[int, int]:
    """The lines of a statement with its decorators and the comment above it, counted from 0, without the last."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
    while first and lines[first - 1].lstrip().startswith("#") and not _HEADING.match(lines[first - 1]):
        first -= 1
    return first, node.end_lineno or node.lineno


def _imports(module: Module, used: set[str], lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield where the imports of a module are, and their text with only the names that are used."""
    used = used | {"TYPE_CHECKING"} if module.type_names & used else used
    for node in module.import_nodes:
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        if is_for_types(node):
            inner = [line for statement in node.body for line in _import(statement, used, lines)]
            kept = [*lines[first : node.body[0].lineno - 1], *inner] if inner else []
        else:
            kept = _import(node, used, lines)
        yield first, last, "\n".join(kept)


def _import(node: ast.stmt, used: set[str], lines: list[str]) -> list[str]:
    """Return the lines of an import with only the names that are used."""
    written = lines[node.lineno - 1 : node.end_lineno]
    if not isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "module", "") == "__future__":
        return written
    aliases = [alias for alias in node.names if (alias.asname or alias.name.partition(".")[0]) in used]
    if not aliases or len(aliases) == len(node.names):
        return written if aliases else []
    indent = " " * node.col_offset
    text = indent + ast.unparse(_with_names(node, aliases))
    if len(text) <= COLUMNS:
        return [text]
    head, _, names = text.partition(" import ")
    return [f"{head} import (", *(f"{indent}    {name}," for name in names.split(", ")), f"{indent})"]


def _with_names(node: ast.Import | ast.ImportFrom, aliases: list[ast.alias]) -> ast.stmt:
    return ast.Import(aliases) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, aliases, node.level)


def _replace(lines: list[str], first: int, last: int, text: str) -> None:
    """Put text in the place of lines; where nothing takes it, the blank lines before go too if blank lines follow."""
    if text:
        lines[first:last] = text.splitlines()
        return
    indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    if last >= len(lines) or not lines[last].strip():
        while first and not lines[first - 1].strip():
            first -= 1
    is_empty = first > 0 and lines[first - 1].rstrip().endswith(":") and lines[first - 1].startswith("class")
    following = next((line for line in lines[last:] if line.strip()), "")
    lines[first:last] = [f"{indent}pass"] if is_empty and not following.startswith(indent or " ") else []


def _without_empty_headings(lines: list[str]) -> list[str]:
    """The lines without headings of sections that have nothing in them any more."""
    kept: list[str] = []
    for line in reversed(lines):
        if _HEADING.match(line):
            following = next((line_kept for line_kept in reversed(kept) if line_kept.strip()), "")
            indent = len(line) - len(line.lstrip())
            if not following or _HEADING.match(following) or len(following) - len(following.lstrip()) < indent:
                while kept and not kept[-1].strip():
                    kept.pop()
                continue
        kept.append(line)
    return kept[::-1]
