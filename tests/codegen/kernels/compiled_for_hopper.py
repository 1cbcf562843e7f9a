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
linear_ce = importlib.import_module("codegen.kernels.linear_cross_entropy")
adamw = importlib.import_module("codegen.kernels.adamw")
grad_norm = importlib.import_module("codegen.kernels.grad_norm")
fp8 = importlib.import_module("codegen.kernels.fp8")
quantize = importlib.import_module("codegen.kernels.quantize")

POINTERS = {
    "*i64": ("target_ptr", "offsets_ptr", "numels_ptr", "chunks_ptr"),
    "*fp32": ("rstd_ptr", "dot_ptr", "dw_ptr", "loss_ptr", "max_ptr", "logsum_ptr", "dloss_ptr", "stats_ptr", "in_ptr")
    + ("scale_ptr", "scales_ptr", "parameter_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "decays_ptr", "factors_ptr")
    + ("partial_ptr", "weights_ptr"),
    "*fp8e4nv": ("q_ptr",),
}
POINTER_TYPES = {name: type_ for type_, names in POINTERS.items() for name in names}
FLOATS = {"eps", "one_minus_beta1", "beta2", "one_minus_beta2"}
# Never a multiple of 16, or not by nature: Triton learns alignment at each launch.
UNALIGNED = {"blocks_per_row", "first_class", "num_blocks", "num_parts", "seed", *FLOATS}


def argument_type(name, dtype):
    if name.endswith("_ptr"):
        return POINTER_TYPES.get(name, f"*{dtype}")
    return "fp32" if name in FLOATS else "i32"


def compile_kernel(kernel, dtype, constants, warps):
    # A pointer type among the constants is no constant.
    pointers = {name: constants[name] for name in constants if str(constants[name]).startswith("*")}
    constants = {name: value for name, value in constants.items() if name not in pointers}
    signature = {
        p.name: "constexpr" if p.name in constants else pointers.get(p.name, argument_type(p.name, dtype))
        for p in kernel.params
    }
    constexprs = {(p.num,): constants[p.name] for p in kernel.params if p.name in constants}
    # As for a launch with 16-byte aligned rows: pointers, strides and lengths are multiples of 16.
    aligned = [p for p in kernel.params if p.name not in constants and p.name not in UNALIGNED]
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


def linear_cross_entropy_cases():
    block = linear_ce._MAX_BLOCK
    for name in ("statistics", "gradient", "scale"):
        yield f"linear_ce_{name}", getattr(linear_ce, f"_{name}_kernel"), {"BLOCK": block}, block


def table_cases():
    table = {"CHUNK": adamw.CHUNK, "BLOCK": adamw.BLOCK, "ALIGNED": True}
    with_copy = table | {"NUM_COLUMNS": 5, "HAS_COPY": True}
    yield "adamw", adamw._adamw_kernel, with_copy, adamw._WARP_FACTOR * adamw.BLOCK
    alone = table | {"NUM_COLUMNS": 4, "HAS_COPY": False, "copy_ptr": None}
    yield "adamw_without_copy", adamw._adamw_kernel, alone, adamw._WARP_FACTOR * adamw.BLOCK
    norm = table | {"NUM_COLUMNS": 5, "COLUMN": 1}
    yield "grad_norm", grad_norm._square_kernel, norm | {"WEIGHTED": True}, adamw.BLOCK
    yield "grad_norm_alone", grad_norm._square_kernel, norm | {"WEIGHTED": False, "weights_ptr": None}, adamw.BLOCK


def quantize_cases():
    scales = {"SMALLEST_AMAX": fp8.SMALLEST_AMAX}
    for whole in (True, False):
        row = scales | {"LARGEST": fp8.E4M3_MAX, "BLOCK": fp8._MAX_BLOCK, "WHOLE_ROW": whole}
        yield f"fp8_quantize_{whole}", fp8._quantize_kernel, row, fp8._MAX_BLOCK
    yield "fp8_dequantize", fp8._dequantize_kernel, {"BLOCK": fp8._MAX_BLOCK}, fp8._MAX_BLOCK
    kinds = [("i8", False), ("i8", True), ("fp8e4nv", False)]
    for block, (code, stochastic) in [
        *((256, kind) for kind in kinds),
        (16, kinds[0]),
        (quantize._LARGEST_BLOCK, kinds[1]),
    ]:
        rows = max(quantize._TILE // block, 1)
        tile = {"ROWS": rows, "BLOCK": block, "codes_ptr": f"*{code}"}
        kind = scales | {"INTEGER": code == "i8", "STOCHASTIC": stochastic, "LARGEST": 127.0}
        yield f"quantize_{block}_{code}_{stochastic}", quantize._quantize_kernel, tile | kind, rows * block
        if not stochastic:
            yield f"dequantize_sum_{block}_{code}", quantize._dequantize_sum_kernel, tile, rows * block


CASES = [*rms_cases(), *other_cases(), *linear_cross_entropy_cases(), *table_cases(), *quantize_cases()]


@pytest.mark.parametrize(("kernel", "constants", "num_elements"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_compiles_with_16_byte_loads(kernel, constants, num_elements):
    compiled = compile_kernel(kernel, "bf16", constants, num_warps(num_elements))
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert ".v4.b32" in compiled.asm["ptx"], "no 16-byte access: the kernel would not reach the memory's bandwidth"
