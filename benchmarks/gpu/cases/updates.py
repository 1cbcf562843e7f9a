"""The optimiser's step and the norm of gradients."""

from __future__ import annotations

import torch

from benchmarks.gpu.cases.case import FORWARD, Case, Kernel, Operation


def _adamw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """shape: (tensors, elements of each); dtype: of gradients and copies."""
    from codegen.kernels.adamw import adamw_, adamw_table

    num_tensors, numel = shape
    numel_all = num_tensors * numel
    columns = {name: torch.zeros(shape, device=device).unbind() for name in ("parameter", "exp_avg", "exp_avg_sq")}
    for parameter in columns["parameter"]:
        parameter.normal_()
    gradients = torch.randn(shape, dtype=dtype, device=device).unbind()
    copies = torch.zeros(shape, dtype=dtype, device=device).unbind()
    table = adamw_table(columns["parameter"], gradients, columns["exp_avg"], columns["exp_avg_sq"], copies)
    step, lr = torch.zeros((), device=device), 1e-3

    def ours() -> torch.Tensor:
        adamw_(table, step, lr)
        return copies[0]

    def torchs(**options: bool) -> Operation:
        leaves = [parameter.clone().requires_grad_() for parameter in columns["parameter"]]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        optimizer = torch.optim.AdamW(leaves, lr=lr, **options)

        def run() -> torch.Tensor:
            torch._foreach_copy_([leaf.grad for leaf in leaves], list(gradients))
            optimizer.step()
            torch._foreach_copy_(list(copies), [leaf.detach() for leaf in leaves])
            return copies[0]

        return run

    def error() -> float:
        leaf = columns["parameter"][-1].double().requires_grad_()
        leaf.grad = gradients[-1].double()
        before = leaf.detach().clone()
        torch.optim.AdamW([leaf], lr=lr).step()
        ours()
        change = leaf.detach() - before
        return ((columns["parameter"][-1].double() - leaf.detach()).norm() / change.norm()).item()

    moved = {FORWARD: numel_all * (24 + 2 * dtype.itemsize)}
    # Of the change, which is some thousandths of the parameters that it is added to in fp32.
    others = {"torch-fused": torchs(fused=True)}
    return Case(
        "adamw", shape, dtype, (), ours, torchs(foreach=True), moved, exact_error=error, tolerance=2e-4, others=others
    )


def _grad_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Case:
    """shape: (tensors, elements of each)."""
    from codegen.kernels.chunk_table import chunk_table
    from codegen.kernels.grad_norm import squared_norm

    gradients = torch.randn(shape, dtype=dtype, device=device).unbind()
    table = chunk_table(gradients)

    def ours() -> torch.Tensor:
        return squared_norm(table).sqrt()

    def eager() -> torch.Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def error() -> float:
        exact = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
        return (abs(ours().double() - exact) / exact).item()

    moved = {FORWARD: torch.Size(shape).numel() * dtype.itemsize}
    return Case("grad_norm", shape, dtype, (), ours, eager, moved, exact_error=error, tolerance=1e-5)


# Timed: 256 M parameters.
KERNELS = {
    "adamw": Kernel(
        _adamw,
        checked=((3, 7), (5, 33000), (2, 65536)),
        interpreted=((3, 70),),
        timed=((16, 16777216),),
    ),
    "grad_norm": Kernel(
        _grad_norm,
        checked=((3, 7), (5, 33000), (2, 65536)),
        interpreted=((3, 70),),
        timed=((16, 16777216),),
    ),
}
