"""What a CPU's host does beside kernels, in prices and predictions."""

from __future__ import annotations

import pytest

from autopar.costs import host
from autopar.costs.peak import peaks
from autopar.costs.specials import specials
from autopar.costs.stage_costs import OWN_CORES, Host, StageCost, simulated
from autopar.ir.graph import Node, Ref
from autopar.ir.plan_data import Pipeline, StagePlan
from cost_models.machine import Cluster


def stage(deferring: float = 0.0) -> StageCost:
    """2 s forward, 4 s backward, of which 1.5 s can be deferred."""
    micro = {"forward compute": 2.0, "backward compute": 4.0}
    return StageCost(micro, {}, 2.0, 4.0, 1.5, {}, peaks([]), deferring)


def pipeline(schedule: str) -> Pipeline:
    return Pipeline(2, schedule, (StagePlan(0, 1), StagePlan(1, 2)))


def seconds(schedule: str, own: Host, deferring: float = 0.0, count: int = 8) -> dict[str, float]:
    found = simulated([stage(deferring)] * 2, pipeline(schedule), count, {(0, 1): 0.0}, host=own)
    return dict(found.prediction.seconds)


def test_actions_take_their_time_in_every_micro_batch() -> None:
    """1F1B with two equal stages takes (m + 1) (f + b)."""
    plain, busy = seconds("1f1b", OWN_CORES), seconds("1f1b", Host(action_seconds=0.25))
    assert sum(plain.values()) == pytest.approx(9 * 6.0)
    assert sum(busy.values()) == pytest.approx(9 * 6.5)
    assert busy["pipeline actions"] == pytest.approx(8 * 0.5)


def test_only_schedules_that_defer_gradients_pay_for_it() -> None:
    own = Host(action_seconds=0.25)
    assert seconds("1f1b", own, deferring=0.5) == seconds("1f1b", own)
    late = seconds("zero-bubble", own, deferring=0.5)
    assert late["deferring weight gradients"] == pytest.approx(8 * 0.5)
    assert late["pipeline actions"] == pytest.approx(8 * 3 * 0.25)
    assert sum(late.values()) >= 8 * (6.0 + 0.5 + 0.75)


def test_on_shared_cores_waiting_is_not_lost() -> None:
    """With half a core each, two pipeline ranks that never work at once would be as fast as one alone."""
    alone, shared = seconds("1f1b", OWN_CORES, count=1), seconds("1f1b", Host(core_share=0.5, carries=True), count=1)
    assert sum(alone.values()) == pytest.approx(2 * 6.0)
    assert sum(shared.values()) == pytest.approx(6.0)
    late = simulated([stage()] * 2, pipeline("1f1b"), 2, {(0, 1): 0.0}, host=Host(core_share=0.5, carries=True))
    assert max(event.end for event in late.timeline.events()) == pytest.approx(late.prediction.step_seconds)
    # Where all pipeline ranks are busy nearly always, there is nothing to share.
    assert sum(seconds("1f1b", Host(core_share=0.9, carries=True)).values()) == pytest.approx(0.9 * 9 * 6.0)


def test_messages_that_a_cpu_receives_are_lost() -> None:
    """One of 5 s per micro-batch and direction: each of two pipeline ranks gets 8, beside its own work of 8 x 6 s."""
    found = simulated([stage()] * 2, pipeline("1f1b"), 8, {(0, 1): 5.0}, host=Host(core_share=0.5, carries=True))
    assert found.prediction.step_seconds == pytest.approx(8 * (6.0 + 5.0))


def test_gpus_hide_their_host() -> None:
    gpu, cpu = Cluster.parse("1x2 h100-sxm"), Cluster.parse("1x2 cpu")
    assert host.launch_seconds(gpu) == host.host_of(gpu).action_seconds == 0.0
    assert host.host_of(cpu).action_seconds == host.ACTION * cpu.device.kernel_launch_seconds > 0


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "forward"),
    [
        ("aten.exp.default", (Ref("x"),), (), 0.6),
        ("aten.add.Tensor", (Ref("x"), 1.0), (), 0.0),
        ("aten.pow.Tensor_Scalar", (Ref("x"), 3.0), (), 0.0),
        ("aten.pow.Tensor_Scalar", (Ref("x"), 1.7), (), 6.0),
        ("aten.gelu.default", (Ref("x"),), (), 1.0),
        ("aten.gelu.default", (Ref("x"),), (("approximate", "tanh"),), 3.0),
    ],
)
def test_specials_by_how_torch_computes_them(
    op: str, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...], forward: float
) -> None:
    assert specials(Node("call", op, args, kwargs, ()))[0] == forward
