"""`autopar profile` for real on this CPU: what is written, what planning reads, and how an interrupted run goes on."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from autopar.cluster import ClusterSpec
from autopar.profiling.cases import ROUNDS, Topology, cases
from autopar.profiling.profile import fitted, profile, raw_path
from autopar.profiling.samples import Samples
from cost_models.machine import Cluster

ROOT = Path(__file__).resolve().parents[3]
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_profile_is_a_cluster_to_plan_for(tmp_path: Path) -> None:
    """Its figures are sane; how near they are is measured by benchmarks/measuring.py."""
    out = tmp_path / "profile.toml"
    found = profile(2, out=out, level="quick", console=QUIET)
    assert found is not None
    cluster = found.cluster
    assert ClusterSpec.parse(str(out)) == cluster and cluster.num_devices == 2
    text = out.read_text()
    assert text.startswith("# measured 20") and "samples" in text and "gloo" in text
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p", "matmul"} <= found.errors().keys()
    device, link = cluster.device, cluster.intra_node
    assert device.name == "cpu-measured" and "forward" in device.source and "2 processes" in device.source
    figures = (device.peak("fp32"), device.memory_bytes_per_second, device.kernel_launch_seconds, link.bytes_per_second)
    assert all(0 < figure < math.inf for figure in (*figures, link.latency_seconds + link.startup_seconds))
    assert 2**27 < device.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    assert Cluster.from_toml_text(cluster.to_toml()) == cluster


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupted_run_goes_on_and_a_finished_one_measures_nothing(tmp_path: Path) -> None:
    out = tmp_path / "profile.toml"
    profile(1, out=out, level="brief", console=QUIET)
    raw = raw_path(out)
    cluster = Cluster.from_toml(out)
    assert (cluster.num_devices, cluster.intra_node.name) == (1, "loopback")
    whole = raw.read_bytes()
    lines = whole.splitlines(keepends=True)
    raw.write_bytes(b"".join(lines[:20]) + lines[20][:10])
    profile(1, out=out, level="brief", console=QUIET)
    again = raw.read_bytes()
    assert again.splitlines()[:20] == whole.splitlines()[:20]
    samples = Samples.read(raw)
    assert samples is not None
    assert samples.done == {(c.name, n) for c in cases(Topology(1, 1), "brief") for n in range(ROUNDS["brief"])}
    assert len(samples.samples) == len(samples.done)
    profile(1, out=out, level="brief", console=QUIET)
    assert raw.read_bytes() == again
    kept = Samples.read(raw)
    assert kept is not None and fitted(kept).cluster == Cluster.from_toml(out)


TORCHRUN = """
import sys
from rich.console import Console
from autopar.profiling.profile import profile
found = profile(out=sys.argv[1], level="brief", console=Console(quiet=True))
import os
assert (found is None) == (os.environ["RANK"] != "0")
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_over_two_nodes_fits_both_links(tmp_path: Path) -> None:
    """Two 'nodes' of one process each on this machine: the launcher's variables are all that tells."""
    script, out = tmp_path / "run.py", tmp_path / "profile.toml"
    script.write_text(TORCHRUN)
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen([sys.executable, "-P", str(script), str(out)], env={**shared, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(900) for rank in ranks] == [0, 0]
    cluster = Cluster.from_toml(out)
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 1)
    assert cluster.inter_node.name == "gloo-measured" and "2 nodes" in cluster.inter_node.source
    assert cluster.intra_node.name == "loopback"
