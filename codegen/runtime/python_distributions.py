"""Single numbers of the distributions of Python's `random` and of `numpy.random`, each of a fixed number of draws.

The draws are torch's uniform, exponential and normal numbers.

A gamma number takes the first of a few proposals that Marsaglia and Tsang's rule accepts (2000). It accepts each with a
probability above 0.95, so that none of eight is accepted once in 10^10 draws; the last one is taken then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Distribution = Callable[..., Any]
"""Of the parameters, numbers or tensors without dims: a tensor without dims."""

_PROPOSALS, _MOST_TRIALS = 8, 32


def _uniform() -> Tensor:
    return torch.rand(())


def _exponential() -> Tensor:
    return torch.empty(()).exponential_()


def _normal() -> Tensor:
    return torch.randn(())


def _log_gamma(shape: Any) -> Any:
    """The logarithm of a number of the gamma distribution of scale 1, which for small shapes would be 0 itself."""
    small = shape < 1
    d = (shape + 1 if small else shape) - 1 / 3
    noise, level = (torch.stack([draw() for _ in range(_PROPOSALS)]) for draw in (_normal, _exponential))
    base = 1 + noise / (9 * d) ** 0.5
    volume = torch.log(base.clamp(min=1e-30)) * 3
    is_taken = (base > 0) & (-level < 0.5 * noise * noise + d - d * torch.exp(volume) + d * volume)
    proposal = volume[_PROPOSALS - 1]
    for index in reversed(range(_PROPOSALS - 1)):
        proposal = torch.where(is_taken[index], volume[index], proposal)
    proposal = proposal + math.log(d)
    return proposal - _exponential() / shape if small else proposal


def _gamma(shape: Any, scale: Any = 1.0) -> Any:
    return torch.exp(_log_gamma(shape)) * scale


def _beta(a: Any, b: Any) -> Any:
    return torch.sigmoid(_log_gamma(a) - _log_gamma(b))


def _lognormal(mean: Any = 0.0, sigma: Any = 1.0) -> Any:
    return torch.exp(_normal() * sigma + mean)


def _laplace(loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return (_exponential() - _exponential()) * scale + loc


def _logistic(loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return torch.log(torch.expm1(_exponential())) * scale + loc


def _gumbel(loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return loc - torch.log(_exponential()) * scale


def _weibull(a: Any) -> Any:
    return _exponential() ** (1 / a)


def _pareto(a: Any) -> Any:
    return torch.expm1(_exponential() / a)


def _power(a: Any) -> Any:
    return torch.exp(-_exponential() / a)


def _rayleigh(scale: Any = 1.0) -> Any:
    return torch.sqrt(_exponential() * 2) * scale


def _cauchy() -> Any:
    return torch.tan((_uniform() - 0.5) * math.pi)


def _triangular(left: Any, mode: Any, right: Any) -> Any:
    drawn, width = _uniform(), right - left
    rising = left + torch.sqrt(drawn * (width * (mode - left)))
    falling = right - torch.sqrt((1 - drawn) * (width * (right - mode)))
    return torch.where(drawn * width < mode - left, rising, falling)


def _chi_square(df: Any) -> Any:
    return _gamma(df / 2, 2.0)


def _student(df: Any) -> Any:
    return _normal() / torch.sqrt(_chi_square(df) / df)


def _fisher(dfnum: Any, dfden: Any) -> Any:
    return (_chi_square(dfnum) / dfnum) / (_chi_square(dfden) / dfden)


def _geometric(p: Any) -> Any:
    return torch.ceil(_exponential() / -math.log1p(-p)).clamp(min=1)


def _wald(mean: Any, scale: Any) -> Any:
    """Draw as Michael, Schucany and Haas (1976) do: choose one of two roots."""
    y = _normal() ** 2 * mean
    root = mean + (mean / (2 * scale)) * (y - torch.sqrt(y * y + y * (4 * scale)))
    return torch.where(_uniform() * (mean + root) <= mean, root, mean * mean / root)


def _python_triangular(low: Any = 0.0, high: Any = 1.0, mode: Any = None) -> Any:
    return _triangular(low, (low + high) / 2 if mode is None else mode, high)


def _one_of(values: Sequence[Any]) -> Any:
    """One of some numbers. Raises TypeError for anything else, as an unknown call does."""
    kinds = {type(choice) for choice in values}
    if not values or not kinds <= {int, float}:
        raise TypeError("a choice among what is no number")
    index, chosen = torch.randint(0, len(values), ()), torch.tensor(values[0])
    for position, choice in enumerate(values[1:], 1):
        chosen = torch.where(index == position, torch.tensor(choice), chosen)
    return chosen


def _one_of_numpy(values: Any) -> Any:
    return torch.randint(0, values, ()) if type(values) is int else _one_of(list(values))


def _binomial(n: int, p: Any) -> Any:
    """Raises TypeError for more trials than it is worth to draw one by one."""
    if type(n) is not int or not 0 < n <= _MOST_TRIALS:
        raise TypeError("a binomial number of many trials")
    return (torch.stack([_uniform() for _ in range(n)]) < p).sum()


NUMPY: Mapping[str, Distribution] = {
    "beta": _beta,
    "binomial": _binomial,
    "chisquare": _chi_square,
    "choice": _one_of_numpy,
    "f": _fisher,
    "gamma": _gamma,
    "geometric": _geometric,
    "gumbel": _gumbel,
    "laplace": _laplace,
    "logistic": _logistic,
    "lognormal": _lognormal,
    "pareto": _pareto,
    "power": _power,
    "rayleigh": _rayleigh,
    "standard_cauchy": _cauchy,
    "standard_exponential": _exponential,
    "standard_gamma": _gamma,
    "standard_t": _student,
    "triangular": _triangular,
    "wald": _wald,
    "weibull": _weibull,
}
"""By the names that numpy's functions and methods of its generators have."""

PYTHON: Mapping[str, Distribution] = {
    "betavariate": _beta,
    "choice": _one_of,
    "gammavariate": _gamma,
    "lognormvariate": _lognormal,
    "paretovariate": lambda alpha: torch.exp(_exponential() / alpha),
    "triangular": _python_triangular,
    "weibullvariate": lambda alpha, beta: _weibull(beta) * alpha,
}
