"""Seconds of ops and collectives on a cluster: the one cost model that all planners use.

An op takes its measured time if the cluster has one, else the longer of its arithmetic and its
memory traffic (a roofline), plus the overhead of any op. A collective takes its measured time,
or that of a ring: a latency per step, and what a rank sends over the bandwidth of the slowest
hop, where the groups that a NIC carries at once share it. All ranks run the same program in
step, so that a mixed cluster is as fast as its slowest device.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, cast

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.dist import (
    KINDS,
    CollectiveOp,
    DistOp,
    HostCopyOp,
    RecvOp,
    SendOp,
    StartedOp,
    WaitOp,
    sent_bytes,
)
from shardweave.ir.dialects.types import (
    dtype_of_value,
    dtype_word,
    is_float8,
    num_bytes,
    number_of_type,
    shape_of,
    tensor_type_of,
)
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.ops.registry import flops_of, global_name, is_attention, is_positional, spec_of
from shardweave.ir.ops.seen_keys import is_causal, num_pieces, seen_share
from shardweave.ir.program.storage import copies, is_view
from shardweave.ir.program.traffic import bytes_moved, merged_bytes
from shardweave.planners.cost.cluster import Cluster, ClusterError, DeviceType, interpolate, time_at
from shardweave.planners.cost.links import HOST_LINK, Ring, ring_of

DEFAULT_OP = "default"
"""Key in `DeviceType.op_times` of the curve over bytes for ops without a curve of their own."""

Kind = Literal["compute", "view", "collective", "start", "wait", "message"]


def kind_of(op: Operation) -> Kind:
    """Classify an op by how it takes time.

    compute: on the device. view: no time, as its results share the operand's memory. collective:
    the device waits for it, or for a copy to or from the host. start: it runs beside the device
    until the `wait` for it. message: between stages; its time depends on their devices
    (`pipeline/runs.py`).
    """
    kind = _kind_of_class(type(op))
    return "view" if kind == "compute" and is_view(op) else kind


@cache
def _kind_of_class(op: type[Operation]) -> Kind:
    if issubclass(op, WaitOp):
        return "wait"
    if issubclass(op, (SendOp, RecvOp)):
        return "message"
    if issubclass(op, StartedOp):
        return "start"
    return "collective" if issubclass(op, (CollectiveOp, HostCopyOp)) else "compute"


def signature_text(op: Operation) -> str:
    """Key of an op's cost: `aten.mm(float32[8,4], float32[4,2]) -> float32[8,2]`."""
    taken = ", ".join(_type_text(value) for value in op.operands)
    given = ", ".join(_type_text(value) for value in op.results)
    return f"{op.name}({taken}) -> {given}"


def _type_text(value: SSAValue) -> str:
    sizes = ",".join(map(str, shape_of(value)))
    return f"{dtype_word(dtype_of_value(value))}[{sizes}]"


