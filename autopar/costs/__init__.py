"""Seconds and bytes of options, blocks and stages; the only caller of `cost_models`."""
