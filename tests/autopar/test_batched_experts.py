"""Mixtures that have the rows of each expert together, on ranks that share the experts out."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.compiled import CompiledProgram
from autopar.errors import ConstraintError
from autopar.launch import run_ranks
from autopar.planning import pipelines
from autopar.running.build import build_step
from codegen.program import Reshard

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
ROWS, LENGTH, EXPERTS, WIDTH, INNER = 8, 4, 4, 8, 12


class Mixture(nn.Module):
    """Tokens, a mixture beside them, and a loss. sharpness: of the router; where it is large, one expert has all."""

    def __init__(self, num_experts: int = EXPERTS, sharpness: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_experts, self.dropout = num_experts, dropout
        self.embed = nn.Embedding(16, WIDTH)
        self.router = nn.Linear(WIDTH, num_experts)
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, INNER) / 4)
        self.bias = nn.Parameter(torch.randn(num_experts, INNER))
        self.down = nn.Parameter(torch.randn(num_experts, INNER, WIDTH) / 4)
        self.head = nn.Linear(WIDTH, 16)
        with torch.no_grad():
            self.router.bias.copy_(sharpness * torch.arange(num_experts))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        return F.cross_entropy(self.head(x + self.mixed(x)).view(-1, 16), labels.view(-1))

    def mixed(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class AllForAll(Mixture):
    """Every expert has every token: the first product makes the dim of experts, and a weighted sum ends it."""

    def mixed(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        rows = F.gelu(torch.einsum("bld,edf->blef", x, self.up) + self.bias)
        rows = torch.einsum("blef,efd->bled", F.dropout(rows, self.dropout), self.down)
        return (rows * shares.unsqueeze(-1)).sum(2)


class Copied(Mixture):
    """A copy of each token for each expert, times 0 for those that it did not choose, as Llama-4 has it."""

    def mixed(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, WIDTH)
        logits = self.router(x)
        best, chosen = logits.topk(2, dim=-1)
        shares = torch.full_like(logits, float("-inf")).scatter_(1, chosen, best).sigmoid()
        rows = x.repeat(self.num_experts, 1) * shares.transpose(0, 1).reshape(-1, 1)
        rows = torch.baddbmm(self.bias.unsqueeze(1), rows.view(self.num_experts, -1, WIDTH), self.up)
        rows = torch.bmm(F.dropout(F.silu(rows), self.dropout), self.down).view(-1, WIDTH)
        return rows.reshape(self.num_experts, -1, WIDTH).sum(0).view(-1, LENGTH, WIDTH)


class Dispatched(Mixture):
    """Two places of each expert for each sequence, in the order in which tokens come, as GShard and Switch have it."""

    places = 2

    def mixed(self, x: Tensor) -> Tensor:
        shares, sent = self.sent(x)
        rows = torch.einsum("blec,bld->ebcd", sent, x)
        rows = F.relu(torch.einsum("ebcd,edf->ebcf", rows, self.up) + self.bias[:, None, None])
        rows = torch.einsum("ebcf,efd->ebcd", F.dropout(rows, self.dropout), self.down)
        return torch.einsum("blec,ebcd->bld", sent * shares[..., None, None], rows)

    def sent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(shares [B, L], which token goes to which place of which expert [B, L, E, C])."""
        shares, chosen = self.router(x).softmax(-1).max(-1)
        one_hot = F.one_hot(chosen, self.num_experts)
        place = (one_hot.cumsum(1) - 1) * one_hot
        fits = one_hot * (place < self.places)
        return shares, F.one_hot(place.clamp(max=self.places - 1), self.places).to(x.dtype) * fits.unsqueeze(-1)


