"""Ranks that torchrun started for a trial on several nodes. Each starts a new process for every run: a run that fails
ends alone."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from autopar.errors import ConstraintError

_numbers = itertools.count()
"""Numbers the `TorchrunRank`s of this process. Every rank makes them in the same order."""
LONGEST_SECONDS = 24 * 3600.0
"""How long a rank waits for the others' outcomes. Each rank limits its own runs; torchrun ends all ranks together."""


class TorchrunRank:
    """This process as a rank of torchrun. Ranks exchange outcomes through torchrun's store, without a process group.

    rank, size: over all nodes; local_rank, local_size: on this one.
    """

    def __init__(self) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
            raise ConstraintError(
                "a trial starts its ranks itself, or runs under torchrun",
                values="a process group" if dist.is_initialized() else "another launcher",
                alternatives=[
                    "torchrun ... -m autopar trial MODEL",
                    "autopar trial without a launcher, on one machine",
                ],
            )
        self.rank, self.size, self.local_rank, self.local_size = (int(os.environ[name]) for name in names)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._name, self._num_runs = f"autopar/trial_{attempt}/{next(_numbers)}", 0
        self._store = _store(self._name, self.size, LONGEST_SECONDS)

    def next_run(self) -> Callable[[float], Any]:
        """Return a factory of the store through which the next run's processes meet. It takes a timeout in seconds."""
        self._num_runs += 1
        return partial(_store, f"{self._name}/run_{self._num_runs}", self.size)

    def exchange(self, outcome: Any) -> list[Any]:
        """Return the outcomes of all ranks, by rank."""
        self._store.set(f"{self._num_runs}/{self.rank}", pickle.dumps(outcome))
        keys = [f"{self._num_runs}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, timedelta(seconds=LONGEST_SECONDS))
        return [pickle.loads(self._store.get(key)) for key in keys]


def _store(name: str, size: int, seconds: float) -> Any:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent: Any = dist.TCPStore(address, port, size, is_master=False, timeout=timedelta(seconds=seconds))  # type: ignore[attr-defined]
    return dist.PrefixStore(name, agent)  # type: ignore[attr-defined]
