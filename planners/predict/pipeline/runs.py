"""Simulation of a staged program run by run, each function on the devices of its stage.

A rank starts a run once its previous run has ended and the messages that the run receives have
arrived. It spends `Cluster.message_work_s` on each message that it receives or sends. Messages of
one pair of ranks leave one after another, when the sending function ends; messages of other pairs
and collectives within a stage do not slow them down. If a stage is at several coordinates, these
wait for each other and all-reduce their sums before the first run that reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from xdsl.dialects.func import FuncOp

from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import (
    Run,
    StageFunction,
    StagePlaces,
    functions_of,
    micro_axis,
    runs_of,
)
from shardweave.planners.cost.cluster import Cluster, PlacedCluster, likeness, on_devices
from shardweave.planners.cost.links import transfer_s
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.model import CostModel
from shardweave.planners.cost.workload import parameter_dtype
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.predict.pipeline.deep import Deeper
from shardweave.planners.predict.pipeline.simulation import PipelineSimulation, StageResult
from shardweave.planners.simulate.run_memory import (
    PlaceMemory,
    devices_of_places,
    fullest,
    memory_of_runs,
    parameters_of_places,
)
from shardweave.planners.simulate.simulate import simulate_by
from shardweave.planners.simulate.simulation import Axes, Simulation
from shardweave.planners.simulate.timeline import Event
from shardweave.planners.simulate.update_cost import UpdateCost, update_of

AXIS = "stage"
"""Name under which messages between stages are reported among mesh axes."""

PHASES = {
    "before": "forward", "forward": "forward", "backward": "backward", "inputs": "backward",
    "weights": "optimizer", "share": "backward", "after": "backward",
}  # fmt: skip
"""Phase that colours a run in a plot; weight gradients, which fill bubbles, have their own."""


@dataclass(eq=False)
class _Place:
    """Clock of the ranks at one coordinate of the stage axis, and their sums so far."""

    cluster: PlacedCluster
    now_s: float = 0.0
    compute_s: float = 0.0
    slowdown_s: float = 0.0
    bubble_s: float = 0.0
    communication_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


_Sizes = tuple[tuple[int, str, int], ...]


@dataclass(frozen=True)
class _Function:
    """A function with its simulation and its messages as (other stage, name, bytes)."""

    function: StageFunction
    cost: Simulation
    sends: _Sizes
    receives: _Sizes


def simulate_runs(
    program: Program,
    cluster: Cluster,
    pipeline: Pipeline | None = None,
    *,
    optimizer_multiplier: float | None = None,
    precision: str = "",
    deeper: Deeper | None = None,
    update: str = "",
) -> PipelineSimulation:
    """Simulate a step of a staged program on a cluster. Takes time linear in ops and runs.

    pipeline: of the plan, for the name of its schedule. optimizer_multiplier, precision: as for
    `state_bytes`. deeper: extrapolates the step to stages with more blocks. update: as for
    `simulate_step`. Raises ClusterError (a ValueError) if the cluster has too few devices.
    """
    ranks = devices_of_places(program)
    places = [_Place(on_devices(cluster, devices)) for devices in ranks]
    models = _models(program, [place.cluster for place in places])
    functions = _read_all(program, models)
    sizes, memory = parameters_of_places(program), memory_of_runs(program)
    if deeper is not None:
        more = _read_all(deeper.program, models)
        functions = {key: _deepened(f, more[key], deeper) for key, f in functions.items()}
        sizes, memory = _deepened_memory(program, deeper, sizes, memory)
    step = _Played(cluster, places, functions, StagePlaces.of(program), ranks)
    joined_s = _joined_s(program, cluster, ranks)
    for run in runs_of(program):
        step.join(run, joined_s.pop(run.function, 0.0))
        step.run(run)
    time_s = max(place.now_s for place in places)
    update = update_of(program, update)
    cost = _update_cost(program, cluster, update, precision, deeper) if update else None
    itemsize = parameter_dtype(program).itemsize
    results: list[StageResult] = []
    for index, (place, size) in enumerate(zip(places, sizes, strict=True)):
        kept = None if cost is None else cost.states[_first_rank(program, index)] / max(1, size)
        multiplier = optimizer_multiplier if kept is None else kept
        states = state_bytes(size, itemsize, precision, multiplier)
        if program.has_host_states:
            states["optimizer"] = 0.0
        parts = _memory(states, fullest(memory[index]), cost)
        results.append(_result(place, time_s, parts, _in_flight(program, index)))
    axis = micro_axis(program)
    return PipelineSimulation(
        cluster=cluster,
        mesh=program.needed_mesh(),
        time_s=time_s,
        lower_bound_s=max(place.compute_s for place in places),
        schedule=pipeline.schedule if pipeline else "in the order of its text",
        micro_batches=axis.size if axis else 1,
        stages=tuple(results),
        events=tuple(sorted(step.events, key=lambda event: event.start_s)),
        update=cost,
    )


def _update_cost(
    program: Program, cluster: Cluster, update: str, precision: str, deeper: Deeper | None
) -> UpdateCost:
    from shardweave.planners.simulate.update import simulate_update  # traces, which loads slowly

    devices = program.devices
    placed = on_devices(cluster, devices) if devices else cluster
    model = CostModel(placed, program.needed_mesh())
    if deeper is None:
        return simulate_update([program], update, model, precision)
    return simulate_update([program, deeper.program], update, model, precision, deeper.times)


def _first_rank(program: Program, place: int) -> int:
    """First rank at coordinate `place` of the stage axis."""
    mesh = program.needed_mesh()
    axis = mesh.stage_axis
    return mesh.rank({a.name: place if a is axis else 0 for a in mesh.device_axes})


def _models(program: Program, clusters: Sequence[PlacedCluster]) -> list[CostModel]:
    """The cost model of each coordinate's ranks; ranks with equal connections share one."""
    mesh, models = program.needed_mesh().within_stage, dict[Hashable, CostModel]()
    keys = [likeness(cluster) for cluster in clusters]
    for key, cluster in zip(keys, clusters, strict=True):
        if key not in models:
            models[key] = CostModel(cluster, mesh)
    return [models[key] for key in keys]


