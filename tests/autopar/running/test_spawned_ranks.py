"""Scripts on a machine with GPUs, whose ranks are spawned: what those could not import is told before any begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import forked

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import multiprocessing, sys, torch
from torch import nn
from autopar import Trainer, TrainerConfig, launch

launch._start_method = lambda: "spawn"
started = []
multiprocessing.get_context("spawn").Process.start = lambda process: started.append(process)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
    def forward(self, x):
        return self.line(x).square().mean()

def train(net):
    try:
        Trainer(net, TrainerConfig(cluster="2 cpu", steps=1), [{"x": torch.ones(4, 4)}]).fit()
    finally:
        print("started", len(started))

if sys.argv[1] == "bare":
    train(Net())
if __name__ == "__main__":
    class Guarded:
        class Inner(nn.Tanh):
            pass
    def local():
        class Local(Net):
            pass
        return Local()
    if sys.argv[1] == "guarded":
        net = Net()
        net.line = nn.Sequential(net.line, Guarded.Inner())
        train(net)
    if sys.argv[1] == "local":
        train(local())
"""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("case", "said"),
    [
        pytest.param(
            "bare", ["would make this call again", "line 24 of", "__main__", "torchrun"], marks=pytest.mark.slow
        ),
        ("guarded", ["must be in a module", "Guarded under", "in another module", "torchrun"]),
        pytest.param("local", ["must be picklable", "local.<locals>.Local", "torchrun"], marks=pytest.mark.slow),
    ],
)
def test_what_spawned_ranks_cannot_have_is_refused_before_they_start(
    case: str, said: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = forked.run([str(script), case], cwd=REPOSITORY, env={"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"})
    assert ended.returncode == 1 and "started 0" in ended.stdout
    error = ended.stderr[ended.stderr.rindex("ConstraintError") :]
    assert all(word in error for word in said), error
