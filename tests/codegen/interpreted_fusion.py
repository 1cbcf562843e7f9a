"""Fused programs whose kernels run in Triton's interpreter, against the eager models; exits with 1 if one differs.

Run by test_fusion.py with TRITON_INTERPRET=1 in a process of its own; takes the name of a case.
"""

from __future__ import annotations

import sys
from typing import Any

import autopar
from autopar.launch import run_ranks
from autopar.verify import verify_program
from examples.models import EXAMPLES
from examples.zoo import ZOO

SIZES = {"layers": 1, "width": 16, "num_heads": 2, "seq_len": 8, "batch_size": 4, "vocab_size": 32}

CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({}, {"_LinearCrossEntropy", "_RmsNorm", "_AddRmsNorm", "_Rotary", "_SwiGlu"}),
    "gpt2": ({"dropout": 0.1}, {"_LinearCrossEntropy", "_LayerNorm", "_DropoutAdd"}),
    "bert": ({}, {"_LinearCrossEntropy", "_LayerNorm", "_AddLayerNorm"}),
    "t5": (
        {"dropout": 0.1, "target_len": 8, "feed_forward_proj": "gated-gelu"},
        {"_LinearCrossEntropy", "_RmsNorm", "_DropoutAdd", "_GeGlu"},
    ),
    "mixtral": (
        {},
        {"_LinearCrossEntropy", "_RmsNorm", "_AddRmsNorm", "_Rotary", "_SwiGlu", "_GroupedLinear"}
        | {"_Copied", "_TokenSums"},
    ),
    "gemma2": ({}, {"_RmsNorm", "_RmsNormAdd", "_Rotary", "_GeGlu"}),
    "swinv2": ({}, {"_LayerNorm", "_LayerNormAdd"}),
}
"""Model -> options, and the autograd functions of our kernels that its loss is made with. What EXAMPLES lacks is of the
zoo, without options."""

CONSTRAINTS = {"mixtral": {"dp": 2, "ep": 2}}
"""Of models that are not on two ranks of dp alone."""

OURS = frozenset[str]().union(*(functions for _, functions in CASES.values()))


def kernels_run(compiled: Any, batch: Any) -> set[str]:
    """The autograd functions of our kernels that this rank's loss is made with."""
    step = compiled.build()
    batches, targets = step.parts[0].prepare(compiled.local_batch(batch))
    open_nodes, names, seen = [step.model(**batches[0], **targets).grad_fn], set(), set()
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(type(node).__name__.removesuffix("Backward"))
            open_nodes += [following for following, _ in node.next_functions]
    return names & OURS


def main(name: str) -> int:
    options, functions = CASES[name]
    example = EXAMPLES[name](**SIZES, **options) if name in EXAMPLES else ZOO[name].build()
    constraints = CONSTRAINTS.get(name, {"dp": 2})
    compiled = autopar.compile(
        example.model,
        "2 cpu",
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        constraints=constraints,
        kernels="on",
    )
    found = run_ranks(kernels_run, (compiled, example.inputs), 2)
    # AdamW makes whole steps of gradients' round-off: updates are compared by themselves.
    report = verify_program(compiled, example.inputs, steps=1, is_replayed=True)
    print(name, found, report)
    return 0 if found == [functions] * 2 and report.ok(1e-5) else 1


if __name__ == "__main__":
    sys.exit(max(map(main, CASES)))
