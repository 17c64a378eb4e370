"""Schedule `list` for a program that is cut: what its functions take, and which orders fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from shardweave.ir.dist import SendOp
from shardweave.ir.flops import flops_of
from shardweave.ir.program import Program
from shardweave.ir.rewrite.stages.reorder import reorder_runs
from shardweave.ir.staged import StageFunction, StagePlaces, functions_of, micro_axis
from shardweave.ir.traffic import bytes_moved
from shardweave.ir.types import num_bytes, tensor_type_of
from shardweave.planners.cost.cluster import Cluster, on_devices
from shardweave.planners.cost.links import transfer_of
from shardweave.planners.cost.memory import state_bytes
from shardweave.planners.cost.pipeline.run_memory import (
    devices_of_places,
    memory_of_places,
    parameters_of_places,
)
from shardweave.planners.cost.simulate import simulate
from shardweave.planners.cost.workload import parameter_dtype
from shardweave.planners.pipelines.balance import FLOPS_PER_BYTE
from shardweave.planners.pipelines.list_order import PassCosts, list_table
from shardweave.planners.pipelines.table import Kind, Table
from shardweave.planners.pipelines.tasks import KINDS, tasks_of


def order_stages(program: Program, cluster: Cluster | None, others: Sequence[Table]) -> Table:
    """The fastest order that fits of a staged program's micro-batches. It changes the program's.

    cluster: whose devices bound the memory, and give the times. Without one, passes count by their
    FLOPs and the bytes that they move, messages are free, and fewer than twice as many
    micro-batches are in flight as in 1F1B. others: orders to beat. Raises ValueError if none fits.
    """
    ranks, axis = program.needed_mesh().num_stages, micro_axis(program)
    functions = functions_of(program)
    places = {stage: at for stage, (at,) in StagePlaces.of(program).of_stage.items()}
    num_stages = len(places)
    costs = costs_of(functions.values(), places, cluster)
    sizes = ranks, axis.size if axis else 1, num_stages // ranks
    fits = None if cluster is None else partial(_fits, program, cluster)
    return list_table(*sizes, costs=costs, others=others, fits=fits)


def apply(program: Program, table: Table) -> None:
    """Let a staged program run in the order of a table."""
    num_stages = len({action.stage for actions in table for action in actions})
    reorder_runs(program, tasks_of(table, num_stages))


def costs_of(
    functions: Iterable[StageFunction], places: Mapping[int, int], cluster: Cluster | None
) -> PassCosts:
    """What the passes of a staged program take."""
    seconds: dict[tuple[int, Kind], float] = {}
    message_s: dict[tuple[int, int], float] = {}
    for function in functions:
        kind = KINDS.get(function.direction)
        if kind is None:
            continue
        if cluster is None:
            work = (flops_of(op) + FLOPS_PER_BYTE * bytes_moved(op) for op in function.ops)
            seconds[function.stage, kind] = float(sum(work))
            continue
        devices = devices_of_places(function)
        here = devices[places[function.stage]]
        seconds[function.stage, kind] = simulate(function.alone, on_devices(cluster, here)).time_s
        for op in function.ops:
            if isinstance(op, SendOp) and places[op.to] != places[function.stage]:
                way = transfer_of(cluster, list(zip(here, devices[places[op.to]], strict=True)))
                size = num_bytes(tensor_type_of(op.operands[0]))
                pair = function.stage, op.to
                before_s = message_s.get(pair, way.latency_s)
                message_s[pair] = before_s + size / way.bandwidth_bytes_s
    return PassCosts(seconds, message_s)


def _fits(program: Program, cluster: Cluster, table: Table) -> bool:
    """Whether the devices have the memory for a program in the order of a table."""
    apply(program, table)
    itemsize = parameter_dtype(program).itemsize
    devices = devices_of_places(program)
    for memory, size, here in zip(
        memory_of_places(program), parameters_of_places(program), devices, strict=True
    ):
        states = state_bytes(size, itemsize)
        needed = states["parameters"] + states["optimizer"] + memory.peak_bytes
        placed = on_devices(cluster, here)
        if needed > min(one.memory_bytes for one in placed.device_types(len(here))):
            return False
    return True
