"""A staged program, simulated run by run: each function as it stands, on the devices of its stage.

A rank starts a run when it is done with the one before and has what the run receives. Messages of
one pair of ranks leave one behind the other, when the function that sends them ends; messages of
other pairs, and collectives within a stage, do not slow them down.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardweave.ir.dist import RecvOp, SendOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.staged import Run, StageFunction, functions_of, runs_of
from shardweave.ir.storage import storage_of
from shardweave.ir.types import num_bytes, tensor_type_of
from shardweave.planners.cost.cluster import Cluster, PlacedCluster, on_devices
from shardweave.planners.cost.links import transfer_of
from shardweave.planners.cost.memory import peak_memory, state_bytes
from shardweave.planners.cost.pipeline.simulation import PipelineSimulation, StageResult
from shardweave.planners.cost.simulate import simulate
from shardweave.planners.cost.simulation import Simulation
from shardweave.planners.cost.timeline import Event
from shardweave.planners.cost.workload import parameter_dtype
from shardweave.planners.plan import Plan

AXIS = "stage"
"""What the messages between stages are counted as."""

PHASES = {
    "before": "forward", "forward": "forward", "backward": "backward", "inputs": "backward",
    "weights": "optimizer", "share": "backward", "after": "backward",
}  # fmt: skip
"""The colour of a run in a plot; weight gradients, which fill bubbles, have one of their own."""


class _OnStage(StageFunction):
    """A function on the mesh of its stage alone."""

    @property
    def mesh(self) -> Mesh | None:
        found = super().mesh
        return found and found.within_stage


@dataclass(eq=False)
class _Place:
    """What the ranks of one coordinate on the stage axis did so far. live: bytes by stage, name and
    micro-batch of what waits for a later run."""

    cluster: PlacedCluster
    now_s: float = 0.0
    compute_s: float = 0.0
    slowdown_s: float = 0.0
    bubble_s: float = 0.0
    communication_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    live: dict[tuple[int, str, int | None], int] = field(
        default_factory=dict[tuple[int, str, int | None], int]
    )
    peak: int = 0


@dataclass(frozen=True)
class _Function:
    """A function as it is run: simulated, and what it takes in memory beside its arguments."""

    function: StageFunction
    simulation: Simulation
    workspace: int
    kept: Mapping[str, int]
    takes: tuple[str, ...]
    sends: tuple[tuple[int, str, int], ...]
    receives: tuple[tuple[int, str], ...]


def simulate_runs(
    program: Program,
    plan: Plan,
    cluster: Cluster,
    *,
    optimizer_multiplier: float | None = None,
) -> PipelineSimulation:
    """Simulate a step of a staged program on a cluster. Linear in its ops and runs.

    Raises ValueError (ClusterError) for a mesh that the cluster has no devices for.
    """
    ranks = _ranks_of(program.needed_mesh(), plan)
    places = [_Place(on_devices(cluster, found)) for found in ranks]
    at = {run.function: run.at for _, run in runs_of(program)}
    functions = {
        name: _read(function, places[at[name]].cluster)
        for name, function in functions_of(program).items()
    }
    stage_at = {one.function.stage: at[name] for name, one in functions.items()}
    step = _Played(cluster, places, functions, stage_at, ranks)
    for _, run in runs_of(program):
        step.run(run)
    time_s = max(place.now_s for place in places)
    results = [
        _result(index, place, time_s, program, at, plan, optimizer_multiplier)
        for index, place in enumerate(places)
    ]
    assert plan.pipeline is not None
    return PipelineSimulation(
        cluster=cluster,
        mesh=program.needed_mesh(),
        time_s=time_s,
        lower_bound_s=max(place.compute_s for place in places),
        schedule=plan.pipeline.schedule,
        micro_batches=plan.pipeline.micro_batches,
        stages=tuple(results),
        events=tuple(sorted(step.events, key=lambda event: event.start_s)),
    )


def _ranks_of(mesh: Mesh, plan: Plan) -> list[list[int]]:
    """The devices of each coordinate on the stage axis."""
    if plan.pipeline is not None and plan.pipeline.ranks:
        return [list(ranks) for ranks in plan.pipeline.ranks]
    axis = mesh.stage_axis
    found: list[list[int]] = [[] for _ in range(mesh.num_stages)]
    for rank in range(mesh.num_devices):
        found[mesh.coordinates(rank)[axis.name] if axis else 0].append(rank)
    return found


def _read(function: StageFunction, cluster: PlacedCluster) -> _Function:
    alone = _OnStage(function.module, function.function)
    taken = sum(num_bytes(tensor_type_of(slot.value)) for slot in function.arguments)
    kept: dict[str, int] = {}
    counted = {slot.value for slot in function.arguments}
    for slot in function.results:
        storage = storage_of(slot.value)
        if slot.kind in ("kept", "part", "whole"):
            kept[slot.name] = 0 if storage in counted else num_bytes(tensor_type_of(storage))
            counted.add(storage)
    sizes = [
        (op.to, op.message, num_bytes(tensor_type_of(op.operands[0])))
        for op in function.ops
        if isinstance(op, SendOp)
    ]
    coming = [(op.source, op.message) for op in function.ops if isinstance(op, RecvOp)]
    return _Function(
        function,
        simulate(alone, cluster),
        peak_memory(alone).peak_bytes - taken - sum(kept.values()),
        kept,
        tuple(slot.name for slot in function.arguments if slot.kind == "kept"),
        tuple(sizes),
        tuple(coming),
    )


class _Played:
    """A step while it is simulated."""

    def __init__(
        self,
        cluster: Cluster,
        places: Sequence[_Place],
        functions: Mapping[str, _Function],
        stage_at: Mapping[int, int],
        ranks: Sequence[Sequence[int]],
    ) -> None:
        self.cluster = cluster
        self.places = places
        self.functions = functions
        self.stage_at = stage_at
        self.ranks = ranks
        self.arrives_s: dict[tuple[int, int, str, int | None], tuple[float, float]] = {}
        self.link_s: dict[tuple[int, int], float] = {}
        self.events: list[Event] = []
        self.readers = Counter(
            (one.function.stage, name) for one in functions.values() for name in one.takes
        )
        self.left: dict[tuple[int, str, int | None], int] = {}

    def run(self, run: Run) -> None:
        one, place = self.functions[run.function], self.places[run.at]
        stage, number = one.function.stage, run.micro_batch
        start_s = place.now_s
        for source, name in one.receives:
            left_s, arrives_s = self.arrives_s.pop((source, stage, name, number))
            if arrives_s > start_s:
                # Until it has left this is a bubble, then the message is waited for.
                place.bubble_s += max(0.0, left_s - start_s)
                place.exposed_s[AXIS] += arrives_s - max(left_s, start_s)
                start_s = arrives_s
        found = one.simulation
        end_s = place.now_s = start_s + found.time_s
        place.compute_s += found.compute_s
        place.slowdown_s += found.slowdown_s
        for axes, seconds in found.communication_s.items():
            place.communication_s[",".join(axes)] += seconds
        for axes, seconds in found.exposed_s.items():
            place.exposed_s[",".join(axes)] += seconds
        self._event(one.function, run, start_s, end_s)
        self._send(one, run, end_s)
        self._remember(one, run, place)

    def _event(self, function: StageFunction, run: Run, start_s: float, end_s: float) -> None:
        copy = () if run.micro_batch is None else (run.micro_batch,)
        layer = f"stage {function.stage:02}"
        stream, phase = f"stage {run.at:02}", PHASES[function.direction]
        self.events.append(Event(function.direction, layer, phase, copy, stream, start_s, end_s))

    def _send(self, one: _Function, run: Run, end_s: float) -> None:
        for to, name, size in one.sends:
            goal = self.stage_at[to]
            seconds = 0.0
            if goal != run.at:
                pairs = list(zip(self.ranks[run.at], self.ranks[goal], strict=True))
                way = transfer_of(self.cluster, pairs)
                seconds = way.latency_s + size / way.bandwidth_bytes_s
            left_s = max(end_s, self.link_s.get((run.at, goal), 0.0))
            arrives_s = self.link_s[run.at, goal] = left_s + seconds
            key = one.function.stage, to, name, run.micro_batch
            self.arrives_s[key] = left_s, arrives_s
            self.places[goal].communication_s[AXIS] += seconds

    def _remember(self, one: _Function, run: Run, place: _Place) -> None:
        """Count what is kept, and what is freed, as the runner does."""
        stage = one.function.stage
        needed = one.workspace + sum(one.kept.values())
        place.peak = max(place.peak, sum(place.live.values()) + needed)
        for name, size in one.kept.items():
            key = stage, name, run.micro_batch
            place.live[key] = size
            self.left[key] = self.readers[stage, name]
        for name in one.takes:
            key = stage, name, run.micro_batch
            self.left[key] -= 1
            if not self.left[key]:
                place.live.pop(key, None)


def _result(
    index: int,
    place: _Place,
    time_s: float,
    program: Program,
    at: Mapping[str, int],
    plan: Plan,
    optimizer_multiplier: float | None,
) -> StageResult:
    """The sums of one coordinate, and its memory: states, and the most that was alive at once."""
    held = {
        (slot.kind, slot.name): slot.value
        for name, function in functions_of(program).items()
        if at[name] == index
        for slot in function.arguments
        if slot.kind in ("param", "buffer")
    }
    sizes = [num_bytes(tensor_type_of(v)) for (kind, _), v in held.items() if kind == "param"]
    itemsize = parameter_dtype(program).itemsize
    parts = dict(state_bytes(sum(sizes), itemsize, plan.precision, optimizer_multiplier))
    parts["activations"] = float(place.peak)
    devices = place.cluster.device_types(place.cluster.num_devices)
    return StageResult(
        compute_s=place.compute_s,
        slowdown_s=place.slowdown_s,
        communication_s=dict(place.communication_s),
        exposed_s={axes: seconds for axes, seconds in place.exposed_s.items() if seconds},
        bubble_s=place.bubble_s + time_s - place.now_s,
        memory_parts={part: size for part, size in parts.items() if size},
        memory_bytes=min(device.memory_bytes for device in devices),
        in_flight=_in_flight(program, index),
    )


def _in_flight(program: Program, index: int) -> int:
    """The most micro-batches whose forward pass a coordinate has begun and whose backward pass it
    has not ended, counted for each of its stages."""
    functions = functions_of(program)
    now = most = 0
    for _, run in runs_of(program):
        if run.at != index:
            continue
        direction = functions[run.function].direction
        most = max(most, now + (direction == "forward"))
        if direction == "forward":
            now += 1
        elif direction in ("backward", "weights"):
            now -= 1
    return most
