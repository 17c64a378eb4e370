"""The planner `axonn`: AxoNN's grid of x, y, z and data for a program and a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod

from xdsl.ir import SSAValue

from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.dialects.types import num_bytes, shape_of, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, ordered
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.passes.messages.delete_redundant_collectives import DeleteRedundantCollectivesPass
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.axonn.model import AXES, LinearLayer
from shardweave.planners.axonn.search import Model, Options, Ranked, rank_grids
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import asked_degrees
from shardweave.planners.cost.memory import check_plan_precision, state_bytes
from shardweave.planners.cost.quantity import counted
from shardweave.planners.cost.workload import Workload, workload_of
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_names import sharding_text
from shardweave.planners.plan.plan_parts import Candidate, PlanError, Predicted
from shardweave.planners.plan.replicated import batch_shardings
from shardweave.planners.predict.predict import with_candidates
from shardweave.planners.structure.linear_maps import Cut, LinearMap, input_embeddings, linear_maps
from shardweave.planners.structure.structure import parallel_pairs

Grid = tuple[int, int, int, int]


def plan_axonn(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster | None = None,
    top: int = 5,
    aware: bool = True,
    checkpointing: bool = False,
    keep_gathered: bool = False,
    precision: str = "",
) -> Plan:
    """A grid of x, y, z and data, and each weight sharded by x and y and stored over z.

    Objective: seconds of communication of one step by AxoNN's model (`axonn.model`), among all
    grids of the cluster's devices that divide the program and fit into memory; exact for the
    model. With `mesh` (axes x, y, z, data) the grid is given and nothing is chosen. Source: Singh
    et al., arXiv 2305.13525; departures are in docs/planners.md.

    top: candidates that the plan lists. aware: bandwidth by placement. checkpointing: the forward
    pass is recomputed. keep_gathered: the backward pass reads the weights that the forward pass
    gathered, of as many blocks as fit; on a mesh that is given, of all. precision: as of a
    plan, for the memory of the optimizer. The plan's passes do it in the paper's order of messages
    (`axonn-abc`).

    Raises PlanError if no grid divides the program or fits, with the smallest shortfall in GiB.
    """
    check_plan_precision(precision)
    if mesh is not None:
        plan = replace(_plan(program, _grid_of(mesh), checkpointing), precision=precision)
        return _keeping(plan, None) if keep_gathered else plan
    assert cluster is not None
    devices = cluster.num_devices
    workload = workload_of(program, cluster, Mesh())
    options = Options(aware, checkpointing, keep_gathered)
    model = model_of(program, workload, precision)
    divides = _divisibility(program)
    ranked = rank_grids(model, cluster, devices, options, accept=divides)
    capacity = min(device.memory_bytes for device in cluster.device_types(devices))
    slowest = max(workload.compute_s(device) for device in cluster.devices) / devices
    rows = [_candidate(r, slowest, capacity) for r in ranked[: max(1, top)]]
    plan = with_candidates(_plan(program, ranked[0].grid, checkpointing), rows)
    kept = ranked[0].kept_blocks
    if kept:
        plan = _keeping(plan, ranked[0].kept_bytes)
    grids = counted(len(ranked), f"grid of {counted(devices, 'device')}", "divides")
    fit = "fits" if len(ranked) == 1 else "fit"
    reason = f"{grids} the program and {fit} into memory"
    reasons = (f"{reason}; this one communicates least", *plan.reasons)
    if keep_gathered:
        reasons = (*reasons, f"gathered weights are kept of {kept} of {model.num_blocks} blocks")
    return replace(plan, precision=precision, reasons=reasons)


def best_grid(
    program: Program,
    cluster: Cluster,
    workload: Workload,
    precision: str = "",
    copies: Mapping[str, Sequence[str]] | None = None,
) -> Mesh:
    """The mesh of the grid that `plan_axonn` chooses for all devices of a cluster.

    copies: by repeated block, further blocks equal to it that the model has but the program lacks;
    `workload` includes them. Raises PlanError as `plan_axonn` does.
    """
    model = model_of(program, workload, precision)
    added = [
        replace(layer, block=name)
        for layer in model.layers
        for name in (copies or {}).get(layer.block, ())
    ]
    model = replace(model, layers=(*model.layers, *added))
    ranked = rank_grids(
        model, cluster, cluster.num_devices, Options(), accept=_divisibility(program)
    )
    return Mesh(**ranked[0].mesh)


def _grid_of(mesh: Mesh) -> Grid:
    sizes = asked_degrees(mesh, AXES, "axonn")
    x, y, z, data = (sizes.get(axis, 1) for axis in AXES)
    return x, y, z, data


def model_of(program: Program, workload: Workload, precision: str = "") -> Model:
    """The layers and the memory of a program, with Adam's state."""
    layers = axonn_layers_of(program, _widest_pairs(program))
    if not layers:
        raise PlanError(
            "planner 'axonn' shards linear maps and convolutions, and the program has none; plan "
            "with 'auto' or 'replicated'."
        )
    parameters = [slot.value for slot in program.arguments if slot.kind == "param"]
    itemsize = workload.itemsize
    state = sum(state_bytes(itemsize, itemsize, precision).values())
    of_layers = itemsize * sum(layer.weights for layer in layers)
    all_bytes = sum(num_bytes(tensor_type_of(value)) for value in parameters)
    return Model(
        layers=tuple(layers),
        itemsize=itemsize,
        state_bytes=state,
        other_bytes=state / itemsize * max(0, all_bytes - of_layers),
        kept_bytes=sum(block.kept_bytes for block in workload.blocks),
    )


