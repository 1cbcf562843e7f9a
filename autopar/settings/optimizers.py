"""The limits that the user's optimizer sets to a plan: what it must not be, and what its update needs unsharded.

codegen/runtime/optimizers.py describes the arguments of a factory, optimizer_probe.py the trial of its update; saved
programs repeat both. This module turns their findings into errors of autopar and limits of the search.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from autopar.costs.updates import DefaultAdamW
from autopar.errors import ConstraintError
from autopar.frontend import fakes
from autopar.ir.graph import Graph
from autopar.ir.mesh import PIPELINE_AXIS, SHARDING_AXES, Mesh, zero_axes
from autopar.ir.placement import Placement, Stored
from autopar.plan import Plan
from autopar.settings.constraints import Constraints, Pattern
from autopar.sharding.scopes import scopes_of
from codegen.runtime.optimizer_probe import Needs, needs_of
from codegen.runtime.optimizer_probe import keeps_zeros as zeros_stay
from codegen.runtime.optimizers import (
    Factory,
    OptimizerError,
    ThinState,
    WholeOptimizer,
    call,
    check_members,
    of_values,
    parameters_of,
    whole_optimizer,
    written,
)
from codegen.source.main_source import MainOptimizer

_SETTINGS_OF_NAMES = ("params", "param_names")


@fakes.probing()
def examine(factory: Factory, model: nn.Module) -> Needs:
    """Try the optimizer on small tensors, and return which parameters its update needs unsharded.

    Raises ConstraintError for a factory that does not build an optimizer from its arguments, that groups by what only
    the user's own parameters have, or whose optimizer cannot step from gradients alone. The default is not tried.
    """
    if isinstance(factory, DefaultAdamW):
        return Needs()
    parameters = parameters_of(model)
    if not parameters:
        return Needs()  # another check refuses a model without trained parameters
    with as_constraint_errors():
        optimizer = whole_optimizer(factory, parameters)
        _check_groups(factory, model, optimizer)
        return needs_of(factory, parameters)


@fakes.probing()
def keeps_zeros(factory: Factory, model: nn.Module, needs: Needs, limits: Constraints) -> bool:
    """Return whether the update of an optimizer that passed `examine` leaves padding, with zero gradients, at zero.

    Parameters that one rank updates unsharded have no padding there.
    """
    if isinstance(factory, DefaultAdamW):
        return True
    return not _bars_parts(needs, limits.offload or "") and zeros_stay(factory, parameters_of(model), needs.whole)


def _bars_parts(needs: Needs, offload: str) -> bool:
    """Return whether every rank must store all parameters that the update needs unsharded, as no other can update
    them."""
    return needs.is_coupled or bool(needs.whole and offload)


@contextlib.contextmanager
def as_constraint_errors() -> Iterator[None]:
    """Turn the errors of a factory and of its checks into errors of autopar."""
    try:
        yield
    except OptimizerError as error:
        raise ConstraintError(error.problem, values=error.found, alternatives=error.instead) from error.__cause__
    except Exception as error:
        raise ConstraintError(
            "the optimizer factory failed on the model's parameters",
            values=f"{type(error).__name__}: {error}",
            alternatives="a factory `params -> torch.optim.Optimizer`, or `named_parameters -> torch.optim.Optimizer`",
        ) from error


def _check_groups(factory: Factory, model: nn.Module, stand_in: WholeOptimizer) -> None:
    """Raise OptimizerError if the factory groups the user's parameters differently from their stand-ins."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        with ThinState():
            optimizer = call(factory, parameters.items())
        check_members(optimizer, parameters.values())
        real = WholeOptimizer(optimizer, parameters)
    except RuntimeError:
        if all(p.device.type != "meta" for p in parameters.values()):
            raise
        # Fused optimizers refuse parameters without values.
        real = of_values(factory, parameters_of(model), -1.0)
    if real.groups != stand_in.groups or _settings(real) != _settings(stand_in):
        regrouped = next((n for n in parameters if _group_of(real, n) != _group_of(stand_in, n)), "")
        raise OptimizerError(
            "the optimizer factory must choose groups by what parameters have in every process",
            f"{regrouped or 'a group'} gets other settings with the model's own parameters",
            "groups by name (a factory whose argument is called named_parameters), shape or order, not by identity or "
            "value",
        )


def _group_of(optimizer: WholeOptimizer, name: str) -> int:
    return next((i for i, names in enumerate(optimizer.groups) if name in names), -1)


def _settings(optimizer: WholeOptimizer) -> list[dict[str, str]]:
    groups = optimizer.optimizer.param_groups
    return [{k: repr(v) for k, v in group.items() if k not in _SETTINGS_OF_NAMES} for group in groups]


