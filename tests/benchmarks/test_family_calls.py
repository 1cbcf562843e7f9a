"""`benchmarks.family_calls` against counts by hand, in a process of its own: the interpreter is chosen at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BY_HAND = """
import torch, torch.nn.functional as F
from benchmarks.family_calls import Kernels, counted, launches
from codegen.kernels.rms_norm import rms_norm

x, weight = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
with counted() as eager:
    y = F.linear(x, weight).relu().view(32).to(torch.bfloat16)   # mm, relu, a cast; a view is free
    int(y.argsort()[0])                                          # a sort, a read
    y.float().masked_fill(y > 0, 0.0)                            # a cast, two masks
assert dict(eager.names) == {"mm": 1, "relu": 1, "_to_copy": 2, "sort": 1, "gt": 1, "masked_fill": 1}, eager.names
assert [eager.counts[name] for name in ("calls", "casts", "sorts", "masks", "reads")] == [7, 2, 1, 2, 1]
assert eager.counts["launches"] == 6 + 10

scale = torch.ones(8, requires_grad=True)
with counted() as fused:
    y = rms_norm(x, scale, 1e-6)
assert dict(fused.names) == {"triton forward_kernel": 1}, fused.names

lists = [[torch.ones(1)] * 65] * 2
assert launches("_foreach_copy_", lists) == 2 and launches("_foreach_copy_", [lists[0][:64]] * 2) == 1

kernels = Kernels()
run = torch.compile(lambda a, b: (F.linear(a, b).relu() * 2).sum(), backend=kernels, dynamic=False)
run(x, weight).backward()
# Forward: a product, one kernel of all else; backward: one kernel, two products.
assert kernels.names == {"fused": 2, "mm": 3} and kernels.num_graphs == 2, kernels.names
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_counts_by_hand():
    result = run("-c", BY_HAND)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.slow
def test_a_family_is_counted_on_all_sides():
    result = run("-m", "benchmarks.family_calls", "--family", "bert", "--size", "tiny")
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("bert")]
    assert [row[1] for row in rows] == ["hf", "emitted", "compile"]
    assert all(int(row[2]) > 50 for row in rows[:2])
