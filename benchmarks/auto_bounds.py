"""Plans that cannot be the best, and so need not be simulated in full.

From the program of one piece of the batch, which many points share:

- *Time.* A stage runs the ops of its blocks for each piece, one after another on one stream, so
  that its step takes at least the sum of their times; of the ops that depend on no input, which
  may run once for all pieces, one time is counted. Before its first op, all earlier stages run the
  forward pass of a piece, since what it reads goes through them. Where a device has several
  stages, one of the devices has a mean share of all work or more. Messages, waits, copies into
  buckets and sums of gradients only add to this.
- *Memory.* A device holds its stage's parameters, or its shard of them, with the optimizer's state,
  and what the largest op of the program reads and writes is held at once by the device that runs
  it: at least the least state of a stage, and that op.

Of each point that is simulated it is checked that neither bound is above what was found.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import storage_of
from shardweave.planners.auto.plans import PlanMaker
from shardweave.planners.auto.space.point import JointPoint, ReplicaCut
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.model import CostModel, kind_of
from shardweave.planners.cost.workload import BlockWork, alone, workload_of
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import Lookup
from shardweave.planners.plan.plan_parts import Predicted


@dataclass(frozen=True)
class Piece:
    """A piece of the batch on one device: its blocks, seconds of ops that depend on no input, and
    bytes of what the largest op touches."""

    blocks: tuple[BlockWork, ...]
    once_s: float
    largest_bytes: float
    itemsize: int


@dataclass(eq=False)
class Bounds:
    """Bounds of points by the pieces that they share."""

    maker: PlanMaker
    _pieces: dict[tuple[ReplicaCut, int, str], Piece] = field(
        default_factory=dict[tuple[ReplicaCut, int, str], Piece]
    )

    def of(self, point: JointPoint) -> tuple[float, float]:
        """The least seconds and bytes of a point; zeros for what is not bounded."""
        reader = self.maker.estimator.reader
        plan = self.maker.plan(point, reader.depths.read)
        piece = self._piece(point)
        stages = _stages_of(plan)
        members = [
            [b for b in piece.blocks if lookup.key(b.name, *b.layers) is not None]
            for lookup in stages
        ]
        if sum(map(len, members)) != len(piece.blocks):
            return 0.0, 0.0  # blocks that no stage names
        count = point.micro_batches * point.sub_batches
        device = next(iter(piece.blocks[0].forward_s))
        before, least_s, work_s, states = 0.0, 0.0, 0.0, list[float]()
        for own in members:
            each_s = sum(b.forward_s[device] + b.backward_s[device] for b in own)
            own_s = count * each_s - (count - 1) * min(each_s, piece.once_s)
            least_s = max(least_s, before + own_s)
            before += sum(b.forward_s[device] for b in own)
            work_s += own_s
            states.append(self._state(point, sum(b.parameter_bytes for b in own), piece))
        if len(stages) != point.stages:
            # Several stages on a device: one of the devices has a mean share of the work or more.
            return work_s / point.stages, max(min(states), piece.largest_bytes)
        # What depends on no input may run while a stage waits for its first piece.
        return max(0.0, least_s - piece.once_s), min(states) + piece.largest_bytes

    def check(self, point: JointPoint, found: Predicted) -> None:
        """Raises AssertionError if a bound is above what a simulation found."""
        time_s, size = self.of(point)
        assert time_s <= found.time_s * (1 + 1e-9), f"{point}: {time_s} s, found {found.time_s}"
        assert size <= found.peak_bytes, f"{point}: {size} bytes, found {found.peak_bytes}"

    def _state(self, point: JointPoint, size: float, piece: Piece) -> float:
        """Bytes of a stage's parameters and optimizer, in shards where ZeRO divides them."""
        parts = state_bytes(size, piece.itemsize, self.maker.precision)
        shards = point.data if point.zero else 1
        return (parts["parameters"] + parts["optimizer"]) / shards

    def _piece(self, point: JointPoint) -> Piece:
        reader = self.maker.estimator.reader
        rows = reader.batch // point.pieces
        key = point.cut, rows, point.recompute
        if key not in self._pieces:
            base = reader.base(reader.depths.read, reader.batch // rows, point.cut)
            program = reader.lowerings.blocking(replace(base, recompute=point.recompute))
            work = workload_of(program, reader.cluster, point.cut.mesh())
            once_s, largest = _ops_of(program, reader.cluster)
            self._pieces[key] = Piece(work.blocks, once_s, largest, work.itemsize)
        return self._pieces[key]


def _stages_of(plan: Plan) -> list[Lookup]:
    """The layers of each stage by name; all of them without stages."""
    rows = plan.pipeline.stages if plan.pipeline else (("*",),)
    return [Lookup(dict.fromkeys(names, "")) for names in rows]


def _ops_of(program: Program, cluster: Cluster) -> tuple[float, float]:
    """Seconds of ops that depend on no input, and bytes of what the largest op touches."""
    model = CostModel(alone(cluster, next(iter(cluster.devices))), cut_by=program.mesh)
    moving: set[SSAValue] = {s.value for s in program.arguments if s.kind == "input"}
    once_s, largest = 0.0, 0.0
    for op in program.ops:
        if any(value in moving for value in op.operands):
            moving.update(op.results)
        elif kind_of(op) == "compute":
            once_s += model.op_time_s(op)
        if kind_of(op) == "compute":
            touched = {storage_of(v) for v in (*op.operands, *op.results)}
            made = (v for v in touched if isinstance(v.owner, Operation))
            largest = max(largest, float(sum(num_bytes(tensor_type_of(v)) for v in made)))
    return once_s, largest
