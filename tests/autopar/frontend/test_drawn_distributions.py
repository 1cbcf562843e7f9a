"""Numbers of Python's and numpy's distributions in forward: distributed as there, and drawn anew in every step."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import lognormvariate
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import logistic
from torch import Tensor

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import is_exact
from codegen.runtime.python_random import by_torch
from tests.autopar.frontend.test_drawn_floats import Net

GENERATOR, OWN = np.random.default_rng(5), random.Random(5)
X = torch.linspace(-1, 1, 32).reshape(4, 8)

DISTRIBUTIONS: dict[str, Callable[[], Any]] = {
    "beta": lambda: np.random.beta(0.3, 0.7),
    "large beta": lambda: GENERATOR.beta(4.0, 2.5),
    "gamma": lambda: np.random.gamma(1.3, 2.0),
    "small gamma": lambda: OWN.gammavariate(0.4, 1.0),
    "wald": lambda: np.random.wald(1.0, 3.0),
    "triangular": lambda: np.random.triangular(-1.0, 0.5, 1.0),
    "Python's triangular": lambda: random.triangular(1.0, 2.0, 1.2),
    "student": lambda: np.random.standard_t(4.0),
    "fisher": lambda: np.random.f(5.0, 7.0),
    "laplace": lambda: np.random.laplace(0.5, 2.0),
    "logistic": lambda: logistic(1.0, 0.5),
    "lognormal": lambda: lognormvariate(0.1, 0.4),
    "gumbel": lambda: np.random.gumbel(0.2, 2.0),
    "weibull": lambda: random.weibullvariate(1.5, 3.0),
    "pareto": lambda: random.paretovariate(3.0),
    "numpy's pareto": lambda: np.random.pareto(3.0),
    "power": lambda: np.random.power(2.5),
    "rayleigh": lambda: np.random.rayleigh(2.0),
    "geometric": lambda: GENERATOR.geometric(0.3) + 0.0,
    "binomial": lambda: np.random.binomial(5, 0.3) + 0.0,
    "choice": lambda: random.choice([0.5, 1.0, 4.0]),
}
QUICK = {"beta", "wald", "triangular", "logistic", "geometric"}


def marked(names: Any) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


@pytest.mark.parametrize("name", marked(DISTRIBUTIONS))
def test_numbers_have_the_distribution_of_their_function(name: str) -> None:
    """By the largest distance of two empirical distribution functions (Kolmogorov and Smirnov's), at one in 10^5."""
    count = 1500
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    right = np.sort([float(DISTRIBUTIONS[name]()) for _ in range(count)])
    with by_torch(Tensor.item):
        found = np.sort([float(DISTRIBUTIONS[name]()) for _ in range(count)])
    points = np.concatenate([right, found])
    distance = np.abs(np.searchsorted(right, points, side="right") - np.searchsorted(found, points, side="right")).max()
    assert distance / count < 2.42 * (2 / count) ** 0.5


def mixed(y: Tensor) -> Tensor:
    share = max(float(np.random.beta(0.4, 0.4)), 0.1)
    return share * y + (1 - share) * y.flip(0)


IN_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "mixup": mixed,
    "a name imported": lambda y: y * lognormvariate(0.0, 0.1) + logistic(0.0, 0.1),
    "a generator of the script": lambda y: y * GENERATOR.uniform(0.5, 1.5) * OWN.triangular(0.5, 1.5),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "mixup")) for n in IN_FORWARD])
def test_a_number_is_drawn_anew_in_every_step(name: str) -> None:
    torch.manual_seed(0)
    assert is_exact(Net(IN_FORWARD[name]), {"x": X})
    assert isinstance(GENERATOR, np.random.Generator) and lognormvariate is random.lognormvariate


@pytest.mark.parametrize("draw", [lambda: np.random.poisson(3.0), lambda: np.random.beta(1.0, 2.0, size=8)[0]])
def test_what_has_no_fixed_number_of_draws_is_refused(draw: Callable[[], Any]) -> None:
    with pytest.raises(TraceError, match=r"numpy"):
        trace(Net(lambda y: y * float(draw())), {"x": X})
