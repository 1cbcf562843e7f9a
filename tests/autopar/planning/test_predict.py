"""A prediction tells apart what the search added up: the sums must be equal, for any choices and not only the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costs import pipeline_costs
from autopar.ir.chain import chain
from autopar.planning.planner import search_plans
from autopar.planning.predict import one_stage_costs
from autopar.planning.user_plans import reprice
from autopar.sharding.call_options import options_of
from cost_models import compute
from search.problem import evaluate
from tests.autopar.requests import (
    BATCH,
    request_for,
    searched_activation_bytes,
    setting,
    shared_reshard_seconds,
    take_nothing_for_parted,
)

SETTINGS = [
    ("llama", "dp2 x tp2", 1),
    ("llama", "dp2 x tp2", 4),
    ("gpt2", "dp2 x tp2", 2),
    ("bert", "tp4", 1),
    ("nanogpt", "dp4", 2),
    pytest.param("llama", "ttp2 x tp2", 1, marks=pytest.mark.slow),
]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("name", "mesh", "micro_batches"), SETTINGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_seconds_and_bytes_add_up_to_the_searchs(
    name: str, mesh: str, micro_batches: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What several readers share is counted once, which edges do not see. Random decisions may also part by reshards
    what passes would join: then they take longer, and other sums run beside weight gradients."""
    it = setting(name, mesh, micro_batches)
    if not seed:
        chosen, assignment = it.assignment(seed)
        seconds = evaluate(it.search_space.problem, chosen)[0] - shared_reshard_seconds(it, assignment)
        emitted = one_stage_costs(it.graph, it.operators, it.pricer, assignment).simulated().prediction.step_seconds
        assert emitted == pytest.approx(seconds, rel=1e-9)
    it = it.without_overlap()
    chosen, assignment = it.assignment(seed)
    seconds, num_bytes = evaluate(it.search_space.problem, chosen)
    seconds -= shared_reshard_seconds(it, assignment)
    emitted = one_stage_costs(it.graph, it.operators, it.pricer, assignment).simulated().prediction.step_seconds
    assert emitted >= seconds * (1 - 1e-9)
    take_nothing_for_parted(monkeypatch)
    costs = one_stage_costs(it.graph, it.operators, it.pricer, assignment)
    prediction = costs.simulated().prediction
    assert prediction.step_seconds == pytest.approx(seconds, rel=1e-9)
    own = [costs.ranks[0].costs[unit] for unit in chain(it.graph)]
    kept_bytes = searched_activation_bytes(it, assignment)
    assert sum(cost.fixed_bytes for cost in own) + kept_bytes == pytest.approx(num_bytes, rel=1e-9)
    # Copies of resharded tensors that several calls keep are counted by the prediction alone.
    kept = {kind: value for kind, value in prediction.num_bytes.items() if kind not in ("transient", "workspace")}
    assert sum(kept.values()) >= num_bytes * (1 - 1e-9)


def test_random_choices_differ_from_the_best() -> None:
    """So that the test above looks at more than one plan."""
    it = setting("llama", "dp2 x tp2")
    costs = [evaluate(it.search_space.problem, it.assignment(seed)[0])[0] for seed in range(3)]
    assert len(set(costs)) == 3 and min(costs) == costs[0]


def test_weights_gradients_and_state_of_plain_data_parallelism() -> None:
    """16 bytes per parameter in fp32 with AdamW, whatever the layers."""
    it = setting("gpt2", "single")
    _, assignment = it.assignment(0)
    prediction = one_stage_costs(it.graph, it.operators, it.pricer, assignment).simulated().prediction
    trained = sum(p.meta.numel for p in it.graph.parameters if not p.is_buffer)
    found = {kind: prediction.num_bytes[kind] for kind in ("parameters", "gradients", "optimizer state")}
    assert found == {"parameters": 4 * trained, "gradients": 4 * trained, "optimizer state": 8 * trained}
    assert not any(" dp" in kind or " tp" in kind for kind, value in prediction.seconds.items() if value)


def test_a_shared_tables_second_copy_is_gathered_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2's token table under ZeRO-3: the last pipeline rank gathers the whole of its own copy, 1024 x 512 in
    fp32."""
    request = request_for("gpt2", "4 cpu", pp=2, dp=2, tp=1, zero=3, micro_batches=2, schedule="1f1b", recompute="none")
    plan = search_plans(request).best.plan
    monkeypatch.setattr(pipeline_costs, "second_copies", lambda *_: ())
    bare = reprice(request, plan).best.plan
    pipeline_ranks = zip(plan.prediction.pipeline_ranks, bare.prediction.pipeline_ranks, strict=True)
    more = [sum(counted.values()) - sum(left_out.values()) for counted, left_out in pipeline_ranks]
    assert more[0] == 0 and more[1] >= 1024 * 512 * 4


def test_a_factor_that_is_not_trained_saves_its_own_product() -> None:
    """Of a linear layer's backward: x's gradient is rows x depth by columns, the weight's columns x depth by rows."""
    it = setting("llama", "single")
    linears = [o for (s, _), o in it.operators.items() if s and o.node.op == "aten.linear.default"]
    wide = next(o for o in linears if o.node.meta.shape[-1] > o.inputs[0].shape[-1])
    (option, *_), device = options_of(wide, it.pricer.mesh), it.pricer.cluster.device
    rows, depth, columns = BATCH * 32, wide.inputs[0].shape[-1], wide.node.meta.shape[-1]
    moved = 4.0 * (rows * depth + depth * columns + rows * columns)
    for trained, shape in ((0, (rows, depth, columns)), (1, (columns, depth, rows))):
        inputs = tuple(replace(meta, requires_grad=i == trained) for i, meta in enumerate(wide.inputs))
        _, backward = it.pricer.operator_seconds(replace(wide, inputs=inputs), option)
        work = compute.Work("matmul", 2.0 * rows * depth * columns, moved, "fp32", shape)
        assert backward == pytest.approx(compute.seconds(work, device), rel=1e-9)
    forward, backward = it.pricer.operator_seconds(wide, option)
    assert it.pricer.weight_seconds(wide, option, forward + backward) == pytest.approx(compute.seconds(work, device))
