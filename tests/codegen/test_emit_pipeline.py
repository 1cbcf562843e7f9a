"""The files of a pipeline: how they look, and that their stages, one after the other, are the user's model."""

from __future__ import annotations

import ast
import copy
import importlib
import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import autopar
from autopar.frontend.inputs import name_inputs
from autopar.ir.mesh import Mesh
from autopar.launch import run_ranks
from autopar.lowering.lower import Staging, lower, lower_stages
from autopar.running.local_batch import local_batch
from autopar.sharding.assignment import Candidate
from codegen.program import PipelineProgram
from codegen.runtime.reference import SameDropout
from codegen.saved_folder.modules import imported_modules
from codegen.source.emit import emit_model
from codegen.source.main_source import emit_main
from codegen.source.pipeline_source import emit_pipeline
from codegen.source.program_source import emit_program
from codegen.source.text import meshes_text
from examples.models import EXAMPLES, Example
from tests import forked
from tests.autopar.interpret import tensors_of

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
DP2_TP2 = {"dp": 2, "tp": 2, "zero": 0}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)) * scale)


class Skips(nn.Module):
    """Two runs of one class of layers, dropout between them, a skip over both, and a learned scale for all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(8))
        self.down = nn.ModuleList(Block(0.2) for _ in range(2))
        self.up = nn.ModuleList(Block(0.2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = x = self.first(x)
        scale = self.scale.exp()
        for block in self.down:
            x = block(x, scale)
        x = nn.functional.dropout(x, 0.3, self.training) + kept.tanh()
        for block in self.up:
            x = block(x, scale)
        return x + kept


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@cache
def example(name: str, layers: int, dropout: float = 0.0) -> Example:
    if name == "t5":
        return t5(layers, dropout)
    if name == "skips":
        return Example(Skips(), {"x": torch.randn(8, 8), "target": torch.randn(8, 8)}, mean_square)
    return EXAMPLES[name](layers=layers, **({"dropout": dropout} if dropout else {}))


def t5(layers: int, dropout: float) -> Example:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=layers, num_decoder_layers=layers, num_heads=4,
        dropout_rate=dropout, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    ids, labels = torch.randint(1, 96, (8, 16)), torch.randint(1, 96, (8, 12))
    labels[:3, 7:] = -100
    mask = torch.ones_like(ids)
    mask[:, 13:] = 0
    model = transformers.T5ForConditionalGeneration(config)
    return Example(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})


@cache
def planned(name: str, layers: int, dropout: float, mesh: tuple[tuple[str, int], ...]) -> Candidate:
    """The plan of one pipeline rank."""
    one = example(name, layers, dropout)
    options = {"example_inputs": one.inputs, "loss_fn": one.loss_fn, "constraints": dict(mesh)}
    num_ranks = math.prod(size for axis, size in mesh if axis != "zero")
    return autopar.compile(one.model, IDEAL if num_ranks == 4 else f"{num_ranks} a100-80g", **options).best


def pipeline_of(
    name: str,
    cut: tuple[int, ...],
    pipeline_ranks: tuple[int, ...] | None = None,
    layers: int = 4,
    dropout: float = 0.0,
    mesh: Mapping[str, int] = DP2_TP2,
    **staging: Any,
) -> PipelineProgram:
    best = planned(name, layers, dropout, tuple(mesh.items()))
    pipeline_ranks = pipeline_ranks or tuple(range(len(cut)))
    lines = tuple(
        " ".join(f"F{s}.0" for s, p in enumerate(pipeline_ranks) if p == pipeline_rank)
        + " "
        + " ".join(f"B{s}.0" for s, p in reversed(list(enumerate(pipeline_ranks))) if p == pipeline_rank)
        for pipeline_rank in range(max(pipeline_ranks) + 1)
    )
    staged = Staging(cut, pipeline_ranks, "1f1b", lines, **staging)
    return lower_stages(best.graph, best.operators, best.plan, best.assignment, staged)


def unequal_of(
    name: str,
    cut: tuple[int, ...],
    sizes: tuple[tuple[int, int], ...],
    first_ranks: tuple[int, ...] = (),
    dropout: float = 0.0,
    **mesh: int,
) -> PipelineProgram:
    """A stage per pipeline rank, on (dp, tp) of that pipeline rank's sizes."""
    best = planned(name, 4, dropout, tuple((DP2_TP2 | mesh).items()))
    lines = tuple(f"F{stage}.0 B{stage}.0" for stage in range(len(cut)))
    staged = Staging(cut, tuple(range(len(cut))), "1f1b", lines)
    plans = [replace(best.plan, mesh=Mesh(("dp", "tp"), each)) for each in sizes]
    lowered = [lower_stages(best.graph, best.operators, plan, best.assignment, staged) for plan in plans]
    stages = tuple(pipeline.stages[pipeline_rank] for pipeline_rank, pipeline in enumerate(lowered))
    return replace(lowered[0], stages=stages, first_ranks=first_ranks)