@dataclass(eq=False)
class CostModel:
    """Prices the ops that one rank of `mesh` runs (a local program) on a cluster.

    Each distinct op (name and types) is priced once, then looked up. cut_by: the mesh for which the
    program was partitioned, if `mesh` has fewer devices. Raises ClusterError if `mesh` has more
    devices than the cluster.
    """

    cluster: Cluster
    mesh: Mesh = field(default_factory=Mesh)
    cut_by: Mesh | None = None

    def __post_init__(self) -> None:
        self.cluster.check_fits(self.mesh.num_devices, f"the mesh {self.mesh}")
        self.devices = self.cluster.device_types(max(1, self.mesh.num_devices))
        self.issue_s = max(device.issue_s for device in self.devices)
        self._op_times: dict[Hashable, float] = {}
        self._collective_times: dict[Hashable, float] = {}
        self._rings: dict[tuple[tuple[str, ...], bool], Ring] = {}

    # Compute

    def op_time_s(self, op: Operation) -> float:
        """Seconds that an op occupies the device; for a collective, the time to start it."""
        kind = kind_of(op)
        if kind in ("view", "wait", "message"):
            return 0.0
        if kind != "compute":
            return self.start_time_s(cast(DistOp, op))
        key = self._signature(op)
        seconds = self._op_times.get(key)
        if seconds is None:
            seconds = max(
                self._time_on(op, device) + self._merging_s(op, device) for device in self.devices
            )
            self._op_times[key] = seconds
        return seconds

    def start_time_s(self, op: DistOp) -> float:
        """Seconds that the device spends on starting a collective."""
        if self.mesh.sizes(op.axes) == 1:
            return 0.0
        seconds, bandwidth = self.cluster.start_overhead_s, self.cluster.start_bandwidth_bytes_s
        return seconds + (self._operand_bytes(op) / bandwidth if bandwidth else 0.0)

    def _time_on(self, op: Operation, device: DeviceType) -> float:
        if device.measured:
            measured = device.measured.get(signature_text(op))
            if measured is not None:
                return measured
        flops, moved = _flops(op) * self._imbalance(op), bytes_moved(op)
        curve = device.op_times.get(global_name(op))
        if curve is not None and flops:
            peak = _peak(op, device)
            return time_at(curve, flops) * device.flops.get("float32", peak) / peak
        if curve is not None:
            return time_at(curve, max(1, moved))
        memory_s = moved / device.memory_bandwidth_bytes_s
        if flops == 0:
            curve = device.op_times.get(DEFAULT_OP)
            return time_at(curve, max(1, moved)) if curve else memory_s + device.overhead_s
        share = device.efficiency
        if device.attention_efficiency and is_attention(op):
            flops *= 0.5 if is_causal(op) else 1.0
            share = device.attention_efficiency
        rate = _peak(op, device) * interpolate(share, flops)
        is_slow = device.unaligned_slowdown > 1 and _alignment(op) < device.aligned_bytes
        slowdown = device.unaligned_slowdown if is_slow else 1.0
        return max(slowdown * flops / rate, memory_s) + device.overhead_s

    def _imbalance(self, op: Operation) -> float:
        """Work of the busiest device in a causal attention, relative to half of all products.
        It is 1 if the shards of the sequence are balanced, and for all other ops."""
        if is_attention(op) and is_causal(op):
            return 2 * seen_share(op, self.cut_by or self.mesh)
        return 1.0

    def _merging_s(self, op: Operation, device: DeviceType) -> float:
        """Seconds to merge an attention's partial results, where it is computed in parts."""
        if not is_positional(op):
            return 0.0
        pieces = num_pieces(op, self.cut_by or self.mesh)
        return merged_bytes(op, pieces) / device.memory_bandwidth_bytes_s

    def _signature(self, op: Operation) -> Hashable:
        numbers = [number_of_type(value) for value in op.operands]
        numbers.append(-1)
        numbers += [number_of_type(value) for value in op.results]
        if op.regions:
            return op.name, _flops(op), tuple(numbers)
        if is_attention(op):
            mesh = self.cut_by or self.mesh
            pieces = num_pieces(op, mesh) if is_positional(op) else 1
            return op.name, seen_share(op, mesh), pieces, tuple(numbers)
        return op.name, _alignment(op), tuple(numbers)

    # Communication

    def collective_time_s(self, op: DistOp) -> float:
        """Seconds from start to end of a collective whose links nothing else uses, or of a copy to
        or from the host. Sub-batches of one device, along a time axis, send nothing."""
        if isinstance(op, HostCopyOp):
            return self._operand_bytes(op) / self.host_bandwidth_bytes_s
        if self.mesh.sizes([axis for axis in op.axes if axis not in self.mesh.time_names]) == 1:
            return 0.0
        key = (op.axes, self._signature(op))
        seconds = self._collective_times.get(key)
        if seconds is None:
            sent = sent_bytes(op, self.mesh)
            seconds = self.ring_time_s(op.kind(), self.ring(op), self._operand_bytes(op), sent)
            self._collective_times[key] = seconds
        return seconds

    def ring_time_s(self, kind: str, ring: Ring, operand_bytes: float, sent: float) -> float:
        """Seconds of a collective on `ring`. operand_bytes, sent: bytes a rank has, and sends."""
        for table in self.cluster.collectives:
            if (table.kind, table.ranks, table.nodes) == (kind, ring.ranks, ring.nodes):
                return time_at(table.points, max(1, operand_bytes * ring.flows))
        steps = KINDS[kind].steps(ring.ranks)
        if ring.bandwidth_bytes_s == 0:
            return math.inf
        return steps * ring.latency_s + sent / ring.bandwidth_bytes_s

    def sync_time_s(self, kind: str, axes: Sequence[str], size_bytes: float) -> float:
        """Seconds of a collective over `axes`. size_bytes: of the full parameter or gradient."""
        ring = self.ring_over(tuple(axes))
        sent = KINDS[kind].ROUNDS * (ring.ranks - 1) / ring.ranks * size_bytes
        operand = size_bytes / ring.ranks if kind == "all_gather" else size_bytes
        return self.ring_time_s(kind, ring, operand, sent)

    def _operand_bytes(self, op: Operation) -> int:
        return sum(num_bytes(tensor_type_of(value)) for value in op.operands)

    def ring(self, op: DistOp) -> Ring:
        """The ring that a collective uses. Collectives that share a link run one after another."""
        if isinstance(op, HostCopyOp):
            return Ring(1, 1, self.host_bandwidth_bytes_s, 0.0, 1, (HOST_LINK,))
        return self.ring_over(op.axes, all_pairs=KINDS[op.kind()].ALL_PAIRS)

    @property
    def host_bandwidth_bytes_s(self) -> float:
        """Bandwidth of a device's link to its host; raises ClusterError if one has none."""
        return min(map(_host_bandwidth, self.devices))

    def ring_over(self, axes: tuple[str, ...], *, all_pairs: bool = False) -> Ring:
        """The ring over some axes; see `links.ring_of`."""
        ring = self._rings.get((axes, all_pairs))
        if ring is None:
            ring = ring_of(self.cluster, self.mesh, axes, all_pairs=all_pairs)
            self._rings[axes, all_pairs] = ring
        return ring

    def stream_of(self, op: DistOp) -> tuple[str, ...]:
        """Key of the communication stream that a collective runs on: its axes, in mesh order.
        Copies to and from the host share one stream."""
        if isinstance(op, HostCopyOp):
            return (HOST_LINK,)
        return tuple(name for name in self.mesh.names if name in op.axes)


