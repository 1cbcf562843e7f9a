"""Memory of Megatron-Core against the formulas of its papers, and against bytes that its own tests have measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_models.certainty import spread, spreads
from cost_models.megatron_core import Block, Model, Setup, rank_memory
from cost_models.megatron_core.activations import kept_bytes
from cost_models.megatron_core.parameters import dense_parameters, expert_parameters

MIB = 2**20
SMALL = Model(hidden=512, heads=8, kv_heads=8, head_features=64, ffn=2048, vocab=50257, positions=1024)
LAYER = (Block("attention", 1024, 1024), Block("mlp", 1024, 1024))
ONE = Setup(chunks=(LAYER * 12,), micro_batch=4, dp=8, micro_batches=1, distributed_optimizer=True, deterministic=True)


def test_parameters_are_those_of_the_papers_formula() -> None:
    layers, hidden, vocab = 12, 512, 50304  # D. Narayanan et al. (SC 2021), equation 2, and the last norm
    paper = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocab + 1024) / (12 * layers * hidden))
    assert dense_parameters(SMALL, ONE) == paper + 2 * hidden


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (4, False), (2, True), (8, True)])
def test_activations_are_those_of_the_papers_formula(tp: int, sp: bool) -> None:
    setup = replace(ONE, tp=tp, sequence_parallel=sp)
    s, b, h, a = 1024, 4, 512, 8  # V. Korthikanti et al. (MLSys 2023), table 2
    paper = s * b * h / tp * (34 + 5 * a * s / h) if sp else s * b * h * (10 + 24 / tp + 5 * a * s / (h * tp))
    statistics = 2 * 2 * 4 * s * b / (tp if sp else 1)  # fp32 mean and deviation of two norms, which the paper omits
    assert sum(kept_bytes(SMALL, setup, block) for block in LAYER) == pytest.approx(paper + statistics)


@pytest.mark.parametrize(
    ("changes", "allocated", "peak"),
    [
        # Bytes of NVIDIA/Megatron-LM tests/functional_tests/test_cases/gpt, golden_values_dev_dgx_{a100,h100}.json:
        # gpt3_mcore_te_tp1_pp1_dist_optimizer_no_mmap_bin_files, A100 and H100
        ({"generation": "ampere"}, 552128512, 4673069568),
        ({}, 581489664, 4702430720),
        # ..._frozen_resume_torch_dist_dist_optimizer: fused attention on H100 keeps no second result, on A100 it does
        ({"attention": "fused"}, 581488640, 2690742784),
        ({"attention": "fused", "generation": "ampere"}, 552128512, 2711714304),
        # gpt3_mcore_tp1_pp1_..._dist_optimizer_overlap_grad_reduce_param_gather: fp16, Megatron-Core's own layers
        ({"precision": "fp16", "implementation": "local", "generation": "ampere"}, 518880768, 4607767040),
    ],
)
def test_a_dense_rank_is_within_8_kib_of_what_stays_and_a_thousandth_of_the_peak(
    changes: dict[str, str], allocated: int, peak: int
) -> None:
    memory = rank_memory(SMALL, replace(ONE, **changes))
    assert abs(memory.allocated - allocated) < 8192
    assert memory.peak == pytest.approx(peak, rel=1e-3)


def test_megatron_fsdp_shards_eighteen_bytes_of_each_parameter() -> None:
    # gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor_1node, GB200
    setup = replace(ONE, tp=2, dp=2, sharded_parameters=True, attention="fused", generation="blackwell")
    memory = rank_memory(SMALL, setup)
    assert memory.allocated == pytest.approx(9 * dense_parameters(SMALL, setup) + 96 * MIB)
    assert memory.allocated == pytest.approx(394290688, rel=0.01)
    assert memory.peak == pytest.approx(1642060800, rel=0.01)


def test_an_interleaved_stage_keeps_a_group_for_each_earlier_virtual_stage() -> None:
    # gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap, H100: groups of five micro-batches, and 4,622,615,552 bytes at the peak
    setup = replace(
        ONE, chunks=(LAYER,) * 3, pp=4, dp=2, micro_batches=5, group=5, distributed_optimizer=False
    )  # fmt: skip
    memory = rank_memory(SMALL, setup)
    one = sum(kept_bytes(SMALL, setup, block) for block in LAYER)
    assert memory.kept == pytest.approx(11 * one + 2 * 4 * MIB)
    assert memory.peak == pytest.approx(4622615552, rel=5e-3)


def test_stages_hold_the_whole_model_and_the_table_of_words_twice() -> None:
    stages = [replace(ONE, chunks=(LAYER * 3,), pp=4, stage=stage) for stage in range(4)]
    whole = dense_parameters(SMALL, ONE)
    assert sum(dense_parameters(SMALL, stage) for stage in stages) == whole + SMALL.padded_vocab(1) * 512
    untied = replace(SMALL, tied=False)
    assert sum(dense_parameters(untied, stage) for stage in stages) == dense_parameters(untied, ONE)


def test_earlier_stages_keep_more_micro_batches() -> None:
    plain = [replace(ONE, chunks=(LAYER,), pp=4, stage=stage, micro_batches=8) for stage in range(4)]
    assert [len(setup.in_flight) for setup in plain] == [4, 3, 2, 1]
    kept = [rank_memory(SMALL, setup).kept for setup in plain]
    assert kept == sorted(kept, reverse=True)
    chunked = [replace(setup, chunks=(LAYER, LAYER)) for setup in plain]  # warm-up: two a later stage, and a group
    assert [len(setup.in_flight) for setup in chunked] == [11, 9, 7, 5]
    assert chunked[0].in_flight == (0,) * 4 + (1,) * 4 + (0,) * 3


def test_each_way_to_save_memory_saves_what_it_is_about() -> None:
    base = rank_memory(SMALL, ONE)
    scores = 12 * 5 * 4 * 8 * 1024**2  # five bytes per score: softmax, mask and product of the dropout
    core = rank_memory(SMALL, replace(ONE, recompute=("core_attn",)))
    assert base.kept - core.kept == pytest.approx(scores)
    norms = rank_memory(SMALL, replace(ONE, recompute=("layernorm",)))
    assert base.kept - norms.kept == pytest.approx(24 * 4 * MIB)
    full = rank_memory(SMALL, replace(ONE, recompute=("full",)))
    assert full.kept == pytest.approx((12 + 2.5) * 4 * MIB)
    whole = rank_memory(SMALL, replace(ONE, distributed_optimizer=False))
    assert whole.optimizer == 8 * base.optimizer
    assert rank_memory(SMALL, replace(ONE, host_optimizer=1.0)).optimizer == 0
    assert rank_memory(SMALL, replace(ONE, optimizer_bytes=8)).optimizer == pytest.approx(base.optimizer * 2 / 3)


def test_experts_are_sharded_over_their_own_replicas() -> None:
    model = replace(SMALL, experts=8, expert_ffn=2048, has_bias=False)
    blocks = (Block("attention", 1024, 1024), Block("moe", 1024, 1024)) * 2
    setup = replace(ONE, chunks=(blocks,), tp=2, dp=4, ep=4, etp=1, sequence_parallel=True)
    assert expert_parameters(model, setup) == 2 * 2 * 2 * 512 * 2048  # two layers of two experts of two matrices
    dense = dense_parameters(model, setup)
    memory = rank_memory(model, setup)
    assert memory.optimizer == pytest.approx(12 * (dense / 4 + expert_parameters(model, setup) / 2))


def test_words_that_are_not_known_are_refused() -> None:
    with pytest.raises(ValueError, match="modules must be of core_attn"):
        replace(ONE, recompute=("everything",))
    with pytest.raises(ValueError, match="a block must be one of"):
        Block("convolution", 1, 1)
    with pytest.raises(ValueError, match="stage must be below pp"):
        replace(ONE, stage=1)
    with pytest.raises(ValueError, match="must have a block"):
        replace(ONE, chunks=((),))
    with pytest.raises(ValueError, match="attention must be one of"):
        replace(ONE, attention="linear")


def test_bytes_fit_by_the_interval_of_like_rows() -> None:
    spread_of_rows = spread("nanotron")
    low, high = spread_of_rows.interval(100.0)
    assert low < 100 < high
    widest = spread("no such framework")
    assert all(widest.low <= narrower.low and narrower.high <= widest.high for narrower in spreads().values())
