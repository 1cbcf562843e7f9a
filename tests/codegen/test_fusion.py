"""Fused programs: what is fused, what must not be, and that the numbers stay those of the model.

Small handmade programs (bodies.py) are run before and after fusing; real ones by `autopar.verify` against the eager
model. The linear layer with its loss has a file of its own, test_fused_lm_head.py.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.costs.price import Pricer
from autopar.errors import ConstraintError
from autopar.running.folder import TUNING_FILE
from codegen.fusion import fuse
from codegen.program import Call, LayerLoop, Raw
from codegen.source.emit import emit_model
from examples.models import EXAMPLES
from tests.codegen.bodies import Body, assert_same_numbers, execute, is_left_alone, targets
from tests.codegen.typed import reshard, variables

ROOT = Path(__file__).resolve().parents[2]
IDEAL = str(ROOT / "examples" / "clusters" / "ideal.toml")


# --- what is fused ----------------------------------------------------------------------------------------------------


def test_rms_norm_in_any_operand_order():
    plain = Body().rms_norm()
    swapped = Body().call("power", "aten.mul.Tensor", "x", "x").call("mean", "aten.mean.dim", "power", (2,), True)
    swapped.call("shifted", "aten.add.Tensor", 1e-3, "mean").call("rsqrt", "aten.rsqrt.default", "shifted")
    swapped.call("mul", "aten.mul.Tensor", "rsqrt", "x").call("y", "aten.mul.Tensor", "mul", "self.weight")
    for body in (plain, swapped):
        fused = fuse(body.program())
        assert targets(fused) == ["kernels.rms_norm"]
        assert fused.root.body[0].args == (*variables("x", "self.weight"), 1e-3)
        assert_same_numbers(body, fused)


@pytest.mark.parametrize("keeps_name", [True, False])
@pytest.mark.parametrize("narrowing", ["to", "type_as"])
def test_rms_norm_that_widens_and_rounds(narrowing, keeps_name):
    """In the generated source `x = x.to(torch.float32)` may reuse the name of what the kernel must read."""
    half = torch.bfloat16
    wide = "x" if keeps_name and narrowing == "to" else "wide"
    body = Body({"x": half, "self.weight": half})
    body.call(wide, "aten.to.dtype", "x", torch.float32)
    body.rms_norm(wide)
    body.statements.pop()
    if narrowing == "to":
        body.call("mul", "aten.to.dtype", "mul", half)
    else:
        body.call("mul", "aten.type_as.default", "mul", "x")
    body.call("y", "aten.mul.Tensor", "self.weight", "mul")
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.rms_norm"]
    assert_same_numbers(body, fused, 1e-2)


@pytest.mark.parametrize("order", [("act", "b"), ("b", "act")])
def test_swiglu_in_either_order(order):
    body = Body().call("act", "aten.silu.default", "a").call("c", "aten.exp.default", "b")
    body.call("y", "aten.mul.Tensor", *order)
    fused = fuse(body.program("y", "c"))
    assert targets(fused) == ["aten.exp.default", "kernels.swiglu"]
    assert fused.root.body[1].args == variables("a", "b")
    assert_same_numbers(body, fused)


# --- what must not be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["power", "mean", "shifted", "rsqrt"])
def test_intermediates_with_other_uses_stay(name):
    read = Body().rms_norm()
    read.call("other", "aten.exp.default", name)
    assert is_left_alone(read, "y", "other")
    assert is_left_alone(Body().rms_norm(), "y", name), "returned"
    carried = Body().rms_norm()
    carried.statements.append(LayerLoop("Layer", 0, 2, variables(name), ((0, 0),), variables("last")))
    assert is_left_alone(carried, "y", "last"), "goes into a loop over layers"


def test_silu_with_another_use_stays():
    assert is_left_alone(Body().swiglu(), "y", "act")
    assert is_left_alone(Body().call("act", "aten.silu.default", "a").call("y", "aten.mul.Tensor", "act", "act"))


def test_sharded_normalised_dim_stays():
    """Lowering divides a mean over a sharded dim by the ranks and sums over them afterwards."""
    assert is_left_alone(Body().rms_norm(by=2))
    body = Body().rms_norm(by=2)
    body.statements.insert(2, reshard("all_reduce", "mean", "mean"))
    assert is_left_alone(body)


@pytest.mark.parametrize("position", range(1, 5))
def test_reshards_between_stay(position):
    """Of intermediates, and of x under its own name: the fused call stands last and would read another x."""
    produced = ["power", "mean", "shifted", "rsqrt"][position - 1]
    for name in (produced, "x"):
        body = Body().rms_norm()
        body.statements.insert(position, reshard("all_gather", name, name, dim=1))
        assert is_left_alone(body), f"{name} is resharded"


@pytest.mark.parametrize(
    "body",
    [
        Body().rms_norm(dims=(1,)),
        Body().rms_norm(eps="row"),
        Body({"x": torch.bfloat16}).rms_norm(),
        Body().swiglu(up="row"),
        Body({"b": torch.bfloat16}).swiglu(),
        Body().call("act", "aten.silu.default", "a").call("y", "aten.mul.Tensor", "act", 2.0),
    ],
    ids=["other dim", "eps tensor", "wider weight"] + ["broadcast", "promotion", "scalar"],
)
def test_what_the_kernels_are_not_for_stays(body):
    assert is_left_alone(body)


def test_a_product_that_is_no_weight_is_not_part_of_the_norm():
    """A matrix, one number, and a product with the weight behind a reshard, or beside another reader."""
    bodies = [Body().rms_norm(weight="a"), Body(**{"self.weight": (1,)}).rms_norm()]
    for body in bodies:
        fused = fuse(body.program())
        assert targets(fused) == ["kernels.rms_norm", "aten.mul.Tensor"]
        assert fused.root.body[0].args == (*variables("x"), None, 1e-3)
        assert_same_numbers(body, fused)
    resharded, read = Body().rms_norm(), Body().rms_norm().call("other", "aten.exp.default", "mul")
    resharded.statements.insert(5, reshard("all_gather", "mul", "mul", dim=1))
    assert targets(fuse(resharded.program())) == ["kernels.rms_norm", "Reshard", "aten.mul.Tensor"]
    assert targets(fuse(read.program("y", "other"))) == ["kernels.rms_norm", "aten.mul.Tensor", "aten.exp.default"]


# --- cross-entropy ----------------------------------------------------------------------------------------------------


def loss_body(target: torch.Tensor, count: torch.Tensor, widens: bool = False, **options: object) -> Body:
    body = Body({"logits": torch.bfloat16 if widens else torch.float32}, logits=(2, 3, 7))
    body.values["target"] = body.known["target"] = target
    body.values["num_targets"] = body.known["num_targets"] = count[None]
    if widens:
        body.call("logits", "aten.to.dtype", "logits", torch.float32)
    body.call("logits", "aten.view.default", "logits", (-1, 7))
    return body.call("y", "runtime.cross_entropy", "logits", "target", Raw("num_targets[0]"), **options)


@pytest.mark.parametrize("widens", [False, True])
@pytest.mark.parametrize(
    ("ignored", "count", "num_micro_batches"),
    [(2, torch.tensor(9), 1), (6, torch.tensor(0), 1), (6, torch.tensor(0.0), 4), (5, torch.tensor(0.25), 4)],
)
def test_cross_entropy_also_without_any_target(widens, ignored, count, num_micro_batches):
    """Counts of all ranks, per micro-batch on average; with none the loss is nan, as torch's mean is."""
    target = torch.tensor([0, 6, 3, 3, 1, 5])
    target[:ignored] = -100
    body = loss_body(target, count, widens)
    fused = fuse(body.program(num_micro_batches=num_micro_batches))
    assert targets(fused) == ["aten.view.default", "kernels.cross_entropy", "aten.sum.default", "aten.div.Tensor"]
    found = []
    for statements in (body.statements, fused.root.body):
        logits = body.values["logits"].clone().requires_grad_()
        y = execute(list(statements), body.values | {"logits": logits})["y"]
        y.backward()
        found.append((y.detach(), logits.grad))
    (y, gradient), (fused_y, fused_gradient) = found
    assert fused_y.dtype == y.dtype == torch.float32
    if ignored == 6:
        assert fused_y.isnan() and not fused_gradient.any()
    torch.testing.assert_close(fused_y, y, equal_nan=True)
    torch.testing.assert_close(fused_gradient, gradient)


