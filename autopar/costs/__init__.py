"""Seconds and bytes of options, units and stages; the only caller of `cost_models`."""
