"""A model cut into stages computes what the whole model does, whatever the cut."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.frontend.trace import trace
from autopar.ir.chain import chain
from autopar.ir.graph import Graph, LayerRun
from autopar.ir.placement import P, R, Rp, S
from autopar.lowering.stages import (
    StageGraph,
    boundary_placements,
    repeated_calls,
    stage_graphs,
    tied_parameters,
)
from examples.models import EXAMPLES, Example
from tests.autopar.interpret import run_graph, tensors_of

LAYERED = ["gpt2", "llama", "bert", "vit", "transformer_encoder", pytest.param("t5", marks=pytest.mark.slow), "skips"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * scale


class Skips(nn.Module):
    """A U: what enters is added again at the end, half of it in the middle, and layers share a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8))
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = x = self.first(x)
        scale = self.scale.exp()
        for block in self.down:
            x = block(x, scale)
        low = x
        x = x + kept.tanh()
        for block in self.up:
            x = block(x, scale)
        return ((x + kept) * low).square().mean()


@cache
def example(name: str) -> Example:
    if name == "skips":
        torch.manual_seed(0)
        return Example(Skips(), {"x": torch.randn(8, 8)})
    if name == "t5":
        return t5()
    return EXAMPLES[name](**({} if name == "mlp" else {"layers": 4}))


def t5() -> Example:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_decoder_layers=3, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(1, 96, (8, 16)), torch.randint(1, 96, (8, 12))
    mask = torch.ones_like(ids)
    mask[:, 13:] = 0
    model = transformers.T5ForConditionalGeneration(config)
    return Example(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})


@cache
def graph_of(name: str) -> Graph:
    one = example(name)
    return trace(one.model, one.inputs, one.loss_fn)


