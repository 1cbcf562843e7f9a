"""Attention over keys of several ranks, against the formula in float64 over whole tensors; ranks are gloo processes."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from codegen.runtime import windows
from codegen.runtime.attention_blocks import WindowedKeys, block_attention, block_gradients, merge
from codegen.runtime.context_attention import context_attention
from codegen.runtime.mesh import Axis, Mesh
from tests.codegen.runtime.ranks import run_ranks

BATCH, HEADS, PER_RANK, KEYS_PER_RANK, WIDTH = 2, 4, 5, 7, 8

CASES = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "grouped": dict(is_causal=True, kv_heads=2, scale=0.3),
    "one head": dict(kv_heads=1),
    "narrow values": dict(is_causal=True, value_width=6),
    "boolean": dict(mask=(BATCH, 1, True, True), is_boolean=True),
    "keys only": dict(mask=(BATCH, 1, False, True), is_boolean=True),
    "added": dict(mask=(1, HEADS, True, True), kv_heads=2),
    "blind row": dict(mask=(1, 1, True, True), is_boolean=True, blind=True),
    "rows": dict(mask=(1, 1, True, False)),
    "window": dict(window=(3, 0, None), kv_heads=2),
    "far window": dict(window=(7, 0, None)),
    "both sides": dict(window=(2, 6, None), value_width=6),
    "chunks": dict(window=(None, 0, 4)),
    "none": dict(window=(-1, 0, None)),
}
"""mask: its dims, True for all queries or keys, False for one. window: before, after, chunk."""

EXCHANGES = ("all_gather", "ring")
CALLS = [
    (exchange, name, is_striped)
    for exchange, (name, case), is_striped in itertools.product(EXCHANGES, CASES.items(), (False, True))
    if is_striped or not case.get("is_causal")
]


def whole_inputs(size: int, case: dict[str, object], dtype: torch.dtype, per_rank: int = PER_RANK):  # type: ignore[no-untyped-def]
    """q, k, v, mask, and the gradient of the result."""
    generator = torch.Generator().manual_seed(7)
    kv_heads, width = int(case.get("kv_heads", HEADS)), int(case.get("value_width", WIDTH))  # type: ignore[call-overload]
    queries = size * per_rank
    keys = queries if case.get("is_causal") or case.get("window") else size * KEYS_PER_RANK
    shapes = [(BATCH, HEADS, queries, WIDTH), (BATCH, kv_heads, keys, WIDTH), (BATCH, kv_heads, keys, width)]
    q, k, v = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    grad, mask = torch.randn(BATCH, HEADS, queries, width, generator=generator).to(dtype), None
    if "mask" in case:
        batch, heads, has_rows, has_keys = case["mask"]  # type: ignore[misc]
        shape = (batch, heads, queries if has_rows else 1, keys if has_keys else 1)
        if case.get("is_boolean"):
            mask = torch.rand(shape, generator=generator) < 0.6
            mask[..., 0] = True
            if case.get("blind"):
                mask[..., queries // 2, :] = False
        else:
            mask = torch.randn(shape, generator=generator).to(dtype)
    return q, k, v, mask, grad


def formula(q, k, v, mask, grad, is_causal, scale, window=None):  # type: ignore[no-untyped-def]
    """Result and gradients of q, k and v in float64, the softmax written out."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    keys, values = (t.repeat_interleave(groups, 1) for t in leaves[1:])
    scores = torch.einsum("bhle,bhse->bhls", leaves[0], keys) * (scale or 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        mask = torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])[None]
    if window:
        before, after, chunk = window
        pairs = torch.cartesian_prod(torch.arange(q.shape[2]), torch.arange(k.shape[2]))
        seen = [
            (before is None or p - s <= before)
            and (after is None or s - p <= after)
            and (chunk is None or p // chunk == s // chunk)
            for p, s in pairs.tolist()
        ]
        mask = torch.tensor(seen).view(q.shape[2], k.shape[2])
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = (scores - scores.detach().amax(-1, keepdim=True).clamp_min(-1e300)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    out = torch.einsum("bhls,bhse->bhle", weights, values)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def part(x: torch.Tensor, rank: int, size: int, is_striped: bool) -> torch.Tensor:
    return x[:, :, rank::size] if is_striped else x.chunk(size, 2)[rank]


def joined(parts: list[np.ndarray], is_striped: bool) -> torch.Tensor:
    """The whole of the parts of all ranks."""
    order = np.arange(len(parts) * parts[0].shape[2]).reshape(-1, len(parts)).T.reshape(-1)
    whole = np.concatenate(parts, 2)
    return torch.from_numpy(whole[:, :, np.argsort(order)] if is_striped else whole)


def on_rank(rank: int, size: int, dtype: torch.dtype, per_rank: int) -> dict[tuple[str, str, bool], list[np.ndarray]]:
    """This rank's result and gradients of all cases, in float64."""
    axis, found = Mesh.create(("cp",), (size,)).axis("cp"), {}
    windows.MIN_ROWS = 2 if size == 3 else windows.MIN_ROWS  # many pieces, or one with a mask
    for exchange, name, is_striped in CALLS:
        case = CASES[name]
        q, k, v, mask, grad = whole_inputs(size, case, dtype, per_rank)
        leaves = [part(t, rank, size, is_striped).clone().requires_grad_() for t in (q, k, v)]
        if mask is not None and mask.shape[2] > 1:
            mask = part(mask, rank, size, is_striped)
        options = {"is_causal": bool(case.get("is_causal")), "scale": case.get("scale"), "enable_gqa": True}
        options |= dict(zip(("before", "after", "chunk"), case.get("window", ()), strict=False))  # type: ignore[call-overload]
        out = context_attention(*leaves, axis, mask, exchange=exchange, is_striped=is_striped, **options)  # type: ignore[arg-type]
        out.backward(part(grad, rank, size, is_striped))
        results = [out.detach(), *(leaf.grad for leaf in leaves)]
        assert all(result is not None and result.dtype == dtype for result in results)
        found[exchange, name, is_striped] = [result.double().numpy() for result in results]  # type: ignore[union-attr]
    return found


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(
    ("size", "dtype", "bound", "per_rank"),
    [
        (2, torch.float64, 1e-12, PER_RANK),
        (3, torch.float64, 1e-12, 4),
        pytest.param(4, torch.float32, 5e-6, PER_RANK, marks=pytest.mark.slow),
        pytest.param(3, torch.bfloat16, 0.06, PER_RANK, marks=pytest.mark.slow),
        (2, torch.float64, 1e-12, 1),
    ],
)
def test_ranks_together_give_the_whole_attention(size: int, dtype: torch.dtype, bound: float, per_rank: int) -> None:
    ranks = run_ranks(on_rank, size, dtype, per_rank)
    for exchange, name, is_striped in CALLS:
        case = CASES[name]
        *tensors, grad = whole_inputs(size, case, dtype, per_rank)
        expected = formula(*tensors, grad, case.get("is_causal"), case.get("scale"), case.get("window"))
        for index, whole in enumerate(expected):
            found = joined([parts[exchange, name, is_striped][index] for parts in ranks], is_striped)
            place = f"{exchange} {name} {is_striped} {index}"
            torch.testing.assert_close(found, whole, rtol=bound, atol=bound, msg=lambda text, at=place: f"{at}: {text}")


def test_one_rank_is_torchs_attention() -> None:
    q, k, v, _, _ = whole_inputs(1, {"is_causal": True}, torch.float64)
    found = context_attention(q, k, v, Axis("cp"), is_causal=True, is_striped=True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_blocks_joined_in_any_order() -> None:
    """Flash kernel and formulas, odd cuts of the keys."""
    q, k, v, _, grad = whole_inputs(3, {}, torch.float64)
    expected = formula(q, k, v, None, grad, False, None)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    cuts = [(0, 4, None), (4, 5, zero), (5, k.shape[2], None)]
    for order in itertools.permutations(cuts):
        blocks = [block_attention(q, k[:, :, a:b], v[:, :, a:b], mask, False, None) for a, b, mask in order]
        whole = merge(merge(blocks[0], blocks[1]), blocks[2])
        torch.testing.assert_close(whole[0], expected[0])
        gradients = {
            a: block_gradients(grad, q, k[:, :, a:b], v[:, :, a:b], whole, mask, False, None) for a, b, mask in order
        }
        torch.testing.assert_close(sum(g[0] for g in gradients.values()), expected[1])
        for index in (1, 2):
            torch.testing.assert_close(torch.cat([gradients[a][index] for a, _, _ in cuts], 2), expected[index + 1])


@pytest.mark.parametrize("window", [None, windows.Window(2, 0), windows.Window(2, None, 4)])
def test_blocks_read_rows_that_lie_otherwise_in_memory(window: windows.Window | None) -> None:
    """A flash kernel of torch reads the neighbor in memory instead of the next element of a row."""
    plain = [*whole_inputs(1, {"is_causal": True}, torch.float64)[:3]]
    plain = [x[:, :, :PER_RANK].contiguous() for x in plain]
    plain.append(torch.randn_like(plain[0]))
    mask = None if window is None else torch.randn(1, 1, PER_RANK, PER_RANK, dtype=torch.float64)
    at = windows.Positions(0, PER_RANK)

    def results(q, k, v, grad, mask):  # type: ignore[no-untyped-def]
        found = [*block_attention(q, k, v, mask, mask is None, 0.3)]
        found += block_gradients(grad, q, k, v, (found[0], found[1]), mask, mask is None, 0.3)
        if window is None:
            return found
        keys = WindowedKeys(window, at, at, PER_RANK)
        block = keys.attention(q, k, v, 0.3)
        return [*found, *block, *keys.gradients(grad, q, k, v, block, 0.3)]

    turned = [x if x is None else x.mT.contiguous().mT for x in (*plain, mask)]
    for one, other in zip(results(*turned), results(*plain, mask), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_refusals() -> None:
    q, k, v, mask, _ = whole_inputs(1, CASES["added"], torch.float64)
    with pytest.raises(ValueError, match="all_gather, ring, got 'tree'"):
        context_attention(q, k, v, Axis("cp"), exchange="tree")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not both"):
        context_attention(q, k, v, Axis("cp"), mask, is_causal=True)
    with pytest.raises(ValueError, match="is_striped=True"):
        context_attention(q, k, v, Axis("cp"), is_causal=True)
    with pytest.raises(ValueError, match="no gradient"):
        context_attention(q, k, v, Axis("cp"), mask.requires_grad_())
