"""Every kernel compiles for a GPU none of which is here: what the interpreter accepts the compiler may refuse.

Run by test_kernels_isolated.py in a process of its own, without TRITON_INTERPRET. Compute capability 9.0 (H100, H200).
"""

from __future__ import annotations

import importlib
import re

import pytest
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from codegen.kernels import gated
from codegen.kernels.dispatch import power_of_2_at_least

# As attributes of the package these names are the functions, not the files.
ce = importlib.import_module("codegen.kernels.cross_entropy")
norms = importlib.import_module("codegen.kernels.norm_kernels")
norm_launches = importlib.import_module("codegen.kernels.norm_launches")
counting_sort = importlib.import_module("codegen.kernels.counting_sort")
token_sums = importlib.import_module("codegen.kernels.token_sums")
grouped = importlib.import_module("codegen.kernels.grouped_linear")
column_sums = importlib.import_module("codegen.kernels.column_sums")
linear_ce = importlib.import_module("codegen.kernels.linear_cross_entropy_kernels")
adamw = importlib.import_module("codegen.kernels.adamw")
grad_norm = importlib.import_module("codegen.kernels.grad_norm")
fp8 = importlib.import_module("codegen.kernels.fp8")
quantize = importlib.import_module("codegen.kernels.quantize")
rotary = importlib.import_module("codegen.kernels.rotary")
bias_gelu = importlib.import_module("codegen.kernels.bias_gelu")
dropout_add = importlib.import_module("codegen.kernels.dropout_add")

POINTERS = {
    "*i64": ("target_ptr", "offsets_ptr", "numels_ptr", "chunks_ptr", "rows_ptr", "columns_ptr")
    + ("ids_ptr", "order_ptr", "inverse_ptr", "places_ptr"),
    "*fp32": ("rstd_ptr", "dot_ptr", "loss_ptr", "max_ptr", "logsum_ptr", "dloss_ptr", "stats_ptr", "in_ptr")
    + ("scale_ptr", "scales_ptr", "parameter_ptr", "exp_avg_ptr", "exp_avg_sq_ptr", "decays_ptr", "factors_ptr")
    + ("partial_ptr", "weights_ptr", "mean_ptr", "avg_ptr", "db_ptr"),
    "*fp8e4nv": ("q_ptr",),
    "*i32": ("ends_ptr", "counts_ptr"),
}
POINTER_TYPES = {name: type_ for type_, names in POINTERS.items() for name in names}
FLOATS = {"eps", "one_minus_beta1", "beta2", "one_minus_beta2", "scale"}
INT64 = {"row_offset", "multiplier", "start"}
# Never a multiple of 16, or not by nature: Triton learns alignment at each launch.
UNALIGNED = {"blocks_per_row", "first_class", "num_blocks", "num_parts", "seed", "threshold", *FLOATS, *INT64}
UNALIGNED |= {"num_ids", "num_rows", "num_choices", "num_programs", "tiles_per_program"}
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


ROUNDED_ONCE = {"ROUNDS_XHAT": False, "OFFSET": 1.0}
"""As Gemma's norms are."""


