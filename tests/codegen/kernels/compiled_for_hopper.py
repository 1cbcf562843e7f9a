"""Every kernel compiles for a GPU none of which is here: what the interpreter accepts the compiler may refuse.

Run by test_kernels_isolated.py in a process of its own, without TRITON_INTERPRET. Compute capability 9.0 (H100, H200).
"""

from __future__ import annotations

import importlib

import pytest
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from codegen.kernels import gated
from codegen.kernels.dispatch import num_warps, power_of_2_at_least, row_tile

# As attributes of the package these names are the functions, not the files.
ce = importlib.import_module("codegen.kernels.cross_entropy")
rms = importlib.import_module("codegen.kernels.rms_norm")
glu = importlib.import_module("codegen.kernels.swiglu")
linear_ce = importlib.import_module("codegen.kernels.linear_cross_entropy")
adamw = importlib.import_module("codegen.kernels.adamw")
grad_norm = importlib.import_module("codegen.kernels.grad_norm")
fp8 = importlib.import_module("codegen.kernels.fp8")
quantize = importlib.import_module("codegen.kernels.quantize")
layer_norm = importlib.import_module("codegen.kernels.layer_norm")
rotary = importlib.import_module("codegen.kernels.rotary")
geglu = importlib.import_module("codegen.kernels.geglu")
bias_gelu = importlib.import_module("codegen.kernels.bias_gelu")
dropout_add = importlib.import_module("codegen.kernels.dropout_add")

POINTERS = {
    "*i64": ("target_ptr", "offsets_ptr", "numels_ptr", "chunks_ptr", "rows_ptr", "columns_ptr"),
    "*fp32": ("rstd_ptr", "dot_ptr", "dw_ptr", "loss_ptr", "max_ptr", "logsum_ptr", "dloss_ptr", "stats_ptr", "in_ptr")
    + ("scale_ptr", "scales_ptr", "parameter_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "decays_ptr", "factors_ptr")
    + ("partial_ptr", "weights_ptr", "mean_ptr", "avg_ptr", "db_ptr"),
    "*fp8e4nv": ("q_ptr",),
}
POINTER_TYPES = {name: type_ for type_, names in POINTERS.items() for name in names}
FLOATS = {"eps", "one_minus_beta1", "beta2", "one_minus_beta2", "scale"}
INT64 = {"row_offset", "multiplier", "start"}
# Never a multiple of 16, or not by nature: Triton learns alignment at each launch.
UNALIGNED = {"blocks_per_row", "first_class", "num_blocks", "num_parts", "seed", "threshold", *FLOATS, *INT64}
UNALIGNED |= {"num_tokens", "num_q_heads", "num_k_heads", "blocks_per_token", "q_heads_per_block", "k_heads_per_block"}


def argument_type(name, dtype):
    if name.endswith("_ptr"):
        return POINTER_TYPES.get(name, f"*{dtype}")
    return "fp32" if name in FLOATS else "i64" if name in INT64 else "i32"


def compile_kernel(kernel, dtype, constants, warps, **options):
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
    return triton_compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, **options})


def norm_cases(name, module, means, parameters, row_kernel, extra):
    """Of a norm and of a sum's. means: what a row that fits needs no tensor for; parameters: NEED_* and its tensor."""
    alone, with_sum = {"HAS_RESIDUAL": False, "residual_ptr": None, "sum_ptr": None}, {"HAS_RESIDUAL": True}
    no_dsum, with_dsum = {"HAS_DSUM": False, "dsum_ptr": None}, {"HAS_DSUM": True}
    for num_cols in (128, 4096, 20000):
        rows, cols, whole = row_tile(num_cols, module._MAX_FORWARD_TILE)
        tile = {"ROWS": rows, "COLS": cols, "WHOLE_ROW": whole} | extra
        yield f"{name}_forward_{num_cols}", module._forward_kernel, tile | alone, rows * cols
        yield f"add_{name}_forward_{num_cols}", module._forward_kernel, tile | with_sum, rows * cols
        rows, cols, whole = row_tile(num_cols, module._MAX_BACKWARD_TILE)
        tile = {"ROWS": rows, "COLS": cols, "WHOLE_ROW": whole} | (dict.fromkeys(means) if whole else {})
        both = tile | {"NEED_DX": True} | dict.fromkeys(parameters, True)
        yield f"{name}_backward_{num_cols}", module._backward_kernel, both | no_dsum, rows * cols
        yield f"add_{name}_backward_{num_cols}", module._backward_kernel, both | with_dsum, rows * cols
    dx_only = both | no_dsum | dict.fromkeys(parameters, False) | dict.fromkeys(parameters.values())
    yield f"{name}_backward_dx", module._backward_kernel, dx_only, rows * cols
    parameters_only = both | no_dsum | {"NEED_DX": False, "dx_ptr": None} | dict.fromkeys(means)
    yield f"{name}_backward_parameters", module._backward_kernel, parameters_only, rows * cols
    yield f"{name}_rows", row_kernel, {"COLS": cols}, cols


