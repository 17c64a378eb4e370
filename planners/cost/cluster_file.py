"""Clusters in YAML files; an error says in one line what is missing, unknown or not a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml

from shardweave.ir.dialects.dist import KINDS
from shardweave.ir.mesh.mesh import MOST_DEVICES
from shardweave.ir.suggest import did_you_mean
from shardweave.planners.cost.cluster import Cluster, ClusterError, DeviceType, NodeType, Points
from shardweave.planners.cost.quantity import quantity

FORMAT = "shardweave.cluster/1"

T = TypeVar("T")

WHAT_TO_WRITE = {
    "name": "a word",
    "devices": "device types by name or, for a node, the number of its devices, such as 8",
    "nodes": "a list of node types, each with 'device' and 'devices'",
    "device": "the name of one of the device types",
    "count": "the number of such nodes, such as 4",
    "flops": "peak FLOP/s by dtype, such as {float32: 35.6T, bfloat16: 71T}",
    "memory_bytes": "the memory of one device, such as 24GiB",
    "memory_bandwidth_bytes_s": "the bandwidth of one device's memory, such as 936GB/s",
    "bandwidth_bytes_s": "the bandwidth between devices of a node, such as 32GB/s",
    "latency_s": "the latency of a message within a node, such as 5us",
    "network_latency_s": "the latency of a message between nodes, such as 10us",
    "nics": "the number of network adapters of a node, such as 1",
    "nic_bandwidth_bytes_s": "the bandwidth of one network adapter, such as 100Gbit/s",
    "overhead_s": "the fixed time of every op, such as 5us",
    "issue_s": "the host's time to issue one op, such as 10us",
    "efficiency": "[FLOPs, share of the peak] pairs, such as [[1e9, 0.3], [1e11, 0.8]]",
    "unaligned_slowdown": "the factor on the time of a product with unaligned rows, such as 3",
    "aligned_bytes": "the bytes of which aligned rows are a multiple, such as 16",
    "attention_efficiency": "[FLOPs, share of the peak] pairs, such as [[1e9, 0.2], [1e12, 0.6]]",
    "op_times": "[work, seconds] pairs by op, such as {aten.mm: [[1e6, 1e-4], [1e9, 0.02]]}",
    "measured": "measured seconds by an op's signature",
    "host_bandwidth_bytes_s": "the bandwidth of copies to host memory, such as 25GB/s",
    "islands": "a list of {devices, bandwidth_bytes_s}, smallest first",
    "rings": "a list of {stride, ranks, bandwidth_bytes_s}",
    "stride": "the distance between neighbours in a ring, by index on the node, such as 1",
    "overlap_slowdown": "the factor on compute time during communication, such as 1.1",
    "node_overlap_slowdown": "that factor for communication within a node, such as 1.5",
    "link_slowdown": "the factor on communication time during compute, such as 1.1",
    "start_overhead_s": "the time to start a collective, such as 20us",
    "start_bandwidth_bytes_s": "the bandwidth of copying a collective's operands, such as 5GB/s",
    "message_overhead_s": "the time that sender and receiver each spend on a message, such as 50us",
    "message_bandwidth_bytes_s": "the bandwidth of copying a message at either end, such as 1GB/s",
    "collectives": "a list of {kind, ranks, nodes, points}",
    "kind": "all_reduce, all_gather, reduce_scatter or all_to_all",
    "ranks": "the number of ranks in the group, such as 2",
    "points": "[bytes, seconds] pairs",
}

DTYPES = (
    "float64", "float32", "tfloat32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "complex64", "complex128", "bool",
)  # fmt: skip
"""Dtypes for which a device has a peak of FLOP/s."""

_UNITS = {"_bytes": "bytes", "_bytes_s": "bytes", "_s": "s"}
_POSITIVE = {
    "memory_bytes", "memory_bandwidth_bytes_s", "devices", "count", "nics", "ranks", "stride",
}  # fmt: skip

_SLOWDOWNS = {"unaligned_slowdown", "overlap_slowdown", "node_overlap_slowdown", "link_slowdown"}


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a YAML file. Raises ClusterError, OSError."""
    try:
        text = Path(path).read_text()
    except UnicodeDecodeError as error:
        raise ClusterError(f"cluster '{path}' is not text; give a YAML file.") from error
    return parse_cluster(text, str(path))


