"""What a traced graph does not show is honoured exactly or refused: the cases of benchmarks/faults/models.py."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import decayed_adamw, is_exact
from benchmarks.faults import models, names
from benchmarks.faults.models import ACCEPTED, REFUSED, Lookup, Model, mean_square, plain

DRAWN = torch.Generator().manual_seed(0)
BATCH = {"x": torch.randn(4, 8, generator=DRAWN), "target": torch.randn(4, 8, generator=DRAWN)}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_planned(name: str) -> None:
    model = Model(*REFUSED[name])
    with pytest.raises(AutoparError) as error:
        trace(model, BATCH, mean_square)
    assert not type(error.value).__name__.startswith("Internal")
    assert str(error.value).count("\n") <= 8


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "name",
    [
        "counter that the loss reads",
        "batch norm",
        "unused parameters",
        "frozen batch norm",
        "no_grad",
        "a custom Function",
        "an exponential mean",
        "a buffer reassigned",
        "register_buffer in forward",
        "spectral norm",
    ],
)
def test_state_is_that_of_the_single_process(name: str) -> None:
    assert is_exact(Model(*ACCEPTED[name]), BATCH, mean_square)


@pytest.mark.parametrize("name", ["a part under no_grad only", "unused parameters"])
def test_weight_decay_passes_over_what_has_no_gradient(name: str) -> None:
    assert is_exact(Model(*ACCEPTED[name]), BATCH, mean_square, decayed_adamw)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "name", ["rand", "randperm", "alpha dropout", "a distribution", "numpy.random", "a random choice"]
)
def test_draws_are_those_of_the_single_process(name: str) -> None:
    assert is_exact(Model(*ACCEPTED[name]), BATCH, mean_square)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a generator of its own", "from a torch.Generator"),
        ("numbers drawn by rejection", "as many numbers for an element as their values ask for"),
        ("an array of numpy's numbers", "numpy.random.rand"),
        ("a layer skipped at random", r"drawn by.*random\.random"),
    ],
)
def test_what_cannot_be_drawn_is_refused_for_that(name: str, reason: str) -> None:
    with pytest.raises(TraceError, match=reason):
        trace(Model(*REFUSED[name]), BATCH, mean_square)


def test_a_buffer_of_another_shape_is_named() -> None:
    def replaced(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.ema = x.mean(0)[:4]
        return m.lin(x)  # type: ignore[no-any-return]

    with pytest.raises(TraceError, match=r"replaces a buffer.*\n.*ema"):
        trace(Model(replaced, models.buffer("ema", 8)), BATCH, mean_square)


def test_an_embedding_is_renormalised_by_nobody() -> None:
    tokens = {"x": torch.arange(8).reshape(2, 4)}
    trace(Lookup(padding_idx=3), tokens)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        with pytest.raises(TraceError):
            trace(Lookup(**{option: 0.5 if option == "max_norm" else True}), tokens)


def test_tracing_changes_neither_the_model_nor_generators() -> None:
    model = Model(*ACCEPTED["batch norm"]).eval()
    model.lin.weight.grad = torch.ones(8, 8)
    handle = model.lin.register_forward_hook(lambda module, args, output: output * 2)
    state = copy.deepcopy(model.state_dict())
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    trace(model, BATCH, mean_square)
    assert not model.training and not model.norm.training
    assert list(model.lin._forward_hooks) == [handle.id]
    assert torch.equal(model.lin.weight.grad, torch.ones(8, 8))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1] and np.array_equal(np.random.get_state()[1], before[2])


class FrozenNorm(nn.Module):
    """Its train() leaves the norm in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x)).square().mean()


def test_what_a_models_own_train_freezes_is_frozen_or_asked_for() -> None:
    batch = {"x": BATCH["x"]}
    with pytest.raises(AutoparError, match=r"norm\n.*model.train\(\)"):
        trace(FrozenNorm(), batch)
    assert is_exact(FrozenNorm().train(), batch)
    by_hand = FrozenNorm().train()
    by_hand.lin.eval()
    trace(by_hand, batch)  # what a user put into evaluation mode stays so


class Counted(nn.Module):
    """Equal blocks, each with a buffer that counts and a layer that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Model(plain, lambda m: self.count(m)) for _ in range(5))

    @staticmethod
    def count(block: nn.Module) -> None:
        block.register_buffer("calls", torch.zeros((), dtype=torch.long))
        block.unused = nn.Linear(2, 2)
        block.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.calls += 1
            x = block.norm(block(x)) + x / block.calls
        return x.square().mean()


def test_blocks_that_are_not_traced_keep_their_counters_and_unused_layers() -> None:
    assert is_exact(Counted(), {"x": BATCH["x"]})


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}])
def test_counters_and_unused_parameters_under_plans(constraints: dict[str, int]) -> None:
    import autopar

    report = autopar.verify(
        Counted(), "2 cpu", example_inputs={"x": BATCH["x"]}, constraints=constraints, optimizer=decayed_adamw
    )
    assert report.ok(), str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [(models, 40), (names, 15)], ids=["models", "names"])
def test_the_campaign_finds_nothing_raw_or_wrong(kind: object, count: int) -> None:
    results = [(case.name, case.run()) for case in kind.cases(count, 1)]  # type: ignore[attr-defined]
    assert not [(name, r) for name, r in results if r.outcome in ("raw", "wrong")]


def test_hooks_that_hand_on_outputs_may_be_those_of_transformers_alone() -> None:
    """It leaves them on models that were run; anybody else's would not run in a program."""
    for home, is_refused in (("user.code", True), ("transformers.utils.output_capturing", False)):
        handed_on: list[torch.Tensor] = []

        def hand_on(module: nn.Module, args: Any, output: torch.Tensor, to: list[torch.Tensor] = handed_on) -> None:
            to.append(output)

        hand_on.__module__ = home
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        model[0].register_forward_hook(hand_on)
        with pytest.raises(TraceError, match="hook returns nothing") if is_refused else contextlib.nullcontext():
            trace(model, (torch.randn(2, 4), torch.randn(2, 4)), mean_square)
