"""What a factor rule is: how the dims of an op's operands and results relate.

A rule names the op's *factors* as an einsum does. mm is `i k, k j -> i j`; a view splits and
merges factors; a dim that belongs to no factor must be whole on every device. Sharding an op
means giving mesh axes to its factors: every operand and result sharding follows, forward and
backward, for data, tensor, sequence and batch splitting alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from xdsl.ir import SSAValue

from shardweave.ir.aten import AtenOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.placement import (
    DimSharding,
    Placement,
    Reduction,
    Sharding,
    fits,
    is_contiguous,
    ordered,
)
from shardweave.ir.types import shape_of

Dims = tuple[tuple[int, ...], ...]
"""For each dim of a value the factors it is made of, major to minor."""


@dataclass(frozen=True)
class Factor:
    """One independent index of an op.

    size: its global extent. reduction: how results that lack the factor combine over its
    shards ("sum" or "max"); None if such a result cannot be computed on shards. contiguous:
    whether only plain shards will do, because the op compares indices along the factor.
    whole: whether the factor cannot be cut at all (the three parts of a fused projection that
    a slice picks from); it is named only so that its neighbours in the dim can be.
    """

    size: int
    reduction: Reduction | None = "sum"
    contiguous: bool = False
    whole: bool = False


class Localizer(Protocol):
    """What a rule needs to write an op's local form when a plain clone will not do."""

    op: AtenOp
    operands: Sequence[SSAValue]
    """The op's flat operands, in local shards."""
    placements: Sequence[DimSharding]
    """For each factor of the rule, the axes it is cut over."""
    mesh: Mesh

    def result_shape(self, index: int) -> tuple[int, ...]:
        """Local shape of a result."""
        ...

    def emit(
        self,
        name: str,
        operands: Sequence[SSAValue | None | Sequence[SSAValue | None]],
        *types: tuple[Sequence[int], torch.dtype],
        **values: Any,
    ) -> list[SSAValue]:
        """Add an aten op with results of the given shapes and dtypes; values are its arguments."""
        ...

    def shard_index(self, placements: DimSharding) -> SSAValue:
        """This rank's position (scalar i64) on the axes of a plainly sharded factor."""
        ...

    def clone(self, operands: Sequence[SSAValue] | None = None, **values: Any) -> list[SSAValue]:
        """Add the op itself with local result types; `values` replace arguments of its schema."""
        ...


Localize = Callable[[Localizer], Sequence[SSAValue]]


@dataclass(frozen=True)
class Rule:
    """The factor rule of one op instance.

    operands, results: the dims of each flat operand and each result. linear: the operands in
    which the op is jointly linear, so that unreduced sums in all of them pass through to the
    results. localize: writes the local form where a clone with local types is not enough
    (offsets into a shard, masked lookups); called only when some factor is sharded.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    linear: frozenset[int] = frozenset()
    localize: Localize | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.factors, self.operands, self.results, self.linear, self.localize))

    def seat(self, names: Sequence[int], placement: Placement) -> tuple[int, int] | None:
        """The factor of a dim made of `names` that a placement cuts, and its stride there.

        None if it cuts across factors, or one that must stay whole.
        """
        for factor, size, minor in self._digits(names):
            if placement.stride % minor == 0 and (minor * size) % placement.span == 0:
                if not self.factors[factor].whole:
                    return factor, placement.stride // minor
        return None

    def factors_of(self, dims: Dims, cut: Sequence[DimSharding]) -> list[DimSharding] | None:
        """How a cut of a value with these dims cuts the factors; None if it cuts across them."""
        cuts: list[DimSharding] = [()] * len(self.factors)
        for names, placements in zip(dims, cut, strict=True):
            for placement in placements:
                seat = self.seat(names, placement)
                if seat is None:
                    return None
                factor, stride = seat
                within = Placement(placement.axis, placement.size, stride)
                cuts[factor] = ordered({*cuts[factor], within})
        return cuts

    def dims_of(self, dims: Dims, factors: Sequence[DimSharding]) -> tuple[DimSharding, ...]:
        """The cut of a value with these dims where the factors are cut as given."""
        return tuple(
            ordered(
                Placement(p.axis, p.size, p.stride * minor)
                for factor, _, minor in self._digits(names)
                for p in factors[factor]
            )
            for names in dims
        )

    def one_cut(self, factor: int, placement: Placement) -> list[DimSharding]:
        """The factors' cuts with a single placement, within `factor`."""
        return [(placement,) if index == factor else () for index in range(len(self.factors))]

    def carry(
        self, source: Dims, goal: Dims, cut: Sequence[DimSharding]
    ) -> tuple[DimSharding, ...] | None:
        """A cut of a value with dims `source` as one of a value with dims `goal`.

        None if it cuts across factors. What `goal` lacks is dropped.
        """
        factors = self.factors_of(source, cut)
        return None if factors is None else self.dims_of(goal, factors)

    def can_cut(self, factor: int, placements: DimSharding) -> bool:
        """Whether a factor can be cut so."""
        limits = self.factors[factor]
        if not placements:
            return True
        if limits.whole or not fits(placements, limits.size):
            return False
        return not limits.contiguous or is_contiguous(placements, limits.size)

    def result(
        self,
        index: int,
        factors: Sequence[DimSharding],
        carried: Sequence[str],
        axes: Sequence[str],
    ) -> Sharding | None:
        """What a result comes out as where the factors are cut so; None if it cannot.

        It is unreduced over the axes of the cut factors that it lacks, and over those `carried`,
        over which the operands that the op is linear in are sums. axes: of the mesh, in order.
        """
        dims = self.results[index]
        present = {factor for names in dims for factor in names}
        lost = [i for i, cut in enumerate(factors) if cut and i not in present]
        reductions = {self.factors[i].reduction for i in lost} | (
            {"sum"} if carried else set[str]()
        )
        if None in reductions or len(reductions) > 1:
            return None
        pending = {*carried, *(p.axis for i in lost for p in factors[i])}
        unreduced = tuple(axis for axis in axes if axis in pending)
        placed = self.dims_of(dims, factors)
        return Sharding(placed, unreduced, "max" if "max" in reductions else "sum")

    def _digits(self, names: Sequence[int]) -> list[tuple[int, int, int]]:
        """For a dim made of factors: (factor, its size, product of the sizes after it)."""
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
        """Why the rule does not describe values of these shapes; None if it does."""
        named = [
            *(
                (f"operand {i}", d, s)
                for i, (d, s) in enumerate(zip(self.operands, operand_shapes, strict=True))
            ),
            *(
                (f"result {i}", d, s)
                for i, (d, s) in enumerate(zip(self.results, result_shapes, strict=True))
            ),
        ]
        for what, dims, shape in named:
            if len(dims) != len(shape):
                return f"{what} has {len(shape)} dims, the rule gives {len(dims)}"
            for index, (factors, size) in enumerate(zip(dims, shape, strict=True)):
                product = 1
                for factor in factors:
                    product *= self.factors[factor].size
                if factors and product != size:
                    return f"{what}, dim {index}: factors give {product}, the size is {size}"
        return None


