"""Questions answered by several processes, forked from one that has all they begin with."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

MOST_PROCESSES = 4
"""Each has the pages that it writes to itself, and answers some of the questions without what others found."""

_NUMBER_BYTES = 2

Answer = TypeVar("Answer")


def spare_processes() -> int:
    """In how many a program that started no threads of its own may answer: one per core, where forks are safe."""
    is_on_gpu = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    if sys.platform != "linux" or is_on_gpu or (dist.is_available() and dist.is_initialized()):
        return 1
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def answers(
    ask: Callable[[int], Answer], count: int, processes: int = 1, tell: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    """`ask(0)` to `ask(count - 1)`; whoever is free takes the next number.

    `ask` gives what can be pickled, and the same in every process. What a process that died leaves unanswered is asked
    here, and so is what it could not answer, so that errors are raised as they are without other processes. tell: gets
    every number that this process asks, before it does; in others threads that it may wait for are missing.
    """

    def told(number: int) -> Answer:
        tell(number)
        return ask(number)

    if processes == 1:
        return [told(number) for number in range(count)]
    source, sink = os.pipe()
    os.write(sink, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(count)))
    os.close(sink)  # so that whoever finds no number left knows that there is none
    context = multiprocessing.get_context("fork")
    others: list[Any] = []
    receivers: list[Connection] = []
    found: dict[int, Answer] = {}
    try:
        for _ in range(processes - 1):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer_some, args=(ask, source, sender, os.getpid()), daemon=True)
            process.start()
            sender.close()
            others.append(process)
            receivers.append(receiver)
        found |= {number: told(number) for number in _numbers(source)}
        for each in receivers:
            with contextlib.suppress(EOFError, OSError):
                found |= each.recv()
    finally:
        os.close(source)
        for process in others:
            process.kill()
            process.join()
    return [found[number] if number in found else told(number) for number in range(count)]


def _numbers(source: int) -> Iterator[int]:
    """Those that no other process takes: a read of so few bytes gives one number to one process."""
    while number := os.read(source, _NUMBER_BYTES):
        yield int.from_bytes(number)


def _answer_some(ask: Callable[[int], Answer], source: int, sender: Connection, parent: int) -> None:
    """What a forked process does. It ends with the one that it was forked from."""
    torch.set_num_threads(1)  # threads of the other process are not here
    gc.freeze()  # what is inherited is no garbage: looking for it would copy its pages
    found: dict[int, Answer] = {}
    with contextlib.suppress(Exception):  # asked again by the other process, where it is raised
        for number in _numbers(source):
            if os.getppid() != parent:
                return
            found[number] = ask(number)
    sender.send(found)
