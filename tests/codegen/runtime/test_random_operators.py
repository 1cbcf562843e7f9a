"""torch's random functions by counters: distributions against torch's own generator, and what cannot be drawn."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from codegen.runtime.random_operators import UndrawnError
from codegen.runtime.reference import SameDropout

COUNT = 4096


def empty(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(COUNT, dtype=dtype)


WEIGHTS = torch.tensor([0.1, 0.5, 0.15, 0.25])

FUNCTIONS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(COUNT),
    "randn": lambda: torch.randn((64, 64)),
    "rand_like": lambda: torch.rand_like(empty()),
    "randn_like": lambda: torch.randn_like(empty(torch.float64)),
    "randint": lambda: torch.randint(7, (COUNT,)),
    "randint with low": lambda: torch.randint(-3, 4, (COUNT,), dtype=torch.int32),
    "randint_like": lambda: torch.randint_like(empty(), 2, 9),
    "randperm": lambda: torch.randperm(COUNT)[: COUNT // 2],
    "bernoulli": lambda: torch.bernoulli(torch.linspace(0, 1, COUNT)),
    "bernoulli p": lambda: torch.bernoulli(empty(), 0.3),
    "bernoulli_": lambda: empty().bernoulli_(0.8),
    "bernoulli_ of a tensor": lambda: empty().bernoulli_(torch.linspace(0, 1, COUNT)),
    "normal": lambda: torch.normal(2.0, 3.0, (COUNT,)),
    "normal of tensors": lambda: torch.normal(torch.ones(COUNT), torch.linspace(0.1, 1, COUNT)),
    "normal of a mean": lambda: torch.normal(torch.linspace(0, 1, COUNT), 0.1),
    "normal_": lambda: empty().normal_(-1, 0.5),
    "uniform_": lambda: empty().uniform_(-2, 5),
    "exponential_": lambda: empty().exponential_(3.0),
    "geometric_": lambda: empty().geometric_(0.2),
    "log_normal_": lambda: empty().log_normal_(0.5, 0.25),
    "cauchy_": lambda: empty().cauchy_(1.0, 2.0),
    "random_": lambda: empty(torch.int16).random_(),
    "random_ from": lambda: empty().random_(3, 10),
    "multinomial": lambda: torch.multinomial(WEIGHTS.expand(COUNT, 4), 1).flatten(),
    "multinomial of several": lambda: torch.multinomial(WEIGHTS, COUNT, replacement=True),
    "multinomial without replacement": lambda: torch.multinomial(WEIGHTS.expand(COUNT, 4), 2)[:, 1],
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(COUNT, 3), tau=0.5)[:, 1],
    "hard gumbel_softmax": lambda: F.gumbel_softmax(torch.zeros(COUNT, 3), hard=True).argmax(-1),
    "alpha_dropout": lambda: nn.AlphaDropout(0.3)(torch.linspace(-1, 1, COUNT)),
    "feature_alpha_dropout": lambda: nn.FeatureAlphaDropout(0.3)(torch.ones(COUNT, 2, 3))[:, 0, 0],
    "dropout1d": lambda: nn.Dropout1d(0.3)(torch.ones(COUNT, 2, 3))[:, 1, 2],
    "dropout2d": lambda: nn.Dropout2d(0.6)(torch.ones(COUNT, 2, 2, 2))[:, 1, 0, 1],
    "dropout3d": lambda: F.dropout3d(torch.ones(COUNT, 2, 1, 2, 1), 0.1)[:, 0, 0, 1],
    "rrelu": lambda: nn.RReLU(0.1, 0.6)(-torch.ones(COUNT)),
    "Uniform": lambda: torch.distributions.Uniform(torch.zeros(COUNT), 2.0).rsample(),
    "Laplace": lambda: torch.distributions.Laplace(torch.zeros(COUNT), 2.0).rsample(),
    "Gumbel": lambda: torch.distributions.Gumbel(torch.zeros(COUNT), 2.0).rsample(),
    "Categorical": lambda: torch.distributions.Categorical(WEIGHTS).sample((COUNT,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_distributions_are_torchs(name: str) -> None:
    """Two samples of one distribution: Kolmogorov-Smirnov, at 1 in 10,000."""
    torch.manual_seed(0)
    own = FUNCTIONS[name]()
    with SameDropout(3, 4) as mode:
        drawn = FUNCTIONS[name]()
    with SameDropout(3, 4):
        again = FUNCTIONS[name]()
    assert (drawn.shape, drawn.dtype) == (own.shape, own.dtype)
    assert torch.equal(drawn, again) and len(mode.calls) == 1
    one, other = own.double().flatten().sort().values, drawn.double().flatten().sort().values
    at = torch.cat((one, other))
    shares = [torch.searchsorted(x, at, right=True).double() / len(x) for x in (one, other)]
    assert float((shares[0] - shares[1]).abs().max()) * math.sqrt(len(one) / 2) < 2.23


def test_every_call_and_every_step_draws_other_numbers() -> None:
    with SameDropout(0, 0):
        first, second = torch.rand(64), torch.rand(64)
    with SameDropout(0, 1):
        third = torch.rand(64)
    assert not torch.equal(first, second) and not torch.equal(first, third)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with SameDropout(0, 0) as mode:
        torch.randn(3), F.gumbel_softmax(torch.zeros(2, 3)), F.dropout(torch.ones(4))
        nn.RReLU().eval()(torch.ones(3)), nn.AlphaDropout().eval()(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)
    assert [call.kind for call in mode.calls] == ["normal", "exponential", "dropout"]


def test_gradients_are_those_of_the_drawn_values() -> None:
    x = torch.linspace(-2, 2, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    for function in (
        lambda: F.rrelu(x, training=True),
        lambda: nn.Dropout1d(0.5)(x[:, :, None]).squeeze(-1),
        lambda: torch.randn_like(x) * x,
    ):
        with SameDropout(1, 1):
            (gradient,) = torch.autograd.grad(function().sum(), x)
        with SameDropout(1, 1):
            value = function().detach()
        torch.testing.assert_close(gradient * x.detach(), value)
    with SameDropout(0, 0):
        drawn = torch.bernoulli(x.sigmoid()) + torch.normal(x, 1.0)
    assert float(torch.autograd.grad(drawn.sum(), x)[0].abs().sum()) == 0


def test_what_cannot_be_drawn_is_named() -> None:
    rates = torch.ones(3)
    with SameDropout(0, 0):
        with pytest.raises(UndrawnError, match="poisson.*as many numbers"):
            torch.poisson(rates)
        with pytest.raises(UndrawnError, match="_standard_gamma"):
            torch.distributions.Gamma(rates, 1.0).sample()
        own = torch.rand(3, generator=torch.Generator().manual_seed(2))
    assert torch.equal(own, torch.rand(3, generator=torch.Generator().manual_seed(2)))


def test_numbers_of_python_and_numpy_follow_the_step() -> None:
    def numbers() -> list[float]:
        python = [random.random(), random.uniform(2, 3), random.gauss(10, 0.1), float(random.randint(5, 6))]
        python += [float(random.randrange(10, 20, 5)), random.expovariate(0.5)]
        return [*python, np.random.rand(), np.random.normal(-5, 0.1), float(np.random.randint(3)), np.random.uniform()]

    states = random.getstate(), np.random.get_state()[1].tolist()
    found = []
    for step in (0, 0, 1):
        with SameDropout(7, step):
            found.append(numbers())
    assert found[0] == found[1] != found[2]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states
    python = found[0]
    assert 0 <= python[0] < 1 and 2 <= python[1] < 3 and abs(python[2] - 10) < 1 and python[3] in (5.0, 6.0)
    assert python[4] in (10.0, 15.0) and python[5] > 0 and abs(python[7] + 5) < 1 and python[8] in (0.0, 1.0, 2.0)
    assert type(random.random()) is float and random.random.__module__ != "codegen.runtime.python_random"


def test_numbers_of_python_are_counted_after_attention() -> None:
    """Which the mode is entered for once more."""
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.4), torch.randn(3, 2, 8)
    with SameDropout(0, 0) as mode:
        layer(x, x, x), random.random()
    assert len(mode.calls) == 2 and mode.calls[-1].kind == "uniform"


def test_other_threads_keep_their_own_numbers() -> None:
    random.seed(0)
    expected = random.Random(0).random()
    found: list[float] = []
    with SameDropout(0, 0):
        thread = threading.Thread(target=lambda: found.append(random.random()))
        thread.start()
        thread.join()
    assert found == [expected]
