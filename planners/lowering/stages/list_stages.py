"""Schedule `list` for a staged program: costs of its functions, and the fastest order that fits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache, partial

from xdsl.ir import Operation

from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.ops.registry import flops_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import (
    Direction,
    StageFunction,
    StagePlaces,
    functions_of,
    micro_axis,
    name_of,
    run_ops_of,
)
from shardweave.ir.program.traffic import bytes_moved
from shardweave.passes.stages.cut import ScheduledRun, places_of_tasks
from shardweave.planners.cost.cluster import Cluster, likeness, on_devices
from shardweave.planners.cost.links import transfer_s
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.workload import parameter_dtype
from shardweave.planners.lowering.stages.balance import FLOPS_PER_BYTE
from shardweave.planners.schedules.list_order import PassCosts, StageAt, list_table
from shardweave.planners.schedules.table import Kind, Table, actions_in_order
from shardweave.planners.simulate.run_memory import (
    devices_of_places,
    memory_of_places,
    parameters_of_places,
)
from shardweave.planners.simulate.simulate import simulate

DIRECTIONS: Mapping[Kind, Direction] = {
    "F": "forward",
    "B": "backward",
    "I": "inputs",
    "W": "weights",
}
KINDS: Mapping[Direction, Kind] = {direction: kind for kind, direction in DIRECTIONS.items()}


def tasks_of(table: Table, num_stages: int) -> list[ScheduledRun]:
    """Convert a table to a list of runs, in an order that all ranks together can execute."""
    is_split = any(action.kind in "IW" for actions in table for action in actions)
    tasks: list[ScheduledRun] = []
    for rank, action in actions_in_order(table, num_stages):
        kinds: tuple[Kind, ...] = ("I", "W") if is_split and action.kind == "B" else (action.kind,)
        for kind in kinds:
            tasks.append(ScheduledRun(DIRECTIONS[kind], action.stage, action.micro_batch, rank))
    return tasks


def reorder_runs(program: Program, tasks: Sequence[ScheduledRun]) -> None:
    """Change, in place, the order in which a staged program runs its micro-batches.

    tasks: the new runs, in an order that all ranks together can execute, with each stage at as many
    coordinates as before; runs without a function are left out. Takes time linear in the runs.
    """
    stages = {name: f.stage for name, f in functions_of(program).items()}
    places = places_of_tasks(tasks)
    by_task: dict[tuple[str, int], Operation] = {}
    first: list[Operation] = []
    last: list[Operation] = []
    times: Counter[str] = Counter()
    for op, run in run_ops_of(program):
        if run.micro_batch is not None:
            by_task[run.function, run.micro_batch] = op
            continue
        op.properties["at"] = to_attribute(places[stages[run.function]][times[run.function]])
        times[run.function] += 1
        (last if by_task else first).append(op)
    order: list[Operation] = []
    for task in tasks:
        op = by_task.get((name_of(task.direction, task.stage), task.micro_batch))
        if op is not None:
            op.properties["at"] = to_attribute(task.at)
            order.append(op)
    program.reorder([*first, *order, *last])


def order_stages(program: Program, cluster: Cluster | None, others: Sequence[Table]) -> Table:
    """Find the fastest order of a staged program's micro-batches that fits. Changes the program.

    cluster: gives times and memory. None: passes cost FLOPs plus bytes moved, messages are free,
    and fewer than twice as many micro-batches as in 1F1B may be in flight. others: orders to beat.
    Stages at several coordinates stay there; other stages may move. Raises ValueError if no order
    fits.
    """
    ranks, axis = program.needed_mesh().num_stages, micro_axis(program)
    places, count = StagePlaces.of(program), axis.size if axis else 1
    stages = range(len(places.of_stage))
    placement = [[places.source(stage, number) for number in range(count)] for stage in stages]
    is_even = all(len(at) == 1 for at in places.of_stage.values())
    return list_table(
        ranks,
        count,
        len(stages) // len(set(places.of_stage.values())),
        costs=stage_costs_of(program, cluster),
        others=others,
        fits=None if cluster is None else partial(_fits, program, cluster),
        placement=None if is_even else placement,
    )


def apply(program: Program, table: Table) -> None:
    """Reorder a staged program's runs as in a table."""
    num_stages = len({action.stage for actions in table for action in actions})
    reorder_runs(program, tasks_of(table, num_stages))


def stage_costs_of(program: Program, cluster: Cluster | None) -> PassCosts:
    """Costs of a staged program's passes and messages, by stage and coordinate; without a cluster
    FLOPs plus bytes moved."""
    functions = {
        (f.stage, KINDS[f.direction]): f
        for f in functions_of(program).values()
        if f.direction in KINDS
    }
    if cluster is None:
        work = {key: _work_of(f) for key, f in functions.items()}
        return PassCosts(lambda stage_at, kind: work.get((stage_at[0], kind), 0.0))
    devices = devices_of_places(program)
    placed = [on_devices(cluster, here) for here in devices]
    alike = [likeness(c) for c in placed]
    messages_s = {key: _messages_s(f, program, cluster) for key, f in functions.items()}
    known: dict[Hashable, float] = {}

    def pass_s(stage_at: StageAt, kind: Kind) -> float:
        (stage, rank), function = stage_at, functions.get((stage_at[0], kind))
        if function is None:
            return 0.0
        key = stage, kind, alike[rank]
        if key not in known:
            known[key] = simulate(function.alone, placed[rank]).time_s
        return known[key] + messages_s[stage, kind]

    sizes = _bytes_sent(functions.values())

    @cache
    def message_s(source: StageAt, goal: StageAt) -> float:
        size = sizes.get((source[0], goal[0]))
        if size is None or source[1] == goal[1]:
            return 0.0
        return transfer_s(cluster, devices[source[1]], devices[goal[1]], size)

    return PassCosts(pass_s, message_s)


def _work_of(function: StageFunction) -> float:
    """FLOPs of a function, plus its bytes moved times `FLOPS_PER_BYTE`."""
    return float(sum(flops_of(op) + FLOPS_PER_BYTE * bytes_moved(op) for op in function.ops))


def _messages_s(function: StageFunction, program: Program, cluster: Cluster) -> float:
    """Seconds that a run spends on receiving from and sending to other devices."""
    places, own = StagePlaces.of(program).of_stage, function.stage
    ends = [(op.source, op.value) for op in function.receives]
    ends += [(op.to, op.value) for op in function.sends]
    return sum(
        cluster.message_work_s(num_bytes(tensor_type_of(value)))
        for other, value in ends
        if places[other] != places[own]
    )


def _bytes_sent(functions: Iterable[StageFunction]) -> Counter[tuple[int, int]]:
    """Bytes of all messages of a micro-batch, by (sending stage, receiving stage)."""
    sizes: Counter[tuple[int, int]] = Counter()
    for function in functions:
        for op in function.sends:
            sizes[function.stage, op.to] += num_bytes(tensor_type_of(op.value))
    return sizes


def _fits(program: Program, cluster: Cluster, table: Table) -> bool:
    apply(program, table)
    itemsize = parameter_dtype(program).itemsize
    devices = devices_of_places(program)
    for memory, size, here in zip(
        memory_of_places(program), parameters_of_places(program), devices, strict=True
    ):
        states = state_bytes(size, itemsize)
        needed = states["parameters"] + states["optimizer"] + memory.peak_bytes
        placed = on_devices(cluster, here)
        if needed > min(d.memory_bytes for d in placed.device_types(len(here))):
            return False
    return True
