"""Optimisers of users: torch's in several groupings, some of one's own, and some that no program can honour."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


class TinyNet(nn.Module):
    """An embedding, two equal layers with norms and biases, and a head: names and shapes to group by."""

    def __init__(self, width: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(TinyLayer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class TinyLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(32, (4, 6), generator=generator) for _ in range(2))


def model(tied: bool = False) -> TinyNet:
    torch.manual_seed(0)
    return TinyNet(tied=tied)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, with a counter that is a number."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["momentum"] = 0, torch.zeros_like(p)
                state["count"] += 1
                # Smooth, unlike the sign of the paper, which would magnify round-off in comparisons.
                update = torch.tanh(100 * (first * state["momentum"] + (1 - first) * p.grad)) / state["count"] ** 0.5
                state["momentum"].lerp_(p.grad, 1 - second)
                p.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])


class Lamb(torch.optim.Optimizer):
    """You et al. 2019: Adam's update of a tensor, as long as the tensor itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(p), torch.zeros_like(p)
                state["first"].lerp_(p.grad, 0.1)
                state["second"].lerp_(p.grad.square(), 0.01)
                update = state["first"] / (state["second"].sqrt() + 1e-3)
                p.sub_(update, alpha=group["lr"] * float((p.norm() + 0.1) / (update.norm() + 0.1)))


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018: a matrix's gradient between the inverse fourth roots of sums of its squares over rows and over
    columns; all else as SGD does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update, state = p.grad, self.state[p]
                if p.ndim == 2:
                    if not state:
                        state["rows"], state["columns"] = (1e-2 * torch.eye(n).to(p) for n in p.shape)
                    state["rows"] += p.grad @ p.grad.mT
                    state["columns"] += p.grad.mT @ p.grad
                    update = _root(state["rows"]) @ p.grad @ _root(state["columns"])
                p.sub_(update, alpha=group["lr"])


def _root(matrix: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values**-0.25 * vectors).mT


class OwnMuon(torch.optim.Optimizer):
    """Jordan et al. 2024, with AdamW for groups that say so, in one optimiser. Unlike torch's it multiplies in the
    tensors' own dtype, and takes stacks of matrices."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.1, "is_matrix": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["first"] = 0, torch.zeros_like(p)
                    state |= {} if group["is_matrix"] else {"second": torch.zeros_like(p)}
                state["step"] += 1
                state["first"].lerp_(p.grad, 0.1)
                if group["is_matrix"]:
                    update = _orthogonal(state["first"]) * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                else:
                    state["second"].lerp_(p.grad.square(), 0.01)
                    scale = (state["second"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-4
                    update = state["first"] / (1 - 0.9 ** state["step"]) / scale
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


def _orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Five steps of Newton-Schulz."""
    y = x.mT if x.shape[-2] > x.shape[-1] else x
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = y @ y.mT
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    return y.mT if x.shape[-2] > x.shape[-1] else y


def muon_by_ndim(params: Any) -> torch.optim.Optimizer:
    """Matrices, and AdamW for vectors."""
    params = list(params)
    rest = {"params": [p for p in params if p.ndim < 2], "is_matrix": False, "weight_decay": 0.0, "lr": 3e-2}
    return OwnMuon([{"params": [p for p in params if p.ndim >= 2]}, rest])


def muon_by_name(named_parameters: Any) -> torch.optim.Optimizer:
    """Hidden matrices; AdamW for table and head, without decay for biases and norms."""
    named = list(named_parameters)
    hidden = [p for n, p in named if p.ndim >= 2 and "embed" not in n and "head" not in n]
    tables = [p for n, p in named if p.ndim >= 2 and ("embed" in n or "head" in n)]
    vectors = [p for n, p in named if p.ndim < 2]
    rest = [{"params": tables, "is_matrix": False}, {"params": vectors, "is_matrix": False, "weight_decay": 0.0}]
    return OwnMuon([{"params": hidden}, *rest])


