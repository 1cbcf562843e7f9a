"""The cluster as a user names it: text, a TOML file, or what is found on the spot."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import ClusterError
from cost_models.machine import Cluster


class ClusterSpec:
    """How to make a `cost_models.machine.Cluster`, which is what all of autopar works on."""

    @staticmethod
    def parse(text: str) -> Cluster:
        """`"4x8 h100-sxm"`, `"8 a100-80g nvlink3 ib-200g"`, or the path of a TOML file. Raises ClusterError."""
        if text.endswith(".toml"):
            return ClusterSpec.from_toml(text)
        try:
            return Cluster.parse(text)
        except ValueError as error:
            raise ClusterError(str(error)) from None

    @staticmethod
    def from_toml(path: str | Path) -> Cluster:
        """A cluster with devices and links of one's own. Raises ClusterError."""
        try:
            return Cluster.from_toml(path)
        except (ValueError, OSError) as error:
            raise ClusterError(str(error)) from None

    @staticmethod
    def detect(num_devices: int | None = None, *, refresh: bool = False) -> Cluster:
        """This machine: its GPUs by name, or its CPU measured on the spot and shared by num_devices processes."""
        from autopar.detect import detect

        return detect(num_devices, refresh=refresh)


def as_cluster(spec: Cluster | str) -> Cluster:
    """A cluster or its text."""
    return ClusterSpec.parse(spec) if isinstance(spec, str) else spec