def test_cross_entropy_keeps_its_ignored_class_and_sums_without_a_count():
    target = torch.tensor([0, 2, 2, 3, 1, 5])
    body = loss_body(target, torch.tensor(4), ignore_index=2)
    body.statements[-1] = replace(body.statements[-1], args=(*body.statements[-1].args[:2], Raw("1.0")))
    fused = fuse(body.program())
    assert targets(fused)[1:] == ["kernels.cross_entropy", "aten.sum.default"]
    expected = F.cross_entropy(body.values["logits"].view(-1, 7), target, ignore_index=2, reduction="sum")
    torch.testing.assert_close(execute(list(fused.root.body), body.values)["y"], expected)


@pytest.mark.parametrize("options", [{"vocab_axis": Raw("None")}, {"label_smoothing": 0.1}])
def test_cross_entropy_with_what_the_kernel_lacks_stays(options):
    assert is_left_alone(loss_body(torch.tensor([0, 6, 3, 3, 1, 5]), torch.tensor(6), **options))


def test_both_cross_entropies_in_one_file():
    body = loss_body(torch.tensor([0, 6, 3, 3, 1, 5]), torch.tensor(6))
    body.statements.append(replace(body.statements[-1], kwargs=(("label_smoothing", 0.1),), results=variables("z")))
    source = emit_model(fuse(body.program("y", "z")))
    assert "from .kernels.cross_entropy import cross_entropy as token_losses" in source
    assert "from .runtime.cross_entropy import cross_entropy" in source
    assert "y = token_losses(logits, target).sum()" in source
    assert "z = cross_entropy(logits, target, num_targets[0], label_smoothing=0.1)" in source


