"""Factor rules: relations between the dims of an op's operands and results.

A rule names the op's *factors* as an einsum does. mm is `i k, k j -> i j`; a view splits and
merges factors; a dim that belongs to no factor must be whole on every device. Sharding an op
means giving mesh axes to its factors: every operand and result sharding follows, forward and
backward, for data, tensor, sequence and batch splitting alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.placement import (
    DimSharding,
    Placement,
    Reduction,
    Sharding,
    fits,
    is_contiguous,
    is_even,
    ordered,
    part_size,
)
from shardweave.ir.sharding.localizer import Localizer

Dims = tuple[tuple[int, ...], ...]
"""For each dim of a value, the indices of its factors, major to minor."""


@dataclass(frozen=True)
class Factor:
    """One independent index of an op, such as i, j or k of a matrix product.

    size: its global size. reduction: how results without the factor combine over its shards ("sum"
    or "max"); None if such a result cannot be computed on shards. contiguous: whether the factor
    can only be sharded contiguously, because the op compares indices along it. whole: whether the
    factor cannot be sharded (the parts of a fused projection, if a slice picks one); it
    has a name only so that other factors of its dim can be sharded. even: whether its shards must
    be of equal size, because padding would make the op fail. reach: number of indices of the
    neighbouring shards, on either side, that a shard's results read or are added to; a shard has at
    least as many. joined: whether results without the factor are complete on each shard, because
    the local form communicates.
    """

    size: int
    reduction: Reduction | None = "sum"
    contiguous: bool = False
    whole: bool = False
    even: bool = False
    reach: int = 0
    joined: bool = False


Localize = Callable[[Localizer], Sequence[SSAValue]]


@dataclass(frozen=True)
class Rule:
    """The factor rule of one op instance.

    operands, results: the dims of each flat operand and each result. linear: the operands in
    which the op is jointly linear, so that unreduced sums in all of them pass through to the
    results. localize: writes the local form where a clone with local types is not enough
    (offsets into a shard, masked lookups); called only when some factor is sharded. groups: triples
    (factor, base, share): an index of `factor` counts a group of `share` indices of `base`, as a
    key head serves a group of query heads. Axes that shard `base` by whole groups also shard
    `factor`; over the other axes of `base` it is replicated, or reduced.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: frozenset[int] = frozenset()
    localize: Localize | None = None
    groups: tuple[tuple[int, int, int], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        rest = self.linear, self.localize, self.groups
        return hash((self.factors, self.operands, self.results, *rest))

    @cached_property
    def uneven_factors(self) -> frozenset[int]:
        """The factors that can be sharded unevenly: `even` is False, and they lead all their dims.
        A minor factor would need padding in the middle of a dim, which no sharding expresses."""
        values = (*self.operands, *self.results)
        minor = {factor for dims in values for names in dims for factor in names[1:]}
        even = {index for index, factor in enumerate(self.factors) if factor.even}
        return frozenset(range(len(self.factors))) - minor - even

    def seat(self, names: Sequence[int], placement: Placement) -> tuple[int, int] | None:
        """Return the factor that a placement of a dim shards, and the stride within it, or None.
        names: the dim's factors. For a factor that counts groups, its base is returned."""
        for factor, size, minor in self._digits(names):
            stride, rest = divmod(placement.stride, minor)
            is_within = (minor * size) % placement.span == 0 or (
                stride < size and factor in self.uneven_factors
            )
            if rest == 0 and is_within and not self.factors[factor].whole:
                bases = [(base, stride * share) for f, base, share in self.groups if f == factor]
                return bases[0] if bases else (factor, stride)
        return None

    def part_of_axis(
        self, names: Sequence[int], placement: Placement, *, groups: bool = False
    ) -> int | None:
        """Split an axis in two parts that can shard factors of a dim; return the minor part's size,
        or None. names: the dim's factors. groups: also allow parts that shard whole groups."""
        for factor, _, minor in self._digits(names):
            shares = [share for _, base, share in self.groups if groups and base == factor]
            for bound in (minor, *(minor * share for share in shares)):
                size, rest = divmod(bound, placement.stride)
                if not rest and 1 < size < placement.size and not placement.size % size:
                    outer = replace(placement, size=placement.size // size, stride=bound)
                    parts = outer, replace(placement, size=size)
                    return size if None not in [self.seat(names, part) for part in parts] else None
        return None

    def seats(
        self, dims: Dims, cut: Sequence[DimSharding]
    ) -> Iterator[tuple[Placement, tuple[int, int] | None]]:
        """Yield each placement in `cut` (the sharding of a value with `dims`) with its `seat`."""
        for names, placements in zip(dims, cut, strict=True):
            for placement in placements:
                yield placement, self.seat(names, placement)

    def factors_of(self, dims: Dims, cut: Sequence[DimSharding]) -> list[DimSharding] | None:
        """Translate placements of dims, `cut`, to placements of factors; None if impossible."""
        cuts: list[DimSharding] = [()] * len(self.factors)
        for placement, seat in self.seats(dims, cut):
            if seat is None:
                return None
            factor, stride = seat
            within = Placement(placement.axis, placement.size, stride)
            cuts[factor] = ordered({*cuts[factor], within})
        return self.completed(cuts)

    def completed(self, cuts: Iterable[DimSharding]) -> list[DimSharding]:
        """Add the placements of factors that count groups, which follow from their bases'."""
        cuts = list(cuts)
        for factor, base, share in self.groups:
            whole = [p for p in cuts[base] if p.stride % share == 0]
            cuts[factor] = tuple([Placement(p.axis, p.size, p.stride // share) for p in whole])
        return cuts

    def placements(self, cuts: Sequence[DimSharding]) -> list[Placement]:
        """List the placements of all factors, without those that follow from others."""
        counted = [factor for factor, _, _ in self.groups]
        return [p for factor, cut in enumerate(cuts) if factor not in counted for p in cut]

    def dims_of(self, dims: Dims, factors: Sequence[DimSharding]) -> tuple[DimSharding, ...]:
        """Translate placements of each factor, `factors`, to placements of each dim in `dims`."""
        return tuple(
            ordered(
                Placement(p.axis, p.size, p.stride * minor)
                for factor, _, minor in self._digits(names)
                for p in factors[factor]
            )
            for names in dims
        )

    def one_cut(self, factor: int, placement: Placement) -> list[DimSharding]:
        """Return placements for all factors: `placement` for `factor`, none for the others."""
        factors = range(len(self.factors))
        return self.completed((placement,) if index == factor else () for index in factors)

    def carry(
        self, source: Dims, goal: Dims, cut: Sequence[DimSharding]
    ) -> tuple[DimSharding, ...] | None:
        """Translate the shardings `cut` of dims `source` to shardings of dims `goal`, which share
        factors with them; None if a sharding cannot be expressed by factors."""
        factors = self.factors_of(source, cut)
        return None if factors is None else self.dims_of(goal, factors)

    def can_cut(self, factor: int, placements: DimSharding) -> bool:
        """True if the limits of a factor allow these placements."""
        limits = self.factors[factor]
        if not placements:
            return True
        if limits.whole or not fits(placements, limits.size):
            return False
        if factor not in self.uneven_factors and not is_even(placements, limits.size):
            return False
        for _, base, share in self.groups:
            # Shards of groups, and shards across groups, which need each group whole.
            crossing = [p for p in placements if p.stride % share and share % p.span]
            if base == factor and crossing and any(p.stride % share == 0 for p in placements):
                return False
        if part_size(placements, limits.size) < limits.reach:
            return False
        return not limits.contiguous or is_contiguous(placements, limits.size)

    def lost(self, dims: Dims, factors: Sequence[DimSharding]) -> list[int]:
        """List the sharded factors whose axes do not all shard a value with `dims`."""
        kept = {p.axis for cut in self.dims_of(dims, factors) for p in cut}
        kept |= {
            p.axis for f, cut in zip(self.factors, factors, strict=True) for p in cut * f.joined
        }
        return [i for i, cut in enumerate(factors) if any(p.axis not in kept for p in cut)]

    def result(
        self,
        index: int,
        factors: Sequence[DimSharding],
        carried: Sequence[str],
        axes: Sequence[str],
    ) -> Sharding | None:
        """The sharding of result `index`, given the placements of factors; None if it cannot be
        computed.

        The result is unreduced over the axes of sharded factors that it lacks, and over `carried`:
        axes over which the operands in `linear` are unreduced sums. axes: the mesh's axes, in
        order.
        """
        placed = self.dims_of(self.results[index], factors)
        kept = {p.axis for cut in placed for p in cut}
        pending: dict[str, Reduction | None] = dict.fromkeys(carried, "sum")
        for factor, cut in zip(self.factors, factors, strict=True):
            kept.update(p.axis for p in cut if factor.joined)
            pending |= {p.axis: factor.reduction for p in cut if p.axis not in kept}
        reductions = set(pending.values())
        if None in reductions or len(reductions) > 1:
            return None
        unreduced = tuple([axis for axis in axes if axis in pending])
        return Sharding(placed, unreduced, "max" if "max" in reductions else "sum")

    def _digits(self, names: Sequence[int]) -> list[tuple[int, int, int]]:
        """List (factor, size, product of the sizes before it) per factor of a dim, minor first."""
        digits: list[tuple[int, int, int]] = []
        minor = 1
        for factor in reversed(names):
            size = self.factors[factor].size
            digits.append((factor, size, minor))
            minor *= size
        return digits

    def problem(
        self, operand_shapes: Sequence[Sequence[int]], result_shapes: Sequence[Sequence[int]]
    ) -> str | None:
        """Explain why the rule does not describe values of these shapes; None if it does."""
        values = zip(
            (*self.operands, *self.results), (*operand_shapes, *result_shapes), strict=True
        )
        for index, (dims, shape) in enumerate(values):
            after = index - len(self.operands)
            what = f"operand {index}" if after < 0 else f"result {after}"
            if len(dims) != len(shape):
                return f"{what} has {len(shape)} dims, the rule gives {len(dims)}"
            for dim, (factors, size) in enumerate(zip(dims, shape, strict=True)):
                product = prod(self.factors[factor].size for factor in factors)
                if factors and product != size:
                    return f"{what}, dim {dim}: factors give {product}, the size is {size}"
        return None


RuleFunction = Callable[[AtenOp], Rule]
RULES: dict[str, RuleFunction] = {}
"""Rule functions by name; `OpSpec.rule` holds such a name."""


def rule(function: RuleFunction) -> RuleFunction:
    """Register a function under its own name, so that records can refer to it."""
    assert function.__name__ not in RULES, f"two rules are called {function.__name__}"
    RULES[function.__name__] = function
    return function


def replicated_rule(op: AtenOp) -> Rule:
    """The rule without factors: operands and results replicated, which is right for every op."""
    operands = tuple(((),) * len(shape_of(v)) for v in op.operands)
    results = tuple(((),) * len(shape_of(v)) for v in op.results)
    return Rule((), operands, results)


Names = list[tuple[str, ...]]
"""For each dim of a value, the names of its factors, major to minor."""


def named_rule(
    factors: Mapping[str, Factor],
    operands: Sequence[Names],
    results: Sequence[Names],
    *,
    linear: Iterable[int] = (),
    localize: Localize | None = None,
    groups: Mapping[str, tuple[str, int]] = {},
) -> Rule:
    """Make a rule from the names of each dim's factors; unused `factors` are dropped.
    groups: base and share of each factor that counts groups (`Rule.groups`)."""
    used = {name for dims in (*operands, *results) for names in dims for name in names}
    kept = {name: factor for name, factor in factors.items() if name in used}
    number = {name: index for index, name in enumerate(kept)}

    def numbered(values: Sequence[Names]) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(number[name] for name in names) for names in dims) for dims in values
        )

    return Rule(
        tuple(kept.values()),
        numbered(operands),
        numbered(results),
        frozenset(linear),
        localize,
        tuple([(number[name], number[base], share) for name, (base, share) in groups.items()]),
    )


class Notation:
    """Builds a rule from einsum-like text, with factor sizes from the op's shapes.

    `Notation(op, "i k, k j -> i j")` lists the flat operands in order. A dim is a factor's name,
    `(a b)` for several factors merged major to minor (all but one need their size in `sizes`), or
    `.` for a dim that cannot be sharded. `...` stands for leading dims that operands and results
    share; it may appear once per value and always means the same dims.
    """

    def __init__(self, op: AtenOp, text: str, sizes: dict[str, int] | None = None) -> None:
        self._sizes = dict(sizes or {})
        left, right = text.split("->")
        texts = [*(left.split(",") if left.strip() else ()), *right.split(",")]
        shapes = [shape_of(value) for value in (*op.operands, *op.results)]
        values = [_named_dims(*pair) for pair in zip(texts, shapes, strict=True)]
        self._operands, self._results = values[: len(op.operands)], values[len(op.operands) :]
        for dims, shape in zip(values, shapes, strict=True):
            for names, size in zip(dims, shape, strict=True):
                unknown = [name for name in names if name not in self._sizes]
                if len(unknown) == 1:
                    known = prod(self._sizes.get(name, 1) for name in names)
                    self._sizes[unknown[0]] = size // known

    @property
    def _names(self) -> list[str]:
        values = (*self._operands, *self._results)
        return list(dict.fromkeys(n for dims in values for names in dims for n in names))

    def number(self, name: str) -> int:
        """The index of a factor in the rule."""
        return self._names.index(name)

    def rule(
        self,
        *,
        linear: Sequence[int] = (),
        localize: Localize | None = None,
        reductions: dict[str, Literal["max"] | None] | None = None,
        contiguous: Sequence[str] = (),
        whole: Sequence[str] = (),
        even: Sequence[str] = (),
        reach: Mapping[str, int] = {},
        joined: Sequence[str] = (),
        groups: Mapping[str, tuple[str, int]] = {},
    ) -> Rule:
        """Build the rule. reductions: each factor's reduction, by default a sum; None: the factor
        cannot be sharded if a result lacks it."""
        factors = {
            n: Factor(
                self._sizes[n],
                (reductions or {}).get(n, "sum"),
                contiguous=n in contiguous,
                whole=n in whole,
                even=n in even,
                reach=reach.get(n, 0),
                joined=n in joined,
            )
            for n in self._names
        }
        dims = self._operands, self._results
        return named_rule(factors, *dims, linear=linear, localize=localize, groups=groups)


def _named_dims(text: str, shape: Sequence[int]) -> Names:
    """Parse the dims of one value, such as `i (a b) .`; `...` becomes one factor per dim."""
    tokens = re.findall(r"\([^)]*\)|\S+", text)
    if "..." in tokens:
        at = tokens.index("...")
        tokens[at : at + 1] = [f"*{n}" for n in range(len(shape) - len(tokens) + 1)]
    return [() if token == "." else tuple(token.strip("()").split()) for token in tokens]
