"""Checking a certificate: does each claimed relation follow from those before it by its one step?

The proof searches for relations; here each is given, with the op, the cuts and the parts that it
follows from, so that a step is a comparison. Of the proof's own code the check uses what a
relation is and what gathering, reducing and padding do to it, and none that searches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from xdsl.dialects import func
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import arguments_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import is_staged
from shardweave.ir.proof.attention import merged, of_part, on_part_of_keys
from shardweave.ir.proof.check_forms import check_form
from shardweave.ir.proof.check_moves import check_collective, check_move
from shardweave.ir.proof.check_rules import Reading, Splits, check_rule, require
from shardweave.ir.proof.claims import Json, read_at, read_claim, read_cuts
from shardweave.ir.proof.held import (
    SUB_BATCH,
    Coordinates,
    Cuts,
    Local,
    ProofAxes,
    Relation,
    Value,
)
from shardweave.ir.proof.local_forms import GLOBAL_NAMES, OpForm
from shardweave.ir.proof.local_maxima import sum_in_one
from shardweave.ir.proof.masks import masked
from shardweave.ir.proof.model import ModelExpressions
from shardweave.ir.proof.ops import (
    MERGES,
    ProofError,
    check_order,
    draws,
    is_cast,
    kind_of,
    named,
    rule_of_sum,
    signs_of,
)
from shardweave.ir.proof.padding import uneven_factors
from shardweave.ir.proof.positions import rank_position
from shardweave.ir.proof.signature import argument_of, check_signature, is_declared
from shardweave.ir.proof.stages import axes_of_stages, relate_stages
from shardweave.ir.proof.sub_batches import added_terms, family

VERSION = 2
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)


@dataclass(frozen=True)
class Checked:
    """What a check showed. num_related: of the values of the local program, those of which a
    relation is claimed; the others are steps of local forms. has_pieces: whether the proof's own
    equations of pieces and of heads of keys are taken as they are."""

    num_values: int
    num_related: int
    has_pieces: bool

    def __str__(self) -> str:
        how = ", by the proof's own equations of pieces and heads" if self.has_pieces else ""
        return (
            f"checked: {self.num_related} relations of {self.num_values} values follow from each "
            f"other{how}, and the results are those of the program that was proved."
        )


def check_certificate(certificate: str | Json, local: Program, *, against: Program) -> Checked:
    """Check the certificate of a proof that a local program computes a global one, in one pass.

    certificate: what `Proof.certificate` gives, or its text, for the local program and the global
    one that it was proved against. Raises ProofError for a certificate of other programs, and names
    the first op whose claimed relation does not follow.
    """
    try:
        given = json.loads(certificate) if isinstance(certificate, str) else certificate
        check = _opened(given, local, against)
    except MALFORMED as error:
        if isinstance(error, ProofError):
            raise
        raise ProofError(f"this is no certificate of a proof: {error!r}") from error
    check.program(local, against)
    values = list(check.values.values())
    num_related = sum(not isinstance(value, Local) for value in values)
    return Checked(len(values), num_related, check.model.pieces is not None)


def _opened(given: Json, local: Program, against: Program) -> Check:
    if given["version"] != VERSION:
        raise ProofError(f"the certificate is of version {given['version']}, expected {VERSION}.")
    for name, program in (("local", local), ("against", against)):
        if given[name] != program.digest():
            raise ProofError(
                f"the certificate is of another program ({name}); prove this one, and check that."
            )
    check_signature(local, against)
    axes = axes_of_stages(local) if is_staged(local) else ProofAxes(local.mesh or Mesh())
    for name, size in given["sub_batches"].items():
        require(name.startswith(SUB_BATCH) and int(size) > 0, f"'{name}' is no sub-batch")
        axes.sub_batches[name] = int(size)
    model = ModelExpressions.of(against, has_pieces=bool(given["pieces"]))
    for expression in given["expressions"]:
        model.defined(expression)
    claims = [read_claim(claim) for claim in given["claims"]]
    for claim in claims:
        if isinstance(claim, Relation):
            _check_claim(claim, axes, model)
    cuts = [read_cuts(cuts) for cuts in given["cuts"]]
    return Check(model, axes, claims, cuts, iter(given["steps"]))


def _unfit(giver: str, reader: str, slot: Slot, given: SSAValue) -> str:
    return f"@{reader} reads {slot.kind} '{slot.name}', which what @{giver} gives is not."


def _check_claim(claim: Relation, axes: ProofAxes, model: ModelExpressions) -> None:
    """Raises Unfounded for a relation that says nothing."""
    held, times = claim.held, {a for a in claim.held.sharding.axes if a.startswith(SUB_BATCH)}
    require(0 <= held.number < len(model.shapes), "there is no such expression")
    require(held.shape == model.shapes[held.number], "an expression has another shape")
    require(times == {axis for axis, _ in claim.at}, "a sub-batch is not said")
    for axis, which in claim.at:
        require(bool(which) and max(which) < axes.size(axis), "there is no such sub-batch")


@dataclass
class Check:
    """The relations that have been checked. steps: those that are left. values: what is claimed of
    each value (None: nothing); others: what else, of constants. sources: of a value that is another
    one, that. links: of what a function receives of another one, the value that it comes of."""

    model: ModelExpressions
    axes: ProofAxes
    claims: Sequence[Value | None]
    cuts: Sequence[Cuts]
    steps: Iterator[Json]
    values: dict[SSAValue, Value] = field(default_factory=dict[SSAValue, "Value"])
    others: dict[SSAValue, list[Value]] = field(default_factory=dict[SSAValue, list["Value"]])
    links: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    sources: dict[SSAValue, SSAValue] = field(default_factory=dict[SSAValue, SSAValue])
    splits: Splits = field(default_factory=Splits)
    in_flight: set[SSAValue] = field(default_factory=set[SSAValue])

    def program(self, local: Program, against: Program) -> None:
        """Check the steps of all ops, in order, and that what is returned is what the global
        program returns, as it is declared."""
        if is_staged(local):
            results = relate_stages(local, self.model, self, _unfit)
        else:
            for slot in local.arguments:
                self.values[slot.value] = argument_of(self.model, local, slot)
            self.block(local.function.body.block.ops)
            results = [(local, slot) for slot in local.results]
        if next(self.steps, None) is not None:
            raise ProofError("the certificate has more steps than the program has ops.")
        wanted = {(s.kind, s.name): self.model.values[s.value] for s in against.results}
        for part, slot in results:
            self._result(slot, part, wanted[slot.kind, slot.name])

    def _result(self, slot: Slot, part: Program, number: int) -> None:
        value, declared = self.values[slot.value], part.sharding_of_slot(slot)
        if (
            not isinstance(value, Relation)
            or value.held.number != number
            or value.held.layout is not None
            or value.at
            or not is_declared(value.held.sharding, declared)
        ):
            raise ProofError(f"{slot.kind} '{slot.name}' is not claimed to be the model's.")

    def block(self, ops: Iterable[Operation]) -> None:
        """Check the steps of some ops, in order."""
        for op in ops:
            check_order(op, self.values, self.in_flight)
            if isinstance(op, func.ReturnOp):
                return
            if isinstance(op, FusedOp):
                self._alias(op.block.args, op.operands)
                self.block(op.fused_ops)
                self._alias(op.results, op.yielded)
                continue
            if isinstance(op, dist.SendOp):
                continue
            try:
                self._step(op, next(self.steps, None))
            except MALFORMED as error:
                raise ProofError(f"{named(op)}: its relation does not follow: {error}.") from error

    def _alias(self, values: Sequence[SSAValue], others: Sequence[SSAValue]) -> None:
        for value, other in zip(values, others, strict=True):
            self.values[value], self.sources[value] = self.values[other], other
            if other in self.others:
                self.others[value] = self.others[other]

    def _step(self, op: Operation, step: Json) -> None:
        if step["by"] == "operand":
            require(is_cast(op) or isinstance(op, dist.WaitOp), "it is another value")
            self._alias(op.results, op.operands)
        elif step["by"] == "link":
            require(isinstance(op, dist.RecvOp), "it receives nothing")
            self._alias(op.results, [self.links[op.results[0]]])
        else:
            self.values.update(zip(op.results, self._claimed(op, step), strict=True))
            others = [self._claimed(op, one) for one in step.get("others", [])]
            if others:
                self.others[op.results[0]] = [claim for (claim,) in others]

    def _claimed(self, op: Operation, step: Json) -> list[Value]:
        """What a step claims of an op's results, once it has been checked."""
        if step["by"] == "itself":
            return [self._own(op, index) for index in range(len(op.results))]
        gives = enumerate(step["gives"])
        claims = [self._own(op, at) if n is None else self._claim(n) for at, n in gives]
        require(len(claims) == len(op.results), "it has another number of results")
        for claim, result in zip(claims, op.results, strict=True):
            if isinstance(claim, Relation):
                require(claim.held.local_shape == shape_of(result), "it has another shape")
        if isinstance(op, dist.DistOp):
            self._check_dist(op, step, claims)
        else:
            assert isinstance(op, AtenOp)
            CHECKS[step["by"]](self, op, step, claims)
        return claims

    def _own(self, op: Operation, index: int) -> Local:
        """What an op gives of which nothing is claimed: that it computes it."""
        operands = tuple([self.values[value] for value in op.operands])
        types = tuple([(shape_of(result), kind_of(result)) for result in op.results])
        return Local(op.name, arguments_of(op), operands, types, index)

    def _claim(self, number: int) -> Value:
        claim = self.claims[number] if 0 <= number < len(self.claims) else None
        require(claim is not None, "there is no such claim")
        assert claim is not None
        return claim

    def _operands(self, op: Operation, step: Json) -> list[Value]:
        """What is claimed of an op's operands; of a constant, the one that the step reads."""
        reads = step.get("reads")
        if reads is None:
            return [self.values[value] for value in op.operands]
        pairs = zip(op.operands, reads, strict=True)
        return [self.claims_of(value)[index] for value, index in pairs]

    def source_of(self, value: SSAValue) -> SSAValue:
        """The value that one is by another name, in functions before too."""
        while True:
            if value in self.sources:
                value = self.sources[value]
            elif value in self.links and isinstance(self.values[value], Local):
                value = self.links[value]  # nothing is claimed: it is what was given
            else:
                return value

    def claims_of(self, value: SSAValue) -> list[Value]:
        """All that is claimed of a value."""
        return [self.values[value], *self.others.get(value, [])]

    def _parts(self, op: Operation, step: Json) -> list[Relation]:
        parts = [value for value in self._operands(op, step) if isinstance(value, Relation)]
        require(len(parts) == len(op.operands), "an operand relates to nothing")
        return parts

    def _check_dist(self, op: dist.DistOp, step: Json, claims: Sequence[Value]) -> None:
        require(step["by"] == "move", "a collective moves values")
        if isinstance(op, dist.ShardIndexOp):
            require(claims[0] == rank_position(op.axes, self.axes, {}), "is another position")
            return
        for value, claim in zip(self._operands(op, step), claims, strict=True):
            if not isinstance(claim, Local):
                check_collective(op, value, claim, self.axes)

    def move(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """An op that moves what it reads."""
        (claim,) = claims
        check_move(op, self._operands(op, step), claim, self.axes)

    def rule(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """An op of the global program, on parts that its factor rule allows."""
        form, cuts, parts = self._form(step), self._cuts(step), self._parts(op, step)
        kinds = [list(map(kind_of, one.results)) for one in (op, form.op)]
        require(op.name == form.op.name and kinds[0] == kinds[1], "it is another op")
        require(arguments_of(op) == arguments_of(form.op), "it has other arguments")
        require(not draws(op), "it draws numbers of its own")
        require(form.rule.localize is None or not any(cuts), "its local form is another one")
        self._read(form, parts, cuts, claims, read_at(step.get("at", [])))

    def _cuts(self, step: Json) -> Cuts:
        number: int = step["cuts"]
        return self.cuts[number]

    def _form(self, step: Json) -> OpForm:
        number: int = step["op"]
        require(0 <= number < len(self.model.ops), "there is no such op")
        return self.model.ops[number]

    def _read(
        self,
        form: OpForm,
        parts: Sequence[Relation],
        cuts: Cuts,
        claims: Sequence[Value | None],
        at: Coordinates,
    ) -> None:
        numbers = tuple([part.held.number for part in parts])
        require(numbers == form.operands, "it reads other values")
        shapes = tuple([shape_of(result) for result in form.op.results])
        reading = Reading(form.op, form.rule, form.results, shapes, (form.results,))
        check_rule(reading, parts, cuts, _relations(claims), self.axes, self.splits, at)

    def form(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """The last op of the local form of one of the global program."""
        form, cuts, places = self._form(step), self._cuts(step), step["places"]
        parts = [self._claim(number) for number in step["parts"]]
        related = [part for part in parts if isinstance(part, Relation)]
        require(form.rule.localize is not None and not draws(form.op), "it has no local form")
        by_place: list[Value | None] = [None] * len(form.results)
        for place, claim in zip(places, claims, strict=True):
            require((place is None) == isinstance(claim, Local), "it is no result of the form")
            if place is not None:
                by_place[place] = claim
        at = read_at(step.get("at", []))
        self._read(form, related, cuts, by_place, at)
        check_form(op, form, related, cuts, places, self.claims_of, self.source_of, self.axes, at)

    def sum(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """A sum of values, whatever their terms are."""
        signs, parts = signs_of(op), self._parts(op, step)
        require(signs is not None, "it is no sum")
        assert signs is not None
        first, second = [part.held.shape for part in parts]
        rule, shape = rule_of_sum(op.name, first, second)
        numbers = [part.held.number for part in parts]
        number = self.model.sum_of(list(zip(numbers, signs, strict=True)), shape)
        reading = Reading(op, rule, (number,), (shape,), ("sum", signs))
        cuts = self._cuts(step)
        check_rule(reading, parts, cuts, _relations(claims), self.axes, self.splits)

    def merge(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """The terms of two groups of sub-batches."""
        reduction, parts = MERGES.get(op.name), self._parts(op, step)
        (claim,) = _relations(claims)
        is_plain = reduction == "max" or (reduction == "sum" and op.value("alpha") == 1)
        require(is_plain, "it merges no terms")
        assert reduction is not None
        assert claim is not None
        first, second = parts
        merged = added_terms(first, second, self.axes, reduction)
        require(merged == claim, "these are no terms of one value")

    def keys(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """Attention on a block of its keys, as a part of that on all."""
        form, cuts, operands = self._form(step), self._cuts(step), self._operands(op, step)
        require(op.name in GLOBAL_NAMES, "it is no attention on some of its keys")
        require(not uneven_factors(form.rule, cuts), "a part of the keys has padding")
        part = next(on_part_of_keys(op, operands, lambda name, numbers: [form], self.model), None)
        require(part is not None and form.op.name == GLOBAL_NAMES[op.name], "it reads other values")
        assert part is not None
        wholes = [self._claim(number) for number in step["wholes"]]
        self._read(form, part.parts, cuts, wholes, ())
        terms = max([c.held.terms for c in claims if isinstance(c, Relation)], default=0)
        if terms:
            families = tuple([family(one.held) for one in part.parts])
            self.splits.check(((form.results, part.placement), families), terms)
        require(of_part(part, wholes, op, terms) == tuple(claims), "it is another part")

    def merged(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """Two parts of an attention, put together by their log-sum-exp."""
        require([merged(op, self._operands(op, step))] == claims, "these parts do not merge so")

    def in_one(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """A sum of exponentials by the maximum of a shard, as the one that it is in one piece."""
        found = sum_in_one(op, self._operands(op, step))
        require(found is not None, "it is no sum by the maximum of a shard")
        assert found is not None
        within = replace(self, values=dict(found.read), steps=iter(step["steps"]))
        within.block(found.ops)
        given = [within.values[value] for value in found.results]
        require(given == [found.own, *claims], "it is another sum")
        require(next(within.steps, None) is None, "it has more steps than ops")

    def mask(self, op: AtenOp, step: Json, claims: Sequence[Value]) -> None:
        """Padding that is filled."""
        require([masked(op, self._operands(op, step), self.model)] == claims, "it fills no padding")


def _relations(claims: Sequence[Value | None]) -> list[Relation | None]:
    related = [claim if isinstance(claim, Relation) else None for claim in claims]
    require(related == list(claims), "it is no part of a value")
    return related


CHECKS = {"rule": Check.rule, "form": Check.form, "sum": Check.sum, "merge": Check.merge,
          "move": Check.move, "keys": Check.keys, "merged": Check.merged, "mask": Check.mask,
          "in one": Check.in_one}  # fmt: skip
"""How a step is checked, by what it follows from."""
