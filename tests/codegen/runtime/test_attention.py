"""Attention with dropout against the formula in float64, and sharded against whole."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from codegen.runtime.attention import attention
from codegen.runtime.dropout import dropout_key, keep_mask
from codegen.runtime.layout import Layout, whole

KEY = dropout_key(1, 2, 3)


def mesh(**axes: tuple[int, int]) -> SimpleNamespace:
    """Axes of given (size, rank)."""
    return SimpleNamespace(**{name: SimpleNamespace(size=n, rank=r) for name, (n, r) in axes.items()})


def exact(q, k, v, mask, p, is_causal, scale):  # type: ignore[no-untyped-def]
    """The formula in float64, the mask from keep_mask, softmax written out."""
    q, k, v = q.double(), k.double(), v.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = torch.einsum("bhle,bhse->bhls", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        mask = torch.arange(q.shape[2])[:, None] >= torch.arange(k.shape[2])[None]
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = (scores - scores.amax(-1, keepdim=True).clamp_min(-1e300)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    keep = keep_mask(p, key=KEY, layout=whole(scores.shape), mesh=None, device="cpu")
    return torch.einsum("bhls,bhse->bhle", weights * keep / (1 - p), v)


CASES = {
    "plain": dict(),
    "causal": dict(is_causal=True),
    "boolean": dict(mask="boolean"),
    "added": dict(mask="added", scale=0.3),
    "grouped": dict(is_causal=True, kv_heads=2),
}


def inputs(seed: int, dtype: torch.dtype, kv_heads: int = 4):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 4, 10, 8), (2, kv_heads, 14, 8), (2, kv_heads, 14, 6)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6), (torch.bfloat16, 0.05)])
def test_values_and_gradients(case: dict[str, object], dtype: torch.dtype, bound: float) -> None:
    options = dict(case)
    kv_heads = int(options.pop("kv_heads", 4))  # type: ignore[call-overload]
    mask = {
        "boolean": torch.rand(2, 1, 10, 14, generator=torch.Generator().manual_seed(3)) < 0.7,
        "added": torch.randn(4, 10, 14, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype),
        None: None,
    }[options.pop("mask", None)]
    if mask is not None and mask.dtype == torch.bool:
        mask[0, 0, 3] = False  # a query with nothing to attend to
    tensors = inputs(0, dtype, kv_heads)
    is_causal, scale = bool(options.get("is_causal")), options.get("scale")
    out = attention(
        *tensors, mask, 0.25, is_causal, scale, kv_heads != 4, key=KEY, layout=whole((2, 4, 10, 14)), mesh=None
    )
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    got = [out, *torch.autograd.grad(out, tensors, grad)]
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    reference = exact(*doubles, mask, 0.25, is_causal, scale)
    expected = [reference, *torch.autograd.grad(reference, doubles, grad.double())]
    assert out.dtype == dtype
    for mine, theirs in zip(got, expected, strict=True):
        assert not mine.isnan().any()
        assert ((mine.double() - theirs).abs().max() / theirs.abs().max()).item() < bound


@pytest.mark.parametrize("case", [dict(), dict(is_causal=True), dict(mask=True)])
def test_without_dropout_it_is_torchs(case: dict[str, object]) -> None:
    q, k, v = inputs(1, torch.float32)
    mask = torch.rand(10, 14) < 0.8 if case.get("mask") else None
    is_causal = bool(case.get("is_causal"))
    expected = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal)
    assert torch.equal(attention(q, k, v, mask, 0.0, is_causal), expected)


@pytest.mark.parametrize("shards", [dict(dp="S(0)", tp="S(1)"), dict(dp="S(1)", tp="S(2)"), dict(cp="S(2)")], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_shards_of_batch_heads_and_queries_equal_the_whole(shards: dict[str, str], p: float) -> None:
    q, k, v = (t.detach() for t in inputs(2, torch.float64))
    expected = attention(q, k, v, None, p, True, key=KEY, layout=whole((2, 4, 10, 14)), mesh=None)
    layout = Layout((2, 4, 10, 14), **shards)
    for ranks in itertools.product(range(2), repeat=len(shards)):
        here = mesh(**{name: (2, rank) for name, rank in zip(shards, ranks, strict=True)})
        parts = [layout.coordinates(dim, here) for dim in range(3)]
        local = [t[parts[0]][:, parts[1]] for t in (q, k, v)]
        local[0] = local[0][:, :, parts[2]]
        got = attention(*local, None, p, True, key=KEY, layout=layout, mesh=here)
        torch.testing.assert_close(got, expected[parts[0]][:, parts[1]][:, :, parts[2]], rtol=1e-12, atol=1e-12)


def test_errors() -> None:
    q, k, v = inputs(1, torch.float32)
    with pytest.raises(ValueError, match="layout"):
        attention(q, k, v, None, 0.5)
    with pytest.raises(ValueError, match="not both"):
        attention(q, k, v, torch.ones(10, 14, dtype=torch.bool), 0.5, True)
