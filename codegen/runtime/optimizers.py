"""The user's optimizer, made of tensors that stand in for the whole parameters.

A factory gives parameters their settings by shape, name, order or attribute, so it is given what a single process would
give it: one stand-in per trainable parameter of the whole model, on every rank. A stand-in has a parameter's shape,
dtype and attributes, but one element of memory (its strides are 0). Then each gives way to what this rank stores of its
parameter, which may be a flat slice, or nothing.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Factory = Callable[..., torch.optim.Optimizer]
"""`params -> optimizer`, or `named_parameters -> optimizer`; see `call`."""

NAMED = ("named_parameters", "named_params")
"""Names of a factory's first argument that ask for (name, parameter) pairs."""

_BASES = (0.25, 0.75)
"""What stand-ins hold. State that a constructor makes of it would be another with the other."""


class OptimizerError(ValueError):
    """An optimizer that cannot be honoured. problem, found, instead: phrases; the latter two may be empty."""

    def __init__(self, problem: str, found: str = "", instead: str = "") -> None:
        self.problem, self.found, self.instead = problem, found, instead
        lines = [problem, *([f"  got: {found}"] if found else []), *([f"  instead: {instead}"] if instead else [])]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizerError, (self.problem, self.found, self.instead)


@dataclass(frozen=True, slots=True)
class GlobalParameter:
    """A trainable parameter of the user's model: its name there, its whole shape, and attributes set on it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def stand_in(self, base: float, device: torch.device | str) -> nn.Parameter:
        """A parameter that answers as the whole one does; of one element of memory."""
        value = torch.full((), base, dtype=getattr(torch, self.dtype), device=device)
        parameter = nn.Parameter(value.expand(self.shape))
        parameter.__dict__.update(self.attributes)
        return parameter


def parameters_of(model: nn.Module) -> tuple[GlobalParameter, ...]:
    """The trainable parameters of a model, in its own order."""
    return tuple(
        GlobalParameter(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), dict(vars(p)))
        for name, p in model.named_parameters()
        if p.requires_grad
    )


def call(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """The factory's optimizer of these parameters.

    It gets a list of tensors; of (name, tensor) pairs if its first argument is called one of NAMED, or if it has a true
    attribute `takes_names`.
    """
    pairs = list(named)
    return factory(pairs) if takes_names(factory) else factory([tensor for _, tensor in pairs])


def takes_names(factory: Factory) -> bool:
    """Whether a factory wants (name, tensor) pairs."""
    said = getattr(factory, "takes_names", None)
    if said is not None:
        return bool(said)
    try:
        arguments = list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # a callable of C has none that can be read
        return False
    return bool(arguments) and arguments[0] in NAMED


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known, without a trial, that each element is updated by itself and that all state is in sight."""
    elementwise = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    return type(optimizer) in elementwise or getattr(type(optimizer), "is_elementwise", False)


def untried(optimizer: torch.optim.Optimizer) -> str:
    """Return what to do about an optimizer that is not known."""
    return (
        f"what the update of {type(optimizer).__name__} depends on is not known: compile the model with this "
        "optimizer, and save the program again"
    )


@dataclass(frozen=True, slots=True)
class WholeOptimizer:
    """An optimizer of stand-ins; `replace` makes it this rank's. stand_ins: by the parameters' names."""

    optimizer: torch.optim.Optimizer
    stand_ins: Mapping[str, nn.Parameter]

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters in every group, in order."""
        names = {id(p): name for name, p in self.stand_ins.items()}
        return tuple(tuple(names[id(p)] for p in group["params"]) for group in self.optimizer.param_groups)

    def replace(self, stored: Mapping[str, Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer with these in the stand-ins' places; names that are absent have none.

        Groups stay, in order and with their settings, also where nothing of them is left.
        """
        names = {id(p): name for name, p in self.stand_ins.items()}
        for group in self.optimizer.param_groups:
            names_of_group = [names[id(p)] for p in group["params"]]
            # In place, for optimizers around others, which share the lists.
            group["params"][:] = [part for name in names_of_group for part in stored.get(name, ())]
            if "param_names" in group:
                group["param_names"] = [name for name in names_of_group for _ in stored.get(name, ())]
        for name, stand_in in self.stand_ins.items():
            state = self.optimizer.state.pop(stand_in, None)
            for part in stored.get(name, ()) if state else ():
                self.optimizer.state[part] = {k: _laid_out(v, stand_in, part) for k, v in (state or {}).items()}
        return self.optimizer


def whole_optimizer(
    factory: Factory, parameters: Sequence[GlobalParameter], device: torch.device | str = "cpu"
) -> WholeOptimizer:
    """Return the optimizer that the factory makes of stand-ins.

    Raises OptimizerError for what is no optimizer of the given tensors, or one whose step needs a closure.
    """
    whole = of_values(factory, parameters, _BASES[0], device)
    if whole.optimizer.state:
        _check_state(whole, of_values(factory, parameters, _BASES[1], device))
    return whole


def of_values(
    factory: Factory, parameters: Sequence[GlobalParameter], base: float, device: torch.device | str = "cpu"
) -> WholeOptimizer:
    """The optimizer of `whole_optimizer`, of stand-ins of a certain value, whatever the constructor made."""
    stand_ins = {parameter.name: parameter.stand_in(base, device) for parameter in parameters}
    with ThinState():
        optimizer = call(factory, stand_ins.items())
    check_members(optimizer, stand_ins.values())
    return WholeOptimizer(optimizer, stand_ins)