def axonn_layers_of(program: Program, pairs: Mapping[SSAValue, Cut]) -> list[LinearLayer]:
    """Convert a program's linear maps to AxoNN's layers, in order. pairs: shardings over x, by
    weight.

    Maps that x shards along their outputs begin a pair of column- and row-parallel maps
    (`planners.structure.structure`); maps that x shards along their inputs end it and are the
    transposed layers. So y shards the residual stream that pairs read from and add to, and x values
    inside a pair, which is AxoNN's alternation wherever layers follow each other. A map in no pair
    is a layer of its own: y shards its inputs, and x does not shard it.
    """
    layers: list[LinearLayer] = []
    blocks = blocks_of(program)
    for m in linear_maps(program):
        k, n = (m.rule.factors[f].size for f in (m.contracted, m.produced))
        inputs = shape_of(m.op.operands[m.weight - 1])
        layers.append(
            LinearLayer(
                rows_in=prod(inputs) // k,
                rows_out=prod(shape_of(m.op.results[0])) // n,
                k=k,
                n=n,
                is_transposed=m.is_contracted_in(pairs.get(m.parameter, ())),
                kernel=prod(shape_of(m.op.operands[m.weight])) // (k * n),
                block=blocks.of_op(m.op) or layer_of(m.op),
            )
        )
    return layers


def _widest_pairs(program: Program) -> dict[SSAValue, Cut]:
    """Return the pairs that degree 2 or degree 3 shards, whichever shards more parameters."""
    return max((parallel_pairs(program, "x", size) for size in (2, 3)), key=len)


def _divisibility(program: Program) -> Callable[[Grid], bool]:
    """Return a predicate on grids: data and z divide the batch, x all pairs, y their other dims."""
    widest = _widest_pairs(program)
    batches = {
        shape_of(slot.value)[0]
        for slot in program.arguments
        if slot.kind == "input" and shape_of(slot.value)
    }

    @cache
    def pairs(size: int) -> dict[SSAValue, Cut]:
        return parallel_pairs(program, "x", size)

    sides = {
        m.rule.factors[_stream_side(m, widest)].size
        for m in linear_maps(program)
        if m.parameter in widest
    }

    def accept(grid: Grid) -> bool:
        x, y, z, data = grid
        if any(batch % (z * data) for batch in batches):
            return False
        if x > 1 and (not widest or len(pairs(x)) < len(widest)):
            return False
        return y == 1 or (bool(sides) and all(side % y == 0 for side in sides))

    return accept


def _stream_side(linear: LinearMap, pairs: dict[SSAValue, Cut]) -> int:
    """Factor of a map's rule that y shards: the outputs if x shards the inputs, else the inputs."""
    is_transposed = linear.is_contracted_in(pairs.get(linear.parameter, ()))
    return linear.produced if is_transposed else linear.contracted


