"""Rotary positions, norms with the addition before them, GELUs, and dropout with the addition after it.

Handmade programs (bodies.py) are compared in fp64, where a fused call differs from the calls that it replaces by
round-off only, and in fp32; real models by `autopar.verify` against the eager model.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import autopar
from autopar.verify import verify_program
from codegen.fusion import fuse
from codegen.kernels.dropout_add import dropout_add
from codegen.program import UNREAD, Raw
from codegen.runtime.dropout_module import DropoutModule
from codegen.runtime.layout import Layout
from examples.models import EXAMPLES
from tests.codegen.bodies import Body, assert_same_numbers, is_left_alone, targets
from tests.codegen.typed import reshard, var, variables

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)

# --- rotary -----------------------------------------------------------------------------------------------------------

HEADS = {"q": 4, "k": 2}
TOKENS, WIDTH = 5, 8
END = 2**63 - 1


class Rotary(Body):
    """q and k turned by cos and sin, as transformers does; all components or the first, in either kind of pair."""

    def __init__(
        self, rotated: int = WIDTH, *, interleaved: bool = False, heads_dim: int = 1, dtype: torch.dtype = torch.float64
    ) -> None:
        angles = (1, TOKENS, rotated)
        shapes = {name: (2, heads, TOKENS, WIDTH) for name, heads in HEADS.items()}
        if heads_dim == 2:
            shapes = {name: (2, TOKENS, heads, WIDTH) for name, heads in HEADS.items()}
        super().__init__(dict.fromkeys(("q", "k", "cos", "sin"), dtype), **shapes, cos=angles, sin=angles)
        self.rotated, self.interleaved = rotated, interleaved
        for name in ("cos", "sin"):
            self.call(f"{name}_4", "aten.unsqueeze.default", name, heads_dim)
            if interleaved:
                self.call(f"{name}_5", "aten.slice.Tensor", f"{name}_4", 3, 0, rotated // 2)
                self.call(f"{name}_4", "aten.repeat_interleave.self_int", f"{name}_5", 2, -1)

    def turn(self, x: str, result: str, cos: str = "cos_4", sin: str = "sin_4", half: int | None = None) -> Rotary:
        half, part = half or self.rotated // 2, x
        if self.rotated < WIDTH:
            part = f"{x}_part"
            self.call(part, "aten.slice.Tensor", x, 3, 0, self.rotated)
            self.call(f"{x}_rest", "aten.slice.Tensor", x, 3, self.rotated, END)
        self.call(f"{x}_cos", "aten.mul.Tensor", part, cos)
        places = ((0, END, 2), (1, END, 2)) if self.interleaved else ((0, half), (half, END))
        for name, place in zip(("first", "second"), places, strict=True):
            self.call(f"{x}_{name}", "aten.slice.Tensor", part, 3, *place)
        self.call(f"{x}_neg", "aten.neg.default", f"{x}_second")
        both = variables(f"{x}_neg", f"{x}_first")
        if self.interleaved:
            self.call(f"{x}_stack", "aten.stack.default", both, -1)
            self.call(f"{x}_turned", "aten.flatten.using_ints", f"{x}_stack", -2)
        else:
            self.call(f"{x}_turned", "aten.cat.default", both, -1)
        self.call(f"{x}_sin", "aten.mul.Tensor", f"{x}_turned", sin)
        if self.rotated == WIDTH:
            return self.call(result, "aten.add.Tensor", f"{x}_cos", f"{x}_sin")
        self.call(f"{x}_sum", "aten.add.Tensor", f"{x}_cos", f"{x}_sin")
        return self.call(result, "aten.cat.default", variables(f"{x}_sum", f"{x}_rest"), -1)


@DTYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [WIDTH, 4])
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_rotary_of_queries_and_keys(rotated, interleaved, heads_dim, dtype):
    body = Rotary(rotated, interleaved=interleaved, heads_dim=heads_dim, dtype=dtype).turn("q", "y").turn("k", "z")
    fused = fuse(body.program("y", "z"))
    assert targets(fused) == ["kernels.rotary"]
    assert fused.root.body[0].results == variables("y", "z")
    assert_same_numbers(body, fused, TOLERANCES[dtype])


def test_calls_between_queries_and_keys_stay_in_their_order():
    body = Rotary().turn("q", "y").call("c", "aten.exp.default", "cos").turn("k", "z")
    body.call("y", "aten.exp.default", "y")
    fused = fuse(body.program("y", "z", "c"))
    assert targets(fused) == ["aten.exp.default", "kernels.rotary", "aten.exp.default"]
    assert_same_numbers(body, fused, 1e-12)


@pytest.mark.parametrize(
    "body",
    [
        Rotary().turn("q", "y"),
        Rotary().turn("q", "y").call("read", "aten.exp.default", "y").turn("k", "z"),
        Rotary().turn("q", "y").turn("k", "z", sin="cos_4"),
        Rotary().turn("q", "y").turn("k", "z").call("read", "aten.exp.default", "k_neg"),
        Rotary().turn("q", "y").turn("k", "z").call("read", "aten.exp.default", "cos_4"),
        Rotary().turn("q", "y", half=3).turn("k", "z", half=3),
        Rotary(dtype=torch.float32).call("q", "aten.to.dtype", "q", torch.float64).turn("q", "y").turn("k", "z"),
    ],
    ids=["one alone", "read between", "other angles", "read inside", "angles read", "no halves", "promotion"],
)
def test_what_rotary_is_not_for_stays(body):
    names = [s.results[0].name for s in body.statements]
    assert is_left_alone(body, *(name for name in ("y", "z", "read") if name in names))


@pytest.mark.parametrize("name", ["q_cos", "q", "cos_4", "k_neg"])
def test_reshards_within_rotary_stay(name):
    body = Rotary().turn("q", "y").turn("k", "z")
    made = [s.results[0].name for s in body.statements]
    position = made.index(name) + 1 if name in made else made.index(f"{name}_cos") + 1
    body.statements.insert(position, reshard("all_gather", name, name, dim=1))
    assert is_left_alone(body, "y", "z")


# --- norms ------------------------------------------------------------------------------------------------------------


def layer_norm(body: Body, x: str = "x", *, bias: bool = True, dims: tuple[int, ...] = (6,)) -> Body:
    return body.call("y", "aten.layer_norm.default", x, dims, "self.weight", "row" if bias else None, 1e-3, False)


def doubles() -> Body:
    return Body(dict.fromkeys(("x", "a", "b", "row", "self.weight"), torch.float64))


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias, dtype):
    body = layer_norm(Body(dict.fromkeys(("x", "row", "self.weight"), dtype)), bias=bias)
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.layer_norm"]
    assert fused.root.body[0].args == (*variables("x", "self.weight"), var("row") if bias else None, 1e-3)
    assert_same_numbers(body, fused, TOLERANCES[dtype])


def widened(*names: str, half: torch.dtype = torch.bfloat16) -> Body:
    """A layer norm of an fp32 x, whose parameters are copied to fp32."""
    body = Body(dict.fromkeys(names, half))
    for name in names:
        body.call(f"{name.removeprefix('self.')}_wide", "aten.to.dtype", name, torch.float32)
    weight, bias = (f"{n}_wide" if m in names else m for n, m in (("weight", "self.weight"), ("row", "row")))
    return body.call("y", "aten.layer_norm.default", "x", (6,), weight, bias, 1e-3, False)


@pytest.mark.parametrize("names", [("self.weight", "row"), ("self.weight",), ("row",)])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_layer_norm_reads_half_precision_parameters_without_copies(names, half):
    body = widened(*names, half=half)
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.layer_norm"]
    assert fused.root.body[0].args == (*variables("x", "self.weight", "row"), 1e-3)
    assert_same_numbers(body, fused)


def test_a_copy_of_a_parameter_that_others_read_stays():
    body = widened("self.weight", "row").call("z", "aten.exp.default", "row_wide")
    assert targets(fuse(body.program("y", "z"))).count("aten.to.dtype") == 1


@DTYPES
@pytest.mark.parametrize("has_sum", [False, True])
def test_torchs_rms_norm(has_sum, dtype):
    body = Body(dict.fromkeys(("x", "a", "self.weight"), dtype))
    if has_sum:
        body.call("s", "aten.add.Tensor", "x", "a")
    body.call("y", "aten.rms_norm.default", "s" if has_sum else "x", (6,), "self.weight", 1e-3)
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.add_rms_norm" if has_sum else "kernels.rms_norm"]
    assert_same_numbers(body, fused, TOLERANCES[dtype])


def test_torchs_rms_norm_with_its_own_epsilon_stays():
    assert is_left_alone(Body().call("y", "aten.rms_norm.default", "x", (6,), "self.weight", None))


@DTYPES
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_sum_and_its_norm_are_both_results(norm, dtype):
    body = Body(dict.fromkeys(("x", "a", "row", "self.weight"), dtype)).call("s", "aten.add.Tensor", "x", "a")
    body = body.rms_norm("s") if norm == "rms" else layer_norm(body, "s")
    body.call("z", "aten.exp.default", "s")
    fused = fuse(body.program("y", "z"))
    assert targets(fused) == [f"kernels.add_{norm}_norm", "aten.exp.default"]
    assert fused.root.body[0].results == variables("y", "s")
    assert_same_numbers(body, fused, TOLERANCES[dtype])


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_sum_that_only_the_norm_reads_has_no_name(norm):
    """Also where its name is another value's by then."""
    body = doubles().call("s", "aten.add.Tensor", "x", "a")
    body = body.rms_norm("s") if norm == "rms" else layer_norm(body, "s")
    other = replace(body.statements[-1], target="aten.exp.default", args=(var("b"),), results=(var("s"),))
    body.statements.insert(-1, replace(other, results=(var("s_2"),)))
    fused = fuse(body.program("y", "s_2"))
    assert fused.root.body[-1].results == (var("y"), UNREAD)
    assert_same_numbers(body, fused, 1e-12)