def join(texts: Mapping[str, str]) -> str:
    return "\n".join(f"{'=' * 20} {name}\n{text}" for name, text in texts.items())


# --- how they look ----------------------------------------------------------------------------------------------------


def test_gpt2_in_two_stages(golden: Any) -> None:
    recompute = ({"GPT2Block": (("full", 1), ("none", 1))}, {})
    pipeline = pipeline_of("gpt2", (0, 3), dropout=0.1, recompute=recompute)
    texts = {**emit_pipeline(pipeline), "program.py": emit_program(pipeline), "main.py": emit_main(pipeline)}
    for name in texts:
        if name.endswith(".py"):
            ast.parse(texts[name])
    golden("programs/gpt2_pp2_dp2_tp2.txt", join(texts))


@pytest.mark.slow
def test_llama_in_three_stages_for_zero_bubble(golden: Any) -> None:
    mesh = {"dp": 2, "tp": 2, "zero": 2}
    pipeline = pipeline_of("llama", (0, 3, 5), layers=6, mesh=mesh, defers_weights=True)
    texts = emit_pipeline(pipeline)
    golden("programs/llama_pp3_dp2_tp2.txt", join(texts))
    for text in (texts["layers.py"], texts["stage_2.py"]):
        assert "F.linear(" not in text and "deferred.linear(" in text


@pytest.mark.slow
def test_equal_stages_share_a_file(golden: Any) -> None:
    modes = {"LlamaDecoderLayer": (("full", 2),)}
    pipeline = pipeline_of("llama", (0, 3, 5, 7, 8), (0, 1, 2, 0, 1), layers=8, recompute=(modes, {}, modes, {}, {}))
    texts = emit_pipeline(pipeline)
    assert list(texts) == ["layers.py", "stage_0.py", "stage_1.py", "stage_4.py", "pipeline.py", "schedule.txt"]
    for name in ("stage_0.py", "stage_1.py", "stage_4.py"):
        assert "from .layers import LlamaDecoderLayer\n" in texts[name] and "class LlamaDecoderLayer" not in texts[name]
    assert texts["schedule.txt"].splitlines() == ["F0.0 F3.0 B3.0 B0.0", "F1.0 F4.0 B4.0 B1.0", "F2.0 B2.0"]
    golden("programs/llama_pp3_shared.txt", texts["pipeline.py"])


def test_recompute_and_offload_of_a_program_without_stages() -> None:
    best = planned("gpt2", 4, 0.1, tuple(DP2_TP2.items()))
    modes = {"GPT2Block": (("full", 3), ("none", 1))}
    program = lower(
        best.graph, best.operators, best.plan, best.assignment, recompute=modes,
        offload={"GPT2Block": (("host", 4),)},
    )  # fmt: skip
    program = replace(program, offload_optimizer="host")
    text = emit_model(program)
    assert '    RECOMPUTE = {\n        GPT2Block: ("full",) * 3 + ("none",),\n    }\n' in text
    assert "    OFFLOAD = {\n        GPT2Block: (True,) * 4,\n    }\n" in text
    text = emit_program(program)
    assert "offload_optimizer=HostOptimizer(host)" in text and "offload=Offload(mesh.device, host.traffic)" in text


def test_a_pipeline_rank_reads_only_what_its_stages_read() -> None:
    one = example("gpt2", 4, 0.1)
    pipeline = pipeline_of("gpt2", (0, 2, 4), (0, 1, 0), dropout=0.1)
    parts = [local_batch(pipeline, name_inputs(one.model, one.inputs, None), rank) for rank in range(8)]
    assert [sorted(part) for part in parts] == [["input_ids", "labels"]] * 4 + [[]] * 4
    assert torch.equal(torch.cat((parts[0]["labels"], parts[2]["labels"])), one.inputs["labels"])
    assert pipeline.num_ranks == 8 and pipeline.mesh_text == "pp2 x dp2 x tp2"


