"""Rotary kernel in Triton's interpreter, against transformers' own functions bit by bit and the rotation in fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama

from codegen.kernels import rotary as module
from codegen.kernels.rotary import rotary
from codegen.kernels.tile import Tile

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.usefixtures("exact_bf16")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def angles(batch, num_tokens, num_pairs, dtype, twice):
    """cos and sin `[batch, S, A]` of positions that differ between sequences."""
    position = torch.arange(num_tokens)[None, :, None] + 7.0 * torch.arange(batch)[:, None, None]
    angle = position * 100.0 ** -(torch.arange(num_pairs) / num_pairs)
    angle = torch.cat((angle, angle), -1) if twice else angle
    return angle.cos().to(dtype), angle.sin().to(dtype)


def heads(shape, dtype, heads_dim):
    """`[B, heads, S, D]`, or `[B, S, heads, D]`, which lies in memory as a projection gives it: heads after tokens."""
    batch, num_heads, num_tokens, size = shape
    x = torch.randn(batch, num_tokens, num_heads, size).to(dtype)
    return x.transpose(1, 2) if heads_dim == 1 else x


def check_bits(theirs, q, k, cos, sin, **options):
    """Outputs and gradients are `theirs`, bit for bit, in q's and k's memory order."""
    ours_in, theirs_in = ([t.detach().requires_grad_() for t in (q, k)] for _ in range(2))
    ours = rotary(*ours_in, cos, sin, **options)
    assert type(ours[0].grad_fn).__name__ == "_RotaryBackward", "the reference ran, not the kernel"
    wanted = theirs(*theirs_in)
    gradients = [torch.randn_like(out) for out in wanted]
    grads = torch.autograd.grad(ours, ours_in, gradients)
    grads_wanted = torch.autograd.grad(wanted, theirs_in, gradients)
    for a, w in zip((*ours, *grads), (*wanted, *grads_wanted), strict=True):
        assert a.dtype == w.dtype
        torch.testing.assert_close(a, w, rtol=0, atol=0)
    for out, x in zip(ours, (q, k), strict=True):
        assert out.stride() == torch.empty_like(x).stride()
    reference = module.rotary_reference(q, k, cos, sin, **options)
    torch.testing.assert_close(reference, tuple(w.detach() for w in wanted), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "num_k_heads", "batch_of_angles"),
    [
        ((2, 3, 3, 6), 1, 1),
        pytest.param((2, 4, 5, 8), 2, 2, marks=pytest.mark.slow),
        pytest.param((1, 1, 1, 2), 1, 1, marks=pytest.mark.slow),
    ],
)
def test_is_llamas(shape, num_k_heads, batch_of_angles, dtype):
    """Grouped heads, numbers of pairs and heads that are no power of two, one row of angles for all sequences."""
    torch.manual_seed(0)
    q, k = heads(shape, dtype, 1), heads((shape[0], num_k_heads, *shape[2:]), dtype, 1)
    cos, sin = angles(batch_of_angles, shape[2], shape[3] // 2, dtype, twice=True)
    check_bits(lambda q, k: llama.apply_rotary_pos_emb(q, k, cos, sin), q, k, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rotated", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 10))])
def test_is_gpt_neoxs(num_rotated, dtype):
    """A part of each head, rotated in halves; the rest is copied."""
    torch.manual_seed(1)
    q, k = heads((2, 3, 4, 10), dtype, 1), heads((2, 3, 4, 10), dtype, 1)
    cos, sin = angles(2, 4, num_rotated // 2, dtype, twice=True)
    check_bits(lambda q, k: gpt_neox.apply_rotary_pos_emb(q, k, cos, sin), q, k, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rotated", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 10))])
def test_is_gptjs(num_rotated, dtype):
    """Interleaved, a part of each head, heads in dim 2; cos and sin are the halves of one tensor, as it splits them."""
    torch.manual_seed(2)
    q, k = heads((2, 3, 4, 10), dtype, 2), heads((2, 3, 4, 10), dtype, 2)
    sin, cos = torch.cat(angles(2, 4, num_rotated // 2, dtype, twice=False)[::-1], -1).split(num_rotated // 2, -1)

    def theirs(q, k):
        def rotate(x):
            rotated = gptj.apply_rotary_pos_emb(x[..., :num_rotated], sin, cos)
            return torch.cat((rotated, x[..., num_rotated:]), -1)

        return rotate(q), rotate(k)

    check_bits(theirs, q, k, cos, sin, interleaved=True, heads_dim=2)


@pytest.mark.slow
@pytest.mark.parametrize("interleaved", [False, True])
def test_several_blocks_of_heads(interleaved, monkeypatch):
    """5 query and 2 key heads on 3 blocks: the last has one query head and no key head."""
    monkeypatch.setattr(module, "TILES", (Tile(16),))
    torch.manual_seed(3)
    q, k = heads((2, 5, 3, 8), torch.float32, 1), heads((2, 2, 3, 8), torch.float32, 1)
    cos, sin = angles(2, 3, 4, torch.float32, twice=not interleaved)
    check_bits(
        lambda q, k: module.rotary_reference(q, k, cos, sin, interleaved), q, k, cos, sin, interleaved=interleaved
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotates_by_the_angle_in_fp64(interleaved, assert_near):
    """As complex numbers; the gradient is the rotation back."""
    torch.manual_seed(4)
    q, k = (torch.randn(2, 3, 5, 12, requires_grad=True) for _ in range(2))
    cos, sin = angles(2, 5, 6, torch.float32, twice=not interleaved)
    turn = torch.complex(cos.double(), sin.double())[:, None, :, :6]

    def turned(x, turn):
        x = x.detach().double()
        if interleaved:
            return torch.view_as_real(torch.view_as_complex(x.view(2, 3, 5, 6, 2)) * turn).flatten(-2)
        result = torch.complex(x[..., :6].contiguous(), x[..., 6:].contiguous()) * turn
        return torch.cat((result.real, result.imag), -1)

    outputs = rotary(q, k, cos, sin, interleaved)
    gradients = [torch.randn_like(out) for out in outputs]
    grads = torch.autograd.grad(outputs, (q, k), gradients)
    for x, out, gradient, grad in zip((q, k), outputs, gradients, grads, strict=True):
        assert_near(out.detach(), turned(x, turn))
        assert_near(grad, turned(gradient, turn.conj()))


def test_halves_of_different_angles():
    """Nothing demands that both halves of cos and sin are equal; the gradient follows."""
    torch.manual_seed(5)
    q, k = heads((1, 2, 3, 8), torch.float32, 1), heads((1, 2, 3, 8), torch.float32, 1)
    cos, sin = torch.randn(2, 1, 3, 8)
    check_bits(lambda q, k: llama.apply_rotary_pos_emb(q, k, cos, sin), q, k, cos, sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_strided_inputs_surrounded_by_nan(interleaved):
    """A read outside the given elements would turn the result into nan: q and k are slices of one projection."""
    torch.manual_seed(6)
    buffer = torch.full((2, 5, 6, 12), float("nan"))
    buffer[:, ::2, :5, 2:-2] = torch.randn(2, 3, 5, 8)
    q, k = buffer[:, ::2, :3, 2:-2].transpose(1, 2), buffer[:, ::2, 3:5, 2:-2].transpose(1, 2)
    num_angles = 2 if interleaved else 4
    table = torch.full((1, 5, 12), float("nan"))
    table[:, ::2, 1 : 1 + 2 * num_angles] = torch.randn(1, 3, 2 * num_angles)
    cos, sin = table[:, ::2, 1 : 1 + 2 * num_angles].chunk(2, -1)
    check_bits(
        lambda q, k: module.rotary_reference(q, k, cos, sin, interleaved), q, k, cos, sin, interleaved=interleaved
    )


def test_other_strides():
    """No unit stride anywhere, and gradients expanded as `sum().backward()` makes them."""
    torch.manual_seed(7)
    q, k = (torch.randn(8, 3, 2, 4).permute(2, 3, 1, 0).requires_grad_() for _ in range(2))
    cos, sin = (torch.randn(8, 3, 1).permute(2, 1, 0) for _ in range(2))
    out = rotary(q, k, cos, sin)
    wanted = module.rotary_reference(q, k, cos, sin)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    grads = torch.autograd.grad(out[0].sum() + out[1].sum(), (q, k))
    grads_wanted = torch.autograd.grad(wanted[0].sum() + wanted[1].sum(), (q, k))
    torch.testing.assert_close(grads, grads_wanted, rtol=0, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_is_not_finite_spoils_its_own_pair(interleaved):
    q, k = torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8)
    q[0, 0, 0, 1], q[0, 0, 1, 2], k[0, 0, 2, 3] = float("nan"), float("inf"), -float("inf")
    cos, sin = angles(1, 4, 4, torch.float32, twice=not interleaved)
    out, wanted = rotary(q, k, cos, sin, interleaved), module.rotary_reference(q, k, cos, sin, interleaved)
    assert wanted[0].isfinite().sum() == 28 and wanted[1].isfinite().sum() == 30
    torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)


def test_only_queries_used():
    torch.manual_seed(8)
    q, k = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(2))
    cos, sin = angles(1, 3, 2, torch.float32, twice=True)
    dq, dk = torch.autograd.grad(rotary(q, k, cos, sin)[0].sum(), (q, k))
    (dq_wanted,) = torch.autograd.grad(module.rotary_reference(q, k, cos, sin)[0].sum(), q)
    torch.testing.assert_close(dq, dq_wanted, rtol=0, atol=0)
    assert dk.count_nonzero() == 0


def test_saves_only_the_angles():
    saved = []
    q, k = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(2))
    cos, sin = angles(1, 3, 2, torch.float32, twice=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda t: t):
        rotary(q, k, cos, sin)
    assert sorted(saved) == sorted([cos.data_ptr(), sin.data_ptr()])


def test_angles_with_gradients_take_the_reference():
    q, k = (torch.randn(1, 2, 3, 4) for _ in range(2))
    cos, sin = (angle.requires_grad_() for angle in angles(1, 3, 2, torch.float32, twice=True))
    (dcos,) = torch.autograd.grad(rotary(q, k, cos, sin)[0].sum(), cos)
    torch.testing.assert_close(dcos, q.sum(1))


def test_empty_and_wrong_arguments():
    cos = torch.ones(1, 0, 4)
    q, k = rotary(torch.zeros(2, 3, 0, 4), torch.zeros(2, 1, 0, 4), cos, cos)
    assert q.shape == (2, 3, 0, 4) and k.shape == (2, 1, 0, 4)
    x, cos = torch.zeros(2, 3, 5, 4), torch.ones(1, 5, 4)
    with pytest.raises(ValueError, match="one dtype"):
        rotary(x, x, cos.half(), cos.half())
    with pytest.raises(ValueError, match=r"\[B, heads, S, D\]"):
        rotary(x, x[:, :, :4], cos, cos)
    with pytest.raises(ValueError, match=r"\[B, S, heads, D\]"):
        rotary(x, x, cos, cos, heads_dim=2)
    with pytest.raises(ValueError, match="even number of components"):
        rotary(x, x, cos[..., :3], cos[..., :3])
    with pytest.raises(ValueError, match="up to D"):
        rotary(x, x, cos, cos, interleaved=True)