def _host_bandwidth(device: DeviceType) -> float:
    if not device.host_bandwidth_bytes_s:
        raise ClusterError(
            f"the plan offloads values to the host, but device '{device.name}' has no bandwidth "
            "to its host; add 'host_bandwidth_bytes_s' to the device, such as 25GB/s."
        )
    return device.host_bandwidth_bytes_s


def _flops(op: Operation) -> int:
    return sum(flops_of(inner) for inner in op.walk()) if op.regions else flops_of(op)


WIDEST_BYTES = 16
"""Bytes of a device's widest load; rows whose bytes are a multiple of it are always aligned."""


def _alignment(op: Operation) -> int:
    """Largest power of two, at most `WIDEST_BYTES`, that divides the bytes of every matrix row of a
    16-bit matrix product; `WIDEST_BYTES` for other ops. Rows are rows in memory, before any
    transpose."""
    product = spec_of(op).product
    if product is None or op.name == "aten.convolution":
        return WIDEST_BYTES
    size = dtype_of_value(op.results[0]).itemsize
    if size != 2:
        return WIDEST_BYTES
    matrices = (*(op.operands[index] for index in product.factors), op.results[0])
    return math.gcd(WIDEST_BYTES, *(size * _row(value) for value in matrices))


def _row(value: SSAValue) -> int:
    """Number of elements in a row of a matrix in memory, which is before a transpose, if any. Dims
    that a view merges count as one row."""
    row = shape_of(value)[-1]
    while isinstance(value.owner, Operation) and spec_of(value.owner).is_layout:
        if copies(value.owner):
            break
        is_turned = value.owner.name == "aten.permute"
        value = value.owner.operands[0]
        last = shape_of(value)[-1]
        row = last if is_turned else max(row, last)
    return row


FLOAT8 = "float8_e4m3fn"
"""Dtype under which clusters give the peak FLOP/s of matrix products in any kind of float8."""


def _peak(op: Operation, device: DeviceType) -> float:
    dtype = dtype_word(dtype_of_value(op.results[0]))
    if op.operands and is_float8(dtype_of_value(op.operands[0])):
        dtype = FLOAT8
    peak = device.flops.get(dtype)
    if peak is None:
        raise ValueError(
            f"op {op.name} computes in {dtype}, but device '{device.name}' has no peak FLOP/s "
            f"for that dtype (only for {', '.join(device.flops)}); add '{dtype}' to its 'flops'."
        )
    return peak
