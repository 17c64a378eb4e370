"""Parts of rules for ops of any rank: each dim of a shape as a factor of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.mesh.placement import part_size
from shardweave.ir.sharding.rules.base import Factor, Localize, Localizer, Names


def passing(
    shape: Sequence[int], whole: Collection[int] = (), prefix: str = "d"
) -> tuple[Names, dict[str, Factor]]:
    """Make a factor (`d2` for dim 2) for each dim that is not in `whole` and not of size 1."""
    cut = [d for d, size in enumerate(shape) if size > 1 and d not in whole]
    names: Names = [(f"{prefix}{d}",) if d in cut else () for d in range(len(shape))]
    return names, {f"{prefix}{d}": Factor(shape[d]) for d in cut}


def broadcast(shape: Sequence[int], onto: Sequence[int], names: Names) -> Names:
    """Names of the factors of an operand of `shape` that is broadcast to shape `onto`, whose dims
    have the factors `names`. Its broadcast dims have none."""
    offset = len(onto) - len(shape)
    return [names[offset + d] if size == onto[offset + d] else () for d, size in enumerate(shape)]


def dim_of(op: AtenOp, rank: int) -> int:
    """The op's `dim` argument, as a non-negative number."""
    dim: int = op.value("dim")
    return dim % rank


def named_dims(rank: int, dims: int | Iterable[int] | None) -> frozenset[int]:
    """Non-negative dims of a `dim` argument; None or an empty list means all dims."""
    if isinstance(dims, int):
        dims = [dims]
    return frozenset(d % rank for d in dims or range(rank)) if rank else frozenset()


@cache
def dividing(argument: str, factor: int) -> Localize:
    """Make a `localize` that scales an argument from the factor's size to its shard's size."""

    def localize(local: Localizer) -> Sequence[SSAValue]:
        size = local.sizes[factor]
        part = part_size(local.placements[factor], size)
        return local.clone(**{argument: local.op.value(argument) * part // size})

    return localize
