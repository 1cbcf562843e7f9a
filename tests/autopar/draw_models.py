"""Models that draw random numbers in forward, three or more of each kind, written anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, LENGTH, WIDTH = 8, 4, 12


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (ROWS, LENGTH, WIDTH)
    return {"x": torch.randn(shape, generator=generator), "target": torch.randn(shape, generator=generator)}


class Layer(nn.Module):
    """A residual layer whose branch is changed at random. function(module, branch) -> branch."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.function(self, torch.tanh(self.wide(x))))


class Model(nn.Module):
    """Equal layers, which a program stores once."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor], layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(function) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def row_mask(module: nn.Module, x: Tensor) -> Tensor:
    """Stochastic depth by rows, drawn into a new tensor."""
    if not module.training:
        return x
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
    return x * mask.div_(0.6)


def floored_mask(module: nn.Module, x: Tensor) -> Tensor:
    """Stochastic depth by rows, a uniform number rounded down."""
    if not module.training:
        return x
    drawn = 0.75 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)
    return x.div(0.75) * drawn.floor_()


def batch_mask(module: nn.Module, x: Tensor) -> Tensor:
    """Stochastic depth of the whole batch at once."""
    if not module.training:
        return x
    return x * torch.empty([1] * x.ndim, dtype=x.dtype).bernoulli_(0.8).div_(0.8)


def feature_noise(module: nn.Module, x: Tensor) -> Tensor:
    return x + 0.2 * torch.randn_like(x) if module.training else x


def channels(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout1d(x, 0.4, module.training)


def planes(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout2d(x.unflatten(-1, (4, 6)), 0.3, module.training).flatten(-2)


def alpha(module: nn.Module, x: Tensor) -> Tensor:
    return F.alpha_dropout(x, 0.2, module.training)


def alpha_channels(module: nn.Module, x: Tensor) -> Tensor:
    return F.feature_alpha_dropout(x, 0.3, module.training)


def slopes(module: nn.Module, x: Tensor) -> Tensor:
    return F.rrelu(x, 0.1, 0.5, module.training)


EVALUATED = {
    each.__name__: each
    for each in (
        row_mask, floored_mask, batch_mask, feature_noise, channels, planes, alpha, alpha_channels, slopes
    )
}  # fmt: skip
"""Functions that draw nothing in evaluation mode."""


def gumbel(module: nn.Module, x: Tensor) -> Tensor:
    return F.gumbel_softmax(x, tau=0.8) + F.gumbel_softmax(x, hard=True)


def scaled(module: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape) + torch.randint(-1, 2, (x.shape[0], x.shape[1], 1))


def without_gradients(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        mask = (torch.rand(x.shape[:2]) > 0.3).unsqueeze(-1)
    return x.masked_fill(~mask, 0.0) + torch.bernoulli(x.sigmoid()) * x


def filled(module: nn.Module, x: Tensor) -> Tensor:
    noise = torch.empty_like(x).uniform_(-0.1, 0.1) + torch.empty_like(x).normal_(0.0, 0.2)
    return x + noise * torch.empty(x.shape[-1]).exponential_(2.0)


def sampled(module: nn.Module, x: Tensor) -> Tensor:
    index = torch.multinomial(x.softmax(-1).flatten(0, 1), 2).view(*x.shape[:2], 2)
    return x + x.gather(-1, index).mean(-1, keepdim=True)


def permuted(module: nn.Module, x: Tensor) -> Tensor:
    return x + x[..., torch.randperm(x.shape[-1])]


def distributions(module: nn.Module, x: Tensor) -> Tensor:
    noise = torch.distributions.Laplace(x, 0.1).rsample() + torch.distributions.Normal(x, F.softplus(x)).rsample()
    return noise * torch.distributions.Bernoulli(logits=x).sample()


def python_numbers(module: nn.Module, x: Tensor) -> Tensor:
    return x * random.uniform(0.5, 1.5) + 0.1 * random.gauss(0, 1) * random.randint(1, 3)


def numpy_numbers(module: nn.Module, x: Tensor) -> Tensor:
    return x * np.random.rand() + 0.1 * np.random.normal(0.0, 1.0)


def beside_dropout(module: nn.Module, x: Tensor) -> Tensor:
    F.dropout(x, 0.5, module.training)  # nothing reads it, and yet it counts
    return F.dropout(x, 0.2, module.training) + 0.1 * torch.randn_like(x)


DRAWN = {
    **EVALUATED,
    **{
        each.__name__: each
        for each in (
            gumbel, scaled, without_gradients, filled, sampled, permuted, distributions, python_numbers,
            numpy_numbers, beside_dropout,
        )
    },
}  # fmt: skip


class Autoencoder(nn.Module):
    """A variational one, which draws in both modes."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
        return F.mse_loss(self.decode(z), target) + 0.1 * divergence


class Diffusion(nn.Module):
    """Draws a time of each row, and noise that is the target: both are read by the first and by the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.times = nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Layer(lambda module, x: x) for _ in range(2))
        self.register_buffer("kept", torch.linspace(0.95, 0.1, 10))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        time = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[time][:, None, None]
        x = kept.sqrt() * x + (1 - kept).sqrt() * noise + self.times(time)[:, None]
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, noise) + 0 * target.sum()


class Masked(nn.Module):
    """The loss of what was masked: a mean over a number that is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.zeros(WIDTH))
        self.layer = Layer(lambda module, x: x)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        is_hidden = (torch.rand(x.shape[0], x.shape[1], 1) < 0.5).float()
        found = self.layer(x * (1 - is_hidden) + self.hidden * is_hidden)
        return ((found - target).square() * is_hidden).sum() / is_hidden.sum().clamp_min(1)


class Recurrent(nn.Module):
    """Several layers of one recurrent module, with dropout between them, whose last states are read, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 3, dropout=0.4, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDTH // 2, 2, dropout=0.3, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x, (hidden, _) = self.lstm(x)
        return F.mse_loss(self.gru(x)[0] + hidden[1].unsqueeze(1), target)


class Losses(nn.Module):
    """Targets that are drawn in forward, of which some do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        labels = torch.randint(0, 5, x.shape[:2])
        labels = torch.where(torch.rand(x.shape[:2]) < 0.5, labels, -100)
        return F.cross_entropy(self.layer(x + 0 * target).flatten(0, 1), labels.flatten())


_WITH_LOSS = (Autoencoder, Diffusion, Masked, Losses, Recurrent)
WITH_LOSS: dict[str, type[nn.Module]] = {each.__name__: each for each in _WITH_LOSS}


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    """A loss that draws."""
    return (output - target - 0.1 * torch.randn_like(target)).square().mean()


def model_and_loss(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    if name in WITH_LOSS:
        return WITH_LOSS[name](), None
    if name == "noisy_loss":
        return Model(lambda module, x: x), noisy_loss
    return Model(DRAWN[name]), F.mse_loss


NAMES = (*DRAWN, *WITH_LOSS, "noisy_loss")
