"""Definitions of the run time that a generated program reaches: functions, classes, their methods, constants.

A method is reached if its class is, and anything reached names it: as an attribute, or as a string. Methods that Python
or a base class outside of the program calls are always reached. So are statements that do more than bind a name.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

Path = tuple[str, ...]
"""A module of a program's folder: ("runtime", "step"), ("model",)."""

HOME = "autopar_program"
"""The name by which main.py, outside of the folder's package, imports that package."""


@dataclass(frozen=True, slots=True)
class Uses:
    """The names that code refers to. pairs: `name.attribute`. imports: (module, name) inside of functions.

    attributes: those of other expressions, and strings that could be such names.
    """

    names: frozenset[str]
    pairs: frozenset[tuple[str, str]]
    attributes: frozenset[str]
    imports: frozenset[tuple[Path, str]]


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """Statements that stay or go together: a function with its overloads, a constant with its docstring, a class.

    methods: of a class, by name; `uses` is then of its other statements. bases: of a class, as they are written.
    """

    nodes: tuple[ast.stmt, ...]
    uses: Uses
    methods: Mapping[str, Definition] = field(default_factory=dict)
    bases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Module:
    """A file. imports: name -> (module of the folder, name in it; "" for the module). outside: name -> import path of
    what is not in the folder. type_names: what is imported for type checkers alone. always: statements that are kept
    wherever the module is. import_nodes: its imports, those for type checkers included."""

    text: str
    definitions: Mapping[str, Definition]
    imports: Mapping[str, tuple[Path, str]]
    outside: Mapping[str, str]
    type_names: frozenset[str]
    always: tuple[Definition, ...]
    import_nodes: tuple[ast.stmt, ...]


@dataclass(slots=True)
class Reached:
    """The reached code: (module, name) of definitions and of imports, and (module, class, method)."""

    definitions: set[tuple[Path, str]] = field(default_factory=set)
    methods: set[tuple[Path, str, str]] = field(default_factory=set)
    modules: set[Path] = field(default_factory=set)


# A file -------------------------------------------------------------------------------------------------------------


@functools.cache
def parsed(text: str) -> ast.Module:
    """Return a file's syntax. It is not changed."""
    return ast.parse(text)


@functools.cache
def module_of(text: str, package: Path) -> Module:
    """Return a file's definitions and imports. package: the folder that it lies in, () for the program's own."""
    definitions: dict[str, Definition] = {}
    imports: dict[str, tuple[Path, str]] = {}
    outside: dict[str, str] = {}
    type_names: set[str] = set()
    always: list[Definition] = []
    body = parsed(text).body
    for position, node in enumerate(body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            inside, others = _bindings(node, package)
            imports |= inside
            outside |= others
        elif is_for_types(node):
            type_names |= {
                alias.asname or alias.name for statement in node.body for alias in getattr(statement, "names", ())
            }
        elif isinstance(node, ast.ClassDef):
            definitions[node.name] = _class(node, package)
        elif name := _bound(node):
            documented = body[position + 1 : position + 2] if isinstance(node, (ast.Assign, ast.AnnAssign)) else []
            nodes = (node, *(statement for statement in documented if is_text(statement)))
            before = definitions[name].nodes if name in definitions else ()
            definitions[name] = Definition((*before, *nodes), _uses((*before, *nodes), package))
        elif not is_text(node):
            always.append(Definition((node,), _uses((node,), package)))
    import_nodes = tuple(node for node in body if isinstance(node, (ast.Import, ast.ImportFrom)) or is_for_types(node))
    return Module(
        text=text,
        definitions=definitions,
        imports=imports,
        outside=outside,
        type_names=frozenset(type_names),
        always=tuple(always),
        import_nodes=import_nodes,
    )


def is_for_types(node: ast.AST) -> TypeGuard[ast.If]:
    """Whether a statement is `if TYPE_CHECKING:`, which nothing runs."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a text: the docstring of what encloses it or comes before it."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _bound(node: ast.stmt) -> str:
    """The one name that a statement binds and does nothing else; "" for any other statement."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _class(node: ast.ClassDef, package: Path) -> Definition:
    by_name: dict[str, list[ast.stmt]] = defaultdict(list)
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            by_name[member.name].append(member)
    methods = {name: Definition(tuple(nodes), _uses(nodes, package)) for name, nodes in by_name.items()}
    others = [member for member in node.body if not isinstance(member, ast.FunctionDef)]
    uses = _uses((*others, *node.bases, *node.keywords, *node.decorator_list), package)
    bases = tuple(ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in node.bases)
    return Definition((node,), uses, methods, bases)


def _uses(nodes: Iterable[ast.AST], package: Path) -> Uses:
    names, pairs, attributes, imports = set(), set(), set(), set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            pairs.add((node.value.id, node.attr))
            continue
        if isinstance(node, ast.Attribute):
            attributes.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, str) and node.value.isidentifier():
                attributes.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            imports |= set(_bindings(node, package)[0].values())
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                waiting += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                waiting.append(value)
    return Uses(frozenset(names), frozenset(pairs), frozenset(attributes), frozenset(imports))


