"""Splitting a local program into pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from xdsl.dialects import builtin, func
from xdsl.ir import Block, BlockArgument, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    annotate,
    set_sharding_attrs,
    set_shardings,
    sharding_attrs_of,
)
from shardweave.ir.dialects.builder import Builder, remade
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding, block_of
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program, shardings_of
from shardweave.ir.program.staged import Direction, Run, is_staged, micro_axis, name_of
from shardweave.passes.partition.unroll_time_axes import unroll_time_axes
from shardweave.passes.stages.batches import MicroBatches, micro_batches_of
from shardweave.passes.stages.build import Attributes, FunctionBuilder, ValueSlots, function_of
from shardweave.passes.stages.members import Membership
from shardweave.passes.stages.places import places_of_ops


class ScheduledRun(NamedTuple):
    """One run of a stage on one micro-batch, in one direction. at: coordinate on the stage axis."""

    direction: Direction
    stage: int
    micro_batch: int
    at: int


def places_of_tasks(tasks: Sequence[ScheduledRun]) -> list[list[int]]:
    """List the coordinates on the stage axis at which each stage runs, by stage."""
    places: dict[int, set[int]] = {}
    for task in tasks:
        places.setdefault(task.stage, set()).add(task.at)
    return [sorted(places[stage]) for stage in range(len(places))]


def runs_of_tasks(tasks: Sequence[ScheduledRun]) -> list[Run]:
    """List a step's runs in order: of functions that run once, and of those on micro-batches."""
    places = places_of_tasks(tasks)

    def once(direction: Direction) -> list[Run]:
        return [Run(name_of(direction, stage), p) for stage, at in enumerate(places) for p in at]

    each = [Run(name_of(kind, stage), at, number) for kind, stage, number, at in tasks]
    return [*once("before"), *each, *once("share"), *once("after")]


def cut_into_stages(
    program: Program,
    stages: Mapping[str, int],
    tasks: Sequence[ScheduledRun],
    *,
    keep_gathered: bool = False,
    scatter_each: bool = False,
) -> None:
    """Split a local program into functions of stages, in place.

    stages: the stage of each layer's forward ops; ops of another layer go to the stage that
    computes their operands. tasks: the runs on micro-batches, in an order in which all ranks
    together can execute them; functions without ops are left out. keep_gathered: gather sharded
    parameters once per step. scatter_each: reduce-scatter their gradients in each micro-batch, so
    that no rank holds them unsharded. Takes time linear in the ops.

    Raises ValueError for a program that is not local, or staged already, and for one whose
    micro-batches cannot run one by one, or whose stages are not in the order of the model.
    """
    if is_staged(program):
        raise ValueError(
            "the program is cut into stages already; give cut-stages the program from before, or "
            "remove the pass."
        )
    if not program.is_local:
        raise ValueError("the program is global; run insert-collectives before cut-stages.")
    if any(isinstance(op, FusedOp) for op in program.ops):
        raise ValueError("the program has fused regions; run unfuse-kernels first.")
    axis = micro_axis(program)
    if scatter_each and axis is not None:
        scatter_before_adding(program, axis.name)
    batches = micro_batches_of(program, keep_gathered=keep_gathered)
    places = places_of_tasks(tasks)
    placed = places_of_ops(program, batches, stages, len(places))
    splits_weights = any(task.direction == "weights" for task in tasks)
    membership = Membership(program, batches, placed, places, splits_weights=splits_weights)
    membership.run()
    _Cut(program, batches, membership, ValueSlots(program, axis and axis.name), places).run(tasks)


def scatter_before_adding(program: Program, axis: str) -> None:
    """Reduce-scatter each micro-batch's term before the sum over micro-batches, not after it."""
    for op in list(program.ops):
        adding = op.operands[0].owner if isinstance(op, dist.ReduceScatterOp) else None
        if not isinstance(adding, dist.AllReduceOp) or tuple(adding.axes) != (axis,):
            continue
        if not adding.results[0].has_one_use():
            continue
        shard = op.results[0]
        total = remade(adding, [shard], [shard.type])
        set_sharding_attrs(total, sharding_attrs_of(op) or sharding_attrs_of(adding))
        op.operands[0] = adding.operands[0]
        before, after = shardings_of(adding, program)[0], shardings_of(op, program)[0]
        if before is not None and after is not None:
            pending = Sharding(after.dims, (*after.unreduced, axis), "sum")
            set_shardings(op, [pending], [after.global_shape(shape_of(shard))])
        Builder.after(op, adding).insert(total, shard)
        shard.replace_all_uses_with(total.results[0])
        total.operands[0] = shard
        Rewriter.erase_op(adding)


