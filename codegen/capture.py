"""Decide which steps run as CUDA graphs (codegen/runtime/captured.py), and say why others do not."""

from __future__ import annotations

from typing import Final

from codegen.program import Call, PipelineProgram, Program

_ROUTED: Final = frozenset({"Routes", "NodeRoutes"})


def why_uncaptured(program: Program | PipelineProgram) -> str:
    """Return why the steps of a program for GPUs are issued call by call; "" if they run as CUDA graphs."""
    one = program.any
    if isinstance(program, PipelineProgram):
        return "pipeline ranks exchange messages between micro-batches"
    bodies = (program.root.body, *(layer.body for layer in program.layers))
    calls = [statement for body in bodies for statement in body if isinstance(statement, Call)]
    reasons = (
        (not one.kernels, "kernels are off"),
        (bool(one.offload_optimizer or one.offload_parameters or one.offload), "offload moves tensors by the host"),
        (one.backend == "async-tp", "async-tp multiplies in memory that ranks share"),
        (bool(program.whole_sums), "sums over all micro-batches need a forward of their own"),
        (any(map(_is_routed, calls)), "the batch decides how many rows ranks exchange for their experts"),
    )
    return next((reason for applies, reason in reasons if applies), "")


def _is_routed(call: Call) -> bool:
    """Return whether a call reads on the host how many rows go to each rank."""
    return call.target.rpartition(".")[2] in _ROUTED and len(call.args) > 2
