"""What each stage of a plan takes and keeps, read off the program of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from shardweave.benchmarks.stages.events import (
    INTERLEAVED,
    Message,
    StageTimes,
    Task,
    TaskPart,
    beside_s,
    most_in_flight,
    order_of,
)
from shardweave.benchmarks.stages.replicas import ReplicaLinks, Sync, nics_between
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.cluster import Cluster, PlacedCluster, likeness, on_devices
from shardweave.planners.cost.links import transfer_s
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.workload import BlockWork, Workload
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import Lookup
from shardweave.planners.plan.plan_parts import Pipeline, PlanError
from shardweave.planners.plan.zero import (
    BATCH_AXES,
    DATA_AXIS,
    DIVIDED,
    REPLICA_AXIS,
    divided,
    whole_for_a_while,
)

OVERLAPPING = ("sub-batch", "cross-pass", "list")
"""Schedules that start collectives before they wait for them."""


@dataclass(frozen=True)
class Stage:
    """One stage of a plan. blocks: of a micro-batch, as its devices run them. handed_bytes: that
    a rank hands to its like of the next for one. parameter_bytes: by block, shared ones in each
    stage that uses them. itemsize: of a parameter. gradient_scale: bytes of a gradient as it is
    sent, over those of its parameter. divided_over: the axes over which ZeRO divides."""

    plan: Plan
    number: int
    cluster: PlacedCluster
    mesh: Mesh
    blocks: tuple[BlockWork, ...]
    parameter_bytes: tuple[int, ...]
    handed_bytes: int
    itemsize: int
    gradient_scale: float = 1.0
    divided_over: tuple[str, ...] = (DATA_AXIS,)

    @property
    def tasks(self) -> list[Task]:
        """What its devices run, first to last: this stage, and others that they have."""
        pipeline, places = pipeline_of(self.plan), places_of(self.plan)
        chunks = self.plan.num_stages // places
        at = self.number % places
        return order_of(pipeline.schedule, at, places, pipeline.micro_batches, chunks)

    @property
    def overlaps(self) -> bool:
        return self.plan.schedule in OVERLAPPING

    @property
    def capacity_bytes(self) -> int:
        """Memory of the smallest device."""
        devices = self.cluster.device_types(self.cluster.num_devices)
        return min(device.memory_bytes for device in devices)

    @property
    def kept_bytes(self) -> int:
        """What its forward pass of a micro-batch leaves to the backward pass."""
        return sum(block.kept_bytes for block in self.blocks)

    def compute_s(self, *, is_forward: bool) -> float:
        """Seconds of a micro-batch without communication, on the slowest device."""
        return sum(self._compute_s(block, is_forward) for block in self.blocks)

    def inside_s(self, block: BlockWork, *, is_forward: bool) -> dict[str, float]:
        """Communication within a stage's replica, by axes, in one pass of a block."""
        found: dict[str, float] = {}
        for (axes, phase), seconds in block.communication_s.items():
            if not {*BATCH_AXES} & {*axes} and (phase == "forward") == is_forward:
                found[",".join(axes)] = found.get(",".join(axes), 0.0) + seconds
        return found

    def exposed_s(self, block: BlockWork, *, is_forward: bool) -> tuple[float, float]:
        """What of it compute does not hide, and what compute loses to what it hides.

        Blocking schedules hide nothing. In others, while one of n sub-batches communicates another
        computes: all but 1/n of the one hides behind all but 1/n of the other.
        """
        inside_s = sum(self.inside_s(block, is_forward=is_forward).values())
        if not self.overlaps:
            return inside_s, 0.0
        later, first = 1 - 1 / self.plan.batch_split, 1 / self.plan.batch_split
        compute_s = self._device_s(block, is_forward)
        slowdown = self.cluster.slowdown_beside(is_inside=self._is_inside)
        factors = slowdown, self.cluster.link_slowdown
        both_s, lost_s = beside_s(later * compute_s, later * inside_s, *factors)
        return first * inside_s + both_s - later * compute_s - lost_s, lost_s

    @cached_property
    def _reduced_over(self) -> tuple[str, ...]:
        """The axes that gradients are summed over: of sequences that are cut, not of data alone.
        Blocks are read with further replicas as part of the data axis."""
        sums = (
            axes
            for block in self.blocks
            for axes, phase in block.communication_s
            if {*BATCH_AXES} & {*axes} and phase == "backward"
        )
        most = max(sums, key=len, default=BATCH_AXES)
        return most if REPLICA_AXIS in most else (REPLICA_AXIS, *most)

    @property
    def times(self) -> StageTimes:
        """What the stage does, for `events.play`."""
        zero, total = self.plan.zero, sum(self.parameter_bytes)
        once: Sync = ("scatter", "sum") if zero else ("sum",)
        every: Sync = ("scatter",) if "gradients" in DIVIDED[zero] else ()
        gathered: Sync = ("gather",) if "parameters" in DIVIDED[zero] else ()
        at_end: Sync = tuple(step for step in once if step not in every and not self.overlaps)
        last: Sync = tuple(step for step in once if step not in at_end)
        finish = [self._replica_links.message(at_end, total)]
        finish += [self._replica_links.message(("gather",), total)] if zero and not gathered else []
        return StageTimes(
            forward=self._parts(True, gathered, ()),
            backward=self._parts(False, gathered, every),
            last_backward=self._parts(False, gathered, last),
            finish=tuple(message for message in finish if message is not None),
            overlaps=self.overlaps,
        )

    def _parts(self, is_forward: bool, gather: Sync, scatter: Sync) -> tuple[TaskPart, ...]:
        parts = [
            TaskPart(
                self._compute_s(block, is_forward)
                + sum(self.exposed_s(block, is_forward=is_forward)),
                self._replica_links.message(gather, size),
                self._replica_links.message(scatter, size),
            )
            for block, size in zip(self.blocks, self.parameter_bytes, strict=True)
        ]
        return tuple(parts if is_forward else reversed(parts))

    def _compute_s(self, block: BlockWork, is_forward: bool) -> float:
        """Of a block's ops, and of waiting for the host to issue them, which goes on while the
        device waits for messages."""
        work_s = self._device_s(block, is_forward)
        devices = self.cluster.device_types(self.cluster.num_devices)
        issue_s = block.issued[not is_forward] * max(device.issue_s for device in devices)
        if not issue_s:
            return work_s
        return max(work_s, issue_s - sum(self.exposed_s(block, is_forward=is_forward)))

    def _device_s(self, block: BlockWork, is_forward: bool) -> float:
        seconds = block.forward_s if is_forward else block.backward_s
        devices = self.cluster.device_types(self.cluster.num_devices)
        return max(seconds[device.name] for device in devices)

    def gather_s(self, size: float) -> float:
        """Seconds in which the ranks of a replica gather what each of them was handed a share of,
        of so many bytes."""
        if self.num_sharing == 1:
            return 0.0
        started_s = self.cluster.start_overhead_s
        whole = self.num_sharing * size
        return started_s + self._links.sync_time_s("all_gather", self._inside, whole)

    @property
    def num_sharing(self) -> int:
        """The ranks of one replica of the stage."""
        return self.mesh.sizes(self._inside)

    @property
    def _inside(self) -> tuple[str, ...]:
        """The axes over which the ranks of a replica lie."""
        return tuple(name for name in self.mesh.names if name not in BATCH_AXES)

    @property
    def num_shards(self) -> int:
        """Into how many shards ZeRO divides."""
        return self.mesh.size(DATA_AXIS) if DATA_AXIS in self.mesh.names else 1

    @cached_property
    def _is_inside(self) -> bool:
        """Whether what a replica sends within a stage stays within nodes."""
        return all(self._links.ring_over((axis,)).nodes == 1 for axis in self._inside)

    @cached_property
    def _links(self) -> CostModel:
        return CostModel(self.cluster, self.mesh)

    @cached_property
    def _replica_links(self) -> ReplicaLinks:
        divided = self.divided_over if self.plan.zero else ()
        return ReplicaLinks(self._links, divided, self._reduced_over, self.gradient_scale)


