"""The parts of a generated `forward` that compute on this rank alone, cut out as functions of tensors.

A generated forward is a line of assignments. One is local if it calls nothing but torch: `torch.x(...)`, `F.x(...)`, a
method that tensors have, operators and subscripts. All others stay as they are and where they are: reshards, dropout
(its masks depend on the step), fused kernels, put-off weight gradients, whatever this file does not know. A region is a
longest run of local assignments that compute at least twice; of fewer there is nothing to fuse. What a region reads of
`self`, parameters and buffers, becomes arguments, so a region knows nothing of the instance it runs for:

    def forward(self, hidden):                             def forward(self, hidden):
        tp = self.mesh.tp                                      tp = self.mesh.tp
        x = torch.relu(hidden * self.scale)                    x = forward_region_0(hidden, self.scale)
        x = tp.all_gather(x, dim=1)                            x = tp.all_gather(x, dim=1)
        y = F.linear(x, self.up.weight).tanh()                 y = forward_region_1(x, self.up.weight)
        return y                                               return y
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch

_VIEWS = frozenset(
    ("chunk", "expand", "expand_as", "flatten", "movedim", "permute", "reshape", "split", "squeeze", "t", "transpose",
     "unbind", "unflatten", "unsqueeze", "view", "view_as")
)  # fmt: skip
"""Methods that move no data, as generated code mostly uses them."""

_LEAST_COMPUTING = 2

_OPERATORS = (
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow, ast.MatMult, ast.BitAnd, ast.BitOr, ast.USub,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Invert,
)  # fmt: skip
_PLAIN = (
    ast.Assign, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Subscript, ast.Slice, ast.Starred, ast.BinOp,
    ast.UnaryOp, ast.Compare, ast.keyword, ast.Load, ast.Store, *_OPERATORS,
)  # fmt: skip
"""What may stand in a local assignment besides calls and attributes."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A forward whose regions are functions of their own. regions: name -> function, in order of execution.

    `forward` calls what `namespace` holds under those names; exchanging them there exchanges what runs.
    """

    forward: Callable[..., Any]
    regions: Mapping[str, Callable[..., Any]]
    namespace: dict[str, Any]

    def compiled(self, transform: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
        """The forward, with every region replaced by what `transform` makes of it."""
        self.namespace.update({name: transform(region) for name, region in self.regions.items()})
        return self.forward


def cut(forward: Callable[..., Any], stored: Collection[str]) -> Cut:
    """The forward of a layer class in regions. stored: names of the class' parameters and buffers, aliases included.

    Line numbers are kept: tracebacks show the generated source. Raises OSError where that source is not to be had.
    """
    lines, first = inspect.getsourcelines(forward)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    _name_result(function)
    outer = {**forward.__globals__, **inspect.getclosurevars(forward).nonlocals}
    splitter = _Splitter(function, frozenset(stored), outer)
    regions = splitter.replace()
    # The decorators have been applied to what is called already.
    function.decorator_list = []
    module = ast.fix_missing_locations(ast.Module([*regions, function], []))
    namespace = dict(outer)
    exec(compile(module, forward.__code__.co_filename, "exec"), namespace)
    return Cut(namespace[function.name], {region.name: namespace[region.name] for region in regions}, namespace)


class _Splitter:
    """Works out which statements of one function are local, and moves them."""

    def __init__(self, function: ast.FunctionDef, stored: frozenset[str], outer: Mapping[str, Any]) -> None:
        self.function, self.stored, self.outer = function, stored, outer
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        self.owner = arguments[0].arg
        self.variables = {argument.arg for argument in arguments} | _names(function.body, ast.Store)
        # Names such as `tp = self.mesh.tp`: their methods communicate, whatever they are called. What calls made is
        # taken for tensors; a method that tensors lack tells where it is not.
        assigned = [assignment for assignment in function.body if isinstance(assignment, ast.Assign)]
        others = [assignment for assignment in assigned if not isinstance(assignment.value, ast.Call)]
        names = (
            _names(assignment.targets, ast.Store)
            for assignment in others
            if not self._is_local(assignment.value, frozenset())
        )
        self.foreign = {self.owner}.union(*names)

    def replace(self) -> list[ast.FunctionDef]:
        """Put calls in place of the regions, and return those."""
        body: list[ast.stmt] = []
        regions: list[ast.FunctionDef] = []
        rest = list(self.function.body)
        while rest:
            count = next((i for i, later in enumerate(rest) if not self._is_local_assignment(later)), len(rest))
            run, rest = rest[: count or 1], rest[count or 1 :]
            if count and sum(map(self._num_computing, run)) >= _LEAST_COMPUTING:
                name = f"{self.function.name}_region_{len(regions)}"
                region, call = self._outline(name, cast("list[ast.Assign]", run), _names(rest, ast.Load))
                regions.append(region)
                run = [call]
            body += run
        self.function.body = body
        return regions

    def _outline(self, name: str, run: Sequence[ast.Assign], read_later: set[str]) -> tuple[ast.FunctionDef, ast.stmt]:
        """The region as a function, and the statement that calls it."""
        arguments: dict[str, ast.expr] = {}
        bound_names: set[str] = set()
        for statement in run:
            for variable in sorted(_names([statement.value], ast.Load) & self.variables - bound_names - {self.owner}):
                arguments[variable] = ast.Name(variable, ast.Load())
            bound_names |= _names(statement.targets, ast.Store)
        tensors = _OwnTensors(self, len(arguments))
        body: list[ast.stmt] = [tensors.visit(statement) for statement in run]
        arguments |= {argument: expression for expression, argument in tensors.arguments.values()}
        results = sorted(bound_names & read_later)
        body.append(ast.Return(_tuple(results, ast.Load())))
        parameters = ast.arguments([], [ast.arg(argument) for argument in arguments], None, [], [], None, [])
        region = ast.FunctionDef(name, parameters, body, [])
        called = ast.Call(ast.Name(name, ast.Load()), list(arguments.values()), [])
        call: ast.stmt = ast.Assign([_tuple(results, ast.Store())], called)
        for new in (region, call):
            ast.copy_location(new, run[0])
        return region, call

    # What is local ----------------------------------------------------------------------------------------------------

    def _is_local_assignment(self, statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Assign) and self._is_local(statement, self.foreign)

    def _is_local(self, node: ast.AST, foreign: Collection[str]) -> bool:
        if self.own_tensor(node) is not None:
            return True
        if isinstance(node, ast.Name):
            return node.id not in foreign and (node.id in self.variables or node.id in self.outer)
        if isinstance(node, ast.Call):
            parts = [*node.args, *node.keywords]
            return self._calls_torch(node.func, foreign) and all(self._is_local(part, foreign) for part in parts)
        if isinstance(node, ast.Attribute):
            # Such as torch.float32 and x.shape; all that hangs on self is known by name.
            return self._is_of_torch(node) or (hasattr(torch.Tensor, node.attr) and self._is_local(node.value, foreign))
        return isinstance(node, _PLAIN) and all(self._is_local(part, foreign) for part in ast.iter_child_nodes(node))

    def _calls_torch(self, function: ast.expr, foreign: Collection[str]) -> bool:
        if self._is_idiom(function):
            return True
        if not isinstance(function, ast.Attribute):
            return False
        if self._is_of_torch(function):
            return True
        return callable(getattr(torch.Tensor, function.attr, None)) and self._is_local(function.value, foreign)

    def _is_idiom(self, function: ast.expr) -> bool:
        """Whether it is one of the functions of idioms.py, which call nothing but torch."""
        if not isinstance(function, ast.Name) or function.id in self.variables:
            return False
        home = getattr(self.outer.get(function.id), "__module__", None) or ""
        return home.endswith("runtime.idioms")

    def _is_of_torch(self, node: ast.expr) -> bool:
        """Whether it is an attribute of one of torch's modules."""
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.variables:
            return False
        module = self.outer.get(node.id)
        return isinstance(module, ModuleType) and module.__name__.partition(".")[0] == "torch"

    def _num_computing(self, statement: ast.AST) -> int:
        """Calls and operators that make new values; an estimate, since `reshape` may."""
        calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
        idioms = sum(map(self._is_idiom, calls))  # several operators each
        views = [called for called in calls if isinstance(called, ast.Attribute) and called.attr in _VIEWS]
        operators = [node for node in ast.walk(statement) if isinstance(node, ast.BinOp | ast.UnaryOp | ast.Compare)]
        return len(calls) + idioms - len(views) + sum(not _is_number(operator) for operator in operators)

    def own_tensor(self, node: ast.AST) -> str | None:
        """`a.0.weight` for `self.a[0].weight`, and `mesh.device` likewise; None for anything else."""
        if not isinstance(node, ast.Attribute):
            return None
        owner, _, name = re.sub(r"\[(\d+)\]", r".\1", ast.unparse(node)).partition(".")
        return name if owner == self.owner and (name in self.stored or name == "mesh.device") else None