def test_a_sum_that_is_read_before_the_norm_ends_is_not_its_result():
    body = doubles().call("s", "aten.add.Tensor", "x", "a").call("z", "aten.exp.default", "s").rms_norm("s")
    assert targets(fuse(body.program("y", "z"))) == ["aten.add.Tensor", "aten.exp.default", "kernels.rms_norm"]


@pytest.mark.parametrize("residual", ["row", 2.0])
def test_sums_that_broadcast_leave_the_norm_alone(residual):
    body = layer_norm(doubles().call("s", "aten.add.Tensor", "x", residual), "s")
    assert targets(fuse(body.program())) == ["aten.add.Tensor", "kernels.layer_norm"]


def test_a_reshard_between_sum_and_norm_parts_them():
    body = layer_norm(doubles().call("s", "aten.add.Tensor", "x", "a"), "s")
    body.statements.insert(1, reshard("all_gather", "s", "s", dim=1))
    assert targets(fuse(body.program("y", "s"))) == ["aten.add.Tensor", "Reshard", "kernels.layer_norm"]


@pytest.mark.parametrize(
    "body",
    [layer_norm(Body({"x": torch.bfloat16})), layer_norm(Body(**{"self.weight": (4, 6), "row": (4, 6)}), dims=(4, 6))],
    ids=["wider parameters", "two dims"],
)
def test_what_the_layer_norm_is_not_for_stays(body):
    assert is_left_alone(body)


