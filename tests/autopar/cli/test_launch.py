"""`autopar launch`: a script in as many processes as a plan has ranks, and the error of the rank that fails."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import autopar
from autopar.launch import RankError, launch_main
from examples.models import EXAMPLES
from tests import forked

SCRIPT = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, (int(os.environ["LOCAL_RANK"]), sys.argv[1:]))
if dist.get_rank() == 0:
    print(found, flush=True)
if "--fail" in sys.argv and dist.get_rank() == 1:
    raise RuntimeError("the disk of rank 1 is full")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_script_runs_in_as_many_processes_as_the_plan_has_ranks(tmp_path: Path) -> None:
    example = EXAMPLES["gpt2"](layers=1, width=16, num_heads=2, batch_size=6, seq_len=8)
    program = autopar.compile(example.model, "3 cpu", example_inputs=example.inputs)
    (tmp_path / "plan.yaml").write_text(program.plan.to_yaml())
    (tmp_path / "script.py").write_text(SCRIPT)
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = outside | {"PYTHONPATH": str(Path(autopar.__file__).parents[1])}

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        return forked.run(["-m", "autopar", "launch", "plan.yaml", "--", *words], cwd=tmp_path, env=environment)

    done = launch("script.py", "--name", "a b")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == str([(rank, ["--name", "a b"]) for rank in range(3)])
    failed = launch("script.py", "--fail")
    assert failed.returncode == 1
    last = failed.stderr.strip().splitlines()[-1]
    assert last == "error: rank 1 of script.py: RuntimeError: the disk of rank 1 is full"
    missing = launch("other.py")
    assert missing.returncode == 2 and "the script does not exist" in missing.stderr


EARLY = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from codegen.runtime import watch
from codegen.runtime.board import Board
here = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    own = watch.Watch(Board.at(os.environ["AUTOPAR_BOARD"], 2), 0)
    here.touch()
    while True:
        time.sleep(0.1)
while not here.exists():
    time.sleep(0.01)
raise ValueError("this rank has no such library")
"""


@pytest.mark.slow
def test_a_rank_that_ends_before_it_has_joined_is_named_with_its_error(tmp_path: Path) -> None:
    """Rank 0, which has joined, is ended by the launcher."""
    script = tmp_path / "script.py"
    script.write_text(EARLY)
    with pytest.raises(RankError, match="rank 1 of .*: ValueError: this rank has no such library"):
        launch_main(script, [str(tmp_path / "here"), str(Path(autopar.__file__).parents[1])], 2)


LOSING = """
import os, sys, time
said = sys.argv[1]
if os.environ["RANK"] == "1":
    print("ValueError: there is no such sample", file=sys.stderr, flush=True)
    open(said, "w").close()
    time.sleep(60)
while not os.path.exists(said):
    time.sleep(0.01)
time.sleep(1)
sys.exit("RuntimeError: Connection closed by peer [127.0.0.1]:5017.")
"""


def test_the_rank_that_failed_is_named_where_another_ends_first(tmp_path: Path) -> None:
    """Rank 0 is told that rank 1 is gone, and ends before it."""
    script = tmp_path / "script.py"
    script.write_text(LOSING)
    with pytest.raises(RankError, match="rank 1 of .*: ValueError: there is no such sample"):
        launch_main(script, [str(tmp_path / "said")], 2)
