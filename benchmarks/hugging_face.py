"""Training as users of plain torch write it: the module in bf16, fp32 masters, torch's fused AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.models import Example

LEARNING_RATE = 1e-4


class Masters:
    """The fp32 masters of a module that computes in bf16: gradients are copied in, new weights out.

    Buffers stay as they are, as `from_pretrained` leaves them. Parameters of batch norm stay in fp32: torch computes it
    from bf16 activations.
    """

    def __init__(self, model: nn.Module) -> None:
        self.used = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.masters = [nn.Parameter(parameter.detach().clone()) for parameter in self.used]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, fused=True)
        for master in self.masters:
            master.grad = torch.empty_like(master)
        for module in model.modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(torch.bfloat16)

    @torch.no_grad()
    def update(self) -> None:
        """Update once with the module's gradients, and free them."""
        pairs = [(p, m) for p, m in zip(self.used, self.masters, strict=True) if p.grad is not None]
        torch._foreach_copy_([master.grad for _, master in pairs], [used.grad for used, _ in pairs])
        for parameter in self.used:
            parameter.grad = None
        self.optimizer.step()
        torch._foreach_copy_([p.data for p in self.used], [m.data for m in self.masters])


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """A module in training. example: with the module, or with its form under torch.compile."""

    example: Example
    owner: Masters

    @classmethod
    def of(cls, example: Example, wrap: Callable[[nn.Module], Any] = lambda model: model) -> HuggingFace:
        """Return the training of a module, wrapped by torch.compile, say."""
        owner = Masters(example.model)
        return cls(in_bf16(Example(wrap(example.model), example.inputs, example.loss_fn)), owner)

    def forward_backward(self) -> Tensor:
        """Take the gradients of a batch; return its loss."""
        loss = self.example.loss()
        torch.autograd.backward(loss)
        return loss.detach()

    def step(self) -> Tensor:
        """Train one step; return its loss."""
        loss = self.forward_backward()
        self.owner.update()
        return loss


def in_bf16(example: Example) -> Example:
    """Return the example with floating inputs, but not the loss's target, in bf16."""
    names = list(example.inputs)
    whole = {names[-1]} if example.loss_fn else set()
    inputs = {
        name: value.to(torch.bfloat16) if value.is_floating_point() and name not in whole else value
        for name, value in example.inputs.items()
    }
    return Example(example.model, inputs, example.loss_fn)