def test_pipeline_ranks_of_unequal_meshes() -> None:
    one = example("gpt2", 4, 0.1)
    pipeline = unequal_of("gpt2", (0, 2, 4), ((2, 2), (2, 1), (1, 2)), (4, 0, 2), dropout=0.1)
    assert pipeline.num_ranks == 8 and pipeline.mesh_text == "pp3 (dp2 x tp2, dp2, tp2)"
    assert [pipeline.place(rank) for rank in (0, 1, 2, 3, 4, 7)] == [(1, 0), (1, 1), (2, 0), (2, 1), (0, 0), (0, 3)]
    with pytest.raises(ValueError, match="the pipeline has ranks 0 to 7, got 8"):
        pipeline.place(8)
    batch = name_inputs(one.model, one.inputs, None)
    parts = [local_batch(pipeline, batch, rank) for rank in range(8)]
    assert [sorted(part) for part in parts] == [[]] * 2 + [["labels"]] * 2 + [["input_ids"]] * 4
    assert all(torch.equal(part["labels"], batch["labels"]) for part in parts[2:4])
    halves = batch["input_ids"].chunk(2)
    assert all(torch.equal(parts[rank]["input_ids"], halves[(rank - 4) // 2]) for rank in range(4, 8))
    text = emit_pipeline(pipeline)["pipeline.py"]
    meshes = """    meshes=(
        (("dp", "tp"), (2, 2)),  # ranks 4 to 7
        (("dp", "tp"), (2, 1)),  # ranks 0 to 1
        (("dp", "tp"), (1, 2)),  # ranks 2 to 3
    ),
    first_ranks=(4, 0, 2),
    tied="""
    assert meshes in text and "axes=" not in text and "as a pipeline of 3 stages on pp3 (dp2 x tp2, dp2, tp2)," in text
    assert "--nproc-per-node 8 main.py" in emit_main(pipeline)
    # In the order of pipeline ranks nothing needs to be said.
    assert "first_ranks" not in emit_pipeline(replace(pipeline, first_ranks=(0, 4, 6)))["pipeline.py"]


def test_programs_whose_ranks_or_meshes_do_not_fit_are_refused() -> None:
    pipeline = unequal_of("gpt2", (0, 2, 4), ((2, 2), (2, 1), (1, 2)), dropout=0.1)
    with pytest.raises(ValueError, match="pipeline rank 1 begins at rank 3, where the ranks before it end at 4"):
        replace(pipeline, first_ranks=(0, 3, 6))
    first, second, third = pipeline.stages
    with pytest.raises(ValueError, match=r"stages of pipeline rank 1 have meshes .*\(2, 1\).* and .*\(1, 2\)"):
        replace(pipeline, stages=(first, second, replace(third, pipeline_rank=1)))


def test_stages_on_unequal_meshes_share_a_file_where_their_text_is_equal() -> None:
    one, half = (2, 1), (1, 1)
    apart = emit_pipeline(unequal_of("skips", (0, 4, 5, 6), (one, one, half, half), dropout=0.2))
    together = unequal_of("skips", (0, 4, 5, 6), (one, one, one, half), dropout=0.2)
    texts = emit_pipeline(together)
    # Bytes in the comments on reshards are part of a stage's text, those of its boundaries are not.
    assert {f"stage_{i}.py" for i in range(4)} <= apart.keys() and "stage_2.py" not in texts
    assert "# 128 B to the next stage, gradient back" in texts["stage_1.py"]
    third = together.stages[2]
    sends = {name: replace(boundary, num_bytes=256) for name, boundary in third.program.sends.items()}
    third = replace(third, program=replace(third.program, axis_sizes=half, sends=sends))
    mixed = emit_pipeline(replace(together, stages=(*together.stages[:2], third, together.stages[3])))
    assert list(mixed) == list(texts)
    assert "# 128 B or 256 B to the next stage, gradient back" in mixed["stage_1.py"]


def test_text_of_pipeline_ranks() -> None:
    axes = ("dp", "tp")
    assert meshes_text([(axes, (2, 2))] * 3) == "pp3 x dp2 x tp2"
    assert meshes_text([(axes, (2, 1)), (("dp",), (2,))]) == "pp2 x dp2"
    assert meshes_text([((), ()), (axes, (1, 1))]) == "pp2"
    assert meshes_text([(axes, (2, 4)), (axes, (2, 4)), (axes, (4, 1))]) == "pp3 (2 of dp2 x tp4, dp4)"
    assert meshes_text([(axes, (1, 1)), (axes, (2, 1)), (axes, (1, 1))]) == "pp3 (single, dp2, single)"


# --- what they compute ------------------------------------------------------------------------------------------------

CHAINS = [
    ("gpt2", (0, 3), 4, 0.1),
    pytest.param("gpt2", (0, 1, 2, 4), 4, 0.1, marks=pytest.mark.slow),
    pytest.param("llama", (0, 2, 3, 4), 4, 0.0, marks=pytest.mark.slow),
    pytest.param("bert", (0, 2, 4), 4, 0.1, marks=pytest.mark.slow),
    pytest.param("vit", (0, 3), 4, 0.0, marks=pytest.mark.slow),
    pytest.param("t5", (0, 2, 3, 4, 5), 3, 0.1, marks=pytest.mark.slow),  # t5 whole: test_verify.py
    pytest.param("t5", (0, 3, 4), 3, 0.1, marks=pytest.mark.slow),
    pytest.param("skips", (0,), 5, 0.2, marks=pytest.mark.slow),
    ("skips", (0, 2, 3, 5), 5, 0.2),
]


@pytest.mark.by_turns(2)
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "cut", "layers", "dropout"), CHAINS)
def test_stages_one_after_the_other_are_the_model(name, cut, layers, dropout, tmp_path) -> None:
    one = example(name, layers, dropout)
    pipeline = pipeline_of(name, cut, layers=layers, dropout=dropout, defers_weights=name == "llama")
    package = write(pipeline, tmp_path / f"{name}_{len(cut)}")
    with SameDropout(seed=0, step=0):
        want = one.loss()
    names = [n for n, _ in one.model.named_parameters()]
    gradients = torch.autograd.grad(want, list(one.model.parameters()), allow_unused=True)
    state = {n: t.detach() for n, t in one.model.state_dict(keep_vars=True).items()}
    state |= {n: t for n, t in one.model.named_buffers()}
    batch = name_inputs(one.model, one.inputs, one.loss_fn)
    results = run_ranks(_chain, (package, pipeline, state, batch), 4)
    for loss, found in results:
        assert abs(loss - want.item()) <= 1e-5 * abs(want.item())
        for each, expected in zip(names, gradients, strict=True):
            if expected is not None and expected.norm() > 1e-4:
                assert (torch.from_numpy(found[each]) - expected).norm() <= 1e-4 * expected.norm(), each


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "dropout", "cut", "pipeline_ranks", "dp"), [
    pytest.param("gpt2", 0.1, (0, 3), (0, 1), 1, marks=pytest.mark.slow),
    pytest.param("gpt2", 0.1, (0, 3), (0, 1), 2, marks=pytest.mark.slow),
    # Two stages share a file, and so the name of what they send.
    pytest.param("llama", 0.0, (0, 2, 3, 4), (0, 1, 0, 1), 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_main_trains(name, dropout, cut, pipeline_ranks, dp, tmp_path) -> None:
    """The loss of its first step is the eager model's on the same random batch; the second step's differs."""
    one = example(name, 4, dropout)
    pipeline = pipeline_of(name, cut, pipeline_ranks, dropout=dropout, mesh={"dp": dp, "zero": 2 if dp > 1 else 0})
    folder = write(pipeline, tmp_path / "my-run")
    state = {n: tensor.detach().clone() for n, tensor in tensors_of(one.model).items()}
    save_file(state, folder / "weights.safetensors")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = forked.run([str(folder / "main.py"), "--steps", "2"], ranks=2 * dp, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (float(loss) for loss in re.findall(r"step \d+ loss ([\d.]+)", done.stdout))
    generator = torch.Generator().manual_seed(0)
    batch = {name: torch.randint(96, (8, 16), generator=generator) for name in ("input_ids", "labels")}
    with SameDropout(seed=0, step=0), torch.no_grad():
        want = one.model(**batch).loss.item()
    assert first == pytest.approx(want, abs=1e-4) and second != first


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "dropout", "zero", "sizes", "first_ranks"), [
    ("gpt2", 0.1, 0, ((1, 1), (1, 2)), (2, 0)),
    pytest.param("llama", 0.0, 3, ((2, 1), (1, 2)), (2, 0), marks=pytest.mark.slow),
])  # fmt: skip
def test_unequal_pipeline_ranks_train_like_the_model(name, dropout, zero, sizes, first_ranks, tmp_path) -> None:
    """Three steps of the saved program on real processes against the eager model: losses, gradients, weights."""
    one = example(name, 4, dropout)
    pipeline = unequal_of(name, (0, 3), sizes, first_ranks, dropout, zero=zero)
    folder = write(pipeline, tmp_path / f"{name}_unequal")
    batch = name_inputs(one.model, one.inputs, one.loss_fn)
    state = {n: tensor.detach().clone() for n, tensor in tensors_of(one.model).items()}
    model = copy.deepcopy(one.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted, gradients = [], {}
    for step in range(3):
        with SameDropout(seed=0, step=step):
            loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        wanted.append(loss.item())
    for losses, found, weights in run_ranks(_train, (folder, pipeline, state, batch), pipeline.num_ranks):
        assert losses == pytest.approx(wanted, rel=1e-6)
        for each, expected in gradients.items():
            assert (torch.from_numpy(found[each]) - expected).norm() <= 1e-5 * expected.norm() + 1e-7, each
        for each, expected in model.named_parameters():
            assert (torch.from_numpy(weights[each]) - expected).norm() <= 1e-6 * expected.norm() + 1e-7, each


def _train(folder: Path, pipeline: PipelineProgram, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    """Losses, first gradients and last weights of three steps."""
    sys.path.insert(0, str(folder.parent))
    saved = importlib.import_module(f"{folder.name}.program")
    step = saved.create_step(saved.create_mesh("cpu"), lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    step.load(state)
    own = local_batch(pipeline, batch, torch.distributed.get_rank())
    losses, gradients = [], {}
    for _ in range(3):
        losses.append(step.forward_backward(own).item())
        gradients = gradients or {n: gradient.numpy() for n, gradient in step.gradients().items()}
        step.update()
    return losses, gradients, {n: tensor.numpy() for n, tensor in step.full_state_dict().items()}


def write(pipeline: PipelineProgram, folder: Path) -> Path:
    """All that a saved folder has but plan and weights."""
    texts = {**emit_pipeline(pipeline), "program.py": emit_program(pipeline), "main.py": emit_main(pipeline)}
    texts |= imported_modules({name: text for name, text in texts.items() if name.endswith(".py")})
    for name, text in {"__init__.py": "", **texts}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def _chain(folder: Path, pipeline: PipelineProgram, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    """All stages on these ranks in turn: the loss, and the whole gradients. Nothing of the run time's own pipeline."""
    sys.path.insert(0, str(folder.parent))
    runtime = importlib.import_module(f"{folder.name}.runtime.parameters")
    mesh_module = importlib.import_module(f"{folder.name}.runtime.mesh")
    stages = importlib.import_module(f"{folder.name}.pipeline").PIPELINE.stages
    mesh = mesh_module.Mesh.create(pipeline.any.axes, pipeline.any.axis_sizes, "cpu")
    sent: list[dict[str, Tensor]] = []
    leaves = []
    for stage in stages:
        module = stage.root()(mesh)
        for slot in module.slots():
            leaf = nn.Parameter(runtime.shard(state[slot.name], slot.spec, mesh))
            leaves.append((slot, leaf))
            for owner, attribute in slot.places:
                setattr(owner, attribute, leaf)
        for name, spec, value in module.buffer_slots():
            value.copy_(runtime.shard(state[name], spec, mesh))
        inputs = {n: runtime.shard(batch[n], spec, mesh) for n, spec in module.INPUTS.items()}
        received = {n: next(held[n] for held in reversed(sent) if n in held) for n in module.RECEIVES}
        targets = {"num_targets": module.count_targets(**inputs)} if module.counts_targets else {}
        mesh.finish()
        for name, spec in module.RECEIVES.items():
            assert tuple(received[name].shape) == spec.local_shape(mesh)
        results = module(**received, **inputs, **targets)
        results = results if isinstance(results, tuple) else (results,)
        sent.append(dict(zip(module.SENDS, results, strict=True)) if module.SENDS else {"": results[0]})
    loss = sent[-1][""]
    mesh.finish()
    loss.backward()
    gradients: dict[str, Tensor] = {}
    for slot, leaf in leaves:
        local = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for axis, text in slot.spec.placements.items():
            local = mesh.axis(axis).sum_over(local) if text == "Rp" else local
        whole = runtime.unshard(local, slot.spec, mesh)
        gradients[slot.name] = gradients.get(slot.name, 0) + whole
    return loss.item(), {n: gradient.detach().numpy() for n, gradient in gradients.items()}
