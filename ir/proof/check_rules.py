"""What an op gives on parts that are cut as a certificate says: one factor rule, applied once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.proof.held import (
    Coordinates,
    Cuts,
    Held,
    ProofAxes,
    Relation,
    Shape,
    has_terms,
    is_free,
    stands_for,
)
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.padding import problem_of_padding, zeros_after
from shardweave.ir.proof.sub_batches import family, united
from shardweave.ir.sharding.rules import Rule


class Unfounded(ProofError):
    """A step of a certificate that does not follow from those before it."""


def require(holds: bool, problem: str) -> None:
    """Raises Unfounded unless something holds."""
    if not holds:
        raise Unfounded(problem)


@dataclass(frozen=True)
class Reading:
    """An op of the global program as a rule reads it. what: tells its results from others'."""

    op: AtenOp
    rule: Rule
    numbers: tuple[int, ...]
    shapes: tuple[Shape, ...]
    what: Hashable


@dataclass
class Splits:
    """The splits of values into terms over sub-batches, which a certificate numbers: one number for
    each, and each for one."""

    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])
    keys: dict[int, Hashable] = field(default_factory=dict[int, Hashable])

    def check(self, key: Hashable, number: int) -> None:
        is_own = self.numbers.setdefault(key, number) == number
        require(
            is_own and number > 0 and self.keys.setdefault(number, key) == key,
            "a split into terms has the number of another one",
        )


def check_rule(
    reading: Reading,
    parts: Sequence[Relation],
    cuts: Cuts,
    claims: Sequence[Relation | None],
    axes: ProofAxes,
    splits: Splits,
    at: Coordinates = (),
) -> None:
    """Check that an op on parts, the factors of which are cut so, gives what is claimed (None: of
    which nothing is claimed). at: the sub-batches of an op without operands. Raises Unfounded."""
    rule = reading.rule
    carried = pending_over(rule, parts)
    _check_cuts(rule, cuts, carried, axes)
    for dims, part in zip(rule.operands, parts, strict=True):
        require(part.held.layout is None, "an operand has moved digits")
        wanted = rule.dims_of(dims, cuts)
        require(
            all(map(stands_for, part.held.sharding.dims, wanted)),
            "an operand is not cut as the op's factors are",
        )
    problem = problem_of_padding(reading.op, rule, cuts, parts)
    require(problem is None, f"an operand {problem and problem.problem}")
    fills = zeros_after(reading.op, rule, cuts, parts)
    together = united(parts) if parts else at
    require(together is not None, "operands are of different sub-batches")
    key = reading.what, tuple([family(part.held) for part in parts])
    for index, claim in enumerate(claims):
        if claim is None:
            continue
        sharding = rule.result(index, cuts, carried, axes.names)
        require(sharding is not None, "a result cannot be computed on shards")
        assert sharding is not None
        made = Held(reading.numbers[index], reading.shapes[index], sharding, claim.held.terms)
        own = tuple([item for item in together or () if item[0] in sharding.axes])
        require(
            claim == Relation(made.filled(fills[index]), own),
            "the result is not what the factor rule gives",
        )
        if has_terms(sharding):
            splits.check(key, claim.held.terms)
        else:
            require(not claim.held.terms, "a value that is no term is numbered as one")


def pending_over(rule: Rule, parts: Sequence[Relation]) -> tuple[str, ...]:
    """The axes over which all operands that the op is linear in are terms; no other operand is."""
    shardings = [part.held.sharding for part in parts]
    pending = [shardings[index].unreduced for index in sorted(rule.linear)]
    carried = pending[0] if pending else ()
    for index, sharding in enumerate(shardings):
        wanted = carried if index in rule.linear else ()
        require(sharding.unreduced == wanted, "an operand is pending where the op is not linear")
        require(not wanted or sharding.reduction == "sum", "a maximum is pending")
    return carried


def _check_cuts(rule: Rule, cuts: Cuts, carried: Sequence[str], axes: ProofAxes) -> None:
    require(len(cuts) == len(rule.factors), "the cuts are not those of the op's factors")
    named = [p for cut in cuts for p in cut if not is_free(p)]
    names = [*carried, *(p.axis for p in named)]
    require(len(set(names)) == len(names), "an axis is used twice")
    require(all(p.size == axes.size(p.axis) for p in named), "an axis has another size")
    kept = [all(any(i in own for own in dims) for dims in rule.results) for i in range(len(cuts))]
    for index, cut in enumerate(cuts):
        require(rule.can_cut(index, cut), "a factor cannot be cut so")
        require(kept[index] or not any(map(is_free, cut)), "a sum is over axes that nothing names")