def run_stages(stages: tuple[StageGraph, ...], tensors: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    """The loss; each stage is given what it says it receives, under the rule for names, and nothing else."""
    sent: list[dict[str, Tensor]] = []
    for stage in stages:
        inner = {p.name for p in stage.graph.parameters}
        received = {n: next(kept[n] for kept in reversed(sent) if n in kept) for n, _ in stage.received}
        values = received | {i.name: batch[i.name] for i in stage.graph.inputs if i.name not in received}
        kept = {n: tensor for n, tensor in tensors.items() if n in inner}
        results = [run_graph(replace(stage.graph, loss=ref), kept, values) for ref in stage.results]
        if stage.has_loss:
            assert stage is stages[-1]
            return results[0]
        sent.append(dict(zip((name for _, name in stage.sends), results, strict=True)))
    raise AssertionError("no stage has the loss")


def random_cuts(graph: Graph, count: int) -> list[tuple[int, ...]]:
    length, chance = len(chain(graph)), random.Random(0)
    cuts = [(0,), tuple(range(length))]
    cuts += [(0, *sorted(chance.sample(range(1, length), chance.randint(1, min(4, length - 1))))) for _ in range(count)]
    return cuts


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", LAYERED)
def test_stages_in_a_row_give_the_whole_graphs_loss_and_gradients(name: str) -> None:
    one, graph = example(name), graph_of(name)
    tensors = tensors_of(one.model)
    batch = one.inputs
    whole = run_graph(graph, tensors, batch)
    trained = [p for p in one.model.parameters() if p.requires_grad]
    want = torch.autograd.grad(whole, trained, allow_unused=True)
    for cut in random_cuts(graph, 8):
        stages = stage_graphs(graph, cut)
        assert len(stages) == len(cut)
        loss = run_stages(stages, tensors, batch)
        assert torch.equal(loss, whole), cut
        for expected, gradient in zip(want, torch.autograd.grad(loss, trained, allow_unused=True), strict=True):
            assert (expected is None) == (gradient is None)
            if expected is not None:
                assert (gradient - expected).norm() <= 1e-5 * expected.norm() + 1e-7


@pytest.mark.parametrize("name", LAYERED)
def test_every_call_and_layer_is_in_one_stage_and_names_are_unique(name: str) -> None:
    graph = graph_of(name)
    repeated = repeated_calls(graph)
    calls = [p.name for p in graph.body if not isinstance(p, LayerRun) and p.name not in repeated]
    layers = [path for p in graph.body if isinstance(p, LayerRun) for path in p.instances]
    for cut in random_cuts(graph, 8):
        stages = stage_graphs(graph, cut)
        runs = [p for s in stages for p in s.graph.body if isinstance(p, LayerRun)]
        assert [path for run in runs for path in run.instances] == layers
        assert len({run.name for run in runs}) == len(runs)
        calls_here = [p.name for s in stages for p in s.graph.body if not isinstance(p, LayerRun)]
        assert [n for n in calls_here if n not in repeated] == calls
        seen: dict[str, int] = {}
        for stage in stages:
            assert {n: c for n, c in stage.first_layer.items() if c} == seen
            for run in (p for p in stage.graph.body if isinstance(p, LayerRun)):
                seen[run.layer.name] = seen.get(run.layer.name, 0) + len(run.instances)
            names = [p.name for p in stage.graph.body] + [i.name for i in stage.graph.inputs]
            assert len(set(names)) == len(names)


def test_tables_between_runs_are_no_stage() -> None:
    class TwoTables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.down, self.up = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            table, x = x.mean(0), self.first(x)
            for block in self.down:
                x = block(x, table)
            other = table.cos()
            for block in self.up:
                x = block(x, other)
            return x.mean()

    model, x = TwoTables(), torch.rand(4, 8)
    graph = trace(model, (x,))
    assert chain(graph) == ("top 0", *("Block",) * 3, "top 1", *("Block",) * 3, "top 2")
    with pytest.raises(PlanError, match="computes only masks and tables"):
        stage_graphs(graph, (0, 4, 5))
    for cut in ((0, 4), (0, 5), (0, 2, 6)):
        loss = run_stages(stage_graphs(graph, cut), tensors_of(model), {"x": x})
        torch.testing.assert_close(loss, model(x))


def test_the_units_of_a_model_without_layers_are_its_trained_calls() -> None:
    graph = graph_of("mlp")
    units = chain(graph)
    assert units == ("top 0", "top 1", "top 2")
    stages = stage_graphs(graph, (0, 1, 2))
    assert [node.name for stage in stages for node in stage.graph.body] == [node.name for node in graph.body]
    assert stage_graphs(graph, (0,))[0].graph.body == graph.body
    with pytest.raises(PlanError, match="block"):
        stage_graphs(graph, (0, 1, 2, 3))


@pytest.mark.parametrize("cut", [(), (1, 2), (0, 2, 2), (0, 6), (0, 3, 1)])
def test_what_is_no_cut_is_refused(cut: tuple[int, ...]) -> None:
    with pytest.raises(PlanError):
        stage_graphs(graph_of("gpt2"), cut)


def test_llama_repeats_rotary_tables_and_sends_hidden_only() -> None:
    stages = stage_graphs(graph_of("llama"), (0, 2, 4))
    assert [[n for n, _ in s.received] for s in stages] == [[], ["hidden"], ["hidden"]]
    assert [[n for _, n in s.sends] for s in stages] == [["hidden"], ["hidden"], []]
    assert [[i.name for i in s.graph.inputs] for s in stages] == [["input_ids"], ["hidden"], ["hidden", "labels"]]
    assert all({"cos", "sin"} <= {p.name for p in s.graph.body} for s in stages)
    assert all(meta.requires_grad for s in stages for _, meta in s.received)
    assert tied_parameters(stages) == ()


def test_gpt2_ties_its_embedding_and_reads_labels_at_the_end() -> None:
    stages = stage_graphs(graph_of("gpt2"), (0, 3))
    assert tied_parameters(stages) == (("transformer.wte.weight", (0, 1)),)
    assert [p.name for p in stages[0].graph.body] == [
        "embedding", "arange", "unsqueeze", "embedding_1", "add_1", "transformer_h_to_2",
    ]  # fmt: skip
    assert {p.name.split(".")[2] for p in stages[1].graph.parameters if ".h." in p.name} == {"2", "3"}


@pytest.mark.slow
def test_t5_sends_position_bias_and_encoder_output_to_all_who_use_them() -> None:
    graph = graph_of("t5")
    kinds = ("T5Block",) * 3, ("T5Block2",) * 2
    assert chain(graph) == ("top 0", *kinds[0], "top 1", *kinds[1], "top 2")
    stages = stage_graphs(graph, (0, 2, 4, 5, 6))
    bias, encoded = "SelfAttention_relative_attention_bias", "encoder_final_layer_norm"
    second_bias = f"{bias}_2"
    received = [dict(s.received) for s in stages]
    assert set(received[1]) == {"hidden", bias}
    assert set(received[2]) == {"hidden"}
    assert set(received[3]) == set(received[4]) == {"hidden", encoded, second_bias}
    assert received[1][bias].requires_grad and received[4][second_bias].requires_grad
    assert [len(s.sends) for s in stages] == [2, 1, 3, 1, 0]
    assert tied_parameters(stages) == (("shared.weight", (0, 2, 4)),)


def test_one_name_never_means_two_tensors() -> None:
    """Skips: the first linear's result is read by stages after others have sent theirs."""
    stages = stage_graphs(graph_of("skips"), tuple(range(len(chain(graph_of("skips"))))))
    origin: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for _, name in stage.sends:
            origin.setdefault(name, []).append(number)
    assert max(len(senders) for senders in origin.values()) > 3  # layers hand on one name
    first = dict(stages[-1].received)
    assert len(first) == 3 and "hidden" in first


def test_repeated_calls_need_no_gradient_and_draw_nothing() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(3))
            self.register_buffer("table", torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            scale = nn.functional.dropout(x, 0.5) * self.table
            shift = self.table.cos()
            x = self.first(x)
            for block in self.blocks:
                x = block(x, scale)
            return (x * shift).mean()

    graph = trace(Noisy(), (torch.rand(4, 8),))
    drawn = next(p.name for p in graph.body if not isinstance(p, LayerRun) and "dropout" in p.op)
    assert drawn not in repeated_calls(graph)
    stages = stage_graphs(graph, (0, 2))
    cosine = next(p.name for p in graph.body if not isinstance(p, LayerRun) and "cos" in p.op)
    assert [cosine in {p.name for p in s.graph.body} for s in stages] == [False, True]
    (bare,) = (meta for name, meta in stages[1].received if name != "hidden")
    assert not bare.requires_grad


def test_boundary_placements() -> None:
    assert boundary_placements((Rp, P, R, S(1), S(2, 3)), are_alike=False) == (R, R, R, S(1), R)
    assert boundary_placements((Rp, P, R, S(1), S(2, 3)), are_alike=True) == (R, R, R, S(1), S(2, 3))
