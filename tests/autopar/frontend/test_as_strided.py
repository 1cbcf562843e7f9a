"""`as_strided` by positions: equal to torch's own for random layouts, and in a program whatever its ranks' layouts."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from autopar.frontend.trace_modes.as_strided import by_position
from tests.autopar.interpret import assert_equals_eager


def test_positions_equal_memory_for_random_layouts() -> None:
    generator, equal = random.Random(0), 0
    for _ in range(1500):
        shape = [generator.choice([1, 2, 3, 4, 6]) for _ in range(generator.randint(1, 4))]
        x = torch.arange(float(math.prod(shape))).reshape(shape)
        if generator.random() < 0.5:
            x = x.permute(generator.sample(range(len(shape)), len(shape)))
        x = x[1:] if generator.random() < 0.3 and len(x) > 2 else x
        stride = [generator.choice(x.stride()) * generator.randint(1, 3) for _ in range(generator.randint(1, 4))]
        size = [generator.randint(1, 3) for _ in stride]
        offset = generator.choice([None, x.storage_offset() + generator.choice(x.stride())])
        try:
            found = by_position(x, tuple(size), tuple(stride), offset)
        except TraceError:
            continue
        assert torch.equal(found, x.as_strided(size, stride, offset))
        equal += 1
    assert equal > 500


@pytest.mark.parametrize(("shape", "size", "offset"), [((6, 20), (2, 3, 4, 5), None), ((120,), (3, 1, 5, 2), 7)])
def test_what_lies_packed_is_read_in_any_shape(shape: tuple[int, ...], size: tuple[int, ...], offset: int) -> None:
    x, stride = torch.arange(120.0).reshape(shape), torch.empty(size).stride()
    assert torch.equal(by_position(x, size, stride, offset), x.as_strided(size, stride, offset))


class Windows(nn.Module):
    """Windows that overlap by half, of a tensor that lies transposed in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x.transpose(0, 1)).transpose(0, 1)
        chunks = hidden.view(len(x), 2, 4, 4)
        batch, chunk, row, feature = chunks.stride()
        return chunks.as_strided((len(x), 3, 4, 4), (batch, chunk // 2, row, feature)).square().mean()


def test_overlapping_windows_do_not_depend_on_memory() -> None:
    model, x = Windows(), torch.randn(4, 8, 4)
    graph = trace(model, (x,))
    assert not any("as_strided" in node.op for node in graph.body)  # type: ignore[union-attr]
    report = autopar.verify(model, "2 cpu", example_inputs=(x,), constraints={"dp": 2, "micro_batches": 2})
    assert report.ok(1e-5), report


def test_what_goes_by_no_positions_is_refused() -> None:
    class Diagonal(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).as_strided((2, 3), (7, 5)).mean()

    with pytest.raises(TraceError, match="as_strided"):
        trace(Diagonal(4, 4), (torch.ones(4, 4),))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("window", torch.hann_window(6))

    def forward(self, x: Tensor) -> Tensor:
        settings = {"hop_length": 3, "win_length": 6, "window": self.window, "normalized": True}
        return torch.stft(self.linear(x), 8, return_complex=True, **settings).abs().square().mean()


def test_frames_of_a_short_time_fourier_transform_are_unfolded() -> None:
    model, x = Spectrum(), torch.randn(4, 32)
    assert_equals_eager(trace(model, (x,)), model, {"x": x}, model(x))
