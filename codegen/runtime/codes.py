"""Codes that collectives of parameters may be compressed to (by `compressed.py`), for planning alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch

BLOCK_SIZE = 256
"""Elements per scale: the scales are 1.5 % of a message. ZeRO++'s order of magnitude."""
CODES: Mapping[str, Mapping[str, torch.dtype]] = {
    "gather": {"int8": torch.int8, "fp8": torch.float8_e4m3fn},
    "reduce": {"int8": torch.int8},
}
"""Collective -> name of a code -> its dtype. A sum of e4m3 codes would err by 1/16 of each part."""
LEGAL = "; ".join(f"{collective}: {' or '.join(codes)}" for collective, codes in CODES.items())
"""The codes of each collective, in words."""
