"""The user's eager model with our random numbers: what a generated program is compared with."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .attention import attention
from .draws import draw
from .dropout import dropout, dropout_key
from .layout import whole
from .python_random import by_torch
from .random_operators import RECURRENT, Draws


@dataclass(frozen=True, slots=True)
class DropoutCall:
    """One random call that the mode replaced: what it was ("dropout", "attention" or a distribution of draws.py), its
    probability and the shape of its numbers."""

    kind: str
    p: float
    shape: tuple[int, ...]


class SameDropout(TorchFunctionMode):
    """Within it, the n-th random call of an eager model uses the numbers of key `dropout_key(seed, step, n)`.

    A generated program numbers its random calls in the order of the traced forward, so a model run under this mode
    (one process, whole batch) draws the same numbers, and its losses and gradients can be compared. One instance is
    one step: use a new one for the next.

    Replaced: F.dropout, torch.dropout and their in-place variants (so nn.Dropout and F.multi_head_attention_forward
    too) in training with p > 0; F.scaled_dot_product_attention with dropout_p > 0; every other random function by
    the draws that it is made of (random_operators.py); Python's and numpy's numbers (python_random.py). Calls with
    p = 0 or not in training do not count, and a torch.Generator that is named draws as it would. Raises
    NotImplementedError for what no generated program draws.

    Attributes:
        calls: the calls replaced so far, in order.
    """

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()
        self.seed = seed
        self.step = step
        self.calls: list[DropoutCall] = []
        aten = torch.ops.aten
        self._handlers: dict[object, Callable[..., Tensor | None]] = {
            F.dropout: self._functional_dropout,
            torch.dropout: self._dropout,
            torch.dropout_: self._dropout_,
            aten.dropout.default: self._dropout,
            aten.dropout_.default: self._dropout_,
            F.scaled_dot_product_attention: self._attention,
            aten.scaled_dot_product_attention.default: self._attention,
        }
        self._attention_forward = _without_override_check(F.multi_head_attention_forward)
        self._python = contextlib.ExitStack()
        self._entered = 0

    def __enter__(self) -> SameDropout:
        super().__enter__()  # type: ignore[no-untyped-call]
        if not self._entered:
            self._python.enter_context(by_torch(Tensor.item))
        self._entered += 1
        return self

    def __exit__(self, *raised: Any) -> None:
        self._entered -= 1
        if not self._entered:
            self._python.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            replaced = handler(*args, **kwargs)
            return func(*args, **kwargs) if replaced is None else replaced
        if _is_random(func) and kwargs.get("generator") is None:
            with Draws(self._draw):
                return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # torch switches the mode off inside a function that it was told of, but this one's dropout is inside.
            with self:
                return self._attention_forward(*args, **kwargs)
        if _drops_between_layers(func, args):
            return self._layer_by_layer(func, *args)
        return func(*args, **kwargs)

    def _draw(
        self, distribution: str, size: Sequence[int], dtype: torch.dtype, device: Any, **parameters: Any
    ) -> Tensor:
        """The whole tensor of the next draw."""
        shape = tuple(size)
        key = self._next_key(distribution, parameters.get("p", 1.0), shape)
        where = torch.get_default_device() if device is None else device
        return draw(distribution, key=key, layout=whole(shape), mesh=None, device=where, dtype=dtype, **parameters)

    def _next_key(self, kind: str, p: float, shape: tuple[int, ...]) -> int:
        self.calls.append(DropoutCall(kind, p, shape))
        return dropout_key(self.seed, self.step, len(self.calls) - 1)

    def _functional_dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor | None:
        return self._dropout_(input, p, training) if inplace else self._dropout(input, p, training)

    def _dropout(self, input: Tensor, p: float, train: bool) -> Tensor | None:
        """The result, or None to run the original (which then draws nothing)."""
        if not train or not 0.0 < p <= 1.0:
            return None
        key = self._next_key("dropout", p, tuple(input.shape))
        return dropout(input, p, key=key, layout=whole(input.shape), mesh=None)

    def _dropout_(self, input: Tensor, p: float, train: bool) -> Tensor | None:
        dropped = self._dropout(input, p, train)
        return None if dropped is None else input.copy_(dropped)

    def _layer_by_layer(self, func: Callable[..., Any], x: Tensor, hx: Any, weights: Any, *rest: Any) -> Any:
        """A recurrent function over padded sequences, one call per layer, with dropout between them."""
        has_biases, count, p, train, bidirectional, batch_first = rest
        states = hx if isinstance(hx, (tuple, list)) else (hx,)
        ways, per_layer = 1 + bidirectional, len(weights) // count
        last: list[list[Tensor]] = [[] for _ in states]
        for layer in range(count):
            states_of_layer = [state[layer * ways : (layer + 1) * ways] for state in states]
            weights_of_layer = weights[layer * per_layer : (layer + 1) * per_layer]
            start = states_of_layer if isinstance(hx, (tuple, list)) else states_of_layer[0]
            x, *ends = func(x, start, weights_of_layer, has_biases, 1, 0.0, train, bidirectional, batch_first)
            for ends_of_state, end in zip(last, ends, strict=True):
                ends_of_state.append(end)
            dropped = self._dropout(x, p, True) if layer < count - 1 else None
            x = x if dropped is None else dropped
        return (x, *map(torch.cat, last))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        if not 0.0 < dropout_p <= 1.0:
            return None
        batch = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            query.shape[:-2], query.shape[:-2] if enable_gqa else key.shape[:-2]
        )
        shape = (*batch, query.shape[-2], key.shape[-2])
        number = self._next_key("attention", dropout_p, shape)
        return attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, key=number, layout=whole(shape)
        )


def _without_override_check(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a torch.nn.functional function that runs its body even while a mode is on.

    Such a function first asks has_torch_function and, told yes, hands itself to the mode. The copy sees a module
    namespace in which the answer is no; the functions that it calls are the originals and still ask.
    """
    assert isinstance(function, types.FunctionType)
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, None)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_RANDOM = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli"),
        *("multinomial", "normal", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
        *("bernoulli_", "normal_", "uniform_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"),
        *("trunc_normal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"),
        *("gumbel_softmax", "alpha_dropout", "alpha_dropout_", "dropout1d", "dropout2d", "dropout3d"),
        *("feature_dropout", "feature_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_", "rrelu", "rrelu_"),
        *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
        *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
    }
)
"""Names of functions and methods that draw, or may."""


def _is_random(func: Callable[..., Any]) -> bool:
    if isinstance(func, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in func.tags
    return getattr(func, "__name__", "") in _RANDOM


def _drops_between_layers(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether `func` is a recurrent function with dropout. Raises NotImplementedError for one of packed sequences."""
    name = getattr(func, "__name__", "")
    # (..., dropout, train, ...) stand side by side in both signatures (padded and packed).
    if name not in RECURRENT or not any(isinstance(p, float) and p > 0.0 and t is True for p, t in pairwise(args)):
        return False
    if not isinstance(args[3], bool):
        raise NotImplementedError(f"{name} of packed sequences with dropout has no counterpart in a generated program")
    return True
