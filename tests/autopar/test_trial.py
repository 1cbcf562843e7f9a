"""`autopar trial`: which plans are tried, which is chosen, what is written down, and one real run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from click.testing import Result
from typer.testing import CliRunner

import autopar
from autopar import trial_report
from autopar.cli import app
from autopar.compiled import CompiledProgram
from autopar.errors import AutoparError, ClusterError, ConstraintError, OutputError, PlanError
from autopar.files.outputs import is_ours, write_output
from autopar.launch import RankError
from autopar.plan import Plan
from autopar.profiling.trials import TrialRecord, add_trials, read_trials, trials_path
from autopar.settings.compile_options import TrialOptions
from autopar.trial import _Candidate, other_plans, report_of
from examples.models import mlp

LAYOUTS = ("dp4", "tp4", "pp2 x dp2", "pp2 x tp2", "pp4", "dp2 x tp2")
MODEL = ("examples.models:mlp", "--cluster", "2 cpu", "--option", "batch_size=8")

# Other modules of this name are hidden by the functions that the package exports.
TRIAL: Any = __import__("sys").modules["autopar.trial"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "autopar" / "trials.toml"


def compiled(cluster: str, **constraints: int) -> CompiledProgram:
    example = mlp()
    return autopar.compile(
        example.model,
        cluster,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=constraints or None,
    )


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def record(**changed: Any) -> TrialRecord:
    default = TrialRecord(
        date="2026-01-02 03:04 UTC",
        job="j",
        model='M "of" 𝄞',
        cluster="2 cpu",
        plan="p",
        words="dp2, 1 micro-batch",
        pins="dp=2",
        predicted_seconds=1e-5,
        measured_seconds=2.0,
        spread=0.25,
        num_steps=8,
        is_chosen=True,
        machine="a machine",
        torch="2.0",
        autopar="0.1",
    )
    return replace(default, **changed)


# Which plans ----------------------------------------------------------------------------------------------------------


def test_other_plans_are_the_best_of_the_best_layouts() -> None:
    program = compiled("4 cpu")
    seconds = {}
    for layout in LAYOUTS:
        try:
            pinned = compiled("4 cpu", **(trial_report.degrees_of(layout) or {}))
        except AutoparError:  # the model is too short for it
            continue
        seconds[layout] = pinned.plan.prediction.step_seconds
    assert len(seconds) >= 4
    expected = sorted(seconds.values())[:3]
    others = list(other_plans(program, 2))
    plans = [program.plan, *(plan for plan, _ in others)]
    assert len({plan.mesh_text for plan in plans}) == 3
    assert [plan.prediction.step_seconds for plan in plans] == pytest.approx(expected)
    for plan, pins in others:
        assert compiled("4 cpu", **pins).plan.mesh_text == plan.mesh_text
    assert not list(other_plans(program, 0))


def test_pinned_degrees_leave_nothing_else_to_try() -> None:
    assert not list(other_plans(compiled("2 cpu", dp=2), 3))


def test_a_digest_is_of_decisions_and_a_job_of_shapes() -> None:
    one, other, pinned = compiled("2 cpu"), compiled("2 cpu"), compiled("2 cpu", tp=2)
    slower = replace(one.plan, prediction=replace(one.plan.prediction, seconds={"compute": 9.0}), cluster="other")
    assert trial_report.digest_of(one.plan) == trial_report.digest_of(slower)
    assert trial_report.digest_of(compiled("2 cpu", dp=2).plan) != trial_report.digest_of(pinned.plan)
    assert one.request is not None and other.request is not None and pinned.request is not None
    jobs = {trial_report.job_of(program.request) for program in (one, other, pinned) if program.request is not None}
    assert len(jobs) == 1
    assert trial_report.job_of(replace(one.request, precision="bf16")) not in jobs


# What is chosen -------------------------------------------------------------------------------------------------------


def candidates(*rounds: list[list[float]]) -> list[_Candidate]:
    programs = [compiled("2 cpu", dp=2), compiled("2 cpu", tp=2), compiled("2 cpu", pp=2)]
    tried = [_Candidate(program, trial_report.pins_of(program.plan)) for program in programs[: len(rounds)]]
    for program, seconds in zip(tried, rounds, strict=True):
        program.rounds = seconds
    return tried


def test_the_fastest_median_is_chosen() -> None:
    tried = candidates([[3.0, 3.0], [5.0, 9.0]], [[2.0, 2.0], [2.0, 99.0]], [[4.0, 4.0], [1.0, 4.0]])
    report = report_of(tried, {}, "f.toml")
    assert (report.chosen, report.is_clear) == (1, False)  # its last round's median is 50.5, and the first plan's 7
    assert report.plans[1].measured_seconds == 2.0 and report.plans[1].round_seconds == (2.0, 50.5)
    assert report.plans[0].measured_seconds == 4.0
    assert (report.plans[0].low_seconds, report.plans[0].high_seconds) == (3.0, 6.0)
    assert report.plans[0].spread == 0.75 and report.plans[0].num_steps == 4
    assert "chooses tp2" in report.words and "50% less" in report.words and "within the scatter" in report.words
    tried[1].rounds[1] = [2.0, 2.0]
    assert "within the scatter" not in report_of(tried, {}, "f.toml").words


def test_a_plan_that_fails_is_told_of_and_passed_over() -> None:
    tried = candidates([[1.0]], [[2.0]])
    tried[0].problem = "rank 0: out of memory"
    report = report_of(tried, {}, "f.toml")
    assert report.chosen == 1 and report.plans[0].measured_seconds is None
    assert "did not run" in report.words
    assert [row.words for row in trial_report.records_of(report, "j")] == [report.plans[1].words]
    tried[1].problem = "rank 1: no"
    with pytest.raises(RankError, match=r"no plan ran: dp2.*out of memory; tp2.*rank 1: no"):
        report_of(tried, {}, "f.toml")


# What is written down -------------------------------------------------------------------------------------------------


def test_records_go_into_a_profile_and_replace_their_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    cluster = autopar.ClusterSpec.parse("2 cpu")
    write_output(path, "# measured\n" + cluster.to_toml())
    add_trials(path, [record(), record(plan="q", is_chosen=False)])
    add_trials(path, [record(job="other")])
    add_trials(path, [record(torch="2.1")])
    assert len(read_trials(path)) == 4
    add_trials(path, [record(measured_seconds=3.0)])
    assert read_trials(path) == (record(job="other"), record(torch="2.1"), record(measured_seconds=3.0))
    text = path.read_text()
    assert is_ours(path) and text.startswith("# measured\n") and text.count("written by autopar") == 1
    assert autopar.ClusterSpec.from_toml(path) == cluster


def test_a_file_of_a_users_own_is_left_alone(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "hand.toml"
    path.write_text('device = "cpu"\ndevices_per_node = 2\n')
    assert trials_path(path) == cache == trials_path(None)
    before = path.read_text()
    with pytest.raises(OutputError):
        add_trials(path, [record()])
    assert path.read_text() == before
    path.write_text("[[trials]\n")
    with pytest.raises(ClusterError):
        read_trials(path)


def test_records_of_another_form_tell_nothing(tmp_path: Path) -> None:
    path = tmp_path / "odd.toml"
    path.write_text('trials = [{date = "x"}, 3]\n')
    assert read_trials(path) == ()


# Refusals -------------------------------------------------------------------------------------------------------------


def trying(cluster: str = "2 cpu", **options: Any) -> None:
    example = mlp()
    autopar.trial(example.model, cluster, example_inputs=example.inputs, loss_fn=example.loss_fn, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: trying(plans=0), ConstraintError, "plans"),
        (lambda: trying(steps=2.5), ConstraintError, "steps"),
        (lambda: trying(rounds=-1), ConstraintError, "rounds"),
        (lambda: trying(plan=compiled("2 cpu").plan), PlanError, "chooses among plans"),
        (lambda: trying("2 h100-sxm"), ConstraintError, "the machines that it is for"),
        (lambda: trying("2x1 cpu"), ConstraintError, "the machines that it is for"),
    ],
)
def test_what_cannot_be_tried_is_refused(call: Callable[[], None], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_ranks_of_another_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(ConstraintError, match="a trial starts its ranks itself, or runs under torchrun"):
        trying()
    result = run("trial", *MODEL[:1])
    assert result.exit_code == 2 and "cannot measure the cluster" in result.output


def test_more_ranks_than_cores_are_told_of_and_many_more_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TRIAL, "available_cores", lambda: 2.0)
    with pytest.raises(ConstraintError, match="share this machine's cores") as caught:
        trying("9 cpu")
    assert "at most 8 ranks" in str(caught.value)
    notes = [TRIAL.shared_cores(autopar.ClusterSpec.parse(text)) for text in ("2 cpu", "8 cpu", "8 h100-sxm")]
    assert notes[0] == notes[2] == "" and notes[1].startswith("8 ranks share 2 cores")
    monkeypatch.setattr(TRIAL, "compile_with", lambda *args: args)
    example = mlp()
    cluster = autopar.ClusterSpec.parse("8 cpu")
    options = TrialOptions(example_inputs=example.inputs, loss_fn=example.loss_fn)
    assert TRIAL.first_program(example.model, cluster, options)[1] == cluster


def test_a_strangers_file_is_refused_before_anything_runs(tmp_path: Path, cache: Path) -> None:
    stranger = tmp_path / "plan.yaml"
    stranger.write_text("mine: true\n")
    result = run("trial", *MODEL, "--out", str(stranger))
    assert result.exit_code == 2 and stranger.read_text() == "mine: true\n" and not cache.exists()


# Runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
def test_two_plans_run_on_two_ranks(tmp_path: Path, cache: Path) -> None:
    out, code = tmp_path / "plan.yaml", tmp_path / "program"
    words = ("trial", *MODEL, "--plans", "2", "--rounds", "1", "--steps", "3", "--json")
    result = CliRunner().invoke(app, [*words, "--out", str(out), "--code", str(code)])
    assert result.exit_code == 0, result.output
    output = json.loads(result.stdout)
    assert (output["kind"], output["records"], len(output["plans"])) == ("trial", str(cache), 2)
    measured = [plan["measured_seconds"] for plan in output["plans"]]
    assert all(plan > 0 for plan in measured) and measured[output["chosen"]] == min(measured)
    assert [plan["num_steps"] for plan in output["plans"]] == [3, 3]
    best = output["plans"][output["chosen"]]
    assert trial_report.digest_of(Plan.from_file(out)) == best["digest"]
    assert Plan.from_file(code / "plan.yaml") == Plan.from_file(out)
    records = read_trials(cache)
    assert {plan.plan: plan.measured_seconds for plan in records} == {
        plan["digest"]: plan["measured_seconds"] for plan in output["plans"]
    }
    assert [plan.plan for plan in records if plan.is_chosen] == [best["digest"]]
    planned = run("plan", *MODEL)
    assert "note: a trial on" in planned.output
    chosen_otherwise = output["chosen"] != 0
    assert ("note: the fastest plan in a trial" in planned.output) == chosen_otherwise
    assert "note:" not in run("plan", *MODEL, "--quiet").output


@pytest.mark.slow
@pytest.mark.distributed
def test_a_plan_whose_rank_fails_does_not_end_the_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cluster is a profile, which keeps what was measured of the other plan, twice."""
    profile = write_output(tmp_path / "mine.toml", autopar.ClusterSpec.parse("2 cpu").to_toml())
    whole = TRIAL.step_times
    first = compiled("2 cpu").plan.mesh_text

    def failing(program: CompiledProgram, *rest: Any) -> list[float]:
        if program.plan.mesh_text == first:
            raise MemoryError("no memory for it")
        return list(whole(program, *rest))

    monkeypatch.setattr(TRIAL, "step_times", failing)
    before = None
    for _ in range(2):
        example = mlp()
        result = autopar.trial(
            example.model,
            str(profile),
            example_inputs=example.inputs,
            loss_fn=example.loss_fn,
            plans=2,
            steps=1,
            rounds=1,
        )
        failed, ran = result.report.plans
        assert result.report.chosen == 1 and "no memory for it" in failed.problem
        assert result.plan == ran.plan and result.plan.mesh_text != first
        assert failed.earlier_seconds is None and ran.earlier_seconds == before
        before = ran.measured_seconds
        (kept,) = read_trials(profile)
        assert (kept.plan, kept.measured_seconds, kept.is_chosen) == (ran.digest, before, True)
    assert result.program.cluster == autopar.ClusterSpec.parse(str(profile))


