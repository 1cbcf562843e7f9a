"""Options of whole calls on a mesh: Megatron's and ZeRO's layouts are among them, illegal ones are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.mesh import Mesh
from autopar.ir.placement import P, Placement, R, Rp, S, Stored, divides, local_shape
from autopar.plan import Plan
from autopar.sharding.assignment import Assignment, compress, expand
from autopar.sharding.call_options import num_local, options_of
from tests.autopar.requests import BATCH, setting

GRID = Mesh.parse("dp2 x tp2")


def offered(name: str, module: str, op: str = "aten.linear.default") -> set[tuple[tuple[Placement, ...], ...]]:
    """(weight placements, output placements) of the options of one call of a module."""
    operators = setting(name, str(GRID)).operators
    (operator,) = [o for o in operators.values() if o.node.module == module and o.node.op == op]
    return {(option.inputs[1], option.outputs[0]) for option in options_of(operator, GRID)}


def test_megatron_is_offered() -> None:
    """Column-parallel q, k, v, gate, up; row-parallel o and down; data-parallel batch throughout."""
    for column in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        assert ((Rp, S(0)), (S(0), S(2))) in offered("llama", column)
    for row in ("self_attn.o_proj", "mlp.down_proj"):
        assert ((Rp, S(1)), (S(0), P)) in offered("llama", row)


def test_fused_qkv_is_offered_in_three_sections() -> None:
    operators = setting("gpt2", str(GRID)).operators
    (fused,) = [o for o in operators.values() if o.node.module == "attn.c_attn" and o.node.op == "aten.addmm.default"]
    weights = {option.inputs[2] for option in options_of(fused, GRID)}
    assert (Rp, S(1, 3)) in weights, "GPT-2's Conv1D weight is [in, 3 * out]"


def test_data_axis_shards_the_batch_and_nothing_else() -> None:
    operators = setting("llama", str(GRID)).operators
    batched = 0
    for operator in operators.values():
        if operator.batch is None:
            continue
        factor = operator.batch[0]
        for option in options_of(operator, GRID):
            dp, tp = (label.partition("/")[0] for label in option.labels)
            assert dp in (factor, "P", "R", "Rp") and tp != factor
            batched += dp == factor
    assert batched > 100


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_every_option_cuts_every_tensor_equally(name: str) -> None:
    for operator in setting(name, str(GRID)).operators.values():
        options = options_of(operator, GRID)
        assert options and len(set(options)) == len(options)
        for option in options:
            tensors = [
                *zip(operator.inputs, option.inputs, strict=True),
                *zip(operator.node.outputs, option.outputs, strict=True),
            ]
            for meta, placements in tensors:
                assert divides(meta.shape, placements, GRID.sizes)
                shape = local_shape(meta.shape, placements, GRID.sizes)
                count = 1
                for size in shape:
                    count *= size
                assert num_local(meta, placements, GRID) == count
                assert meta.requires_grad or Rp not in placements


def test_hand_written_megatron_plan_expands_to_megatron() -> None:
    """Parameters and layer inputs alone decide: every call's default follows, with two all-reduces a layer."""
    it = setting("llama", str(GRID))
    _, best = it.assignment(0)
    scopes = compress(it.graph, it.operators, GRID, best)
    shards = {"q": S(0), "k": S(0), "v": S(0), "gate": S(0), "up": S(0), "o": S(1), "down": S(1)}
    parameters = {
        key: stored if "proj" not in key[1] else Stored((Rp, shards[key[1].split(".")[-2].partition("_")[0]]))
        for key, stored in best.parameters.items()
    }
    parameters = {
        key: Stored((Rp, R)) if "proj" not in key[1] and key[1].endswith("weight") else stored
        for key, stored in parameters.items()
    }
    tensors = {key: (S(0), R) if key[1].node == "hidden" else value for key, value in best.tensors.items()}
    scopes = compress(it.graph, it.operators, GRID, Assignment(best.operators, tensors, parameters))
    scopes = {name: replace(scope, calls={}, tensors={}) for name, scope in scopes.items()}
    plan = Plan("llama", "4 a100-80g", GRID, BATCH, 1, "fp32", scopes)
    assignment = expand(it.graph, it.operators, plan)
    outputs = {
        it.operators[key].node.module: option.outputs[0]
        for key, option in assignment.operators.items()
        if it.operators[key].node.op == "aten.linear.default" and key[0]
    }
    assert {m: p[1] for m, p in outputs.items()} == {
        "self_attn.q_proj": S(2), "self_attn.k_proj": S(2), "self_attn.v_proj": S(2), "self_attn.o_proj": P,
        "mlp.gate_proj": S(2), "mlp.up_proj": S(2), "mlp.down_proj": P,
    }  # fmt: skip
    assert all(p[0] == S(0) for p in outputs.values())
