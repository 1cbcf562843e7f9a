"""torch's random operators in terms of draws: one definition for the traced graph and for the model on one process.

`Draws(draw)` is a dispatch mode. Each random operator calls `draw(distribution, size, dtype, device, **parameters)`
once (draws.py lists the distributions) and does the rest by plain operators. Random operators that torch itself defines
by others (alpha dropout, feature dropout) are taken apart by torch before the mode sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Draw = Callable[..., Tensor]
"""draw(distribution, size, dtype, device, **parameters) -> the whole random tensor."""

_aten = torch.ops.aten
_LARGEST = (1 << 63) - 1


class UndrawnError(NotImplementedError):
    """A random operator without a definition; the message names it and says why."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it every random operator is made of calls of `draw`. Raises UndrawnError for one that cannot be."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draw = draw

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or func.namespace != "aten":
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            raise UndrawnError(f"{func} with a torch.Generator of the model's own, whose state autopar does not follow")
        names = [argument.name for argument in func._schema.arguments]
        arguments = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        if isinstance(arguments.get("dtype"), int):  # as a schema has it
            del arguments["dtype"]
        arguments |= dict(zip(names, args, strict=False)) | kwargs
        in_place = names[:1] == ["self"] and func._schema.is_mutable and func not in _NOISY
        if func in _DEFINITIONS:
            value = _DEFINITIONS[func](self.draw, **_plain(arguments))
        elif in_place and func in _WRITTEN:
            value = _WRITTEN[func](self.draw, **_plain(arguments))
        else:
            raise UndrawnError(f"{func}, {_REASONS.get(str(func).split('.')[1], 'which autopar cannot draw')}")
        return args[0].copy_(value) if in_place else value


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without those that say nothing about the numbers; `from`, a word of Python, as `low`."""
    left_out = ("generator", "layout", "pin_memory", "memory_format", "names")
    return {{"from": "low", "to": "high"}.get(name, name): v for name, v in arguments.items() if name not in left_out}


# --- operators that make a tensor -------------------------------------------------------------------------------------


def _sized(distribution: str) -> Callable[..., Tensor]:
    """rand and randn, from a size."""

    def make(draw: Draw, size: Sequence[int], dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return draw(distribution, size, dtype or torch.get_default_dtype(), device)

    return make


def _like(distribution: str) -> Callable[..., Tensor]:
    """rand_like and randn_like, from a tensor."""

    def make(draw: Draw, self: Tensor, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return draw(distribution, self.shape, dtype or self.dtype, device or self.device)

    return make


def _randint(
    draw: Draw, size: Sequence[int], high: int, low: int = 0, dtype: torch.dtype | None = None, device: Any = None
) -> Tensor:
    return draw("integers", size, dtype or torch.int64, device, low=low, high=high)


def _randint_like(
    draw: Draw, self: Tensor, high: int, low: int = 0, dtype: torch.dtype | None = None, device: Any = None
) -> Tensor:
    return draw("integers", self.shape, dtype or self.dtype, device or self.device, low=low, high=high)


def _randperm(draw: Draw, n: int, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
    order = draw("integers", [n], torch.int64, device, low=0, high=1 << 62).argsort()
    return order if dtype in (None, torch.int64) else order.to(dtype)


def _bernoulli(draw: Draw, self: Tensor) -> Tensor:
    """Draw from a tensor of probabilities."""
    return (draw("uniform", self.shape, _wide(self.dtype), self.device) < self.detach()).to(self.dtype)


def _bernoulli_p(draw: Draw, self: Tensor, p: float = 0.5) -> Tensor:
    return draw("bernoulli", self.shape, self.dtype, self.device, p=p)


def _bernoulli_written(draw: Draw, self: Tensor, p: Tensor) -> Tensor:
    drawn = draw("uniform", self.shape, _wide(p.dtype), self.device)
    return (drawn < p.detach()).to(self.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of uniform numbers that probabilities are compared with."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _multinomial(draw: Draw, self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Without replacement the least of exponential numbers divided by the weights, as torch does; else the inverse of
    the distribution function."""
    weights = self.detach()
    if not replacement or num_samples == 1:
        race = weights / draw("exponential", weights.shape, _wide(weights.dtype), weights.device)
        return race.argmax(-1, keepdim=True) if num_samples == 1 else race.topk(num_samples, -1)[1]
    sums = weights.to(_wide(weights.dtype)).cumsum(-1)
    drawn = draw("uniform", [*weights.shape[:-1], num_samples], sums.dtype, weights.device)
    is_past = (drawn * sums[..., -1:]).unsqueeze(-1) >= sums.unsqueeze(-2)
    return is_past.sum(-1)


def _normal(draw: Draw, mean: Any, std: Any = 1.0, size: Any = None, dtype: Any = None, device: Any = None) -> Tensor:
    """`normal` of tensors and numbers; a result has no gradient, as torch's has none."""
    tensors = [value.detach() for value in (mean, std) if isinstance(value, Tensor)]
    if not tensors:
        return _moved(draw("normal", size, dtype or torch.get_default_dtype(), device), mean, std)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]
    z = draw("normal", shape, tensors[0].dtype, tensors[0].device)
    return _moved(z, *(value.detach() if isinstance(value, Tensor) else value for value in (mean, std)))


