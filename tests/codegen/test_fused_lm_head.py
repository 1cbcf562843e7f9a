"""A linear layer and the loss of its logits as one call: what is fused, what must not be, and the numbers.

Handmade programs (bodies.py) are compared in fp64, where the fused call differs from the calls that it replaces by
round-off only; real models by `autopar.verify` against the eager model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import autopar
from autopar.verify import sgd_with_momentum, verify_program
from codegen.fusion import fuse
from codegen.program import Call, Program, Raw
from codegen.source.emit import emit_model
from examples.models import EXAMPLES, Example
from tests.codegen.bodies import Body, execute, targets
from tests.codegen.typed import reshard, var, variables

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
FUSED = "kernels.linear_cross_entropy"
CLASSES, HIDDEN = 7, 3
TARGET = torch.tensor([0, 6, -100, 3, 1, 5, 2, 2])


def head(
    dtype: torch.dtype = torch.float64,
    *,
    bias: bool = False,
    linear: str = "aten.linear.default",
    between: str = "view",
    target: torch.Tensor = TARGET,
    divisor: str = "num_targets[0]",
    width: int = HIDDEN,
    **options: object,
) -> Body:
    """x [2, 4, H] -> logits -> what is `between`, in words -> loss y."""
    names = dict.fromkeys(("x", "self.weight", "self.bias"), dtype)
    body = Body(names, x=(2, 4, width), **{"self.weight": (CLASSES, width), "self.bias": (CLASSES,)})
    body.values["target"] = body.known["target"] = target
    body.values["num_targets"] = body.known["num_targets"] = torch.tensor([5.0])
    body.call("logits", "aten.linear.default", "x", "self.weight", *(("self.bias",) if bias else ()))
    body.statements[-1] = replace(body.statements[-1], target=linear)
    for word in between.split():
        if word == "wide":
            body.call("logits", "aten.to.dtype", "logits", torch.float32)
        elif word == "slice":
            body.call("cut", "aten.slice.Tensor", "logits", 1, 0, 3).call("logits", "aten.contiguous.default", "cut")
        elif word == "classes":
            body.call("logits", "aten.slice.Tensor", "logits", 2, 0, CLASSES - 1)
        else:
            last = body.known["logits"].shape[-1]
            body.call("logits", f"aten.{word}.default", "logits", (-1, last))
    return body.call("y", "runtime.cross_entropy", "logits", "target", Raw(divisor), **options)


def numbers(statements: tuple, body: Body, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """y and its gradients; dtype: computed in it whatever the program's own."""
    leaves = {}
    for name, value in body.values.items():
        value = value if dtype is None or not value.is_floating_point() or name == "num_targets" else value.to(dtype)
        leaves[name] = value.clone().requires_grad_(value.is_floating_point() and name != "num_targets")
    y = execute(list(statements), leaves)["y"]
    (3.0 * y).backward()
    return {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def assert_fused(body: Body, tolerance: float = 1e-12) -> Program:
    fused = fuse(body.program())
    assert targets(fused) == [FUSED]
    expected, found = numbers(body.statements, body), numbers(fused.root.body, body)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=name)
    return fused


# --- what is fused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("between", ["view", "reshape", "slice view"])
def test_views_and_slices_of_the_rows(between, bias):
    target = TARGET[:6] if "slice" in between else TARGET
    body = head(bias=bias, between=between, target=target)
    (call,) = assert_fused(body).root.body
    assert call.args[1:] == variables("self.weight", "target", *(("self.bias",) if bias else ()))
    rows = "x[:, 0:3].reshape(-1, 3)" if "slice" in between else "x.reshape(-1, 3)"
    assert call.args[0].text.replace("[:, :3]", "[:, 0:3]") == rows


def test_two_dims_need_no_view():
    body = Body(dict.fromkeys(("x", "self.weight"), torch.float64), x=(8, HIDDEN), **{"self.weight": (CLASSES, HIDDEN)})
    body.values["target"] = body.known["target"] = TARGET
    body.call("logits", "aten.linear.default", "x", "self.weight")
    body.call("y", "runtime.cross_entropy", "logits", "target", Raw("1.0"))
    assert assert_fused(body).root.body[0].args[0] == var("x")


