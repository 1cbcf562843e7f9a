"""AdamW and gradient-norm kernels in Triton's interpreter, against torch.optim.AdamW in fp32 and fp64.

Run by test_kernels_isolated.py with TRITON_INTERPRET=1 in a process of its own.
"""

from __future__ import annotations

import importlib

import pytest
import torch

from codegen.kernels.tile import Tile

chunk_table_module = importlib.import_module("codegen.kernels.chunk_table")
adamw_module = importlib.import_module("codegen.kernels.adamw")
grad_norm = importlib.import_module("codegen.kernels.grad_norm")
pytestmark = pytest.mark.usefixtures("poisoned_memory")
SHAPES = [(5,), (3, 7), (32,), (1,), (0,), (130,)]
BETAS, EPS = (0.9, 0.97), 1e-6
NAN = float("nan")


@pytest.fixture
def short_chunks(monkeypatch):
    """Tensors of many chunks, chunks of several tiles, tiles that end anywhere."""
    for module in (chunk_table_module, adamw_module, grad_norm):
        monkeypatch.setattr(module, "CHUNK", 64)
    for module in (adamw_module, grad_norm):
        monkeypatch.setattr(module, "TILES", (Tile(32),))


def surrounded(shape, dtype, offset=4):
    """(line of nan, the tensor within it): what a kernel writes beside the tensor shows, what it reads there is nan."""
    numel = torch.Size(shape).numel()
    line = torch.full((numel + 2 * offset,), NAN, dtype=dtype)
    return line, line[offset : offset + numel].view(shape)


class State:
    """Tensors of one run, as they lie in a table."""

    def __init__(self, gradient_dtype, with_copies, offset=4):
        self.lines = []

        def column(dtype):
            pairs = [surrounded(shape, dtype, offset) for shape in SHAPES]
            self.lines += [line for line, _ in pairs]
            return [view for _, view in pairs]

        self.parameters = column(torch.float32)
        self.gradients = column(gradient_dtype)
        self.exp_avgs, self.exp_avg_sqs = column(torch.float32), column(torch.float32)
        self.copies = column(torch.bfloat16) if with_copies else None
        self.offset = offset
        torch.manual_seed(0)
        for p, m, v in zip(self.parameters, self.exp_avgs, self.exp_avg_sqs, strict=True):
            p.normal_()
            m.zero_()
            v.zero_()

    def table(self, decays):
        columns = (self.parameters, self.gradients, self.exp_avgs, self.exp_avg_sqs, self.copies)
        table = adamw_module.adamw_table(*columns, weight_decays=decays)
        assert table.chunks.on_kernels
        return table

    def assert_surroundings_untouched(self):
        for line in self.lines:
            assert line[: self.offset].isnan().all() and line[-self.offset :].isnan().all()


def torchs(parameters, decays, dtype):
    """torch.optim.AdamW over copies of the parameters, one group each for its decay."""
    leaves = [p.to(dtype).clone().requires_grad_() for p in parameters]
    groups = [{"params": [leaf], "weight_decay": decay} for leaf, decay in zip(leaves, decays, strict=True)]
    return leaves, torch.optim.AdamW(groups, betas=BETAS, eps=EPS, foreach=False, fused=False)


