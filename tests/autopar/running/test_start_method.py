"""Ranks are forked where a fork can compute gradients, and spawned after a backward that has started threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.running.start_method import why_not_forked
from tests import forked

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import sys, torch, autopar
from torch import nn
from autopar.running.start_method import why_not_forked

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
        self.line = nn.Linear(4, 4)
    def forward(self, x):
        return self.line(x).square().mean()

def loss_of(step):
    return float(step(step.local_batch({"x": torch.ones(4, 4)})))

def main(net, work):
    print("before:", repr(why_not_forked()))
    Nested.apply(torch.ones(1, requires_grad=True), 80).sum().backward()  # more than autograd nests on one thread
    print("after:", repr(why_not_forked()))
    program = autopar.compile(net, "2 cpu", example_inputs={"x": torch.ones(4, 4)}, constraints={"dp": 2})
    if sys.argv[1] != "ask":
        print("launched:", program.launch(work), float(net(torch.ones(4, 4))))

if __name__ == "__main__":
    main(Net(), (lambda step: 1) if sys.argv[1] == "lambda" else loss_of)
"""


def run(case: str, folder: Path) -> tuple[int, str]:
    (folder / "script.py").write_text(SCRIPT)
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = forked.run([str(folder / "script.py"), case], cwd=REPOSITORY, env=environment)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_process_without_such_a_backward_forks() -> None:
    assert why_not_forked() == ""


@pytest.mark.slow
@pytest.mark.distributed
def test_after_a_nested_backward_ranks_are_spawned(tmp_path: Path) -> None:
    code, said = run("spawn", tmp_path)
    assert code == 0 and "before: ''" in said and "after: 'processes cannot be forked here, since autograd" in said
    launched = next(line for line in said.splitlines() if line.startswith("launched:"))
    *ranks, one = (float(word.strip("[],")) for word in launched.split()[1:])
    assert ranks == [pytest.approx(one, rel=1e-6)] * 2


@pytest.mark.slow
@pytest.mark.distributed
def test_what_cannot_be_spawned_then_is_refused_with_the_reason(tmp_path: Path) -> None:
    code, said = run("lambda", tmp_path)
    assert code == 1
    error = said[said.rindex("ConstraintError") :]
    assert all(word in error for word in ("autograd has started threads", "must be picklable", "torchrun")), error
