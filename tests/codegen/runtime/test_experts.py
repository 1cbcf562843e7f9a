"""The layers of a mixture of experts, against the same written with a matrix per row."""

from __future__ import annotations

import pytest
import torch

from autopar.rules.experts import routed_linear

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
