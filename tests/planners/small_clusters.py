"""Clusters with round numbers and random programs, for tests of the cost model and simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster, DeviceType, NodeType
from shardweave.tests.ir_text import step

SQUARE = "tensor<100x100xf32>"
"""40 kB: a product takes 2 ms, an all-reduce between two nodes 4 ms on `cluster()`."""

DEVICE = DeviceType(
    name="unit",
    flops={"float32": 1e9},
    memory_bytes=10**9,
    memory_bandwidth_bytes_s=1e15,
)


def cluster(nodes: int = 2, devices: int = 1, *, nic: float = 1e7, **options: Any) -> Cluster:
    """1 GFLOP/s a device, 100 MB/s within a node, 10 MB/s between nodes, no latency."""
    node = NodeType(
        device="unit",
        devices=devices,
        count=nodes,
        bandwidth_bytes_s=1e8,
        nic_bandwidth_bytes_s=nic,
    )
    return Cluster("unit", {"unit": DEVICE}, (node,), **options)


def local(text: str, mesh: str = "tensor=2") -> Program:
    """A local program of a text, where `@` stands for the type of a square matrix."""
    return step(text.replace("@", SQUARE), mesh, local=True)


Choice = tuple[int, int, int]

choices: st.SearchStrategy[list[Choice]] = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 99), st.integers(0, 99)), max_size=25
)
"""What `random_program` is made from."""

_UNARY = {3: ("aten.relu(%{})", "100x100"), 4: ("aten.permute(%{}, dims = [1, 0])", "100x100")}


def random_program(chosen: Sequence[Choice]) -> Program:
    """Products, sums, views and collectives, blocking or started and waited for later."""
    lines = ["param %w : @", "input %x : @"]
    values, in_flight = ["w", "x"], list[str]()

    def add(text: str, name: str) -> None:
        lines.append(f"%{name} = {text} : @")

    for index, (kind, first, second) in enumerate(chosen):
        left, right = values[first % len(values)], values[second % len(values)]
        axis = ("data", "tensor")[second % 2]
        name = f"v{index}"
        if kind in _UNARY:
            add(_UNARY[kind][0].format(left), name)
        elif kind == 5:
            add(f'dist.start_all_reduce(%{left}, axes = ["{axis}"])', name)
            in_flight.append(name)
            continue
        elif kind == 6 and in_flight:
            add(f"dist.wait(%{in_flight.pop(first % len(in_flight))})", name)
        elif kind == 7:
            add(f'dist.all_reduce(%{left}, axes = ["{axis}"])', name)
        else:
            add(f"aten.{'mm' if kind < 2 else 'add.Tensor'}(%{left}, %{right})", name)
        values.append(name)
    for index, name in enumerate(in_flight):
        add(f"dist.wait(%{name})", f"last{index}")
    lines += [f"output %{values[-1]}", f"grad w = %{values[len(values) // 2]}"]
    return local("\n".join(lines), "data=2,tensor=2")


def with_dtype(found: Cluster) -> Cluster:
    """The cluster with devices that know float64, which the tests' programs compute in."""
    devices = {
        name: replace(one, flops={**one.flops, "float64": one.flops["float32"]})
        for name, one in found.devices.items()
    }
    return replace(found, devices=devices)
