"""Ranks started by a process that has run a backward on threads of its own, in a script with and without a guard:
they compute what one process does, or the reason why they cannot be started is told."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmarks.faults.case import Case, Result, drawn

SECONDS = 240.0
_SCRIPT = """
import sys
import torch
import autopar
from torch import nn
from torch.utils.checkpoint import checkpoint

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
        return gradient, None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(8, 8)
    def forward(self, x):
        return self.line(x).square().mean()

def loss_of(step, batch):
    return float(step(step.local_batch(batch)))

def main():
    before, how, _ = sys.argv[1:]
    line, x = nn.Linear(8, 8), torch.randn(4, 8)
    if before == "nested":
        Nested.apply(torch.ones(1, requires_grad=True), 80).sum().backward()
    if before == "reentrant":
        checkpoint(line, x.clone().requires_grad_(), use_reentrant=True).sum().backward()
    if before == "compiled":
        torch.compile(line, backend="aot_eager")(x).sum().backward()
    net, batch = Net(), {"x": x}
    want = float(net(x))
    if how == "verify":
        is_right = autopar.verify(net, "2 cpu", example_inputs=batch, constraints={"dp": 2}).ok()
    elif how == "fit":
        config = autopar.TrainerConfig(cluster="2 cpu", steps=1, log_every=0)
        is_right = abs(autopar.Trainer(net, config, [batch]).fit().losses[0] - want) < 1e-5
    else:
        program = autopar.compile(net, "2 cpu", example_inputs=batch, constraints={"dp": 2})
        is_right = all(abs(loss - want) < 1e-5 for loss in program.launch(loss_of, batch))
    print("right" if is_right else "wrong")

def told():
    try:
        main()
    except autopar.errors.AutoparError as error:
        print("refused:", str(error).splitlines()[0])

if sys.argv[3] == "bare":
    told()
if __name__ == "__main__" and sys.argv[3] != "bare":
    told()
"""


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """Each takes ten seconds where ranks are forked, and a minute where they are spawned."""
    kinds = [
        (before, how, where)
        for before in ("nested", "reentrant", "compiled")
        for how in ("launch", "fit", "verify")
        for where in ("guarded", "bare")
    ]
    found = (Case(" ".join(kind), partial(_tried, *kind)) for kind in kinds)
    yield from drawn(found, count, seed)


def _tried(before: str, how: str, where: str) -> Result:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        script = Path(folder, "script.py")
        script.write_text(_SCRIPT)
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TMPDIR": folder}
        command = [sys.executable, str(script), before, how, where]
        try:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Result("hangs", f"not ended after {SECONDS:.0f} s")
        said = (ended.stdout.strip().splitlines() or [""])[-1]
        if ended.returncode == 0 and said == "right":
            return Result("right")
        if ended.returncode == 0 and said.startswith("refused:"):
            return Result("refused", said)
        return Result("raw", (ended.stderr.strip().splitlines() or [said])[-1])
