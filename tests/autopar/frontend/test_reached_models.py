"""Forwards set on instances, and functions that hold the user's own model: traced as they mean, or refused."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace

REACHES = "reaches the model itself"


class Net(nn.Module):
    """The norm's weights are all one, and so would pass for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def mean(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def compiled(net: nn.Module, loss_fn: Callable[[Tensor], Tensor] = mean) -> str:
    return autopar.compile(net, "2 cpu", example_inputs={"x": torch.randn(4, 8)}, loss_fn=loss_fn).source


def scaled(self: nn.Module, x: Tensor) -> Tensor:
    return 3 * type(self).forward(self, x)


def test_methods_set_on_instances_are_traced() -> None:
    """As methods of the class would be."""

    class Linear(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    as_class, as_method, as_partial = Net(), Net(), Net()
    as_class.norm.__class__ = Linear
    as_method.norm.forward = types.MethodType(scaled, as_method.norm)
    as_partial.norm.forward = functools.partial(lambda old, x: 3 * old(x), as_partial.norm.forward)
    sources = {compiled(net).replace("Linear", "LayerNorm") for net in (as_class, as_method, as_partial)}
    assert len(sources) == 1 and "norm.weight" in sources.pop()


def wraps_its_old_forward(net: Net) -> Callable[[Tensor], Tensor]:
    old = net.norm.forward
    net.norm.forward = lambda x: 3 * old(x)
    return mean


LOSSES: dict[str, Callable[[Net], Callable[[Tensor], Tensor]]] = {
    "a forward around the old one": wraps_its_old_forward,
    "decay of a weight": lambda net: lambda output: mean(output) + net.norm.weight.pow(2).sum(),
    "decay of all weights": lambda net: lambda output: mean(output) + sum(p.pow(2).sum() for p in net.parameters()),
    "a module of the model": lambda net: lambda output: mean(net.norm(output)),
    "a buffer": lambda net: lambda output: mean(output * net.scale),
    "detached": lambda net: lambda output: mean(output) * net.norm.weight.detach().sum(),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_the_model_itself_is_no_constant(name: str, on_meta: bool) -> None:
    """One process would train what a graph would hold as a number for ever."""
    with torch.device("meta" if on_meta else "cpu"):
        net = Net()
    with pytest.raises(TraceError) as caught:
        compiled(net, LOSSES[name](net))
    said = str(caught.value)
    if on_meta:  # torch says that two devices meet
        assert REACHES in said or "meta" in said
    else:
        assert (
            REACHES in said
            and "types.MethodType" in said
            and ("norm.weight" in said or "scale" in said or "linear.weight" in said)
        )


def test_tensors_that_are_not_the_models_stay_numbers() -> None:
    ones = torch.ones(8)
    assert "norm.weight" in compiled(Net(), lambda output: mean(output * ones))


class Flexible(nn.Module):
    def __init__(self, makes_mask: bool) -> None:
        super().__init__()
        self.linear, self.makes_mask = nn.Linear(16, 48), makes_mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x)[:, None].chunk(3, -1)
        ends = x[:, :, 0] > 0
        same = lambda b, h, i, j: ends[b, i] == ends[b, j]  # noqa: E731
        mask = create_block_mask(same, len(x), 1, 8, 8, "cpu") if self.makes_mask else None
        return flex_attention(q, k, v, block_mask=mask).sum()


@pytest.mark.parametrize("makes_mask", [False, True])
def test_flex_attention_says_what_to_use(makes_mask: bool) -> None:
    with pytest.raises(TraceError, match="flex_attention(.*\n)*.*scaled_dot_product_attention"):
        trace(Flexible(makes_mask), (torch.randn(2, 8, 16),))
