"""State that a script changes between steps, hooks that it adds before, between and around steps, and modes of torch
that it sets: the losses are those of one process, or the step that would differ is refused.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.errors import AutoparError, InternalError
from benchmarks.by_hand import TOLERANCE
from benchmarks.faults.case import Case, Result, drawn, is_in_words
from codegen.runtime.reference import SameDropout

STEPS = 4
FROM = 2
"""The step before which a change is made."""
GAIN = 1.25
"""A number of the script that forward reads."""
TABLE = {"shift": 0.25, "bias": torch.full((8,), 0.1)}


def bent(x: Tensor) -> Tensor:
    return x.tanh()


def bent_otherwise(x: Tensor) -> Tensor:
    return x.sigmoid()


class Gate(nn.Module):
    """A part with a number, a flag and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.slope, self.is_open = nn.Linear(8, 8), 0.75, True
        self.register_buffer("floor", torch.full((8,), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.slope + self.floor
        return y if self.is_open else -y


class Net(nn.Module):
    """Reads attributes of most kinds."""

    offset = 0.5

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.norm, self.drop = Gate(), nn.BatchNorm1d(8), nn.Dropout(0.25)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale, self.order, self.tags, self.act = nn.Parameter(torch.ones(8)), [0, 1], {"mode": "sum"}, bent
        self.weights, self.limits, self.unused, self.eps = torch.linspace(0.5, 1.5, 8), (-2.0, 2.0), 3, 1e-3
        self.register_buffer("counts", torch.arange(8))
        self.register_buffer("kept", torch.ones(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.gate(self.norm(x))) * self.weights * self.kept * self.scale + self.offset * GAIN
        for index in self.order:
            y = y + self.parts[index](self.drop(y)).clamp(*self.limits)
        y = y / (self.counts + 1 + self.eps) + TABLE["shift"] + TABLE["bias"]
        return y.sum(-1) if self.tags["mode"] == "sum" else y.mean(-1)


class Loss:
    def __init__(self) -> None:
        self.delta, self.kind = 0.3, "l2"

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        errors = output - target
        return (errors.square().mean() if self.kind == "l2" else errors.abs().mean()) * self.delta


Change = Callable[[Net, Loss, torch.optim.Optimizer], object]


def _global(name: str, value: Any) -> Change:
    return lambda net, loss, optimizer: globals().__setitem__(name, value)


def _put(path: str, value: Any) -> Change:
    """Sets an attribute, an item or a key, by its path."""

    def change(net: Net, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        owner: Any = {"net": net, "loss": loss}
        *names, last = path.split(".")
        for name in names:
            owner = (
                owner[int(name) if name.isdigit() else name]
                if isinstance(owner, (dict, list))
                else getattr(owner, name)
            )
        made = (
            value() if callable(value) and not isinstance(value, nn.Module) and value is not bent_otherwise else value
        )
        if isinstance(owner, (dict, list)):
            owner[int(last) if last.isdigit() else last] = made
        else:
            setattr(owner, last, made)

    return change


def _call(function: Callable[[Net], object]) -> Change:
    return lambda net, loss, optimizer: function(net)


def _without_grad(function: Callable[[Net], object]) -> Change:
    def change(net: Net, loss: Loss, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            function(net)

    return change


CHANGES: Mapping[str, Change] = {
    **{f"{path} = {value!r}": _put(path, value) for path, value in (
        ("net.gate.slope", 1.5), ("net.gate.slope", 2), ("net.gate.slope", float("nan")), ("net.gate.is_open", False),
        ("net.offset", -0.5), ("net.drop.p", 0.0), ("net.drop.p", 0.6), ("net.drop.p", 1.0), ("net.eps", 0.1),
        ("net.norm.momentum", 0.5), ("net.norm.momentum", None), ("net.norm.eps", 0.5), ("net.norm.training", False),
        ("net.limits", (-0.5, 0.5)), ("net.order", [1, 0]), ("net.order", [0]), ("net.order.0", 1),
        ("net.tags.mode", "mean"),
        ("net.tags", {"mode": "mean"}), ("net.unused", 4), ("net.new", 4), ("net.act", bent_otherwise),
        ("loss.delta", 0.9), ("loss.kind", "l1"), ("net.gate.slope", True), ("net.gate.slope", "fast"),
    )},
    "a tensor for a number": _put("net.gate.slope", lambda: torch.tensor(1.5)),
    "another tensor": _put("net.weights", lambda: torch.linspace(1.0, 2.0, 8)),
    "a tensor of another shape": _put("net.weights", lambda: torch.ones(1)),
    "a tensor of another dtype": _put("net.weights", lambda: torch.ones(8, dtype=torch.float64)),
    "a tensor written in place": _without_grad(lambda net: net.weights.mul_(0.5)),
    "an element written": _without_grad(lambda net: net.weights.__setitem__(3, 4.0)),
    "a buffer written in place": _without_grad(lambda net: net.gate.floor.add_(1.0)),
    "an integer buffer written": _without_grad(lambda net: net.counts.add_(2)),
    "a buffer that is not saved": _without_grad(lambda net: net.kept.mul_(0.25)),
    "a buffer replaced": _put("net.gate.floor", lambda: torch.ones(8)),
    "a buffer of another dtype": _call(lambda net: net.gate.register_buffer("floor", torch.ones(8).double())),
    "a buffer registered": _call(lambda net: net.register_buffer("late", torch.ones(8))),
    "a buffer deleted": _call(lambda net: delattr(net, "kept")),
    "a number deleted": _call(lambda net: delattr(net, "eps")),
    "a class's number": lambda net, loss, optimizer: setattr(Net, "offset", 0.9),
    "a global number": _global("GAIN", 2.0),
    "a global dict": lambda net, loss, optimizer: TABLE.__setitem__("shift", 0.75),
    "a global tensor": lambda net, loss, optimizer: TABLE["bias"].mul_(3.0),  # type: ignore[union-attr, attr-defined]
    "a global function": _global("bent", bent_otherwise),
    "a parameter replaced": _put("net.scale", lambda: nn.Parameter(torch.full((8,), 2.0))),
    "a parameter frozen": _call(lambda net: net.scale.requires_grad_(False)),
    "a part frozen": _call(lambda net: net.gate.requires_grad_(False)),
    "all frozen": _call(lambda net: net.requires_grad_(False)),
    "a state dict loaded": _call(lambda net: net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()})),
    "a module replaced": _put("net.gate.inner", nn.Linear(8, 8, bias=False)),
    "a module by an activation": _put("net.norm", nn.Identity()),
    "a module appended": _call(lambda net: net.parts.append(nn.Linear(8, 8))),
    "modules swapped": _call(lambda net: net.parts.insert(0, net.parts.pop(1))),
    "a module deleted": _call(lambda net: delattr(net, "gate")),
    "evaluation mode": _call(lambda net: net.eval()),
    "a part in evaluation mode": _call(lambda net: net.gate.eval()),
    "forward replaced": _call(lambda net: setattr(net, "forward", lambda x: Net.forward(net, x) * 2)),
    "a part's forward replaced": _call(lambda net: setattr(net.gate, "forward", lambda x: x * 2)),
    "a class's forward replaced": lambda net, loss, optimizer: setattr(Gate, "forward", lambda self, x: x * 2),
    "double": _call(lambda net: net.double()),
    "half": _call(lambda net: net.half()),
    "to the same device": _call(lambda net: net.to("cpu")),
    "weight norm added": _call(lambda net: parametrizations.weight_norm(net.gate.inner)),
    "pruned": _call(lambda net: prune.l1_unstructured(net.gate.inner, "weight", 0.5)),
    **{f"learning rate {rate}": lambda net, loss, optimizer, rate=rate: optimizer.param_groups[0].update(lr=rate)
       for rate in (0.01, 0.0, 1, -0.1, float("nan"), float("inf"), "fast", None, torch.tensor(0.03))},
    "momentum": lambda net, loss, optimizer: optimizer.param_groups[0].update(momentum=0.1),
    "momentum nan": lambda net, loss, optimizer: optimizer.param_groups[0].update(momentum=float("nan")),
    "weight decay": lambda net, loss, optimizer: optimizer.param_groups[0].update(weight_decay=0.5),
    "a setting deleted": lambda net, loss, optimizer: optimizer.param_groups[0].pop("momentum"),
    "a state cleared": lambda net, loss, optimizer: optimizer.state.clear(),
    "a group added": lambda net, loss, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "parameters taken out": lambda net, loss, optimizer: optimizer.param_groups[0]["params"].pop(),
}  # fmt: skip
"""Made once, before step FROM. Values of parameters are not among them: the program has its own, which `step.load` sets
(docs/training.md)."""

HOOKS: Mapping[str, Change] = {
    "forward hook": _call(lambda net: net.gate.register_forward_hook(lambda module, given, out: out * 2)),
    "forward hook with names": _call(
        lambda net: net.gate.register_forward_hook(lambda module, given, named, out: out + 1, with_kwargs=True)
    ),
    "forward hook always": _call(
        lambda net: net.gate.register_forward_hook(lambda module, given, out: out * 2, always_call=True)
    ),
    "forward hook that looks on": _call(lambda net: net.gate.register_forward_hook(lambda module, given, out: None)),
    "forward pre hook": _call(lambda net: net.gate.register_forward_pre_hook(lambda module, given: (given[0] * 2,))),
    "backward hook": _call(
        lambda net: net.gate.register_full_backward_hook(lambda module, given, out: (given[0] * 2,))
    ),
    "backward pre hook": _call(lambda net: net.gate.register_full_backward_pre_hook(lambda module, out: (out[0] * 2,))),
    "hook of the root": _call(lambda net: net.register_forward_hook(lambda module, given, out: out * 2)),
    "hook of a parameter": _call(lambda net: net.scale.register_hook(lambda gradient: gradient * 2)),
    "hook after accumulation": _call(
        lambda net: net.scale.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(2), None)[1])
    ),
    "state dict hook": _call(lambda net: net.register_state_dict_post_hook(lambda *given: None)),
    "load hook": _call(lambda net: net.register_load_state_dict_post_hook(lambda *given: None)),
    "optimizer pre hook": lambda net, loss, optimizer: optimizer.register_step_pre_hook(
        lambda own, *given: own.param_groups[0].update(lr=0.01)
    ),
    "optimizer post hook": lambda net, loss, optimizer: optimizer.register_step_post_hook(
        lambda own, *given: own.param_groups[0].update(lr=0.02)
    ),
}
"""Added when the model is made, or before step FROM."""


@contextlib.contextmanager
def _hooked(register: Callable[[Any], Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


class _Looks(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Doubles(TorchDispatchMode):
    """Changes a number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is torch.ops.aten.tanh.default else found


@contextlib.contextmanager
def _set(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def _modules() -> Any:
    return nn.modules.module


AROUND: Mapping[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "detect_anomaly": torch.autograd.detect_anomaly,
    "saved tensors hooks": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "save on cpu": torch.autograd.graph.save_on_cpu,
    "a dispatch mode that looks on": _Looks,
    "a dispatch mode that changes": _Doubles,
    "device meta": lambda: torch.device("meta"),
    "default float64": lambda: _set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: _set(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "warnings as errors": lambda: warnings.catch_warnings(action="error"),
    "a forward hook of all modules": lambda: _hooked(
        _modules().register_module_forward_hook, lambda own, given, out: out * 2 if isinstance(own, Gate) else None
    ),
    "a forward pre hook of all modules": lambda: _hooked(
        _modules().register_module_forward_pre_hook,
        lambda module, given: (given[0] * 2,) if isinstance(module, Gate) else None,
    ),
    "a backward hook of all modules": lambda: _hooked(
        _modules().register_module_full_backward_hook,
        lambda module, given, out: (given[0] * 2,) if isinstance(module, Gate) else None,
    ),
    "a step hook of all optimizers": lambda: _hooked(
        register_optimizer_step_pre_hook, lambda own, *given: own.param_groups[0].update(lr=0.01)
    ),
}  # fmt: skip
"""Contexts around `compile`, or around the steps from FROM on."""


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes a second or two."""
    found = [Case(f"before step {FROM}: {name}", partial(_tried, between=change)) for name, change in CHANGES.items()]
    for name, hook in HOOKS.items():
        found.append(Case(f"from the beginning: {name}", partial(_tried, first=hook)))
        found.append(Case(f"before step {FROM}: {name}", partial(_tried, between=hook)))
    for (name, context), place in itertools.product(AROUND.items(), ("compile", "steps")):
        found.append(Case(f"around {place}: {name}", partial(_tried, **{f"around_{place}": context})))
    return drawn(found, count, seed)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _batches() -> list[dict[str, Tensor]]:
    drawn_by = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 8, generator=drawn_by), "target": torch.randn(8, generator=drawn_by)} for _ in range(STEPS)
    ]


def _no_change(net: Net, loss: Loss, optimizer: torch.optim.Optimizer) -> None: ...


Context = Callable[[], contextlib.AbstractContextManager[Any]]


def _tried(
    first: Change = _no_change,
    between: Change = _no_change,
    around_compile: Context = contextlib.nullcontext,
    around_steps: Context = contextlib.nullcontext,
) -> Result:
    """The losses of a program in a loop of the script's own, beside those of the model itself."""
    with _globals():
        wanted, failed = _eager(first, between, around_steps)
    with _globals(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, refusal, raw = _program(first, between, around_compile, around_steps)
    if any(abs(a - b) > TOLERANCE * max(abs(b), 1e-2) for a, b in zip(found, wanted, strict=False) if a == a or b == b):
        return Result("wrong", f"losses {found}, not {wanted}")
    if raw:
        is_torch = bool(failed) and len(found) == len(wanted) and raw.split(":")[0] == failed.split(":")[0]
        return Result("refused" if is_torch else "raw", raw)
    if refusal:
        return Result("refused", refusal)
    return Result("right") if len(found) == len(wanted) else Result("wrong", f"torch itself: {failed}")


@contextlib.contextmanager
def _globals() -> Iterator[None]:
    own = globals()
    before = own["GAIN"], own["bent"], dict(TABLE), TABLE["bias"].clone(), Net.offset, Gate.forward  # type: ignore[attr-defined]
    try:
        yield
    finally:
        own["GAIN"], own["bent"], table, bias, Net.offset, Gate.forward = before  # type: ignore[method-assign]
        TABLE.update(table, bias=bias)


def _eager(first: Change, between: Change, around: Context) -> tuple[list[float], str]:
    """The losses up to the step at which torch itself fails."""
    net, loss, losses = Net(), Loss(), []
    optimizer = _sgd(net.parameters())
    try:
        first(net, loss, optimizer)
        for number, each in enumerate(_batches()):
            if number == FROM:
                between(net, loss, optimizer)
            with around() if number >= FROM else contextlib.nullcontext():
                optimizer.zero_grad()
                with SameDropout(0, number):
                    value = loss(net(each["x"]), each["target"])
                value.backward()
                optimizer.step()
            losses.append(float(value))
    except Exception as error:
        return losses, f"{type(error).__name__}: {error}"
    return losses, ""


def _program(
    first: Change, between: Change, around_compile: Context, around_steps: Context
) -> tuple[list[float], str, str]:
    """The losses up to the step that is refused; the refusal; an error that is none of ours."""
    losses: list[float] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net, loss, data = Net(), Loss(), _batches()

        def factory(parameters: Any) -> torch.optim.Optimizer:
            made = _sgd(parameters)
            if first in _OF_OPTIMIZER:
                first(net, loss, made)
            return made

        if first not in _OF_OPTIMIZER:
            first(net, loss, _sgd(copy.deepcopy(list(net.parameters()))))
        with around_compile():
            compiled = autopar.compile(net, "1 cpu", example_inputs=data[0], loss_fn=loss, optimizer=factory)
        step = compiled.build(device="cpu")
        for number, each in enumerate(data):
            if number == FROM:
                between(net, loss, step.optimizer)
            with around_steps() if number >= FROM else contextlib.nullcontext():
                losses.append(float(step(step.local_batch(each))))
    except AutoparError as error:
        is_raw = isinstance(error, InternalError)
        return losses, "" if is_raw else str(error).splitlines()[0], str(error) if is_raw else ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return losses, *((said, "") if is_in_words(error) else ("", said))
    finally:
        dist.destroy_process_group()
    return losses, "", ""


_OF_OPTIMIZER = {hook for name, hook in HOOKS.items() if name.startswith("optimizer")}
