"""The user's optimiser as far as a plan hangs on it: what it may not be, and what its update must see whole.

codegen/runtime/optimizers.py says what a factory is given, optimizer_probe.py how its update is tried; both are run
again by saved programs. Here their findings become errors of ours, and limits on what is searched.
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
from autopar.options.scopes import scopes_of
from autopar.plan import Plan
from autopar.settings.constraints import Constraints, Pattern
from codegen.main import MainOptimizer
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

_SETTINGS_OF_NAMES = ("params", "param_names")


@fakes.probing()
def examine(factory: Factory, model: nn.Module) -> Needs:
    """What the optimiser's update must see whole, after it was tried on small tensors.

    Raises ConstraintError for a factory that does not make an optimiser of what it is given, groups by what only the
    user's own parameters have, or makes one that cannot step from gradients alone. The default is known.
    """
    if isinstance(factory, DefaultAdamW):
        return Needs()
    parameters = parameters_of(model)
    if not parameters:
        return Needs()  # what cannot be trained is refused elsewhere
    with as_constraint_errors():
        made = whole_optimizer(factory, parameters)
        _check_groups(factory, model, made)
        return needs_of(factory, parameters)


@fakes.probing()
def keeps_zeros(factory: Factory, model: nn.Module, needs: Needs, limits: Constraints) -> bool:
    """Whether the update of an optimiser that `examine` found fit leaves padding zeros, whose gradients are zeros.

    Parameters that one rank updates whole have no padding there.
    """
    if isinstance(factory, DefaultAdamW):
        return True
    return not _bars_parts(needs, limits.offload or "") and zeros_stay(factory, parameters_of(model), needs.whole)


def _bars_parts(needs: Needs, offload: str) -> bool:
    """Whether every rank must store all that the update needs whole: no other rank can update it then."""
    return needs.is_coupled or bool(needs.whole and offload)


@contextlib.contextmanager
def as_constraint_errors() -> Iterator[None]:
    """What a factory raises, or is told by us, as errors of autopar."""
    try:
        yield
    except OptimizerError as error:
        raise ConstraintError(error.problem, values=error.found, alternatives=error.instead) from error.__cause__
    except Exception as error:
        raise ConstraintError(
            "the optimiser factory failed on the model's parameters",
            values=f"{type(error).__name__}: {error}",
            alternatives="a factory `params -> torch.optim.Optimizer`, or `named_parameters -> torch.optim.Optimizer`",
        ) from error


def _check_groups(factory: Factory, model: nn.Module, made: WholeOptimizer) -> None:
    """Raises OptimizerError if the user's own parameters would be grouped otherwise than their stand-ins."""
    own = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        with ThinState():
            optimizer = call(factory, own.items())
        check_members(optimizer, own.values())
        real = WholeOptimizer(optimizer, own)
    except RuntimeError:
        if all(p.device.type != "meta" for p in own.values()):
            raise
        real = of_values(factory, parameters_of(model), -1.0)  # fused optimisers refuse parameters without values
    if real.groups != made.groups or _settings(real) != _settings(made):
        moved = next((n for n in own if _group_of(real, n) != _group_of(made, n)), "")
        raise OptimizerError(
            "the optimiser factory must choose groups by what parameters have in every process",
            f"{moved or 'a group'} gets other settings when the model's own parameters are given",
            "groups by name (a factory whose argument is called named_parameters), shape or order, not by identity or "
            "value",
        )


def _group_of(made: WholeOptimizer, name: str) -> int:
    return next((i for i, names in enumerate(made.groups) if name in names), -1)


def _settings(made: WholeOptimizer) -> list[dict[str, str]]:
    groups = made.optimizer.param_groups
    return [{k: repr(v) for k, v in group.items() if k not in _SETTINGS_OF_NAMES} for group in groups]


