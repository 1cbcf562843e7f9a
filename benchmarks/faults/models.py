"""Models, losses and example inputs that a graph cannot hold, and odd ones that it can.

Each is compiled for one CPU and, where it is accepted, trained for some steps in this process and by hand.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from benchmarks.by_hand import compiled_for, decayed_adamw, is_exact, sgd
from benchmarks.faults.case import Case, drawn, judged

Forward = Callable[[Any, Tensor], Any]
GLOBAL = {"calls": 0}


class Model(nn.Module):
    """One linear layer, what `setup` adds, and `forward` as it is given."""

    def __init__(self, forward: Forward, setup: Callable[[Any], object] = id) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        setup(self)
        self.body = forward

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    return m.lin(x)  # type: ignore[no-any-return]


def adds(name: str, make: Callable[[], Any]) -> Callable[[Any], object]:
    """Sets an attribute."""
    return lambda m: setattr(m, name, make())


def buffer(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Any], object]:
    return lambda m: m.register_buffer(name, torch.zeros(shape, dtype=dtype))


def statements(*steps: Callable[[Any, Tensor], object]) -> Forward:
    """Forward that runs the steps, then the linear layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for step in steps:
            step(m, x)
        return m.lin(x)  # type: ignore[no-any-return]

    return forward


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class _Noisy(_Tripled):
    """Draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x + torch.rand_like(x)


class _Doubled(_Tripled):
    """Writes to its operand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)


def _local_function() -> Any:
    class Local(_Tripled):
        """No module has it."""

    return Local


