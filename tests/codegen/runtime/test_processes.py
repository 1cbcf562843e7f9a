"""How a rank that trained to its end leaves."""

from __future__ import annotations

import subprocess
import sys

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
