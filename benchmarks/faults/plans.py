"""Plan files with mistakes: each is refused with its line, or is a program that trains as one process does.

Real plans of several models and meshes are changed: keys and values deleted, repeated, moved, replaced by other legal
values or by values of other types, lines and characters lost. What is accepted and makes another program than the plan
before the change is run on processes, two steps, beside the eager model.
"""

from __future__ import annotations

import copy
import random
import re
import string
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

import autopar
from autopar.compiled import CompiledProgram
from autopar.errors import AutoparError, PlanError
from autopar.lowering.assembly import files_of, program_of
from autopar.lowering.passes import passes
from autopar.plan import Plan
from autopar.planning.user_plans import reprice
from autopar.sharding.assignment import Candidate
from autopar.verify import sgd_with_momentum
from benchmarks.faults.case import Case, Result
from benchmarks.rank_pool import RankPool
from benchmarks.verify_pipelines import cluster_of, mixed_cluster
from examples.models import EXAMPLES, Example

COUNT = 1000
EXACT, LOSSY = 1e-4, 0.2
"""Relative errors that pass, after two steps of SGD; LOSSY for plans with 8-bit codes."""

BASES: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...] = (
    ("llama", {"dp": 2, "tp": 2, "zero": 2}, (4,)),
    ("gpt2", {"dp": 4, "zero": 3}, (4,)),
    ("t5", {"tp": 2}, (2,)),
    ("vit", {"dp": 2, "tp": 2, "zero": 1, "micro_batches": 2}, (4,)),
    ("llama", {"pp": 2, "dp": 2, "zero": 2, "micro_batches": 2, "schedule": "1f1b", "recompute": "full"}, (4,)),
    ("gpt2", {"pp": 2, "tp": 2, "micro_batches": 2, "schedule": "interleaved", "offload": "optimizer"}, (4,)),
    ("llama", {"pp": 2, "micro_batches": 2, "schedule": "1f1b"}, (2, 1)),
)
PLACEMENTS = ("P", "R", "Rp", "S(0)", "S(1)", "S(2)", "S(9)", "S(-1)", "S(0/2)", "S(0/3)", "S(1/2)", "S", "Q", "")
WORDS: Mapping[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16", "FP32", 32),
    "mesh": (
        "dp2 x tp2",
        "tp2 x dp2",
        "dp4",
        "tp4",
        "ddp2 x dp2",
        "pp2 x dp2",
        "dp2 x pp2",
        "dp0 x tp4",
        "zz4",
        "single",
    ),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "none", ""),
    "offload": ("none", "optimizer", "parameters", "nvme:/tmp/autopar-campaign", "nvme:", "nvme:x", "host"),
    "blocks": ("0-0", "0-1", "1-3", "2-5", "0-99", "5-2", "0-²", "x-y", 3),
    "fp8": (True, False, "yes please", 1),
    "compression": ({"gather": "int8"}, {"reduce": "int8"}, {"gather": "int9"}, "int8", ["gather"]),
    "global_batch_size": (4, 8, 16, 24, 12, 7),
    "micro_batches": (1, 2, 4, 8, 3),
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 10**18, 10**30, 0.5, float("nan"), float("inf"), -float("inf"), "", " ", "P"),
    *(
        "S(9)",
        "x" * 2000,
        "naïve ☃",
        "\u202e",
        "\x00",
        "a\nb",
        "dp=P tp=P",
        "dp=R tp=R",
        [],
        {},
        [[]],
        [1, 2],
        {"a": 1},
    ),
    *({1: 2}, "none", "1", "0x10", "1e3", "2020-02-30", "~", "!!int x", "*a", "&a", "%", "{", "[/red]"),
)


