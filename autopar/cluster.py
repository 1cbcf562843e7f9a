"""The cluster as a user names it: text, a TOML file, or what is found on the spot."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import ClusterError
from cost_models import mixed
from cost_models.machine import Cluster
from cost_models.mixed import AnyCluster


class ClusterSpec:
    """How to make a `cost_models` cluster, which is what all of autopar works on."""

    @staticmethod
    def parse(text: str) -> AnyCluster:
        """`"4x8 h100-sxm"`, `"8 a100-80g nvlink3 ib-200g"`, unlike groups of nodes as `"2x8 a100-80g + 4x8 v100-32g"`,
        or the path of a TOML file. Raises ClusterError."""
        if text.endswith(".toml"):
            return ClusterSpec.from_toml(text)
        try:
            return mixed.parse(text)
        except ValueError as error:
            raise ClusterError(str(error)) from None

    @staticmethod
    def from_toml(path: str | Path) -> AnyCluster:
        """A cluster with devices and links of one's own. Raises ClusterError."""
        try:
            return mixed.from_toml(path)
        except (ValueError, OSError) as error:
            raise ClusterError(str(error)) from None

    @staticmethod
    def detect(num_devices: int | None = None, *, refresh: bool = False) -> Cluster:
        """This machine: its GPUs by name, or its CPU measured on the spot and shared by num_devices processes."""
        from autopar.detect import detect

        return detect(num_devices, refresh=refresh)


def as_cluster(spec: AnyCluster | str) -> AnyCluster:
    """A cluster or its text."""
    return ClusterSpec.parse(spec) if isinstance(spec, str) else spec
