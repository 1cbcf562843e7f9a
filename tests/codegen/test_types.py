"""The types of lowered programs: held against torch's own shapes, kept by all passes; and a program that contradicts
itself is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import autopar
from autopar.ir.placement import Placement, local_shape
from autopar.lowering.lower import lower
from autopar.plan import Plan
from autopar.sharding.reshard import steps
from codegen.check_program import check_types
from codegen.evaluation import follows_training
from codegen.fusion import fuse
from codegen.passes.async_tp import has_async_tp, with_async_tp
from codegen.passes.fp8 import count_calls, in_fp8
from codegen.passes.overlap import overlap
from codegen.program import UNREAD, Call, LayerLoop, Program, Reshard, Statement, TensorType, Var, assigns, reads
from codegen.reshards import METHODS
from codegen.schemas import EmissionError
from tests.autopar.requests import BATCH, setting

MODELS = ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.slow)]
MESHES = ["dp2 x tp2", "tp4"]


@cache
def lowered(name: str, mesh: str, seed: int = 0) -> Program:
    """Of the best plan (seed 0), or of one under random extra costs, which has more kinds of reshards."""
    it = setting(name, mesh)
    return lower(it.graph, it.operators, Plan(name, "", it.pricer.mesh, BATCH, 1, "fp32", {}), it.assignment(seed)[1])


# --- types are right --------------------------------------------------------------------------------------------------


def on_meta(held: TensorType, program: Program) -> Tensor:
    """One rank's part."""
    placements = tuple(Placement.parse(held.placement(axis)) for axis in program.axes)
    shape = local_shape(held.shape, placements, program.axis_sizes)
    return torch.empty(shape, dtype=getattr(torch, held.dtype), device="meta")


def argument(value: Any, program: Program) -> Any:
    if isinstance(value, Var):
        return on_meta(value.type, program)
    if isinstance(value, torch.device):
        return torch.device("meta")
    return [argument(item, program) for item in value] if isinstance(value, tuple) else value


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_calls_make_what_their_results_types_say(name: str, mesh: str, seed: int) -> None:
    """Every operator of torch's own, called on tensors of the arguments' local shapes, makes those of its results."""
    program, num_calls = lowered(name, mesh, seed), 0
    for call in (s for cls in (*program.layers, program.root) for s in cls.body if isinstance(s, Call)):
        namespace, *path = call.target.split(".")
        if namespace != "aten":
            continue
        operator = getattr(getattr(torch.ops.aten, path[0]), path[1])
        kwargs = {name: argument(value, program) for name, value in call.kwargs}
        made = operator(*argument(call.args, program), **kwargs)
        for result, tensor in zip(call.results, made if isinstance(made, tuple | list) else [made], strict=True):
            if result != UNREAD:
                wanted = on_meta(result.type, program)
                assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype), (call, result.type)
                num_calls += 1
    assert num_calls > 20


def test_a_value_knows_the_tensor_of_the_graph_that_it_stands_for() -> None:
    it, program = setting("llama", "dp2 x tp2"), lowered("llama", "dp2 x tp2")
    (layer,) = program.layers
    (inner,) = (piece.layer for piece in it.graph.body if hasattr(piece, "layer"))
    metas = {(node.name, i): meta for node in inner.nodes for i, meta in enumerate(node.outputs)}
    metas |= {(p.name, 0): p.meta for p in inner.parameters} | {(name, 0): meta for name, meta in inner.inputs}
    found = [v.type for s in layer.body for v in (*reads(s), *assigns(s))]
    assert {held.tensor for held in found} >= {(p.name, 0) for p in inner.parameters}
    for held in found:
        meta = metas[held.tensor]
        assert (held.shape, held.dtype) == (meta.shape, str(meta.dtype).removeprefix("torch."))
        assert held.requires_grad == meta.requires_grad


def test_there_is_a_method_for_every_step_of_the_planner() -> None:
    forms = [Placement.parse(text) for text in ("R", "Rp", "S(0)", "S(1)", "P")]
    one_step = {
        (a.kind, b.kind) for a, b in product(forms, forms) if a != b and len(steps((a,), (b,), (2,)) or ()) == 1
    }
    assert one_step == METHODS.keys()


