"""Linear layers in e4m3: which ones, what they compute, and where they are refused. Costs: test_fp8_costs.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
import codegen.passes.fp8
from autopar.errors import ConstraintError, PlanError
from autopar.launch import run_ranks
from autopar.settings.fp8 import require_fp8, tolerance
from autopar.trainer import Trainer
from autopar.training.config import TrainerConfig
from autopar.verify import relative_error, sgd_with_momentum, verify_program
from codegen.passes.fp8 import count_calls
from codegen.runtime import fp8 as runtime_fp8
from codegen.source.program_source import emit_program
from examples.models import EXAMPLES

IDEAL = str(Path(__file__).resolve().parents[3] / "examples" / "clusters" / "ideal.toml")
SIZES = {"layers": 2, "width": 64, "num_heads": 4, "seq_len": 16, "batch_size": 4, "vocab_size": 64}
SGD = sgd_with_momentum


def compiled(name: str, cluster: str = "2 cpu", **options: Any) -> autopar.CompiledProgram:
    example = EXAMPLES[name](**{**SIZES, **options.pop("sizes", {})})
    options.setdefault("fp8", True)
    return autopar.compile(example.model, cluster, example_inputs=example.inputs, **options)


# What is computed -----------------------------------------------------------------------------------------------------


def rounded(x: Tensor) -> Tensor:
    """To e4m3 with a scale per row, by the format's definition: three bits after the leading one, exponents from -6."""
    scale = x.abs().amax(-1, keepdim=True).double().clamp(min=2.0**-100) / 448
    y = x.double() / scale
    ulp = torch.exp2(y.abs().log2().floor().clamp(min=-6) - 3)
    return (torch.round(y / ulp) * ulp * scale).to(x.dtype)


class Rounded(torch.autograd.Function):
    """y = xhat what^T; dx = dyhat what', w' rounded by its other rows; dw = dy^T x."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(rounded(x), rounded(weight))

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dx = rounded(dy) @ rounded(weight.t()).t()
        return dx, dy.flatten(0, -2).t() @ x.flatten(0, -2)


def run_once(program: autopar.CompiledProgram, batch: Any) -> tuple[float, dict[str, Any]]:
    step = program.build()
    loss = step.forward_backward(program.local_batch(batch))
    return float(loss), {name: value.numpy() for name, value in step.gradients().items()}


@pytest.mark.distributed
def test_is_the_model_with_rounded_operands():
    example = EXAMPLES["llama"](**SIZES)
    program = autopar.compile(
        example.model, "2 cpu", example_inputs=example.inputs, constraints={"dp": 2, "zero": 2}, fp8=True
    )
    assert count_calls(program.program) == 14
    (loss, gradients), _ = run_ranks(run_once, (program, example.inputs), 2)
    model = copy.deepcopy(example.model).double()
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.forward = lambda x, own=module: Rounded.apply(x, own.weight)
    expected = model(**example.inputs).loss
    expected.backward()
    exact = example.model(**example.inputs).loss
    # A number near the middle of two codes may round to either: few do, and each by one step.
    assert abs(loss - expected.item()) < 0.02 * abs(exact.item() - expected.item()) + 1e-6
    for name, parameter in model.named_parameters():
        error = relative_error(torch.from_numpy(gradients[name]), parameter.grad)
        assert error < 5e-3, f"{name} is off by {error:.1e}"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "precision", "constraints"),
    [
        ("llama", "bf16", {"dp": 2, "zero": 3, "recompute": "selective"}),
        (
            "gpt2",
            "fp32",
            {"tp": 2, "parameters": {"*.c_fc.weight": {"tp": "S(1)"}, "*.c_attn.weight": {"tp": "S(1/3)"}}},
        ),
        ("gpt2", "fp32", {"pp": 2, "schedule": "zero-bubble"}),
    ],
)
def test_verifies_within_what_rounding_does(name, precision, constraints):
    example = EXAMPLES[name](**SIZES)
    options = {"constraints": constraints, "precision": precision, "optimizer": SGD}
    program = autopar.compile(example.model, "2 cpu", example_inputs=example.inputs, fp8=True, **options)
    report = verify_program(program, example.inputs, steps=2)
    assert report.tolerance == tolerance(program.program) == 2**-4 * (2 * count_calls(program.program)) ** 0.5
    assert report.ok(), report
    # It rounds: by about as much as the docstring of autopar/settings/fp8.py says of one product.
    assert report.largest_gradient > 0.03 and not report.ok(0.02), report


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "num_joined"),
    [("llama", 2), ("bert", 1)],
)
def test_layers_of_one_input_are_joined_to_the_bit(name, num_joined, monkeypatch):
    """In bert something else reads that input too, after them."""
    example = EXAMPLES[name](**SIZES)
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "precision": "bf16", "fp8": True}
    programs = [autopar.compile(example.model, "1 cpu", **options)]
    monkeypatch.setattr(codegen.passes.fp8, "_joined", lambda cls: cls)
    programs.append(autopar.compile(example.model, "1 cpu", **options))
    assert [program.source.count("fp8.linears(") for program in programs] == [num_joined, 0]
    assert len({count_calls(program.program) for program in programs}) == 1
    (joined,), (apart,) = (run_ranks(run_once, (program, example.inputs), 1) for program in programs)
    assert joined[0] == apart[0] and joined[1].keys() == apart[1].keys()
    assert all((joined[1][name] == apart[1][name]).all() for name in apart[1])


# Which calls ----------------------------------------------------------------------------------------------------------


def test_program_as_written(golden):
    program = compiled("llama", IDEAL, constraints={"dp": 2, "tp": 2, "zero": 2}, precision="bf16", kernels="on")
    golden("programs/llama_dp2_tp2_fp8_bf16.py.txt", program.source)


@pytest.mark.slow
def test_head_and_embeddings_stay():
    program = compiled("gpt2", constraints={"dp": 2}, kernels="off").program
    assert count_calls(program) == 8 and {c.target for c in program.layers[0].body if hasattr(c, "target")} >= {
        "fp8.addmm"
    }
    assert not any(getattr(each, "target", "").startswith("fp8.") for each in program.root.body)


class Numbered(nn.Module):
    """Its weights' paths have numbers: `self.mlp[0].weight`."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def test_layers_without_a_name_of_their_own():
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(Numbered(), Numbered(), Numbered()), nn.Linear(32, 32))
    batch = {"input": torch.randn(4, 32)}
    program = autopar.compile(model, "1 cpu", example_inputs=batch, loss_fn=torch.mean, fp8=True).program
    assert count_calls(program) == 6


