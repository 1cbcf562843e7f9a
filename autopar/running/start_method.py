"""How ranks are started: forked where a fork can compute, which takes half a second, else spawned."""

from __future__ import annotations

import os
import time
import warnings

import torch

GPUS = "processes of a machine with GPUs"
_PROBE_SECONDS = 10.0


def why_not_forked() -> str:
    """Return which processes must be spawned instead, as the subject of a sentence; "" where forks are safe."""
    if os.name != "posix":
        return "processes of this system"
    if torch.cuda.is_available():  # CUDA, once asked for a device, does not work in a fork
        return GPUS
    if not _fork_has_gradients():
        return (
            "processes cannot be forked here, since autograd has started threads in this one (a compiled backward, or "
            "nested reentrant checkpoints), which a fork lacks. Those that are spawned instead"
        )
    return ""


def _fork_has_gradients() -> bool:
    """Whether a fork of this process can run a backward, which one of them tries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python's, where the process has threads
        child = os.fork()
    if child == 0:
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 2)
            torch.set_num_threads(1)
            with torch.enable_grad(), torch.inference_mode(False), torch.device("cpu"):
                torch.autograd.backward(torch.ones(1, requires_grad=True).mul(2.0).sum())
        except BaseException:
            os._exit(1)
        os._exit(0)
    deadline = time.monotonic() + _PROBE_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.001)
    os.kill(child, 9)  # it waits for a lock of a thread that it does not have
    os.waitpid(child, 0)
    return False
