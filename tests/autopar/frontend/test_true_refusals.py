"""Refusals say what is so: each is for a model that torch runs in one process, or for one that it does not run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import is_exact

BATCH = {"x": torch.randn(8, 6)}


class Net(nn.Module):
    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.then = nn.Linear(6, 6), then
        self.register_buffer("places", torch.tensor([0, 3, 3, 1, 0, 2]))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.layer(x)).square().mean()


def condition(m: Any, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,))


def loop(m: Any, h: Tensor) -> Tensor:
    return while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 0.5), (torch.tensor(0), h))[1]


def scanned(m: Any, h: Tensor) -> Tensor:
    return scan(lambda carry, x: (carry + x, carry * 1.0), torch.zeros(6), h)[1]


def chosen(m: Any, h: Tensor) -> Tensor:
    kept = h[h > 0]
    return h * kept.cumsum(0).sum()


def repeated(m: Any, h: Tensor) -> Tensor:
    return h.new_ones(m.places.unique().shape).sum() * h


def branched(m: Any, h: Tensor) -> Tensor:
    return h if bool(h.mean() > 0) else h * 2


def through_numpy(m: Any, h: Tensor) -> Tensor:
    return h * float(np.square(h.detach().numpy()).mean())


def copied(m: Any, h: Tensor) -> Tensor:
    return copy.deepcopy(m.layer)(h)


def nested(m: Any, h: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([h[:3], h[3:]]), 0.0)


TRUE = {
    condition: r"control flow(.|\n)*cond at ",
    loop: r"control flow(.|\n)*while_loop at ",
    scanned: r"control flow(.|\n)*scan at ",
    chosen: r"shape of a result depends on values(.|\n)*kept.cumsum",
    repeated: r"shape of a result depends on values(.|\n)*unique",
    branched: r"values of tensors(.|\n)*h.mean\(\) > 0",
    through_numpy: r"numpy",
    copied: r"could not trace the model\n",
    nested: r"nested tensors",
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "then", [each if each is not scanned else pytest.param(each, marks=pytest.mark.slow) for each in TRUE]
)
def test_what_runs_in_one_process_is_not_said_to_fail(then: Callable[[Any, Tensor], Tensor]) -> None:
    model = Net(then)
    assert torch.isfinite(model(**BATCH))
    with pytest.raises(TraceError, match=TRUE[then]) as error:
        trace(model, BATCH)
    assert "fails on the example inputs" not in str(error.value)
    assert "when it is called again" not in str(error.value)
    assert "test_true_refusals.py" in str(error.value)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        (lambda m, h: h @ torch.ones(5, 5), "shapes cannot be multiplied"),
        (lambda m, h: h * m.missing, "no attribute 'missing'"),
        (lambda m, h: h.reshape(5, -1), "shape '\\[5, -1\\]' is invalid"),
    ],
)
def test_what_fails_in_one_process_is_said_to_fail(then: Callable[[Any, Tensor], Tensor], why: str) -> None:
    with pytest.raises(TraceError, match=rf"fails on the example inputs\n.*{why}") as error:
        trace(Net(then), BATCH)
    assert "test_true_refusals.py" in str(error.value)


def test_a_model_on_meta_is_not_said_to_fail() -> None:
    with torch.device("meta"):
        model = Net(through_numpy)
    with pytest.raises(TraceError, match="numpy"):
        trace(model, BATCH)


def test_what_fails_in_low_precision_alone_is_told_so() -> None:
    model = Net(lambda m, h: torch.linalg.inv(h[:6, :6] + 9 * torch.eye(6)))
    trace(model, BATCH)
    with pytest.raises(TraceError, match="in bfloat16") as error:
        trace(Net(lambda m, h: h.view(torch.int32).float() * h), BATCH, param_dtype=torch.bfloat16)
    assert "fails on the example inputs" not in str(error.value)


class Cached(nn.Module):
    """Keeps a table that it computes once, from a buffer or from what changes."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        if is_trained:
            self.slopes = nn.Parameter(torch.arange(6.0))
        else:
            self.register_buffer("slopes", torch.arange(6.0))
        self.register_buffer("table", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = self.slopes * torch.arange(6)
        return (self.layer(x) + self.table).square().mean()


def test_what_forward_keeps_of_buffers_alone_is_no_state() -> None:
    assert is_exact(Cached(is_trained=False), BATCH)
    with pytest.raises(TraceError, match="keeps a tensor"):
        trace(Cached(is_trained=True), BATCH)
