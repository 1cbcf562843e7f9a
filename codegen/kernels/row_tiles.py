"""The candidate tiles of the norms, rms_norm.py and layer_norm.py.

A row longer than the largest tile is read in blocks, which costs another pass. The backward tile is smaller than the
forward one: it also holds w, dy and the sums of dw and db.
"""

from __future__ import annotations

from typing import Final

from .tile import Tile

FORWARD_TILES: Final = (
    Tile(16384, least=2048),
    Tile(16384, least=2048, per_warp=256),
    Tile(16384, least=2048, per_warp=1024),
    Tile(16384, least=1024, per_warp=256),
    Tile(16384, least=4096),
    Tile(8192, least=2048),
)
BACKWARD_TILES: Final = (
    Tile(8192, least=2048),
    Tile(8192, least=2048, per_warp=256),
    Tile(8192, least=2048, per_warp=1024),
    Tile(8192, least=4096),
    Tile(8192, least=2048, programs=2),
    Tile(8192, least=2048, per_warp=256, programs=2),
)