def _candidate(ranked: Ranked, compute_s: float, capacity: float) -> Candidate:
    name = ",".join(f"{axis}={size}" for axis, size in ranked.mesh.items())
    communication = {axis: seconds for axis, seconds in ranked.communication_s.items() if seconds}
    predicted = Predicted(
        time_s=compute_s + ranked.time_s,
        compute_s=compute_s,
        communication_s=communication,
        exposed_s=ranked.time_s,
        memory_bytes=ranked.memory_bytes,
        capacity_bytes=capacity,
        source="estimated",
    )
    return Candidate(name, predicted)


def _plan(program: Program, grid: Grid, checkpointing: bool) -> Plan:
    """Make the plan of a grid; what does not divide stays replicated, with a note."""
    x, y, z, data = grid
    notes: list[str] = []
    pairs = parallel_pairs(program, "x", x) if x > 1 else {}
    structure = pairs or (_widest_pairs(program) if y > 1 else {})
    cuts: dict[SSAValue, Cut] = dict(pairs)
    maps = {m.parameter: m for m in linear_maps(program)}
    for parameter, linear in maps.items():
        _cut_by_y(cuts, parameter, linear.cut(_stream_side(linear, structure), "y", y), y, notes)
    tables = {table for _, table in input_embeddings(program)} - set(maps)
    for table in tables:
        width = shape_of(table)[1]
        along = None if width % y or y == 1 else ((), (Placement("y", y, width // y),))
        _cut_by_y(cuts, table, along, y, notes)
    for parameter in [*maps, *tables]:
        cut = cuts.get(parameter, ((),) * len(shape_of(parameter)))
        cuts[parameter] = _stored(cut, shape_of(parameter), z)
    names = {slot.value: slot.name for slot in program.arguments}
    mesh = {"data": data, "z": z, "y": y, "x": x}
    wide = [axis for axis in ("data", "z") if mesh[axis] > 1]
    inputs, more = batch_shardings(program, Mesh(**mesh), *wide)
    return Plan(
        mesh=mesh,
        parameters={
            names[value]: sharding_text(cut, shape_of(value))
            for value, cut in cuts.items()
            if any(cut)
        },
        inputs=inputs,
        planner="axonn",
        notes=(*more, *notes),
        recompute="layer" if checkpointing else "none",
        schedule="axonn-abc",
    )


def _keeping(plan: Plan, budget: int | None) -> Plan:
    """Add to a plan the pass that keeps gathered weights, of at most `budget` bytes."""
    parts = PlanPasses.of(plan)
    keep = DeleteRedundantCollectivesPass(budget=budget, kind="all_gather")
    passes = (*parts.partitioning, *parts.recomputation, keep, *parts.finishing)
    return replace(plan, passes=str(PassPipeline(passes)))


def _cut_by_y(
    cuts: dict[SSAValue, Cut], parameter: SSAValue, cut: Cut | None, y: int, notes: list[str]
) -> None:
    """Shard a parameter over y too, unless x shards the same dim; a note says so if it cannot."""
    if y == 1:
        return
    known = cuts.get(parameter, ((),) * len(shape_of(parameter)))
    if cut is None or any(a and b for a, b in zip(known, cut, strict=True)):
        name = parameter.name_hint or "a parameter"
        notes.append(f"'{name}' stays whole over y={y}: its features do not divide")
        return
    cuts[parameter] = tuple(a or b for a, b in zip(known, cut, strict=True))


def _stored(cut: Cut, shape: tuple[int, ...], z: int) -> Cut:
    """Add z to a sharding, inside the existing shards of the longest dim that z divides."""
    if z == 1:
        return cut
    spans = [
        min((p.stride for p in dim), default=size) for dim, size in zip(cut, shape, strict=True)
    ]
    for index in sorted(range(len(shape)), key=lambda i: -spans[i]):
        if spans[index] % z == 0:
            inner: DimSharding = ordered((*cut[index], Placement("z", z, spans[index] // z)))
            return (*cut[:index], inner, *cut[index + 1 :])
    return cut
