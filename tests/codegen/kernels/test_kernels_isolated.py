"""Runs the tests that need a process of their own.

`triton.jit` decides at decoration, by TRITON_INTERPRET, whether a kernel is interpreted or compiled. Setting it in
this process would change what every other test of the same pytest run imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytest.importorskip("triton")


def run_python(arguments: list[str], interpret: bool, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(cache)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.parametrize(
    ("files", "interpret"),
    [
        pytest.param("swiglu cross_entropy rms_norm layer_norm rotary gelu dropout_add", True, marks=pytest.mark.slow),
        pytest.param("linear_cross_entropy grouped_linear expert_rows tiles", True, marks=pytest.mark.slow),
        pytest.param("adamw fp8 quantize update programs", True, marks=pytest.mark.slow),
        pytest.param("", False, marks=pytest.mark.slow),
    ],
)
def test_in_its_own_process(files: str, interpret: bool, tmp_path: Path) -> None:
    options = ["-q", "-x", "--import-mode=importlib", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short"]
    paths = [HERE / f"interpreted_{name}.py" for name in files.split()] or [HERE / "compiled_for_hopper.py"]
    result = run_python(["-m", "pytest", *options, *map(str, paths)], interpret, tmp_path)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    # A file whose tests were all skipped or not collected must not count as checked.
    assert " passed" in result.stdout and "skipped" not in result.stdout, result.stdout[-2000:]


@pytest.mark.slow
def test_benchmark_smoke(tmp_path: Path) -> None:
    """The GPU benchmark's whole path, on tiny shapes in the interpreter: no timings, no rows written."""
    csv = ROOT / "benchmarks" / "results" / "kernels.csv"
    before = csv.read_bytes() if csv.exists() else None
    result = run_python(["-m", "benchmarks.gpu.kernels", "--smoke"], False, tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for kernel in (
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "add_layer_norm",
        "rotary",
        "rotary_interleaved",
        "geglu",
        "geglu_tanh",
        "bias_gelu",
        "bias_gelu_tanh",
        "dropout_add",
        "swiglu",
        "cross_entropy",
        "linear_cross_entropy",
        "grouped_linear",
        "adamw",
        "grad_norm",
        "quantize_int8",
    ):
        assert f"\n{kernel} " in f"\n{result.stdout}"
    assert "GB/s" not in result.stdout
    assert (csv.read_bytes() if csv.exists() else None) == before
