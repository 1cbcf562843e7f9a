"""Programs against the single-process model, in real processes. The whole matrix is benchmarks/verify_matrix.py."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.costs.price import Pricer
from autopar.costs.rates import Rates
from autopar.launch import RankError, run_ranks
from autopar.verify import relative_error, sgd_with_momentum, verify_program
from examples.models import EXAMPLES

pytestmark = pytest.mark.distributed
IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
TOLERANCE = 1e-5


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def check(name, constraints, *, cluster=IDEAL, dropout=0.0, **options):
    example = EXAMPLES[name](dropout=dropout)
    report = autopar.verify(
        example.model,
        cluster,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=constraints,
        **options,
    )
    assert report.gradients and report.parameters
    assert report.ok(TOLERANCE), str(report)
    return report


# Among the fast tests llama also runs in test_fusion.py, llama_gqa in test_context_parallel.py.
QUICK = ("gpt2",)


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in EXAMPLES])
def test_every_model_sharded_both_ways_with_everything_on(name):
    constraints = {"dp": 2, "tp": 2, "zero": 3, "micro_batches": 4}
    check(name, constraints, dropout=0.1, max_grad_norm=0.5)


# Every stage of AdamW is in the fast set of tests/codegen/runtime/test_step.py, ZeRO-3 is above.
@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_stages_with_adamw(zero):
    check("gpt2", {"dp": 4, "zero": zero}, optimizer=torch.optim.AdamW)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_gqa", "transformer_encoder", "vit"])
def test_tensor_parallel_over_all_ranks(name):
    check(name, {"tp": 4})


@pytest.mark.slow
def test_free_choice_on_the_generic_cpu():
    check("llama", {}, cluster="4 cpu")


@pytest.mark.parametrize("seed", [slow(0), slow(1), slow(2), slow(3)])
def test_random_plans_are_right(seed, monkeypatch):
    """Compute and resharding priced at random: plans that no sensible cost model would choose."""
    drawn = random.Random(seed)
    monkeypatch.setattr(
        Pricer, "operator_seconds", lambda self, op, option: (_noise(seed, op.node.name, option.labels), 0.0)
    )
    seconds = Rates.reshard_seconds

    def noisy(self, source, target, meta):
        real = seconds(self, source, target, meta)
        return real if real in (0.0, float("inf")) else _noise(seed, source, target) * 0.1

    monkeypatch.setattr(Rates, "reshard_seconds", noisy)
    name = drawn.choice(["gpt2", "llama_gqa", "bert", "nanogpt", "qwen3", "opt"])
    check(name, drawn.choice([{"tp": 4}, {"dp": 2, "tp": 2, "zero": drawn.randrange(4)}]), steps=2)


def _noise(*key):
    return random.Random(repr(key)).random()


@pytest.mark.slow
def test_uneven_targets_over_ranks_and_micro_batches():
    """All labels of some rows ignored: the mean over valid tokens must not become a mean of means."""
    example = EXAMPLES["llama"](layers=1)
    labels = example.inputs["labels"].clone()
    labels[:3] = -100
    labels[5, 4:] = -100
    inputs = {**example.inputs, "labels": labels}
    report = autopar.verify(
        example.model, IDEAL, example_inputs=inputs, constraints={"dp": 2, "tp": 2, "micro_batches": 4}
    )
    assert report.ok(TOLERANCE), str(report)


def test_a_wrong_program_is_caught():
    """The comparison can fail: a program whose loss is doubled is far from the reference."""
    example = EXAMPLES["mlp"]()
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "constraints": {"dp": 4}}
    compiled = autopar.compile(example.model, IDEAL, **options)
    wrong = replace(compiled, files={"model.py": compiled.source.replace("= F.mse_loss", "= 2 * F.mse_loss")})
    assert wrong.source != compiled.source
    report = verify_program(wrong, example.inputs)
    assert report.loss > 0.5 and report.largest_gradient > 0.5


class NotFinite(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).log()


def does_not_train(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def still(output, target):
    return torch.nn.functional.mse_loss(output, target) + 1e9


@pytest.mark.parametrize(
    ("model", "optimizer", "loss_fn", "reason"),
    [
        (NotFinite, None, torch.nn.functional.mse_loss, "a loss is not finite"),
        (torch.nn.Linear, does_not_train, torch.nn.functional.mse_loss, "the reference did not train"),
        (torch.nn.Linear, None, still, "loss does not move"),
    ],
)
def test_a_comparison_that_proves_nothing_fails(model, optimizer, loss_fn, reason):
    inputs = (torch.randn(8, 4), torch.randn(8, 3))
    report = autopar.verify(model(4, 3), "1 cpu", example_inputs=inputs, loss_fn=loss_fn, optimizer=optimizer)
    assert not report.ok() and reason in str(report)


class NamesDtypes(torch.nn.Module):
    """A checkpointed block with dropout, a cast to fp32 and a state of torch's default dtype."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

    def block(self, x):
        return torch.nn.functional.dropout(self.first(x), 0.5, self.training).tanh()

    def forward(self, x):
        state = torch.zeros(len(x), 4, device=x.device)
        state = self.first(state) + checkpoint(self.block, x.float(), use_reentrant=False)
        return self.second(state.to(torch.float32))


def test_the_reference_in_fp64_is_one_whatever_forward_names():
    inputs = (torch.randn(8, 4), torch.randn(8, 3))
    report = autopar.verify(NamesDtypes(), "1 cpu", example_inputs=inputs, loss_fn=torch.nn.functional.mse_loss)
    assert report.ok(TOLERANCE), str(report)
    assert max(report.gradient_floors.values()) > 0  # which are distances to another precision's


