"""The walk over a local program: each value's relation to the global one, in program order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import cast

from xdsl.dialects import func
from xdsl.ir import Attribute, Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import arguments_of, describe, sharding_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.builder import on_some
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.ops.registry import global_name, is_positional, spec_of
from shardweave.ir.proof.model.expressions import Expressions, stand_in
from shardweave.ir.proof.model.local_forms import (
    OpForm,
    candidates,
    other_arguments,
    plain_cuts,
    written,
)
from shardweave.ir.proof.ops import (
    FULL,
    ProofError,
    check_order,
    draws,
    dtype_kind_of,
    is_cast,
    rule_of_sum,
    signs_of,
)
from shardweave.ir.proof.relations.cuts import (
    Applied,
    added_terms,
    apply_rule,
    family_of,
    merged_terms,
    united,
)
from shardweave.ir.proof.relations.held import (
    FREE,
    RING,
    TIMES,
    Coordinates,
    Held,
    Local,
    ProofAxes,
    Relation,
    Shape,
    Value,
    has_terms,
)
from shardweave.ir.proof.relations.padding import (
    FILL,
    problem_of_padding,
    rank_position,
    uneven_factors,
    zeros_after,
)
from shardweave.ir.proof.steps import attention, moves, ring
from shardweave.ir.proof.steps.local_maxima import SCALED, sum_in_one
from shardweave.ir.proof.steps.masks import masked
from shardweave.ir.sharding.fit import Misfit
from shardweave.ir.sharding.rules import Rule

Key = tuple[str, frozenset[tuple[str, Attribute]], tuple[Value, ...], tuple[tuple[Shape, str], ...]]
"""A local computation: equal keys give equal values on every rank."""


@dataclass
class Walk:
    """Relates the values of a local program to the global program, op by op.

    known: relations by local computation. refusals: by op, the reason why it has no relation.
    steps: values within local forms of sharded ops. others: further relations of a constant, which
    may be a shard of several global values.
    """

    table: Expressions
    axes: ProofAxes
    values: dict[SSAValue, Value] = field(default_factory=dict[SSAValue, Value])
    refusals: dict[Operation, Misfit] = field(default_factory=dict[Operation, Misfit])
    known: dict[Key, tuple[Value, ...]] = field(default_factory=dict[Key, tuple[Value, ...]])
    steps: set[Value] = field(default_factory=set["Value"])
    others: dict[Value, list[Value]] = field(default_factory=dict[Value, list[Value]])
    splits: dict[object, int] = field(default_factory=dict[object, int])
    in_flight: set[SSAValue] = field(default_factory=set[SSAValue])
    links: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    """For each value that a stage function receives, the value of the function that produced it."""

    def sub_batches(self, ops: Iterable[Operation]) -> None:
        """Find the sub-batch axes from slices of arguments. Runs before `block`, since a schedule
        may place ops of a sub-batch above the slice that defines it."""
        for op in ops:
            if spec_of(op).view == "part" and op.operands[0] in self.values:
                self.results(op, (self.values[op.operands[0]],))

    def block(self, ops: Iterable[Operation]) -> None:
        """Relate the results of ops, in order."""
        ops = list(ops)
        for op in filter(ring.is_on_ring, ops):
            ring.add_ring(op, self.axes)
        for op in ops:
            check_order(op, self.values, self.in_flight)
            if isinstance(op, func.ReturnOp):
                return
            operands = tuple([self.values[value] for value in op.operands])
            if isinstance(op, FusedOp):
                made = self._fused(op, operands)
            elif isinstance(op, dist.RecvOp):
                if op.results[0] not in self.links:
                    raise ProofError(
                        f"{describe(op)} must be in a stage function; move it into one."
                    )
                made = (self.values[self.links[op.results[0]]],)
            elif isinstance(op, dist.SendOp):
                continue
            else:
                made = self.results(op, operands)
            self.values.update(zip(op.results, made, strict=True))

    def _fused(self, op: FusedOp, operands: Sequence[Value]) -> tuple[Value, ...]:
        self.values.update(zip(op.block.args, operands, strict=True))
        self.block(op.fused_ops)
        return tuple(self.values[value] for value in op.yielded)

    def results(
        self, op: Operation, operands: tuple[Value, ...], *, is_template: bool = False
    ) -> tuple[Value, ...]:
        """Return the relations of an op's results. is_template: the op belongs to a local form."""
        if isinstance(op, dist.AllReduceOp) and len(operands) > 1:
            # A message of several sums: each has the relation that it would have alone.
            alone = [(on_some(op, [i]), (operand,)) for i, operand in enumerate(operands)]
            return tuple([self.results(*each, is_template=is_template)[0] for each in alone])
        key = key_of(op, operands)
        made = self.known.get(key)
        if made is not None:
            return made
        values: Sequence[Value | None] | None = None
        if isinstance(op, AtenOp):
            for choice in self._readings(operands):
                read = key if choice == operands else key_of(op, choice)
                values = self._aten(op, choice, read, is_template=is_template)
                if values is not None:
                    break
        elif isinstance(op, dist.DistOp):
            values = moves.collective(op, operands, self.axes)
        values = values or [None] * len(op.results)
        made = tuple([
            Local(*key, index=index) if value is None or not _has_shape(value, op.results[index])
            else value
            for index, value in enumerate(values)
        ])  # fmt: skip
        self.known[key] = made
        return made

    def _readings(self, operands: tuple[Value, ...]) -> Iterator[tuple[Value, ...]]:
        """Yield combinations of relations for the operands: first their own and those in `others`;
        then, for each ring, one operand or all of them related as blocks of the ring."""
        yield from product(*([value, *self.others.get(value, ())] for value in operands))
        for axis in self.axes.rings:
            as_blocks = [ring.as_block(value, axis, self.axes) for value in operands]
            for index, block in enumerate(as_blocks):
                if block is not None:
                    yield (*operands[:index], block, *operands[index + 1 :])
            if sum(block is not None for block in as_blocks) > 1:
                yield tuple([b or value for b, value in zip(as_blocks, operands, strict=True)])

    def _aten(
        self, op: AtenOp, operands: tuple[Value, ...], key: Key, *, is_template: bool
    ) -> tuple[Value, ...] | None:
        if is_cast(op):
            return operands
        if not operands and not is_template:
            # A range may be one of the model's, and a step of the local form of a longer one.
            self._write_local_forms(op, operands)
        made: tuple[Value, ...] | None = None
        if all(isinstance(v, Relation) and v.held.layout is None for v in operands):
            parts, signs = cast("tuple[Relation, ...]", operands), signs_of(op)
            if signs is not None:
                made = self._sum(op, parts, signs)
            else:
                made = self._computed(op, parts, key, is_template)
        made = made or self._of_parts(op, operands)
        if made is None and not is_template:
            self._write_local_forms(op, operands)
            made = self.known.get(key)
        if made is not None:
            self.refusals.pop(op, None)
        return made

    def _of_parts(self, op: AtenOp, operands: tuple[Value, ...]) -> tuple[Value, ...] | None:
        """Relate an op that moves or masks, or has operands that are not plain shards."""
        if spec_of(op).product is not None:
            return self._added_product(op, operands)
        if is_positional(op):
            return self._on_part_of_keys(op, operands)
        if op.name == SCALED:
            return self._sum_in_one(op, operands)
        whole = masked(op, operands, self.table, self.axes) if op.name == FILL else None
        if whole is None:
            return moves.moved(op, operands, self.axes)
        for operand in operands:
            self._note_steps(operand)
        return (whole,)

    def _added_product(self, op: AtenOp, operands: tuple[Value, ...]) -> tuple[Value, ...] | None:
        """Relate a product with an addend as two ops: the product and the addition."""
        product = spec_of(op).product
        if product is None or not product.plain or product.addend is None:
            return None
        if op.value("beta") != 1 or op.value("alpha") != 1:
            return None
        factors = [op.operands[index] for index in product.factors]
        plain = stand_in(product.plain, factors, op.results[0])
        (term,) = self.results(plain, tuple([operands[index] for index in product.factors]))
        total = operands[product.addend]
        both = stand_in("aten.add.Tensor", [op.operands[product.addend], *op.results], *op.results)
        return self.results(both, (total, term)) if isinstance(term, Relation) else None

    def _sum_in_one(self, op: AtenOp, operands: tuple[Value, ...]) -> tuple[Value, ...] | None:
        """Relate a sum of exponentials, rescaled from a shard's maximum to the global maximum."""
        match = sum_in_one(op, operands)
        if match is None:
            return None
        self.values.update(match.read)
        self.block(match.ops)
        own, made = [self.values[value] for value in match.results]
        if own != match.own or not isinstance(made, Relation):
            return None
        for operand in operands:
            self._note_steps(operand)
        return (made,)

    def _note_steps(self, value: Value) -> None:
        """Mark a value, and the local values it is computed from, as steps of a local form."""
        if isinstance(value, Local) and value not in self.steps:
            self.steps.add(value)
            for operand in value.operands:
                self._note_steps(operand)

    # Ops on related values

    def _sum(
        self, op: AtenOp, parts: tuple[Relation, ...], signs: tuple[float, float]
    ) -> tuple[Value, ...] | None:
        """Relate a sum of two values, or of two sub-batches' terms of one value."""
        first, second = ring.terms_of_one_sum(parts[0], parts[1], self.axes)
        if first.held == second.held and signs == (1.0, 1.0) and first.held.terms:
            merged = added_terms(first, second, self.axes, "sum")
            if merged is not None:
                return (ring.settled(merged, self.axes),)
        try:
            rule, shape = rule_of_sum(op.name, first.held.shape, second.held.shape)
        except ValueError:
            shapes = f"{first.held.shape} and {second.held.shape}"
            self.refusals[op] = Misfit(f"adds parts of values of shapes {shapes}")
            return None
        applied = self._applied(op, rule, (shape,), parts)
        if isinstance(applied, Misfit):
            self.refusals[op] = applied
            return None
        numbers = (first.held.number, second.held.number)
        number = self.table.sum_of(list(zip(numbers, signs, strict=True)), shape, op)
        return self._held(op, rule, applied, parts, (number,), (shape,), ("sum", signs))

    def _computed(
        self, op: AtenOp, parts: tuple[Relation, ...], key: Key, is_template: bool
    ) -> tuple[Value, ...] | None:
        """Relate an op to the global op that it computes on shards; None if there is none."""
        if draws(op):
            self.refusals[op] = Misfit("draws numbers of its own on each rank")
            return None
        numbers = tuple([part.held.number for part in parts])
        forms = self.table.forms.get((op.name, numbers), ())
        readings = (self._as_form(op, form, parts, key, is_template) for form in forms)
        made = next(filter(None, readings), None)
        if made is not None and op.name == FULL:
            also = [value for reading in readings if reading for value in reading]
            # A first sub-batch's position is a constant, too.
            self.others[made[0]] = [*also, *(moves.moved(op, (), self.axes) or ())]
        if made is not None:
            return made
        reduction = spec_of(op).merge
        if reduction is None or (reduction == "sum" and op.value("alpha") != 1):
            return None
        return merged_terms(parts, self.axes, reduction)

    def _as_form(
        self, op: AtenOp, form: OpForm, parts: tuple[Relation, ...], key: Key, is_template: bool
    ) -> tuple[Value, ...] | None:
        shapes = tuple([shape_of(result) for result in form.op.results])
        if list(map(len, shapes)) != [len(shape_of(result)) for result in op.results]:
            return None
        applied = self._applied(op, form.rule, shapes, parts)
        if isinstance(applied, Applied):
            applied = problem_of_padding(form.op, form.rule, applied.cuts, parts) or applied
        if isinstance(applied, Misfit):
            self.refusals.setdefault(op, applied)
            return None
        if form.rule.localize is not None and any(applied.cuts):
            if is_template:
                return None
            self._write(form, parts, applied)
            made = self.known.get(key)
            if made is None:
                self.refusals[op] = Misfit("has other arguments than its shards call for")
            return made
        kinds = [dtype_kind_of(result) for result in form.op.results]
        if form.arguments != key[1] or kinds != [kind for _, kind in key[3]]:
            self.refusals.setdefault(op, Misfit(other_arguments(op, form)))
            return None
        return self._held(op, form.rule, applied, parts, form.results, shapes, (form.results,))

    def _on_part_of_keys(self, op: AtenOp, operands: tuple[Value, ...]) -> tuple[Value, ...] | None:
        """Relate an attention on one block of keys to an attention of the global program."""
        for cut in attention.on_part_of_keys(op, operands, self.table.known, self.table):
            form, rule = cut.form, cut.form.rule
            shapes = tuple([shape_of(result) for result in form.op.results])
            shardings = tuple([part.held.sharding for part in cut.parts])
            hints = (None,) * len(shapes)
            applied = apply_rule(rule, shardings, shapes, None, hints, self.axes.sized)
            if isinstance(applied, Misfit) or uneven_factors(rule, applied.cuts):
                continue
            results = form.results
            wholes = self._held(form.op, rule, applied, cut.parts, results, shapes, (results,))
            if wholes is None:
                continue
            split = (results, cut.placement), tuple([family_of(p.held) for p in cut.parts])
            made = attention.of_part(cut, wholes, op, self._split(split))
            if made is not None:
                return made
        return None

    def _applied(
        self, op: Operation, rule: Rule, whole: tuple[Shape, ...], parts: tuple[Relation, ...]
    ) -> Applied | Misfit:
        local = tuple([shape_of(result) for result in op.results])
        return apply_rule(
            rule,
            tuple([part.held.sharding for part in parts]),
            whole,
            local,
            self._hints(op),
            self.axes.sized,
        )

    def _hints(self, op: Operation) -> tuple[Sharding | None, ...]:
        attributes = sharding_attrs_of(op)
        if attributes is None:
            return (None,) * len(op.results)
        try:
            pairs = zip(attributes, op.results, strict=True)
            return tuple([a.on_local(shape_of(r), self.axes.mesh) for a, r in pairs])
        except ValueError:
            return (None,) * len(op.results)

    def _held(
        self,
        op: AtenOp,
        rule: Rule,
        applied: Applied,
        parts: tuple[Relation, ...],
        numbers: Sequence[int],
        shapes: Sequence[Shape],
        what: object,
        at: Coordinates = (),
    ) -> tuple[Value, ...] | None:
        """Relate an op's results by an applied rule. at: sub-batches of an op without operands."""
        together = united(parts) if parts else at
        if together is None:
            self.refusals[op] = Misfit("reads values of different sub-batches")
            return None
        relations: list[Value] = []
        fills = zeros_after(op, rule, applied.cuts, parts)
        for number, shape, sharding, fill in zip(
            numbers, shapes, applied.results, fills, strict=True
        ):
            terms = 0
            if has_terms(sharding):
                terms = self._split((what, tuple([family_of(p.held) for p in parts])))
            own = tuple([item for item in together if item[0] in sharding.axes])
            times = {axis for axis in sharding.axes if axis.startswith(TIMES)}
            assert times == {axis for axis, _ in own}, f"sub-batches of {describe(op)}"
            relations.append(Relation(Held(number, shape, sharding, terms).filled(fill), own))
        return tuple(relations)

    def _split(self, key: object) -> int:
        return self.splits.setdefault(key, len(self.splits) + 1)

    # Local forms

    def _write_local_forms(self, op: AtenOp, operands: tuple[Value, ...]) -> None:
        """Write the local form of each global op that may have `op` as a step.
        Records the relations of the form's results in `known`."""
        if draws(op):
            return
        for form in self.table.localized.get(global_name(op), ()):
            whole = tuple([shape_of(result) for result in form.op.results])
            for parts in candidates(form, operands):
                shardings = tuple([part.held.sharding for part in parts])
                for hints, at in self._goals(op, form):
                    hints = hints if len(hints) == len(whole) else (None,) * len(whole)
                    applied = apply_rule(form.rule, shardings, whole, None, hints, self.axes.sized)
                    if isinstance(applied, Applied) and any(applied.cuts):
                        self._write(form, parts, applied, at)

    def _goals(
        self, op: AtenOp, form: OpForm
    ) -> Iterable[tuple[tuple[Sharding | None, ...], Coordinates]]:
        """Return possible result shardings of a form that has `op` as a step, with sub-batches."""
        if form.operands:
            return [(self._hints(op), ())]
        (size,), (part,) = shape_of(form.op.results[0]), shape_of(op.results[0])
        return [((Sharding((cut,)),), at) for cut, at in plain_cuts(self.axes, size, part)]

    def _write(
        self, form: OpForm, parts: tuple[Relation, ...], applied: Applied, at: Coordinates = ()
    ) -> None:
        """Write a local form, and record the relations of its last ops in `known`."""
        whole = [shape_of(result) for result in form.op.results]
        rule = form.rule
        if problem_of_padding(form.op, rule, applied.cuts, parts) is not None:
            return
        made = self._held(form.op, rule, applied, parts, form.results, whole, (form.results,), at)
        shapes = [v.held.local_shape for v in made or () if isinstance(v, Relation)]
        if made is None or None in shapes:
            return
        cuts, mesh = applied.cuts, self.axes.mesh
        if any(p.axis.startswith(RING) for cut in cuts for p in cut):
            return
        arguments, ops, results = written(form, parts, cuts, cast("list[Shape]", shapes), mesh)
        axes = [axis for op in ops if isinstance(op, dist.DistOp) for axis in op.axes]
        if any(axis.startswith(FREE) for axis in axes):
            return
        values: dict[SSAValue, Value] = dict(zip(arguments, parts, strict=True))
        coordinates = dict(united(parts) or at)
        for op in ops:
            if isinstance(op, dist.ShardIndexOp):
                relations = (rank_position(op.axes, self.axes, coordinates),)
            else:
                operands = tuple([values[value] for value in op.operands])
                relations = self.results(op, operands, is_template=True)
            values.update(zip(op.results, relations, strict=True))
            self.steps.update(relations)
        goals = dict(zip(results, made, strict=True))
        for op in dict.fromkeys(result.owner for result in results):
            assert isinstance(op, Operation)
            key = key_of(op, tuple([values[value] for value in op.operands]))
            self.known[key] = tuple([goals.get(result, values[result]) for result in op.results])


def key_of(op: Operation, operands: tuple[Value, ...]) -> Key:
    """Return the key of an op on operands with these relations."""
    types = tuple([(shape_of(result), dtype_kind_of(result)) for result in op.results])
    name = f"dist.{op.kind()}" if isinstance(op, dist.DistOp) else op.name  # started or not
    return name, arguments_of(op), operands, types


def _has_shape(value: Value, result: SSAValue) -> bool:
    return not isinstance(value, Relation) or value.held.local_shape == shape_of(result)
