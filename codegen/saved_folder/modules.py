"""The modules of `runtime/` and `kernels/` that a generated program imports, and so has in its folder."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources

from codegen.saved_folder.reachability import HOME, parsed

PACKAGES = ("runtime", "kernels")
"""Of ours, copied beside generated files under the same names."""


def imported_modules(sources: Mapping[str, str]) -> dict[str, str]:
    """File name ("runtime/step.py") -> text of every module that the sources need, their packages included.

    sources: generated files by name. Imports count at any depth of a file but under `if TYPE_CHECKING:`, which nothing
    runs. A package's `__init__.py` is its docstring alone.
    """
    texts: dict[str, str] = {}
    waiting = [target for text in sources.values() for target in _imports(text, ())]
    while waiting:
        parts = waiting.pop()
        name = "/".join(parts) + ".py"
        if name in texts or len(parts) != 2:
            continue
        home = resources.files(f"codegen.{parts[0]}")
        file = home / f"{parts[1]}.py"
        if not file.is_file():
            continue  # a function or class of a module, not a module of a package
        texts[name] = file.read_text(encoding="utf-8")
        waiting += _imports(texts[name], parts[:1])
    for package in {name.partition("/")[0] for name in texts}:
        doc = ast.get_docstring(ast.parse((resources.files(f"codegen.{package}") / "__init__.py").read_text()))
        texts[f"{package}/__init__.py"] = f'"""{(doc or "").partition(chr(10))[0]}"""\n'
    return dict(sorted(texts.items()))


@functools.cache
def _imports(text: str, package: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """(package, module) of what a file may import of ours; a file of the folder itself has the package ()."""
    return tuple(_targets(_executed(parsed(text).body), package))


def _targets(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for node in nodes:
        if not isinstance(node, ast.ImportFrom):
            continue
        module = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            base = package[: len(package) - node.level + 1]
        elif module[:1] == (HOME,):
            base, module = (), module[1:]
        else:
            continue
        target = (*base, *module)
        if target[:1] and target[0] in PACKAGES:
            yield target
            yield from ((*target, alias.name) for alias in node.names)


def _executed(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The statements that are run, and what holds statements, at any depth; no expressions."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from _executed(node.orelse)
        else:
            for field in ("body", "handlers", "cases", "orelse", "finalbody"):
                yield from _executed(getattr(node, field, ()))
