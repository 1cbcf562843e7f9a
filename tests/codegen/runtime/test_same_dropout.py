"""`SameDropout` on real modules: masks as defined, and the same calls in the same order as in the traced graph."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from codegen.runtime.dropout import dropout_key, keep_mask
from codegen.runtime.layout import whole
from codegen.runtime.reference import DropoutCall, SameDropout

transformers = pytest.importorskip("transformers")


def masked(x: torch.Tensor, p: float, seed: int, step: int, call: int) -> torch.Tensor:
    keep = keep_mask(p, key=dropout_key(seed, step, call), layout=whole(x.shape), mesh=None, device="cpu")
    return x * keep / (1 - p)


def test_functional_variants_count_in_order() -> None:
    x = torch.randn(6, 8, dtype=torch.float64)
    with SameDropout(3, 4) as mode:
        results = [
            F.dropout(x, 0.1),
            F.dropout(x, p=0.2, training=True),
            torch.dropout(x, 0.3, True),
            F.dropout(x.clone(), 0.4, True, inplace=True),
            torch.dropout_(x.clone(), 0.5, True),
            nn.Dropout(0.6)(x),
            nn.Dropout(0.7, inplace=True)(x.clone()),
            torch.ops.aten.dropout.default(x, 0.8, True),
        ]
    for call, (result, p) in enumerate(zip(results, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], strict=True)):
        torch.testing.assert_close(result, masked(x, p, 3, 4, call), rtol=1e-15, atol=0)
    assert mode.calls == [DropoutCall("dropout", round(0.1 * (i + 1), 1), (6, 8)) for i in range(8)]


def test_in_place_writes_and_differentiates() -> None:
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    with SameDropout(0, 0):
        y = x * 1.0
        z = F.dropout(y, 0.5, inplace=True)
    assert z is y
    z.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, masked(torch.ones_like(x), 0.5, 0, 0, 0), rtol=0, atol=0)


def test_calls_that_draw_nothing_do_not_count() -> None:
    x = torch.randn(4, 4)
    with SameDropout(0, 0) as mode:
        assert torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        F.scaled_dot_product_attention(x, x, x)
        assert mode.calls == []
        got = F.dropout(x, 0.5)
    torch.testing.assert_close(got, masked(x, 0.5, 0, 0, 0))


def test_attention_probabilities_are_masked() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64)
    with SameDropout(1, 0) as mode:
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    scores = (q @ k.mT / 8**0.5).masked_fill(~causal, -torch.inf)
    torch.testing.assert_close(got, masked(scores.softmax(-1), 0.3, 1, 0, 0) @ v)
    assert mode.calls == [DropoutCall("attention", 0.3, (2, 4, 6, 6))]


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_reached_inside(need_weights: bool) -> None:
    layer = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    with SameDropout(2, 7):
        got = layer(x, x, x, need_weights=need_weights)[0]
    q, k, v = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).view(3, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 2.0).softmax(-1)
    # With weights asked for, torch merges batch and heads: the elements' linear indices are the same.
    mixed = (masked(weights, 0.4, 2, 7, 0) @ v).transpose(1, 2).reshape(3, 5, 8)
    torch.testing.assert_close(got, layer.out_proj(mixed))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_drop_between_layers(kind: type[nn.RNNBase]) -> None:
    """Each layer by itself, with a mask between them; without dropout nothing changes."""
    layers = kind(4, 6, 3, dropout=0.4, bidirectional=True, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with SameDropout(0, 3) as mode:
        got, states = layers(x)
    expected, lasts = x, []
    for number in range(3):
        one = kind(expected.shape[-1], 6, bidirectional=True, batch_first=True, dtype=torch.float64)
        own = {name.replace(f"_l{number}", "_l0"): p for name, p in layers.named_parameters() if f"_l{number}" in name}
        one.load_state_dict(own)
        expected, last = one(expected)
        lasts.append(last[0] if kind is nn.LSTM else last)
        if number < 2:
            expected = masked(expected, 0.4, 0, 3, number)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(states[0] if kind is nn.LSTM else states, torch.cat(lasts))
    assert [call.kind for call in mode.calls] == ["dropout", "dropout"]
    layers.eval()
    with SameDropout(0, 3) as mode:
        assert torch.equal(layers(x)[0], layers(x)[0]) and mode.calls == []


def test_dropout_of_packed_sequences_is_refused() -> None:
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]))
    with SameDropout(0, 0), pytest.raises(NotImplementedError, match="packed sequences"):
        nn.LSTM(4, 4, 2, dropout=0.1)(packed)
    with SameDropout(0, 0):
        nn.LSTM(4, 4, 2)(packed)


class Loss(nn.Module):
    """Any of the models below as (input) -> scalar."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            out: torch.Tensor = self.model(x).square().mean()
        else:
            out = self.model(input_ids=x, labels=x).loss
        return out


def gpt2(implementation: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=97, n_positions=32, n_embd=16, n_layer=3, n_head=2, attn_pdrop=0.2, resid_pdrop=0.15, embd_pdrop=0.1,
        use_cache=False, attn_implementation=implementation, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert(implementation: str) -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2, attn_implementation=implementation,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


# name -> (model, dropout calls in one training forward): 1 + 3 per layer for GPT-2 and BERT, 4 per encoder layer.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "gpt2 sdpa": (lambda: gpt2("sdpa"), 10),
    "gpt2 eager": (lambda: gpt2("eager"), 10),
    "bert sdpa": (lambda: bert("sdpa"), 7),
    "bert eager": (lambda: bert("eager"), 7),
    "encoder, norm last": (lambda: encoder(False), 12),
    "encoder, norm first": (lambda: encoder(True), 12),
}

AGAIN = ("gpt2 eager", "bert sdpa", "encoder, norm first")
"""Models that call as another does."""


def calls_in_graph(graph: torch.fx.Graph) -> list[DropoutCall]:
    """The random calls of a traced graph, read off its nodes."""
    aten = torch.ops.aten
    found = []
    for node in graph.nodes:
        if node.target in (aten.dropout.default, aten.dropout_.default) and node.args[1] > 0 and node.args[2]:
            found.append(DropoutCall("dropout", node.args[1], tuple(node.meta["val"].shape)))
        elif node.target == aten.scaled_dot_product_attention.default:
            p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
            q, k = (argument.meta["val"].shape for argument in node.args[:2])
            if p > 0:
                found.append(DropoutCall("attention", p, (*q[:-1], k[-2])))
    return found


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in AGAIN else ()) for name in MODELS]
)
def test_eager_and_traced_calls_agree(name: str) -> None:
    torch.manual_seed(0)
    make, num_calls = MODELS[name]
    model = Loss(make()).train()
    x = torch.randn(2, 12, 16) if name.startswith("encoder") else torch.randint(0, 97, (2, 12))
    with SameDropout(1, 2) as eager:
        loss = model(x)
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    program = torch.export.export(model, (x,), strict=False)
    assert eager.calls == calls_in_graph(program.graph)
    assert len(eager.calls) == num_calls
    # And the traced graph, run under the mode, drops the very same elements.
    traced = program.module()
    with SameDropout(1, 2):
        again = traced(x)
    again.backward()
    torch.testing.assert_close(again, loss)
    for key, p in traced.named_parameters():
        if key in gradients:
            torch.testing.assert_close(p.grad, gradients[key])
    assert gradients
    # The masks matter, the run is repeatable, and another step's differ.
    with SameDropout(1, 2):
        assert torch.equal(model(x), loss)
    with SameDropout(1, 3):
        assert not torch.equal(model(x), loss)
    with torch.no_grad():
        assert not torch.equal(model.eval()(x), loss)
