"""Fourier transforms, and real numbers seen as complex ones: the dims that are transformed or paired are blocked."""

from __future__ import annotations

from autopar.rules.call import Call, make_rule, normal_dims
from autopar.rules.rule import Rule

FOURIER = tuple(f"fft_{kind}fft{n}" for kind in ("", "i", "r", "ir", "h", "ih") for n in ("", "2", "n"))


def fourier(call: Call) -> Rule:
    """Transforms over `dim` (all dims where it is not given): those are blocked, and their sizes may change."""
    (x,), (out,) = call.inputs, call.outputs
    given = call.get("dim")
    own = set(normal_dims(given, len(x.shape)))
    before = [f"x{i}" if i in own else f"d{i}" for i in range(len(x.shape))]
    after = [f"y{i}" if i in own else f"d{i}" for i in range(len(x.shape))]
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


TABLE = {
    **{f"aten.{name}": fourier for name in FOURIER},
    **{f"aten.{name}": complex_view for name in ("view_as_complex", "view_as_real")},
}
