"""How a rank joins the others, and how one that trained to its end leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from codegen.runtime import processes

SCRIPT = """
import atexit
from codegen.runtime import processes


class Held:
    def __del__(self):
        print("taken apart", end=" ")


held = Held()
atexit.register(lambda: print("registered", end=" "))
print("written", end=" ")
processes.leave(3)
"""


def test_what_is_registered_runs_what_is_written_arrives_and_nothing_is_taken_apart() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.split()) == (3, ["written", "registered"]), done.stderr


def test_port_0_is_refused_instead_of_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(ValueError, match="--standalone"):
        processes.join("gloo")
