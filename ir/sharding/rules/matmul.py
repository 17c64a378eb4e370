"""Rules of products with an addition, grouped ones, factorisations, distances and cross products.

Plain products are notation alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.sharding.localizer import Localizer
from shardweave.ir.sharding.rules.base import (
    RULES,
    Names,
    Notation,
    Rule,
    named_rule,
    replicated_rule,
    rule,
)
from shardweave.ir.sharding.rules.dims import broadcast, dim_of, passing


@rule
def added_product(op: AtenOp) -> Rule:
    """`j, i k, k j -> i j`: k cannot be sharded, as each shard would add operand 0 once more."""
    text = spec_of(op).notation
    names, shape = text.partition("->")[2].split(), shape_of(op.results[0])
    added = shape_of(op.operands[0])
    offset = len(shape) - len(added)
    bias = [names[offset + d] if n == shape[offset + d] else "." for d, n in enumerate(added)]
    return Notation(op, f"{' '.join(bias)}, {text}").rule(reductions={"k": None})


@rule
def scaled_product(op: AtenOp) -> Rule:
    """`i k, k j, i ., . j, j -> i j`: a float8 product, with scales per operand or per row, column.

    k cannot be sharded beside a bias, which each shard would add, nor with padding, which torch
    cannot set to 0 in float8.
    """
    rows, columns = shape_of(op.results[0])
    texts = ["i k", "k j"]
    for value, whole, text in zip(
        op.operands[2:4], ((rows, 1), (1, columns)), ("i .", ". j"), strict=True
    ):
        shape = shape_of(value)
        if math.prod(shape) > 1 and shape != whole:
            return replicated_rule(op)
        texts.append(text if math.prod(shape) > 1 else " ".join("." * len(shape)))
    has_bias = op.tensor("bias") is not None
    texts += ["j"] * has_bias + [""] * (len(op.operands) - 4 - has_bias)
    text = f"{', '.join(texts)} -> i j"
    made = Notation(op, text).rule(reductions={"k": None} if has_bias else None)
    rows_factor, inner, *rest = made.factors
    return replace(made, factors=(rows_factor, replace(inner, even=True), *rest))


@rule
def grouped(op: AtenOp) -> Rule:
    """`i k, e k j, e, e -> i j`, or `i k, i j, e, e -> e k j`: a shard of e holds its own groups.

    A shard of e computes 0 for rows of other groups, and the shards' results are added. With ragged
    rows, i is `(r d i)` and e is `(r e)`: a shard of r has its own groups, with rows in d parts.
    """
    text, bounds, index = spec_of(op).notation, op.tensor("bounds"), op.tensor("index")
    if bounds is None:
        return Notation(op, text).rule(contiguous=["i"], localize=_localize_grouped)
    left, right = text.split("->")
    text = f"{left}, .{', ' if index is not None else ''} -> {right}"
    text = re.sub(r"\bi\b", "(r d i)", re.sub(r"\be\b", "(r e)", text))
    return _ragged(op, text)


@rule
def ragged_rows(op: AtenOp) -> Rule:
    """`. h, . -> (r d i) h`: a device takes its groups' rows; `(r d i) h, . -> . h` is the reverse.

    The reverse sums over r and d, as each row is on one device.
    """
    rest = " ".join(f"h{dim}" for dim in range(1, len(shape_of(op.operands[0]))))
    source, goal = ".", "(r d i)"
    if spec_of(op).ragged == "end":
        source, goal = goal, source
    return _ragged(op, f"{source} {rest}, ., -> {goal} {rest}")


def _ragged(op: AtenOp, text: str) -> Rule:
    """Make the rule of an op on ragged rows from notation: r and d can be sharded, i cannot."""
    if len(op.operands) < text.count(",") + 1:
        text = text.replace(", ->", " ->")
    blocks, parts, shards = (op.value(name) for name in ("blocks", "parts", "shards"))
    if shards > 1:  # a local op
        blocks, parts = 1, blocks * parts // shards
    made = Notation(op, text, {"r": blocks, "d": parts}).rule(
        whole=["i"], localize=_localize_ragged
    )
    factors = [replace(factor, even=True) for factor in made.factors]
    return replace(made, factors=tuple(factors))


def _localize_ragged(local: Localizer) -> Sequence[SSAValue]:
    """Add the shard's index as an operand, and the number of shards as the argument `shards`."""
    made = RULES[str(spec_of(local.op).rule)](local.op)
    dims = (names for value in (*made.operands, *made.results) for names in value)
    block, part, _ = next(names for names in dims if len(names) == 3)
    by_block, by_part = local.placements[block], local.placements[part]
    if not by_block and not by_part:
        return local.clone()
    if by_part and math.prod(p.size for p in by_block) < local.sizes[block]:
        raise ValueError(
            "a grouped matrix product shards the rows of each group over axis "
            f"'{by_part[0].axis}', but its {local.sizes[block]} blocks of groups over fewer "
            f"devices; shard the weights of groups over {local.sizes[block]} devices."
        )
    shards = math.prod(placement.size for placement in (*by_block, *by_part))
    index = local.shard_index((*by_block, *by_part))
    return local.clone([*local.operands, index], shards=shards)


