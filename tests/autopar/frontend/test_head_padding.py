"""Padded heads: the loss and all gradients are those of the model as it is, and padding stays zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.padding.heads import with_whole_heads
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, Parameter
from examples.models import EXAMPLES, Example
from examples.zoo import ZOO
from tests.autopar.interpret import run_graph, tensors_of

WIDTH, HEAD_DIM, HEADS = 12, 4, 3
HIDDEN = torch.linspace(-1, 1, 2 * 5 * WIDTH).sin().reshape(2, 5, WIDTH)


def in_sections(value: Tensor, p: Parameter) -> Tensor:
    return value.unflatten(p.padded_dim, (p.padded_sections, -1))


def longer(value: Tensor, p: Parameter) -> Tensor:
    parts = in_sections(value.detach(), p)
    shape = list(parts.shape)
    shape[p.padded_dim + 1] = p.padding
    whole = torch.cat([parts, parts.new_zeros(shape)], p.padded_dim + 1).flatten(p.padded_dim, p.padded_dim + 1)
    return whole.requires_grad_(p.meta.requires_grad)


def own_and_padding(value: Tensor, p: Parameter) -> tuple[Tensor, Tensor]:
    parts = in_sections(value, p)
    own = parts.shape[p.padded_dim + 1] - p.padding
    first, last = parts.split([own, p.padding], p.padded_dim + 1)
    return first.flatten(p.padded_dim, p.padded_dim + 1), last


def check(example: Example, multiple: int, steps: int = 1) -> Graph:
    """Steps of AdamW with the padded graph and without, in fp64."""
    tensors = tensors_of(example.model)
    plain = trace(example.model, example.inputs, example.loss_fn)
    graph = with_whole_heads(plain, multiple)
    assert graph.heads_padded_to == multiple
    padded = {p.name: longer(tensors[p.name], p) for p in graph.parameters}
    whole = {p.name: tensors[p.name].detach().clone().requires_grad_(p.meta.requires_grad) for p in plain.parameters}
    trained = [p for p in graph.parameters if p.meta.requires_grad]
    optimizers = [torch.optim.AdamW([held[p.name] for p in trained], lr=0.01) for held in (padded, whole)]
    for _ in range(steps):
        losses = [run_graph(graph, padded, example.inputs), run_graph(plain, whole, example.inputs)]
        torch.testing.assert_close(*losses, rtol=2e-6, atol=0)
        found, wanted = (
            torch.autograd.grad(loss, [held[p.name] for p in trained])
            for loss, held in zip(losses, (padded, whole), strict=True)
        )
        largest = max(float(each.abs().max()) for each in wanted)
        for p, have, want in zip(trained, found, wanted, strict=True):
            own, padding = own_and_padding(have, p)
            torch.testing.assert_close(own, want, rtol=2e-5, atol=2e-6 * largest, msg=p.name)
            assert not padding.any(), p.name
            padded[p.name].grad, whole[p.name].grad = have, want
        for optimizer in optimizers:
            optimizer.step()
    assert not any(own_and_padding(padded[p.name], p)[1].any() for p in trained)
    return graph


def paddings(graph: Graph) -> dict[str, tuple[int, str]]:
    """(entries, where) by the last two words of a name."""
    found = [p for p in graph.parameters if p.padding]
    return {
        ".".join(p.name.split(".")[-2:]): (p.padding, f"{p.padded_dim}/{p.padded_sections}")
        for p in found
        if not p.name.endswith("bias")
    }


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("name", "sizes", "multiple", "expected"),
    [
        # 6 heads become 8; 3 groups of 2 become 4; of 2 groups of 3 each gets one more.
        ("llama", {"num_heads": 6}, 4, {"q_proj": (16, "0/1"), "k_proj": (16, "0/1"), "o_proj": (16, "1/1")}),
        ("llama", {"num_heads": 6, "kv": 3}, 4, {"q_proj": (16, "0/1"), "k_proj": (8, "0/1"), "o_proj": (16, "1/1")}),
        ("qwen3", {"num_heads": 6, "kv": 2}, 4, {"q_proj": (8, "0/2"), "o_proj": (8, "1/2")}),
        # 5 heads become 6, in each third of one matrix.
        ("gpt2", {"num_heads": 5}, 2, {"c_attn": (8, "1/3"), "c_proj": (8, "0/1")}),
    ],
)
def test_weights_of_models(
    name: str, sizes: dict[str, int], multiple: int, expected: dict[str, tuple[int, str]]
) -> None:
    heads = sizes["num_heads"]
    config = {"width": 8 * heads, "num_heads": heads, "layers": 1}
    if name != "gpt2":
        config |= {"head_dim": 8, "num_key_value_heads": sizes.get("kv", heads)}
    graph = check(EXAMPLES[name](**config), multiple, steps=3)
    found = paddings(graph)
    assert {key.removesuffix(".weight"): value for key, value in found.items() if "v_proj" not in key} == expected
    assert with_whole_heads(graph, multiple) is graph


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "gptj", "bert", "albert"])
def test_kinds_of_attention(name: str) -> None:
    """Low-rank keys, sinks, softmax by hand, biases, one layer called again: their 4 heads become 6."""
    check((EXAMPLES.get(name) or ZOO[name].build)(), 3)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", ["olmo2", "bloom", "phi3"])
def test_left_alone_where_heads_are_told_apart(name: str) -> None:
    """A norm over all heads, a bias per head, queries beside fewer keys in one matrix."""
    example = ZOO[name].build()
    graph = trace(example.model, example.inputs, example.loss_fn)
    assert with_whole_heads(graph, 3) is graph


Between = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Attention by hand; `between` is done to values by head, [B, H, T, E]."""

    def __init__(self, between: Between = lambda v: v, heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, heads * HEAD_DIM) for _ in range(3))
        self.out, self.norm = nn.Linear(heads * HEAD_DIM, WIDTH), nn.LayerNorm(HEAD_DIM)
        self.between, self.heads, self.dropout = between, heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], self.heads, HEAD_DIM).transpose(1, 2) for each in self.qkv)
        a = F.scaled_dot_product_attention(q, k, self.norm(self.between(v)), dropout_p=self.dropout)
        return self.out(a.transpose(1, 2).flatten(2))


