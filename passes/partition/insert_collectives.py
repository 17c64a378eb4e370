"""Partitioning: from a propagated global program to the local program that every rank runs.

Nothing is chosen here. Every value gets the type of one device's shard, every op its local form,
and every `dist.reshard` becomes the collectives and slices that `reshard` lists for it. Shards of
an unevenly sharded value have the same shape on all ranks: see `padding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import cast

from xdsl.dialects import func
from xdsl.ir import Block, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import (
    describe,
    set_shardings,
)
from shardweave.ir.dialects.aten import AtenOp, create
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.types import AnyTensor, shape_of, tensor_type_of, with_shape
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.program.program import Program, Slot, shardings_of
from shardweave.ir.sharding.fit import Misfit, fitting_factors
from shardweave.ir.sharding.flow import is_propagated
from shardweave.ir.sharding.localizer import Localizer
from shardweave.ir.sharding.padding import Padding, notes_on_padding, zeros_of
from shardweave.ir.sharding.ragged import ragged_values
from shardweave.ir.sharding.reshard import ReshardStep, reshard
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.sharding.rules.base import Localize
from shardweave.passes.notes import is_heard, note
from shardweave.passes.program_pass import PassOnProgram


class _Partition:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.mesh = program.needed_mesh()
        self.block = Block()
        self.local: dict[SSAValue, SSAValue] = {}
        self.shardings: dict[SSAValue, Sharding] = {}
        self.padding = Padding()
        self.ragged = ragged_values(program.ops)

    def run(self) -> None:
        for slot in self.program.arguments:
            sharding = self.program.sharding_of_slot(slot)
            type_ = self._local_type(slot.value, sharding)
            argument = self.block.insert_arg(type_, len(self.block.args))
            argument.name_hint = slot.value.name_hint
            self.padding.zero[argument] = zeros_of(sharding, shape_of(slot.value))
            self._define(slot.value, argument, sharding)
        for op in self.program.ops:
            if isinstance(op, dist.ReshardOp):
                self._reshard(op)
            elif isinstance(op, AtenOp):
                self._op(op)
            else:
                raise ValueError(f"{describe(op)} cannot be partitioned; run unfuse-kernels first.")
        results = [self._returned(slot) for slot in self.program.results]
        self.block.add_op(func.ReturnOp(*results))
        self.program.replace_body(self.block)
        self.program.set_local()

    def _define(self, value: SSAValue, local: SSAValue, sharding: Sharding) -> None:
        self.local[value] = local
        self.shardings[value] = sharding

    def _results(self, op: Operation) -> list[Sharding]:
        return [cast(Sharding, sharding) for sharding in shardings_of(op, self.program)]

    def _op(self, op: AtenOp) -> None:
        rule, results = rule_of(op), self._results(op)
        operands = tuple(self.shardings[value] for value in op.operands)
        factors = fitting_factors(rule, operands, tuple(results), self.mesh)
        if isinstance(factors, Misfit):
            raise ValueError(f"{describe(op)}: {factors.text(op)}; add a dist.reshard before it.")
        types = [self._local_type(r, s) for r, s in zip(op.results, results, strict=True)]
        values = [self.local[value] for value in op.operands]
        sizes = [factor.size for factor in rule.factors]
        form = Localizer(op, values, factors, sizes, types, self.mesh, self.block.add_op)
        form = self.padding.neutral(form, rule, operands)
        is_plain = rule.localize is None or not any(factors)
        made = form.clone() if is_plain else list(cast("Localize", rule.localize)(form))
        self.padding.note(form, rule, made)
        assert [r.type for r in made] == types, f"local form of {op.name} has wrong types"
        given = {v: (s, shape_of(r)) for v, s, r in zip(made, results, op.results, strict=True)}
        for owner in dict.fromkeys(value.owner for value in made):
            # Some results of the last ops of a local form may be no shards of the op's results.
            if isinstance(owner, Operation) and all(own in given for own in owner.results):
                set_shardings(owner, *zip(*(given[own] for own in owner.results), strict=True))
        for new, old, sharding in zip(made, op.results, results, strict=True):
            new.name_hint = old.name_hint
            self._define(old, new, sharding)

    def _reshard(self, op: dist.ReshardOp) -> None:
        (source,), (goal,) = op.operands, self._results(op)
        current, before = self.local[source], self.shardings[source]
        if source in self.ragged and before.dims[0] != goal.dims[0]:
            raise ValueError(
                f"{describe(op)}: a plan cannot reshard these rows, which each device computes "
                "for its own experts; remove their sharding from the plan, or block-experts from "
                "the passes."
            )
        try:
            steps = reshard(shape_of(source), before, goal, self.mesh)
        except ValueError as error:
            raise ValueError(f"{describe(op)}: {error}") from error
        for step in steps:
            current = self._collective(op, current, before, step)
            before = step.after
        self._define(op.results[0], current, goal)

    def _collective(
        self, op: dist.ReshardOp, current: SSAValue, before: Sharding, step: ReshardStep
    ) -> SSAValue:
        value = op.results[0]
        zero = self.padding.zero.get(current, frozenset())
        current = self._padded(op, current, before, step)
        type_ = with_shape(tensor_type_of(value), step.result)
        collective = dist.create_dist(
            step.op, [current], [type_], axes=list(step.axes), **step.arguments
        )
        made = self._add(op, collective, step.after, step.op.kind())
        made = self._without_padding(op, made, step)
        # A dim that was sharded evenly, or not at all, has been padded with zeros.
        old, new = (zeros_of(sharding, shape_of(value)) for sharding in (before, step.after))
        self.padding.zero[made] = (zero & new) | (new - old)
        return made

    def _padded(
        self, op: dist.ReshardOp, current: SSAValue, before: Sharding, step: ReshardStep
    ) -> SSAValue:
        """The operand of a step, padded with zeros along the dim that it slices, if needed."""
        shape = shape_of(current)
        if shape == step.operand:
            return current
        dim = cast(int, step.arguments["dim"])
        pad = [0, 0] * (len(shape) - 1 - dim) + [0, step.operand[dim] - shape[dim]]
        type_ = with_shape(tensor_type_of(current), step.operand)
        longer = create("aten.constant_pad_nd", [current], [type_], {"pad": pad})
        return self._add(op, longer, before, "padded")

    def _without_padding(
        self, op: dist.ReshardOp, current: SSAValue, step: ReshardStep
    ) -> SSAValue:
        """Slice the result of a step to the local shape of `step.after`: drops excess padding."""
        shape = step.after.local_shape(shape_of(op.results[0]))
        for dim, size in enumerate(shape):
            own = shape_of(current)
            if own[dim] != size:
                type_ = with_shape(tensor_type_of(current), (*own[:dim], size, *own[dim + 1 :]))
                part = create("aten.slice.Tensor", [current], [type_], {"dim": dim, "start": 0})
                current = self._add(op, part, step.after, "held")
        return current

    def _add(self, op: dist.ReshardOp, new: Operation, sharding: Sharding, name: str) -> SSAValue:
        """Add an op that lowers reshard `op`; its global shape includes extra padding, if any."""
        (result,) = new.results
        whole = list(shape_of(op.results[0]))
        for dim, part in enumerate(sharding.local_shape(whole)):
            if shape_of(result)[dim] != part:
                whole[dim] = shape_of(result)[dim] * prod(p.size for p in sharding.dims[dim])
        set_shardings(new, [sharding], [tuple(whole)])
        Builder.at_end(self.block, op).insert(new, name)
        return result

    def _returned(self, slot: Slot) -> SSAValue:
        promised, held = self.program.sharding_of_slot(slot), self.shardings[slot.value]
        if promised != held:
            raise ValueError(
                f"{slot.kind} '{slot.name}' is returned as {held}, but its dist.sharding says "
                f"{promised}; add a dist.reshard before the return, or correct dist.sharding."
            )
        return self.local[slot.value]

    def _local_type(self, value: SSAValue, sharding: Sharding) -> AnyTensor:
        return with_shape(tensor_type_of(value), sharding.local_shape(shape_of(value)))


@dataclass(frozen=True)
class InsertCollectivesPass(PassOnProgram):
    """Give every value the type of its shards, and lower every `dist.reshard` to collectives.

    A reshard becomes the collectives and slices that bring its operand to its sharding, with the
    reshard's layer and phase; ops that need more than local types on shards (offsets into a shard,
    masked lookups) get their local form. Nothing is chosen.

    Requires: a propagated global program (`propagate-shardings`), perhaps edited by hand. Ensures:
    a local program (`dist.local`), equal to the global one on the whole mesh; ops keep `sharding`.
    Takes time linear in the ops.
    """

    name = "insert-collectives"

    def run(self, program: Program) -> None:
        program.needed_mesh()
        if program.is_local:
            raise ValueError(
                "the program is local, so that its collectives are inserted already; give "
                "insert-collectives the global program, or remove the pass."
            )
        if not is_propagated(program) and any(True for _ in program.ops):
            raise ValueError(
                "no op of the program has a sharding yet; run propagate-shardings before "
                "insert-collectives."
            )
        _Partition(program).run()
        for text in notes_on_padding(program) if is_heard() else ():
            note(text)
