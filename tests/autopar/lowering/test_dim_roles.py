"""Sizes by name: each name is what the model's configuration says, whatever the numbers are, or there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.mesh import Mesh
from autopar.lowering.lower import Staging, lower_stages
from codegen.program import Call, Program, Raw
from codegen.runtime.parameters import parse_placement
from codegen.source.emit import emit_model
from codegen.source.pipeline_source import emit_pipeline
from codegen.source.sizes import Size, _names, with_sizes
from examples.models import EXAMPLES, Example

IDEAL = str(Path(__file__).resolve().parents[3] / "examples" / "clusters" / "ideal.toml")
DP2_TP2 = {"dp": 2, "tp": 2, "zero": 0}
APART = {"batch_size": 8, "seq_len": 12, "num_heads": 6, "width": 60}
ALIKE = {"batch_size": 16, "seq_len": 16, "num_heads": 16, "width": 256}


@cache
def compiled(name: str, mesh: tuple[tuple[str, int], ...], sizes: tuple[tuple[str, int], ...]) -> Any:
    return of_example(EXAMPLES[name](**dict(sizes)), **dict(mesh))


def of_example(example: Example, **constraints: int) -> Any:
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "constraints": constraints}
    return autopar.compile(example.model, IDEAL, **options)


def program_of(name: str, mesh: Mapping[str, int], sizes: Mapping[str, int]) -> Program:
    return compiled(name, tuple(mesh.items()), tuple(sizes.items())).program


def defined(text: str) -> dict[str, int]:
    """The constants of a file, as Python computes them."""
    lines = [line for line in text.splitlines() if re.match(r"[A-Z_]+ = [A-Z\d]", line)]
    values: dict[str, Any] = {}
    exec("\n".join(lines), {}, values)
    return values


def named_views(program: Program) -> list[tuple[str, ...]]:
    """The sizes that calls are given, those without a name as `_`."""
    named, _ = with_sizes(program)
    bodies = [named.root.body, *(layer.body for layer in named.layers)]
    sizes = [s.args[1] for body in bodies for s in body if isinstance(s, Call) and s.target[5:9] in ("view", "resh")]
    return [tuple(size.text if isinstance(size, Raw) else "_" for size in of) for of in sizes]


def check_values(program: Program) -> set[str]:
    """All names that calls are given are, evaluated, what one rank has of that dim of their result."""
    named, lines = with_sizes(program)
    values, used = defined("\n".join(lines.values())), set()
    ranks = dict(zip(program.axes, program.axis_sizes, strict=True))
    for cls in (named.root, *named.layers):
        for call in (s for s in cls.body if isinstance(s, Call)):
            result_type = call.results[0].type
            shape = list(result_type.shape)
            for axis, text in result_type.placements:
                kind, dim, _ = parse_placement(text)
                if kind == "S":
                    shape[dim] //= ranks[axis]
            for sizes in (a for a in call.args if isinstance(a, tuple) and any(isinstance(item, Raw) for item in a)):
                assert [values[n.text] if isinstance(n, Raw) else n for n in sizes if n != -1] == [
                    size for n, size in zip(sizes, shape, strict=True) if n != -1
                ]
                used |= {n.text for n in sizes if isinstance(n, Raw)}
    return used


# --- names are what the configuration says ----------------------------------------------------------------------------

LLAMA = {"BATCH": 4, "SEQUENCE": 12, "HEADS": 3, "HEAD_DIM": 10}
CASES = [
    ("llama", DP2_TP2, {}, LLAMA),
    ("llama_gqa", DP2_TP2, {"num_kv_heads": 2}, LLAMA | {"KV_HEADS": 1}),
    ("gpt2", DP2_TP2, {}, {"BATCH": 4, "SEQUENCE": 12, "HEADS": 3, "HEAD_DIM": 10}),
    ("llama", {"dp": 4, "zero": 0}, {}, {"BATCH": 2, "SEQUENCE": 12, "HEADS": 6, "HEAD_DIM": 10}),
    ("llama", {"dp": 2, "tp": 2, "micro_batches": 2}, {}, LLAMA | {"BATCH": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "more", "wanted"), CASES)
def test_constants_are_the_sizes_of_the_configuration(name, mesh, more, wanted) -> None:
    program = program_of(name, mesh, APART | more)
    assert defined(emit_model(program)) == wanted
    assert check_values(program) == set(wanted)


QUICK = ("llama_gqa", "gpt2")
SLOW = ("llama", "nanogpt", "bert", "vit", "transformer_encoder")


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_equal_numbers_prove_nothing(name) -> None:
    """Names stand at the same places whether all sizes differ or all are 16."""
    mesh = {"dp": 4, "zero": 0}
    apart, alike = ({k: v for k, v in sizes.items() if name != "vit" or k != "seq_len"} for sizes in (APART, ALIKE))
    one, other = (named_views(program_of(name, mesh, sizes)) for sizes in (apart, alike))
    assert one == other and any("HEAD_DIM" in sizes for sizes in one)


# That two lengths never share a name is quick, below.
@pytest.mark.slow
def test_lengths_of_several_sequences_are_called_after_their_inputs() -> None:
    program = program_of("t5", DP2_TP2, {})
    values = defined(emit_model(program))
    lengths = {f"{name.upper()}_LENGTH": EXAMPLES["t5"]().inputs[name].shape[1] for name in ("input_ids", "labels")}
    assert lengths.items() <= values.items() and "SEQUENCE" not in values and len(set(lengths.values())) == 2
    assert {"BATCH": 4, "HEADS": 4, "LOCAL_HEADS": 2, "HEAD_DIM": 8}.items() <= values.items()
    check_values(program)


def test_a_cut_sequence_is_local_and_micro_batches_are_told() -> None:
    text = emit_model(program_of("llama", DP2_TP2 | {"micro_batches": 2}, {}))
    assert "BATCH = 8 // 2 // 2  # of this rank: 8 in 2 micro-batches over dp2\nSEQUENCE = 16\n" in text
    text = emit_model(program_of("llama", DP2_TP2, {}))
    assert "LOCAL_SEQUENCE = SEQUENCE // 2  # of this rank, cut over tp2\nHEADS = 4 // 2  #" in text
    assert ".reshape(BATCH, LOCAL_SEQUENCE, -1)" in text


def test_files_of_a_pipeline_have_the_sizes_that_they_name() -> None:
    best = compiled("llama_gqa", tuple(DP2_TP2.items()), (("layers", 4),)).best
    lowered = []
    for sizes in ((2, 2), (2, 1)):
        staged = Staging((0, 2, 3), (0, 1, 2), "1f1b", ("F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"))
        plan = replace(best.plan, mesh=Mesh(("dp", "tp"), sizes))
        lowered.append(lower_stages(best.graph, best.operators, plan, best.assignment, staged))
    files = emit_pipeline(lowered[0])
    assert defined(files["layers.py"]) == {"BATCH": 4, "SEQUENCE": 16, "LOCAL_SEQUENCE": 8} | {
        "HEADS": 2, "KV_HEADS": 1, "HEAD_DIM": 8,
    }  # fmt: skip
    assert defined(files["stage_0.py"]) == {"SEQUENCE": 16}
    # Layers whose numbers differ are apart, though they have the names in common.
    one, other = lowered
    mixed = replace(one, stages=(one.stages[0], other.stages[1], other.stages[2]))
    files = emit_pipeline(mixed)
    assert defined(files["stage_0.py"])["HEADS"] == 2 and defined(files["layers.py"])["HEADS"] == 4


# --- names that are not given -----------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of `num_heads` heads over windows of rows' positions, then over all of them."""

    def __init__(self, width: int, *num_heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.qkv = num_heads, nn.ModuleList(nn.Linear(width, 3 * width) for _ in num_heads)

    def forward(self, x: Tensor) -> Tensor:
        for heads, qkv in zip(self.num_heads, self.qkv, strict=True):
            parts = qkv(x).chunk(3, dim=-1)
            q, k, v = (part.view(len(x), x.shape[1], heads, -1).transpose(1, 2) for part in parts)
            x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x


class Windows(nn.Module):
    """Attention of one head number within windows of four of the positions of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.view(4 * len(x), 4, 16)).view(len(x), 16, 16)


class Shuffle(nn.Module):
    """Views of four dims without attention; HEADS is the user's word for something else."""

    def __init__(self) -> None:
        super().__init__()
        self.HEADS = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.HEADS(x.view(len(x), 4, 4, 16).transpose(1, 2).reshape(len(x), 16, 16))


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def views_of(model: nn.Module, num_rows: int = 8) -> list[tuple[str, ...]]:
    batch = {"x": torch.randn(num_rows, 16, 16), "target": torch.randn(num_rows, 16, 16)}
    program = of_example(Example(model, batch, mean_square), dp=4, zero=0).program
    check_values(program)
    return named_views(program)


def test_heads_of_several_numbers_have_no_name() -> None:
    assert views_of(Attention(16, 4))[0] == ("BATCH", "SEQUENCE", "HEADS", "HEAD_DIM")
    assert set(views_of(Attention(16, 4, 2))) == {("BATCH", "SEQUENCE", "_", "_"), ("BATCH", "SEQUENCE", "_")}


@pytest.mark.parametrize("num_rows", [8, 16])
def test_rows_of_windows_are_not_the_batch(num_rows: int) -> None:
    views = views_of(Windows(), num_rows)
    assert views[0] == ("_", "SEQUENCE", "_") and views[1] == ("_", "SEQUENCE", "HEADS", "HEAD_DIM")
    assert views[-1] == ("BATCH", "_", "_")


def test_dims_that_no_attention_reads_have_no_name() -> None:
    assert set(views_of(Shuffle())) == {("BATCH", "_", "_", "_"), ("BATCH", "_", "_")}
    assert named_views(program_of("mlp", DP2_TP2, {})) == []


def test_a_name_that_the_user_has_stays_the_users() -> None:
    class Named(Attention):
        def forward(self, BATCH: Tensor) -> Tensor:  # noqa: N803
            return super().forward(BATCH)

    batch = {"BATCH": torch.randn(8, 16, 16), "target": torch.randn(8, 16, 16)}
    program = of_example(Example(Named(16, 4), batch, mean_square), dp=4, zero=0).program
    assert named_views(program)[0] == ("_", "SEQUENCE", "HEADS", "HEAD_DIM")
    assert "BATCH = " not in emit_model(program)


class _Attention(nn.Module):
    """Over dim 1 of x [rows, length, 32], of the keys and values of y."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q = self.q(x).view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)
        k, v = self.kv(y).view(y.shape[0], y.shape[1], 8, 8).transpose(1, 2).chunk(2, 1)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(attended.reshape(x.shape[0], x.shape[1], 32))


class _Axial(nn.Module):
    """Attention along one dim of an input and then along another."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = _Attention(), _Attention()

    def forward(self, x: Tensor) -> Tensor:
        b, t, n, d = x.shape
        along = x.reshape(b * t, n, d)
        x = x + self.columns(along, along).view(b, t, n, d)
        along = x.transpose(1, 2).reshape(b * n, t, d)
        return (x + self.rows(along, along).view(b, n, t, d).transpose(1, 2)).square().mean()


class _TwoCases(nn.Module):
    """Inputs whose names differ in case alone."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention, self.cross = _Attention(), _Attention()

    def forward(self, x: Tensor, X: Tensor) -> Tensor:  # noqa: N803
        return self.cross(self.self_attention(x, x), X).square().mean()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [(_Axial(), (torch.ones(8, 6, 10, 32),)), (_TwoCases(), (torch.ones(8, 12, 32), torch.ones(8, 16, 32)))],
    ids=["axial", "case"],
)
def test_two_lengths_never_share_a_name(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    program = autopar.compile(model, IDEAL, example_inputs=inputs, constraints={"dp": 4, "zero": 0}).program
    assert not {name for name in check_values(program) if name.endswith("LENGTH")}


def test_a_name_has_one_size() -> None:
    """Nor may one rank's part of SRC_LENGTH be called as all of another length is."""
    tp = (("tp", 2),)
    two = [Size("X_LENGTH", 6, ()), Size("X_LENGTH", 10, ())]
    parts = [Size("SRC_LENGTH", 8, ()), Size("SRC_LENGTH", 8, tp), Size("LOCAL_SRC_LENGTH", 16, ())]
    assert not _names([*two, *parts], ())
    assert _names(parts[:2], ()) == {parts[0]: "SRC_LENGTH", parts[1]: "LOCAL_SRC_LENGTH"}