def norm_cases(name, centered):
    """Of a norm, and of one with a sum before or after it, without what only the other kind of norm has."""
    needs = {"NEED_DX": True, "NEED_DW": True, "NEED_DB": centered}
    absent = {} if centered else {"mean_ptr": None, "avg_ptr": None}
    form = {"CENTERED": centered, "ROUNDS_XHAT": not centered, "HAS_WEIGHT": True, "OFFSET": 0.0}
    no_weight = {"HAS_WEIGHT": False, "w_ptr": None}
    alone = {"SUM_BEFORE": False, "SUM_AFTER": False, "residual_ptr": None, "sum_ptr": None}
    sum_before, sum_after = {"SUM_BEFORE": True, "SUM_AFTER": False}, alone | {"SUM_AFTER": True}
    del sum_after["residual_ptr"]
    no_dsum, with_dsum = {"HAS_DSUM": False, "dsum_ptr": None}, {"HAS_DSUM": True}

    def forward(tile, num_cols):
        rows, cols, whole, warps = tile.fit(num_cols)
        kernel = norms.forward_kernel if whole else norms.forward_blocks_kernel
        bias = {"HAS_BIAS": True} if centered else {"HAS_BIAS": False, "b_ptr": None, "mean_ptr": None}
        return kernel, {"ROWS": rows, "COLS": cols} | form | bias, warps

    def backward(tile, num_cols):
        rows, cols, whole, warps = tile.fit(num_cols)
        means = dict.fromkeys(("dot_ptr", "avg_ptr")) if whole else {}
        return {"ROWS": rows, "COLS": cols, "WHOLE_ROW": whole} | form | absent | means | needs, warps

    for num_cols in (128, 4096, 20000):
        kernel, constants, warps = forward(norm_launches.FORWARD_TILES[0], num_cols)
        yield f"{name}_forward_{num_cols}", kernel, constants | alone, warps
        yield f"{name}_forward_{num_cols}_no_weight", kernel, constants | alone | no_weight, warps
        yield f"add_{name}_forward_{num_cols}", kernel, constants | sum_before, warps
        yield f"{name}_add_forward_{num_cols}", kernel, constants | sum_after, warps
        yield f"{name}_add_forward_{num_cols}_once", kernel, constants | sum_after | ROUNDED_ONCE, warps
        constants, warps = backward(norm_launches.BACKWARD_TILES[0], num_cols)
        yield f"{name}_backward_{num_cols}", norms.backward_kernel, constants | no_dsum, warps
        yield f"add_{name}_backward_{num_cols}", norms.backward_kernel, constants | with_dsum, warps
        yield f"{name}_backward_{num_cols}_once", norms.backward_kernel, constants | no_dsum | ROUNDED_ONCE, warps
    dx_only = constants | no_dsum | {"NEED_DW": False, "NEED_DB": False, "partial_ptr": None}
    yield f"{name}_backward_dx", norms.backward_kernel, dx_only, warps
    yield f"{name}_backward_no_weight", norms.backward_kernel, dx_only | no_weight, warps
    parameters_only = constants | no_dsum | {"NEED_DX": False} | dict.fromkeys(("dx_ptr", "dot_ptr", "avg_ptr"))
    yield f"{name}_backward_parameters", norms.backward_kernel, parameters_only, warps
    row_means = {"COLS": constants["COLS"], "CENTERED": centered, "HAS_WEIGHT": True, "OFFSET": 0.0} | absent
    yield (
        f"{name}_rows",
        norms.row_means_kernel,
        row_means,
        norm_launches.BACKWARD_TILES[0].num_warps(row_means["COLS"]),
    )
    for index, tile in enumerate(norm_launches.FORWARD_TILES[1:], 1):
        kernel, constants, warps = forward(tile, 4096)
        yield f"add_{name}_forward_tile_{index}", kernel, constants | sum_before, warps
    for index, tile in enumerate(norm_launches.BACKWARD_TILES[1:], 1):
        constants, warps = backward(tile, 4096)
        yield f"add_{name}_backward_tile_{index}", norms.backward_kernel, constants | with_dsum, warps


def column_sum_cases():
    """Of one gradient and of two, whose dtypes may differ."""
    sizes = {"ROWS": column_sums.ROWS, "COLS": column_sums.COLS}
    one, two = {"HAS_SECOND": False, "second_ptr": None}, {"HAS_SECOND": True, "second_ptr": "*fp32"}
    for name, constants in (("one", one), ("two", two)):
        yield f"column_sums_{name}", column_sums._column_sums_kernel, sizes | constants, 4


def block_cases(name, kernel, tiles, num_cols=1 << 20, **constants):
    """Of a kernel over blocks of a row, with every tile."""
    for index, tile in enumerate(tiles):
        _, block, _, warps = tile.fit(num_cols)
        yield f"{name}_tile_{index}" if index else name, kernel, {"BLOCK": block} | constants, warps


def tile_cases(name, kernel, tiles, num_cols, **constants):
    """Of a kernel over tiles of rows, with every tile."""
    for index, tile in enumerate(tiles):
        rows, cols, _, warps = tile.fit(num_cols)
        label = f"{name}_{num_cols}_tile_{index}" if index else f"{name}_{num_cols}"
        yield label, kernel, {"ROWS": rows, "COLS": cols} | constants, warps