def limited(limits: Constraints, needs: Needs, graph: Graph) -> Constraints:
    """Return the constraints with pins for what an update that couples parameters, or is offloaded, needs unsharded.

    The user's pins stay; `check_plan` checks them. Warns if the pins leave fewer plans.
    """
    if not _bars_parts(needs, limits.offload or ""):
        return limits
    names = _names(needs, graph)
    is_all = all(p.is_buffer or p.name in names for p in graph.parameters)
    whole = tuple((axis, Placement("R")) for axis in SHARDING_AXES)
    globs = ["*"] if is_all else [glob.escape(name) for name in _one_of_each_class(names, graph)]
    pins: tuple[Pattern, ...] = tuple((pattern, whole) for pattern in globs)
    offloaded = f", and with offload={limits.offload} parameters must be unsharded" * (not needs.is_coupled)
    warnings.warn(f"{needs.problem}{offloaded}: the search considers only such plans", stacklevel=6)
    degrees = {PIPELINE_AXIS: 1, **limits.degrees} if needs.is_coupled else limits.degrees
    zero = 0 if limits.zero is None else limits.zero
    return replace(limits, degrees=degrees, zero=zero, parameters=(*limits.parameters, *pins))


def _names(needs: Needs, graph: Graph) -> list[str]:
    """Return the graph's names of the parameters that must be unsharded."""
    return [p.name for p in graph.parameters if not p.is_buffer and not needs.whole.isdisjoint((p.name, *p.aliases))]


def _one_of_each_class(names: list[str], graph: Graph) -> Iterator[str]:
    """Yield one name per layer class, as the layers of a class share their decisions."""
    remaining = set(names)
    for scope in scopes_of(graph):
        for parameter in scope.layer.parameters if scope.layer is not None else ():
            alike = remaining.intersection(scope.full_names(parameter.name))
            yield from sorted(alike)[:1]
            remaining -= alike
    yield from sorted(remaining)


def check_plan(plan: Plan, needs: Needs, graph: Graph) -> None:
    """Raise ConstraintError if the plan shards a parameter that a rank must update by itself."""
    offload = plan.pipeline.offload
    if not _bars_parts(needs, offload):
        return
    if needs.is_coupled and (len(plan.stage_meshes) > 1 or offload):
        raise _refused(needs, f"pp={len(plan.stage_meshes)}" if len(plan.stage_meshes) > 1 else f"offload={offload}")
    names = set(_names(needs, graph))
    for scope in scopes_of(graph):
        for name, stored in plan.scopes[scope.name].parameters.items():
            full = [full_name for full_name in scope.full_names(name) if full_name in names]
            for stage_mesh in plan.stage_meshes if full else ():
                if shards := _sharding(stored, plan.mesh.axes, stage_mesh.mesh):
                    raise _refused(needs, f"{full[0]} {shards}" + (f" and offload={offload}" if offload else ""))


def _sharding(stored: Stored, axes: tuple[str, ...], mesh: Mesh) -> str:
    """Return how a rank stores a shard of a parameter, in words, or "" if it stores the whole parameter."""
    for axis, placement in zip(axes, stored.placements, strict=True):
        if not placement.is_replicated and mesh.size(axis) > 1:
            return f"is {placement} on {axis}{mesh.size(axis)}"
    sharing = [axes[number] for number in zero_axes(axes, stored.placements) if mesh.size(axes[number]) > 1]
    if stored.zero and sharing:
        return f"has zero={stored.zero} on " + " x ".join(f"{axis}{mesh.size(axis)}" for axis in sharing)
    return ""


def _refused(needs: Needs, values: str) -> ConstraintError:
    pins = "zero=0, tp=1, pp=1, no offload" if needs.is_coupled else "no offload, or zero=0 and tp=1"
    return ConstraintError(
        needs.problem, values=values, alternatives=[pins, "an optimizer with an elementwise update, such as AdamW"]
    )


# For saved programs ---------------------------------------------------------------------------------------------------


def main_optimizer(factory: Factory, model: nn.Module) -> MainOptimizer:
    """Return how a saved program builds the optimizer: by the import path of its factory, if it has one."""
    if isinstance(factory, DefaultAdamW):
        return MainOptimizer(lr=factory.lr, weight_decay=factory.weight_decay)
    plain: Factory = factory
    arguments: dict[str, object] = {}
    if isinstance(factory, functools.partial) and not factory.args and all(map(_is_literal, factory.keywords.values())):
        plain, arguments = factory.func, factory.keywords
    path = _import_path(plain)
    if path and _survives_writing(factory, model):
        return MainOptimizer(path=path, arguments=arguments)
    name = getattr(plain, "__qualname__", type(plain).__qualname__)
    return MainOptimizer(unnamed=f"{name} of {getattr(plain, '__module__', 'unknown')}")


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _import_path(factory: Factory) -> str:
    """Return `module:name`, under which another process imports this very object, or ""."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if module not in sys.modules or module == "__main__" or not name:
        return ""
    owner: object = sys.modules[module]
    for part in name.split("."):
        owner = getattr(owner, part, None)
    return f"{module}:{name}" if owner is factory else ""


def _survives_writing(factory: Factory, model: nn.Module) -> bool:
    """Return whether the groups stay the same without the properties that a file cannot store."""
    parameters = parameters_of(model)
    if written(parameters) == parameters:
        return True
    original = whole_optimizer(factory, parameters)
    try:
        again = whole_optimizer(factory, written(parameters))
    except Exception:  # a factory may raise anything
        return False
    return original.groups == again.groups and _settings(original) == _settings(again)
