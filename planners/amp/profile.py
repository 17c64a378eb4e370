"""The chain of layers that AMP plans, derived from a program.

For each tensor degree the program is partitioned by Megatron's rule, with so many replicas that
each has one sample, and again with `_MORE` samples each; each block is then costed on each device
type. The growth between the two gives a block's time as t(m) = t(1) (phi + (1 - phi) m).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.amp.costs import BACKWARD
from shardweave.planners.amp.model import LayeredModel, Tied
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.workload import (
    BlockWork,
    Workload,
    batch_of,
    parameter_dtype,
    workload_of,
)
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import PlanError

_MORE = 4
"""Samples of the second, larger micro-batch that is costed, or fewer if the batch has fewer."""


@dataclass(frozen=True)
class ProgramProfile:
    """A program as AMP's model. blocks: the `BlockWork` of each layer of the model.

    tensor_s: seconds of communication over the tensor axis in each layer's time for one sample, by
    device type and tensor degree.
    """

    model: LayeredModel
    blocks: tuple[BlockWork, ...]
    tensor_s: Mapping[tuple[str, int], tuple[float, ...]]


def profile_program(
    lowerings: Lowerings, cluster: Cluster, degrees: Iterable[int], precision: str = ""
) -> ProgramProfile:
    """Read a global program at some tensor degrees. Raises PlanError for inputs without a batch."""
    program = lowerings.program
    batch = batch_of(program)
    more = math.gcd(batch, _MORE)
    single: dict[tuple[str, int], Workload] = {}
    many: dict[tuple[str, int], Workload] = {}
    for degree in degrees:
        local = _local(lowerings, batch, degree)
        larger = _local(lowerings, batch // more, degree) if more > 1 else local
        for name, part in _by_device(cluster).items():
            single[name, degree] = workload_of(local, part, Mesh(tensor=degree))
            many[name, degree] = workload_of(larger, part, Mesh(tensor=degree))
    if not any(slot.kind == "param" for slot in program.arguments):
        raise PlanError("the program has no parameters; there is nothing to train.")
    model = _model(program, batch, more, single, many, precision)
    tensor_s = {
        key: tuple(sum(block.communication_s.values()) for block in work.blocks)
        for key, work in single.items()
    }
    return ProgramProfile(model, next(iter(single.values())).blocks, tensor_s)


def _local(lowerings: Lowerings, data: int, degree: int) -> Program:
    return lowerings.blocking(plan_megatron(lowerings.program, Mesh(data=data, tensor=degree)))


def _by_device(cluster: Cluster) -> dict[str, Cluster]:
    """For each device type, the cluster restricted to nodes of that type."""
    parts: dict[str, Cluster] = {}
    for name in dict.fromkeys(node.device for node in cluster.nodes):
        nodes = tuple(node for node in cluster.nodes if node.device == name)
        parts[name] = replace(cluster, devices={name: cluster.devices[name]}, nodes=nodes)
    return parts


Read = Mapping[tuple[str, int], Workload]


def _model(
    program: Program, batch: int, more: int, single: Read, many: Read, precision: str
) -> LayeredModel:
    size = parameter_dtype(program).itemsize
    devices = list(dict.fromkeys(name for name, _ in single))
    degrees = list(dict.fromkeys(degree for _, degree in single))
    first = {degree: single[devices[0], degree] for degree in degrees}
    seconds = {key: _seconds(key[0], work) for key, work in single.items()}
    larger = {key: _seconds(key[0], work) for key, work in many.items()}
    blocks = first[degrees[0]].blocks
    repeated = [index for index, block in enumerate(blocks) if block.is_repeated]
    handed = {n: tuple(b.crossing_bytes / size for b in first[n].blocks) for n in degrees}
    return LayeredModel(
        name="program",
        batch=batch,
        profile={
            name: {n: tuple(s / BACKWARD for s in seconds[name, n]) for n in degrees}
            for name in devices
        },
        outputs=handed,
        sent=handed,
        parameters={n: tuple(_parameters(first[n], size)) for n in degrees},
        kept_bytes={n: tuple(float(b.kept_bytes) for b in first[n].blocks) for n in degrees},
        repeated=(repeated[0], len(repeated)) if repeated else (0, len(blocks)),
        tied=_tied(first, size),
        fixed={
            name: {n: _fixed(seconds[name, n], larger[name, n], more) for n in degrees}
            for name in devices
        },
        itemsize=size,
        state_bytes=state_bytes(size, size, precision),
        workspace_bytes={
            n: tuple(float(b.workspace_bytes) for b in first[n].blocks) for n in degrees
        },
        keeps_all=True,
    )


def _seconds(device: str, work: Workload) -> tuple[float, ...]:
    """Seconds of each block: forward, backward, and the communication in them."""
    return tuple(
        b.forward_s[device] + b.backward_s[device] + sum(b.communication_s.values())
        for b in work.blocks
    )


def _fixed(single: Sequence[float], many: Sequence[float], more: int) -> tuple[float, ...]:
    """phi of each layer, from its times for one sample and for `more` samples."""
    if more == 1:
        return (0.0,) * len(single)
    shares = (
        (more - after / before) / (more - 1) if before else 0.0
        for before, after in zip(single, many, strict=True)
    )
    return tuple(min(1.0, max(0.0, share)) for share in shares)


def _parameters(work: Workload, size: int) -> list[float]:
    sizes = [block.parameter_bytes / size for block in work.blocks]
    for shared in work.shared:
        sizes[shared.second] += shared.bytes / size
    return sizes


def _tied(works: Mapping[int, Workload], size: int) -> tuple[Tied, ...]:
    degrees = list(works)
    shared = [works[degree].shared for degree in degrees]
    return tuple(
        Tied(
            ones[0].first,
            ones[0].second,
            {n: tied.bytes / size for n, tied in zip(degrees, ones, strict=True)},
        )
        for ones in zip(*shared, strict=True)
    )