def _no_grad(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.lin(x)
    return m.lin(x * 2) - target  # type: ignore[no-any-return]


def _no_grad_part(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = m.other(m.lin(x))
    return m.lin(x * 2) - target  # type: ignore[no-any-return]


def _ema(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.ema.mul_(0.9).add_(0.1 * x.mean(0))
    return m.lin(x)  # type: ignore[no-any-return]


def _clamped(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.lin.weight.clamp_(-0.1, 0.1)
    return m.lin(x)  # type: ignore[no-any-return]


def _hooked(m: Any, x: Tensor) -> Tensor:
    hidden: Tensor = m.lin(x)
    hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


def _penalised(m: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(m.lin(x).sum(), x, create_graph=True)
    return gradient.square()


def _branch(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) if m.lin(x).sum() > 0 else -m.lin(x)  # type: ignore[no-any-return]


def _branch_on_the_batch(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) if x.isfinite().all() else -m.lin(x)  # type: ignore[no-any-return]


def _first_call(m: Any, x: Tensor) -> Tensor:
    scale, m.first = (2.0 if m.first else 1.0), False
    return m.lin(x) * scale  # type: ignore[no-any-return]


def _keeps_batch(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = x.detach().mean(0)
    return m.lin(x - m.kept)  # type: ignore[no-any-return]


def _keeps_table(m: Any, x: Tensor) -> Tensor:
    if m.kept is None:
        m.kept = torch.arange(8, dtype=x.dtype) / 8
    return m.lin(x - m.kept)  # type: ignore[no-any-return]


def _remembers(m: Any, x: Tensor) -> Tensor:
    hidden: Tensor = m.lin(x)
    if m.kept is not None:
        hidden = hidden + m.kept
    m.kept = hidden.detach()
    return hidden


ACCEPTED: Mapping[str, tuple[Forward, Callable[[Any], object]]] = {
    "autograd.grad": (_penalised, id),
    "a branch on the batch": (_branch_on_the_batch, id),
    "a lock": (plain, adds("lock", threading.Lock)),
    "a module of Python": (plain, adds("np", lambda: np)),
    "a generator": (plain, adds("items", lambda: (i for i in range(3)))),
    "pruned": (plain, lambda m: prune.l1_unstructured(m.lin, "weight", 0.5)),
    "a custom Function": (lambda m, x: _Tripled.apply(m.lin(x)), id),
    "plain": (plain, id),
    "rand_like": (lambda m, x: m.lin(x + torch.rand_like(x)), id),
    "rand": (lambda m, x: m.lin(x) * torch.rand(8), id),
    "randperm": (lambda m, x: m.lin(x)[:, torch.randperm(8)], id),
    "alpha dropout": (lambda m, x: F.alpha_dropout(m.lin(x), 0.5, True), id),
    "a distribution": (lambda m, x: m.lin(x) + torch.distributions.Normal(0.0, 1.0).rsample(x.shape), id),
    "random.random": (lambda m, x: m.lin(x) * random.random(), id),
    "a random choice": (lambda m, x: m.lin(x) * random.choice([1.0, 2.0]), id),
    "numpy.random": (lambda m, x: m.lin(x) * np.random.rand(), id),
    "integer counter": (
        statements(lambda m, x: m.count.add_(1)), buffer("count", dtype=torch.long)
    ),
    "counter that the loss reads": (
        lambda m, x: [m.count.add_(1), m.lin(x) / m.count][1], buffer("count", dtype=torch.long)
    ),
    "batch norm": (lambda m, x: m.norm(m.lin(x)), adds("norm", lambda: nn.BatchNorm1d(8))),
    "frozen batch norm": (lambda m, x: m.norm(m.lin(x)), adds("norm", lambda: nn.BatchNorm1d(8).eval())),
    "unused parameters": (plain, adds("other", lambda: nn.Linear(3, 3))),
    "an empty parameter": (plain, adds("other", lambda: nn.Parameter(torch.zeros(0, 3)))),
    "a parameter without dims": (lambda m, x: m.lin(x) * m.w, adds("w", lambda: nn.Parameter(torch.tensor(2.0)))),
    "no_grad": (_no_grad, id),
    "a part under no_grad only": (_no_grad_part, adds("other", lambda: nn.Linear(8, 8))),
    "detach": (lambda m, x: m.lin(x) * m.lin(x).detach(), id),
    "a frozen part": (
        lambda m, x: m.other(m.lin(x)), adds("other", lambda: nn.Linear(8, 8).requires_grad_(False))
    ),
    "a table that is kept": (_keeps_table, adds("kept", lambda: None)),
    "a tensor that is looked at later": (statements(lambda m, x: setattr(m, "last", m.lin(x))), id),
    "an exponential mean": (_ema, buffer("ema", 8)),
    "a buffer reassigned": (
        statements(lambda m, x: setattr(m, "count", m.count + 1)), buffer("count", dtype=torch.long)
    ),
    "register_buffer in forward": (
        statements(lambda m, x: m.register_buffer("ema", x.mean(0))), buffer("ema", 8)
    ),
    "spectral norm": (plain, lambda m: parametrizations.spectral_norm(m.lin)),
    "weight norm": (plain, lambda m: parametrizations.weight_norm(m.lin)),
    "orthogonal": (plain, lambda m: parametrizations.orthogonal(m.lin)),
    "a hook that returns": (plain, lambda m: m.lin.register_forward_hook(lambda module, args, out: out * 2)),
    "a module twice": (lambda m, x: m.other(m.lin(x)), lambda m: setattr(m, "other", m.lin)),
    "a buffer that is not saved": (
        lambda m, x: m.lin(x) * m.b, lambda m: m.register_buffer("b", torch.ones(8) * 2, persistent=False)
    ),
}  # fmt: skip
"""What must be exact: forward and setup."""

REFUSED: Mapping[str, tuple[Forward, Callable[[Any], object]]] = {
    "a clamped parameter": (_clamped, id),
    "a parameter's data changed": (statements(lambda m, x: m.lin.weight.data.mul_(0.9)), id),
    "a parameter's data assigned": (
        statements(lambda m, x: setattr(m.lin.weight, "data", m.lin.weight.data * 0.9)), id
    ),
    "a hook on a parameter": (plain, lambda m: m.lin.weight.register_hook(lambda gradient: gradient * 2)),
    "a hook after accumulation": (
        plain, lambda m: m.lin.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
    ),
    "a backward hook": (plain, lambda m: m.lin.register_full_backward_hook(lambda *args: None)),
    "a backward pre hook": (
        plain, lambda m: m.lin.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * 2,))
    ),
    "a hook that looks on": (plain, lambda m: m.lin.register_forward_hook(lambda *args: None)),
    "a hook on a tensor": (_hooked, id),
    "a Python counter": (statements(lambda m, x: setattr(m, "step", m.step + 1)), adds("step", int)),
    "a Python counter that is used": (
        lambda m, x: [setattr(m, "step", m.step + 1), m.lin(x) / m.step][1], adds("step", int)
    ),
    "a list that grows": (statements(lambda m, x: m.seen.append(1)), adds("seen", list)),
    "a list of tensors": (statements(lambda m, x: m.seen.append(m.lin(x))), adds("seen", list)),
    "a global counter": (
        statements(lambda m, x: GLOBAL.__setitem__("calls", GLOBAL["calls"] + 1)), id
    ),
    "a first call unlike the others": (_first_call, adds("first", lambda: True)),
    "a tensor of the first batch": (_keeps_batch, adds("kept", lambda: None)),
    "a memory of the last batch": (_remembers, adds("kept", lambda: None)),
    "a generator of its own": (lambda m, x: m.lin(x) * torch.rand(8, generator=m.own), adds("own", torch.Generator)),
    "numbers drawn by rejection": (lambda m, x: m.lin(x) * torch.poisson(x.abs()), id),
    "a gamma distribution": (lambda m, x: m.lin(x) * torch.distributions.Gamma(x.abs() + 1, 1.0).rsample(), id),
    "an array of numpy's numbers": (lambda m, x: m.lin(x) * torch.from_numpy(np.random.rand(8)).float(), id),
    "a layer skipped at random": (lambda m, x: m.lin(x) if random.random() < 0.5 else 2 * m.lin(x), id),
    "a random index": (lambda m, x: m.lin(x)[:, random.randrange(8)], id),
    "an item": (lambda m, x: m.lin(x) * x.sum().item(), id),
    "a list of numbers": (lambda m, x: m.lin(x) * x.tolist()[0][0], id),
    "a Boolean mask": (lambda m, x: m.lin(x)[x > 0], id),
    "nonzero": (lambda m, x: m.lin(x) * x.nonzero().shape[0], id),
    "unique": (lambda m, x: m.lin(torch.unique(x)[:8]), id),
    "a branch": (_branch, id),
    "backward": (statements(lambda m, x: m.lin(x).sum().backward()), id),
    "a Function that draws": (lambda m, x: _Noisy.apply(m.lin(x)), id),
    "a Function that writes": (lambda m, x: _Doubled.apply(m.lin(x)), id),
    "a Function of a function": (lambda m, x: _local_function().apply(m.lin(x)), id),
    "numpy": (lambda m, x: torch.from_numpy(m.lin(x).detach().numpy()), id),
    "all frozen": (plain, lambda m: m.requires_grad_(False)),
    "a loss without parameters": (lambda m, x: x, id),
    "a detached loss": (lambda m, x: m.lin(x).detach(), id),
    "a wrong width": (lambda m, x: m.lin(x[:, :3]), id),
    "an error of its own": (lambda m, x: {}["a"], id),
    "nothing returned": (lambda m, x: None, id),
    "a dict without loss": (lambda m, x: {"logits": m.lin(x)}, id),
    "half precision": (plain, lambda m: m.half()),
    "bf16": (plain, lambda m: m.bfloat16()),
    "complex parameters": (
        lambda m, x: (m.lin(x) * m.w).abs(), adds("w", lambda: nn.Parameter(torch.ones(8, dtype=torch.complex64)))
    ),
    "parameters that overlap": (
        lambda m, x: m.lin(x) + m.w, lambda m: setattr(m, "w", nn.Parameter(m.lin.bias.data[:1]))
    ),
    "an expanded parameter": (
        lambda m, x: m.lin(x) + m.w, adds("w", lambda: nn.Parameter(torch.ones(1).expand(8)))
    ),
    "extra state": (plain, lambda m: m.register_state_dict_post_hook(
        lambda module, state, prefix, metadata: state.__setitem__("version", torch.ones(1))
    )),
}  # fmt: skip
"""What has to be refused with an error of ours."""


class Lookup(nn.Module):
    """An embedding and a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, **options)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).square().mean()  # type: ignore[no-any-return]


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


LOSSES: Mapping[str, Any] = {
    "a loss of None": lambda o, t: None,
    "a loss that is a float": lambda o, t: 1.0,
    "a loss per row": lambda o, t: (o - t).square().mean(1),
    "an integer loss": lambda o, t: o.argmax(),
    "a loss that raises": lambda o, t: 1 / 0,
    "a loss that is a number": 3,
    "a random loss": lambda o, t: (o - torch.randn_like(t)).square().mean(),
}

INPUTS: Mapping[str, Callable[[Tensor], Any]] = {
    "None": lambda x: None,
    "an empty tuple": lambda x: (),
    "an empty dict": lambda x: {},
    "numpy": lambda x: (x.numpy(), x.numpy()),
    "a list": lambda x: [x, x],
    "text": lambda x: ("a", "b"),
    "no rows": lambda x: (x[:0], x[:0]),
    "fewer targets": lambda x: (x, x[:3]),
    "a wrong width": lambda x: (x[:, :4], x),
    "too many": lambda x: (x, x, x, x),
    "an unknown name": lambda x: {"x": x, "y": x, "target": x},
    "a missing name": lambda x: {"target": x},
    "numbers as names": lambda x: {1: x, 2: x},
    "a keyword as a name": lambda x: {"x": x, "class": x},
    "nested": lambda x: ({"a": x}, x),
    "a list inside": lambda x: (x, [x]),
    "sparse": lambda x: (x.to_sparse(), x),
    "float64 for float32": lambda x: (x.double(), x.double()),
}


def cases(count: int | None, seed: int) -> list[Case]:
    """Each takes some hundred milliseconds."""
    return drawn(_all(), count, seed)


def _all() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)
    batch = {"x": x, "target": y}
    for name, (forward, setup) in {**ACCEPTED, **REFUSED}.items():
        yield judged(name, lambda f=forward, s=setup: is_exact(Model(f, s), batch, mean_square))
    for name in ("unused parameters", "a part under no_grad only"):
        forward, setup = ACCEPTED[name]
        yield judged(
            f"{name}, AdamW", lambda f=forward, s=setup: is_exact(Model(f, s), batch, mean_square, decayed_adamw)
        )
    tokens = {"x": torch.randint(0, 10, (4, 6), generator=generator)}
    for option in ({}, {"padding_idx": 3}, {"max_norm": 0.5}, {"scale_grad_by_freq": True}, {"sparse": True}):
        yield judged(f"embedding {option}", lambda o=option: is_exact(Lookup(**o), tokens))
    for name, loss in LOSSES.items():
        yield judged(name, lambda each=loss: is_exact(Model(plain), batch, each))
    for name, make in INPUTS.items():
        yield judged(f"inputs: {name}", lambda each=make: is_exact(Model(plain), each(x), mean_square))
    for what in ("a text", None, torch.jit.script(nn.Linear(8, 8)), nn.LazyLinear(8), nn.Module()):
        yield judged(f"model: {type(what).__name__}", lambda each=what: _refused(each, batch))
    yield judged(
        "float64", lambda: is_exact(Model(plain).double(), {k: v.double() for k, v in batch.items()}, mean_square)
    )


def _refused(model: Any, batch: Mapping[str, Tensor]) -> bool:
    """False: nothing of the kind can be compiled, so that `judge` should have seen an error."""
    compiled_for(model, batch, mean_square, optimizer=sgd)
    return False