def parse_cluster(text: str, name: str = "<cluster>") -> Cluster:
    """Read a cluster from YAML text. Raises ClusterError with one line."""
    try:
        data: object = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ClusterError(f"{where}: not YAML: {error.problem}.") from error
    except RecursionError as error:
        raise ClusterError(f"{name}: brackets are nested too deeply for a cluster.") from error
    except (yaml.YAMLError, ValueError) as error:  # characters, dates and the like that are none
        raise ClusterError(f"{name}: not YAML: {' '.join(str(error).split())}.") from error
    table = _mapping(data, name)
    if table.pop("format", FORMAT) != FORMAT:
        raise ClusterError(f"{name}: 'format' must be {FORMAT}, or left out.")
    return _Reader(name).cluster(table)


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster as YAML that `load_cluster` reads back to an equal one."""
    Path(path).write_text(cluster_text(cluster))


def cluster_text(cluster: Cluster) -> str:
    """Return a cluster as YAML text, without the fields that have their default value."""
    data = {"format": FORMAT, **_plain(cluster)}
    data["devices"] = {name: _plain(device) for name, device in cluster.devices.items()}
    for device in data["devices"].values():
        del device["name"]
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=100)


class _Loader(yaml.SafeLoader):
    """YAML loader that refuses a key that is given twice; YAML's own keeps the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.constructor.ConstructorError(
                    problem=f"'{key.value}' is given twice; remove one of them",
                    problem_mark=key.start_mark,
                )
            if isinstance(key, yaml.ScalarNode):
                keys.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes lists of plain values on one line."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        flat = all(not isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flat)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {
            f.name: _plain(getattr(value, f.name))
            for f in fields(value)
            if not _is_default(f, getattr(value, f.name))
        }
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in cast("Mapping[str, object]", value).items()}
    return value


def _is_default(f: Field[Any], value: object) -> bool:
    if f.default_factory is not MISSING:
        return value == f.default_factory()
    return f.default is not MISSING and value == f.default


def _mapping(data: object, where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ClusterError(f"{where}: found {_shown(data)}, expected fields with values.")
    return dict(cast("dict[str, Any]", data))


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:40]


