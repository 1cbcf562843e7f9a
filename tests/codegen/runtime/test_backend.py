"""What backend="inductor" needs of the machine, and how long ranks wait for one that compiles."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist

from codegen.runtime import compiled_layers
from codegen.runtime.compiled_layers import patience, require, why_unavailable
from codegen.runtime.mesh import Mesh
from tests.codegen.runtime.ranks import run_ranks

CPU = torch.device("cpu")
SHORT_SECONDS = 1.0


def test_unknown_backends_are_refused_with_the_legal_names() -> None:
    with pytest.raises(ValueError, match="one of eager, inductor, async-tp, got 'jit'"):
        require("jit", CPU)


def test_without_a_compiler_inductor_is_refused() -> None:
    assert why_unavailable(CPU) == ""
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",)}):
        with pytest.raises(RuntimeError, match="no C\\+\\+ compiler.*backend='eager'"):
            require("inductor", CPU)
        require("eager", CPU)


def test_without_headers_inductor_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled_layers.sysconfig, "get_path", lambda _: str(tmp_path))
    assert str(tmp_path / "Python.h") in why_unavailable(CPU)


def test_without_triton_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers.importlib.util, "find_spec", lambda _: None)
    assert "triton" in why_unavailable(torch.device("cuda"))


def _late(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether rank 0 gets over a sum to which rank 1 comes late: in patience, and after it."""
    mesh = Mesh.create(("dp", "tp"), (world_size, 1))
    short = dist.new_group([0, 1], timeout=timedelta(seconds=SHORT_SECONDS))

    def meets() -> bool:
        if rank == 1:
            time.sleep(3 * SHORT_SECONDS)
        try:
            dist.all_reduce(torch.ones(1), group=short)
        except RuntimeError:
            return False
        return True

    with patience(60.0):
        within = meets()
    mesh.dp.sum_over(torch.ones(1))  # both are here
    return within, meets()


@pytest.mark.slow
@pytest.mark.distributed
def test_collectives_wait_for_a_rank_that_compiles_and_no_longer() -> None:
    results = run_ranks(_late, 2)
    assert [within for within, _ in results] == [True, True]
    assert not results[0][1]