def by_ndim(params: Any) -> torch.optim.Optimizer:
    """Decay for matrices only."""
    params = list(params)
    matrices, vectors = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 3.0}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def by_name(named_parameters: Any) -> torch.optim.Optimizer:
    """Decay for all but biases and norms."""
    named = list(named_parameters)
    plain = [pair for pair in named if "bias" in pair[0] or "norm" in pair[0]]
    decayed = [pair for pair in named if not ("bias" in pair[0] or "norm" in pair[0])]
    groups = [{"params": decayed, "weight_decay": 3.0}, {"params": plain, "weight_decay": 0.0, "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def by_order(params: Any) -> torch.optim.Optimizer:
    """The last three slowly, the first one not at all: it is left out."""
    _, *rest = params
    return torch.optim.SGD([{"params": rest[:-3]}, {"params": rest[-3:], "lr": 1e-3}], lr=0.1, momentum=0.9)


def by_size(params: Any) -> torch.optim.Optimizer:
    """Rates by the number of elements and the size of the first dim."""
    groups = [{"params": [p], "lr": 0.1 / len(p) + 0.5 / p.numel()} for p in params]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def muon(params: Any) -> torch.optim.Optimizer:
    """The matrices; vectors are left out."""
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2)


def clipped(params: Any) -> torch.optim.Optimizer:
    """Clips by the norm of all gradients in its own step."""
    optimizer = torch.optim.SGD(params, lr=0.1)

    def clip(self: Any, *_: Any) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1)


HONOURED = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW by name": by_name,
    "AdamW by ndim": by_ndim,
    "SGD by order": by_order,
    "SGD by size": by_size,
    "Adagrad": adagrad,
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-4),
    "Lion": Lion,
}
"""Elementwise updates: exact under every plan."""

WHOLE = {
    "Adafactor": torch.optim.Adafactor,
    "LAMB": Lamb,
    "Muon": muon,
    "Muon by ndim": muon_by_ndim,
    "Muon by name": muon_by_name,
    "Shampoo": Shampoo,
}
"""Updates that need whole tensors: exact under every plan but offloading, since one rank each updates them."""

COUPLED = {"SGD that clips": clipped}


class Lookahead(torch.optim.SGD):
    """Keeps what the parameters were when it was made."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()


class Langevin(torch.optim.SGD):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)


class Hoarder(torch.optim.SGD):
    """Steps the tensors that it was made with, whatever its groups say."""

    def __init__(self, params: Any) -> None:
        self.own = list(params)
        super().__init__(self.own, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.own:
            if p.grad is not None:
                p.sub_(p.grad)


def refused(net: nn.Module) -> dict[str, tuple[Any, str]]:
    """Factories that cannot be honoured, with a part of what is said."""
    ids = {id(p) for p in net.parameters() if p.ndim > 1}

    def by_identity(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        chosen, others = [p for p in params if id(p) in ids], [p for p in params if id(p) not in ids]
        return torch.optim.SGD([{"params": chosen, "weight_decay": 1.0}, {"params": others}], lr=0.1)

    def by_value(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [p], "lr": 0.1 + float(p.detach().abs().max())} for p in params], lr=0.1)

    def freezing(params: Any) -> torch.optim.Optimizer:
        params[0].requires_grad_(False)
        return torch.optim.SGD(params[1:], lr=0.1)

    return {
        "closure": (lambda params: torch.optim.AdamW(net.parameters()), "holds 16 others"),
        "closure in part": (
            lambda params: torch.optim.AdamW([*params[1:], net.embed.weight]),
            "holds 1 others",
        ),
        "by identity": (by_identity, "not by identity or value"),
        "by value": (by_value, "not by identity or value"),
        "LBFGS": (torch.optim.LBFGS, "LBFGS.step needs a closure"),
        "freezing": (freezing, "requires_grad=False"),
        "no optimizer": (lambda params: params, "must return a torch.optim.Optimizer"),
        "failing": (torch.optim.Muon, "Muon only supports 2D parameters"),
        "sparse": (torch.optim.SparseAdam, "does not support dense gradients"),
        "constructor": (Lookahead, "'slow' of embed.weight"),
        "random": (Langevin, "draws random numbers"),
        "hoarder": (Hoarder, "does not update what its param_groups hold"),
    }
