"""Building a rule for ops of any rank: each dim of a shape as a factor of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from shardweave.ir.aten import AtenOp
from shardweave.ir.sharding.rules.base import Dims, Factor, Localize, Rule

Names = list[tuple[str, ...]]
"""For each dim of a value the names of its factors, major to minor."""


def passing(
    shape: Sequence[int], whole: Collection[int] = (), prefix: str = "d"
) -> tuple[Names, dict[str, Factor]]:
    """One factor for each dim of a shape, but none for the dims in `whole` or of size 1.

    The factor of dim 2 is named `d2`.
    """
    cut = [d for d, size in enumerate(shape) if size > 1 and d not in whole]
    names: Names = [(f"{prefix}{d}",) if d in cut else () for d in range(len(shape))]
    return names, {f"{prefix}{d}": Factor(shape[d]) for d in cut}


def broadcast(shape: Sequence[int], onto: Sequence[int], names: Names) -> Names:
    """The factors of an operand of `shape` that is broadcast, right-aligned, onto named dims."""
    offset = len(onto) - len(shape)
    return [names[offset + d] if size == onto[offset + d] else () for d, size in enumerate(shape)]


def dim_of(op: AtenOp, rank: int) -> int:
    """The op's `dim` argument, counted from 0."""
    dim: int = op.value("dim")
    return dim % rank


def named_dims(rank: int, dims: int | Iterable[int] | None) -> frozenset[int]:
    """The dims that a `dim` argument names, counted from 0: all of them if None or empty."""
    if isinstance(dims, int):
        dims = [dims]
    return frozenset(d % rank for d in dims or range(rank)) if rank else frozenset()


def named_rule(
    factors: Mapping[str, Factor],
    operands: Sequence[Names],
    results: Sequence[Names],
    *,
    linear: Iterable[int] = (),
    localize: Localize | None = None,
) -> Rule:
    """The rule of these dims. Factors keep their order; those that no dim uses are left out."""
    used = {name for dims in (*operands, *results) for names in dims for name in names}
    kept = {name: factor for name, factor in factors.items() if name in used}
    number = {name: index for index, name in enumerate(kept)}

    def numbered(values: Sequence[Names]) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(number[name] for name in names) for names in dims) for dims in values
        )

    return Rule(
        tuple(kept.values()), numbered(operands), numbered(results), frozenset(linear), localize
    )
