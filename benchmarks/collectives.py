"""The predicted time of collectives against tables that others measured, by kind, size and layout.

    python -m benchmarks.collectives [--rows] [--csv] [--leave-one-out]

Tables: ../shared/data/measured_links.json (H100 of 1 to 64 nodes with EFA, Jean Zay, Mist's pairs of bandwidth and
latency, Mist's raw L4 times), ../shared/data/galvatron_hardware, and collectives.toml (H100 of 2 to 32 quiet nodes with
EFA). Errors are |predicted / measured - 1| of seconds; bias is the median of predicted / measured - 1; rows measured
with a band say how many predictions lie inside it. `--leave-one-out` refits the constants of FITTED without each table
in turn and reports the error on the table left out; a constant that no other table informs is then its family's (EFA's
from InfiniBand, a later NVLink's from an earlier one's). `--csv` rewrites benchmarks/results/collectives.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cost_models import catalog
from cost_models.collective import Group, Kind, seconds, wire_bytes
from cost_models.hardware import Link
from cost_models.machine import Cluster

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
FACTS = Path(__file__).resolve().parent / "collectives.toml"
RESULTS = ROOT / "benchmarks" / "results" / "collectives.csv"
MB = 2**20
GIB = 2**30

HOST_SECONDS: Mapping[Kind, float] = {"all_reduce": 47e-6, "all_to_all": 70e-6}
"""Galvatron's sp table times one call on an idle GPU, so that the host's part of a call adds to all 66 rows: fitted to
them. An all_to_all is a group of sends and receives, which take the host longer."""

SKIPPED = {
    "jean_zay a100_4nodes_range": "how the adapters of such a node are shared is not recorded",
    "mist v100-sxm2-32gb inside the node": "15.7, 40.3, 50.6 GiB/s 'without NVLink': neither PCIe 3 nor NVLink 2",
    "mist v100-sxm2-16gb, 2 and 4 GPUs of a node": "62 and 54 GB/s: no mesh of 6 links gives pairs more",
    "mist tuning-time": "a copy of the L4 template",
    "mist l4 inside the node, template": "the raw times are used",
}

Setting = tuple[str, str]
"""A link and one of its fields; "rate_factors.p2p" is written with the dot."""

FITTED: Mapping[Setting, Setting | float] = {
    ("nvlink2-mesh", "efficiency"): ("nvlink3", "efficiency"),
    ("nvlink3", "efficiency"): ("nvlink2-mesh", "efficiency"),
    ("nvlink3", "rate_factors.p2p"): 1.0,
    ("nvlink4", "efficiency"): ("nvlink3", "efficiency"),
    ("efa-400g", "latency_seconds"): ("ib-400g", "latency_seconds"),
    ("efa-400g", "contention_per_doubling"): ("ib-400g", "contention_per_doubling"),
    ("ethernet-100g", "efficiency"): ("ib-100g", "efficiency"),
    ("opa-100g", "efficiency"): ("ib-100g", "efficiency"),
    ("pcie4", "efficiency"): ("pcie4-x8", "efficiency"),
    ("pcie4-x8", "efficiency"): ("pcie4", "efficiency"),
}
"""Constants of links.toml that the tables inform, each with what stands for it when none does."""

SHARED: Mapping[Setting, Setting] = {
    ("nvlink2-quad", "efficiency"): ("nvlink2-mesh", "efficiency"),
    ("nvlink3-a800", "efficiency"): ("nvlink3", "efficiency"),
    ("nvlink3-a800", "rate_factors.p2p"): ("nvlink3", "rate_factors.p2p"),
    ("efa-400g-quiet", "latency_seconds"): ("efa-400g", "latency_seconds"),
    ("ethernet-32g", "efficiency"): ("ethernet-100g", "efficiency"),
}
"""Constants that are another link's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured collective.

    seconds: with host_seconds, which the device does not spend. band: from the least to the most seconds of the bulk of
    its runs, where that is published.
    """

    table: str
    kind: Kind
    num_bytes: float
    group: Group
    cluster: str
    seconds: float
    host_seconds: float = 0.0
    band: tuple[float, float] | None = None

    @property
    def size(self) -> str:
        return "< 8 MB" if self.num_bytes < 8 * MB else "8 to 63 MB" if self.num_bytes < 64 * MB else ">= 64 MB"


# --- tables --------------------------------------------------------------------------------------------------------


def read_rows() -> list[Row]:
    """All rows of all tables."""
    links = json.loads((DATA / "measured_links.json").read_text(encoding="utf-8"))
    return [
        *_playbook(links["ultrascale_h100"]),
        *_jean_zay(links["jean_zay"]),
        *_mist(links["mist_templates"]["data"]),
        *_mist_raw(links["mist_l4_bandwidth_raw"]["data"]),
        *_galvatron_times(),
        *_galvatron_bandwidths(),
        *_p5(tomllib.loads(FACTS.read_text(encoding="utf-8"))["p5"]),
    ]


def _at_bus_bandwidth(
    table: str, kind: Kind, num_bytes: float, group: Group, cluster: str, rate: float, latency: float = 0.0
) -> Row:
    """A row of nccl-tests' bus bandwidth, in bytes per second."""
    return Row(table, kind, num_bytes, group, cluster, wire_bytes(kind, num_bytes, group.size) / rate + latency)


