"""Pieces of work in a process of their own, so that one that fails, hangs or breaks the device ends none of the others.

A process works through the items in turn. After an exception it is replaced by a fresh one, as it is where it dies or
takes too long: an illegal memory access leaves a process no working device, and an exception holds on to memory.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

NO_TIME = "not begun: the time was over"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an item: the value that its work returned, or else why there is none."""

    item: Any
    value: Any = None
    error: str = ""

    @property
    def reason(self) -> str:
        """The error's last line, cut to fit a table."""
        lines = self.error.strip().splitlines()
        return lines[-1][:200] if lines else ""


def outcomes(
    work: Callable[[Any], Any], items: Sequence[Any], item_seconds: float, deadline: float
) -> Iterator[Outcome]:
    """`work(item)` of each item in turn, as soon as it is known.

    work: a function of a module, importable by a new process. item_seconds: that one may take, the start of its process
    included. deadline: of time.monotonic(), after which nothing goes on; what was not begun by then says so.
    """
    context = multiprocessing.get_context("spawn")
    left = deque(items)
    while left and time.monotonic() < deadline:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work_through, args=(work, tuple(left), sender))
        process.start()
        sender.close()
        try:
            while left:
                found = _receive(receiver, process, left[0], min(item_seconds, deadline - time.monotonic()))
                left.popleft()
                yield found
                if found.error:
                    break
        finally:
            # Without anything left to do it ends by itself.
            process.join(0 if left else 5)
            process.kill()
            process.join()
            receiver.close()
    for item in left:
        yield Outcome(item, error=NO_TIME)


def _work_through(work: Callable[[Any], Any], items: Sequence[Any], sender: Any) -> None:
    for item in items:
        try:
            message = work(item), ""
        except Exception:
            message = None, traceback.format_exc()
        sender.send(message)
        if message[1]:
            return


def _receive(receiver: Any, process: Any, item: Any, seconds: float) -> Outcome:
    if not receiver.poll(max(seconds, 0)):
        return Outcome(item, error=f"stopped after {seconds:.0f} s")
    try:
        value, error = receiver.recv()
    except EOFError:
        process.join(5)
        return Outcome(item, error=f"its process died with exit code {process.exitcode}")
    return Outcome(item, value, error)
