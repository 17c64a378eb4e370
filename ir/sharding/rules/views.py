"""Rules of ops that only move data: views, permutations, slices, concatenations, padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import gcd, prod

from xdsl.ir import SSAValue

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.sharding.rules.base import Factor, Names, Rule, named_rule, replicated_rule, rule
from shardweave.ir.sharding.rules.dims import broadcast, dim_of, dividing, named_dims, passing


@rule
def view(op: AtenOp) -> Rule:
    """`(a b) c -> a (b c)`: the factors are the coarsest sizes that split both shapes.

    Dims whose sizes do not nest, as in `4 6 -> 6 4`, cannot be sharded.
    """
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    if 0 in before:
        return replicated_rule(op)
    factors: dict[str, Factor] = {}
    operand: Names = [()] * len(before)
    result: Names = [()] * len(after)
    for left, right in _groups(before, after):
        strides = {1, *_suffix_products(before, left), *_suffix_products(after, right)}
        cuts = sorted(strides, reverse=True)
        if all(major % minor == 0 for major, minor in pairwise(cuts)):
            # A factor is named after its group and the stride that it has there.
            names = {cut: f"{left[0]}.{cut}" for cut in cuts}
            factors |= {names[minor]: Factor(major // minor) for major, minor in pairwise(cuts)}
            _refine(operand, before, left, names)
            _refine(result, after, right, names)
    return named_rule(factors, [operand], [result], linear=[0])


@rule
def complex_view(op: AtenOp) -> Rule:
    """`i . -> i` or `i -> i .`: the dim of real and imaginary parts cannot be sharded."""
    operand, result = shape_of(op.operands[0]), shape_of(op.results[0])
    names, factors = passing(min(operand, result, key=len))
    dims: list[Names] = [
        names if len(shape) == len(names) else [*names, ()] for shape in (operand, result)
    ]
    return named_rule(factors, [dims[0]], [dims[1]], linear=[0])


def _refine(
    dims: Names, shape: Sequence[int], members: Sequence[int], names: dict[int, str]
) -> None:
    """Set the factors of `members`, the dims of one group, in `dims`. names: factors by stride."""
    for dim, upper in zip(members, _suffix_products(shape, members), strict=True):
        lower = upper // shape[dim]
        strides = [stride for stride in names if lower <= stride < upper]
        dims[dim] = tuple(names[stride] for stride in strides)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the shortest runs of dims in both shapes with equal products; leave out dims of 1."""
    left = [d for d, size in enumerate(before) if size != 1]
    right = [d for d, size in enumerate(after) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left:
        taken = [left.pop(0)], [right.pop(0)]
        while (sizes := (_size(before, taken[0]), _size(after, taken[1])))[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                taken[0].append(left.pop(0))
            else:
                taken[1].append(right.pop(0))
        groups.append(taken)
    return groups


def _size(shape: Sequence[int], dims: Iterable[int]) -> int:
    return prod(shape[d] for d in dims)


def _suffix_products(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """For each of `dims`, the product of its size and of those after it in `dims`."""
    return [_size(shape, dims[index:]) for index in range(len(dims))]


@rule
def permute(op: AtenOp) -> Rule:
    """`i j -> j i`"""
    names, factors = passing(shape_of(op.operands[0]))
    order: list[int] = op.value("dims")
    result = [names[dim] for dim in order]
    return named_rule(factors, [names], [result], linear=[0])


@rule
def expand(op: AtenOp) -> Rule:
    """`. j -> i j`: a repeated dim i can be sharded in the result."""
    shape = shape_of(op.results[0])
    names, factors = passing(shape)
    operand = broadcast(shape_of(op.operands[0]), shape, names)
    return named_rule(factors, [operand], [names], linear=[0])


@rule
def take_slice(op: AtenOp) -> Rule:
    """`(n i) j -> (m i) j` for m of n equal blocks, `(i n) j -> i j` for every n-th index."""
    return _slice(op, op.operands[0], op.results[0])


@rule
def slice_backward(op: AtenOp) -> Rule:
    """`(m i) j -> (n i) j` or `i j -> (i n) j`: the rule of a slice, reversed."""
    return _slice(op, op.results[0], op.operands[0])


def _slice(op: AtenOp, whole: SSAValue, part: SSAValue) -> Rule:
    """The rule of an op that slices `part` out of `whole`, or writes it there."""
    shape = shape_of(whole)
    dim, step, start = dim_of(op, len(shape)), int(op.value("step")), int(op.value("start") or 0)
    length, size = shape_of(part)[dim], shape[dim]
    names, passed = passing(shape, whole=[dim])
    parts = list(names)
    # The longest blocks that divide start, length and size: all can be sharded alike.
    block = gcd(start, length, size) if step == 1 else length
    factors = {"i": Factor(block)}
    has_blocks = step == 1 and block > 1 and length > 0
    if has_blocks:
        names[dim] = _blocks(factors, "n", size // block)
        parts[dim] = _blocks(factors, "m", length // block)
    elif step * length == size and 0 <= start < step:
        factors["n"] = Factor(step, whole=True)
        names[dim], parts[dim] = ("i", "n"), ("i",)
    return named_rule(
        factors | passed,
        [parts if op.operands[0] is part else names],
        [names if op.operands[0] is part else parts],
        linear=[0],
        # The start is a number of blocks, so it scales with the block length, which is factor 0.
        localize=dividing("start", 0) if has_blocks and start else None,
    )


def _blocks(factors: dict[str, Factor], name: str, count: int) -> tuple[str, ...]:
    """Names of the factors of a dim of `count` blocks of i. Adds factor `name`, the block index."""
    if count == 1:
        return ("i",)
    factors[name] = Factor(count, whole=True)
    return (name, "i")


@rule
def part_of_whole_dim(op: AtenOp) -> Rule:
    """`. j -> j`, or the reverse: the op removes or adds a dim, which cannot be sharded."""
    values = (*op.operands, *op.results)
    shape = max(map(shape_of, values), key=len)
    dim = dim_of(op, len(shape))
    names, factors = passing(shape, whole=[dim])
    part = names[:dim] + names[dim + 1 :]
    dims = [names if len(shape_of(value)) == len(shape) else part for value in values]
    count = len(op.operands)
    return named_rule(factors, dims[:count], dims[count:], linear=range(count))


@rule
def cat(op: AtenOp) -> Rule:
    """`(m i) j, (n i) j -> (o i) j`: operands consist of blocks of the same length i."""
    shape, shapes = shape_of(op.results[0]), [shape_of(v) for v in op.operands]
    if any(len(s) != len(shape) for s in shapes):
        # torch lets an empty tensor of one dim stand in any list.
        return replicated_rule(op)
    dim = dim_of(op, len(shape))
    names, passed = passing(shape, whole=[dim])
    parts = [list(names) for _ in shapes]
    block = gcd(*(s[dim] for s in shapes))
    factors = {"i": Factor(block)}
    if block > 1:
        names[dim] = _blocks(factors, "n", shape[dim] // block)
        for index, (part, own) in enumerate(zip(parts, shapes, strict=True)):
            part[dim] = _blocks(factors, f"n{index}", own[dim] // block)
    return named_rule(factors | passed, parts, [names], linear=range(len(shapes)))


@rule
def constant_pad_nd(op: AtenOp) -> Rule:
    """`i . -> i .`: padded dims cannot be sharded."""
    pad = op.value("pad")
    shape = shape_of(op.operands[0])
    # Pairs (before, after), from the last dim on.
    padded = [len(shape) - 1 - index // 2 for index, amount in enumerate(pad) if amount]
    names, factors = passing(shape, whole=padded)
    return named_rule(factors, [names], [names], linear=[] if op.value("value") else [0])


@rule
def move_within_dims(op: AtenOp) -> Rule:
    """`i . -> i .`: dims along which the op moves or compares indices cannot be sharded."""
    shape = shape_of(op.operands[0])
    if op.signature.parameter("dims") is None:  # tril and triu
        dims = named_dims(len(shape), [-2, -1])
    elif op.name == "aten.flip" and not op.value("dims"):
        dims = frozenset[int]()
    else:
        dims = named_dims(len(shape), op.value("dims"))
    names, factors = passing(shape, whole=dims)
    return named_rule(factors, [names], [names], linear=[0])


@rule
def repeat(op: AtenOp) -> Rule:
    """`i j -> (n i) j`: n counts the copies, and cannot be sharded."""
    before, after = shape_of(op.operands[0]), shape_of(op.results[0])
    names, factors = passing(before)
    offset = len(after) - len(before)
    result: Names = [()] * len(after)
    for dim, own in enumerate(names):
        copies = after[offset + dim] // before[dim] if before[dim] else 1
        if own and copies > 1:
            factors[f"n{dim}"] = Factor(copies, whole=True)
            own = (f"n{dim}", *own)
        result[offset + dim] = own
    return named_rule(factors, [names], [result], linear=[0])


@rule
def diagonal(op: AtenOp) -> Rule:
    """`i . . -> i .`, or the reverse: the matrix dims and the diagonal cannot be sharded."""
    values = (op.operands[0], op.results[0])
    wide = max(map(shape_of, values), key=len)
    pair = named_dims(len(wide), [int(op.value("dim1")), int(op.value("dim2"))])
    names, factors = passing(wide, whole=pair)
    narrow = [*(own for dim, own in enumerate(names) if dim not in pair), ()]
    dims = [names if len(shape_of(value)) == len(wide) else narrow for value in values]
    return named_rule(factors, dims[:1], dims[1:], linear=[0])


@rule
def other_dtype(op: AtenOp) -> Rule:
    """`i j -> i j`; the last dim cannot be sharded if the element size changes."""
    shape, last = shape_of(op.operands[0]), len(shape_of(op.operands[0])) - 1
    names, factors = passing(shape, whole=[] if shape == shape_of(op.results[0]) else [last])
    return named_rule(factors, [names], [names])


@rule
def windows_of_dim(op: AtenOp) -> Rule:
    """`i . -> i . .`, or the reverse: windows, and the dim they slide on, cannot be sharded."""
    values = (op.operands[0], op.results[0])
    plain = min(map(shape_of, values), key=len)
    if not plain:
        return replicated_rule(op)
    argument = "dim" if op.signature.parameter("dim") is not None else "dimension"
    names, factors = passing(plain, whole=[int(op.value(argument)) % len(plain)])
    dims: list[Names] = []
    for value in values:
        outer = shape_of(value)[: len(plain)]
        # istft gives unfold_backward a window for all samples, of size 1 there.
        own = [name if n == size else () for name, n, size in zip(names, outer, plain, strict=True)]
        dims.append([*own, *[()] * (len(shape_of(value)) - len(plain))])
    return named_rule(factors, dims[:1], dims[1:], linear=[0])