def _playbook(table: Mapping[str, Any]) -> Iterator[Row]:
    """256 MB over whole clusters; the mean bandwidth of many runs, read as bus bandwidth, and the band drawn around it:
    its upper edge from the first number of nodes to the last, then its lower edge back."""
    names: dict[str, Kind]
    names = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
    bands = table["bands(upper..lower mirrored)"]
    for (name, rates), band in zip(table["mean"].items(), bands, strict=True):
        edges = zip(band[: len(rates)], reversed(band[len(rates) :]), strict=True)
        for nodes, rate, (upper, lower) in zip(map(int, table["nodes"]), rates, edges, strict=True):
            cluster = f"{nodes}x8 h100-sxm nvlink4 efa-400g"
            row = _at_bus_bandwidth("playbook H100", names[name], 256 * MB, Group(8 * nodes, 1), cluster, rate * 1e9)
            yield replace(row, band=(row.seconds * rate / upper, row.seconds * rate / lower))


def _p5(table: Mapping[str, Any]) -> Iterator[Row]:
    kinds: tuple[Kind, ...] = ("all_gather", "all_reduce", "all_to_all")
    for kind in kinds:
        for nodes, rates in zip(table["nodes"], table[kind]["bandwidths"], strict=True):
            cluster = f"{nodes}x8 h100-sxm nvlink4 efa-400g-quiet"
            for megabytes, rate in zip(table[kind]["megabytes"], rates, strict=True):
                num_bytes = megabytes * MB
                yield Row("p5 H100", kind, num_bytes, Group(8 * nodes, 1), cluster, num_bytes / rate / 1e9)


def _jean_zay(table: Mapping[str, Any]) -> Iterator[Row]:
    """all_reduce_bench of 4 GB counts every byte twice: half of the printed throughput is nccl-tests' algorithm's.
    Between nodes it has the slowest and the fastest in weeks of a shared fabric: their geometric mean, and the band."""
    for memory in ("16", "32"):
        rate = table[f"v100_1node_4gpu_{memory}gb"] * 1e9 / 8 / 2 * 2 * 3 / 4
        yield _at_bus_bandwidth("Jean Zay V100", "all_reduce", 4e9, Group(4, 1), f"4 v100-{memory}g nvlink2-quad", rate)
    for nodes, name in ((4, "v100_4nodes_range_jan2022"), (16, "v100_16nodes_range")):
        slow, fast = (2 * 4e9 * 8 / (rate * 1e9) for rate in table[name])
        cluster, group = f"{nodes}x4 v100-32g nvlink2-quad opa-100g", Group(4 * nodes, 1)
        time = math.sqrt(slow * fast)
        yield Row("Jean Zay V100, nodes", "all_reduce", 4e9, group, cluster, time, band=(fast, slow))


