"""Run networks of convolutions and batch norms in channels_last memory, the order in which GPUs multiply.

    hidden = F.conv2d(images, weight)        images = images.contiguous(memory_format=torch.channels_last)
                                             hidden = F.conv2d(images, weight)

Only the first convolutions convert: results of torch's operators have the order of their operands. In the usual order
cuDNN converts the operand and the result of every convolution, and torch's batch norm reads columns. On an H100 that
took 6.7 and 31.0 ms of a ResNet-50's step of 58.6 ms (shared/design/gpu_steps.md, section 3). Values are the same but
for the order in which sums round.

Networks without batch norm stay as they are: torch's group norm converts back, and a vision transformer's patches are
one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import torch

from codegen.program import Call, LayerLoop, Program, Statement, Var, reads

_CONVOLUTION: Final = "aten.conv2d.default"
_BATCH_NORM: Final = "runtime.batch_norm"


def with_channels_last(program: Program) -> Program:
    """Return the program with first convolutions on channels_last operands, if its convolutions have batch norms."""
    bodies = (program.root.body, *(layer.body for layer in program.layers))
    targets = {statement.target for body in bodies for statement in body if isinstance(statement, Call)}
    if not {_CONVOLUTION, _BATCH_NORM} <= targets:
        return program
    return replace(program, root=replace(program.root, body=tuple(_converted(program.root.body))))


def _converted(body: tuple[Statement, ...]) -> Iterator[Statement]:
    """Yield the statements, with a conversion before convolutions that no convolution comes before."""
    ordered: set[str] = set()
    """Variables in channels_last order: results of convolutions, and what is computed from them."""
    for statement in body:
        names = {variable.name for variable in reads(statement)}
        is_ordered = bool(names & ordered)
        call = statement if isinstance(statement, Call) and statement.target == _CONVOLUTION else None
        if call is not None and not is_ordered and _is_batch_of_images(call.args[0]):
            operand: Var = call.args[0]
            memory_format = (("memory_format", torch.channels_last),)
            yield Call("aten.contiguous.default", (operand,), memory_format, (operand,), section=call.section)
            is_ordered = True
        if is_ordered:
            results = statement.results if isinstance(statement, Call | LayerLoop) else (statement.result,)
            ordered |= {result.name for result in results}
        yield statement


def _is_batch_of_images(operand: Var) -> bool:
    """Return whether an operand may have another order: a stored tensor keeps its own, a single image has no batch."""
    return not operand.is_stored and len(operand.type.shape) == 4
