"""The cluster as a user names it: text, a TOML file, or what is found on the spot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError
from autopar.files.text_files import read_text, shown
from autopar.profiling.detect import detect
from cost_models import mixed
from cost_models.machine import Cluster
from cost_models.mixed import AnyCluster, MixedCluster

MOST_DEVICES = 2**20
LONGEST = 500
"""Characters of a cluster's text, which a plan's file has in one line."""


class ClusterSpec:
    """How to make a `cost_models` cluster, which is what all of autopar works on."""

    @staticmethod
    def parse(text: str) -> AnyCluster:
        """`"4x8 h100-sxm"`, `"8 a100-80g nvlink3 ib-200g"`, unlike groups of nodes as `"2x8 a100-80g + 4x8 v100-32g"`,
        or the path of a TOML file. Raises ClusterError."""
        if not isinstance(text, str):
            raise ClusterError(
                "a cluster is its text, or what ClusterSpec makes of it",
                values=shown(text),
                alternatives='"4x8 h100-sxm", the path of a TOML file, or "detect" on the command line',
            )
        if text.endswith(".toml"):
            return ClusterSpec.from_toml(text)
        if len(text) > LONGEST:
            raise ClusterError("the text is too long for a cluster", values=shown(text))
        try:
            return _bounded(mixed.parse(text))
        except ValueError as error:
            raise ClusterError(str(error)) from None

    @staticmethod
    def from_toml(path: str | Path) -> AnyCluster:
        """A cluster with devices and links of one's own. Raises ClusterError."""
        text = read_text(path, ClusterError)
        return _read(lambda: mixed.parse_toml(text), str(path))

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> AnyCluster:
        """The cluster of a mapping that has what a TOML file has. Raises ClusterError."""
        return _read(lambda: mixed.from_table(table), "cluster")

    @staticmethod
    def detect(num_devices: int | None = None, *, refresh: bool = False) -> Cluster:
        """This machine: its GPUs by name, or its CPU measured on the spot and shared by num_devices processes."""
        return detect(num_devices, refresh=refresh)


def _read(read: Callable[[], AnyCluster], source: str) -> AnyCluster:
    """What is read, with errors that name the source."""
    try:
        found = read()
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"{source}: {error}") from None
    _bounded(found)
    if not str(found).isprintable() or len(str(found)) > LONGEST:
        raise ClusterError(f"{source}: names of devices and links are short and printable", values=shown(str(found)))
    return found


def _bounded(cluster: AnyCluster) -> AnyCluster:
    """Raises ClusterError for one that nobody has."""
    if cluster.num_devices > MOST_DEVICES:
        raise ClusterError(f"a cluster has {MOST_DEVICES} devices at most", values=shown(cluster.num_devices))
    return cluster


def as_cluster(spec: AnyCluster | str) -> AnyCluster:
    """A cluster or its text. Raises ClusterError."""
    return spec if isinstance(spec, (Cluster, MixedCluster)) else ClusterSpec.parse(spec)


def is_on_cpu(spec: AnyCluster | str) -> bool:
    """Whether a cluster or its text, "detect" included, says that ranks are processes on a CPU. Raises ClusterError."""
    return spec != "detect" and as_cluster(spec).groups[0].device.is_cpu