def limited(limits: Constraints, needs: Needs, graph: Graph) -> Constraints:
    """The constraints, with what an update that couples parameters or is offloaded needs whole held whole; what a user
    pinned stays, and is checked in the plan.

    Warns where plans are fewer.
    """
    if not _bars_parts(needs, limits.offload or ""):
        return limits
    names = _names(needs, graph)
    is_all = all(p.is_buffer or p.name in names for p in graph.parameters)
    whole = tuple((axis, Placement("R")) for axis in SHARDING_AXES)
    globs = ["*"] if is_all else [glob.escape(name) for name in _one_of_each_class(names, graph)]
    pins: tuple[Pattern, ...] = tuple((each, whole) for each in globs)
    offloaded = f", and with offload={limits.offload} parameters must be held whole" * (not needs.is_coupled)
    warnings.warn(f"{needs.problem}{offloaded}: only plans that do so are considered", stacklevel=6)
    degrees = {PIPELINE_AXIS: 1, **limits.degrees} if needs.is_coupled else limits.degrees
    zero = 0 if limits.zero is None else limits.zero
    return replace(limits, degrees=degrees, zero=zero, parameters=(*limits.parameters, *pins))


def _names(needs: Needs, graph: Graph) -> list[str]:
    """The graph's names of what must be whole."""
    return [p.name for p in graph.parameters if not p.is_buffer and not needs.whole.isdisjoint((p.name, *p.aliases))]


def _one_of_each_class(names: list[str], graph: Graph) -> Iterator[str]:
    """Fewer patterns say the same: layers of a class are decided together."""
    rest = set(names)
    for scope in scopes_of(graph):
        for parameter in scope.layer.parameters if scope.layer is not None else ():
            alike = rest.intersection(scope.full_names(parameter.name))
            yield from sorted(alike)[:1]
            rest -= alike
    yield from sorted(rest)


def check_plan(plan: Plan, needs: Needs, graph: Graph) -> None:
    """Raises ConstraintError if the plan gives a rank a part of what it must update whole by itself."""
    offload = plan.pipeline.offload
    if not _bars_parts(needs, offload):
        return
    if needs.is_coupled and (len(plan.stage_meshes) > 1 or offload):
        raise _refused(needs, f"pp={len(plan.stage_meshes)}" if len(plan.stage_meshes) > 1 else f"offload={offload}")
    names = set(_names(needs, graph))
    for scope in scopes_of(graph):
        for name, stored in plan.scopes[scope.name].parameters.items():
            full = [each for each in scope.full_names(name) if each in names]
            for stage_mesh in plan.stage_meshes if full else ():
                if found := _sharding(stored, plan.mesh.axes, stage_mesh.mesh):
                    raise _refused(needs, f"{full[0]} {found}" + (f" and offload={offload}" if offload else ""))


def _sharding(stored: Stored, axes: tuple[str, ...], mesh: Mesh) -> str:
    """How a rank stores a part of a parameter, in words; "" where it stores all."""
    for axis, placement in zip(axes, stored.placements, strict=True):
        if not placement.is_replicated and mesh.size(axis) > 1:
            return f"is {placement} on {axis}{mesh.size(axis)}"
    sharing = [axes[number] for number in zero_axes(axes, stored.placements) if mesh.size(axes[number]) > 1]
    if stored.zero and sharing:
        return f"has zero={stored.zero} on " + " x ".join(f"{axis}{mesh.size(axis)}" for axis in sharing)
    return ""


def _refused(needs: Needs, found: str) -> ConstraintError:
    pins = "zero=0, tp=1, pp=1, no offload" if needs.is_coupled else "no offload, or zero=0 and tp=1"
    return ConstraintError(
        needs.problem, values=found, alternatives=[pins, "an optimiser whose update is elementwise, such as AdamW"]
    )


# For saved programs ---------------------------------------------------------------------------------------------------


def main_optimizer(factory: Factory, model: nn.Module) -> MainOptimizer:
    """How a saved program makes the optimiser: by the path of its factory, if that can be imported."""
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
    """`module:name` under which another process finds the very object; "" if there is none."""
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", "")
    if module not in sys.modules or module == "__main__" or not name:
        return ""
    found: object = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is factory else ""


def _survives_writing(factory: Factory, model: nn.Module) -> bool:
    """Whether the groups are the same without what a file cannot say of the parameters."""
    parameters = parameters_of(model)
    if written(parameters) == parameters:
        return True
    made = whole_optimizer(factory, parameters)
    try:
        again = whole_optimizer(factory, written(parameters))
    except Exception:  # whatever a factory raises that misses something
        return False
    return made.groups == again.groups and _settings(made) == _settings(again)
