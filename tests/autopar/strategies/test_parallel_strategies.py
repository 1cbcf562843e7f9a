"""Context and expert parallelism of given strategies, against formulas evaluated by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from autopar.costs.layer_costs import HOST
from autopar.errors import ConstraintError
from autopar.strategies import Predictor
from cost_models import straggler
from cost_models.framework_profiles import Framework, framework
from cost_models.hardware import Device, Link
from cost_models.machine import Cluster
from cost_models.routing import fullest_load
from examples.models import EXAMPLES

ROWS, TOKENS, WIDTH, LAYERS, VOCAB, HEADS = 8, 96, 128, 3, 256, 4
EXPERTS, TOP, FFN = 8, 2, 192
WIRE = 1e9
RATES = {"fp32": 1e12, "fp16": 1e12, "bf16": 1e12}
IDEAL = Device("ideal", 2**40, 1e18, RATES, 0.0, 1.0, 1.0, "a roof", 1.0, host_call_seconds=0.0)
"""Only arithmetic takes time, and all of it at the peak."""
LINK = Link("wire", WIRE, 0.0, "bytes alone")


@pytest.fixture(autouse=True)
def equal_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank waits for a slower one."""
    monkeypatch.setattr(straggler, "variation", lambda device: 0.0)
    straggler.paced.cache_clear()
    yield
    straggler.paced.cache_clear()


def cluster(count: int) -> Cluster:
    return Cluster(IDEAL, 1, count, LINK, LINK)


PUBLISHED = replace(framework("autopar"), cp_habits="published")
"""Keys and values take what crosses the links, without copies of generated programs."""


@cache
def dense() -> Predictor:
    with torch.device("meta"):
        example = EXAMPLES["llama"](
            layers=LAYERS, batch_size=ROWS, seq_len=TOKENS, width=WIDTH, num_heads=HEADS, vocab_size=VOCAB
        )
    return Predictor(example.model, example_inputs=example.inputs, loss_fn=example.loss_fn, precision="fp32")


@cache
def sparse() -> Predictor:
    with torch.device("meta"):
        config = transformers.MixtralConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS, num_local_experts=EXPERTS,
            num_experts_per_tok=TOP, max_position_embeddings=TOKENS,
        )  # fmt: skip
        model = transformers.MixtralForCausalLM(config)
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    return Predictor(model, example_inputs={"input_ids": ids, "labels": ids}, precision="fp32")


def predicted(model: Predictor, count: int = 4, profile: Any = "autopar", **strategy: Any) -> Any:
    given = {"dp": 1, "zero": 0, "micro_batches": 1, "capacity_factor": 1.0} | strategy
    if profile == "autopar":
        given |= {"kernels": "off"}
    return model.predict(cluster(count), given, global_batch_size=ROWS, framework=profile)


def gathered(num_bytes: float, ranks: int) -> float:
    """A ring's all_gather or reduce_scatter, without latency: (n-1)/n B / w."""
    return (ranks - 1) / ranks * num_bytes / WIRE


# --- context ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_of_cp_share_the_arithmetic_evenly(cp: int) -> None:
    whole, part = predicted(dense(), 1, PUBLISHED), predicted(dense(), cp, PUBLISHED, cp=cp)
    for kind in ("forward matmuls", "forward attention", "backward matmuls", "backward attention"):
        assert part.seconds[kind] == pytest.approx(whole.seconds[kind] / cp, rel=1e-6)


