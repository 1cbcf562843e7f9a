"""Kernel times: properties of the roofline, and layers that others timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import catalog
from cost_models.compute import Work, seconds
from cost_models.machine import Device

devices = st.sampled_from(sorted(catalog.devices())).map(catalog.device)
kinds: st.SearchStrategy[Literal["matmul", "attention", "memory"]] = st.sampled_from(["matmul", "attention", "memory"])
amounts = st.floats(0, 1e18)
dims = st.integers(1, 100_000)


@given(devices, kinds, amounts, amounts, amounts, amounts)
def test_more_work_never_takes_less_time(
    device: Device, kind: Literal["matmul", "attention", "memory"], flops: float, num_bytes: float, a: float, b: float
) -> None:
    assert seconds(Work(kind, flops + a, num_bytes + b), device) >= seconds(Work(kind, flops, num_bytes), device)


@given(devices, dims, dims, dims, st.integers(0, 2))
def test_a_larger_matmul_never_takes_less_time(device: Device, m: int, n: int, k: int, grown: int) -> None:
    def matmul(m: int, n: int, k: int) -> float:
        return seconds(Work("matmul", 2.0 * m * n * k, 4.0 * (m * k + k * n + m * n), "fp32", (m, n, k)), device)

    larger = [m, n, k]
    larger[grown] += 1
    assert matmul(*larger) >= matmul(m, n, k) * (1 - 1e-12)


@given(devices, kinds, amounts, amounts)
def test_no_kernel_beats_the_nominal_peaks(
    device: Device, kind: Literal["matmul", "attention", "memory"], flops: float, num_bytes: float
) -> None:
    rate = max(device.memory_bytes_per_second, device.cache_bytes_per_second if kind == "memory" else 0.0)
    bound = max(flops / device.peak("fp32"), num_bytes / rate)
    assert seconds(Work(kind, flops, num_bytes), device) >= bound


@given(devices, dims, dims, dims, st.integers(1, 1000))
def test_no_tiling_beats_the_nominal_peak(device: Device, m: int, n: int, k: int, count: int) -> None:
    flops = 2.0 * m * n * k * count
    assert seconds(Work("matmul", flops, 0, "fp32", (m, n, k)), device) >= flops / device.peak("fp32")


@given(devices, dims, dims, dims, st.integers(1, 1000), st.integers(1, 100))
def test_a_larger_batch_never_takes_less_time(device: Device, m: int, n: int, k: int, count: int, more: int) -> None:
    def batch(count: int) -> float:
        num_bytes = 4.0 * count * (m * k + k * n + m * n)
        return seconds(Work("matmul", 2.0 * count * m * n * k, num_bytes, "fp32", (m, n, k)), device)

    assert batch(count + more) >= batch(count) * (1 - 1e-12)


@given(
    devices,
    st.integers(1, 1000),
    dims,
    dims,
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "fa2", "fa3"]),
)
def test_larger_attention_never_takes_less_time(
    device: Device, heads: int, queries: int, keys: int, grown: int, backward: bool, causal: bool, variant: str
) -> None:
    def attention(heads: int, queries: int, keys: int) -> float:
        flops = 4.0 * 128 * heads * queries * keys * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
        shape = (heads, queries, keys)
        return seconds(Work("attention", flops, 0, "fp32", shape, variant, backward, causal), device)

    larger = [heads, queries, keys]
    larger[grown] += 1
    assert attention(*larger) >= attention(heads, queries, keys) * (1 - 1e-12)


@given(devices, kinds)
def test_no_work_costs_nothing_and_some_costs_a_launch(
    device: Device, kind: Literal["matmul", "attention", "memory"]
) -> None:
    assert seconds(Work(kind, 0, 0), device) == 0
    assert seconds(Work(kind, 1, 1), device) >= device.kernel_launch_seconds > 0


def test_the_asymptotes_are_the_efficiencies() -> None:
    device = catalog.device("a100-80g")
    assert 1e18 / seconds(Work("matmul", 1e18, 0, "bf16"), device) == pytest.approx(0.84 * 312e12, rel=1e-3)
    assert 1e18 / seconds(Work("attention", 1e18, 0, "bf16"), device) == pytest.approx(0.60 * 312e12, rel=1e-3)
    assert 1e15 / seconds(Work("memory", 0, 1e15), device) == pytest.approx(0.77 * 2039e9, rel=1e-3)
    long = (108, 128 * 10_000, 128 * 10_000)
    flash = Work("attention", 1e18, 0, "bf16", long, "fa2")
    assert 1e18 / seconds(flash, device) == pytest.approx(0.73 * 312e12, rel=1e-3)
    assert 1e18 / seconds(replace(flash, backward=True), device) == pytest.approx(0.63 * 312e12, rel=1e-3)
    deep = Work("matmul", 2.0 * 108 * 128 * 128 * 1e8, 0, "bf16", (128 * 108, 128, 100_000_000))
    assert deep.flops / seconds(deep, device) == pytest.approx(0.84 * 312e12, rel=1e-3)


def test_the_ramp_is_where_half_of_the_efficiency_is_reached() -> None:
    device = replace(catalog.device("a100-80g"), kernel_launch_seconds=0.0)
    flops = device.matmul_ramp_seconds * device.peak("bf16")
    assert flops / seconds(Work("matmul", flops, 0, "bf16"), device) == pytest.approx(0.5 * 0.84 * 312e12)


def test_a_cpu_is_priced_by_its_ramps_and_its_own_tile() -> None:
    """The formulas that autopar/profiling/fit_device.py fits: padded to tiles, (T + r) / e, and bytes on top."""
    device = catalog.device("cpu")
    assert device.num_processors == 0
    flops = 2.0 * 100 * 50 * 300
    padded = flops * (112 / 100) * (64 / 50)
    expected = 10e-6 + (padded / 100e9 + 5e-6) / 0.7
    assert seconds(Work("matmul", flops, 0, "fp32", (100, 50, 300)), device) == pytest.approx(expected)
    assert seconds(Work("matmul", flops, 1e6, "fp32", (100, 50, 300)), device) == pytest.approx(expected + 1e6 / 10e9)
    attention = Work("attention", 1e9, 0, "fp32", (8, 100, 100), "fa2", True)
    assert seconds(attention, device) == pytest.approx(10e-6 + (1e9 / 100e9 + 5e-6) / 0.5)
    causal = replace(attention, flops=0.5e9, causal=True)
    assert seconds(causal, device) == pytest.approx(seconds(attention, device))


def test_special_functions_cost_time_of_their_own_on_a_cpu() -> None:
    """Until their bytes take longer."""
    device = replace(catalog.device("cpu"), special_seconds=1e-9)
    plain, many = Work("memory", 0, 8e6), Work("memory", 0, 8e6, specials=1e6)
    assert seconds(many, device) == pytest.approx(seconds(plain, device))
    assert seconds(replace(many, specials=1e7), device) == pytest.approx(10e-6 + 1e-2)


def test_matrices_are_padded_to_tiles() -> None:
    device = catalog.device("h100-sxm")  # the smallest tiles are 64 x 64
    thin = Work("matmul", 2.0 * 65 * 4096**2, 0, "bf16", (65, 4096, 4096))
    full = Work("matmul", 2.0 * 128 * 4096**2, 0, "bf16", (128, 4096, 4096))
    assert seconds(thin, device) == pytest.approx(seconds(full, device), rel=0.02)


def test_one_tile_more_than_a_wave_is_another_wave() -> None:
    """109 tiles of 128 x 128 on the 108 processors of an A100; smaller tiles soften it a little."""
    device = replace(catalog.device("a100-80g"), kernel_launch_seconds=0.0)
    wave = Work("matmul", 2.0 * 108 * 128 * 128 * 8192, 0, "bf16", (108 * 128, 128, 8192))
    more = Work("matmul", 2.0 * 109 * 128 * 128 * 8192, 0, "bf16", (109 * 128, 128, 8192))
    assert 1.7 < seconds(more, device) / seconds(wave, device) <= 2.0


def test_few_tiles_with_a_long_k_are_cut_along_k() -> None:
    """A weight gradient of 256 x 256 has four tiles, yet takes less than four processors of 108 would need."""
    device = catalog.device("a100-80g")
    flops = 2.0 * 256 * 256 * 65536
    on_four = flops / (device.peak("bf16") * 4 / 108)
    assert (
        flops / device.peak("bf16") < seconds(Work("matmul", flops, 0, "bf16", (256, 256, 65536)), device) < on_four / 5
    )


def test_products_of_short_k_wait_for_their_output() -> None:
    """Attention scores: with k = 128 an A100 reaches a third of its peak (1800.2 us, GPT 13B in measured_ops.json)."""
    heads, tokens, depth = 40, 4096, 128
    num_bytes = 2.0 * heads * (2 * tokens * depth + tokens**2)
    scores = Work("matmul", 2.0 * heads * tokens**2 * depth, num_bytes, "fp16", (tokens, tokens, depth))
    assert seconds(scores, catalog.device("a100-40g")) * 1e6 == pytest.approx(1800.2, rel=0.1)


def test_a_cache_serves_what_fits_in_it() -> None:
    device = catalog.device("l4")
    uncached = replace(device, cache_bytes=0, cache_bytes_per_second=0.0)
    small, large = Work("memory", 0, device.cache_bytes / 2), Work("memory", 0, 2.0 * device.cache_bytes)
    assert seconds(small, device) < 0.6 * seconds(small, uncached)
    assert seconds(large, device) == seconds(large, uncached)
    with pytest.raises(ValueError, match="go together"):
        replace(device, cache_bytes=0)


# TFLOP/s on an H100 with head size 128, hidden size 2048 and 16 k tokens, sequences of 512 to 16384: J. Shah et al.,
# "FlashAttention-3" (2024), figures 5 and 6. (variant, backward, causal)
FLASH = {
    ("fa2", False, False): (309, 350, 362, 368, 370, 370),
    ("fa3", False, False): (467, 565, 625, 638, 646, 648),
    ("cudnn", False, False): (497, 574, 617, 609, 600, 595),
    ("fa2", False, True): (191, 260, 298, 319, 333, 335),
    ("fa3", False, True): (292, 423, 521, 579, 602, 616),
    ("cudnn", False, True): (315, 410, 484, 518, 529, 539),
    ("fa2", True, False): (214, 260, 291, 310, 318, 322),
    ("fa3", True, False): (316, 424, 501, 542, 559, 561),
    ("cudnn", True, False): (305, 408, 465, 499, 518, 516),
}


@pytest.mark.parametrize(("variant", "backward", "causal"), FLASH)
def test_flash_attention_against_its_authors_figures(variant: str, backward: bool, causal: bool) -> None:
    device, errors = catalog.device("h100-sxm"), []
    for power, measured in enumerate(FLASH[variant, backward, causal]):
        sequence = 512 * 2**power
        batch = 16384 // sequence
        flops = 4.0 * batch * sequence**2 * 2048 * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
        work = Work("attention", flops, 0, "fp16", (batch * 16, sequence, sequence), variant, backward, causal)
        errors.append(flops / seconds(work, device) / (measured * 1e12) - 1)
    assert max(map(abs, errors)) < 0.30
    assert statistics.median(map(abs, errors)) < 0.08


def test_skinny_matmuls_are_bound_by_their_weights() -> None:
    """Decoding one token reads every weight once: 2 bytes x 16384 x 16384 over the memory."""
    device = catalog.device("h100-sxm")
    num_bytes = 2.0 * 16384**2
    time = seconds(Work("matmul", 2.0 * 16384**2, num_bytes, "bf16", (1, 16384, 16384)), device)
    assert time == pytest.approx(num_bytes / (0.77 * 3352e9), rel=0.1)


def test_impossible_work_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of work 'conv'"):
        Work("conv", 1, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="zero or more"):
        Work("matmul", -1, 0)
    with pytest.raises(ValueError, match="zero or more"):
        Work("matmul", float("nan"), 0)
    with pytest.raises(ValueError, match=r"\(m, n, k\)"):
        Work("matmul", 1, 1, shape=(1, 2))


# Forward microseconds of layers without tensor parallelism, one micro-batch: Dazz993/Mist
# benchmark/superscaler/results-ref/profiled-time-*. (device, dtype, tokens, hidden size, dense [h -> h], GELU [4h])
MIST = [
    ("a100-40g", 4096, 2048, 164.4, 123.6),
    ("a100-40g", 4096, 5120, 823.7, 288.8),
    ("a100-40g", 4096, 8192, 2136.9, 462.7),
    ("v100-32g", 2048, 2048, 225.2, 103.7),
    ("v100-32g", 2048, 4096, 884.5, 186.5),
    ("v100-32g", 2048, 6144, 1809.4, 282.2),
    ("a10g", 2048, 5120, 1585.4, 366.2),
]


def dense_seconds(device: Device, tokens: int, rows: int, columns: int) -> float:
    """A linear layer [tokens, rows] -> [tokens, columns] in fp16."""
    num_bytes = 2.0 * (tokens * rows + rows * columns + tokens * columns)
    return seconds(Work("matmul", 2.0 * tokens * rows * columns, num_bytes, "fp16", (tokens, columns, rows)), device)


@pytest.mark.parametrize(("name", "tokens", "hidden", "dense", "gelu"), MIST)
def test_against_timed_layers(name: str, tokens: int, hidden: int, dense: float, gelu: float) -> None:
    device = catalog.device(name)
    assert dense_seconds(device, tokens, hidden, hidden) * 1e6 == pytest.approx(dense, rel=0.15)
    # GELU reads and writes tokens x 4h in fp16.
    assert seconds(Work("memory", 0, 16.0 * tokens * hidden), device) * 1e6 == pytest.approx(gelu, rel=0.12)


HIDDEN = {
    "gpt-1.3B": 2048, "gpt-2.6B": 2560, "gpt-6.7B": 4096, "gpt-13B": 5120,
    "gpt-20B": 6144, "gpt-22B": 6144, "gpt-40B": 8192,
}  # fmt: skip
CLUSTERS = {
    "a100-sxm4-40gb": ("a100-40g", 4096, 0.06),
    "v100-sxm2-32gb-seq2048": ("v100-32g", 2048, 0.07),
    "a10g": ("a10g", 2048, 0.06),
    "l4": ("l4", 2048, 0.25),  # its clock depends on how warm it is
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_median_error_over_all_timed_linear_layers(cluster: str, measured: Callable[[str], Any]) -> None:
    """Rows without tensor parallelism; weights are printed in MB of fp16."""
    name, sequence, tolerance = CLUSTERS[cluster]
    device = catalog.device(name)
    errors = []
    for row in measured("measured_ops.json")["rows"]:
        if row.get("cluster") != cluster or row["tp"] != 1 or row["algo"] != 0:
            continue
        hidden, tokens = HIDDEN[row["model"]], row["mbs"] * sequence
        for layer in ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1"):
            time, weights = row["ops"][layer][0] * 1e-6, row["ops"][layer][4] * 2**20 / 2
            errors.append(abs(dense_seconds(device, tokens, hidden, round(weights / hidden)) / time - 1))
    assert len(errors) > 50 or cluster == "a100-sxm4-40gb" and len(errors) > 30
    assert statistics.median(errors) < tolerance
