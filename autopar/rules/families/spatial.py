"""Rules of operators that resample space: batch and channels are free, space mostly blocked. All are linear."""

from __future__ import annotations

import math

from autopar.rules.call import Call, Operand, make_rule
from autopar.rules.rule import Rule

UPSAMPLES = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
PADS = tuple(f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3))


def resample(call: Call) -> Rule:
    """Interpolation and padding: space (as many trailing dims as the name says) is blocked; leading dims are free.

    Nearest interpolation by an integer factor repeats each element: dim i of the result is the composite (s{i}, times).
    A given scale must equal that factor: a scale of 3.2 also makes 12 elements of 4, but does not repeat each 3 times.
    """
    (x,) = call.inputs
    num_space = int(call.packet[call.packet.rindex("d") - 1])
    lead = [[f"b{i}"] for i in range(len(x.shape) - num_space)]
    source = [[f"s{i}"] for i in range(num_space)]
    target = [[f"r{i}"] for i in range(num_space)]
    sizes = {group[0]: size for group, size in zip([*lead, *source], x.shape, strict=True)}
    sizes |= {group[0]: size for group, size in zip(target, call.outputs[0].shape[len(lead) :], strict=True)}
    scales = _scales(call, num_space)
    for i, (source_dim, target_dim) in enumerate(zip(source, list(target), strict=True)):
        times, rest = divmod(sizes[target_dim[0]], sizes[source_dim[0]])
        if "nearest" in call.packet and not rest and times > 0 and scales[i] in (None, times):
            sizes[target_dim[0]], target[i] = times, [source_dim[0], target_dim[0]]
    free = {group[0] for group in target if len(group) > 1}
    blocked = {factor for group in (*source, *target) for factor in group} - free
    return make_rule(call, [[*lead, *source]], [[*lead, *target]], sizes, blocked=blocked, linear=("self", "input"))


def _scales(call: Call, num_space: int) -> list[float | None]:
    """Return the scales of a call's dims of space; None for a scale that follows from the sizes."""
    names = ("scales",) if num_space == 1 else ("scales_d", "scales_h", "scales_w")[-num_space:]
    return list(call.get("scale_factors") or (call.get(name) for name in names))


def pixel_shuffle(call: Call) -> Rule:
    """[..., c x r x r, h, w] <-> [..., c, h x r, w x r]: the factors r are blocked."""
    unshuffle = call.packet == "pixel_unshuffle"
    (x,) = call.inputs
    shape = call.outputs[0].shape if unshuffle else x.shape
    r = call["downscale_factor" if unshuffle else "upscale_factor"]
    lead = [[f"b{i}"] for i in range(len(x.shape) - 3)]
    sizes = {group[0]: size for group, size in zip(lead, x.shape, strict=False)}
    sizes |= {"c": shape[-3] // (r * r), "h": shape[-2], "w": shape[-1], "r0": r, "r1": r}
    deep = [*lead, ["c", "r0", "r1"], ["h"], ["w"]]
    wide = [*lead, ["c"], ["h", "r0"], ["w", "r1"]]
    source, target = (wide, deep) if unshuffle else (deep, wide)
    return make_rule(call, [source], [target], sizes, blocked={"r0", "r1"}, linear=("self",))


def unfold_windows(call: Call) -> Rule:
    """im2col [b, c, h, w] -> [b, c x window, l], and its transpose col2im: batch and channels are free."""
    (x,) = call.inputs
    (out,) = call.outputs
    image, columns = (x, out) if call.packet == "im2col" else (out, x)
    batch = [["b"]] if len(image.shape) == 4 else []
    channels, *space = image.shape[-3:]
    sizes = {"b": image.shape[0], "c": channels, "k": math.prod(call["kernel_size"]), "l": columns.shape[-1]}
    sizes |= {"h": space[0], "w": space[1]}
    planes = [*batch, ["c"], ["h"], ["w"]]
    rows = [*batch, ["c", "k"], ["l"]]
    source, target = (planes, rows) if call.packet == "im2col" else (rows, planes)
    return make_rule(call, [source], [target], sizes, blocked={"k", "l", "h", "w"}, linear=("self",))


def grid_sampler(call: Call) -> Rule:
    """image [b, c, ...], grid [b, ..., n] -> [b, c, ...]: only the searched image and the coordinates are blocked."""
    image, grid = call.tensor("input"), call.tensor("grid")
    num_space = len(image.shape) - 2
    source = [f"s{i}" for i in range(num_space)]
    target = [f"r{i}" for i in range(num_space)]
    sizes = dict(zip(["b", "c", *source], image.shape, strict=True)) | {"n": num_space}
    sizes |= dict(zip(target, grid.shape[1:-1], strict=True))
    places = [[f] for f in target]
    return make_rule(
        call,
        [[["b"], ["c"], *([f] for f in source)], [["b"], *places, ["n"]]],
        [[["b"], ["c"], *places]],
        sizes,
        blocked={*source, "n"},
        linear=("input",),
    )


def transposed_convolution(call: Call) -> Rule:
    """input [b, g x i, ...], weight [g x i, o, ...] -> [b, g x o, ...]: space is blocked, windows overlap."""
    x, weight, bias = call.tensor("input"), call.tensor("weight"), call.get("bias")
    groups: int = call["groups"]
    num_space = len(weight.shape) - 2
    names = {letter: [f"{letter}{i}" for i in range(num_space)] for letter in "skr"}
    batch = [["b"]] if len(x.shape) == num_space + 2 else []
    sizes = {"b": x.shape[0], "g": groups, "i": weight.shape[0] // groups, "o": weight.shape[1]}
    shapes = {"s": x.shape, "k": weight.shape, "r": call.outputs[0].shape}
    for letter, shape in shapes.items():
        sizes |= dict(zip(names[letter], shape[-num_space:], strict=True))
    space = {letter: [[f] for f in factors] for letter, factors in names.items()}
    inputs = [[*batch, ["g", "i"], *space["s"]], [["g", "i"], ["o"], *space["k"]]]
    if isinstance(bias, Operand):
        inputs.append([["g", "o"]])
    return make_rule(
        call,
        inputs,
        [[*batch, ["g", "o"], *space["r"]]],
        sizes,
        blocked=[f for factors in names.values() for f in factors],
        additive={bias.index} if isinstance(bias, Operand) else (),
        linear=("input bias", "weight bias"),
    )


TABLE = {
    **{f"aten.{name}": resample for name in (*UPSAMPLES, *PADS)},
    **{f"aten.{name}": pixel_shuffle for name in ("pixel_shuffle", "pixel_unshuffle")},
    **{f"aten.{name}": unfold_windows for name in ("im2col", "col2im")},
    "aten.grid_sampler": grid_sampler,
    **{f"aten.conv_transpose{n}d": transposed_convolution for n in (1, 2, 3)},
}
