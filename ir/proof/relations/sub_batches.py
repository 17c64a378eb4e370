"""What values of several sub-batches are together, and what the terms of some add up to."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from shardweave.ir.proof.relations.held import Coordinates, Held, ProofAxes, Relation, reduced_over


def united(parts: Sequence[Relation]) -> Coordinates | None:
    """The sub-batches that values are of together; None if they are of different ones."""
    found: dict[str, frozenset[int]] = {}
    for part in parts:
        for axis, coordinates in part.at:
            if found.setdefault(axis, coordinates) != coordinates:
                return None
    return tuple(sorted(found.items()))


def family_of(held: Held) -> Hashable:
    """What is the same of all sub-batches' terms of a value."""
    return (held.terms,) if held.terms else (held.number, held.sharding)


def added_terms(
    first: Relation, second: Relation, axes: ProofAxes, reduction: str
) -> Relation | None:
    """The sum (or maximum) of two sub-batches' terms of one value: whole once it has them all."""
    held, left, right = first.held, dict(first.at), dict(second.at)
    differing = [axis for axis in left if left[axis] != right.get(axis)]
    if first.held != second.held or len(differing) != 1 or held.sharding.reduction != reduction:
        return None
    (axis,) = differing
    held = held.filled(held.zeros())
    if axis not in held.sharding.unreduced or axis not in right or left[axis] & right[axis]:
        return None
    both = left[axis] | right[axis]
    rest = tuple([item for item in first.at if item[0] != axis])
    if len(both) == axes.size(axis):
        whole = reduced_over(held, [axis])
        return None if whole is None else Relation(whole, rest)
    return Relation(held, tuple(sorted((*rest, (axis, both)))))