@dataclass
class Base:
    """A real plan. known: what came of a program's source that was run before."""

    program: CompiledProgram
    example: Example
    pool: RankPool
    known: dict[str, Result] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.program.plan.to_yaml()

    def attempt(self, text: str) -> Result:
        """Read, priced, lowered and, once for each program, run."""
        try:
            program = self._program(text)
        except AutoparError as error:
            first = str(error).splitlines()[0]
            is_placed = re.match(r"mutant\.yaml, line \d+\b", first) is not None
            return Result("refused" if is_placed or not isinstance(error, PlanError) else "raw", first)
        except Exception as error:
            return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])
        key = _identity(program)
        if key not in self.known:
            self.known[key] = self._run(program)
        return self.known[key]

    def _program(self, text: str) -> CompiledProgram:
        plan = Plan.from_yaml(text, "mutant.yaml")
        request = self.program.request
        assert request is not None
        result = reprice(request.compressed(plan.compression), plan)
        best: Candidate = result.best
        lowered = program_of(best, passes(fp8=best.plan.fp8))
        return replace(self.program, best=best, result=result, program=lowered, files=files_of(lowered))

    def _run(self, program: CompiledProgram) -> Result:
        plan = program.plan
        try:
            error = self.pool.error(replace(program, request=None), self.example)
        except RuntimeError as failed:
            return Result("raw", f"{plan.mesh_text}: {str(failed).strip().splitlines()[-1]}")
        bound = LOSSY if plan.fp8 or plan.compression else EXACT
        return Result("right" if error <= bound else "wrong", f"error {error:.1e} on {plan.mesh_text}")


def _identity(program: CompiledProgram) -> str:
    """Everything that a run depends on."""
    plan, pipeline = program.plan, program.plan.pipeline
    numbers = (plan.mesh, plan.global_batch_size, plan.num_micro_batches, plan.precision, plan.fp8, plan.compression)
    return f"{program.source}\n{numbers}\n{pipeline}"


def bases() -> Iterator[Base]:
    """One after the other; only one has processes."""
    for name, pinned, groups in BASES:
        example = EXAMPLES[name](batch_size=8, **({"layers": 3} if "pp" in pinned else {}))
        program = autopar.compile(
            example.model,
            mixed_cluster(groups) if len(groups) > 1 else cluster_of(groups[0]),
            example_inputs=example.inputs,
            loss_fn=example.loss_fn,
            optimizer=sgd_with_momentum,
            constraints=pinned,
        )
        pool = RankPool(sum(groups))
        try:
            yield Base(program, example, pool)
        finally:
            pool.close()


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """Mutants of each plan in turn, as many of each."""
    total = COUNT if count is None else count
    for number, base in enumerate(bases()):
        draw = random.Random(1000 * seed + number)
        share = total * (number + 1) // len(BASES) - total * number // len(BASES)
        for index in range(share):
            text, what = mutant(base.text, draw)
            name = f"{BASES[number][0]} {base.program.plan.mesh_text} #{index}: {what}"
            yield Case(name, lambda base=base, text=text: base.attempt(text))  # type: ignore[misc]


# --- mutations --------------------------------------------------------------------------------------------------------


def mutant(text: str, draw: random.Random) -> tuple[str, str]:
    """The plan with one mistake, seldom two; and what it is."""
    kind = draw.choices(("placement", "data", "text"), (5, 4, 3))[0]
    if kind == "text":
        return _text_mutant(text, draw)
    data = yaml.safe_load(text)
    what = [(_placement if kind == "placement" else _data)(data, draw) for _ in range(draw.choice((1, 1, 1, 2)))]
    return yaml.safe_dump(data, sort_keys=False, width=120, allow_unicode=draw.random() < 0.5), "; ".join(what)


def _paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in ((*path, key), *_paths(value, (*path, key)))]


