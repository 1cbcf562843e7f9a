"""Every kernel compiles for a GPU none of which is here: what the interpreter accepts the compiler may refuse.

Run by test_kernels_isolated.py in a process of its own, without TRITON_INTERPRET. Compute capability 9.0 (H100, H200).
"""

from __future__ import annotations

import importlib

import pytest
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from codegen.kernels.dispatch import num_warps

# As attributes of the package these names are the functions, not the files.
ce = importlib.import_module("codegen.kernels.cross_entropy")
rms = importlib.import_module("codegen.kernels.rms_norm")
glu = importlib.import_module("codegen.kernels.swiglu")

ALWAYS_FP32 = {"rstd_ptr", "dot_ptr", "dw_ptr", "loss_ptr", "max_ptr", "logsum_ptr", "dloss_ptr"}


def argument_type(name, dtype):
    if name == "target_ptr":
        return "*i64"
    if name.endswith("_ptr"):
        return "*fp32" if name in ALWAYS_FP32 else f"*{dtype}"
    return "fp32" if name == "eps" else "i32"


def compile_kernel(kernel, dtype, constants, warps):
    signature = {p.name: "constexpr" if p.name in constants else argument_type(p.name, dtype) for p in kernel.params}
    constexprs = {(p.num,): constants[p.name] for p in kernel.params if p.name in constants}
    # As for a launch with 16-byte aligned rows: pointers, strides and lengths are multiples of 16.
    aligned = [p for p in kernel.params if p.name not in constants and p.name not in ("eps", "blocks_per_row")]
    attributes = {(p.num,): [["tt.divisibility", 16]] for p in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def rms_cases():
    for num_cols in (128, 4096, 20000):
        rows, cols, whole = rms._tile(num_cols, rms._MAX_FORWARD_TILE)
        tile = {"ROWS": rows, "COLS": cols, "WHOLE_ROW": whole}
        yield f"rms_forward_{num_cols}", rms._forward_kernel, tile, rows * cols
        rows, cols, whole = rms._tile(num_cols, rms._MAX_BACKWARD_TILE)
        tile = {"ROWS": rows, "COLS": cols, "WHOLE_ROW": whole} | ({"dot_ptr": None} if whole else {})
        both = tile | {"NEED_DX": True, "NEED_DW": True}
        yield f"rms_backward_{num_cols}", rms._backward_kernel, both, rows * cols
    dx_only = both | {"NEED_DW": False, "dw_ptr": None}
    yield "rms_backward_dx", rms._backward_kernel, dx_only, rows * cols
    dw_only = both | {"NEED_DX": False, "dx_ptr": None, "dot_ptr": None}
    yield "rms_backward_dw", rms._backward_kernel, dw_only, rows * cols
    yield "rms_row_dot", rms._row_dot_kernel, {"COLS": cols}, cols


def other_cases():
    for name, module in (("swiglu", glu), ("cross_entropy", ce)):
        for direction in ("forward", "backward"):
            kernel = getattr(module, f"_{direction}_kernel")
            yield f"{name}_{direction}", kernel, {"BLOCK": module._MAX_BLOCK}, module._MAX_BLOCK


CASES = [*rms_cases(), *other_cases()]


@pytest.mark.parametrize(("kernel", "constants", "num_elements"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_compiles_with_16_byte_loads(kernel, constants, num_elements):
    compiled = compile_kernel(kernel, "bf16", constants, num_warps(num_elements))
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert ".v4.b32" in compiled.asm["ptx"], "no 16-byte access: the kernel would not reach the memory's bandwidth"
