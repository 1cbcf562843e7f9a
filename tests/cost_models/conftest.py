"""Where the measured data is: in shared/data beside the checkout, as in CI. Tests that want more of it skip without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def measured() -> Callable[[str], Any]:
    """Reads one JSON file of the measured data, or skips the test."""

    def read(name: str) -> Any:
        if not (DATA / name).is_file():
            pytest.skip(f"measured data not found: {DATA / name}")
        return json.loads((DATA / name).read_text(encoding="utf-8"))

    return read