def other_cases():
    for direction in ("forward", "backward"):
        kernel = getattr(gated, f"{direction}_kernel")
        yield from block_cases(f"swiglu_{direction}", kernel, gated.TILES, SILU=True, TANH=False)
        tiles = getattr(ce, f"{direction.upper()}_TILES")
        yield from block_cases(f"cross_entropy_{direction}", getattr(ce, f"_{direction}_kernel"), tiles)


def gelu_cases():
    for tanh in (False, True):
        for direction in ("forward", "backward"):
            tiles = gated.TILES if tanh else gated.TILES[:1]
            kernel = getattr(gated, f"{direction}_kernel")
            yield from block_cases(f"geglu_{direction}_{tanh}", kernel, tiles, SILU=False, TANH=tanh)
        both = {"TANH": tanh, "NEED_DX": True, "NEED_DB": True}
        for num_cols, last in ((128, 1), (16384, None if tanh else 1)):
            forward, backward = bias_gelu.FORWARD_TILES[:last], bias_gelu.BACKWARD_TILES[:last]
            yield from tile_cases(f"bias_gelu_forward_{tanh}", bias_gelu._forward_kernel, forward, num_cols, TANH=tanh)
            yield from tile_cases(f"bias_gelu_backward_{tanh}", bias_gelu._backward_kernel, backward, num_cols, **both)
    dx_only = both | {"NEED_DB": False, "db_ptr": None}
    tiles = bias_gelu.BACKWARD_TILES[:1]
    yield from tile_cases("bias_gelu_backward_dx", bias_gelu._backward_kernel, tiles, 16384, **dx_only)


