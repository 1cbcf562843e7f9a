"""Optimizers around optimizers, and those whose step evaluates the loss again."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import ConstraintError
from autopar.settings.optimizers import examine


class Lookahead(torch.optim.Optimizer):
    """Slow weights in the state, made when they are first needed; shares the groups of the optimizer inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults, self.state = inner, inner.defaults, defaultdict(dict)
        self.param_groups = inner.param_groups
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        for group in self.param_groups:
            group["count"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"] if group["count"] % 3 == 0 else ():
                state = self.inner.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)
        return loss


class EagerLookahead(Lookahead):
    """Slow weights made in the constructor and kept beside the state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step(closure)
        for group, kept in zip(self.param_groups, self.slow, strict=True):
            for parameter, slow in zip(group["params"], kept, strict=True):
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)


class Sharpness(torch.optim.SGD):
    """SAM: goes up the gradient, evaluates the loss there, and steps from where it was."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in held]
        for parameter in held:
            parameter.add_(parameter.grad, alpha=0.05)
        with torch.enable_grad():
            closure()
        for parameter, value in zip(held, before, strict=True):
            parameter.copy_(value)
        return super().step()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def test_lookahead_is_honoured() -> None:
    assert not examine(lambda params: Lookahead(torch.optim.AdamW(params, lr=0.1)), model()).whole


REFUSED: dict[str, tuple[Any, str]] = {
    "SAM": (lambda params: Sharpness(params, lr=0.1), "evaluates? the loss again.*\n.*fails without a closure"),
    "LBFGS": (lambda params: torch.optim.LBFGS(params), "evaluates? the loss again.*\n.*needs a closure"),
    "slow weights of the constructor": (
        lambda params: EagerLookahead(torch.optim.SGD(params, lr=0.1)),
        "cannot step(.|\n)*in self.state",
    ),
    "a list": (lambda params: [torch.optim.SGD(params, lr=0.1)], "a program for each"),
    "a dict": (lambda params: {"all": torch.optim.SGD(params, lr=0.1)}, "a program for each"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_what_to_do(name: str) -> None:
    factory, words = REFUSED[name]
    with pytest.raises(ConstraintError, match=words) as caught:
        examine(factory, model())
    assert caught.value.alternatives