def _localize_grouped(local: Localizer) -> Sequence[SSAValue]:
    """Shift the starts and ends of groups to count from the shard's first row."""
    rows, other, starts, ends = local.operands
    by_row = local.placements[0]
    if by_row:
        shard = local.shard_index(by_row)
        (start,) = local.emit(
            "aten.mul.Scalar", [shard], ((), torch.int64), other=shape_of(rows)[0]
        )
        types = [(shape_of(v), dtype_of_value(v)) for v in (starts, ends)]
        (starts,) = local.emit("aten.sub.Tensor", [starts, start], types[0])
        (ends,) = local.emit("aten.sub.Tensor", [ends, start], types[1])
    return local.clone([rows, other, starts, ends])


@rule
def matrices(op: AtenOp) -> Rule:
    """`b . ., b . . -> b . .`: only the batch of matrices can be sharded.

    Shards must be even: a matrix of padding may have no factorisation.
    """
    batch = shape_of(op.operands[0])[:-2]
    names, factors = passing(batch)

    def named(shape: tuple[int, ...]) -> Names:
        shared = shape[: len(batch)] == batch
        return [*names, *[()] * (len(shape) - len(batch))] if shared else [()] * len(shape)

    results = [shape_of(value) for value in op.results]
    if any(math.prod(shape) and shape[: len(batch)] != batch for shape in results):
        return replicated_rule(op)
    even = {name: replace(factor, even=True) for name, factor in factors.items()}
    operands = [named(shape_of(value)) for value in op.operands]
    return named_rule(even, operands, [named(shape) for shape in results])


@rule
def distances(op: AtenOp) -> Rule:
    """`b i ., b j . -> b i j`; its gradient `b i j, b i ., b j ., b i j -> b i .` sums over j."""
    is_backward = len(op.operands) > 2
    first, second = op.operands[1:3] if is_backward else op.operands
    pairs = shape_of(op.operands[0] if is_backward else op.results[0])
    batch = pairs[:-2]
    if any(shape_of(value)[:-2] != batch for value in (first, second)):
        return replicated_rule(op)
    names, factors = passing(pairs)
    # A distance of 0 between two rows of padding may have no gradient.
    even = {name: replace(factor, even=True) for name, factor in factors.items()}
    rows, columns = [*names[:-1], ()], [*names[:-2], names[-1], ()]
    if is_backward:
        return named_rule(even, [names, rows, columns, names], [rows])
    return named_rule(even, [rows, columns], [names])


@rule
def cross(op: AtenOp) -> Rule:
    """`i ., i . -> i .`: the three components stay together."""
    shape = shape_of(op.results[0])
    names, factors = passing(shape, whole=[dim_of(op, len(shape))])
    operands = [broadcast(shape_of(value), shape, names) for value in op.operands]
    return named_rule(factors, operands, [names])
