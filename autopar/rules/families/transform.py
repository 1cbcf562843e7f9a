"""Rules of Fourier transforms, complex views of real numbers, and matrix operations: those dims are blocked."""

from __future__ import annotations

from autopar.ir.graph import TensorMeta
from autopar.rules.call import Call, broadcast_groups, make_rule, normal_dim, normal_dims
from autopar.rules.rule import Rule

FOURIER = tuple(f"fft_{kind}fft{n}" for kind in ("", "i", "r", "ir", "h", "ih") for n in ("", "2", "n"))


def fourier(call: Call) -> Rule:
    """Transforms over `dim` (default: all dims): these dims are blocked, and their sizes may change."""
    (x,), (out,) = call.inputs, call.outputs
    dim = call.get("dim")
    transformed = set(normal_dims(dim, len(x.shape)))
    before = [f"x{i}" if i in transformed else f"d{i}" for i in range(len(x.shape))]
    after = [f"y{i}" if i in transformed else f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(before, x.shape, strict=True)) | dict(zip(after, out.shape, strict=True))
    blocked = {f for f in (*before, *after) if not f.startswith("d")}
    return make_rule(call, [[[f] for f in before]], [[[f] for f in after]], sizes, blocked=blocked)


def complex_view(call: Call) -> Rule:
    """[..., 2] of real numbers <-> [...] of complex ones."""
    (x,), (out,) = call.inputs, call.outputs
    real = x.shape if call.packet == "view_as_complex" else out.shape
    names = [f"d{i}" for i in range(len(real))]
    sizes = dict(zip(names, real, strict=True))
    pairs, numbers = [[f] for f in names], [[f] for f in names[:-1]]
    source, target = (pairs, numbers) if call.packet == "view_as_complex" else (numbers, pairs)
    return make_rule(call, [source], [target], sizes, blocked=names[-1:])


MATRICES = (
    "_linalg_det",
    "_linalg_eigh",
    "_linalg_slogdet",
    "_linalg_solve_ex",
    "_linalg_svd",
    "linalg_inv_ex",
    "linalg_lu",
    "linalg_lu_factor_ex",
    "linalg_matrix_exp",
    "linalg_qr",
)


def matrices(call: Call) -> Rule | None:
    """[..., n, m] of each operand: the leading dims are factors. None if operands differ in their leading dims."""
    batch = call.inputs[0].shape[:-2]
    if any(meta.shape[: len(batch)] != batch or len(meta.shape) > len(batch) + 2 for meta in call.inputs):
        return None
    sizes = {f"b{i}": size for i, size in enumerate(batch)}

    def groups(meta: TensorMeta) -> list[list[str]]:
        factors = [f"k{len(sizes) + i}" for i in range(len(meta.shape) - len(batch))]
        sizes.update(zip(factors, meta.shape[len(batch) :], strict=True))
        return [[f"b{i}"] for i in range(len(batch))] + [[f] for f in factors]

    inputs, outputs = [groups(meta) for meta in call.inputs], [groups(meta) for meta in call.outputs]
    return make_rule(call, inputs, outputs, sizes, blocked={f for f in sizes if f.startswith("k")})


def cross(call: Call) -> Rule:
    """The vector product: its dim of 3 is blocked, the others broadcast."""
    shape = call.outputs[0].shape
    names = [f"d{i}" for i in range(len(shape))]
    sizes = dict(zip(names, shape, strict=True))
    inputs = [broadcast_groups(meta.shape, names, sizes) for meta in call.inputs]
    blocked = {names[normal_dim(call["dim"], len(names))]}
    return make_rule(call, inputs, [[[f] for f in names]], sizes, blocked=blocked, linear=("self", "other"))


def distances(call: Call) -> Rule:
    """[..., p, d] and [..., r, d] -> [..., p, r]: the dim of the vectors is blocked."""
    x, out = call.inputs[0].shape, call.outputs[0].shape
    batch = [f"b{i}" for i in range(len(out) - 2)]
    sizes = dict(zip([*batch, "p", "r"], out, strict=True)) | {"d": x[-1]}
    inputs = [
        [*broadcast_groups(meta.shape[:-2], batch, sizes), [rows], ["d"]]
        for rows, meta in zip(("p", "r"), call.inputs, strict=True)
    ]
    return make_rule(call, inputs, [[[f] for f in (*batch, "p", "r")]], sizes, blocked={"d"})


TABLE = {
    "aten._cdist_forward": distances,
    **{f"aten.{name}": matrices for name in MATRICES},
    "aten.linalg_cross": cross,
    **{f"aten.{name}": fourier for name in FOURIER},
    **{f"aten.{name}": complex_view for name in ("view_as_complex", "view_as_real")},
}