class ReadsItsCounter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        return self.linear(x) / self.count


def test_gradients_are_compared_where_forward_reads_what_it_counts():
    inputs = (torch.randn(8, 4), torch.randn(8, 3))
    report = autopar.verify(ReadsItsCounter(), "1 cpu", example_inputs=inputs, loss_fn=torch.nn.functional.mse_loss)
    assert len(report.gradients) == 2 and not report.round_off and report.ok(), str(report)


def test_buffers_are_compared():
    """Statistics that the program does not update are seen, though loss, gradients and parameters are equal."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    inputs = (torch.randn(8, 4), torch.randn(8, 4))
    options = {"example_inputs": inputs, "loss_fn": torch.nn.functional.mse_loss}
    options["optimizer"] = sgd_with_momentum
    compiled = autopar.compile(model, "1 cpu", **options)
    report = verify_program(compiled, inputs)
    assert report.ok(), report
    assert report.buffers.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    source = compiled.source
    for name in ("running_mean", "running_var"):
        source = source.replace(f".{name},", f".{name}.clone(),")
    assert source != compiled.source, source
    wrong = verify_program(replace(compiled, files={"model.py": source}), inputs)
    assert wrong.largest_parameter < TOLERANCE and wrong.beyond() == ("1.running_mean", "1.running_var")
    assert len(str(wrong).splitlines()) == 6 and len(str(wrong)) < 600


def test_relative_error():
    assert relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])) == pytest.approx(1 / 2**0.5)


def test_rank_that_dies_ends_in_an_error():
    with pytest.raises(RankError, match="rank 1"):
        run_ranks(_die_on_rank_1, (), 2, timeout_seconds=60)


def _die_on_rank_1():
    import os

    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_world_size_differs_from_the_plan():
    example = EXAMPLES["mlp"]()
    compiled = autopar.compile(example.model, IDEAL, example_inputs=example.inputs, loss_fn=example.loss_fn)
    with pytest.raises(autopar.AutoparError, match="4 processes") as caught:
        run_ranks(_build, (compiled,), 2)
    assert "2 running" in str(caught.value)


def _build(compiled):
    compiled.build()


@pytest.mark.slow
def test_checkpoint_of_one_plan_continues_under_another(tmp_path):
    example = EXAMPLES["gpt2"]()
    options = {"example_inputs": example.inputs, "optimizer": torch.optim.AdamW}
    first = autopar.compile(example.model, IDEAL, constraints={"dp": 2, "tp": 2, "zero": 3}, **options)
    second = autopar.compile(example.model, IDEAL, constraints={"tp": 4}, **options)
    straight = run_ranks(_train, (first, example.inputs, 4, None, None), 4)[0]
    half = run_ranks(_train, (first, example.inputs, 2, None, tmp_path / "half"), 4)[0]
    rest = run_ranks(_train, (second, example.inputs, 2, tmp_path / "half", None), 4)[0]
    assert half + rest == pytest.approx(straight, rel=1e-5)


@pytest.mark.slow
def test_padded_vocabularies_train_alike_and_continue_unpadded(tmp_path):
    """Of 97 words tp4 has 25 a rank, tp2 49 and tp1 all; the plan file says so, checkpoints have 97 rows."""
    example = EXAMPLES["gpt2"](layers=1, vocab_size=97, width=16, num_heads=2)
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "optimizer": torch.optim.AdamW}
    compiled = autopar.compile(example.model, IDEAL, constraints={"tp": 4}, **options)
    assert compiled.source.count("padding=3") == 1 and 'tp="S(0)"' in compiled.source
    saved = tmp_path / "plan.yaml"
    saved.write_text(compiled.plan.to_yaml())
    first = autopar.compile(example.model, IDEAL, plan=saved, **options)
    assert first.source == compiled.source
    assert compiled.source.count("own_rows=97") == 1 and compiled.source.count("own_classes=97") == 1
    assert compiled.program.any.vocabulary == 97
    for name in ("input_ids", "labels"):
        outside = {**example.inputs, name: torch.full_like(example.inputs[name], 98)}  # 100 with padding
        with pytest.raises(RankError, match="IndexError.* 97"):
            run_ranks(_train, (first, outside, 1, None, None), 4)
    report = verify_program(first, example.inputs)
    assert report.ok(TOLERANCE), str(report)
    straight = run_ranks(_train, (first, example.inputs, 4, None, None), 4)[0]
    half = run_ranks(_train, (first, example.inputs, 2, None, tmp_path / "half"), 4)[0]
    second = autopar.compile(example.model, IDEAL, constraints={"dp": 2, "tp": 2, "zero": 3}, **options)
    assert "padding=1" in second.source
    rest = run_ranks(_train, (second, example.inputs, 2, tmp_path / "half", None), 4)[0]
    assert half + rest == pytest.approx(straight, rel=1e-5)


def _train(compiled, batch, steps, start, end):
    import importlib

    step = compiled.build()
    checkpoint = importlib.import_module(type(step).__module__.replace(".step", ".checkpoint"))
    if start:
        checkpoint.load(step, start)
    losses = [float(step(compiled.local_batch(batch))) for _ in range(steps)]
    if end:
        checkpoint.save(step, end)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("constraints", [{"tp": 4, "micro_batches": 8}, {"pp": 4, "micro_batches": 8}])
def test_micro_batches_of_one_row_draw_different_masks(constraints: dict[str, int]) -> None:
    """A batch of one row has no factor that could be followed, and its dropout still depends on the micro-batch."""
    example = EXAMPLES["gpt2"](dropout=0.1, batch_size=8)
    report = autopar.verify(example.model, IDEAL, example_inputs=example.inputs, constraints=constraints)
    assert report.ok(), report