def memory_of(
    chunks: Sequence[Stage], optimizer_multiplier: float | None = None
) -> dict[str, float]:
    """Bytes by part, at most, of a device that has these stages: what micro-batches in flight keep,
    and states."""
    first = chunks[0]
    size = float(sum(sum(stage.parameter_bytes) for stage in chunks))
    states = state_bytes(size, first.itemsize, first.plan.precision, optimizer_multiplier)
    shards, zero = first.num_shards, first.plan.zero
    whole = whole_for_a_while(zero) if shards > 1 else 0
    # While one block's are used, those of the next are on their way.
    whole *= 2 if first.overlaps else 1
    kept = [stage.kept_bytes for stage in chunks]
    blocks = [block for stage in chunks for block in stage.blocks]
    parts = {
        **divided(states, zero, shards),
        "activations": float(most_in_flight(first.tasks, kept)),
        "workspace": float(max(block.workspace_bytes for block in blocks)),
        "communication": float(whole * max(max(stage.parameter_bytes) for stage in chunks)),
    }
    return {part: size for part, size in parts.items() if size}


def places_of(plan: Plan) -> int:
    """How many devices, each of which stands for all of its ranks, have the stages of a plan."""
    return Mesh(**plan.mesh).num_stages


def placed_stages(
    plan: Plan,
    cluster: Cluster,
    read: Callable[[PlacedCluster, Mesh], Workload],
) -> list[Stage]:
    """The stages of a plan whose blocks are known.

    read: the blocks of a micro-batch on the devices of a stage, once for each kind of placement.
    Raises ValueError (PlanError) if the plan does not fit the blocks or the cluster.
    """
    placements = _placements(plan, cluster)
    mesh = Mesh(**plan.mesh).within_stage
    known: dict[Hashable, Workload] = {}
    for placed in placements:
        if likeness(placed) not in known:
            known[likeness(placed)] = read(placed, mesh)
    works = [known[likeness(placed)] for placed in placements]
    members = _members(plan, works[0])
    sizes = _parameter_bytes(works[0], members)
    found: list[Stage] = []
    for number in range(plan.num_stages):
        placed, work = placements[number % len(placements)], works[number % len(placements)]
        places = [index for index, stage in enumerate(members) if stage == number]
        found.append(
            Stage(
                plan=plan,
                number=number,
                cluster=placed,
                mesh=mesh,
                blocks=tuple(work.blocks[index] for index in places),
                parameter_bytes=tuple(sizes[index] for index in places),
                handed_bytes=work.blocks[places[-1]].crossing_bytes,
                itemsize=work.itemsize,
            )
        )
    return found