def test_gathered_keys_and_values_take_the_alpha_beta_time() -> None:
    cp, micro = 4, 2
    found = predicted(dense(), cp, PUBLISHED, cp=cp, micro_batches=micro)
    both = 2 * (ROWS // micro) * TOKENS * WIDTH * 4
    assert found.seconds["all_gather cp"] == pytest.approx(2 * micro * LAYERS * gathered(both, cp))
    assert found.seconds["reduce_scatter cp"] == pytest.approx(micro * LAYERS * gathered(both, cp))
    again = predicted(dense(), cp, PUBLISHED, cp=cp, micro_batches=micro, recompute="full")
    more = micro * LAYERS * gathered(both, cp)
    assert again.seconds["recomputation"] - more == pytest.approx(
        predicted(dense(), 1, PUBLISHED, micro_batches=micro, recompute="full").seconds["recomputation"] / cp, rel=1e-6
    )


@pytest.mark.parametrize("rate", [2e8, 2e10, 1e12])
def test_a_ring_hides_what_its_steps_compute(rate: float) -> None:
    """Against a loop over the steps of the ring."""
    cp = 4
    spec = replace(cluster(cp), intra_node=replace(LINK, bytes_per_second=rate))
    strategy = {"dp": 1, "cp": cp, "zero": 0, "micro_batches": 1, "cp_exchange": "ring"}
    found = dense().predict(spec, strategy, global_batch_size=ROWS, framework=PUBLISHED)
    part = 2 * ROWS * TOKENS // cp * WIDTH * 4 / rate
    whole = 4 * ROWS * TOKENS * TOKENS * WIDTH / 2 / 1e12  # scores and weighted sum, half of them masked
    exposed = hidden = 0.0
    for passes, compute in ((1, whole / cp), (2, 2.5 * whole / cp)):
        clock = 0.0
        for step in range(cp):
            arrives = clock + passes * part if step < cp - 1 else 0.0
            clock = max(clock + compute / cp, arrives)
        exposed += clock - compute
        hidden += (cp - 1) * passes * part - (clock - compute)
    exposed += part  # the gradients' way home
    assert found.seconds["p2p cp"] == pytest.approx(LAYERS * exposed, rel=1e-6)
    synchronised = found.seconds["gradient and parameter synchronisation"]  # half of which is hidden
    assert found.seconds["hidden communication"] - synchronised == pytest.approx(LAYERS * hidden, rel=1e-4)


def test_parameters_are_replicated_and_sharded_over_dp_x_cp() -> None:
    for zero in (0, 1, 3):
        data, context = predicted(dense(), dp=4, zero=zero), predicted(dense(), dp=2, cp=2, zero=zero)
        for kind in ("parameters", "gradients", "optimizer state"):
            assert context.num_bytes[kind] == pytest.approx(data.num_bytes[kind])
        kind = "gradient and parameter synchronisation"
        assert context.seconds[kind] == pytest.approx(data.seconds[kind])


def test_activations_are_cut_by_cp() -> None:
    whole, part = predicted(dense(), 1), predicted(dense(), 4, cp=4)
    assert part.num_bytes["activations"] == pytest.approx(whole.num_bytes["activations"] / 4, rel=0.01)


def test_unfused_attention_keeps_scores_of_all_keys() -> None:
    profile = replace(framework("fsdp"), overlap=0.0)
    flash, unfused = (predicted(dense(), 4, profile, cp=4, attention=kernel) for kernel in ("fa2", "unfused"))
    scores = LAYERS * ROWS * HEADS * (TOKENS // 4) * TOKENS * 4
    more = unfused.num_bytes["activations"] - flash.num_bytes["activations"]
    assert more == pytest.approx(scores, rel=0.02)


def test_a_framework_exchanges_in_its_own_way() -> None:
    assert "p2p cp" in predicted(dense(), 2, "megatron-2023", cp=2).seconds
    assert "all_gather cp" in predicted(dense(), 2, "torchtitan", cp=2).seconds
    assert "all_gather cp" in predicted(dense(), 2, "megatron-2023", cp=2, cp_exchange="all-gather").seconds


# --- experts ----------------------------------------------------------------------------------------------------------

EXPERT_ELEMENTS = LAYERS * EXPERTS * 3 * WIDTH * FFN
DENSE_ELEMENTS = 2 * VOCAB * WIDTH + WIDTH + LAYERS * (4 * WIDTH * WIDTH + 2 * WIDTH + EXPERTS * WIDTH)


def test_only_chosen_experts_compute() -> None:
    """Floating-point operations of the forward pass, term by term."""
    T = ROWS * TOKENS
    attention = 4 * 2 * T * WIDTH * WIDTH + 4 * T * TOKENS * WIDTH / 2
    mixture = 2 * T * EXPERTS * WIDTH + TOP * 3 * 2 * T * WIDTH * FFN
    wanted = (LAYERS * (attention + mixture) + 2 * T * WIDTH * VOCAB) / 1e12
    for strategy, ranks in (({}, 1), ({"dp": 2, "cp": 2, "ep": 4}, 4)):
        found = predicted(sparse(), ranks, **strategy)
        assert found.seconds["forward compute"] == pytest.approx(wanted / ranks, rel=1e-4)


@pytest.mark.parametrize(
    ("dp", "cp", "ep"), [(4, 1, 1), (4, 1, 2), (4, 1, 4), (2, 2, 4), pytest.param(8, 1, 8, marks=pytest.mark.slow)]
)
def test_experts_are_stored_and_summed_over_their_own_groups(dp: int, cp: int, ep: int) -> None:
    ranks = dp * cp
    found = predicted(sparse(), ranks, dp=dp, cp=cp, ep=ep)
    held = DENSE_ELEMENTS + EXPERT_ELEMENTS // ep
    buffers = found.num_bytes["parameters"] - 4 * held
    assert 0 <= buffers < 4 * 2 * TOKENS * WIDTH  # rotary tables
    assert found.num_bytes["gradients"] == 4 * held
    assert found.num_bytes["optimizer state"] == 8 * held
    seconds = 2 * (gathered(4 * DENSE_ELEMENTS, ranks) + gathered(4 * EXPERT_ELEMENTS / ep, ranks // ep))
    kind = "gradient and parameter synchronisation"
    assert found.seconds[kind] + found.seconds["hidden communication"] == pytest.approx(seconds, rel=1e-6)


def test_zero_shards_experts_over_the_ranks_that_hold_the_same() -> None:
    found = predicted(sparse(), 8, dp=8, ep=2, zero=1)
    state = 8 * (DENSE_ELEMENTS / 8 + EXPERT_ELEMENTS / 2 / 4)
    assert found.num_bytes["optimizer state"] == pytest.approx(state)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_are_sent_twice_each_way(recompute: str) -> None:
    micro, ep = 2, 4
    found = predicted(sparse(), 4, dp=4, ep=ep, micro_batches=micro, recompute=recompute)
    once = gathered(ROWS // 4 // micro * TOKENS * TOP * WIDTH * 4, ep)  # pairwise all_to_all
    assert found.seconds["all_to_all ep"] == pytest.approx(4 * micro * LAYERS * once)
    if recompute == "full":
        plain = predicted(sparse(), 4, dp=4, micro_batches=micro, recompute="full").seconds["recomputation"]
        assert found.seconds["recomputation"] - plain == pytest.approx(2 * micro * LAYERS * once, rel=1e-4)


def test_tokens_cross_between_nodes_as_the_framework_has_it() -> None:
    """Two choices among eight experts on two nodes: 2 (1 - C(4, 2) / C(8, 2)) = 11/7 nodes for each token, and 13/7
    ranks. What is hidden is at most all that a layer computes."""
    ep, row = 4, WIDTH * 4
    slow = Link("slow", WIRE / 100, 0.0, "bytes alone")
    strategy = {"dp": 4, "ep": ep, "zero": 0, "micro_batches": 1, "expert_skew": 0.0}

    def under(name: Framework | str, link: Link = slow) -> Mapping[str, float]:
        cluster = Cluster(IDEAL, 2, 2, LINK, link)
        return sparse().predict(cluster, strategy, global_batch_size=ROWS, framework=name).seconds

    tokens = ROWS // 4 * TOKENS
    load = fullest_load(ep, EXPERTS, TOP, 4 * tokens, 0.0)
    copies = 11 / 7 * fullest_load(2, EXPERTS, TOP, 4 * tokens, 0.0)
    once = tokens * row * (copies / 2 / (WIRE / 100) + load * TOP / 2 / WIRE)
    numbers = tokens * copies * TOP * 4 / 2 / (WIRE / 100)  # 32-bit choices there, weights back, their gradients
    assert under("autopar")["once_per_node ep"] == pytest.approx(LAYERS * (4 * once + 3 * numbers))
    across = load * tokens * TOP * row / 2 / (WIRE / 100)
    assert under("megatron-2023")["all_to_all ep"] == pytest.approx(4 * LAYERS * across)

    bridge = replace(framework("megatron-2023"), dispatches=("all_to_all", "hybrid_ep"), overlap=0.0)
    at_once = math.hypot(tokens * row * copies / 2 / (WIRE / 100), load * tokens * 13 / 7 * row / 2 / WIRE)
    assert under(bridge)["hybrid_ep ep"] == pytest.approx(4 * LAYERS * at_once)
    overlapped = replace(bridge, dispatches=("hybrid_ep_overlapped",))
    fast = Link("fast", WIRE, 0.0, "bytes alone")
    assert "all_to_all ep" in under(bridge, fast)  # where both links are as fast, and at once, once per rank is slower
    bridge = replace(bridge, dispatches=("hybrid_ep",))
    exposed = (under(overlapped, fast)["hybrid_ep_overlapped ep"], under(bridge, fast)["hybrid_ep ep"])
    assert exposed[0] == pytest.approx(exposed[1] / 2)
    none = Link("none", WIRE / 1e9, 0.0, "bytes alone")
    slowest = under(overlapped, none)
    kinds = ("matmuls", "attention", "memory-bound kernels")
    head = 3 * 2 * tokens * WIDTH * VOCAB / 1e12  # is no layer's
    computed = sum(slowest.get(f"{way} {kind}", 0.0) for way in ("forward", "backward") for kind in kinds)
    assert slowest["hidden communication"] - under(bridge, none)["hidden communication"] == pytest.approx(
        computed - head, rel=0.05
    )


@pytest.mark.parametrize("strategy", [{"capacity_factor": 1.5}, {"capacity_factor": None, "expert_skew": 0.4}])
def test_experts_and_exchanges_take_as_long_as_on_the_fullest_rank(strategy: dict[str, Any]) -> None:
    ep = 4
    even, found = (predicted(sparse(), 4, dp=4, ep=ep, **more) for more in ({}, strategy))
    tokens = ROWS * TOKENS
    load = strategy["capacity_factor"] or fullest_load(ep, EXPERTS, TOP, tokens, 0.4)
    arithmetic = LAYERS * TOP * 3 * 2 * tokens / 4 * WIDTH * FFN / 1e12
    more = found.seconds["forward compute"] - even.seconds["forward compute"]
    assert more == pytest.approx((load - 1) * arithmetic, rel=1e-3)
    assert found.seconds["all_to_all ep"] == pytest.approx(load * even.seconds["all_to_all ep"])


def test_experts_wait_for_their_host_as_other_layers_do() -> None:
    """Where nothing but a host takes time, one half as fast makes a step twice as long."""
    given = {"dp": 4, "zero": 0, "micro_batches": 1, "kernels": "off"}
    one, two = (
        sparse().predict(
            Cluster(replace(IDEAL, host_call_seconds=rate), 1, 4, LINK, LINK), given, global_batch_size=ROWS
        )
        for rate in (10.0, 20.0)
    )
    assert one.seconds[HOST] > 0.99 * one.step_seconds
    assert two.step_seconds == pytest.approx(2 * one.step_seconds, rel=1e-3)


def test_one_rank_that_has_all_experts_waits_for_none() -> None:
    even, dropless = (predicted(sparse(), 4, dp=4, capacity_factor=given) for given in (1.0, None))
    assert dropless.step_seconds == even.step_seconds


def test_small_products_of_many_experts_are_padded_each() -> None:
    """Matmuls of a GPU are priced by tiles: few tokens of each expert fill its tiles badly."""
    spec = "4 a100-80g"
    strategy = {"dp": 4, "zero": 0, "micro_batches": 2, "capacity_factor": 1.0}
    apart = sparse().predict(spec, strategy, global_batch_size=ROWS, framework="fsdp")
    joined = sparse().predict(spec, strategy | {"ep": 4}, global_batch_size=ROWS, framework="fsdp")
    assert joined.seconds["forward matmuls"] < apart.seconds["forward matmuls"]


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        (dense, {"cp": 5}, "cp does not divide the positions of sequences"),
        (dense, {"cp": 0}, "cp is a number of ranks"),
        (dense, {"dp": 4, "ep": 2}, "needs a mixture of experts"),
        (sparse, {"dp": 8, "cp": 2, "ep": 16}, "ep does not divide the experts"),
        (sparse, {"dp": 4, "ep": 3}, "cp times a divisor of dp"),
        (sparse, {"dp": 1, "cp": 4, "ep": 2}, "cp times a divisor of dp"),
        (sparse, {"dp": 2, "pp": 2}, "number of devices"),
        (sparse, {"dp": 4, "cp_exchange": "pigeon"}, "cp_exchange is unknown"),
        (sparse, {"dp": 4, "ep": 4, "capacity_factor": 0}, "room for tokens"),
        (sparse, {"dp": 4, "ep": 4, "expert_skew": -1.0}, "expert_skew is a number"),
    ],
)
def test_degrees_that_do_not_divide_are_named_with_what_would(model: Any, strategy: dict[str, Any], words: str) -> None:
    count = strategy.get("dp", 1) * (strategy.get("cp", 1) or 1)
    with pytest.raises(ConstraintError, match=words) as caught:
        predicted(model(), count, "fsdp", **strategy)
    assert caught.value.alternatives


def test_a_model_without_attention_calls_has_no_cp() -> None:
    with torch.device("meta"):
        example = EXAMPLES["mlp"](layers=LAYERS, batch_size=ROWS)
    plain = Predictor(example.model, example_inputs=example.inputs, loss_fn=example.loss_fn, precision="fp32")
    with pytest.raises(ConstraintError, match="no attention call"):
        predicted(plain, 2, cp=2)


def test_experts_of_a_graph_at_hand_are_shared_out() -> None:
    at_hand = Predictor.of_trace(sparse().scored_model().traced, ROWS, "fp32")
    graphs, models = (predicted(predictor, 2, "fsdp", dp=2, ep=2) for predictor in (at_hand, sparse()))
    assert graphs.seconds == models.seconds and graphs.num_bytes == models.num_bytes


# --- narrow formats ---------------------------------------------------------------------------------------------------


def test_narrow_formats_multiply_at_their_peak_and_cast_what_they_read() -> None:
    """Operands are read in 16 bits and written narrow twice, and gradients of results."""
    peaks = {"fp32": 1e9, "fp16": 1e9, "bf16": 1e9, "mxfp8": 2e9, "nvfp4": 4e9}
    device, rows, rate = replace(IDEAL, peak_flops_per_second=peaks, memory_bytes_per_second=1e9), 512, 1e9
    with torch.device("meta"):
        example = EXAMPLES["mlp"](layers=LAYERS, batch_size=rows)
    model = Predictor(example.model, example_inputs=example.inputs, loss_fn=example.loss_fn, precision="bf16")

    def of(precision: str, on: Device = device) -> Mapping[str, float]:
        strategy = {"dp": 1, "zero": 0, "micro_batches": 1}
        given = {"global_batch_size": rows, "framework": "megatron-2023", "precision": precision}
        return model.predict(Cluster(on, 1, 1, LINK, LINK), strategy, **given).seconds

    linears = [each for each in example.model.modules() if isinstance(each, torch.nn.Linear)]
    flops = sum(2 * rows * each.weight.numel() for each in linears)
    read = sum(2 * (each.weight.numel() + rows * each.in_features) for each in linears)
    for precision, bits, passes in (("mxfp8", 8 + 8 / 32, 1), ("nvfp4", 4 + 8 / 16, 2)):
        casts = read * (passes * 16 + 2 * bits) / 16 / rate
        assert of(precision)["forward matmuls"] == pytest.approx(flops / peaks[precision] + casts, rel=1e-3)
    with pytest.raises(ConstraintError, match="no units for this precision"):
        of("nvfp4", IDEAL)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("framework", ["autopar", "megatron-2023"])
def test_dropout_in_attention_does_not_forbid_cp(framework: str) -> None:
    """A framework's kernels drop while they compute, so they take as long as without. autopar's programs exchange heads
    instead; an exchange of keys that the user asks for is refused, as `compile` refuses it."""
    seconds, strategy = {}, {"cp": 2, "dp": 1, "zero": 0, "micro_batches": 2}
    for dropout in (0.0, 0.1):
        example = EXAMPLES["gpt2"](layers=2, batch_size=4, seq_len=64, dropout=dropout)
        predictor = Predictor(example.model, example_inputs=example.inputs, loss_fn=example.loss_fn)
        seconds[dropout] = predictor.predict("2 a100-80g", strategy, framework=framework).step_seconds
    if framework == "megatron-2023":
        assert seconds[0.1] == pytest.approx(seconds[0.0], rel=0.1)
    else:
        with pytest.raises(ConstraintError, match="no attention call"):
            predictor.predict("2 a100-80g", {**strategy, "cp_exchange": "ring"})
