"""Python's command lines in processes that need not import torch: each is forked from one that has.

A script then starts within a tenth of a second instead of four CPU-seconds; otherwise it is a process of its own, with
the folder, environment, arguments and import path that `python` would give it, and without anything of this project.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "transformers.modeling_utils",
)
_SECONDS_AFTER_A_FAILURE = 10
"""In which other ranks say what they have to, and notice that one is gone."""


def run(
    words: Sequence[str],
    *,
    ranks: int = 1,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, *words], capture_output=True, text=True)`; words begin with a script, or
    with -m and a module.

    ranks: above 1, so many processes with the variables that torchrun sets and outputs that are one; where one fails
    the others are ended, and the exit code is its own. Raises subprocess.TimeoutExpired.
    """
    environment, context = dict(os.environ if env is None else env), _context()
    with tempfile.TemporaryDirectory() as folder:
        outputs = Path(folder, "stdout"), Path(folder, "stderr")
        processes, port = [], _free_port() if ranks > 1 else 0
        for rank in range(ranks):
            own = environment | _variables(rank, ranks, port) if ranks > 1 else environment
            given = (tuple(words), str(cwd or Path.cwd()), own, _base_path(), tuple(map(str, outputs)))
            processes.append(context.Process(target=_main, args=given))
            processes[-1].start()
        try:
            code = _first_failure(processes, time.monotonic() + timeout)
            for process in processes:
                process.join(_SECONDS_AFTER_A_FAILURE if code else 0)
        finally:
            for process in processes:
                process.kill()
                process.join()
        if code is None:
            raise subprocess.TimeoutExpired(list(words), timeout)
        stdout, stderr = (path.read_text(errors="replace") for path in outputs)
    return subprocess.CompletedProcess([sys.executable, *words], code, stdout, stderr)


def _first_failure(processes: list[Any], deadline: float) -> int | None:
    """The exit code of the first process that fails, 0 if none does, None if they have not ended by the deadline."""
    running = {process.sentinel: process for process in processes}
    while running:
        ended = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            return None
        for sentinel in ended:
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                return int(process.exitcode)
    return 0


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    number, count = str(rank), str(ranks)
    own = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return own | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


@functools.cache
def _base_path() -> tuple[str, ...]:
    """Where Python looks without a script's folder and PYTHONPATH."""
    command, environment = [sys.executable, "-P", "-c", "import sys; print(*sys.path, sep='\\n')"], os.environ.copy()
    environment.pop("PYTHONPATH", None)
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return tuple(found.stdout.splitlines())


def _main(
    words: tuple[str, ...], cwd: str, environment: dict[str, str], base: tuple[str, ...], outputs: tuple[str, str]
) -> None:
    """Never returns: it ends as Python ends."""
    for number, path in enumerate(outputs, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    added = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    code: Any = 0
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:] = list(words[1:]), [cwd, *added, *base]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:] = list(words), [str(Path(words[0]).resolve().parent), *added, *base]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)
