"""Passes over a lowered program, each from `Program` to `Program`. Fusion has its own package, `codegen/fusion/`."""
