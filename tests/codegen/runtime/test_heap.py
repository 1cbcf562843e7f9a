"""Freed memory that is kept, by the pages that the system has to clear for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FAULTS = """
import resource, sys
import torch
from codegen.runtime.heap import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "keep" else False
torch.set_num_threads(1)
for step in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.ones(2**20) for _ in range(8)]
    del activations
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 8 * 2**22 // 4096


def faults(mode: str, **variables: str) -> tuple[str, int]:
    """(what keep_freed_memory said, page faults of the last of eight steps)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | variables
    command = [sys.executable, "-c", FAULTS, mode]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's heap")
def test_a_step_gets_the_memory_that_the_last_one_freed() -> None:
    """Without it most runs clear 6,000 to 8,200 pages in every step; some happen to have a block at the heap's top."""
    kept, count = faults("keep")
    assert kept == "True"
    assert count < PAGES // 100


@pytest.mark.slow
def test_whoever_has_set_the_heap_up_keeps_it() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
