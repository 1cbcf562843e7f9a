"""The run time's source without what a plan does not have: branches on absent features, and the arguments for them.

A feature that a program may have is an argument and an attribute of one name in all modules, and None, False or empty
where a program lacks it. A name is folded only if no module binds it to anything else. What is left reads as written.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from codegen.saved_folder.folding import FoldedFile, assigned_pairs
from codegen.saved_folder.values import UNKNOWN, name_of, value_of

ABSENT: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "host",
            "host_optimizer",
            "offload_optimizer",
            "kernels",
            "fused_optimizer",
            "compiled",
            "_compiled",
        )
    ),
    **dict.fromkeys(("captured", "_captured", "on_device")),
    **dict.fromkeys(("offload", "loss_scaling", "begun_scaling", "trial", "_trial", "wholes", "_wholes")),
    # Of steps that autopar builds in a process of its own.
    **dict.fromkeys(("_programs", "shared", "first_check", "comparison", "state_check", "after_forward")),
    **dict.fromkeys(("tied", "result_rank", "begun", "grow")),
    **dict.fromkeys(("guards", "GUARDS", "fixed", "FIXED_INPUTS", "ARGUMENTS"), {}),
    **dict.fromkeys(("RECOMPUTE", "OFFLOAD", "RECEIVES", "SENDS", "FIRST_LAYER"), {}),
    **dict.fromkeys(("unused", "UNUSED_INPUTS", "JOINTS"), ()),
    **dict.fromkeys(("needs_first_pass", "_defers"), False),
    # Of the Trainer: more tensors and texts in checkpoints, and a handler of SIGTERM that takes another's place.
    **dict.fromkeys(("extra_tensors", "texts")),
    **dict.fromkeys(("is_alone", "_is_alone"), False),
    "NO_EVALUATION": "",
    "padding": 0,
    "padded": "S(0)",
}
"""Names of features, with their values in programs that lack them."""


def folded(
    sources: Mapping[str, str], modules: Mapping[str, str], absent: Mapping[str, Any] = ABSENT
) -> dict[str, str]:
    """Return the modules without features that neither they nor the sources have. Both are texts by file name."""
    trees = {name: ast.parse(text) for name, text in {**sources, **modules}.items()}
    constants = dict(absent)
    while strange := {name for tree in trees.values() for name in _bound_otherwise(tree, constants)}:
        constants = {name: value for name, value in constants.items() if name not in strange}
    word = re.compile(rf"\b({'|'.join(map(re.escape, constants))})\b") if constants else None
    return {
        name: FoldedFile(text, constants).folded(trees[name]) if word is not None and word.search(text) else text
        for name, text in modules.items()
    }


def _bound_otherwise(tree: ast.Module, constants: Mapping[str, Any]) -> Iterator[str]:
    live = list(_live(tree, constants))
    simple = {
        id(target) for node in live for target, value in assigned_pairs(node) if _is_same(target, value, constants)
    }
    for node in live:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            if (name := name_of(node)) in constants and id(node) not in simple:
                yield name
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in constants:
            yield node.name
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                name = keyword.arg or ""
                if name in constants and not _is_same_value(keyword.value, name, constants):
                    yield name
            if name_of(node.func) == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
                yield from (name for name in (str(node.args[1].value),) if name in constants)
        elif isinstance(node, ast.Dict):
            # Such as the attributes of a class that `type` makes.
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            yield from (key for key in keys if isinstance(key, str) and key in constants)
        elif isinstance(node, ast.arguments):
            # By position an argument has no name.
            others = (*node.posonlyargs, *node.args, node.vararg, node.kwarg)
            yield from (arg.arg for arg in others if arg is not None and arg.arg in constants)
            for arg, default in zip(node.kwonlyargs, node.kw_defaults, strict=True):
                if arg.arg in constants and default is not None and not _is_same_value(default, arg.arg, constants):
                    yield arg.arg
        else:
            yield from (name for name in _names_bound(node) if name in constants)


def _live(tree: ast.Module, constants: Mapping[str, Any]) -> Iterator[ast.AST]:
    """Yield the syntax of a module without the branches that these values decide against: they bind nothing."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.If) and (test := value_of(node.test, constants)) is not UNKNOWN:
            waiting += [node.test, *(node.body if test else node.orelse)]
        else:
            waiting += ast.iter_child_nodes(node)


def _names_bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that an import, an `except`, a `case` or a deletion binds or unbinds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(node, ast.Delete):
        yield from map(name_of, node.targets)


def _is_same(target: ast.expr, value: ast.expr | None, constants: Mapping[str, Any]) -> bool:
    name = name_of(target)
    return name in constants and (value is None or _is_same_value(value, name, constants))


def _is_same_value(value: ast.expr, name: str, constants: Mapping[str, Any]) -> bool:
    return bool(value_of(value, constants) == constants[name])
