"""A prediction as lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.costs.block_costs import HIDDEN
from autopar.plan import Prediction
from autopar.units import bytes_text

LEAST_SHARE = 0.0005
"""Kinds below this share of the step are left out."""


def prediction_lines(found: Prediction) -> Iterator[str]:
    """Seconds by kind, largest first, then bytes of the fullest rank and of every pipeline position."""
    yield f"step {found.step_seconds:.4g} s"
    for kind, value in sorted(found.seconds.items(), key=lambda pair: -pair[1]):
        if value > LEAST_SHARE * found.step_seconds:
            beside = " (beside compute)" if kind == HIDDEN else ""
            yield f"  {value:10.4g} s {value / found.step_seconds:6.1%}  {kind}{beside}"
    yield f"memory {bytes_text(found.peak_bytes)} on the fullest rank"
    for kind, value in sorted(found.num_bytes.items(), key=lambda pair: -pair[1]):
        if value:
            yield f"  {bytes_text(value):>10}  {kind}"
    for number, kinds in enumerate(found.positions):
        yield f"  position {number}: {bytes_text(sum(kinds.values()))}"