def rotary_cases():
    """Llama 3 8B's heads, a third of GPT-NeoX 20B's, GPT-J's; as many of them as a tile takes."""
    for num_q, num_k, num_pairs, num_rest, interleaved in (
        (32, 8, 64, 0, False),
        (32, 32, 12, 72, False),
        (16, 16, 32, 192, True),
    ):
        pairs, rest = power_of_2_at_least(num_pairs), power_of_2_at_least(num_rest) if num_rest else 0
        # fp8.py has a q_ptr too, of another type.
        heads = {"NUM_PAIRS": num_pairs, "INTERLEAVED": interleaved, "PAIRS": pairs, "NUM_REST": num_rest, "REST": rest}
        heads |= {"q_ptr": "*bf16"}
        for index, tile in enumerate(rotary.TILES):
            blocks = -(-num_q * (2 * pairs + rest) // tile.most)
            q_heads, k_heads = (power_of_2_at_least(-(-num // blocks)) for num in (num_q, num_k))
            warps = tile.num_warps(q_heads * (2 * pairs + rest))
            for backward in (False, True):
                name = f"rotary_{2 * num_pairs}_{num_rest}_{'backward' if backward else 'forward'}"
                constants = heads | {"Q_HEADS": q_heads, "K_HEADS": k_heads, "BACKWARD": backward}
                yield f"{name}_tile_{index}" if index else name, rotary._rotary_kernel, constants, warps


def dropout_cases():
    of_host = {"KEY_ON_DEVICE": False}
    of_device = {"KEY_ON_DEVICE": True, "multiplier": "*i64", "start": "*i64"}
    for num_cols, last in ((128, 1), (4096, None)):
        for paired, key in ((False, of_host), (True, of_host), (True, of_device)):
            kernel, tiles = dropout_add._dropout_kernel, dropout_add.TILES[:last]
            name = f"{paired}{'_keyed' if key is of_device else ''}"
            forward = key | {"PAIRED": paired, "HAS_RESIDUAL": True}
            yield from tile_cases(f"dropout_add_{name}", kernel, tiles, num_cols, **forward)
            backward = key | {"PAIRED": paired, "HAS_RESIDUAL": False, "residual_ptr": None}
            yield from tile_cases(f"dropout_backward_{name}", kernel, tiles[:1], num_cols, **backward)


def linear_cross_entropy_cases():
    element_tiles = linear_ce.ELEMENT_TILES
    for name, tiles in (
        ("statistics", linear_ce.STATISTICS_TILES),
        ("gradient", element_tiles),
        ("scale", element_tiles),
    ):
        constants = {"UNIT": 1.0} if name == "gradient" else {}
        yield from block_cases(f"linear_ce_{name}", getattr(linear_ce, f"_{name}_kernel"), tiles, **constants)


def grouped_cases():
    """Matrices as they are stored or transposed, as gradients of rows read them."""
    no_bias = {"HAS_BIAS": False, "bias_ptr": None}
    for index, tile in enumerate(grouped.TILES):
        rows, cols = tile.fit(4096, 4096)
        own = {"ROWS": rows, "COLS": cols, "DEPTH": tile.depth(2), "WIDE": False}
        experts = own | {"EXPERTS": 8, "BESIDE": 8}
        label = f"_tile_{index}" if index else ""
        yield f"grouped{label}", grouped._rows_kernel, experts | no_bias | {"col_stride": 1}, tile
        yield f"grouped_weight{label}", grouped._weight_kernel, own | {"NEED_DBIAS": True, "dbias_ptr": "*bf16"}, tile
    yield "grouped_transposed", grouped._rows_kernel, experts | no_bias | {"inner_stride": 1}, tile
    yield "grouped_bias", grouped._rows_kernel, experts | {"HAS_BIAS": True, "col_stride": 1}, tile
    yield "grouped_weight_alone", grouped._weight_kernel, own | {"NEED_DBIAS": False, "dbias_ptr": None}, tile


def token_sum_cases():
    """Sums and their gradients, of rows in bf16 with weights in bf16 and fp32, and without."""
    rows = {"rows_ptr": "*bf16"}  # adamw.py has a rows_ptr too, of another type.
    _, cols, _, warps = token_sums.TILE.fit(4096)
    for weights in ("*bf16", "*fp32"):
        given = rows | {
            "weights_ptr": weights,
            "y_ptr": weights,
            "dy_ptr": weights,
            "dweights_ptr": weights,
            "COLS": cols,
        }
        yield f"token_sums_{weights[1:]}", token_sums._sum_kernel, given | {"HAS_WEIGHTS": True}, warps
        needs = {"NEED_DROWS": True, "NEED_DWEIGHTS": True}
        yield f"token_sums_backward_{weights[1:]}", token_sums._row_gradient_kernel, given | needs, warps
    alone = rows | {"weights_ptr": None, "HAS_WEIGHTS": False, "COLS": cols}
    yield "token_sums_alone", token_sums._sum_kernel, alone, warps


def sort_cases():
    for num_ids in (4, 128, counting_sort.MOST_IDS):
        rows = max(counting_sort.TILE_ELEMENTS // num_ids, counting_sort.LEAST_ROWS)
        sizes = {"ROWS": rows, "IDS": num_ids}
        yield f"count_{num_ids}", counting_sort._count_kernel, sizes, 4
        places = sizes | {"PROGRAMS": counting_sort.PROGRAMS_AT_ONCE}
        yield f"place_{num_ids}", counting_sort._place_kernel, places, 4


def table_cases():
    table = {"CHUNK": adamw.CHUNK, "ALIGNED": True, "num_cols": adamw.CHUNK}
    copy = {"NUM_COLUMNS": 5, "HAS_COPY": True}
    yield from block_cases("adamw", adamw._adamw_kernel, adamw.TILES, **table, **copy)
    alone = {"NUM_COLUMNS": 4, "HAS_COPY": False, "copy_ptr": None}
    yield from block_cases("adamw_without_copy", adamw._adamw_kernel, adamw.TILES[:1], **table, **alone)
    norm = table | {"NUM_COLUMNS": 5, "COLUMN": 1}
    yield from block_cases("grad_norm", grad_norm._square_kernel, grad_norm.TILES, **norm, WEIGHTED=True)
    unweighted = {"WEIGHTED": False, "weights_ptr": None}
    yield from block_cases("grad_norm_alone", grad_norm._square_kernel, grad_norm.TILES[:1], **norm, **unweighted)


def quantize_cases():
    scales = {"SMALLEST_AMAX": fp8.SMALLEST_AMAX}
    for whole in (True, False):
        row = scales | {"LARGEST": fp8.E4M3_MAX, "WHOLE_ROW": whole}
        yield from block_cases(f"fp8_quantize_{whole}", fp8._quantize_kernel, fp8.QUANTIZE_TILES, **row)
    yield from block_cases("fp8_dequantize", fp8._dequantize_kernel, fp8.DEQUANTIZE_TILES)
    kinds = [("i8", False), ("i8", True), ("fp8e4nv", False)]
    for block, (code, stochastic), tiles in [
        *((256, kind, quantize.TILES) for kind in kinds),
        (16, kinds[0], quantize.TILES[:1]),
        (quantize._LARGEST_BLOCK, kinds[1], quantize.TILES[:1]),
    ]:
        for index, tile in enumerate(tiles):
            rows, _, _, warps = tile.fit(block)
            constants = {"ROWS": rows, "BLOCK": block, "codes_ptr": f"*{code}"}
            kind = scales | {"INTEGER": code == "i8", "STOCHASTIC": stochastic, "LARGEST": 127.0}
            label = f"{block}_{code}_tile_{index}" if index else f"{block}_{code}"
            yield f"quantize_{label}_{stochastic}", quantize._quantize_kernel, constants | kind, warps
            if not stochastic:
                yield f"dequantize_sum_{label}", quantize._dequantize_sum_kernel, constants, warps


CASES = [
    *norm_cases("rms", False),
    *norm_cases("layer", True),
    *column_sum_cases(),
    *other_cases(),
    *gelu_cases(),
    *rotary_cases(),
    *dropout_cases(),
    *token_sum_cases(),
]
CASES += [*linear_cross_entropy_cases(), *table_cases(), *quantize_cases()]

KERNELS = [kernel for _, kernel, _, _ in CASES]
PARAMETERS = [
    pytest.param(*case[1:], id=case[0], marks=[pytest.mark.slow] if KERNELS.index(case[1]) < index else [])
    for index, case in enumerate(CASES)
]


@pytest.mark.parametrize(("kernel", "constants", "warps"), PARAMETERS)
def test_compiles_with_16_byte_loads(kernel, constants, warps):
    compiled = compile_kernel(kernel, "bf16", constants, warps)
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert ".v4.b32" in compiled.asm["ptx"], "no 16-byte access: the kernel would not reach the memory's bandwidth"


@pytest.mark.parametrize(
    ("kernel", "constants", "warps"),
    [
        pytest.param(*case[1:], id=case[0], marks=[] if index < 2 else [pytest.mark.slow])
        for index, case in enumerate(sort_cases())
    ],
)
def test_sorts_compile(kernel, constants, warps):
    assert compile_kernel(kernel, "bf16", constants, warps).asm["cubin"][:4] == b"\x7fELF"


PRODUCTS = [
    pytest.param(*case[1:], id=case[0], marks=[] if index < 2 else [pytest.mark.slow])
    for index, case in enumerate(grouped_cases())
]


@pytest.mark.parametrize(("kernel", "constants", "tile"), PRODUCTS)
def test_products_are_of_tensor_cores_and_read_ahead(kernel, constants, tile):
    """Warp-group products of operands that are copied to shared memory 16 bytes at a time, while others are."""
    options = {"num_stages": tile.num_stages}
    compiled = compile_kernel(kernel, "bf16", constants, tile.num_warps, **options)
    ptx, widths = (
        compiled.asm["ptx"],
        re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*, (0x\w+),", compiled.asm["ptx"]),
    )
    assert "wgmma.mma_async" in ptx and ".v4.b32" in ptx and set(widths) == {"0x10"}
    assert compiled.metadata.shared <= 227 * 1024 and (
        tile != grouped.TILES[0] or compiled.metadata.shared <= 48 * 1024
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rotary_128_0_forward", "rotary_128_0_backward"])
def test_rounds_products_only_without_fusion(name):
    """Why the launchers of kernels that promise bits say enable_fp_fusion=False, in half precision too."""
    ((_, kernel, constants, warps),) = (case for case in CASES if case[0] == name)
    assert "fma.rn" in compile_kernel(kernel, "bf16", constants, warps, enable_fp_fusion=True).asm["ptx"]
    assert "fma.rn" not in compile_kernel(kernel, "bf16", constants, warps, enable_fp_fusion=False).asm["ptx"]