def check_members(optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Raises OptimizerError unless this is an optimizer of (some of) the given parameters alone that can step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(
            "the optimizer factory must return a torch.optim.Optimizer",
            f"a {type(optimizer).__name__}",
            "for several optimizers of one model, one with several param_groups; for networks that are updated in turn "
            "(a GAN's), a program for each; for a wrapper, a subclass of torch.optim.Optimizer, or the inner optimizer",
        )
    kind = type(optimizer).__name__
    parameters = list(parameters)
    ids = {id(p) for p in parameters}
    if not all(p.requires_grad for p in parameters):
        raise OptimizerError(
            "the optimizer factory must leave the parameters as they are",
            "requires_grad=False, set in the factory",
            "requires_grad_(False) on the model, before it is compiled",
        )
    members = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in ids for p in members)
    if foreign or not members:
        raise OptimizerError(
            "the optimizer factory must make its optimizer of the parameters that it is given",
            f"{kind} holds {foreign} others" if foreign else f"{kind} holds none of them",
            "a factory `params -> optimizer` or `named_parameters -> optimizer` that uses its argument, not the model "
            "that it was written beside: programs train parameters of their own",
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise needs_closure(f"{kind}.step needs a closure")


def needs_closure(found: str) -> OptimizerError:
    """The error for an optimizer whose step runs forward and backward again, as SAM's and LBFGS's do."""
    return OptimizerError(
        "optimizers whose step evaluates the loss again are not supported",
        found,
        "an optimizer that steps from the gradients alone: AdamW, SGD, or the optimizer that this one wraps; for SAM "
        "that one, and in a loop of your own step.forward_backward(batch), the same again within "
        "`with step.perturbed(rho):`, then step.update()",
    )


class ThinState(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """`with ThinState():` what is made like a tensor (zeros_like, ...) has one element of memory, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in _LIKE and args[0].numel() > 1:
            options.pop("memory_format", None)
            return func(args[0].as_strided((), ()), *args[1:], **options).expand(args[0].shape)
        return func(*args, **options)


_aten = torch.ops.aten
_LIKE = (_aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default, _aten.empty_like.default)


def _check_state(whole: WholeOptimizer, other: WholeOptimizer) -> None:
    """State that a constructor makes must be constants: parameters have no values yet, and are cut."""
    for name, stand_in in whole.stand_ins.items():
        twin = other.optimizer.state.get(other.stand_ins[name], {})
        for key, value in whole.optimizer.state.get(stand_in, {}).items():
            if isinstance(value, Tensor) and not (_is_same_constant(value, twin[key])):
                raise OptimizerError(
                    "an optimizer's constructor must not read the parameters' values",
                    f"{type(whole.optimizer).__name__} keeps {key!r} of {name}",
                    "an optimizer that makes its state in its first step",
                )


def _first(value: Tensor) -> Tensor:
    return value.as_strided((), ())


def _is_same_constant(value: Tensor, twin: Tensor) -> bool:
    is_constant = value.numel() == 1 or not any(value.stride()) or bool((value == _first(value)).all())
    return is_constant and torch.equal(_first(value), _first(twin))


def _laid_out(value: Any, stand_in: nn.Parameter, stored: nn.Parameter) -> Any:
    """State of a stand-in for what is stored of it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != stand_in.shape or value.ndim == 0:
        return value.clone()
    dtype = stored.dtype if value.dtype == stand_in.dtype else value.dtype
    return torch.full_like(stored, _first(value).item(), dtype=dtype, requires_grad=False)


# For saved programs ---------------------------------------------------------------------------------------------------


def imported(path: str, **arguments: Any) -> Factory:
    """The factory `module:name`, with these arguments. Raises SystemExit where it cannot be imported."""
    module, _, name = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise SystemExit(
            f"the optimizer {path!r} cannot be imported: {error}\n"
            "put the folder of its module on PYTHONPATH, or give --optimizer module:factory"
        ) from None
    factory: Factory = partial(value, **arguments) if arguments else value
    return factory


def written(parameters: Sequence[GlobalParameter]) -> tuple[GlobalParameter, ...]:
    """The parameters with such attributes alone as a file can have."""
    kinds = (bool, int, float, str, type(None))
    return tuple(
        replace(parameter, attributes={k: v for k, v in parameter.attributes.items() if isinstance(v, kinds)})
        for parameter in parameters
    )


def write_parameters(parameters: Sequence[GlobalParameter], path: Path) -> None:
    """A line per parameter: [name, shape, dtype, attributes], as `written`."""
    lines = [json.dumps([p.name, list(p.shape), p.dtype, dict(p.attributes)]) for p in written(parameters)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def read_parameters(path: Path) -> tuple[GlobalParameter, ...]:
    """Read the file of `write_parameters`."""
    entries = json.loads(path.read_text(encoding="utf-8"))
    return tuple(GlobalParameter(name, tuple(shape), dtype, extra) for name, shape, dtype, extra in entries)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Each group's hyperparameters, of those that JSON can say."""
    settings = []
    for group in optimizer.param_groups:
        said = {key: _json(value) for key, value in group.items() if key not in ("params", "param_names")}
        settings.append({key: value for key, value in said.items() if value is not _UNSAID})
    return settings


_UNSAID = object()


def _json(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        items = [_json(item) for item in value]
        return _UNSAID if any(item is _UNSAID for item in items) else items
    return value if value is None or isinstance(value, (bool, int, float, str)) else _UNSAID
