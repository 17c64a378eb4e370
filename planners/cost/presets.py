"""Clusters by name: those of the papers and others, as YAML files beside this module."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from shardweave.ir.mesh.mesh import MOST_DEVICES
from shardweave.ir.suggest import did_you_mean
from shardweave.planners.cost.cluster import Cluster, ClusterError, DeviceType
from shardweave.planners.cost.cluster_file import DTYPES, load_cluster
from shardweave.planners.cost.quantity import quantity

FOLDER = Path(__file__).parent / "clusters"

OPTIONS = ("rate", "nodes")


def preset_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_cluster(cluster: Cluster | str | Path) -> Cluster:
    """Return `cluster` if it is a Cluster, else load it: a preset's name, or the path of a YAML
    file.

    A preset may carry options: `testbed:rate=250mbit` sets a NIC's bandwidth, `h100-pod:nodes=16`
    the number of nodes of each type. Presets joined by `+` are one cluster of all their nodes:
    `dgx-a100:nodes=2+dgx-v100:nodes=2`. Raises ClusterError.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | Path):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ClusterError(
            f"the cluster is a {type(cluster).__name__}; give a preset's name, the path of a file, "
            "or a Cluster."
        )
    name, _, options = str(cluster).partition(":")
    is_file = isinstance(cluster, Path) or cluster.endswith((".yaml", ".yml")) or "/" in name
    if is_file and not (options and Path(name).is_file()):
        return _of_file(cluster)
    if name not in preset_names() or "+" in options:
        if Path(cluster).is_file():
            return _of_file(cluster)
        if "+" in str(cluster) and not is_file:
            return _joined(str(cluster))
        if options and Path(name).is_file():
            raise ClusterError(
                f"cluster '{cluster}': only presets take options, and '{name}' is a file; write "
                "'count' and 'nic_bandwidth_bytes_s' in it."
            )
        raise ClusterError(
            f"cluster '{name}' is neither a preset nor a file; "
            f"{did_you_mean(name, preset_names())}the presets are {', '.join(preset_names())}. "
            "For another machine write a cluster file, from the example in docs/clusters.md "
            "('Writing one')."
        )
    preset = _preset(name)
    for option in filter(None, options.split(",")):
        preset = _with_option(preset, option, str(cluster))
    return preset


def _joined(names: str) -> Cluster:
    """Join the nodes of several presets into one cluster, with the slowest network of them all.
    Collective times that were measured on one of the presets are dropped."""
    parts = [find_cluster(name.strip()) for name in names.split("+")]
    devices: dict[str, DeviceType] = {}
    for name, device in (pair for part in parts for pair in part.devices.items()):
        if devices.setdefault(name, device) != device:
            raise ClusterError(
                f"clusters '{names}' cannot be joined: they define different devices of one "
                f"name, '{name}'; write a cluster file in which each device has its own name."
            )
    first = parts[0]
    slowest = {
        field: max(getattr(part, field) for part in parts)
        for field in (
            "network_latency_s", "overlap_slowdown", "node_overlap_slowdown", "link_slowdown",
            "start_overhead_s", "message_overhead_s",
        )
    }  # fmt: skip
    nodes = tuple(node for part in parts for node in part.nodes)
    return replace(first, name=names, devices=devices, nodes=nodes, collectives=(), **slowest)


def cluster_to_order(cluster: str) -> Cluster:
    """Load a cluster for ordering a program's ops, with its gaps filled; not for predicted times.

    A dtype without a peak gets the device's lowest peak; an unknown link to the host gets the
    bandwidth of device memory. So a plan for a cluster can run in a dtype that its file does not
    mention, such as float64 in a check.
    """
    known = find_cluster(cluster)
    devices = {
        name: replace(
            device,
            flops=dict.fromkeys(DTYPES, min(device.flops.values())) | dict(device.flops),
            host_bandwidth_bytes_s=device.host_bandwidth_bytes_s or device.memory_bandwidth_bytes_s,
        )
        for name, device in known.devices.items()
    }
    return replace(known, devices=devices)


def _of_file(path: str | Path) -> Cluster:
    try:
        return load_cluster(path)
    except OSError as error:
        raise ClusterError(
            f"cluster file '{path}' cannot be read: {error.strerror}; give the path of a file, "
            f"or a preset: {', '.join(preset_names())}. Relative paths, also in a "
            "plan's 'cluster', start in the working directory."
        ) from error


@cache
def _preset(name: str) -> Cluster:
    return load_cluster(FOLDER / f"{name}.yaml")


def _with_option(cluster: Cluster, option: str, text: str) -> Cluster:
    key, _, value = (part.strip() for part in option.partition("="))
    number = quantity(value, "bytes" if key == "rate" else "")
    if key not in OPTIONS or not number:
        raise ClusterError(
            f"cluster '{text}': option '{option}' is unknown; use rate=RATE (bandwidth of a NIC, "
            "such as 250mbit) or nodes=COUNT (1 or more)."
        )
    if key == "rate" and value.removesuffix("/s")[-1].isdigit():
        raise ClusterError(
            f"cluster '{text}': {option} has no unit; write {option}mbit, or {option}B for bytes "
            "per second."
        )
    if key == "rate":
        nodes = [replace(node, nic_bandwidth_bytes_s=number) for node in cluster.nodes]
    else:
        per_node = max(1, *(node.devices for node in cluster.nodes))
        if not (1 <= number <= MOST_DEVICES / per_node / len(cluster.nodes) and number % 1 == 0):
            raise ClusterError(
                f"cluster '{text}': {option} must be a whole number of 1 or more, and the "
                f"cluster can have at most {MOST_DEVICES:,} devices."
            )
        nodes = [replace(node, count=int(number)) for node in cluster.nodes]
    return replace(cluster, name=f"{cluster.name}:{option}", nodes=tuple(nodes))
