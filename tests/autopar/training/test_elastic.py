"""A run on two nodes (torchrun agents on this machine) that loses one plans anew for what is left, and goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import autopar

SCRIPT = '''
import json, os, sys, time
from pathlib import Path
import torch
from autopar import Trainer, TrainerConfig
from examples.models import EXAMPLES

home, ranks = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = EXAMPLES["gpt2"](layers=1, width=16, num_heads=2, batch_size=4, seq_len=8, dropout=0.1).model

def batches(start):
    """Rows that depend on the sample alone. In the first run the second node stops at the fifth step."""
    while True:
        if ranks == 4 and start == 16 and os.environ["NODE"] == "second":
            (home / "ready").touch()
            time.sleep(600)
        rows = [torch.randint(64, (8,), generator=torch.Generator().manual_seed(start + i)) for i in range(4)]
        yield {"input_ids": torch.stack(rows), "labels": torch.stack(rows)}
        start += 4

parallel = {"auto_parallel": False} if ranks == 1 else {"cluster": f"{ranks} cpu"}
config = TrainerConfig(**parallel, steps=8, checkpoint_directory=str(home / f"checkpoints-{ranks == 1}"),
                       checkpoint_every=2, log_every=0)
result = Trainer(model, config, batches).fit()
if os.environ.get("RANK", "0") == "0":
    found = {"ranks": ranks, "first": result.first_step, "losses": result.losses}
    (home / f"result-{ranks}.json").write_text(json.dumps(found))
'''


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parents by Linux's means")
def test_a_run_that_loses_a_node_goes_on_with_the_rest(tmp_path: Path) -> None:
    """Four ranks, then two, from the last checkpoint at its sample: the losses of one process throughout."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    outside = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    repository = str(Path(autopar.__file__).parents[1])
    more = {"PYTHONPATH": repository, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "run"),
        *("--rdzv-conf", "last_call_timeout=15", str(script), str(tmp_path)),
    ]
    agents: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for node in ("first", "second"):
            log = (tmp_path / f"{node}.log").open("wb")
            agents[node] = subprocess.Popen(
                command, env=outside | more | {"NODE": node}, stdout=log, stderr=log, start_new_session=True
            )
            _wait_for_store(port)  # which then is the first agent's, and outlives the second
        until = time.monotonic() + 500
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < until and agents["second"].poll() is None, _logs(tmp_path)
            time.sleep(0.2)
        os.killpg(agents["second"].pid, signal.SIGKILL)
        assert agents["first"].wait(500) == 0, _logs(tmp_path)
    finally:
        for agent in agents.values():
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    subprocess.run([sys.executable, str(script), str(tmp_path)], env=outside | more, check=True, timeout=400)
    alone = json.loads((tmp_path / "result-1.json").read_text())
    rest = json.loads((tmp_path / "result-2.json").read_text())
    assert (rest["first"], len(rest["losses"]), len(alone["losses"])) == (4, 4, 8)
    assert rest["losses"] == pytest.approx(alone["losses"][4:], rel=1e-5)


def _wait_for_store(port: int) -> None:
    until = time.monotonic() + 200
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            return
        time.sleep(0.2)
    raise AssertionError("the first agent does not come up")


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
