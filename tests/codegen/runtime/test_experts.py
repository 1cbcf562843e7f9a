"""The layers of a mixture of experts, against the same written with a matrix per row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.rules.families.experts import routed_linear
from codegen.kernels.grouped_linear import grouped_linear
from codegen.runtime import grouped
from codegen.runtime.experts import Routes, dispatch, expert_linear, has_grouped_product

ROUTINGS = {
    "mixed": [2, 0, 3, 1, 2, 2, 0, 3],
    "skewed": [1, 1, 1, 1, 1, 1, 1, 0],
    "one expert has all": [3] * 8,
    "no rows": [],
}


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize("width", [5, 8], ids=["odd", "aligned"])
def test_rows_meet_their_experts(ids: list[int], width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = torch.tensor(ids, dtype=torch.int64)
    x = torch.randn(len(ids), 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, width, generator=generator, dtype=torch.float64, requires_grad=True)
    found = routed_linear(x, weight, experts)
    expected = torch.einsum("na,nab->nb", x, weight[experts])
    torch.testing.assert_close(found, expected)
    direction = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for have, want in zip(
        torch.autograd.grad(found, (x, weight), direction),
        torch.autograd.grad(expected, (x, weight), direction),
        strict=True,
    ):
        torch.testing.assert_close(have, want)


def test_keeps_sorted_rows_and_no_products() -> None:
    """Kept for backward are the rows, 4 x 6, not their products, 4 x 64."""
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(2, 6, 64, requires_grad=True)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        routed_linear(x, weight, torch.tensor([0, 1, 0, 1]))
    del kept[weight.untyped_storage().data_ptr()]
    assert max(kept.values()) == 4 * 6 * 4


@pytest.mark.parametrize("ids", ROUTINGS.values(), ids=ROUTINGS)
def test_without_a_gpu_programs_with_kernels_do_the_same(ids: list[int]) -> None:
    """Also called by the kernel's own name, of which a rank without rows makes gradients of zeros."""
    routes = Routes(torch.tensor(ids, dtype=torch.int64), 4)
    weight, bias = torch.randn(4, 6, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    leaves = dispatch(torch.randn(len(ids), 6, dtype=torch.float64), routes), weight, bias
    for leaf in leaves:
        leaf.requires_grad_()
    rows, *_ = leaves
    calls = (
        expert_linear(rows, weight, routes, bias),
        grouped.expert_linear(rows, weight, routes, bias),
        grouped_linear(rows, weight, routes.ends, bias),
    )
    plain, *others = ((y, *torch.autograd.grad(y.square().sum(), leaves)) for y in calls)
    for other in others:
        torch.testing.assert_close(other, plain)


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("capability", "options", "has_one"),
    [
        ((9, 0), {}, True),
        ((10, 0), {"transposed": True}, True),
        ((8, 0), {}, False),
        ((12, 0), {}, False),
        ((9, 0), {"dtype": torch.float16}, False),
        ((9, 0), {"num_out": 20}, False),
        ((9, 0), {"start": 1}, False),
        ((9, 0), {"num_rows": 0}, False),
    ],
    ids=str,
)
def test_where_torch_has_one_kernel(
    capability: tuple[int, int], options: dict[str, Any], has_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    own = {"dtype": torch.bfloat16, "num_rows": 5, "num_out": 24, "start": 0, "transposed": False} | options
    rows = torch.zeros(own["num_rows"], 32, dtype=own["dtype"])[:, own["start"] : own["start"] + 16]
    weight = torch.zeros(3, 16, own["num_out"], dtype=own["dtype"])
    if own["transposed"]:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert has_grouped_product(rows.as_subclass(OnGpu), weight) == has_one


def test_wrong_arguments_name_what_was_given() -> None:
    rows, weight, ends = torch.ones(4, 3), torch.ones(2, 3, 5), torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"weight \[E, A, B\].*\(4, 3\), \(2, 5, 3\), \(2,\)"):
        grouped_linear(rows, weight.transpose(1, 2), ends)
    with pytest.raises(ValueError, match=r"bias must have shape \(2, 5\), got \(5,\)"):
        grouped_linear(rows, weight, ends, torch.ones(5))
    with pytest.raises(ValueError, match="one floating dtype, ends int32"):
        grouped_linear(rows, weight, ends.long())
