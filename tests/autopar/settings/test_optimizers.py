"""Any optimiser trains as on one process, or is refused before the first step."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.costs.updates import DefaultAdamW
from autopar.errors import ConstraintError
from autopar.frontend.inputs import NamedBatch
from autopar.launch import run_ranks
from autopar.planning.equal_configs import offloads
from autopar.planning.traced_model import traced_of
from autopar.settings.compile_options import CompileOptions
from autopar.settings.constraints import Constraints
from autopar.settings.optimizers import examine, keeps_zeros
from autopar.verify import _compare, _rotated
from codegen.runtime.optimizer_probe import Needs
from codegen.runtime.optimizer_trial import OptimizerTrial
from codegen.runtime.optimizers import OptimizerError, parameters_of, read_parameters, whole_optimizer
from tests import forked
from tests.autopar.optimizer_factories import (
    COUPLED,
    HONOURED,
    WHOLE,
    by_name,
    by_ndim,
    inputs,
    loss_fn,
    model,
    refused,
)
from tests.autopar.requests import request_for

PLANS = {
    **{f"zero {zero}": {"dp": 2, "zero": zero} for zero in range(4)},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b", "micro_batches": 2},
    "pp2 tied": {"pp": 2, "schedule": "1f1b", "micro_batches": 2},
    "zero 3 on the host": {"dp": 2, "zero": 3, "offload": "optimizer"},
}
TOLERANCE = 1e-5


def compiled(factory, constraints, net=None):
    return autopar.compile(
        net or model(),
        "2 cpu",
        example_inputs=inputs(),
        loss_fn=loss_fn,
        optimizer=factory,
        constraints=constraints,
    )


def _compare_all(programs, batches):
    """On every rank: all programs in turn, each against its reference."""
    return [_compare(program, batches, None, 0) for program in programs]


def run_all(programs):
    """The report of each program."""
    batch = NamedBatch(dict(zip(("tokens", "target"), inputs(), strict=True)), {})
    batches = [_rotated(batch, 4, shift) for shift in range(3)]
    reports, *others = run_ranks(_compare_all, (programs, batches), 2, 600.0)
    assert all(report is None for other in others for report in other)
    return reports


def saved(factory, folder, **constraints):
    """A program of one process, or of as many as the constraints say."""
    ranks = 2 if constraints else 1
    program = autopar.compile(
        model(),
        f"{ranks} cpu",
        example_inputs=inputs(),
        loss_fn=loss_fn,
        optimizer=factory,
        constraints=constraints,
    )
    return program.save(folder)


def run_main(folder, *arguments, ranks=1):
    """Its main.py, which finds the factories of this project."""
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    return forked.run([str(folder / "main.py"), *arguments], ranks=ranks, cwd=folder.parent, env=environment)


def plain_losses(factory, steps):
    """Of the model trained on the batches that main.py draws."""
    net, losses = model(), []
    optimizer = factory(net.named_parameters() if factory is by_name else list(net.parameters()))
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens, target = (torch.randint(32, (4, 6), generator=generator) for _ in range(2))
        loss = loss_fn(net(tokens), target)
        losses.append(loss.item())
        net.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def table(pairs):
    """(optimiser, plan) -> the largest error of a parameter, or the first line of the refusal."""
    programs, found = {}, {}
    for name, plan in pairs:
        net = model(tied="tied" in plan)
        factory = (HONOURED | WHOLE | COUPLED).get(name) or refused(net)[name][0]
        try:
            programs[name, plan] = compiled(factory, PLANS[plan], net)
        except ConstraintError as error:
            found[name, plan] = str(error)
    for key, report in zip(programs, run_all(list(programs.values())), strict=True):
        assert report.ok(TOLERANCE), f"{key}: {report}"
        found[key] = report.largest_parameter
    return found


def test_groups_are_those_of_the_whole_model():
    """By hand: the shapes that a factory counts on, under ZeRO-3 of ranks that store flat slices."""
    made = whole_optimizer(by_ndim, parameters_of(model()))
    matrices = ("embed.weight", *(f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down")), "head.weight")
    assert made.groups[0] == matrices and len(made.groups[1]) == 10
    assert all(p.untyped_storage().nbytes() == 4 for p in made.stand_ins.values())
    kept = nn.Parameter(torch.ones(3))
    optimizer = made.replace({"layers.0.up.bias": [kept]})
    assert [group["params"] for group in optimizer.param_groups] == [[], [kept]]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-2]


def test_state_of_constructors_is_laid_out_anew():
    made = whole_optimizer(HONOURED["Adagrad"], parameters_of(model()))
    assert all(s["sum"].untyped_storage().nbytes() == 4 for s in made.optimizer.state.values())
    kept = nn.Parameter(torch.ones(3))
    optimizer = made.replace({"head.weight": [kept]})
    assert list(optimizer.state) == [kept]
    assert torch.equal(optimizer.state[kept]["sum"], torch.full((3,), 0.1))


def test_attributes_of_parameters_are_seen():
    net = model()
    net.head.weight.is_slow = True
    made = whole_optimizer(
        lambda ps: torch.optim.SGD([p for p in ps if not hasattr(p, "is_slow")], lr=0.1), parameters_of(net)
    )
    assert "head.weight" not in made.groups[0] and len(made.groups[0]) == 15


@pytest.mark.parametrize("name", HONOURED)
def test_elementwise_updates_are_found(name):
    assert not examine(HONOURED[name], model()).problem


@pytest.mark.parametrize("name", WHOLE)
def test_updates_of_whole_tensors_are_found(name):
    needs = examine(WHOLE[name], model())
    hidden = {f"layers.{layer}.{part}.weight" for layer in range(2) for part in ("up", "down")}
    assert not needs.is_coupled and hidden <= needs.whole


class Drifting(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad + 0.1, alpha=-group["lr"])


@pytest.mark.parametrize(
    ("factory", "is_kept"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1), True),
        (torch.optim.AdamW, True),
        (torch.optim.Rprop, True),
        (partial(torch.optim.Adam, eps=0.0), False),  # 0 / 0
        (partial(Drifting, lr=0.1), False),
    ],
)
def test_updates_that_leave_padding_zeros_are_found(factory, is_kept):
    net = model()
    assert not examine(factory, net).problem and keeps_zeros(factory, net, Needs(), Constraints({})) == is_kept
    with contextlib.nullcontext() if is_kept else pytest.raises(OptimizerError, match="moves zeros"):
        OptimizerTrial._check_padding(factory, parameters_of(net), frozenset())


def test_padding_is_no_matter_to_what_is_updated_whole():
    """Which Adafactor's division by the root mean square of zeros would spoil."""
    found, net = examine(torch.optim.Adafactor, model()), model()
    assert keeps_zeros(torch.optim.Adafactor, net, found, Constraints({}))
    assert not keeps_zeros(torch.optim.Adafactor, net, found, Constraints({}, offload="optimizer"))


