"""A fused program whose kernels run in Triton's interpreter, against the eager model; exits with 1 if it differs.

Run by test_fusion.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import sys

import autopar
from autopar.launch import run_ranks
from autopar.verify import verify_program
from examples.models import EXAMPLES


def kernels_run(compiled, batch) -> list[str]:
    """The autograd functions of our kernels that this rank's loss is made with."""
    step = compiled.build()
    batches, targets = step._prepare(compiled.local_batch(batch))
    open_nodes, names = [step.model(**batches[0], **targets).grad_fn], set()
    while open_nodes:
        node = open_nodes.pop()
        if node is not None:
            names.add(type(node).__name__)
            open_nodes += [following for following, _ in node.next_functions]
    return sorted(names & {"_LinearCrossEntropyBackward", "_RmsNormBackward", "_SwiGluBackward"})


def main() -> int:
    example = EXAMPLES["llama"](layers=1, width=16, num_heads=2, seq_len=8, batch_size=4, vocab_size=32)
    options = {"example_inputs": example.inputs, "constraints": {"dp": 2}, "kernels": "on"}
    compiled = autopar.compile(example.model, "2 cpu", **options)
    names = run_ranks(kernels_run, (compiled, example.inputs), 2)
    report = verify_program(compiled, example.inputs, steps=1)
    print(names, report)
    all_ran = names == [["_LinearCrossEntropyBackward", "_RmsNormBackward", "_SwiGluBackward"]] * 2
    return 0 if all_ran and "linear_cross_entropy(" in compiled.source and report.ok(1e-5) else 1


if __name__ == "__main__":
    sys.exit(main())