MIST_CLUSTERS = {
    "a100-sxm4-40gb": "8 a100-40g nvlink3 ethernet-100g",
    "a10g": "8 a10g pcie4 ethernet-100g",
    "l4": "8 l4 pcie4-x8 ethernet-32g",
    "v100-sxm2-16gb": "8 v100-16g nvlink2-mesh ethernet-32g",
    "v100-sxm2-32gb": "8 v100-32g nvlink2-mesh ethernet-100g",
}


def _mist(templates: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    """(GiB/s, seconds) by ranks per node (2, 4, 8 of one node; 1, 2, 4, 8 of two and four nodes), fitted by Mist to
    all_gather of up to 512 MB as (n-1)/n bytes / rate + latency; the raw L4 times show both the formula and the unit.
    """
    layouts = [(1, 2), (1, 4), (1, 8), *((nodes, ranks) for nodes in (2, 4) for ranks in (1, 2, 4, 8))]
    for name, cluster in MIST_CLUSTERS.items():
        numbers = templates[f"template-{name}.yaml"]["gpu_gpu_comm_params"]
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        pairs = pairs[:2] if name == "a10g" else pairs[1:12]
        for (nodes, ranks), (rate, latency) in zip(layouts, pairs, strict=False):
            if nodes == 1 and (name in ("l4", "v100-sxm2-32gb") or (name == "v100-sxm2-16gb" and ranks < 8)):
                continue
            group = Group(nodes * ranks, 1 if nodes == 1 else 8 // ranks)
            spread = f"{nodes}x{cluster}" if nodes > 1 else cluster
            yield _at_bus_bandwidth(f"mist {name}", "all_gather", 512 * MB, group, spread, rate * GIB, latency)


def _mist_raw(rows: Mapping[str, Mapping[str, str]]) -> Iterator[Row]:
    """all_gather alone, 24 to 512 MB over 2, 4 and 8 L4."""
    for row in rows.values():
        others = (row["compute_n"], row["cpu_to_gpu_mbytes"], row["gpu_to_cpu_mbytes"])
        if set(others) == {"0"}:
            group = Group(int(row["intra_group_size"]), 1)
            milliseconds = float(row["latency"].removesuffix(" ms"))
            num_bytes = float(row["gpu_to_gpu_mbytes"]) * MB
            yield Row("mist L4 raw", "all_gather", num_bytes, group, "8 l4 pcie4-x8", milliseconds / 1e3)


def _galvatron_times() -> Iterator[Row]:
    names: dict[str, Kind] = {"allreduce": "all_reduce", "all2all": "all_to_all"}
    for key, milliseconds in _galvatron("sp_time_1nodes_8gpus_per_node.json").items():
        match = re.fullmatch(r"(allreduce|all2all)_size_(\d+)_(\d+)MB_time", key)
        assert match is not None, key
        kind, group, num_bytes = names[match[1]], Group(int(match[2]), 1), int(match[3]) * MB
        yield Row("galvatron sp A100", kind, num_bytes, group, "8 a100-80g", milliseconds / 1e3, HOST_SECONDS[kind])


def _galvatron_bandwidths() -> Iterator[Row]:
    """Bus bandwidths without sizes (256 MB assumed; p2p 64 MB by its script) on 200 GB/s of NVLink, an A800's: a node
    reaches 155 GB/s and the A100 of the sp table 231. The interfaces of the two nodes are not recorded either: read as
    one of 100 Gb/s per GPU, by the 800 Gb/s that the same authors state for a node."""
    for path in sorted((DATA / "galvatron_hardware").glob("*_bandwidth_*.json")):
        match = re.match(r"(allreduce|p2p)_bandwidth_(\d)nodes_(\d)gpus", path.name)
        assert match is not None, path.name
        nodes, per_node = int(match[2]), int(match[3])
        cluster = f"{nodes}x{per_node} a100-80g nvlink3-a800 ib-100g"
        for key, rate in _galvatron(path.name).items():
            size = int(re.findall(r"size_(\d+)", key)[0])
            spread = match[1] == "p2p" or key.endswith("consec_0")
            group = Group(size, nodes * per_node // size if spread else 1)
            crosses = group.size * group.stride > per_node
            table = "galvatron two nodes" if crosses else "galvatron A800 node"
            kind: Kind = "p2p" if match[1] == "p2p" else "all_reduce"
            num_bytes = 64 * MB if kind == "p2p" else 256 * MB
            yield _at_bus_bandwidth(table, kind, num_bytes, group, cluster, rate * 1e9)


def _galvatron(name: str) -> dict[str, float]:
    return dict(json.loads((DATA / "galvatron_hardware" / name).read_text(encoding="utf-8")))


# --- errors --------------------------------------------------------------------------------------------------------

Settings = Mapping[Setting, float]


def predicted(row: Row, settings: Settings | None = None) -> float:
    """Seconds, with the built-in links or with some of their constants replaced."""
    cluster = Cluster.parse(row.cluster)
    if settings is not None:
        intra, inter = _with(cluster.intra_node, settings), _with(cluster.inter_node, settings)
        cluster = replace(cluster, intra_node=intra, inter_node=inter)
    return seconds(row.kind, row.num_bytes, row.group, cluster) + row.host_seconds


def _with(link: Link, settings: Settings) -> Link:
    for (name, field), value in settings.items():
        if name == link.name:
            head, _, kind = field.partition(".")
            link = replace(link, **{head: {**getattr(link, head), kind: value} if kind else value})
    return link


def ratios(rows: Sequence[Row], settings: Settings | None = None) -> list[float]:
    """Predicted over measured seconds."""
    return [predicted(row, settings) / row.seconds for row in rows]


def _summary(values: Sequence[float]) -> dict[str, float]:
    errors = sorted(abs(value - 1) for value in values)
    return {
        "rows": len(errors),
        "median": statistics.median(errors),
        "p90": errors[math.ceil(0.9 * len(errors)) - 1],
        "worst": errors[-1],
        "bias": statistics.median(values) - 1,
    }


def _grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


# --- fit -----------------------------------------------------------------------------------------------------------


def built_in() -> dict[Setting, float]:
    """The constants of FITTED as links.toml has them."""
    values = {}
    for name, field in FITTED:
        head, _, kind = field.partition(".")
        value = getattr(catalog.link(name), head)
        values[(name, field)] = value[kind] if kind else value
    return values


def complete(values: Settings) -> dict[Setting, float]:
    """With the constants that are another link's."""
    return {**values, **{setting: values[other] for setting, other in SHARED.items()}}


def fit(rows: Sequence[Row]) -> dict[Setting, float]:
    """FITTED by coordinate descent on the mean over tables of the mean |log(predicted / measured)|."""
    tables = list(_grouped(rows, lambda row: row.table).values())
    values = built_in()
    informed = {s for s in FITTED if _loss(tables, {**values, s: 0.9 * values[s] + 1e-3}) != _loss(tables, values)}
    for step in (1.3, 1.1, 1.03, 1.01):
        for _ in range(6):
            before = _loss(tables, values)
            for setting in sorted(informed):
                values = min(_moved(values, setting, step), key=lambda trial: _loss(tables, trial))
            if before - _loss(tables, values) < 1e-5:
                break
    for setting, stand_in in FITTED.items():
        if setting not in informed:
            values[setting] = _stand_in(stand_in, values)
    return values


def _moved(values: dict[Setting, float], setting: Setting, step: float) -> list[dict[Setting, float]]:
    limit = 1.0 if setting[1] == "efficiency" else math.inf
    return [{**values, setting: min(limit, values[setting] * factor)} for factor in (1.0, step, 1 / step)]


def _stand_in(stand_in: Setting | float, values: Settings) -> float:
    if isinstance(stand_in, float):
        return stand_in
    return values[stand_in] if stand_in in values else float(getattr(catalog.link(stand_in[0]), stand_in[1]))


def _loss(tables: Sequence[Sequence[Row]], values: Settings) -> float:
    settings = complete(values)
    return statistics.fmean(statistics.fmean(abs(math.log(r)) for r in ratios(table, settings)) for table in tables)


# --- report --------------------------------------------------------------------------------------------------------


def _print(title: str, groups: Mapping[Any, Sequence[Row]]) -> None:
    print(f"\n{title:44} rows  median    p90  worst   bias")
    for key, rows in sorted(groups.items()):
        s = _summary(ratios(rows))
        label = ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        print(f"{label:44} {s['rows']:4} {s['median']:7.1%}{s['p90']:7.1%}{s['worst']:7.1%}{s['bias']:+7.1%}")


def _print_bands(rows: Sequence[Row]) -> None:
    banded = [(predicted(row), row.band) for row in rows if row.band]
    inside = sum(low <= time <= high for time, (low, high) in banded)
    widest = max(high / low for _, (low, high) in banded)
    print(f"inside the measured band: {inside} of {len(banded)}; from fast to slow up to a factor of {widest:.0f}")


def _print_left_out(rows: Sequence[Row]) -> None:
    tables = _grouped(rows, lambda row: row.table)
    print("\nleft out                                     rows  median    p90   bias")
    medians = []
    for name, left_out in tables.items():
        settings = complete(fit([row for row in rows if row.table != name]))
        s = _summary(ratios(left_out, settings))
        medians.append(s["median"])
        print(f"{name:44} {s['rows']:4} {s['median']:7.1%}{s['p90']:7.1%}{s['bias']:+7.1%}")
    print(f"mean over tables of the median error: {statistics.fmean(medians):.1%}")
    print("\nfitted to all tables (links.toml has):")
    values, present = fit(rows), built_in()
    for setting, value in values.items():
        print(f"  {' '.join(setting):40} {value:.4g} ({present[setting]:.4g})")


def _write(rows: Sequence[Row]) -> None:
    columns = ["table", "kind", "megabytes", "ranks", "stride", "cluster", "measured_us", "predicted_us", "error"]
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in rows:
            time = predicted(row)
            place = (row.group.size, row.group.stride, row.cluster)
            figures = (f"{row.seconds * 1e6:.1f}", f"{time * 1e6:.1f}", f"{time / row.seconds - 1:.4f}")
            writer.writerow([row.table, row.kind, f"{row.num_bytes / MB:g}", *place, *figures])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--csv", action="store_true", help=f"write {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--leave-one-out", action="store_true", help="refit without each table in turn")
    options = parser.parse_args(arguments)
    rows = read_rows()
    if options.rows:
        for row in rows:
            time = predicted(row)
            place = f"{row.table:20} {row.cluster:36} {row.kind:14} {row.group.size:4}/{row.group.stride:<2}"
            print(
                f"{place} {row.num_bytes / MB:7.0f} MB {row.seconds * 1e6:9.0f} {time * 1e6:9.0f} us "
                f"{time / row.seconds - 1:+.0%}"
            )
    _print("table", _grouped(rows, lambda row: row.table))
    _print("kind, size", _grouped(rows, lambda row: (row.kind, row.size)))
    _print("table, kind", _grouped(rows, lambda row: (row.table, row.kind)))
    whole = _summary(ratios(rows))
    by_table = [_summary(ratios(table))["median"] for table in _grouped(rows, lambda row: row.table).values()]
    print(
        f"\nall {whole['rows']} rows: median {whole['median']:.1%}; mean over tables {statistics.fmean(by_table):.1%}; "
        f"{len(FITTED) + 1 + len(HOST_SECONDS)} fitted constants (with own_step and HOST_SECONDS)"
    )
    _print_bands(rows)
    for what, why in SKIPPED.items():
        print(f"skipped: {what}: {why}")
    if options.leave_one_out:
        _print_left_out(rows)
    if options.csv:
        _write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
