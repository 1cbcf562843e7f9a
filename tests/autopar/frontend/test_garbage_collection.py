"""Holding back the cyclic garbage collector."""

from __future__ import annotations

import gc

import pytest

from autopar.frontend.garbage_collection import collection_paused


def test_collector_is_held_back_and_comes_back_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError), collection_paused():
        with collection_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
