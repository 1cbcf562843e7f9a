"""Predicted activations against those that autograd really keeps, on one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.costs.kept import kept
from autopar.costs.saved import Saved, saved_tensors
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, Node, Ref, TensorMeta, base_name
from autopar.sharding.scopes import scopes_of
from examples.models import EXAMPLES, Example

LONGER = {"batch_size": 8, "seq_len": 32}


def kept_by_autograd(example: Example) -> int:
    """Bytes of the storages that backward needs, each counted once, parameters and buffers left out."""
    own = [*example.model.parameters(), *example.model.buffers()]
    stored = {tensor.untyped_storage().data_ptr() for tensor in own}
    found: dict[int, tuple[int, Tensor]] = {}  # the tensor is held, so that no storage is freed and its address reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stored:
            found[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        example.loss()
    return sum(num_bytes for num_bytes, _ in found.values())


def predicted(graph: Graph) -> int:
    total = 0
    names = frozenset(p.name for p in graph.parameters)
    for scope in scopes_of(graph):
        own = names | frozenset(p.name for p in (scope.layer.parameters if scope.layer else ()))
        for saved in saved_tensors(scope.nodes, scope.metas, own).values():
            total += scope.count * sum(num_bytes for _, num_bytes in saved)
        for node in scope.nodes:
            total += scope.count * sum(kept(node, tuple(scope.metas[ref] for ref in node.inputs), True).extra_bytes)
    return total


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", EXAMPLES)
def test_bytes_kept_by_autograd(name: str) -> None:
    """Within 0.3 %: cos and sin, which layers share, are counted in each, and the program's cross-entropy keeps a
    number per row. T5's layers share a larger tensor (its position bias), Mixtral's have orders of rows."""
    example = EXAMPLES[name](**({} if name in ("vit", "mlp") else LONGER))
    graph = trace(example.model, example.inputs, example.loss_fn)
    bound = {"t5": 0.025, "mixtral": 0.01}.get(name, 0.003)
    assert predicted(graph) == pytest.approx(kept_by_autograd(example), rel=bound)


@pytest.mark.slow
def test_deeper_models_keep_in_proportion() -> None:
    """The bytes of one more layer, so that the top level's share hides no error of the layers'."""
    for name in ("llama", "gpt2"):
        shallow, deep = (EXAMPLES[name](layers=n, **LONGER) for n in (2, 3))
        graphs = [trace(e.model, e.inputs) for e in (shallow, deep)]
        per_layer = kept_by_autograd(deep) - kept_by_autograd(shallow)
        assert predicted(graphs[1]) - predicted(graphs[0]) == pytest.approx(per_layer, rel=0.02), name


def test_one_allocation_is_counted_once() -> None:
    """Views and their base, and a tensor that two calls keep; a part that is kept keeps the whole."""
    meta = TensorMeta((4, 12), torch.float32, True)
    third = TensorMeta((4, 4), torch.float32, True)
    weight = TensorMeta((12, 12), torch.float32, True)
    nodes = (
        Node("qkv", "aten.linear.default", (Ref("x"), Ref("w")), (), (meta,)),
        Node("split", "aten.split.Tensor", (Ref("qkv"), 4, 1), (), (third, third, third)),
        Node("flat", "aten.view.default", (Ref("split", 1), (16,)), (), (TensorMeta((16,), torch.float32, True),)),
        Node("a", "aten.mul.Tensor", (Ref("split", 0), Ref("split", 1)), (), (third,)),
        Node("b", "aten.pow.Tensor_Scalar", (Ref("flat"), 3), (), (TensorMeta((16,), torch.float32, True),)),
        Node("c", "aten.gelu.default", (Ref("x"),), (), (meta,)),
        Node("d", "aten.silu.default", (Ref("qkv"),), (), (meta,)),
        Node("e", "aten.pow.Tensor_Scalar", (Ref("split", 2), 3), (), (third,)),
    )
    metas = {Ref(n.name, i): m for n in nodes for i, m in enumerate(n.outputs)}
    metas |= {Ref("x"): meta, Ref("w"): weight}
    found = saved_tensors(nodes, metas, frozenset({"w"}))
    assert found == {
        "qkv": (Saved(Ref("x"), 192),),
        "split": (),
        "flat": (),
        "a": (Saved(Ref("split", 0), 192),),
        "b": (),
        "c": (),
        "d": (),
        "e": (),
    }


def test_what_needs_no_gradient_keeps_nothing() -> None:
    frozen = TensorMeta((4, 4), torch.float32, False)
    nodes = (Node("y", "aten.linear.default", (Ref("x"), Ref("w")), (), (frozen,)),)
    assert saved_tensors(nodes, {Ref("x"): frozen, Ref("w"): frozen, Ref("y"): frozen}, frozenset("w")) == {}


@pytest.mark.parametrize(
    ("op", "name"),
    [("aten.linear.default", "linear"), ("aten._softmax.default", "softmax"), ("aten.relu_.default", "relu")],
)
def test_base_name(op: str, name: str) -> None:
    assert base_name(op) == name