def _sent_bytes(stage: Stage, *, gathers: bool) -> float:
    """What a rank sends to its like of the next stage for a micro-batch: what it has of what is
    handed on, as the emitted program does; or its share of what its replica's ranks all have, which
    those of the next gather (Narayanan et al. 2021, Sec. 4.1)."""
    return stage.handed_bytes / stage.num_sharing if gathers else stage.handed_bytes


def message_work(
    cluster: Cluster, stages: Sequence[Stage], *, gathers: bool = False
) -> list[tuple[float, float]]:
    """Seconds that each stage's devices spend in the passes of a micro-batch, forward and backward,
    on taking and sending messages, which go the other way in the second; see `played_stages`."""
    sizes = [_sent_bytes(stage, gathers=gathers) for stage in stages[:-1]]
    each = [cluster.message_work_s(size) for size in sizes]
    both = [before + after for before, after in zip([0.0, *each], [*each, 0.0], strict=True)]
    if not gathers:
        return [(one, one) for one in both]
    whole = [stage.gather_s(size) for stage, size in zip(stages, sizes, strict=False)]
    rows = zip(both, [0.0, *whole], [*whole, 0.0], strict=True)
    return [(one + forward, one + back) for one, forward, back in rows]


def between(
    cluster: Cluster, stages: Sequence[Stage], *, gathers: bool = False
) -> list[tuple[Message, Message]]:
    """What crosses each boundary for a micro-batch, forward and back: each rank sends to its like,
    all at once. gathers: as in `played_stages`; `message_work` has the gathering."""
    found: list[tuple[Message, Message]] = []
    for stage, other in pairwise(stages):
        size = _sent_bytes(stage, gathers=gathers)
        left, right = stage.cluster.order, other.cluster.order
        messages: list[Message] = []
        for source, goal in ((left, right), (right, left)):
            seconds = transfer_s(cluster, source, goal, size)
            messages.append(Message(seconds, nics_between(cluster, source, goal)))
        found.append((messages[0], messages[1]))
    return found


