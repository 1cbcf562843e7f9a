"""The cluster as a user names it: text, a TOML file, or this machine as it is detected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError
from autopar.files.text_files import read_text, shown
from autopar.profiling.detect import detect
from cost_models import mixed_cluster
from cost_models.machine import Cluster
from cost_models.mixed_cluster import AnyCluster, MixedCluster

MOST_DEVICES = 2**20
LONGEST = 500
"""Characters of a cluster's text, which a plan's file has in one line."""


class ClusterSpec:
    """Makes the `cost_models` cluster that all of autopar works on, from text, files or this machine."""

    @staticmethod
    def parse(text: str) -> AnyCluster:
        """Parse `"4x8 h100-sxm"`, `"8 a100-80g nvlink3 ib-200g"`, unlike groups of nodes such as
        `"2x8 a100-80g + 4x8 v100-32g"`, or the path of a TOML file. Raises ClusterError."""
        if not isinstance(text, str):
            raise ClusterError(
                "a cluster is its text, or a value of ClusterSpec's methods",
                values=shown(text),
                alternatives='"4x8 h100-sxm", the path of a TOML file, or "detect" on the command line',
            )
        if text.endswith(".toml"):
            return ClusterSpec.from_toml(text)
        if len(text) > LONGEST:
            raise ClusterError("the text is too long for a cluster", values=shown(text))
        try:
            return _bounded(mixed_cluster.parse(text))
        except ValueError as error:
            raise ClusterError(str(error)) from None

    @staticmethod
    def from_toml(path: str | Path) -> AnyCluster:
        """Read a TOML file, which may describe devices and links of your own. Raises ClusterError."""
        text = read_text(path, ClusterError)
        return _read(lambda: mixed_cluster.parse_toml(text), str(path))

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> AnyCluster:
        """Return the cluster of a mapping with the contents of a TOML file. Raises ClusterError."""
        return _read(lambda: mixed_cluster.from_table(table), "cluster")

    @staticmethod
    def detect(num_devices: int | None = None, *, refresh: bool = False) -> Cluster:
        """Return this machine: its GPUs by name, or its CPU, measured now and shared by num_devices processes."""
        return detect(num_devices, refresh=refresh)


def _read(read: Callable[[], AnyCluster], source: str) -> AnyCluster:
    """Call `read`, and name the source in errors."""
    try:
        cluster = read()
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{source}: {error}") from None
    _bounded(cluster)
    if not str(cluster).isprintable() or len(str(cluster)) > LONGEST:
        raise ClusterError(f"{source}: names of devices and links are short and printable", values=shown(str(cluster)))
    return cluster


def _bounded(cluster: AnyCluster) -> AnyCluster:
    """Return the cluster. Raises ClusterError for more devices than anyone has."""
    if cluster.num_devices > MOST_DEVICES:
        raise ClusterError(f"a cluster has {MOST_DEVICES} devices at most", values=shown(cluster.num_devices))
    return cluster


def as_cluster(spec: AnyCluster | str) -> AnyCluster:
    """Return a cluster from itself or its text. Raises ClusterError."""
    return spec if isinstance(spec, (Cluster, MixedCluster)) else ClusterSpec.parse(spec)


def is_on_cpu(spec: AnyCluster | str) -> bool:
    """Return whether a cluster or its text says that ranks are processes on a CPU; "detect" does not. Raises
    ClusterError."""
    return spec != "detect" and as_cluster(spec).groups[0].device.is_cpu