# --- whole models -----------------------------------------------------------------------------------------------------

LLAMA = {"rms_norm": 1, "add_rms_norm": 1, "rotary": 1, "swiglu": 1}


def compiled(name: str, cluster: str = "1 cpu", **options: object):
    example = EXAMPLES[name]()
    return autopar.compile(example.model, cluster, example_inputs=example.inputs, loss_fn=example.loss_fn, **options)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "in_layer", "in_root"),
    [
        ("llama", LLAMA, {"rms_norm": 1, "linear_cross_entropy": 1}),
        # Also queries' and keys' norms.
        pytest.param(
            "qwen3", LLAMA | {"rms_norm": 3}, {"rms_norm": 1, "linear_cross_entropy": 1}, marks=pytest.mark.slow
        ),
        ("gpt2", {"layer_norm": 1, "add_layer_norm": 1}, {"layer_norm": 1, "linear_cross_entropy": 1}),
        pytest.param(
            "bert", {"add_layer_norm": 2}, {"layer_norm": 2, "linear_cross_entropy": 1}, marks=pytest.mark.slow
        ),
    ],
)
def test_all_that_there_is_in_a_model_is_found(name, in_layer, in_root, precision):
    program = compiled(name, precision=precision, kernels="on").program
    assert_has(program, in_layer, in_root)
    assert fuse(program) == program