# --- GELU -------------------------------------------------------------------------------------------------------------

FORMS = {"tanh": "tanh", "erf": "none", "call": "none", "call tanh": "tanh"}
"""How a model says it, and which form it is."""


def gelu(body: Body, form: str, x: str, result: str) -> Body:
    if form.startswith("call"):
        options = {"approximate": "tanh"} if form == "call tanh" else {}
        return body.call(result, "aten.gelu.default", x, **options)
    body.call("half", "aten.mul.Tensor", x, 0.5)
    if form == "tanh":
        body.call("cube", "aten.pow.Tensor_Scalar", x, 3.0).call("cube", "aten.mul.Tensor", "cube", 0.044715)
        body.call("inner", "aten.add.Tensor", x, "cube")
        body.call("inner", "aten.mul.Tensor", "inner", math.sqrt(2.0 / math.pi))
        body.call("share", "aten.tanh.default", "inner")
    else:
        body.call("inner", "aten.div.Tensor", x, math.sqrt(2.0)).call("share", "aten.erf.default", "inner")
    return body.call("share", "aten.add.Tensor", "share", 1.0).call(result, "aten.mul.Tensor", "half", "share")


@DTYPES
@pytest.mark.parametrize("form", ["tanh", "erf"])
def test_a_gelu_that_is_written_out_is_torchs_own(form, dtype):
    body = gelu(Body({"x": dtype}), form, "x", "y")
    fused = fuse(body.program())
    assert targets(fused) == ["aten.gelu.default"]
    assert_same_numbers(body, fused, TOLERANCES[dtype])
    assert fuse(fused) == fused