@pytest.mark.parametrize(
    ("gradient_dtype", "with_copies", "clip", "offset"),
    [
        (torch.float32, True, 0.3, 4),
        (torch.bfloat16, True, 0.3, 8),
        (torch.bfloat16, False, None, 4),
        (torch.float16, True, None, 4),
    ],
)
def test_is_torchs_adamw_over_several_steps(gradient_dtype, with_copies, clip, offset, short_chunks):
    state = State(gradient_dtype, with_copies, offset)
    decays = [0.1, 0.0, 0.02, 0.3, 0.1, 0.05]
    table = state.table(decays)
    # 4 elements of bf16 are 8 bytes: not aligned.
    assert table.chunks.is_aligned == (offset == 8 or (gradient_dtype == torch.float32 and not with_copies))
    exact, exact_optimizer = torchs(state.parameters, decays, torch.float64)
    fp32, fp32_optimizer = torchs(state.parameters, decays, torch.float32)
    step = torch.zeros(())
    factor = None if clip is None else torch.tensor(clip)
    for lr in (1e-2, 1e-2, 3e-3, torch.tensor(1e-3)):
        for gradient in state.gradients:
            gradient.copy_(torch.randn(gradient.shape))
        for leaves, optimizer in ((exact, exact_optimizer), (fp32, fp32_optimizer)):
            for leaf, gradient in zip(leaves, state.gradients, strict=True):
                leaf.grad = gradient.to(leaf.dtype) * (1.0 if clip is None else torch.tensor(clip).to(leaf.dtype))
            for group in optimizer.param_groups:
                group["lr"] = float(lr)
            optimizer.step()
        adamw_module.adamw_(table, step, lr, BETAS, EPS, factor)
    assert step == 4
    state.assert_surroundings_untouched()
    for row, leaf in enumerate(exact):
        ours = state.parameters[row]
        # Four steps of a few roundings each; torch's own fp32 stays as near.
        torch.testing.assert_close(ours.double(), leaf.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(ours, fp32[row].detach(), rtol=1e-6, atol=1e-7)
        if leaf.numel():
            moments = exact_optimizer.state[leaf]
            torch.testing.assert_close(state.exp_avgs[row].double(), moments["exp_avg"], rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(state.exp_avg_sqs[row].double(), moments["exp_avg_sq"], rtol=1e-6, atol=1e-9)
        if with_copies:
            # One unit in the last place: the interpreter truncates, a GPU rounds.
            torch.testing.assert_close(state.copies[row].float(), ours, rtol=2**-7, atol=0)


def test_first_step_is_as_accurate_as_torchs():
    """1 - 0.999 computed in fp32 would be off by 5e-5, and the step by half of that."""
    parameter, gradient = torch.zeros(64), torch.randn(64)
    state = [torch.zeros(64), torch.zeros(64)]
    table = adamw_module.adamw_table([parameter], [gradient], [state[0]], [state[1]])
    adamw_module.adamw_(table, torch.zeros(()), 1e-3, eps=0.0)
    torch.testing.assert_close(parameter, -1e-3 * gradient.sign(), rtol=5e-7, atol=0)


def test_real_chunks_in_one_launch(monkeypatch):
    launches = []
    kernel = adamw_module._adamw_kernel

    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(adamw_module, "_adamw_kernel", Counted())
    sizes = [chunk_table_module.CHUNK + 5, 3, adamw_module.TILES[0].most]
    columns = [[torch.zeros(size) for size in sizes] for _ in range(4)]
    for gradient in columns[1]:
        gradient.fill_(2.0)
    table = adamw_module.adamw_table(*columns, weight_decays=0.0)
    adamw_module.adamw_(table, torch.zeros(()), 0.5, eps=0.0)
    assert launches == [(4,)]
    for parameter in columns[0]:
        torch.testing.assert_close(parameter, torch.full_like(parameter, -0.5), rtol=1e-6, atol=0)


def test_nan_and_infinite_gradients_stay_where_they_are(short_chunks):
    state = State(torch.float32, False)
    for gradient in state.gradients:
        gradient.fill_(1.0)
    state.gradients[1][0, 3], state.gradients[5][77] = NAN, float("inf")
    table = state.table([0.0] * len(SHAPES))
    adamw_module.adamw_(table, torch.zeros(()), 0.1, BETAS, EPS)
    for row, parameter in enumerate(state.parameters):
        bad = torch.zeros(parameter.shape, dtype=torch.bool)
        if row in (1, 5):
            bad[(0, 3) if row == 1 else 77] = True
        assert torch.equal(parameter.isnan(), bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
def test_squared_norm(dtype, weighted, short_chunks):
    torch.manual_seed(1)
    gradients = [surrounded(shape, dtype)[1].copy_(torch.randn(shape)) for shape in SHAPES]
    table = chunk_table_module.chunk_table([g.clone() for g in gradients], gradients)
    assert table.on_kernels
    weights = torch.tensor([1.0, 0.5, 0.25, 1.0, 2.0]) if weighted else None  # none for the empty tensor
    total = grad_norm.squared_norm(table, 1, weights)
    filled = [g for g in gradients if g.numel()]
    factors = [1.0] * len(filled) if weights is None else weights.tolist()
    wanted = sum(g.double().square().sum() * w for g, w in zip(filled, factors, strict=True))
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), wanted, rtol=2e-6, atol=0)
    assert torch.equal(total, grad_norm.squared_norm(table, 1, weights))
    if not weighted:
        leaves = [torch.nn.Parameter(torch.zeros_like(g, dtype=torch.float32)) for g in gradients]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient.float().clone()
        norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5)
        torch.testing.assert_close(total.sqrt(), norm, rtol=2e-6, atol=0)
        torch.testing.assert_close(gradients[1].float() * grad_norm.clip_factor(total, 0.5), leaves[1].grad)


@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_non_finite_norm(value, short_chunks):
    gradients = [torch.ones(40), torch.ones(3)]
    gradients[0][39] = value
    total = grad_norm.squared_norm(chunk_table_module.chunk_table(gradients))
    torch.testing.assert_close(total, torch.tensor(value), equal_nan=True)
    factor = grad_norm.clip_factor(total, 1.0)
    assert factor.isnan() if value != value else factor == 0