def _bindings(node: ast.Import | ast.ImportFrom, package: Path) -> tuple[dict[str, tuple[Path, str]], dict[str, str]]:
    """The names that an import binds: to (module, name) of the folder, and to import paths of all else."""
    if isinstance(node, ast.Import):
        return {}, {a.asname or a.name: a.name for a in node.names}
    inside = source_of(node, package)
    if inside is None:
        return {}, {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
    # `from . import watch` binds a module, `from .watch import noted` what is in one.
    is_package = len(inside) == 0 or inside in (("runtime",), ("kernels",))
    return {a.asname or a.name: ((*inside, a.name), "") if is_package else (inside, a.name) for a in node.names}, {}


def source_of(node: ast.ImportFrom, package: Path) -> Path | None:
    """The module of the folder that an import reads; None for an import from outside."""
    parts = tuple(node.module.split(".")) if node.module else ()
    if node.level:
        return (*package[: len(package) - node.level + 1], *parts)
    return parts[1:] if parts[:1] == (HOME,) else None


# From a program on --------------------------------------------------------------------------------------------------


def reached(program: Mapping[Path, Module], modules: Mapping[Path, Module], methods: Iterable[str] = ()) -> Reached:
    """Return what the program's files lead to in the modules of the run time.

    program: the generated files, which are kept whole. methods: further names of methods that are kept.
    """
    walk = _Walk({**modules, **program})
    for method in methods:
        walk.need_methods(method)
    for path in program:
        walk.need_module(path)
    walk.run()
    return walk.reached


class _Walk:
    """Follows references until nothing new is reached."""

    def __init__(self, modules: Mapping[Path, Module]) -> None:
        self.modules = modules
        self.reached = Reached()
        self._whole: set[Path] = set()
        self._attributes: set[str] = set()
        self._waiting: list[tuple[Path, Definition]] = []
        self._methods: dict[str, list[tuple[Path, str, Definition]]] = defaultdict(list)

    def run(self) -> None:
        """Process what waits."""
        while self._waiting:
            path, definition = self._waiting.pop()
            self._follow(path, definition.uses)

    def need_module(self, path: Path) -> None:
        """Reach all of a module, and what it imports."""
        if path not in self.modules or path in self._whole:
            return
        self._whole.add(path)
        self._enter(path)
        module = self.modules[path]
        for name, definition in module.definitions.items():
            self._need(path, name)
            for method in definition.methods:
                self.need_methods(method)
        for target, name in module.imports.values():
            self._enter(target)
            self._need(target, name)

    def _enter(self, path: Path) -> None:
        if path in self.modules and path not in self.reached.modules:
            self.reached.modules.add(path)
            self._waiting += [(path, definition) for definition in self.modules[path].always]

    def _need(self, path: Path, name: str) -> None:
        module = self.modules.get(path)
        if module is None or (path, name) in self.reached.definitions:
            return
        self.reached.definitions.add((path, name))
        if name in module.imports:
            self._need_import(*module.imports[name])
        if name not in module.definitions:
            return
        self._enter(path)
        definition = module.definitions[name]
        self._waiting.append((path, definition))
        for method, body in definition.methods.items():
            if method in self._attributes or self._is_called_from_outside(path, definition, method):
                self._keep(path, name, body, method)
            else:
                self._methods[method].append((path, name, body))

    def _need_import(self, path: Path, name: str) -> None:
        if name:
            self._enter(path)
            self._need(path, name)
        else:
            self.need_module(path)

    def _keep(self, path: Path, owner: str, body: Definition, method: str) -> None:
        self.reached.methods.add((path, owner, method))
        self._waiting.append((path, body))

    def need_methods(self, attribute: str) -> None:
        """Reach the methods of this name of all classes that are reached."""
        if attribute not in self._attributes:
            self._attributes.add(attribute)
            for path, owner, body in self._methods.pop(attribute, ()):
                self._keep(path, owner, body, attribute)

    def _follow(self, path: Path, uses: Uses) -> None:
        module = self.modules[path]
        for attribute in uses.attributes:
            self.need_methods(attribute)
        for name in uses.names:
            self._need(path, name)
        for name, attribute in uses.pairs:
            target, inner = module.imports.get(name, ((), "-"))
            if inner == "":
                self._enter(target)
                self._need(target, attribute)
            elif name not in module.outside:
                self.need_methods(attribute)
                self._need(path, name)
        for target, inner in uses.imports:
            self._need_import(target, inner)

    def _is_called_from_outside(self, path: Path, definition: Definition, method: str) -> bool:
        """Whether Python, or a base class that is not of the folder, may call a method."""
        if method.startswith("__") and method.endswith("__"):
            return True
        return any(has_method(base, method) for base in self._outer_bases(path, definition))

    def _outer_bases(self, path: Path, definition: Definition) -> Iterator[str]:
        """Import paths of the base classes that are not of the folder, those of base classes included."""
        module = self.modules[path]
        for base in definition.bases:
            head, _, rest = base.partition(".")
            home, name = module.imports.get(head, (path, head))
            if name in self.modules[home].definitions:
                yield from self._outer_bases(home, self.modules[home].definitions[name])
            else:
                yield module.outside.get(head, f"builtins:{head}") + (f".{rest}" if rest else "")


@functools.cache
def has_method(base: str, method: str) -> bool:
    """Whether a class has the method, or calls methods by such names. base: its import path, "torch.nn:Module"."""
    if base.startswith("ast."):
        return method.startswith("visit_")
    module, _, path = base.replace(".", ":", 1 if ":" not in base else 0).partition(":")
    value = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return hasattr(value, method)