class DispatchedTogether(Dispatched):
    """Places of each expert for the whole batch: which token has one is decided by all tokens before it."""

    places = 6

    def mixed(self, x: Tensor) -> Tensor:
        shares, sent = self.sent(x.reshape(1, -1, WIDTH))
        sent, shares = sent[0], shares[0]
        rows = torch.einsum("nec,nd->ecd", sent, x.reshape(-1, WIDTH))
        rows = F.relu(torch.matmul(rows, self.up) + self.bias[:, None])
        rows = torch.matmul(F.dropout(rows, self.dropout), self.down)
        return torch.einsum("nec,ecd->nd", sent * shares[:, None, None], rows).view(x.shape)


class WeighedInTheProduct(Mixture):
    """The last product sums over the experts, too, by the shares of a token."""

    def mixed(self, x: Tensor) -> Tensor:
        rows = F.relu(torch.einsum("bld,edf->blef", x, self.up) + self.bias)
        return torch.einsum("blef,efd,ble->bld", rows, self.down, self.router(x).softmax(-1))


class ChosenByExperts(Mixture):
    """Each expert chooses tokens of each sequence."""

    def mixed(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(-1).transpose(1, 2).topk(2, -1)
        index = chosen.unsqueeze(-1).expand(-1, -1, -1, WIDTH)
        rows = x.unsqueeze(1).expand(-1, self.num_experts, -1, -1).gather(2, index)
        rows = F.gelu(torch.einsum("becd,edf->becf", rows, self.up) + self.bias[:, None])
        rows = torch.einsum("becf,efd->becd", rows, self.down) * shares.unsqueeze(-1)
        return torch.einsum("becl,becd->bld", F.one_hot(chosen, x.shape[1]).to(x.dtype), rows)


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(16, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[0], "labels": tokens[1]}


def model_of(mixture: type[Mixture], **settings: Any) -> Mixture:
    torch.manual_seed(0)
    return mixture(**settings)


CASES: list[tuple[type[Mixture], dict[str, Any]]] = [
    (AllForAll, {"dp": 4, "ep": 4}),
    (AllForAll, {"dp": 4, "ep": 2, "zero": 1, "micro_batches": 2}),
    (Copied, {"dp": 2, "ep": 2, "tp": 2}),
    (Copied, {"dp": 4, "ep": 2, "zero": 3}),
    (Dispatched, {"dp": 4, "ep": 4}),
    (Dispatched, {"dp": 2, "ep": 2, "tp": 2, "etp": 1}),
    (DispatchedTogether, {"dp": 2, "ep": 2, "tp": 2}),
    (DispatchedTogether, {"dp": 4, "ep": 2, "zero": 3}),
    (ChosenByExperts, {"dp": 4, "ep": 2}),
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("mixture", "pins"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_programs_train_as_one_process_does(mixture: type[Mixture], pins: dict[str, Any]) -> None:
    """With elements dropped between the products, and where one expert has all tokens."""
    for settings in ({"dropout": 0.25}, {"sharpness": 50.0}):
        report = autopar.verify(model_of(mixture, **settings), IDEAL, example_inputs=batch(), constraints=pins)
        assert report.ok(1e-5), report


KINDS = [AllForAll, Copied, Dispatched, DispatchedTogether, WeighedInTheProduct, ChosenByExperts]
SHAPES = {"up": (EXPERTS, WIDTH, INNER), "bias": (EXPERTS, INNER), "down": (EXPERTS, INNER, WIDTH)}


QUICK = (Dispatched, WeighedInTheProduct, ChosenByExperts)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "mixture",
    [pytest.param(kind, id=kind.__name__, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS],
)
def test_what_is_of_experts_is_shared_out(mixture: type[Mixture]) -> None:
    """Over ep, with etp=1 over tp, too, and with etp=2 not over tp."""
    for pins, placement in (
        ({"ep": 4}, 'ep="S(0)"'),
        ({"ep": 2, "tp": 2, "etp": 1}, 'ep="S(0)", tp="S(0)"'),
        ({"dp": 4, "ep": 2, "zero": 3}, 'dp="Rp", ep="S(0)", zero=3'),
    ):
        text = autopar.compile(model_of(mixture), IDEAL, example_inputs=batch(), constraints=pins).source
        assert [f'"{name}": Param({shape}, {placement}' in text for name, shape in SHAPES.items()] == [True] * 3
    pins = {"ep": 2, "tp": 2, "etp": 2}
    text = autopar.compile(model_of(mixture), IDEAL, example_inputs=batch(), constraints=pins).source
    assert 'ep="S(0)", tp="S(0)"' not in text


def all_to_all_bytes(compiled: CompiledProgram, inputs: dict[str, Tensor]) -> int:
    """Bytes of one rank's buffers in all exchanges of a step."""
    counted, exchange = [], dist.all_to_all_single

    def counting(output: Tensor, parts: Tensor, **settings: Any) -> Any:
        counted.append(parts.numel() * parts.element_size())
        return exchange(output, parts, **settings)

    with mock.patch.object(dist, "all_to_all_single", counting):
        build_step(compiled)(compiled.local_batch(inputs, dist.get_rank()))
    return sum(counted)


@pytest.mark.slow
@pytest.mark.distributed
def test_as_many_bytes_travel_as_are_priced() -> None:
    """Of a reshard by its statement, which is priced as it is written (costs/test_events.py)."""
    pins = {"ep": 4, "recompute": "none", "zero": 0}
    compiled = autopar.compile(model_of(Dispatched), IDEAL, example_inputs=batch(), constraints=pins)
    statements = [s for s in compiled.program.root.body if isinstance(s, Reshard)]
    priced = sum(s.num_bytes * [s.forward, s.backward].count("all_to_all") for s in statements)
    assert run_ranks(all_to_all_bytes, (compiled, batch()), 4) == [priced] * 4 and priced > 0


def test_few_experts_are_not_shared_out_as_on_fewer_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of large requests decisions are made for ep2, where tp shares out four experts, too, as it cannot beside ep4."""
    eight = tmp_path / "eight.toml"
    eight.write_text(Path(IDEAL).read_text().replace("num_nodes = 1", "num_nodes = 2"))
    monkeypatch.setattr(pipelines, "EXACT_SOLVED_LAYERS", 0)
    pins = {"ep": 4, "tp": 2, "activations": {"bmm": {"tp": "S(0)"}}}
    with pytest.raises(ConstraintError, match=r"(?s)tp=S\(0\) on ep4 x tp2.*P, R, Rp, S\(2\)"):
        autopar.compile(model_of(Copied), str(eight), example_inputs=batch(), constraints=pins)


@pytest.mark.slow
def test_the_search_over_ep_equals_trying_every_degree() -> None:
    """With all else free."""
    settings = {"example_inputs": batch(), "cluster_spec": IDEAL}
    free, *pinned = (
        autopar.compile(model_of(Dispatched), constraints=pins, **settings).plan.prediction.step_seconds
        for pins in ({}, *({"ep": ep} for ep in (1, 2, 4)))
    )
    assert free == pytest.approx(min(pinned), rel=1e-9) and len(set(pinned)) == 3


class Heads(nn.Module):
    """A matrix for each head, of features that are one dim with the heads before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 1)
        self.matrices = nn.Parameter(torch.empty(4, WIDTH // 2, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).view(-1, 4, WIDTH // 2).transpose(0, 1)
        rows = torch.bmm(heads.sigmoid() * heads, self.matrices).transpose(0, 1)
        return self.last(rows.reshape(-1, 2 * WIDTH)).square().mean()


def test_heads_are_no_experts() -> None:
    with pytest.raises(ConstraintError, match="no experts that autopar recognizes"):
        autopar.compile(Heads(), IDEAL, example_inputs={"x": torch.zeros(8, WIDTH)}, constraints={"ep": 2})


def test_a_degree_that_does_not_divide_the_experts_is_refused() -> None:
    model = model_of(AllForAll, num_experts=6)
    with pytest.raises(ConstraintError, match=r"(?s)does not divide the experts.*ep=4, 6 experts.*ep of 2, 3, 6"):
        autopar.compile(model, IDEAL, example_inputs=batch(), constraints={"ep": 4})