@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", [("act", "b"), ("b", "act")])
def test_geglu(order, form, dtype):
    body = gelu(Body(dict.fromkeys("ab", dtype)), form, "a", "act").call("y", "aten.mul.Tensor", *order)
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.geglu"]
    assert fused.root.body[0].args == variables("a", "b")
    assert dict(fused.root.body[0].kwargs).get("approximate", "none") == FORMS[form]
    assert_same_numbers(body, fused, TOLERANCES[dtype])


@DTYPES
@pytest.mark.parametrize("form", FORMS)
def test_a_bias_and_gelu(form, dtype):
    body = gelu(Body(dict.fromkeys(("x", "row"), dtype)).call("h", "aten.add.Tensor", "x", "row"), form, "h", "y")
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.bias_gelu"]
    assert dict(fused.root.body[0].kwargs).get("approximate", "none") == FORMS[form]
    assert_same_numbers(body, fused, TOLERANCES[dtype])


def test_a_biased_gate_is_the_products_rather_than_the_biass():
    body = gelu(doubles().call("h", "aten.add.Tensor", "a", "row"), "tanh", "h", "act")
    body.call("y", "aten.mul.Tensor", "act", "b")
    assert targets(fuse(body.program())) == ["aten.add.Tensor", "kernels.geglu"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (gelu(Body(), "tanh", "x", "act").call("y", "aten.mul.Tensor", "act", "row"), "aten.gelu.default"),
        (gelu(Body().call("h", "aten.add.Tensor", "x", "a"), "tanh", "h", "y"), "aten.gelu.default"),
    ],
    ids=["gate broadcasts", "no bias"],
)
def test_what_the_other_kernels_are_not_for_is_still_a_gelu(body, expected):
    assert expected in targets(fuse(body.program()))


def test_other_constants_are_no_gelu():
    body = gelu(Body(), "tanh", "x", "y")
    for index, statement in enumerate(body.statements):
        if 0.044715 in statement.args:
            changed = list(body.statements)
            changed[index] = replace(statement, args=(statement.args[0], 0.05))
            body.statements = changed
    assert is_left_alone(body)


# --- dropout ----------------------------------------------------------------------------------------------------------


def dropped(body: Body, *order: str, p: float = 0.25, result: str = "y") -> Body:
    body.call("d", "self.same_dropout", "x", p, call=1, layout=Raw("LAYOUT"))
    return body.call(result, "aten.add.Tensor", *order)


@DTYPES
@pytest.mark.parametrize("order", [("d", "a"), ("a", "d")])
def test_dropout_and_sum(order, dtype):
    body = dropped(Body(dict.fromkeys("xa", dtype)), *order)
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.dropout_add"]
    assert_same_numbers(body, fused, 0.0)


def test_an_addition_goes_with_the_dropout_before_it():
    body = dropped(doubles(), "d", "a", result="s").rms_norm("s")
    assert targets(fuse(body.program("y", "s"))) == ["kernels.dropout_add", "kernels.rms_norm"]
    body = dropped(doubles(), "d", "a", result="z").call("s", "aten.add.Tensor", "z", "b").rms_norm("s")
    assert targets(fuse(body.program("y", "s"))) == ["kernels.dropout_add", "kernels.add_rms_norm"]