OVER_NODES = """
import json, os, sys
import torch.distributed as dist
import autopar
from examples.models import mlp

trial = sys.modules["autopar.trial"]
whole, failing = trial.step_times, ""

def times(program, *rest):
    if program.plan.mesh_text == failing and dist.get_rank() == 1:
        os._exit(9)
    return whole(program, *rest)

trial.step_times = times
found = []
example = mlp()
options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn}
for _ in range(2):
    result = autopar.trial(example.model, "2x1 cpu", plans=2, steps=1, rounds=1, **options)
    found.append([(each.plan.mesh_text, each.problem, each.earlier_seconds) for each in result.report.plans])
    failing = result.report.plans[0].plan.mesh_text
step = autopar.compile(example.model, "2x1 cpu", plan=result.plan, **options).build()
found.append(float(step(step.local_batch(example.inputs))))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_over_nodes_each_rank_of_torchrun_starts_its_own(tmp_path: Path) -> None:
    """Two nodes of one rank on this machine, and the store that torchrun keeps for them. In the second trial a rank
    dies under the first plan; the scripts then train by the other."""
    (tmp_path / "script.py").write_text(OVER_NODES)
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    shared = {
        **{"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"},
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }
    command, caches = [sys.executable, str(tmp_path / "script.py")], [tmp_path / "node0", tmp_path / "node1"]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "XDG_CACHE_HOME": str(cache)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, cache in enumerate(caches)
    ]
    first, second = (json.loads(rank.communicate(timeout=600)[0].splitlines()[-1]) for rank in ranks)
    assert first[2] == second[2] and [tried[0] for tried in first[0]] == [tried[0] for tried in second[1]]
    assert [[problem for _, problem, _ in outcome] for outcome in (first[0], first[1])] == [
        ["", ""],
        ["rank 1 died with exit code 9", ""],
    ]
    assert all(before is not None for _, _, before in first[1]) and second[1][1][2] is None  # its node has no records
    (kept,) = read_trials(caches[0] / "autopar" / "trials.toml")
    assert kept.is_chosen and not (caches[1] / "autopar" / "trials.toml").exists()