def example_of(model: nn.Module) -> Example:
    return Example(model, {"x": HIDDEN, "y": HIDDEN.roll(1, 1)}, F.mse_loss)


def by_length(v: Tensor) -> Tensor:
    return v / v.norm(dim=-1, keepdim=True)


def by_safe_length(v: Tensor) -> Tensor:
    return v * (v.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.parametrize("between", [lambda v: v, by_safe_length, lambda v: v.exp() + v.tanh() / 2])
def test_what_padding_makes_is_zeroed_where_it_is_not_zero(between: Between) -> None:
    """A norm's bias stands in the values of padding too."""
    model = Attention(between)
    nn.init.constant_(model.norm.bias, 0.5)
    graph = check(example_of(model), 2, steps=3)
    assert [node for node in graph.body if node.name.startswith("zeroed")]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("model", "multiple"),
    [
        (Attention(by_length), 2),  # no derivative at 0
        (Attention(lambda v: v - v.mean(1, keepdim=True)), 2),  # heads see each other
        (Attention(lambda v: v.softmax(-1).exp()), 2),  # of numbers of which nothing is known
        (Attention(dropout=0.1), 2),  # its mask is numbered by head
        (Attention(heads=3), 3),
        (Attention(heads=2), 4),  # twice the work
    ],
)
def test_left_alone_where_padding_would_be_seen_or_does_not_pay(model: nn.Module, multiple: int) -> None:
    example = example_of(model)
    graph = trace(model, example.inputs, example.loss_fn)
    assert with_whole_heads(graph, multiple) is graph
