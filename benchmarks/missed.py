"""What the rules leave out: of each family of operators, right placements that no option has; of the zoo, operators
without a rule.

    python -m benchmarks.missed [--calls N] [--zoo]

Every operator that has a rule is called as `benchmarks/operator_calls.py` writes it, N times at most, and proven: each
option on one axis of 2 and of 3 ranks and pairs on 2 x 2 (`autopar/proofs/rule_proof.py`). Then all placements on
2 ranks are tried of inputs and outputs (a sample of 400 where there are more), and those that the plain local call
makes right and that no option has are missed. A family is a module of `autopar/rules/families`. Exits 1 if an option is
wrong.

--zoo traces the models of `examples/zoo.py` and counts their calls without a rule, with a share of the model's work as
`benchmarks/zoo.py` counts it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

from autopar.errors import AutoparError
from autopar.frontend.trace import trace
from autopar.proofs import ProofReport, prove_rule
from autopar.proofs.rule_proof import torch_alone
from autopar.rules import rule_for
from autopar.rules.registry import builtin_table
from autopar.sharding.scopes import scopes_of
from benchmarks.operator_calls import base_calls, make_node
from examples.zoo import ZOO

FAMILIES = (
    *("attention", "contraction", "convolution", "creation", "experts", "lookup", "loss", "norm", "pointwise"),
    *("recurrent", "reduction", "shape", "spatial", "transform"),
)


@cache
def family_of(packet: str) -> str:
    """The module of `autopar/rules/families` that has the packet's row."""
    tables = ((name, importlib.import_module(f"autopar.rules.families.{name}").TABLE) for name in FAMILIES)
    return next(name for name, table in tables if packet in table)


def proofs(packet: str) -> Iterator[ProofReport]:
    """Of the packet's calls that torch takes, forward and backward, and that have a rule."""
    for op, args, kwargs in base_calls(packet):
        try:
            node, metas = make_node(op, *args, **kwargs)
            rule = rule_for(node, metas)
            if rule is not None:
                torch_alone(node, metas)
                yield prove_rule(node, metas, rule)
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue


def by_family(most: int) -> bool:
    """Prints the table; whether every option is right."""
    calls, options, wrong = Counter[str](), Counter[str](), Counter[str]()
    missed: dict[str, Counter[str]] = defaultdict(Counter)
    operators: dict[str, set[str]] = defaultdict(set)
    for packet in builtin_table():
        family = family_of(packet)
        for report in itertools.islice(proofs(packet), most):
            calls[family] += 1
            options[family] += report.options_checked
            wrong[family] += len(report.wrong)
            operators[family].add(packet)
            missed[family].update(f"{packet.removeprefix('aten.')}: {text}" for text in report.missed)
    uncalled = sorted(set(builtin_table()).difference(*operators.values()))
    print(f"{len(uncalled)} operators are not called: {', '.join(uncalled)}\n")
    print("| family | operators | calls | options proven | wrong | missed |\n|---|---|---|---|---|---|")
    for family in sorted(calls):
        found = "; ".join(sorted(missed[family])) or "none"
        counts = (len(operators[family]), calls[family], options[family], wrong[family])
        print(f"| {family} | {' | '.join(map(str, counts))} | {found} |")
    return not any(wrong.values())


def without_rule() -> None:
    """Prints the zoo's operators that have none, by model."""
    found: dict[str, Counter[str]] = {}
    for name, entry in ZOO.items():
        example = entry.build()
        try:
            graph = trace(example.model, example.inputs, example.loss_fn)
        except AutoparError as error:
            print(f"# {name} is not traced: {str(error).splitlines()[0]}")
            continue
        calls = [(node, scope.metas) for scope in scopes_of(graph) for node in scope.nodes]
        unknown = [n.op for n, metas in calls if rule_for(n, tuple(metas[ref] for ref in n.inputs)) is None]
        if unknown:
            found[name] = Counter(unknown)
    print("\n| model | calls without a rule |\n|---|---|")
    for name, counts in found.items():
        print(f"| {name} | {', '.join(f'{op} ({count})' for op, count in counts.most_common())} |")
    total = Counter(op for counts in found.values() for op in counts)
    print(f"\n{len(total)} operators without a rule in {len(found)} of {len(ZOO)} models")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--zoo", action="store_true")
    args = parser.parse_args()
    is_right = by_family(args.calls)
    if args.zoo:
        without_rule()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
