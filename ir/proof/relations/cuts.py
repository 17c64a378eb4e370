"""A second implementation of factor rules: derives shardings of results from the operands'."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, ordered, part_size
from shardweave.ir.proof.relations.held import (
    FREE,
    Coordinates,
    Cuts,
    Held,
    ProofAxes,
    Relation,
    Shape,
    is_free,
    reduced_over,
    stands_for,
)
from shardweave.ir.sharding.fit import Misfit
from shardweave.ir.sharding.rules import Rule
from shardweave.ir.sharding.rules.base import Dims


def united(parts: Sequence[Relation]) -> Coordinates | None:
    """Merge the sub-batch coordinates of several values; None if two differ on an axis."""
    sub_batches: dict[str, frozenset[int]] = {}
    for part in parts:
        for axis, coordinates in part.at:
            if sub_batches.setdefault(axis, coordinates) != coordinates:
                return None
    return tuple(sorted(sub_batches.items()))


def family_of(held: Held) -> Hashable:
    """Return a key that is equal for values that may be terms of one sum over sub-batches."""
    return (held.terms,) if held.terms else (held.number, held.sharding)


def added_terms(
    first: Relation, second: Relation, axes: ProofAxes, reduction: str
) -> Relation | None:
    """Add the terms of two sets of sub-batches; the sum is partial if other sub-batches remain.
    None if the terms do not belong together."""
    held, left, right = first.held, dict(first.at), dict(second.at)
    differing = [axis for axis in left if left[axis] != right.get(axis)]
    if first.held != second.held or len(differing) != 1 or held.sharding.reduction != reduction:
        return None
    (axis,) = differing
    held = held.filled(None if reduction == "lse" else held.zeros())
    if axis not in held.sharding.unreduced or axis not in right or left[axis] & right[axis]:
        return None
    both = left[axis] | right[axis]
    rest = tuple([item for item in first.at if item[0] != axis])
    if len(both) == axes.size(axis):
        whole = reduced_over(held, [axis])
        return None if whole is None else Relation(whole, rest)
    return Relation(held, tuple(sorted((*rest, (axis, both)))))


def merged_terms(
    parts: Sequence[Relation], axes: ProofAxes, reduction: str
) -> tuple[Relation, ...] | None:
    """Relate a merge op (`merge_attention`). parts: the operands of its first term, then of the
    second.

    Returns the merged results, partial or complete; None if the rows of one term's operands are
    sharded differently.
    """
    half = len(parts) // 2
    for term in (parts[:half], parts[half:]):
        rows = min((len(part.held.shape) for part in term), default=0)
        alike = {(p.held.terms, p.at, p.held.layout, p.held.sharding.dims[:rows]) for p in term}
        if len(alike) > 1:
            return None
    pairs = zip(parts[:half], parts[half:], strict=True)
    made = [added_terms(first, second, axes, reduction) for first, second in pairs]
    whole = tuple([part for part in made if part is not None])
    return whole if len(whole) == half else None


SizedAxes = tuple[tuple[str, int], ...]
"""All axes in order, with their sizes."""


@dataclass(frozen=True)
class Applied:
    """A rule applied to an op. cuts: the sharding of each factor. results: of each result."""

    cuts: Cuts
    results: tuple[Sharding, ...]


@lru_cache(maxsize=65536)
def apply_rule(
    rule: Rule,
    operands: tuple[Sharding, ...],
    whole: tuple[Shape, ...],
    local: tuple[Shape, ...] | None,
    hints: tuple[Sharding | None, ...],
    axes: SizedAxes,
) -> Applied | Misfit:
    """Derive the shardings of an op's results from its operands' shardings, or return a Misfit.

    whole: the global shapes of the results. local: their local shapes; None accepts any. hints: the
    results' declared shardings, which only choose among correct ones.
    """
    cuts = _cuts(rule, operands)
    if isinstance(cuts, Misfit):
        return cuts
    carried = _carried(rule, operands)
    if isinstance(carried, Misfit):
        return carried
    for index, (dims, hint) in enumerate(zip(rule.results, hints, strict=True)):
        problem = _complete(rule, cuts, dims, None if local is None else local[index], hint)
        if problem is not None:
            return problem
    _name_lost(rule, cuts, hints[0] if hints else None, carried, axes)
    problem = _problem(rule, cuts, carried)
    if problem is not None:
        return problem
    results: list[Sharding] = []
    for index, global_shape in enumerate(whole):
        made = rule.result(index, cuts, carried, [name for name, _ in axes])
        if made is None:
            return Misfit("cannot be computed on shards of these operands")
        expected = made.local_shape(global_shape)
        if local is not None and expected != local[index]:
            return Misfit(f"has results of shape {local[index]}, expected {expected}")
        results.append(made)
    return Applied(tuple(cuts), tuple(results))


def _cuts(rule: Rule, operands: Sequence[Sharding]) -> list[DimSharding] | Misfit:
    """Return the sharding of each factor, or a Misfit if operands disagree on one."""
    read: list[list[DimSharding]] = []
    for index, (dims, sharding) in enumerate(zip(rule.operands, operands, strict=True)):
        own = rule.factors_of(dims, sharding.dims)
        if own is None:
            return Misfit("is sharded in a dim that the op needs unsharded", index)
        read.append(own)
    cuts: list[DimSharding] = [()] * len(rule.factors)
    for factor in range(len(rule.factors)):
        owners = [
            index
            for index, dims in enumerate(rule.operands)
            if any(factor in names for names in dims)
        ]
        if not owners:
            continue
        # What is constant along a factor stands for any cut of it.
        named = [index for index in owners if not _is_free(read[index][factor])]
        cuts[factor] = min((read[index][factor] for index in named or owners), key=_extent)
        for index in owners:
            if not stands_for(read[index][factor], cuts[factor]):
                return Misfit("is not sharded as the other operands are", index)
    whole = rule.completed(cuts)
    if not all(map(stands_for, cuts, whole)):
        return Misfit("has operands that are not sharded in the same groups")
    return whole


def _is_free(cut: DimSharding) -> bool:
    return any(is_free(placement) for placement in cut)


def _extent(cut: DimSharding) -> int:
    """Count the neighbouring indices along which a value with this sharding is constant."""
    return max((int(p.axis.removeprefix(FREE)) for p in cut if is_free(p)), default=0)


def _carried(rule: Rule, operands: Sequence[Sharding]) -> tuple[str, ...] | Misfit:
    """Axes over which the results are unreduced because linear operands are, or a Misfit."""
    linear = [operands[index].unreduced for index in sorted(rule.linear)]
    carried = linear[0] if linear else ()
    for index, sharding in enumerate(operands):
        pending = carried if index in rule.linear else ()
        if sharding.unreduced == pending and (not pending or sharding.reduction == "sum"):
            continue
        if sharding.unreduced:
            over = ", ".join(sharding.unreduced)
            return Misfit(f"is unreduced over {over}: an all_reduce is missing before", index)
        over = ", ".join(pending)
        return Misfit(f"is not unreduced over {over}, but another operand is", index)
    return carried


def _complete(
    rule: Rule, cuts: list[DimSharding], dims: Dims, shape: Shape | None, hint: Sharding | None
) -> Misfit | None:
    """Add to `cuts` placements of the factors that only results have: the hint's, or free ones."""
    read = {factor for operand in rule.operands for names in operand for factor in names}
    named = rule.factors_of(dims, hint.dims) if hint and len(hint.dims) == len(dims) else None
    hinted = named or [()] * len(rule.factors)
    if rule.localize is not None or shape is None:
        for factor, cut in enumerate(hinted):
            is_open = factor not in read and not cuts[factor]
            if is_open or (_is_free(cuts[factor]) and stands_for(cuts[factor], cut)):
                cuts[factor] = cut
        return None
    for names, size in zip(dims, shape, strict=True):
        free = [factor for factor in names if factor not in read and not cuts[factor]]
        whole = prod(rule.factors[factor].size for factor in names)
        known = prod(p.size for factor in names for p in cuts[factor])
        if not free or whole == size * known:
            continue
        ratio, rest = divmod(whole, max(size * known, 1))
        extent = rule.factors[free[0]].size
        if rest and len(names) == 1 and part_size(hinted[free[0]], extent) == size:
            cuts[free[0]] = hinted[free[0]]  # uneven, and constant along any cut
            continue
        if rest or extent % ratio:
            return Misfit(f"has {size} of {whole} elements of a dim, which is no shard")
        cuts[free[0]] = (Placement(f"{FREE}{extent}", ratio, extent // ratio),)
    return None


def _name_lost(
    rule: Rule,
    cuts: list[DimSharding],
    hint: Sharding | None,
    carried: Sequence[str],
    axes: SizedAxes,
) -> None:
    """Replace, in `cuts`, free placements of reduced factors by the hint's unreduced axes. Each
    rank holds an equal share of the sum, so that any axes of the same sizes are correct."""
    used = {p.axis for cut in cuts for p in cut} | set(carried)
    named = () if hint is None else hint.unreduced
    left = [(axis, size) for axis, size in axes if axis in named and axis not in used]
    for factor, cut in enumerate(cuts):
        if _is_kept(rule, factor) or not _is_free(cut):
            continue
        placements = [p for p in cut if not is_free(p)]
        for free in filter(is_free, cut):
            stride, upper = free.stride, free.span
            while left and upper > stride and (upper // stride) % left[0][1] == 0:
                axis, size = left.pop(0)
                upper //= size
                placements.append(Placement(axis, size, upper))
            if upper > stride:
                placements.append(Placement(free.axis, upper // stride, stride))
        cuts[factor] = ordered(placements)


def _problem(rule: Rule, cuts: Sequence[DimSharding], carried: Sequence[str]) -> Misfit | None:
    """Explain why an op's factors cannot be sharded so; None if they can."""
    named = [p.axis for p in rule.placements(cuts) if not is_free(p)]
    twice = sorted({axis for axis in named if named.count(axis) > 1})
    if twice:
        return Misfit(f"has operands that are sharded in different dims over {', '.join(twice)}")
    if set(named) & set(carried):
        return Misfit("is sharded over an axis over which an operand is unreduced")
    for index, cut in enumerate(cuts):
        if not rule.can_cut(index, cut):
            return Misfit("cannot be computed on shards of these operands")
        if _is_free(cut) and not _is_kept(rule, index):
            return Misfit("sums equal values over axes that no sharding names")
    return None


def _is_kept(rule: Rule, factor: int) -> bool:
    return all(any(factor in names for names in dims) for dims in rule.results)