@pytest.mark.parametrize(
    ("name", "options", "in_layers", "in_root"),
    [
        ("gpt2", {}, [{"layer_norm": 2, "dropout_add": 2}], {"layer_norm": 1, "linear_cross_entropy": 1}),
        pytest.param(
            "bert",
            {},
            [{"layer_norm": 2, "dropout_add": 2}],
            {"layer_norm": 2, "linear_cross_entropy": 1},
            marks=pytest.mark.slow,
        ),
        # The first block of a stack has the relative positions; the decoder's also read the encoder.
        pytest.param(
            "t5",
            {"feed_forward_proj": "gated-gelu"},
            [
                *[{"rms_norm": 2, "dropout_add": 2, "geglu": 1}] * 2,
                *[{"rms_norm": 3, "dropout_add": 3, "geglu": 1}] * 2,
            ],
            {"rms_norm": 2, "linear_cross_entropy": 1},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_addition_is_the_dropouts_rather_than_the_norms(name, options, in_layers, in_root):
    example = EXAMPLES[name](dropout=0.1, **options)
    program = autopar.compile(example.model, "1 cpu", example_inputs=example.inputs, kernels="on").program
    assert_has(program, *in_layers, in_root)
    assert fuse(program) == program


def assert_has(program, *expected):
    """How often each kernel is called in each class."""
    parted = {"aten.rsqrt.default", "aten.silu.default", "aten.tanh.default", "aten.neg.default"}
    parted |= {"aten.layer_norm.default", "runtime.cross_entropy"}
    for cls, counts in zip((*program.layers, program.root), expected, strict=True):
        called = [s.target for s in cls.body if isinstance(s, Call)]
        found = Counter(target.removeprefix("kernels.") for target in called if target.startswith("kernels."))
        assert found == counts
        # T5 turns relative positions around.
        assert not (parted - ({"aten.neg.default"} if "geglu" in counts else set())) & set(called)


def test_fused_llama_as_written(golden):
    constraints = {"dp": 2, "tp": 2, "parameters": {"*.gate_proj.weight": {"tp": "S(0)"}}}
    golden(
        "programs/llama_dp2_tp2_fused.py.txt", compiled("llama", IDEAL, constraints=constraints, kernels="on").source
    )


def test_when_kernels_are_used():
    model, batch = (
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        {"input": torch.ones(2, 4), "target": torch.ones(2, 4)},
    )

    def fused(cluster: str, **options: object) -> bool:
        pinned = {"loss_fn": F.mse_loss, "constraints": {"dp": 2}, **options}
        source = autopar.compile(model, cluster, example_inputs=batch, **pinned).source
        return "from .kernels.layer_norm import" in source

    assert not fused("2 cpu") and fused("2 h100-sxm")
    assert fused("2 cpu", kernels="on") and not fused("2 h100-sxm", kernels="off")
    with pytest.raises(ConstraintError, match=r"(?s)'sometimes'.*auto, on, off"):
        fused("2 cpu", kernels="sometimes")


def test_saved_folder_holds_the_kernels_that_it_imports(tmp_path):
    for kernels_choice in ("on", "off"):
        program = compiled("llama", kernels=kernels_choice)
        folder = program.save(tmp_path / kernels_choice)
        assert (folder / "kernels" / "rms_norm.py").exists() == (kernels_choice == "on")
    assert not (folder / TUNING_FILE).exists()


def test_only_saved_folders_keep_launch_parameters(tmp_path):
    """A folder that each process writes for itself is none that ranks could agree by."""
    program = compiled("llama", kernels="on")
    folder = program.save(tmp_path / "run")
    assert (folder / TUNING_FILE).read_text() == "{}\n"
    (folder / TUNING_FILE).write_text("measured")
    assert (program.save(tmp_path / "run") / TUNING_FILE).read_text() == "measured"
    assert not (Path(program.load_package().__path__[0]) / TUNING_FILE).exists()


def check(name, *, tolerance=1e-5, constraints, **options):
    example = EXAMPLES[name]()
    report = autopar.verify(
        example.model, IDEAL, example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=constraints, **options
    )
    assert report.gradients and report.ok(tolerance), str(report)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_fused_programs_train_like_the_model(name):
    """SwiGLU on sharded features, heads' norms on sharded heads, uneven targets in uneven micro-batches."""
    sharded = {"*.gate_proj.weight": {"tp": "S(0)"}, "*.q_proj.weight": {"tp": "S(0)"}}
    check(name, constraints={"dp": 2, "tp": 2, "micro_batches": 2, "parameters": sharded}, kernels="on")


@pytest.mark.distributed
# Plans with sharded means, of which some patterns are left whole.
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3)])
def test_fused_random_plans_train_like_the_model(seed, monkeypatch):
    """Operators priced at random: also plans that shard the normalised dim or reshard within a pattern."""

    def noise(self, operator, option):
        return random.Random(f"{seed}{operator.node.name}{option.labels}").random(), 0.0

    monkeypatch.setattr(Pricer, "operator_seconds", noise)
    check("qwen3", constraints={"dp": 2, "tp": 2}, kernels="on", steps=2)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_bf16_is_near_fp32(name):
    """There is no exact reference in bf16: a sharded sum rounds elsewhere. The loss is compared with the fp32 model."""
    example = EXAMPLES[name]()
    report = autopar.verify(
        example.model,
        IDEAL,
        example_inputs=example.inputs,
        precision="bf16",
        kernels="on",
        constraints={"dp": 2, "tp": 2},
    )
    assert report.loss <= 2e-2, str(report)


@pytest.mark.slow
@pytest.mark.distributed
def test_fused_programs_with_interpreted_triton_kernels(tmp_path):
    """In a process of its own: Triton reads TRITON_INTERPRET when the kernels are imported."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name("interpreted_fusion.py"))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
