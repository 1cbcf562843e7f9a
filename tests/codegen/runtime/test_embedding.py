"""The vocabulary-sharded lookup against F.embedding on the whole table."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from codegen.runtime.embedding import vocab_embedding


@pytest.mark.parametrize("padding_idx", [None, 0, 7, -1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_ranks_results_and_gradients_add_up(size: int, padding_idx: int | None) -> None:
    table = torch.randn(12, 5, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 7, 11, 3], [4, 4, 0, 6]])
    grad = torch.randn(2, 4, 5, dtype=torch.float64)
    expected = F.embedding(ids, table, padding_idx)
    expected.backward(grad)
    total, rows = torch.zeros_like(expected), []
    for rank in range(size):
        part = table.detach().chunk(size)[rank].clone().requires_grad_()
        out = vocab_embedding(ids, part, SimpleNamespace(size=size, rank=rank), padding_idx)
        out.backward(grad)
        total += out.detach()
        assert part.grad is not None
        rows.append(part.grad)
    assert torch.equal(total, expected.detach())
    torch.testing.assert_close(torch.cat(rows), table.grad, rtol=1e-14, atol=1e-14)


def test_each_rank_gives_zeros_for_the_others_rows() -> None:
    weight = torch.ones(3, 2)
    out = vocab_embedding(torch.tensor([0, 2, 3, 5]), weight, SimpleNamespace(size=2, rank=1))
    assert out.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_no_other_rank_touches_a_row() -> None:
    # inf in row 0, which absent ids read: its value must not reach the output.
    weight = torch.full((3, 2), torch.inf, requires_grad=True)
    out = vocab_embedding(torch.tensor([0, 1]), weight, SimpleNamespace(size=2, rank=1))
    out.sum().backward()
    assert weight.grad is not None and not out.any() and not weight.grad.any()


def test_ids_outside_the_vocabulary_raise() -> None:
    for wrong in (-1, 6):
        with pytest.raises(IndexError, match="vocabulary of 6"):
            vocab_embedding(torch.tensor([wrong]), torch.ones(3, 2), SimpleNamespace(size=2, rank=0))
    with pytest.raises(ValueError, match="padding_idx"):
        vocab_embedding(torch.tensor([1]), torch.ones(3, 2), SimpleNamespace(size=2, rank=0), 6)