def _read_all(program: Program, models: Sequence[CostModel]) -> dict[tuple[str, int], _Function]:
    """Simulate all functions, by (name, coordinate); once for equal ops on equal devices."""
    functions = functions_of(program)
    known: dict[tuple[FuncOp, CostModel], Simulation] = {}
    read: dict[tuple[str, int], _Function] = {}
    for run in dict.fromkeys((run.function, run.at) for run in runs_of(program)):
        function, model = functions[run[0]], models[run[1]]
        key = function.function, model
        if key not in known:
            known[key] = simulate_by(model, function.alone)
        read[run] = _Function(function, known[key], *_sizes(function))
    return read


def _joined_s(
    program: Program, cluster: Cluster, ranks: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Seconds to all-reduce sums of a stage at several coordinates, by first function to read
    them."""
    functions, inner = functions_of(program), program.needed_mesh().space_axes
    places = StagePlaces.of(program)
    sizes: dict[int, dict[str, int]] = {}
    first: dict[int, str] = {}
    for name in dict.fromkeys(run.function for run in runs_of(program)):
        stage = functions[name].stage
        for slot in functions[name].arguments:
            if len(places.of_stage[stage]) > 1 and slot.kind in ("sum", "part"):
                first.setdefault(stage, name)
                sizes.setdefault(stage, {})[slot.name] = num_bytes(tensor_type_of(slot.value))
    seconds: dict[str, float] = {}
    for stage, name in first.items():
        at = places.of_stage[stage]
        devices = [device for place in at for device in ranks[place]]
        mesh = Mesh((Axis(AXIS, len(at), "stage"), *inner))
        model = CostModel(on_devices(cluster, devices), mesh)
        seconds[name] = model.sync_time_s("all_reduce", (AXIS,), sum(sizes[stage].values()))
    return seconds


def _sizes(function: StageFunction) -> tuple[_Sizes, _Sizes]:
    sizes: tuple[list[tuple[int, str, int]], ...] = [], []
    for message in function.messages:
        size = num_bytes(tensor_type_of(message.value))
        sizes[not message.is_sent].append((message.other, message.name, size))
    return tuple(sizes[0]), tuple(sizes[1])


def _deepened(shallow: _Function, more: _Function, deeper: Deeper) -> _Function:
    few, own = shallow.cost, partial(deeper.beyond, [shallow.function.stage])

    def each(less: Mapping[Axes, float], greater: Mapping[Axes, float]) -> dict[Axes, float]:
        names = dict.fromkeys((*less, *greater))
        return {name: own(less.get(name, 0.0), greater.get(name, 0.0)) for name in names}

    cost = replace(
        few,
        time_s=own(few.time_s, more.cost.time_s),
        compute_s=own(few.compute_s, more.cost.compute_s),
        slowdown_s=own(few.slowdown_s, more.cost.slowdown_s),
        communication_s=each(few.communication_s, more.cost.communication_s),
        exposed_s=each(few.exposed_s, more.cost.exposed_s),
    )
    return replace(shallow, cost=cost)


def _deepened_memory(
    program: Program, deeper: Deeper, sizes: Sequence[int], memory: Sequence[Sequence[PlaceMemory]]
) -> tuple[list[int], list[list[PlaceMemory]]]:
    """Extrapolate the parameter bytes, and the peak memory of all runs, by coordinate."""
    stages: list[list[int]] = [[] for _ in sizes]
    for stage, places in StagePlaces.of(program).of_stage.items():
        for place in places:
            stages[place].append(stage)

    def both(own: Sequence[int], few: PlaceMemory, more: PlaceMemory) -> PlaceMemory:
        parts = {
            part: int(deeper.beyond(own, few.parts.get(part, 0), more.parts.get(part, 0)))
            for part in dict.fromkeys((*few.parts, *more.parts))
        }
        return PlaceMemory(sum(parts.values()), parts)

    more, greater = parameters_of_places(deeper.program), memory_of_runs(deeper.program)
    parameters = [
        int(deeper.beyond(own, few, other))
        for own, few, other in zip(stages, sizes, more, strict=True)
    ]
    peaks = [
        [both(own, few, other) for few, other in zip(runs, others, strict=True)]
        for own, runs, others in zip(stages, memory, greater, strict=True)
    ]
    return parameters, peaks


class _Played:
    """State of a step while its runs are simulated."""

    def __init__(
        self,
        cluster: Cluster,
        places: Sequence[_Place],
        functions: Mapping[tuple[str, int], _Function],
        stage_at: StagePlaces,
        ranks: Sequence[Sequence[int]],
    ) -> None:
        self.cluster = cluster
        self.places = places
        self.functions = functions
        self.stage_at = stage_at
        self.ranks = ranks
        self.arrives_s: dict[tuple[int, int, int, str, int | None], tuple[float, float]] = {}
        self.link_s: dict[tuple[int, int], float] = {}
        self.events: list[Event] = []
        self.transfers_s: dict[tuple[int, int, int], float] = {}

    def join(self, run: Run, seconds: float) -> None:
        """Let all coordinates of a run's stage wait for each other, then spend `seconds`."""
        if not seconds:
            return
        stage = self.functions[run.function, run.at].function.stage
        own = [self.places[at] for at in self.stage_at.of_stage[stage]]
        start_s = max(place.now_s for place in own)
        for place in own:
            place.bubble_s += start_s - place.now_s
            place.exposed_s[AXIS] += seconds
            place.communication_s[AXIS] += seconds
            place.now_s = start_s + seconds

    def run(self, run: Run) -> None:
        function, place = self.functions[run.function, run.at], self.places[run.at]
        stage, number = function.function.stage, run.micro_batch
        start_s = place.now_s
        messages_s = 0.0
        for source, name, size in function.receives:
            if self.stage_at.source(source, number) != run.at:
                messages_s += self.cluster.message_work_s(size)
            left_s, arrives_s = self.arrives_s.pop((source, stage, run.at, name, number))
            if arrives_s > start_s:
                # Waiting counts as a bubble until the message has left, then as exposed.
                place.bubble_s += max(0.0, left_s - start_s)
                place.exposed_s[AXIS] += arrives_s - max(left_s, start_s)
                start_s = arrives_s
        for to, _, size in function.sends:
            goals = sum(goal != run.at for goal in self.stage_at.goals(run, stage, to))
            messages_s += goals * self.cluster.message_work_s(size)
        cost = function.cost
        end_s = place.now_s = start_s + cost.time_s + messages_s
        place.compute_s += cost.compute_s + messages_s
        place.slowdown_s += cost.slowdown_s
        for axes, seconds in cost.communication_s.items():
            place.communication_s[",".join(axes)] += seconds
        for axes, seconds in cost.exposed_s.items():
            place.exposed_s[",".join(axes)] += seconds
        self._event(function.function, run, start_s, end_s)
        self._send(function, run, end_s)

    def _event(self, function: StageFunction, run: Run, start_s: float, end_s: float) -> None:
        copy = () if run.micro_batch is None else (run.micro_batch,)
        layer = f"stage {function.stage:02}"
        stream, phase = f"stage {run.at:02}", PHASES[function.direction]
        self.events.append(Event(function.direction, layer, phase, copy, stream, start_s, end_s))

    def _send(self, function: _Function, run: Run, end_s: float) -> None:
        stage = function.function.stage
        for to, name, size in function.sends:
            for goal in self.stage_at.goals(run, stage, to):
                seconds = 0.0
                if goal != run.at:
                    seconds = self._transfer_s(run.at, goal, size)
                left_s = max(end_s, self.link_s.get((run.at, goal), 0.0))
                arrives_s = self.link_s[run.at, goal] = left_s + seconds
                key = stage, to, goal, name, run.micro_batch
                self.arrives_s[key] = left_s, arrives_s
                self.places[goal].communication_s[AXIS] += seconds

    def _transfer_s(self, at: int, goal: int, size: int) -> float:
        """Seconds that a message takes from one coordinate to another, computed once."""
        key = at, goal, size
        if key not in self.transfers_s:
            own, other = self.ranks[at], self.ranks[goal]
            self.transfers_s[key] = transfer_s(self.cluster, own, other, size)
        return self.transfers_s[key]


def _memory(
    states: Mapping[str, float], step: PlaceMemory, update: UpdateCost | None
) -> dict[str, float]:
    """Peak bytes by part, of step or update, whichever is larger; gradients as allocated."""
    parts = {**states, **step.parts, "gradients": float(step.parts.get("gradients", 0))}
    if update is not None:
        behind = {**states, "update": float(update.temporary_bytes)}
        parts = max(parts, behind, key=lambda parts: sum(parts.values()))
    return {part: float(size) for part, size in parts.items() if size}


def _result(
    place: _Place, time_s: float, memory: Mapping[str, float], in_flight: int
) -> StageResult:
    """Summarize the simulation of one coordinate as a StageResult."""
    devices = place.cluster.device_types(place.cluster.num_devices)
    return StageResult(
        compute_s=place.compute_s,
        slowdown_s=place.slowdown_s,
        communication_s=dict(place.communication_s),
        exposed_s={axes: seconds for axes, seconds in place.exposed_s.items() if seconds},
        bubble_s=place.bubble_s + time_s - place.now_s,
        memory_parts=memory,
        memory_bytes=min(device.memory_bytes for device in devices),
        in_flight=in_flight,
    )


def _in_flight(program: Program, index: int) -> int:
    """Most (stage, micro-batch) pairs at once on a coordinate whose forward pass has begun and
    whose backward pass has not ended."""
    functions = functions_of(program)
    now = most = 0
    for run in runs_of(program):
        if run.at != index:
            continue
        direction = functions[run.function].direction
        most = max(most, now + (direction == "forward"))
        if direction == "forward":
            now += 1
        elif direction in ("backward", "weights"):
            now -= 1
    return most