@pytest.mark.parametrize("between", ["wide view", "view wide", "view"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_near_to_fp64_as_the_calls_it_replaces(dtype, between):
    """The unfused pair rounds its logits' gradient; the fused call too, but before it is scaled."""
    body = head(dtype, between=between)
    fused = fuse(body.program())
    assert targets(fused) == [FUSED]
    exact = numbers([s for s in body.statements if s.target != "aten.to.dtype"], body, torch.float64)
    found, unfused = numbers(fused.root.body, body), numbers(body.statements, body)
    for name, value in exact.items():
        assert found[name].dtype == unfused[name].dtype
        allowed = 2 * (unfused[name].double() - value).abs().max() + 4 * torch.finfo(dtype).eps * value.abs().max()
        assert (found[name].double() - value).abs().max() <= allowed, name


@pytest.mark.parametrize("ignored", [-100, 2])
def test_ignored_classes(ignored):
    options = {} if ignored == -100 else {"ignore_index": ignored}
    target = TARGET.masked_fill(TARGET == -100, ignored)
    body = head(target=target, **options)
    fused = assert_fused(body)
    logits = F.linear(body.values["x"], body.values["self.weight"]).view(-1, CLASSES)
    expected = F.cross_entropy(logits, target, ignore_index=ignored, reduction="sum") / 5
    torch.testing.assert_close(numbers(fused.root.body, body)["y"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("divisor", ["num_targets[0]", "1.0", "num_targets[0] * 0"])
def test_counts_as_the_program_has_them(divisor):
    """A count of all ranks, none for a sum, and 0 where no target is left: the mean is then nan, its gradients 0."""
    target = TARGET * 0 - 100 if divisor.endswith("* 0") else TARGET
    found = numbers(assert_fused(head(divisor=divisor, target=target)).root.body, head(divisor=divisor, target=target))
    assert found.pop("y").isnan() == divisor.endswith("* 0")
    assert all(value.isfinite().all() for value in found.values())
    assert any(value.any() for value in found.values()) != divisor.endswith("* 0")


def test_a_count_that_the_program_makes_itself_is_read_where_it_is():
    body = head()
    body.statements[-1] = replace(body.statements[-1], args=(*body.statements[-1].args[:2], Raw("num_valid")))
    fused = fuse(body.program())
    assert fused.root.body[-1].kwargs == (("num_targets", Raw("num_valid")),)


def test_as_written():
    body = head(torch.float32, target=TARGET.clamp(min=0), ignore_index=0, vocab_axis=Raw("None"))
    source = emit_model(fuse(body.program()))
    assert "from .kernels.linear_cross_entropy import linear_cross_entropy" in source
    call = "x.reshape(-1, 3), self.weight, target, ignore_index=0, num_targets=num_targets[0], vocab_axis=None"
    assert call in source.replace("\n", " ")


# --- what must not be -------------------------------------------------------------------------------------------------


def stays(body: Body, *outputs: str) -> bool:
    return FUSED not in targets(fuse(body.program(*outputs)))


def test_logits_with_other_readers_stay():
    assert stays(head(between="wide view"), "y", "logits"), "returned"
    read = head()
    read.statements.insert(1, replace(read.statements[0], target="aten.exp.default", args=(var("logits"),)))
    read.statements[1] = replace(read.statements[1], results=(var("other"),))
    assert stays(read, "y", "other"), "read by another call"


@pytest.mark.parametrize("name", ["logits", "x", "self.weight"])
@pytest.mark.parametrize("position", [1, 2])
def test_reshards_between_stay(position, name):
    body = head()
    body.statements.insert(position, reshard("all_reduce", name, name))
    assert stays(body)


@pytest.mark.parametrize(
    "body",
    [
        head(label_smoothing=0.1),
        head(between="classes view", target=TARGET.clamp(max=5)),
        head(torch.float64, between="wide view"),
    ],
    ids=["label smoothing", "classes cut off", "narrowed"],
)
def test_what_the_kernel_is_not_for_stays(body):
    assert stays(body)


def test_a_weight_of_another_dtype_stays():
    body = head(torch.float32)
    linear = body.statements[0]
    body.statements[0] = replace(linear, args=(linear.args[0], var("self.weight", (CLASSES, HIDDEN), "bfloat16")))
    assert stays(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_of_a_wide_layer_keep_their_logits(dtype):
    """N e bytes of logits per column, against H a of the summed weight gradient."""
    most = 8 * dtype.itemsize // 4
    assert targets(fuse(head(dtype, width=most).program())) == [FUSED]
    assert "kernels.cross_entropy" in targets(fuse(head(dtype, width=most + 1).program()))
    halved = replace(head(dtype, width=most).program(), axis_sizes=(2, 1))
    assert "kernels.cross_entropy" in targets(fuse(halved)), "two data-parallel ranks have half the rows each"


# --- whole models -----------------------------------------------------------------------------------------------------


def check(example: Example, tolerance: float = 1e-5, *, constraints: dict, **options: object) -> None:
    """Against the eager model; the program must have the fused call."""
    named = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "constraints": constraints}
    compiled = autopar.compile(example.model, IDEAL, kernels="on", optimizer=sgd_with_momentum, **named, **options)
    assert "linear_cross_entropy(" in compiled.source
    report = verify_program(compiled, example.inputs, steps=2)
    assert report.gradients and report.ok(tolerance), str(report)


SHARDED = {"parameters": {"lm_head.weight": {"tp": "S(0)"}}}
FEW = {"width": 16}
"""A layer so narrow that the rows of a micro-batch pay for it also on two data-parallel ranks."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "sizes", "constraints"),
    [
        pytest.param("llama", {}, {"dp": 2, "tp": 2, **SHARDED}, id="vocabulary over tp"),
        pytest.param("gpt2", FEW, {"dp": 4, "zero": 3}, id="tied, ZeRO-3", marks=pytest.mark.slow),
        pytest.param("bert", FEW, {"dp": 4}, id="bias", marks=pytest.mark.slow),
        pytest.param("llama", FEW, {"dp": 4, "zero": 3, "micro_batches": 2}, id="ZeRO-3", marks=pytest.mark.slow),
        pytest.param("gpt2", {}, {"dp": 2, "tp": 2, "zero": 2}, id="tied", marks=pytest.mark.slow),
        pytest.param("t5", FEW, {"dp": 2, "tp": 2, "micro_batches": 2}, id="two stacks", marks=pytest.mark.slow),
    ],
)
def test_models_train_like_the_eager_ones(name, sizes, constraints):
    check(EXAMPLES[name](**sizes), constraints=constraints)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_pipelines_train_like_the_eager_model(schedule):
    """Zero bubble defers weight gradients of linear layers; the head's are there with its input's."""
    check(EXAMPLES["llama"](**FEW), constraints={"pp": 2, "dp": 2, "schedule": schedule, "micro_batches": 4})


@pytest.mark.slow
@pytest.mark.distributed
def test_a_loss_that_shifts_the_logits():
    def loss_fn(output: object, labels: torch.Tensor) -> torch.Tensor:
        logits = output.logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))

    example = EXAMPLES["llama"]()
    inputs = {"input_ids": example.inputs["input_ids"], "target": example.inputs["labels"].clamp(min=0)}
    shifted = Example(example.model, inputs, loss_fn)
    check(shifted, constraints={"dp": 2, "tp": 2})


@pytest.mark.slow
def test_as_written_in_a_tied_model_with_sharded_vocabulary(golden):
    example = EXAMPLES["gpt2"]()
    constraints = {"dp": 2, "tp": 2, "parameters": {"transformer.wte.weight": {"tp": "S(0)"}}}
    options = {"example_inputs": example.inputs, "precision": "bf16", "constraints": constraints, "kernels": "on"}
    compiled = autopar.compile(example.model, IDEAL, **options)
    calls = [s for s in compiled.program.root.body if isinstance(s, Call) and s.target == FUSED]
    assert len(calls) == 1 and ("vocab_axis", Raw("tp")) in calls[0].kwargs
    golden("programs/gpt2_dp2_tp2_fused_bf16.py.txt", compiled.source)