def test_only_the_groups_that_need_it_are_held_whole():
    """One optimiser with two ways to update: matrices by their norm, the rest element by element."""

    class Mixed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad / (p.grad.norm() if group["by_norm"] else 10.0), alpha=group["lr"])

    def factory(params):
        matrices, vectors = [p for p in params if p.ndim == 2], [p for p in params if p.ndim == 1]
        return Mixed([{"params": matrices, "by_norm": True}, {"params": vectors, "by_norm": False}], lr=0.1)

    found = examine(factory, model())
    assert found.whole == {name for name, p in model().named_parameters() if p.ndim == 2}


@pytest.mark.parametrize("factory", [torch.optim.SGD, torch.optim.AdamW], ids=lambda c: c.__name__)
def test_rates_of_zero_do_not_hide_a_coupling(factory):
    """As a schedule that warms up leaves them."""

    class Clipping(factory):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
            super().step()

    assert examine(lambda params: Clipping(params, lr=0.0), model()).is_coupled


def test_models_without_values_are_examined_too():
    with torch.device("meta"):
        net = model()
    assert not examine(by_ndim, net).problem
    assert not examine(partial(torch.optim.AdamW, fused=True), net).problem
    with pytest.raises(ConstraintError, match="not by identity or value"):
        examine(lambda ps: torch.optim.SGD([{"params": [p], "lr": abs(p.mean().item())} for p in ps], lr=0.1), net)


