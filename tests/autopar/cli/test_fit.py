"""`autopar fit`: what its questions share changes no answer, and what they share is made once."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autopar.cli import app, fit
from autopar.cli.options import Flags, read_cluster, read_job
from autopar.compile import planned_alone
from autopar.explain import job_fit as answers
from autopar.explain.job_fit import Answer, Fitted, OnCluster, Planner, Question, fits, fitted_of
from autopar.planning.planner import padded_search
from autopar.report.json_facts import record_json
from autopar.report.tables import plain_text
from autopar.settings.compile_options import CompileOptions
from cost_models.certainty import OWN, spread

FIELDS = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 24,
}  # fmt: skip
CLUSTER, SEQ, BATCH = "2 l4", 16, 4


def alone(model: str, question: Question) -> Fitted:
    """The answer to one question by itself, as `autopar plan` would plan it."""
    length, rows = question.seq_len or SEQ, question.rows or BATCH
    job = read_job(model, question.cluster.num_devices, Flags(seq=length, batch=BATCH), meta=True)
    limits = {"micro_batches": 1} if question.in_one else {}
    inputs, loss = job.inputs, job.loss_fn
    asked = CompileOptions(example_inputs=inputs, loss_fn=loss, constraints=limits, global_batch_size=rows)
    planned = planned_alone(job.model, question.cluster, asked, padded_search)
    return fitted_of(planned.request, planned.best, length)


@pytest.mark.parametrize(
    ("low", "high", "verdict", "line"),
    [
        (60, 79, "fits, 6 GiB of 80 GiB free", "  the job fits: yes (90% interval 60-79 GiB)"),
        (70, 90, "within the error, 6 GiB of 80 GiB free", "  the job fits: within the error (90% interval"),
    ],
)
def test_the_verdict_on_what_fits_by_prediction(low: int, high: int, verdict: str, line: str) -> None:
    own = spread(OWN).certainty({}, 0.0)
    sure = replace(own, low_bytes=low * 2**30, high_bytes=high * 2**30, fit="yes" if high <= 80 else "within the error")
    found = Fitted(CLUSTER, 2, 4, 16, "tp2", 1.0, 64, 64.0, 74 * 2**30, 80 * 2**30, sure)
    one = Answer(found)
    text = plain_text(fit._of_cluster(OnCluster(CLUSTER, one, None, None, one, one, one, one)), 80)
    assert f"{CLUSTER}: {verdict}\n{line}" in text
    assert text.count("; within the error") == (0 if high <= 80 else 4)  # of all answers but that as asked


@pytest.mark.parametrize(("low", "verdict"), [(81, "does not fit"), (79, "within the error")])
def test_the_verdict_on_what_does_not(low: int, verdict: str) -> None:
    sure = spread(OWN).certainty({"parameters": low * 2**30 / spread(OWN).low}, 80 * 2**30)
    none = Answer(words="no plan fits the memory of one rank")
    text = plain_text(fit._of_cluster(OnCluster(CLUSTER, none, 83 * 2**30, sure, none, none, none, none)), 80)
    assert text.startswith(f"{CLUSTER}: {verdict} (no plan fits the memory of one rank; 83 GiB")
    assert ("  the plan with least memory fits: within the error" in text) == (low < 80)


@pytest.mark.slow
def test_fit_gives_the_answers_of_plans_made_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(FIELDS))
    model, counted = f"hf:{config}", Counter[str]()
    monkeypatch.setattr(answers, "MOST_TIMES", 2)

    def count(name: str) -> None:
        called = getattr(fit, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return called(*args, **kwargs)

        monkeypatch.setattr(fit, name, counting)

    monkeypatch.setattr(fit, "spare_processes", lambda: 1)  # what others do is not counted here
    count("traced_of")
    count("planned_alone")
    words = ("fit", model, "--cluster", CLUSTER, "--seq", str(SEQ), "--batch", str(BATCH), "--seconds", "600", "--json")
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    made = json.loads(ran.stdout)
    known = {}

    class Alone(Planner):
        def __call__(self, question: Question) -> Fitted:
            known[question] = alone(model, question)
            return known[question]

    wanted = fits(Alone(), [read_cluster(CLUSTER, None)], seq_len=SEQ, longest=24)
    assert made == json.loads(json.dumps(record_json("fit", wanted)))
    # One trace for each length, and the best plan of each answer alone: others need only be found to fit.
    assert counted["traced_of"] == 2
    assert counted["planned_alone"] == 5 < len(known)