def pipeline_of(plan: Plan) -> Pipeline:
    """A plan's pipeline; one stage of everything if it has none."""
    return plan.pipeline or Pipeline((("*",),))


def _placements(plan: Plan, cluster: Cluster) -> list[PlacedCluster]:
    mesh = Mesh(**plan.mesh)
    count = mesh.num_stages
    has_chunks = count > 1 and pipeline_of(plan).schedule == INTERLEAVED
    if plan.num_stages % count or (plan.num_stages != count and not has_chunks):
        raise PlanError(
            f"the plan has {plan.num_stages} stages, but its mesh {dict(plan.mesh)} has places for "
            f"{count}; make them the same."
        )
    each = mesh.num_devices // count
    ranks = pipeline_of(plan).ranks or tuple(
        tuple(range(stage * each, (stage + 1) * each)) for stage in range(count)
    )
    for stage, found in enumerate(ranks):
        if len(found) != each:
            raise PlanError(
                f"stage {stage} has {len(found)} ranks, expected {each}, the product of the other "
                f"axes of the mesh {dict(plan.mesh)}."
            )
    used = [rank for found in ranks for rank in found]
    if len(set(used)) < len(used):
        twice = next(rank for rank in used if used.count(rank) > 1)
        raise PlanError(f"the plan's stages use device {twice} twice; give each rank its own.")
    return [on_devices(cluster, found) for found in ranks]


def _members(plan: Plan, work: Workload) -> list[int]:
    """The stage of each block: that which names it or a layer of it, else that of the block before.

    Raises PlanError unless the stages are in the order of the forward pass.
    """
    lookups = [Lookup(dict.fromkeys(names, "")) for names in pipeline_of(plan).stages]
    found: list[int] = []
    for block in work.blocks:
        named = [
            stage
            for stage, names in enumerate(lookups)
            if names.key(block.name, *block.layers) is not None
        ]
        before = found[-1] if found else 0
        found.append(named[0] if named else before)
        if found[-1] < before:
            raise PlanError(
                f"block '{block.name}' is in stage {found[-1]}, but what runs before it is in "
                f"stage {before}; stages must follow the forward pass."
            )
    empty = set(range(plan.num_stages)) - set(found)
    if empty:
        raise PlanError(
            f"stage {min(empty)} has no block of its own; the program's are "
            f"{', '.join(block.name for block in work.blocks)}, and no block can be cut."
        )
    return found


def _parameter_bytes(work: Workload, members: Sequence[int]) -> list[int]:
    """Of each block; what a block shares with one of another stage counts in both."""
    found = [block.parameter_bytes for block in work.blocks]
    for one in work.shared:
        if members[one.first] != members[one.second]:
            found[one.second] += one.bytes
    return found


def inside_totals(chunks: Sequence[Stage]) -> Mapping[str, float]:
    """Seconds of communication within a replica in a whole step of a device that has these stages,
    by axes."""
    found: dict[str, float] = {}
    for stage in chunks:
        count = pipeline_of(stage.plan).micro_batches
        for block in stage.blocks:
            for is_forward in (True, False):
                for axes, seconds in stage.inside_s(block, is_forward=is_forward).items():
                    found[axes] = found.get(axes, 0.0) + count * seconds
    return found