class _Reader:
    """Builds a cluster's dataclasses from YAML; each error names the file and the field."""

    def __init__(self, name: str) -> None:
        self.name = name

    def cluster(self, table: Mapping[str, Any]) -> Cluster:
        cluster = self.build(Cluster, table, self.name)
        for index, node in enumerate(cluster.nodes):
            self.check_node(cluster, node, f"{self.name}: nodes[{index}]")
        for device in cluster.devices.values():
            self.check_dtypes(device, f"{self.name}: devices.{device.name}.flops")
        for index, times in enumerate(cluster.collectives):
            if times.kind not in KINDS:
                raise ClusterError(
                    f"{self.name}: collectives[{index}].kind: found '{times.kind}'; "
                    f"{did_you_mean(times.kind, KINDS)}write one of {', '.join(KINDS)}."
                )
        if cluster.num_devices > MOST_DEVICES:
            raise ClusterError(
                f"{self.name}: the nodes have {cluster.num_devices} devices in all, expected at "
                f"most {MOST_DEVICES}; correct 'count' or 'devices' of the nodes."
            )
        return cluster

    def check_dtypes(self, device: DeviceType, where: str) -> None:
        unknown = next((name for name in device.flops if name not in DTYPES), None)
        if unknown is not None:
            raise ClusterError(
                f"{where}: there is no dtype '{unknown}'; {did_you_mean(unknown, DTYPES)}write "
                f"some of {', '.join(DTYPES)}."
            )
        if not device.flops or not all(device.flops.values()):
            hint = WHAT_TO_WRITE["flops"]
            raise ClusterError(f"{where}: a peak FLOP/s above 0 is needed; write {hint}.")

    def check_node(self, cluster: Cluster, node: NodeType, where: str) -> None:
        if node.device not in cluster.devices:
            raise ClusterError(
                f"{where}: there is no device type '{node.device}'; use one of "
                f"{', '.join(cluster.devices) or '(none given)'}, or add it to 'devices'."
            )
        if node.devices > 1 and not node.bandwidth_bytes_s:
            raise self.missing("bandwidth_bytes_s", where)
        if cluster.num_nodes > 1 and not node.nic_bandwidth_bytes_s:
            raise self.missing("nic_bandwidth_bytes_s", where)
        for key in ("islands", "rings"):
            for index, links in enumerate(getattr(node, key)):
                if not links.bandwidth_bytes_s:
                    raise ClusterError(
                        f"{where}.{key}[{index}].bandwidth_bytes_s: found 0; write "
                        f"{WHAT_TO_WRITE['bandwidth_bytes_s']}, or leave the entry out."
                    )

    def build(self, kind: type[T], table: Mapping[str, Any], where: str) -> T:
        """Build a dataclass `kind` from `table`; each value is read as its field's type."""
        known = {f.name: f for f in fields(cast(Any, kind))}
        for key in table:
            if key not in known:
                raise ClusterError(
                    f"{where}: the field '{key}' is unknown; {did_you_mean(str(key), known)}the "
                    f"fields are {', '.join(known)}."
                )
        types = get_type_hints(kind)
        values: dict[str, Any] = {}
        for key, f in known.items():
            if key in table:
                values[key] = self.read(types[key], table[key], self.inside(where, key))
            elif f.default is MISSING and f.default_factory is MISSING:
                raise self.missing(key, where)
        return kind(**values)

    def read(self, kind: Any, value: object, where: str) -> Any:
        """Convert a YAML value to `kind`, the type of the field at `where`."""
        if kind == Points:
            return self.points(value, where)
        if get_origin(kind) is Mapping:
            return self.by_name(get_args(kind)[1], _mapping(value, where), where)
        if get_origin(kind) is tuple:
            return self.each(get_args(kind)[0], value, where)
        if is_dataclass(kind):
            return self.build(cast("type[Any]", kind), _mapping(value, where), where)
        if kind is str:
            return str(value)
        number = self.number(value, where)
        if kind is int and number != int(number):
            raise ClusterError(f"{where}: found {_shown(value)}; write a whole number.")
        return kind(number)

    def by_name(self, kind: Any, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, entry in table.items():
            place = f"{where}.{name}"
            if kind is DeviceType:
                entry = {"name": str(name)} | _mapping(entry, place)
            entries[str(name)] = self.read(kind, entry, place)
        return entries

    def inside(self, where: str, key: str) -> str:
        """Location of a field, for error messages: `FILE: nodes`, `FILE: nodes[0].count`."""
        return f"{where}: {key}" if where == self.name else f"{where}.{key}"

    def missing(self, key: str, where: str) -> ClusterError:
        return ClusterError(f"{where}: field '{key}' is missing; write {WHAT_TO_WRITE[key]}.")

    def number(self, value: object, where: str) -> float:
        key = where.replace(":", ".").rpartition(".")[2].strip()
        unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), "")
        number = quantity(value, unit)
        is_number = number is not None and math.isfinite(number)
        if number is None or not is_number or number < 0 or (key in _POSITIVE and not number):
            hint = WHAT_TO_WRITE.get(key, "a number that is not negative")
            raise ClusterError(f"{where}: found {_shown(value)}; write {hint}.")
        # 0 stands for none of its own.
        if key in _SLOWDOWNS and number < 1 and (number or key != "node_overlap_slowdown"):
            raise ClusterError(
                f"{where}: found {_shown(value)}, expected 1 or more; write {WHAT_TO_WRITE[key]}."
            )
        return number

    def points(self, value: object, where: str) -> Points:
        entries = cast("list[object]", value) if isinstance(value, list) else []
        points: list[tuple[float, float]] = []
        for entry in entries:
            pair = cast("list[object]", entry) if isinstance(entry, list) else []
            x, y = [quantity(item, "") for item in pair] if len(pair) == 2 else (None, None)
            if x is None or y is None or x <= 0 or y < 0 or (points and x <= points[-1][0]):
                points = []
                break
            points.append((x, y))
        if not points:
            raise ClusterError(
                f"{where}: found {_shown(cast(object, value))}; write "
                "pairs [x, y] with growing x > 0, such as [[1e6, 0.1], [1e9, 0.8]]."
            )
        no_share = next((y for _, y in points if not 0 < y <= 1), None)
        if where.endswith("efficiency") and no_share is not None:
            raise ClusterError(
                f"{where}: a point has efficiency {no_share:g}, expected a fraction of the peak "
                "in 'flops', above 0 and at most 1, such as 0.8; correct it, or raise the peak."
            )
        return tuple(points)

    def each(self, kind: Any, value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            shown = _shown(cast(object, value))
            raise ClusterError(f"{where}: found {shown}, expected a list of at least one entry.")
        entries = enumerate(cast("list[object]", value))
        return tuple(self.read(kind, entry, f"{where}[{index}]") for index, entry in entries)