@pytest.mark.parametrize("body", [dropped(Body(), "d", "row"), dropped(Body(), "d", "a", p=1.0)], ids=["row", "all"])
def test_what_dropout_and_sum_are_not_for_stays(body):
    assert is_left_alone(body)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "lies", [{}, {"dp": "S(0)"}, {"tp": "S(1)"}, {"dp": "S(0)", "tp": "S(2/3)"}, {"dp": "S(2)", "tp": "S(2)"}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_and_sums_are_the_unfused_ones_bit_for_bit(lies, batched, dtype):
    """On every rank, in a later micro-batch of a later step, and of a shape that has no pairs of columns."""
    for shape in ((4, 6, 12), (4, 2, 36), (4, 10, 9)):
        sizes = {"dp": 2, "tp": 2}
        sharded = {axis: text for axis, text in lies.items() if shape[2] != 9 or text[2] != "2"}
        layout = Layout(shape, **sharded)
        for dp in range(2):
            for tp in range(2):
                axes = {n: SimpleNamespace(size=sizes[n], rank=r) for n, r in (("dp", dp), ("tp", tp))}
                module = DropoutModule(SimpleNamespace(device=torch.device("cpu"), **axes))
                module.rng.step, module.rng.micro_batch = 5, 3
                x, residual = torch.randn(2, *layout.local_shape(module.mesh)).to(dtype)
                place = {"call": 2, "layout": layout, "batched": batched}
                expected = module.same_dropout(x, 0.25, **place) + residual
                fused = dropout_add(x, residual, 0.25, **module.dropout_mask(**place))
                assert torch.equal(fused, expected)


# --- whole models -----------------------------------------------------------------------------------------------------


def check(model, inputs, wanted: tuple[str, ...], *, constraints, **options):
    options = {"example_inputs": inputs, "constraints": constraints, "kernels": "on", **options}
    compiled = autopar.compile(model, IDEAL, **options)
    assert all(f" {name}(" in compiled.source for name in wanted), compiled.source
    report = verify_program(compiled, inputs, steps=2)
    assert report.gradients and report.ok(1e-5), str(report)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "sizes", "constraints", "wanted"),
    [
        ("gpt2", {"dropout": 0.1}, {"dp": 2, "tp": 2, "micro_batches": 2}, ("dropout_add", "layer_norm", "F.gelu")),
        ("bert", {}, {"dp": 2, "tp": 2}, ("add_layer_norm",)),
        (
            "t5",
            {"feed_forward_proj": "gated-gelu", "dropout": 0.1},
            {"dp": 2, "tp": 2},
            ("geglu", "dropout_add"),
        ),
        (
            "llama_gqa",
            {"layers": 4},
            {"pp": 2, "tp": 2, "schedule": "zero-bubble", "micro_batches": 4},
            ("rotary", "add_rms_norm"),
        ),
    ],
    ids=["gpt2", "bert", "t5", "llama_gqa"],
)
def test_models_train_like_the_eager_ones(name, sizes, constraints, wanted):
    example = EXAMPLES[name](**sizes)
    check(example.model, example.inputs, wanted, constraints=constraints)


FAMILIES = {
    "GPTNeoX": ({"rotary_pct": 0.5, "hidden_dropout": 0.0}, ("rotary", "layer_norm")),
    "Glm": ({"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}, ("rotary", "add_rms_norm", "swiglu")),
    "Gemma": ({"num_key_value_heads": 2, "head_dim": 8}, ("rotary", "add_rms_norm", "geglu")),
}
"""Rotary positions of some components, in interleaved pairs, and of all; GLU with tanh's GELU."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow) for family in ("GPTNeoX", "Glm", "Gemma")]
)
def test_other_families_train_like_the_eager_ones(family):
    own, wanted = FAMILIES[family]
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 16, "use_cache": False, "attention_dropout": 0.0}
    config = getattr(transformers, f"{family}Config")(**(sizes | own), attn_implementation="sdpa")
    model = getattr(transformers, f"{family}ForCausalLM")(config).train()
    tokens = torch.randint(1, 96, (4, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    assert "-sliced" not in autopar.compile(model, "1 cpu", example_inputs=batch, kernels="on").source
    check(model, batch, wanted, constraints={"tp": 4})