RuleFunction = Callable[[AtenOp], Rule]
RULES: dict[str, RuleFunction] = {}
"""Rule functions by op name; filled by the families."""


def rule(*names: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register a function as the rule of the named ops."""

    def register(function: RuleFunction) -> RuleFunction:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register


def replicated_rule(op: AtenOp) -> Rule:
    """The rule without factors: everything whole. Right for every op, parallel for none."""
    operands = tuple(((),) * len(shape_of(v)) for v in op.operands)
    results = tuple(((),) * len(shape_of(v)) for v in op.results)
    return Rule((), operands, results)


class Notation:
    """Builds a rule from einsum-like text, reading factor sizes off the op's shapes.

    `Notation(op, "i k, k j -> i j")`. Operands are the flat operands in order. A dim is a
    factor's name, `(a b)` for several factors merged major to minor (all but one need their
    size in `sizes`), or `.` for a dim that must be whole. `...` stands for leading dims that
    operands and results share; it may appear once per value and always means the same dims.
    """

    def __init__(self, op: AtenOp, text: str, sizes: dict[str, int] | None = None) -> None:
        self._op = op
        self._sizes = dict(sizes or {})
        left, right = text.split("->")
        self._operands = [self._dims(part) for part in left.split(",")] if left.strip() else []
        self._results = [self._dims(part) for part in right.split(",")]
        shapes = [*(shape_of(v) for v in op.operands), *(shape_of(v) for v in op.results)]
        self._expand_ellipsis(shapes)
        for dims, shape in zip([*self._operands, *self._results], shapes, strict=True):
            for names, size in zip(dims, shape, strict=True):
                self._learn(names, size)

    @staticmethod
    def _dims(text: str) -> list[tuple[str, ...]]:
        dims: list[tuple[str, ...]] = []
        tokens = text.replace("(", " ( ").replace(")", " ) ").split()
        group: list[str] | None = None
        for token in tokens:
            if token == "(":
                group = []
            elif token == ")":
                dims.append(tuple(group or ()))
                group = None
            elif group is not None:
                group.append(token)
            else:
                dims.append(() if token == "." else (token,))
        return dims

    def _expand_ellipsis(self, shapes: list[tuple[int, ...]]) -> None:
        for values in (self._operands, self._results):
            offset = 0 if values is self._operands else len(self._operands)
            for index, dims in enumerate(values):
                if ("...",) in dims:
                    at = dims.index(("...",))
                    count = len(shapes[offset + index]) - len(dims) + 1
                    values[index] = [
                        *dims[:at],
                        *((f"*{n}",) for n in range(count)),
                        *dims[at + 1 :],
                    ]

    def _learn(self, names: tuple[str, ...], size: int) -> None:
        unknown = [name for name in names if name not in self._sizes]
        known = 1
        for name in names:
            known *= self._sizes.get(name, 1)
        if len(unknown) == 1:
            self._sizes[unknown[0]] = size // known

    def rule(
        self,
        *,
        linear: Sequence[int] = (),
        localize: Localize | None = None,
        reductions: dict[str, Literal["max"] | None] | None = None,
        contiguous: Sequence[str] = (),
        whole: Sequence[str] = (),
    ) -> Rule:
        """The rule. `reductions`: factors that do not reduce by a sum; None forbids it."""
        used: dict[str, int] = {}
        for dims in [*self._operands, *self._results]:
            for names in dims:
                for name in names:
                    used.setdefault(name, len(used))
        factors = tuple(
            Factor(self._sizes[n], (reductions or {}).get(n, "sum"), n in contiguous, n in whole)
            for n in used
        )

        def numbered(values: list[list[tuple[str, ...]]]) -> tuple[Dims, ...]:
            return tuple(
                tuple(tuple(used[name] for name in names) for names in dims) for dims in values
            )

        return Rule(
            factors, numbered(self._operands), numbered(self._results), frozenset(linear), localize
        )
