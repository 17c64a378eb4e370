"""Writing what a proof found as a certificate, which `check.py` checks without searching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

from xdsl.dialects import func
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import is_staged
from shardweave.ir.proof.check import VERSION
from shardweave.ir.proof.claims import Json, written_at, written_claim, written_cuts
from shardweave.ir.proof.held import AttentionPart, Cuts, Local, Relation, Row, Value
from shardweave.ir.proof.local_forms import OpForm
from shardweave.ir.proof.model import ModelExpressions
from shardweave.ir.proof.ops import MERGES, ProofError, is_cast, named
from shardweave.ir.proof.padding import FILL
from shardweave.ir.proof.reasons import Reason, key_of
from shardweave.ir.proof.runs import RunOrder
from shardweave.ir.proof.walk import Walk


def certificate_of(
    walk: Walk, read: Mapping[SSAValue, int], local: Program, against: Program
) -> Json:
    """The certificate of a local program, all values of which have been walked. read: the proof's
    numbers of the global program's values.

    Raises ProofError for what a certificate cannot say.
    """
    try:
        return _certificate(walk, read, local, against, has_pieces=False)
    except _Unsaid:
        return _certificate(walk, read, local, against, has_pieces=True)


class _Unsaid(ProofError):
    """What no certificate can say, or none without equations of pieces."""


def _certificate(
    walk: Walk,
    read: Mapping[SSAValue, int],
    local: Program,
    against: Program,
    *,
    has_pieces: bool,
) -> Json:
    writer = CertificateWriter(walk, ModelExpressions.of(against, has_pieces=has_pieces))
    for value, number in writer.model.values.items():
        writer.numbers.setdefault(read[value], number)
    parts = RunOrder.of(local).in_order() if is_staged(local) else [local]
    steps = [step for part in parts for step in writer.steps(part.function.body.block.ops)]
    return {
        "version": VERSION,
        "local": local.digest(),
        "against": against.digest(),
        "sub_batches": walk.axes.sub_batches,
        "pieces": has_pieces,
        "expressions": writer.expressions,
        "claims": writer.claims,
        "cuts": writer.cuts,
        "steps": steps,
    }


@dataclass
class CertificateWriter:
    """numbers: of the proof's expressions those of the model that the check reads. claims, cuts:
    what is claimed and how factors are cut, each once."""

    walk: Walk
    model: ModelExpressions
    numbers: dict[int, int] = field(default_factory=dict[int, int])
    expressions: list[Json] = field(default_factory=list[Json])
    claims: list[Json] = field(default_factory=list[Json])
    cuts: list[Json] = field(default_factory=list[Json])
    _claims: dict[Value, int] = field(default_factory=dict[Value, int])
    _cuts: dict[Cuts, int] = field(default_factory=dict[Cuts, int])

    def steps(self, ops: Iterable[Operation]) -> Iterator[Json]:
        """The step of each op, of ops in regions too."""
        for op in ops:
            if isinstance(op, func.ReturnOp):
                return
            if isinstance(op, FusedOp):
                yield from self.steps(op.fused_ops)
            elif isinstance(op, dist.RecvOp):
                yield {"by": "link"}
            elif not isinstance(op, dist.SendOp):
                yield self._step(op)

    def _step(self, op: Operation) -> Json:
        values = self.walk.values
        operands = tuple([values[value] for value in op.operands])
        results = tuple([values[value] for value in op.results])
        if (is_cast(op) or isinstance(op, dist.WaitOp)) and operands == results:
            return {"by": "operand"}
        others = self.walk.others.get(results[0], []) if results else []
        made = self._reason(op, operands, results)
        if others:
            made["others"] = [self._reason(op, operands, (value,)) for value in others]
        return made

    def _reason(
        self, op: Operation, operands: tuple[Value, ...], results: tuple[Value, ...]
    ) -> Json:
        """Why an op's results are what they are."""
        if all(isinstance(value, Local) for value in results):
            return {"by": "itself"}
        gives = [None if isinstance(value, Local) else self.claim(value) for value in results]
        key = key_of(op, operands)
        read = self.walk.readings.get(key, operands)
        made: dict[str, Json] = {"by": _way(op, read), "gives": gives}
        if read != operands:
            pairs = zip(operands, read, strict=True)
            made["reads"] = [self._alternative(value, one) for value, one in pairs]
        reason = self.walk.reasons.get(key, {}).get(results)
        return made if reason is None else made | self._by(reason)

    def _by(self, reason: Reason) -> dict[str, Json]:
        """What a step says of its reason."""
        if reason.ops:
            return {"by": "in one", "steps": list(self.steps(reason.ops))}
        made: dict[str, Json] = {"by": "sum", "cuts": self.cut(reason.cuts)}
        if reason.form is not None:
            made |= {"by": "rule", "op": self.form(reason.form)}
        if reason.wholes is not None:
            made |= {"by": "keys", "wholes": [self.claim(whole) for whole in reason.wholes]}
        elif reason.written is not None:
            parts = [self.claim(part) for part in reason.parts]
            made |= {"by": "form", "places": list(reason.written), "parts": parts}
        if reason.at:
            made["at"] = written_at(reason.at)
        return made

    def _alternative(self, value: Value, read: Value) -> int:
        """Which of the relations of a constant is read."""
        return [value, *self.walk.others.get(value, [])].index(read)

    # What is written once

    def number(self, number: int) -> int:
        """The model's number of an expression, which is defined if the program does not have it."""
        if number not in self.numbers:
            self.numbers[number] = self._defined(number)
        return self.numbers[number]

    def _defined(self, number: int) -> int:
        table = self.walk.table
        terms = table.sums.get(number)
        for form in self.forms.get(number, ()):
            place = self._place(form)
            if place is not None:
                return self.model.ops[place].results[form.results.index(number)]
        if terms is None:
            raise _Unsaid(f"no certificate can say yet what {table.describe(number)} is.")
        own = [[self.number(term), factor] for term, factor in terms.items()]
        self.expressions.append({"sum": own, "shape": list(table.shapes[number])})
        return self.model.defined(self.expressions[-1])

    def form(self, form: OpForm) -> int:
        """The place of an op among those of the model."""
        place = self._place(form)
        if place is None:
            raise _Unsaid(f"no certificate can say yet where {named(form.op)} is from.")
        return place

    def _place(self, form: OpForm) -> int | None:
        key = self.model.key(form.op, [self.number(number) for number in form.operands])
        return self.model.places.get(key)

    @cached_property
    def forms(self) -> dict[int, list[OpForm]]:
        """The ops that give each expression."""
        found: dict[int, list[OpForm]] = {}
        for forms in self.walk.table.forms.values():
            for form in forms:
                for number in form.results:
                    found.setdefault(number, []).append(form)
        return found

    def cut(self, cuts: Cuts) -> int:
        if cuts not in self._cuts:
            self._cuts[cuts] = len(self.cuts)
            self.cuts.append(written_cuts(cuts))
        return self._cuts[cuts]

    def claim(self, value: Value) -> int:
        if value not in self._claims:
            self._claims[value] = len(self.claims)
            self.claims.append(written_claim(self._numbered(value)))
        return self._claims[value]

    def _numbered(self, value: Value) -> Value:
        """A value with the numbers of the model."""
        if isinstance(value, Relation):
            return Relation(replace(value.held, number=self.number(value.held.number)), value.at)
        if isinstance(value, Row):
            pieces = tuple([(self._numbered(piece), size) for piece, size in value.pieces])
            return Row(value.dim, pieces)
        if isinstance(value, AttentionPart):
            whole = cast("Relation", self._numbered(value.whole))
            results = tuple([self.number(number) for number in value.results])
            return replace(value, whole=whole, results=results)
        return value


def _way(op: Operation, operands: Sequence[Value]) -> str:
    """How values come to relate that no rule relates."""
    if op.name == FILL:
        return "mask"
    if operands and isinstance(operands[0], AttentionPart) and not isinstance(op, dist.DistOp):
        return "merged"
    is_terms = [isinstance(value, Relation) and value.held.terms for value in operands]
    return "merge" if op.name in MERGES and all(is_terms) else "move"