def test_an_optimiser_that_takes_fp32_alone_is_tried_in_it():
    class Single(torch.optim.SGD):
        def step(self, closure=None):
            assert all(p.dtype == torch.float32 for group in self.param_groups for p in group["params"])
            super().step()

    assert not examine(lambda params: Single(params, lr=0.1), model()).problem


@pytest.mark.parametrize("name", list(refused(model())))
def test_what_cannot_be_honoured_is_refused(name):
    net = model()
    factory, said = refused(net)[name]
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with pytest.raises(ConstraintError) as error:
        examine(factory, net)
    assert said in str(error.value)
    assert all(torch.equal(p, before[n]) for n, p in net.named_parameters())


def stored_of(program):
    return [each for scope in program.plan.scopes.values() for each in scope.parameters.items()]


@pytest.mark.slow
def test_plans_hold_whole_what_must_be():
    """Where one rank cannot update for the others: a coupled update, and one in host memory."""
    with pytest.raises(ConstraintError, match="LBFGS.step needs a closure"):
        compiled(torch.optim.LBFGS, {})
    with pytest.warns(UserWarning, match="couples all parameters"):
        program = compiled(COUPLED["SGD that clips"], {"tp": 2})
    assert not any(s.zero or any(p.is_shard for p in s.placements) for _, s in stored_of(program))
    with pytest.raises(ConstraintError, match="pp=2"):
        compiled(COUPLED["SGD that clips"], PLANS["pp2"])
    with pytest.warns(UserWarning, match="Muon is not elementwise, and with offload=optimizer"):
        program = compiled(WHOLE["Muon"], {"tp": 2, "offload": "optimizer"})
    assert all(p.is_replicated for n, s in stored_of(program) if n.endswith("weight") for p in s.placements)
    with pytest.raises(ConstraintError, match="zero=3 on dp2 and offload=optimizer") as error:
        compiled(WHOLE["LAMB"], PLANS["zero 3 on the host"])
    assert "no offload, or zero=0 and tp=1" in str(error.value)
    sharded = compiled(None, {"tp": 2, "parameters": {"*.up.weight": {"tp": "S(0)"}}}).plan
    with pytest.raises(ConstraintError, match=r"layers\.0\.up\.weight is S\(0\) on tp2"):
        autopar.compile(
            model(),
            "2 cpu",
            example_inputs=inputs(),
            loss_fn=loss_fn,
            optimizer=COUPLED["SGD that clips"],
            plan=sharded,
        )


@pytest.mark.filterwarnings("error")
def test_updates_of_whole_tensors_bar_no_plan_but_offloading():
    for constraints in ({"tp": 2, "parameters": {"*.up.weight": {"tp": "S(0)"}}}, {"dp": 2, "zero": 3}):
        program = compiled(WHOLE["LAMB"], constraints)
        assert any(s.zero or any(p.is_shard for p in s.placements) for _, s in stored_of(program))


def test_searches_offload_no_update_of_whole_tensors():
    elementwise = request_for("llama")
    options = CompileOptions(example_inputs=inputs(), loss_fn=loss_fn, optimizer=WHOLE["LAMB"])
    whole = replace(elementwise, traced=traced_of(model(), options))
    assert offloads(elementwise, 1) == ("", "optimizer") and offloads(whole, 1) == ("",)
    pinned = replace(whole, constraints=Constraints({}, offload="optimizer"))
    assert offloads(pinned, 1) == ("optimizer",)


