"""From a row to the cluster that it ran on, and to the precision of its matmuls there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.published_runs.rows import Row, SkippedError
from cost_models import catalog
from cost_models.hardware import Device, Link
from cost_models.machine import Cluster

EXTRA_DEVICES = Path(__file__).resolve().parent / "devices.toml"

DEVICES: Mapping[str, str] = {
    "V100-32GB": "v100-32g",
    "V100-16GB": "v100-16g",
    "A100-40GB": "a100-40g",
    "A100-80GB": "a100-80g",
    "A100-40GB-PCIe": "a100-40g-pcie",
    "A100-80GB-PCIe": "a100-80g-pcie",
    "H100-80GB": "h100-sxm",
    "H100-80GB-PCIe": "h100-pcie",
    "H200-141GB": "h200-sxm",
    "B200-192GB": "b200",
    "DGX-H100": "h100-sxm",
    "DGX-B200": "b200",
    "DGX-B300": "b300",
    "DGX-GB200": "gb200",
    "DGX-GB300": "gb300",
    "L4-24GB": "l4",
    "L4": "l4",
    "L40S-48GB": "l40s",
    "A10G-24GB": "a10g",
    "A10-24GB": "a10",
    "RTX3090-24GB": "rtx3090",
    "RTX4090-24GB": "rtx4090",
    "A6000-48GB": "a6000",
    "RTX6000Ada-48GB": "rtx6000-ada",
    "RTX8000-48GB": "rtx8000",
}
"""A row's gpu -> a device of the catalogue or of devices.toml."""

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "V100": {"16": "v100-16g", "32": "v100-32g"},
    "A100": {"40": "a100-40g", "80": "a100-80g"},
    "A800": {"40": "a100-40g", "80": "a800-80g"},
    "H100": {"80": "h100-sxm"},
    "H800": {"80": "h800-sxm"},
    "H200": {"141": "h200-sxm"},
}
"""Beginning of a row's gpu that is not in DEVICES -> by gpu_mem_gb."""

LINKS: Sequence[tuple[str, str]] = (
    ("hf cluster", "efa-400g"),
    ("efa", "efa-400g"),
    ("infiniband", "ib-200g"),
    ("omni-path", "opa-100g"),
    ("roce", "roce-100g"),
    ("ethernet", "ethernet-25g"),
    ("ib", "ib-200g"),
)
"""The first whose text is part of a row's inter_node, in lower case; its rate is the row's where that is known."""


def devices() -> Mapping[str, Device]:
    """Those of the catalogue, and workstation cards that only these rows have."""
    tables = tomllib.loads(EXTRA_DEVICES.read_text(encoding="utf-8"))
    found = dict(catalog.devices())
    for name, table in tables.items():
        if name not in found:
            base = found[table.pop("like")]
            peaks = {**base.peak_flops_per_second, **table.pop("peak_flops_per_second", {})}
            found[name] = replace(base, name=name, peak_flops_per_second=peaks, **table)
    return found


def device_of(row: Row) -> Device:
    """Raises SkippedError."""
    known, text = devices(), str(row["gpu"])
    name = DEVICES.get(max((key for key in DEVICES if text.startswith(key)), key=len, default=""))
    for start, sizes in FAMILIES.items():
        if name is None and text.startswith(start):
            name = sizes.get(str(row.get("gpu_mem_gb")))
    if name is None or name not in known:
        raise SkippedError(f"gpu {row['gpu']} is not in the catalogue")
    return known[name]


def cluster_of(row: Row) -> Cluster:
    """Raises SkippedError where a link that matters is not described."""
    device, total, per_node = device_of(row), row["gpus_total"], row["gpus_per_node"]
    if total > per_node and total % per_node:
        raise SkippedError("gpus_total is not whole nodes")
    nodes = max(total // per_node, 1)
    intra = _intra(row, device)
    inter = _inter(row) if nodes > 1 else catalog.link(device.inter_link)
    return Cluster(device, nodes, min(per_node, total), intra, inter)


def _intra(row: Row, device: Device) -> Link:
    text = str(row.get("intra_node", "")).lower()
    usual = catalog.link(device.intra_link)
    if row["gpus_total"] == 1 or row["gpus_per_node"] == 1:
        return usual
    if not text and "intra_bw_gbs" not in row:
        raise SkippedError("neither intra_node nor intra_bw_gbs is given")
    if usual.name == "nvlink2" and "switch" not in text:
        # gpus_per_node counts those in use: fewer than 8 are the first ones of a DGX-1 and its like.
        return catalog.link("nvlink2-quad" if "4 gpu sxm2" in text else "nvlink2-mesh")
    if "pcie" in text and usual.name.startswith("nvlink"):
        return catalog.link("pcie4")
    rate = row.get("intra_bw_gbs")
    if rate and usual.name.startswith("nvlink") and abs(usual.bytes_per_second / (rate * 0.5e9) - 1) > 0.1:
        return replace(usual, bytes_per_second=rate * 0.5e9)  # both directions are counted in intra_bw_gbs
    return usual


def _inter(row: Row) -> Link:
    text = str(row.get("inter_node", "")).lower()
    rate = row.get("inter_bw_gbps_per_node")
    name = next((link for word, link in LINKS if word in text), "ib-200g" if rate else "")
    if not name:
        raise SkippedError("the link between nodes is not given")
    link = catalog.link(name)
    return replace(link, bytes_per_second=rate / 8 * 1e9 / row["gpus_per_node"], shared_by_node=False) if rate else link


def precision_of(row: Row) -> str:
    """Raises SkippedError."""
    text = row["precision"].lower()
    if text.startswith(("mxfp8", "fp8-mx")):
        return "mxfp8"
    if text.startswith(("amp_fp8", "fp8")):
        return "fp8"
    if text.startswith(("bf16", "amp_bf16")):
        return "bf16"
    if text.startswith(("fp16", "amp_fp16")):
        return "fp16"
    if text.startswith("tf32"):
        return "tf32"
    if text.startswith("fp32"):
        return "tf32" if "tf32" in text and "tf32" in device_of(row).peak_flops_per_second else "fp32"
    raise SkippedError(f"precision {row['precision']!r} is not known")
