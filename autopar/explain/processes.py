"""Questions answered by several processes, forked from a process that holds their common data."""

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
"""The most processes. Each copies the pages that it writes, and lacks the results of the others."""

_NUMBER_BYTES = 2

Answer = TypeVar("Answer")


def spare_processes() -> int:
    """Return how many processes may answer questions in a program without threads of its own: one per core, or 1 where
    forks are unsafe."""
    is_on_gpu = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    if sys.platform != "linux" or is_on_gpu or (dist.is_available() and dist.is_initialized()):
        return 1
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def answers(
    ask: Callable[[int], Answer], count: int, processes: int = 1, tell: Callable[[int], None] = lambda _: None
) -> list[Answer]:
    """Return `ask(0)` to `ask(count - 1)`. The next free process takes the next number.

    ask: returns the same picklable value in every process. This process asks again if a process died or `ask` raised
    there, so errors are raised as without other processes. tell: gets every number that this process asks, before it
    does. It does not run in forked processes, which lack the threads that it may wait for.
    """

    def ask_aloud(number: int) -> Answer:
        tell(number)
        return ask(number)

    if processes == 1:
        return [ask_aloud(number) for number in range(count)]
    source, sink = os.pipe()
    os.write(sink, b"".join(number.to_bytes(_NUMBER_BYTES) for number in range(count)))
    os.close(sink)  # so that reading an empty pipe means that no number is left
    context = multiprocessing.get_context("fork")
    others: list[Any] = []
    receivers: list[Connection] = []
    answers_by_number: dict[int, Answer] = {}
    try:
        for _ in range(processes - 1):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_answer_some, args=(ask, source, sender, os.getpid()), daemon=True)
            process.start()
            sender.close()
            others.append(process)
            receivers.append(receiver)
        answers_by_number |= {number: ask_aloud(number) for number in _numbers(source)}
        for connection in receivers:
            with contextlib.suppress(EOFError, OSError):
                answers_by_number |= connection.recv()
    finally:
        os.close(source)
        for process in others:
            process.kill()
            process.join()
    return [answers_by_number[number] if number in answers_by_number else ask_aloud(number) for number in range(count)]


def _numbers(source: int) -> Iterator[int]:
    """Yield numbers that no other process takes: a read of so few bytes is atomic."""
    while number := os.read(source, _NUMBER_BYTES):
        yield int.from_bytes(number)


def _answer_some(ask: Callable[[int], Answer], source: int, sender: Connection, parent: int) -> None:
    """Answer questions in a forked process, which ends when its parent does."""
    torch.set_num_threads(1)  # the parent's threads do not exist here
    gc.freeze()  # a collection would copy the inherited pages
    answers_by_number: dict[int, Answer] = {}
    with contextlib.suppress(Exception):  # the parent asks again and raises
        for number in _numbers(source):
            if os.getppid() != parent:
                return
            answers_by_number[number] = ask(number)
    sender.send(answers_by_number)
