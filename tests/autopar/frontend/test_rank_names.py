"""Ranks whose processes trace one model under calls of other names and order run one program all the same.

A forward that iterates over a set of strings (as Gemma-3's does over its kinds of layers) is traced in the order of the
process's hash seed.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import hashlib, sys
import torch
import torch.distributed as dist
from torch import nn
import autopar

class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.up, self.down = kind, nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, tables):
        return x + self.down(torch.relu(self.up(x * tables[self.kind][0]) * tables[self.kind][1].repeat(1, 2)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(kind) for kind in ("near",) * 3 + ("far",) * 3 + ("near",) * 3])

    def forward(self, x):
        tables = {}
        for kind in {"near", "far", "middle"}:
            angle = torch.arange(8) * {"near": 0.1, "far": 0.7, "middle": 0.3}[kind]
            tables[kind] = angle.cos().unsqueeze(0), angle.sin().unsqueeze(0)
        for layer in self.layers:
            x = layer(x, tables)
        return x

torch.manual_seed(0)
model, batch = Model(), (torch.randn(4, 8), torch.randn(4, 8))
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
"""

RANK = (
    SCRIPT
    + """
dist.init_process_group("gloo")
for constraints in ({"tp": 2, "dp": 1},):
    compiled = autopar.compile(
        model, "2 cpu", example_inputs=batch, loss_fn=nn.functional.mse_loss, optimizer=sgd, constraints=constraints
    )
    step = compiled.build()
    losses = [float(step(compiled.local_batch(batch))) for _ in range(3)]
    print(hashlib.sha256(compiled.source.encode()).hexdigest()[:12], losses)
reference = sgd(model.parameters())
expected = []
for _ in range(3):
    reference.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    reference.step()
    expected.append(float(loss))
print("-", expected)
dist.destroy_process_group()
"""
)

NAMES = (
    SCRIPT
    + """
compiled = autopar.compile(
    model, "2 cpu", example_inputs=batch, loss_fn=nn.functional.mse_loss, constraints={"tp": 2, "dp": 1}
)
open(sys.argv[1], "w").write(compiled.plan.to_yaml())
again = [autopar.compile(
    model, "2 cpu", example_inputs=batch, loss_fn=nn.functional.mse_loss, plan=path
) for path in sys.argv[2:]]
print("read", len(again))
"""
)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_with_other_hash_seeds_train_as_one_process(tmp_path):
    port = str(free_port())
    ranks = []
    for rank, seed in enumerate(("2", "5")):
        ranks.append(started(RANK, tmp_path, seed, RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port))
    texts = [finished(rank) for rank in ranks]
    assert texts[0] == texts[1]
    *programs, (_, expected) = [line.split(" ", 1) for line in texts[0].splitlines()]
    assert len(programs) == 1
    for _, losses in programs:
        assert eval(losses) == pytest.approx(eval(expected), rel=1e-5)


@pytest.mark.slow
def test_a_plan_is_read_back_under_any_hash_seed(tmp_path):
    """The formal names of a layer class do not count calls of the whole model."""
    plans: list[str] = []
    for seed in ("1", "2"):  # which iterate over the kinds in other orders
        path = str(tmp_path / f"plan_{seed}.yaml")
        assert f"read {len(plans)}" in finished(started(NAMES, tmp_path, seed, path, *plans))
        plans.append(path)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def started(script: str, folder: Path, seed: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    path = folder / f"script_{seed}.py"
    path.write_text(script, encoding="utf-8")
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", **environment}
    command = [sys.executable, "-W", "ignore", str(path), *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err[-2000:]
    return out