@pytest.mark.slow
def test_parts_that_the_units_do_not_take_stay():
    """16 columns of queries, of which each of two ranks has 8."""
    sizes = {"width": 16, "num_heads": 2}
    cut = {"tp": 2, "parameters": {"*.q_proj.weight": {"tp": "S(0)"}}}
    (layer,) = compiled("llama", constraints=cut, sizes=sizes).program.layers
    by_weight = {
        weight.name: call.target
        for call in layer.body
        if getattr(call, "target", "").endswith(("linear", "linears", "linear.default"))
        for weight in (call.args[1] if isinstance(call.args[1], tuple) else call.args[1:2])
    }
    assert by_weight["self.self_attn.q_proj.weight"] == "aten.linear.default"
    assert by_weight["self.mlp.gate_proj.weight"] == by_weight["self.mlp.up_proj.weight"] == "fp8.linears"
    assert by_weight["self.mlp.down_proj.weight"] == "fp8.linear"


@pytest.mark.slow
def test_says_where_it_changes_nothing():
    with pytest.warns(UserWarning, match="fp8 changes nothing"):
        compiled("llama", constraints={"dp": 2}, sizes={"width": 24, "num_heads": 2, "intermediate_size": 24})


@pytest.mark.slow
def test_saved_programs_bring_what_they_import(tmp_path):
    program = compiled("llama", constraints={"dp": 2}, kernels="off")
    assert "    fp8.require(mesh.device)\n" in emit_program(program.program)
    assert (program.save(tmp_path / "p") / "kernels" / "fp8.py").exists()
    assert "fp8" not in emit_program(compiled("llama", constraints={"dp": 2}, kernels="off", fp8=False).program)


# The switch -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plans_carry_it():
    program = compiled("llama", constraints={"dp": 2})
    text = program.plan.to_yaml()
    assert "\nfp8: true\n" in text and autopar.Plan.from_yaml(text) == program.plan
    assert compiled("llama", plan=program.plan, fp8=None).source == program.source
    assert count_calls(compiled("llama", plan=program.plan, fp8=False).program) == 0
    plain = compiled("llama", constraints={"dp": 2}, fp8=False).plan
    assert "fp8" not in plain.to_yaml()
    assert count_calls(compiled("llama", plan=plain).program) == 14
    with pytest.raises(PlanError, match=r"(?s)fp8.*neither true nor false"):
        autopar.Plan.from_yaml(text.replace("fp8: true", "fp8: maybe"))
    assert "fp8 (e4m3)" in program.report() and "fp8" not in compiled("llama", plan=plain, fp8=None).report()


@pytest.mark.parametrize(
    ("cluster", "precision", "message"),
    [
        ("8 a100-80g", "bf16", "fp8 needs GPUs of compute capability"),
        ("1x8 h100-sxm + 1x8 a100-80g", "bf16", "fp8 needs GPUs of compute capability"),
        ("8 h100-sxm", "fp32", "fp8 needs bf16 on GPUs"),
    ],
)
def test_is_refused_before_anything_starts(cluster, precision, message):
    with pytest.raises(ConstraintError, match=message):
        compiled("llama", cluster, precision=precision)


def test_is_refused_on_a_machine_without_it(monkeypatch):
    program = compiled("llama", constraints={"dp": 2}).program
    require_fp8(program, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    for capability, is_fit in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        if is_fit:
            require_fp8(program, torch.device("cuda"))
            runtime_fp8.require(torch.device("cuda"))
            continue
        with pytest.raises(ConstraintError, match=r"A100 has compute capability 8\.0, fp8 products need 8\.9"):
            require_fp8(program, torch.device("cuda"))
        with pytest.raises(RuntimeError, match=r"compute capability 8\.0"):
            runtime_fp8.require(torch.device("cuda"))


def test_trainer_hands_it_on():
    example = EXAMPLES["llama"](**SIZES)
    config = TrainerConfig(cluster="2 cpu", fp8=True, constraints={"dp": 2})
    assert Trainer(example.model, config, [example.inputs]).compile().plan.fp8
    plain = replace(config, auto_parallel=False, steps=1, log_every=0)
    with pytest.raises(ConstraintError, match="plain run has no fp8"):
        Trainer(example.model, plain, [example.inputs]).fit()
