"""Loads of experts against routed tokens that are counted."""

from __future__ import annotations

import pytest
import torch

from cost_models.routing import fullest_load


def counted(ranks: int, experts: int, choices: int, tokens: int, skew: float, trials: int = 400) -> float:
    """The mean over `trials` of the fullest rank's tokens by the average rank's. Shares of tokens are Gamma variables
    of the given coefficient of variation."""
    torch.manual_seed(0)
    total = 0.0
    for _ in range(trials):
        shape = torch.full((experts,), skew**-2) if skew else None
        shares = torch.distributions.Gamma(shape, 1.0).sample() if shape is not None else torch.ones(experts)
        if choices == 1:
            chosen = torch.multinomial(shares, tokens, replacement=True)
        else:
            chosen = torch.multinomial(shares.expand(tokens, experts), choices).flatten()
        loads = torch.bincount(chosen, minlength=experts).reshape(ranks, -1).sum(1)
        total += float(loads.max()) * ranks / (tokens * choices)
    return total / trials


@pytest.mark.parametrize(
    ("ranks", "experts", "choices", "tokens", "skew"),
    [(2, 16, 1, 256, 0.0), (8, 8, 2, 512, 0.0), (8, 64, 6, 512, 0.0), (8, 8, 1, 4096, 0.26), (8, 64, 1, 4096, 0.26)],
)
def test_the_fullest_rank_has_what_is_counted(ranks: int, experts: int, choices: int, tokens: int, skew: float) -> None:
    excess = fullest_load(ranks, experts, choices, tokens, skew) - 1
    assert excess == pytest.approx(counted(ranks, experts, choices, tokens, skew) - 1, rel=0.05)


def test_one_rank_and_tokens_for_all_experts_are_level() -> None:
    assert fullest_load(1, 8, 2, 64, 0.5) == 1.0
    assert fullest_load(8, 8, 8, 64, 0.0) == 1.0


def test_no_rank_has_more_than_all_tokens() -> None:
    assert fullest_load(4, 4, 1, 1, 3.0) == 4.0


@pytest.mark.parametrize(
    "arguments", [(3, 8, 2, 64, 0.1), (2, 8, 9, 64, 0.1), (2, 8, 0, 64, 0.1), (2, 8, 2, 0, 0.1), (2, 8, 2, 64, -0.1)]
)
def test_what_cannot_be_routed_is_refused(arguments: tuple[int, int, int, float, float]) -> None:
    with pytest.raises(ValueError, match="cannot route"):
        fullest_load(*arguments)