def rms_cases():
    yield from norm_cases("rms", rms, ("dot_ptr",), {"NEED_DW": "dw_ptr"}, rms._row_dot_kernel, {})


def layer_norm_cases():
    parameters = {"NEED_DW": "dw_ptr", "NEED_DB": "db_ptr"}
    means, row_kernel = ("dot_ptr", "avg_ptr"), layer_norm._row_means_kernel
    yield from norm_cases("layer", layer_norm, means, parameters, row_kernel, {"HAS_BIAS": True})


def other_cases():
    for name, module, block in (("swiglu", glu, gated._MAX_BLOCK), ("cross_entropy", ce, ce._MAX_BLOCK)):
        for direction in ("forward", "backward"):
            yield f"{name}_{direction}", getattr(module, f"_{direction}_kernel"), {"BLOCK": block}, block


def gelu_cases():
    for tanh in (False, True):
        for direction in ("forward", "backward"):
            kernel, block = getattr(geglu, f"_{direction}_kernel"), gated._MAX_BLOCK
            yield f"geglu_{direction}_{tanh}", kernel, {"BLOCK": block, "TANH": tanh}, block
        for num_cols in (128, 16384):
            rows, cols, _ = row_tile(num_cols, bias_gelu._MAX_TILE)
            tile = {"ROWS": rows, "COLS": cols, "TANH": tanh}
            yield f"bias_gelu_forward_{num_cols}_{tanh}", bias_gelu._forward_kernel, tile, rows * cols
            both = tile | {"NEED_DX": True, "NEED_DB": True}
            yield f"bias_gelu_backward_{num_cols}_{tanh}", bias_gelu._backward_kernel, both, rows * cols
    dx_only = both | {"NEED_DB": False, "db_ptr": None}
    yield "bias_gelu_backward_dx", bias_gelu._backward_kernel, dx_only, rows * cols


def rotary_cases():
    """Llama 3 8B's heads, a third of GPT-NeoX 20B's, GPT-J's."""
    for num_q, num_k, num_pairs, num_rest, interleaved in (
        (32, 8, 64, 0, False),
        (32, 32, 12, 72, False),
        (16, 16, 32, 192, True),
    ):
        pairs, rest = power_of_2_at_least(num_pairs), power_of_2_at_least(num_rest) if num_rest else 0
        tile = {"Q_HEADS": num_q, "K_HEADS": num_k, "NUM_PAIRS": num_pairs, "INTERLEAVED": interleaved}
        # fp8.py has a q_ptr too, of another type.
        tile |= {"PAIRS": pairs, "NUM_REST": num_rest, "REST": rest, "q_ptr": "*bf16"}
        for backward in (False, True):
            name = f"rotary_{2 * num_pairs}_{num_rest}_{'backward' if backward else 'forward'}"
            yield name, rotary._rotary_kernel, tile | {"BACKWARD": backward}, num_q * (2 * pairs + rest)


def dropout_cases():
    for num_cols in (128, 4096):
        rows, cols, _ = row_tile(num_cols, dropout_add._MAX_TILE)
        for paired in (False, True):
            tile = {"ROWS": rows, "COLS": cols, "PAIRED": paired}
            forward = tile | {"HAS_RESIDUAL": True}
            yield f"dropout_add_{num_cols}_{paired}", dropout_add._dropout_kernel, forward, rows * cols
            backward = tile | {"HAS_RESIDUAL": False, "residual_ptr": None}
            yield f"dropout_backward_{num_cols}_{paired}", dropout_add._dropout_kernel, backward, rows * cols


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


CASES = [*rms_cases(), *layer_norm_cases(), *other_cases(), *gelu_cases(), *rotary_cases(), *dropout_cases()]
CASES += [*linear_cross_entropy_cases(), *table_cases(), *quantize_cases()]

KERNELS = [kernel for _, kernel, _, _ in CASES]
PARAMETERS = [
    pytest.param(*case[1:], id=case[0], marks=[pytest.mark.slow] if KERNELS.index(case[1]) < index else [])
    for index, case in enumerate(CASES)
]


@pytest.mark.parametrize(("kernel", "constants", "num_elements"), PARAMETERS)
def test_compiles_with_16_byte_loads(kernel, constants, num_elements):
    compiled = compile_kernel(kernel, "bf16", constants, num_warps(num_elements))
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert ".v4.b32" in compiled.asm["ptx"], "no 16-byte access: the kernel would not reach the memory's bandwidth"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotary_128_0_forward", "rotary_128_0_backward"])
def test_rounds_products_only_without_fusion(name):
    """Why the launchers of kernels that promise bits say enable_fp_fusion=False, in half precision too."""
    ((_, kernel, constants, num_elements),) = (case for case in CASES if case[0] == name)
    warps = num_warps(num_elements)
    assert "fma.rn" in compile_kernel(kernel, "bf16", constants, warps, enable_fp_fusion=True).asm["ptx"]
    assert "fma.rn" not in compile_kernel(kernel, "bf16", constants, warps, enable_fp_fusion=False).asm["ptx"]