def _moved(z: Tensor, mean: Any, std: Any) -> Tensor:
    """mean + std * z, without what changes nothing."""
    scaled = z if isinstance(std, (int, float)) and std == 1 else z * std
    return scaled if isinstance(mean, (int, float)) and mean == 0 else scaled + mean


# --- operators that write to their operand ----------------------------------------------------------------------------


def _normal_written(draw: Draw, self: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _moved(draw("normal", self.shape, self.dtype, self.device), mean, std)


def _uniform_written(draw: Draw, self: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return _moved(draw("uniform", self.shape, self.dtype, self.device), low, high - low)


def _exponential_written(draw: Draw, self: Tensor, lambd: float = 1.0) -> Tensor:
    drawn = draw("exponential", self.shape, self.dtype, self.device)
    return drawn if lambd == 1 else drawn / lambd


def _geometric_written(draw: Draw, self: Tensor, p: float) -> Tensor:
    if p == 1:
        return torch.ones_like(self)
    drawn = draw("exponential", self.shape, _wide(self.dtype), self.device)
    return (drawn / -math.log1p(-p)).ceil().to(self.dtype)


def _log_normal_written(draw: Draw, self: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _moved(draw("normal", self.shape, self.dtype, self.device), mean, std).exp()


def _cauchy_written(draw: Draw, self: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    drawn = draw("uniform", self.shape, self.dtype, self.device)
    return _moved(((drawn - 0.5) * math.pi).tan(), median, sigma)


def _random_written(draw: Draw, self: Tensor, high: int | None = None, low: int = 0) -> Tensor:
    """`random_`, whose range without a `high` is that of the dtype, or what a floating dtype counts without gaps."""
    if high is None:
        dtype = self.dtype
        digits = torch.finfo(dtype).eps if dtype.is_floating_point else None
        high = 2 if dtype == torch.bool else int(2 / digits) + 1 if digits else torch.iinfo(dtype).max + 1
    return draw("integers", self.shape, self.dtype, self.device, low=low, high=min(high, _LARGEST))


def _rrelu(draw: Draw, self: Tensor, noise: Tensor, lower: float, upper: float, training: bool) -> Tensor:
    """Negative entries times a slope that is drawn in training. `noise` gets the slopes, which backward reads."""
    if not training:
        return torch.where(self > 0, self, self * ((lower + upper) / 2))
    slope = _moved(draw("uniform", self.shape, self.dtype, self.device), lower, upper - lower)
    slopes = torch.where(self > 0, torch.ones_like(slope), slope)
    noise.copy_(slopes)
    return self * slopes


def _rrelu_with_noise(
    draw: Draw, self: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    return _rrelu(draw, self, noise, lower, upper, training)


def _rrelu_written(
    draw: Draw, self: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Tensor:
    return self.copy_(_rrelu(draw, self, noise, lower, upper, training))


_NOISY = frozenset({_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default})
"""Operators that write to an operand after the first."""

_DEFINITIONS: Mapping[Any, Callable[..., Tensor]] = {
    _aten.rand.default: _sized("uniform"),
    _aten.randn.default: _sized("normal"),
    _aten.rand_like.default: _like("uniform"),
    _aten.randn_like.default: _like("normal"),
    _aten.randint.default: _randint,
    _aten.randint.low: _randint,
    _aten.randint_like.default: _randint_like,
    _aten.randint_like.low_dtype: _randint_like,
    _aten.randperm.default: _randperm,
    _aten.bernoulli.default: _bernoulli,
    _aten.bernoulli.p: _bernoulli_p,
    _aten.multinomial.default: _multinomial,
    _aten.normal.Tensor_float: _normal,
    _aten.normal.float_Tensor: _normal,
    _aten.normal.Tensor_Tensor: _normal,
    _aten.normal.float_float: _normal,
    _aten.rrelu_with_noise.default: _rrelu_with_noise,
    _aten.rrelu_with_noise_.default: _rrelu_written,
}
"""Operators that make a tensor, and those that write to more than their first operand."""

_WRITTEN: Mapping[Any, Callable[..., Tensor]] = {
    _aten.bernoulli_.float: _bernoulli_p,
    _aten.bernoulli_.Tensor: _bernoulli_written,
    _aten.normal_.default: _normal_written,
    _aten.uniform_.default: _uniform_written,
    _aten.exponential_.default: _exponential_written,
    _aten.geometric_.default: _geometric_written,
    _aten.log_normal_.default: _log_normal_written,
    _aten.cauchy_.default: _cauchy_written,
    _aten.random_.default: _random_written,
    getattr(_aten.random_, "from"): _random_written,
    _aten.random_.to: _random_written,
}
"""Operators that fill their first operand: what they write."""

_BY_REJECTION = "which draws as many numbers for an element as their values ask for"
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""Operators that run several layers over padded sequences, with dropout between them."""

_REASONS: Mapping[str, str] = {
    **dict.fromkeys(("poisson", "binomial", "_standard_gamma", "_sample_dirichlet"), _BY_REJECTION),
    **dict.fromkeys(RECURRENT, "whose dropout is of packed sequences"),
}
"""Why an operator has no definition."""
