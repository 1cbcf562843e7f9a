"""Processes of a machine with GPUs are spawned and receive their work; a step that is dropped leaves nothing behind."""

from __future__ import annotations

import gc
import pickle
import weakref

import pytest
import torch

import autopar
from autopar import launch
from autopar.errors import ConstraintError
from autopar.running import process_group
from examples.models import EXAMPLES

SIZES = {"layers": 2, "width": 32, "num_heads": 2, "seq_len": 16, "vocab_size": 64, "batch_size": 4}


def compile_fused(name: str, cluster: str, **options):
    """A program with fused kernels, for GPUs that are not here."""
    example = EXAMPLES[name](**SIZES)
    return autopar.compile(
        example.model, cluster, example_inputs=example.inputs, precision="bf16", kernels="on", **options
    )


@pytest.mark.parametrize(
    ("name", "cluster", "constraints"),
    [
        ("llama", "1 h100-sxm", {}),
        pytest.param("gpt2", "2 h100-sxm", {"pp": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", "2 h100-sxm", {"dp": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_program_with_kernels_can_be_sent(name, cluster, constraints):
    program = compile_fused(name, cluster, constraints=constraints)
    assert "kernels." in program.source
    sent = pickle.loads(pickle.dumps(program))
    assert sent.files == program.files and sent.plan == program.plan
    assert all(torch.equal(a, b) for a, b in zip(sent.model.parameters(), program.model.parameters(), strict=True))


@pytest.mark.distributed
def test_what_cannot_be_sent_is_named(monkeypatch):
    monkeypatch.setattr(launch, "_start_method", lambda: "spawn")
    with pytest.raises(ConstraintError, match=r"must be picklable[\s\S]*<lambda>[\s\S]*torchrun"):
        launch.run_ranks(lambda: 1, (), 2)


@pytest.mark.distributed
@pytest.mark.slow
def test_ranks_need_not_be_forked(monkeypatch):
    monkeypatch.setattr(launch, "_start_method", lambda: "spawn")
    launch.meet(120.0)


@pytest.mark.parametrize(("gpus", "local", "on_cpu", "backend"), [
    (8, "8", False, "nccl"), (8, "8", True, "gloo"), (1, "4", False, "gloo"), (0, "1", False, "gloo"),
])  # fmt: skip
def test_ranks_get_a_gpu_each_or_none(gpus, local, on_cpu, backend, monkeypatch):
    joined = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: joined.append(device))
    monkeypatch.setattr(process_group, "join", lambda name, seconds: joined.append(name))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("LOCAL_RANK", "0")
    process_group.start_group(on_cpu=on_cpu)
    assert joined == ([0, "nccl"] if backend == "nccl" else ["gloo"])


def test_a_step_that_is_let_go_leaves_no_buffers():
    """torch keeps a leaf's hooks out of the collector's sight: one that held its bucket kept all of a model's bytes."""
    example = EXAMPLES["llama"](**SIZES)

    def trained() -> list[weakref.ref]:
        program = autopar.compile(example.model, "1 cpu", example_inputs=example.inputs, precision="bf16")
        step = program.build()
        before = [p.clone() for p in step.model.parameters()]
        step(step.local_batch(example.inputs))
        assert any(not torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
        return [weakref.ref(bucket) for bucket in step.buckets]

    buckets = trained()
    gc.collect()
    assert buckets and not [bucket for bucket in buckets if bucket() is not None]