class _OwnTensors(ast.NodeTransformer):
    """Replace reads of `self` by arguments. arguments: name -> (the expression, the argument)."""

    def __init__(self, splitter: _Splitter, num_others: int) -> None:
        self.splitter = splitter
        self.arguments: dict[str, tuple[ast.expr, str]] = {}

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        name = self.splitter.own_tensor(node)
        if name is None:
            return self.generic_visit(node)
        _, argument = self.arguments.setdefault(name, (node, f"self_{name.replace('.', '_')}"))
        return ast.copy_location(ast.Name(argument, ast.Load()), node)


def _name_result(function: ast.FunctionDef) -> None:
    """`return f(x)` as an assignment, which can be part of a region, and a return."""
    last = function.body[-1]
    if isinstance(last, ast.Return) and last.value is not None and not isinstance(last.value, ast.Name | ast.Tuple):
        assigned: ast.stmt = ast.Assign([ast.Name("result_", ast.Store())], last.value)
        function.body[-1:] = [
            ast.copy_location(assigned, last),
            ast.copy_location(ast.Return(ast.Name("result_", ast.Load())), last),
        ]


def _is_number(node: ast.AST) -> bool:
    """Whether it is a number such as -1."""
    return isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant)


def _names(nodes: Sequence[ast.AST], context: type[ast.expr_context]) -> set[str]:
    """Variables that are read (ast.Load) or assigned (ast.Store) anywhere in them."""
    every: Iterator[ast.AST] = (inner for node in nodes for inner in ast.walk(node))
    return {node.id for node in every if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _tuple(names: Sequence[str], context: ast.expr_context) -> ast.expr:
    """The names as an expression: `a`, or `(a, b)`."""
    variables: list[ast.expr] = [ast.Name(name, context) for name in names]
    return variables[0] if len(variables) == 1 else ast.Tuple(variables, context)
