"""`autopar fit` against brute force: all lengths, batches and numbers of devices are planned, for the same answers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.cluster import ClusterSpec
from autopar.compile import planned_alone
from autopar.errors import ClusterError, InfeasibleError, ModelError
from autopar.explain.job_fit import Fitted, Planner, Question, fits, fitted_of, halves, lengths
from autopar.planning.planner import padded_search
from autopar.settings.compile_options import CompileOptions
from cost_models.certainty import Certainty
from cost_models.machine import Cluster

FOUR = Cluster.parse("4 l4")


class MadeUp(Planner):
    """A planner whose memory is `rows * tokens` over the devices. room: of one device."""

    def __init__(self, room: int, rows: int = 8, seq_len: int = 64) -> None:
        self.room, self.rows, self.seq_len, self.asked = room, rows, seq_len, list[Question]()

    def __call__(self, question: Question) -> Fitted:
        self.asked.append(question)
        rows, tokens = question.rows or self.rows, question.seq_len or self.seq_len
        devices = question.cluster.num_devices
        if rows * tokens > self.room * devices:
            raise InfeasibleError("no plan fits")
        return Fitted(
            str(question.cluster),
            devices,
            rows,
            tokens,
            "",
            36.0,
            rows * tokens,
            1.0,
            rows * tokens / devices,
            self.room,
            Certainty(0.0, 0.0, "yes"),
        )


@pytest.mark.parametrize("room", [*range(128, 400, 13), 1000, 5000, 40000])
def test_every_answer_is_that_of_brute_force(room: int) -> None:
    planner = MadeUp(room)
    on = fits(planner, [FOUR], seq_len=64, longest=1000).clusters[0]
    assert on.asked.found and on.longest.found and on.largest.found and on.fewest.found
    assert on.longest.found.seq_len == max(n for n in lengths(64, 1000) if 8 * n <= 4 * room)
    assert on.largest.found.rows == max(n for n in range(4, 64 * 8 + 1, 4) if n * 64 <= 4 * room)
    assert on.fewest.found.num_devices == min(n for n in (4, 2, 1) if n * room >= 8 * 64)
    assert len(planner.asked) == len(set(planner.asked)) < 45


@pytest.mark.parametrize("room", [1, 17, 40, 100, 127])
def test_what_does_not_fit_has_a_shorter_sequence(room: int) -> None:
    on = fits(MadeUp(room), [FOUR], seq_len=64, longest=1000).clusters[0]
    fitting = [n for n in lengths(64, 1000) if 8 * n <= 4 * room]
    assert on.asked.found is None and on.fewest.found is None
    assert (on.longest.found.seq_len if on.longest.found else None) == max(fitting, default=None)


def test_time_that_is_up_leaves_the_best_known_answer() -> None:
    on = fits(MadeUp(10_000), [FOUR], seq_len=64, seconds=0.0).clusters[0]
    assert on.longest.found == on.asked.found and "time limit" in on.longest.words
    assert "time limit" in on.fewest.words


def test_prices() -> None:
    other = Cluster.parse("2 h100-sxm")
    found = fits(MadeUp(10_000), [FOUR, other], no_seq="not asked", prices={"l4": 1.0, "h100-sxm": 3.0})
    first, second = found.clusters
    assert first.dollars == pytest.approx(4 * 1.0 * 36 / 3600) and second.dollars == pytest.approx(2 * 3.0 * 36 / 3600)
    assert first.dollars_per_million_tokens == pytest.approx(0.04 / 512 * 1e6)
    assert found.cheapest == str(FOUR) and first.longest.words == "not asked"
    with pytest.raises(ClusterError, match="has no entry for a device"):
        fits(MadeUp(10_000), [FOUR, other], prices={"l4": 1.0})


def test_what_is_wrong_other_than_memory_is_raised() -> None:
    class Unknown(Planner):
        def __call__(self, question: Question) -> Fitted:
            raise ModelError("no such model")

    with pytest.raises(ModelError):
        fits(Unknown(), [FOUR])


class Hinting(MadeUp):
    """Finds out of questions that need half the room or less that they fit, without a plan."""

    def fits_soon(self, question: Question) -> bool:
        rows, tokens = question.rows or self.rows, question.seq_len or self.seq_len
        return rows * tokens <= 0.5 * self.room * question.cluster.num_devices


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("room", [1, 40, *range(128, 400, 13), 1000, 5000, 40000])
def test_what_is_found_out_without_plans_changes_no_answer(room: int) -> None:
    plain, hinting = MadeUp(room), Hinting(room)
    wanted, found = (fits(each, [FOUR], seq_len=64, longest=1000) for each in (plain, hinting))
    assert found == wanted == fits(plain, [FOUR], seq_len=64, longest=1000, processes=3)
    assert len(hinting.asked) == len(set(hinting.asked)) <= len(plain.asked)


def test_halves() -> None:
    assert [str(c) for c in halves(Cluster.parse("2x4 l4"))] == ["4 l4", "2 l4", "1 l4"]


class Planned(Planner):
    """The real planner of a small model of rows [batch, tokens, 32]."""

    def __init__(self, memory: int, **pins: int) -> None:
        layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
        self.model, self.limits = nn.Sequential(*layers), {"memory": memory, **pins}
        self.answers: dict[Question, Fitted | InfeasibleError] = {}

    def __call__(self, question: Question) -> Fitted:
        """Plan once for equal questions."""
        if question not in self.answers:
            try:
                self.answers[question] = self._planned(question)
            except InfeasibleError as error:
                self.answers[question] = error
        answer = self.answers[question]
        if isinstance(answer, InfeasibleError):
            raise answer
        return answer

    def _planned(self, question: Question) -> Fitted:
        length = question.seq_len or 16
        limits = self.limits | ({"micro_batches": 1} if question.in_one else {})
        options = CompileOptions(
            example_inputs=(torch.zeros(8, length, 32),),
            loss_fn=_mean_square,
            constraints=limits,
            global_batch_size=question.rows or 8,
        )
        planned = planned_alone(self.model, question.cluster, options, padded_search)
        return fitted_of(planned.request, planned.best, length)

    def does(self, question: Question) -> bool:
        try:
            self(question)
        except InfeasibleError:
            return False
        return True


def _mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


@pytest.mark.slow
def test_real_plans_are_those_of_brute_force() -> None:
    cluster = ClusterSpec.parse("2 l4")
    assert isinstance(cluster, Cluster)
    budget = Planned(2**34)(Question(cluster, rows=24, in_one=True)).peak_bytes  # most of it is reserved for the driver
    planner = Planned(int(budget))
    on = fits(planner, [cluster], seq_len=16, longest=128).clusters[0]
    assert on.asked.found and on.in_one.found and on.longest.found and on.fewest.found
    assert max(f.peak_bytes for f in (on.asked.found, on.in_one.found, on.longest.found)) <= budget
    fit_lengths = [n for n in lengths(16, 128) if planner.does(Question(cluster, seq_len=n))]
    assert on.longest.found.seq_len == max(fit_lengths)
    batches = range(on.in_one.found.rows - 2, on.in_one.found.rows + 5, 2)
    assert on.in_one.found.rows == max(n for n in batches if planner.does(Question(cluster, rows=n, in_one=True)))
    smallest = [n for n in (2, 1) if planner.does(Question(Cluster.parse(f"{n} l4"), rows=8))]
    assert on.fewest.found.num_devices == min(smallest)