def test_a_saved_program_has_the_path_of_its_optimiser(tmp_path):
    texts = {}
    for name, factory in {"named": by_name, "partial": partial(torch.optim.SGD, lr=0.5), "default": None}.items():
        saved(factory, tmp_path / name)
        texts[name] = (tmp_path / name / "main.py").read_text()
    assert "optimizers.imported('tests.autopar.optimizer_factories:by_name')" in texts["named"]
    assert "optimizers.imported('torch.optim.sgd:SGD', lr=0.5)" in texts["partial"]
    assert "--optimizer" not in texts["default"] and not (tmp_path / "default" / "parameters.json").exists()
    parameters = read_parameters(tmp_path / "named" / "parameters.json")
    assert parameters == parameters_of(model())
    own = saved(DefaultAdamW(lr=0.02, weight_decay=0.5), tmp_path / "own")
    text = (own / "main.py").read_text()
    assert "default=0.02" in text and "partial(torch.optim.AdamW, lr=args.lr, weight_decay=0.5, fused=True)" in text


@pytest.mark.slow
def test_a_saved_program_stops_rather_than_train_with_another_optimiser(tmp_path):
    folder = saved(lambda params: by_ndim(params), tmp_path / "program")
    assert "replace the line in `compiled_optimizer`" in (folder / "main.py").read_text().split('"""')[1]
    stopped = run_main(folder, "--steps", "1")
    assert stopped.returncode != 0 and "has no import path: give --optimizer" in stopped.stderr
    assert "Traceback" not in stopped.stderr and "loss" not in stopped.stdout


@pytest.mark.slow
def test_a_saved_program_trains_with_its_optimiser(tmp_path):
    """Which losses tell from AdamW's; under ZeRO-3 too, also by one of whole tensors, but by no coupled one."""
    expected = plain_losses(by_name, 6)
    assert expected != pytest.approx(plain_losses(torch.optim.AdamW, 6), abs=0.05)
    folder = saved(by_name, tmp_path / "program")
    sharded = saved(lambda params: by_ndim(params), tmp_path / "sharded", dp=2, zero=3)
    path = "tests.autopar.optimizer_factories:"
    for output in (
        run_main(folder, "--steps", "6"),
        run_main(sharded, "--steps", "6", "--optimizer", f"{path}by_name", ranks=2),
    ):
        assert output.returncode == 0, output.stderr[-2000:]
        losses = [float(text) for text in re.findall(r"loss (\S+)", output.stdout)]
        assert losses == pytest.approx(expected, abs=1e-4)
    whole = run_main(sharded, "--steps", "6", "--optimizer", f"{path}Lamb", ranks=2)
    assert whole.returncode == 0, whole.stderr[-2000:]
    losses = [float(text) for text in re.findall(r"loss (\S+)", whole.stdout)]
    assert losses == pytest.approx(plain_losses(WHOLE["LAMB"], 6), abs=1e-4)
    refused = run_main(sharded, "--steps", "6", "--optimizer", f"{path}clipped", ranks=2)
    assert refused.returncode != 0 and "the update of SGD couples all parameters" in refused.stderr
    missing = run_main(folder, "--optimizer", "nowhere:factory")
    assert missing.returncode != 0 and "put the folder of its module on PYTHONPATH" in missing.stderr


@pytest.mark.slow
@pytest.mark.distributed
def test_groups_by_shape_and_order_under_zero_3():
    found = table((name, "zero 3") for name in ("AdamW by ndim", "SGD by order", "Adagrad"))
    assert all(isinstance(error, float) for error in found.values())


@pytest.mark.distributed
@pytest.mark.slow
def test_the_table(capsys):
    """Optimisers under plans: exact or refused. Every one under three plans, every plan with a third of them."""
    names = [*HONOURED, *WHOLE, *COUPLED, *refused(model())]
    pairs = [(name, plan) for i, name in enumerate(names) for j, plan in enumerate(PLANS) if (i + j) % 3 == 0]
    found = table(pairs)
    with capsys.disabled():
        print("\n" + " " * 18 + " ".join(f"{plan[:8]:>8}" for plan in PLANS))
        for name in names:
            cells = [found.get((name, plan), "") for plan in PLANS]
            texts = (f"{c:8.0e}" if isinstance(c, float) else " refused" if c else " " * 8 for c in cells)
            print(f"{name:17}", *texts)
    for (name, plan), cell in found.items():
        is_whole = plan in ("zero 0", "tp2") or (name not in COUPLED and "host" not in plan)
        assert isinstance(cell, float) == (name in HONOURED or (name in WHOLE | COUPLED and is_whole)), (name, plan)