# --- passes keep them -------------------------------------------------------------------------------------------------

PASSES = {"kernels": fuse, "fp8": in_fp8, "async": with_async_tp, "overlap": overlap}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_all_passes_in_all_combinations(name: str, mesh: str, seed: int) -> None:
    plain = follows_training(lowered(name, mesh, seed))
    check_types(plain)
    for wanted in product([False, True], repeat=len(PASSES)):
        program = plain
        for function, is_on in zip(PASSES.values(), wanted, strict=True):
            program = function(program) if is_on else program
            check_types(program)


def test_the_passes_had_something_to_do() -> None:
    programs = [lowered(name, mesh, seed) for name in ("llama", "gpt2") for mesh in MESHES for seed in range(3)]
    assert any(has_async_tp(with_async_tp(each)) for each in programs)
    assert all(count_calls(in_fp8(each)) for each in programs)
    assert all(fuse(each) != each for each in programs) and any(overlap(each) != each for each in programs)


def test_a_loss_of_more_dims_keeps_the_call_that_is_priced() -> None:
    """Of [batch, classes, positions]: rows of its logits are typed, and are no tensor of the graph."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="sum")

    model = torch.nn.Sequential(torch.nn.Embedding(96, 64), torch.nn.Linear(64, 96))
    tokens = torch.randint(96, (8, 16))
    batch = {"input": tokens, "target": tokens}
    compiled = autopar.compile(model, "2 cpu", example_inputs=batch, loss_fn=loss, constraints={"dp": 2}, kernels="on")
    assert isinstance(compiled.program, Program)
    (call,) = (s for s in compiled.program.root.body if isinstance(s, Call) and s.target == "runtime.cross_entropy")
    logits, target = (variable.type for variable in call.args[:2])
    assert (logits.shape, logits.placements) == ((128, 96), (("dp", "S(0)"),))
    assert (target.shape, target.placements) == ((128,), (("dp", "S(0)"),))


# --- what is refused --------------------------------------------------------------------------------------------------


def position(program: Program, wanted: Callable[[Statement], bool]) -> int:
    return next(i for i, statement in enumerate(program.layers[0].body) if wanted(statement))


def with_body(program: Program, body: tuple[Statement, ...]) -> Program:
    return replace(program, layers=(replace(program.layers[0], body=body),))


def with_statement(program: Program, wanted: Callable[[Statement], bool], change: Callable[[Any], Any]) -> Program:
    index, body = position(program, wanted), program.layers[0].body
    return with_body(program, (*body[:index], change(body[index]), *body[index + 1 :]))


def is_linear(statement: Statement) -> bool:
    return isinstance(statement, Call) and statement.target == "aten.linear.default"


def is_view(statement: Statement) -> bool:
    return isinstance(statement, Call) and statement.target == "aten.view.default"


def gathers(statement: Statement) -> bool:
    """To Rp, whose gradient is summed."""
    return isinstance(statement, Reshard) and statement.backward == "reduce_scatter"


def retyped(variable: Var, **changes: Any) -> Var:
    return Var(variable.name, replace(variable.type, **changes))


def with_loop(program: Program, **changes: Any) -> Program:
    body = tuple(replace(s, **changes) if isinstance(s, LayerLoop) else s for s in program.root.body)
    return replace(program, root=replace(program.root, body=body))


def loop_of(program: Program) -> LayerLoop:
    return next(s for s in program.root.body if isinstance(s, LayerLoop))


def other_weight(program: Program) -> Program:
    return with_statement(
        program, is_linear, lambda s: replace(s, args=(s.args[0], retyped(s.args[1], shape=(3, 5)), *s.args[2:]))
    )


def linear_of_another_width(program: Program) -> Program:
    """Also where its result is read, so that only the call itself is wrong."""
    body = program.layers[0].body
    (made,) = body[position(program, is_linear)].results
    wider = (*made.type.shape[:-1], 2 * made.type.shape[-1])

    def change(value: Any) -> Any:
        if isinstance(value, Var):
            return retyped(value, shape=wider) if value.type.tensor == made.type.tensor else value
        return tuple(map(change, value)) if isinstance(value, tuple) else value

    return with_body(
        program,
        tuple(
            replace(s, args=change(s.args), results=change(s.results))
            if isinstance(s, Call)
            else replace(s, source=change(s.source), result=change(s.result))
            for s in body
        ),
    )


WRONG: dict[str, tuple[Callable[[Program], Program], str]] = {
    "a statement left out": (
        lambda p: with_body(p, p.layers[0].body[1:]), "read before it is defined|something else by then"
    ),
    "statements in another order": (
        lambda p: with_body(p, p.layers[0].body[::-1]), "read before it is defined|something else by then"
    ),
    "a value read as it was before its reshard": (
        lambda p: with_body(p, tuple(s for s in p.layers[0].body if not gathers(s))), "something else by then"
    ),
    "a result without a type": (
        lambda p: with_statement(p, is_view, lambda s: replace(s, results=(retyped(s.results[0], dtype=""),))),
        "without a type",
    ),
    "a shard of a dim that there is not": (
        lambda p: with_statement(
            p, is_linear, lambda s: replace(s, results=(retyped(s.results[0], placements=(("tp", "S(7)"),)),))
        ),
        r"no tensor lies S\(7\) on tp",
    ),
    "a result of another shape than the call's": (linear_of_another_width, "another shape or dtype"),
    "another parameter than the class stores": (other_weight, "stores no such tensor"),
    "two results of one name": (
        lambda p: with_statement(p, is_linear, lambda s: replace(s, results=s.results * 2)), "a name of its own"
    ),
    "another method": (
        lambda p: with_statement(p, gathers, lambda s: replace(s, method="slice")), "the reshard is all_gather"
    ),
    "another dim": (
        lambda p: with_statement(p, gathers, lambda s: replace(s, kwargs=(("dim", 0),))), "the reshard is all_gather"
    ),
    "a gradient that is not summed": (
        lambda p: with_statement(p, gathers, lambda s: replace(s, kwargs=(*s.kwargs, ("grad", "full")))),
        "the reshard is all_gather",
    ),
    "another number of bytes": (
        lambda p: with_statement(p, gathers, lambda s: replace(s, num_bytes=s.num_bytes / 2)), "the reshard sends"
    ),
    "another collective of backward": (
        lambda p: with_statement(p, gathers, lambda s: replace(s, backward="all_reduce")), "the reshard sends"
    ),
    "a reshard of two axes": (
        lambda p: with_statement(
            p, gathers, lambda s: replace(s, result=retyped(s.result, placements=(("dp", "P"), ("tp", "Rp"))))
        ),
        "on its axis alone",
    ),
    "a reshard of another axis": (
        lambda p: with_statement(p, gathers, lambda s: replace(s, axis="dp")), "on its axis alone"
    ),
    "a reshard to where it is": (
        lambda p: with_statement(p, gathers, lambda s: replace(s, result=s.source)), "no reshard in one step"
    ),
    "an unknown layer": (lambda p: with_loop(p, layer="Other"), "no such layer"),
    "too few arguments of a layer": (lambda p: with_loop(p, args=loop_of(p).args[1:]), "the layer takes"),
    "what a layer does not take": (
        lambda p: replace(p, layers=(replace(p.layers[0], inputs=tuple(
            retyped(v, shape=(*v.type.shape, 2)) for v in p.layers[0].inputs
        ), body=(), outputs=()),)), "the layer takes",
    ),
    "a layer's input in another place": (
        lambda p: with_loop(p, carried=(), args=(*loop_of(p).args[1:], loop_of(p).args[0])), "are not alike"
    ),
    "what another input carries": (lambda p: with_loop(p, carried=((1, 0),)), "are not alike"),
    "a result that is not there": (
        lambda p: replace(p, root=replace(p.root, outputs=(retyped(Var("gone", p.root.outputs[0].type)),))),
        "results: read before it is defined",
    ),
    "a count that is not there": (
        lambda p: replace(p, target_counts=(Var("gone", p.root.outputs[0].type),)), "count_targets, results"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_contradicts_itself_is_refused(name: str) -> None:
    change, said = WRONG[name]
    program = lowered("llama", "dp2 x tp2", seed=2)
    check_types(program)
    with pytest.raises(EmissionError, match=said) as error:
        check_types(change(program))
    assert any(cls.name in error.value.where for cls in (*program.layers, program.root))