def _owner(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        data = data[key]
    return data


def _placement(data: Any, draw: random.Random) -> str:
    """One axis of one placement, or a ZeRO stage, is another."""
    places = [p for p in _paths(data) if len(p) > 2 and p[-2] in ("inputs", "parameters", "calls", "tensors")]
    kinds = sorted({p[-2] for p in places if isinstance(p[-1], str)})
    kind = draw.choice(kinds)
    path = draw.choice([p for p in places if p[-2] == kind])
    owner = _owner(data, path)
    parts = str(owner[path[-1]]).split()
    if not parts:
        owner[path[-1]] = draw.choice(PLACEMENTS)
        return f"{path} = {owner[path[-1]]}"
    index = draw.randrange(len(parts))
    axis = parts[index].partition("=")[0]
    value = str(draw.randrange(5)) if axis == "zero" else draw.choice(PLACEMENTS)
    parts[index] = f"{axis}={value}"
    if axis != "zero" and draw.random() < 0.1:
        parts.append(f"zero={draw.randrange(4)}")
    owner[path[-1]] = " ".join(parts)
    return f"{'.'.join(map(str, path))} = {owner[path[-1]]}"


def _data(data: Any, draw: random.Random) -> str:
    """A key is deleted, renamed, added, or its value replaced or swapped with another's."""
    path = draw.choice(_paths(data) if draw.random() < 0.7 else [(key,) for key in data])
    owner, key = _owner(data, path), path[-1]
    where = ".".join(map(str, path))
    action = draw.choice(("delete", "odd", "odd", "word", "word", "rename", "swap", "copy"))
    if action == "word":
        name = draw.choice(sorted(WORDS))
        found = [p for p in _paths(data) if p[-1] == name]
        home = _owner(data, found[0]) if found else data
        home[name] = copy.deepcopy(draw.choice(WORDS[name]))
        return f"{name} = {home[name]!r}"
    if action == "delete":
        del owner[key]
        return f"{where} deleted"
    if action == "odd":
        owner[key] = copy.deepcopy(draw.choice(ODD))
        return f"{where} = {owner[key]!r}"[:120]
    other = draw.choice(_paths(data))
    if action == "rename" and isinstance(owner, dict):
        new = draw.choice((*(str(p[-1]) for p in _paths(data)), 7, "", "x y"))
        owner[new] = owner.pop(key)
        return f"{where} renamed {new!r}"
    value = copy.deepcopy(_owner(data, other)[other[-1]])
    _owner(data, other)[other[-1]], owner[key] = (copy.deepcopy(owner[key]) if action == "swap" else value), value
    return f"{where} {action} {'.'.join(map(str, other))}"


def _text_mutant(text: str, draw: random.Random) -> tuple[str, str]:
    """A mistake of the editor."""
    lines = text.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    edits: Mapping[str, Callable[[], str]] = {
        "cut": lambda: text[: draw.randrange(len(text))],
        "line lost": lambda: "".join(lines[:at] + lines[at + 1 :]),
        "line twice": lambda: "".join([*lines[: at + 1], lines[at], *lines[at + 1 :]]),
        "lines swapped": lambda: "".join([*lines[:at], *lines[at : at + 2][::-1], *lines[at + 2 :]]),
        "indented": lambda: "".join([*lines[:at], draw.choice((" ", "  ", "\t")) + lines[at], *lines[at + 1 :]]),
        "character": lambda: _character(text, draw),
        "anchor": lambda: "".join(
            [*lines[:at], lines[at].rstrip("\n").replace(": ", ": &a ") + "\n", *lines[at + 1 :]]
        ),
        "alias": lambda: "".join([*lines[:at], lines[at].partition(":")[0] + ": *a\n", *lines[at + 1 :]]),
        "bomb": lambda: _bomb() + text,
        "deep": lambda: f"{text}runner_ups: {'[' * 3000}{']' * 3000}\n",
        "merge": lambda: text + "<<: {model: x}\n",
        "tag": lambda: "".join([*lines[:at], lines[at].replace(": ", ": !!python/name:os.system "), *lines[at + 1 :]]),
        "tabs": lambda: text.replace("  ", "\t", 3),
        "documents": lambda: text + "---\n" + text,
        "byte order mark": lambda: "\ufeff" + text,
        "carriage returns": lambda: text.replace("\n", "\r\n"),
    }
    what = draw.choice(sorted(edits))
    return edits[what](), f"{what} at line {at + 1}"


def _character(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text))
    return text[:at] + draw.choice(string.printable + "é☃\x00\u2028") + text[at + draw.randrange(2) :]


def _bomb() -> str:
    """A hundred million values in ten lines."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    return "\n".join(lines) + "\n"