class _Cut:
    """Builds the functions of the stages, and the step that runs them."""

    def __init__(
        self,
        program: Program,
        batches: MicroBatches,
        membership: Membership,
        values: ValueSlots,
        places: Sequence[Sequence[int]],
    ) -> None:
        self.program = program
        self.batches = batches
        self.membership = membership
        self.values = values
        self.places = places

    def run(self, tasks: Sequence[ScheduledRun]) -> None:
        functions: dict[str, func.FuncOp] = {}
        for stage in range(len(self.places)):
            before = self._before(stage)
            if before is not None:
                functions[before.sym_name.data] = before
        for members in self.membership.functions.values():
            if not members.is_empty:
                made = FunctionBuilder(members, self.values).build()
                functions[made.sym_name.data] = made
        step = self._step(functions, tasks)
        old = self.program.function
        body = self.program.module.body.block
        old.detach()
        for function in (step, *functions.values()):
            body.add_op(function)
        old.erase()

    # What is made of all micro-batches before the first one

    def _before(self, stage: int) -> func.FuncOp | None:
        batches = self.batches
        needed = [
            value
            for value in (*batches.whole, *batches.parts)
            if any(
                value in members.given
                for members in self.membership.functions.values()
                if members.stage == stage
            )
        ]
        if not needed:
            return None
        copy = self.program.clone()
        pairs = zip(self.program.ops, copy.ops, strict=True)
        copies: dict[SSAValue, SSAValue] = {
            old: new
            for op, other in pairs
            for old, new in zip(op.results, other.results, strict=True)
        }
        block = copy.function.body.block
        copy.return_op.operands = [self._whole(value, copies[value]) for value in needed]
        entries = [self.values.summed(value, "whole")[1] for value in needed]
        remove_dead_ops(copy)
        arguments: list[Attributes] = []
        for slot in copy.arguments:
            if slot.value.first_use is None:
                assert isinstance(slot.value, BlockArgument)
                block.erase_arg(slot.value)
            else:
                arguments.append(dict(slot.attributes.data))
        copy.function.body.detach_block(block)
        made = function_of("step", block, arguments, entries)
        unrolled = Program(builtin.ModuleOp([made], dict(copy.module.attributes)))
        unroll_time_axes(unrolled)
        function = unrolled.function
        function.detach()
        function.properties["sym_name"] = builtin.StringAttr(name_of("before", stage))
        return function

    def _whole(self, value: SSAValue, copy: SSAValue) -> SSAValue:
        """The value of all micro-batches for `copy`, a copy of `value` in the function that runs
        before them: `copy` itself, or the value of which `copy` is one micro-batch's shard."""
        if value not in self.batches.parts:
            return copy
        op, axis = copy.owner, self.values.axis
        assert isinstance(op, Operation)
        assert axis is not None
        if isinstance(op, dist.SliceOp) and op.axes == (axis,):
            return op.operands[0]
        sharding = self.values.sharding(value)
        seat = sharding.seat_of(axis)
        assert seat is not None
        dim, placement = seat
        gather = dist.create_dist(
            dist.AllGatherOp,
            [copy],
            [self.values.joined(value, sharding)],
            axes=[axis],
            dim=dim,
            block=block_of(sharding.dims[dim], placement),
        )
        annotate(gather, op)
        Rewriter.insert_op(gather, InsertPoint.after(op))
        return gather.results[0]

    # The step

    def _step(
        self, functions: Mapping[str, func.FuncOp], tasks: Sequence[ScheduledRun]
    ) -> func.FuncOp:
        block = Block()
        entries: list[Attributes] = []
        for slot in self.program.arguments:
            type_, entry = self.values.whole_entry(slot)
            argument = block.insert_arg(type_, len(block.args))
            argument.name_hint = slot.value.name_hint
            entries.append(entry)
        runs = {
            run: self._run(run, functions[run.function])
            for run in runs_of_tasks(tasks)
            if run.function in functions
        }
        block.add_ops(runs.values())
        results = [self._result(slot.kind, slot.name, runs) for slot in self.program.results]
        block.add_op(func.ReturnOp(*(op.results[index] for op, index in results)))
        slots = [self.values.whole_entry(slot)[1] for slot in self.program.results]
        return function_of("step", block, entries, slots)

    def _run(self, run: Run, function: func.FuncOp) -> dist.RunOp:
        options = {} if run.micro_batch is None else {"micro_batch": run.micro_batch}
        is_last = run.function.startswith("after")
        types = list(function.function_type.outputs.data) if is_last else []
        made = dist.create_dist(dist.RunOp, [], types, function=run.function, at=run.at, **options)
        last = function.body.block.last_op
        assert last is not None
        for result, value in zip(made.results, last.operands, strict=False):
            result.name_hint = value.name_hint
        return made

    def _result(
        self, kind: str, name: str, runs: Mapping[Run, dist.RunOp]
    ) -> tuple[Operation, int]:
        """The run that returns a result of the step, and the index among the run's results."""
        home = self.membership.homes[kind, name]
        returned = list(self.membership.functions[home, "after"].returned)
        run = Run(name_of("after", home), self.places[home][0])
        return runs[run], returned.index((kind, name))
