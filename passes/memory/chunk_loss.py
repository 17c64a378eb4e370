"""The loss in chunks of rows: logits exist for one chunk at a time, also in the backward pass.

Between the product that makes logits and the gradients of its operands, all values that have both
the rows and the columns of the logits are large. The ops that read or make them, and the ops on
paths between those, are sharded by rows over a time axis. `unroll_time_axes` then clones them for
each chunk, and `chunk_by_chunk` orders the clones so that chunks run one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, OpResult, SSAValue
from xdsl.rewriter import InsertPoint

from shardweave.ir.dialects.annotations import copy_of, describe, set_shardings
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.dist import ReshardOp, create_dist
from shardweave.ir.dialects.types import num_bytes, shape_of, tensor_type_of
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.mesh.placement import DimSharding, Placement, Sharding, fits, ordered
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program, shardings_of
from shardweave.ir.sharding.fit import Misfit, fitting_factors
from shardweave.ir.sharding.flow import is_propagated
from shardweave.ir.sharding.rules import Rule, rule_of
from shardweave.ir.sharding.rules.base import Dims
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

CHUNKS = "loss"
"""Name of the time axis that stands for the chunks."""

Cut = tuple[DimSharding, ...]
"""The placements of a value's dims over the time axis alone."""


def _cut_loss(program: Program, chunks: int) -> int:
    """Split the loss into `chunks`, or the nearest possible number, if possible a higher one."""
    logits = _logits_of(program)
    pending = list(_candidates(logits, chunks))
    tried: set[_Candidate] = set()
    refused: list[_CannotCutError] = []
    while pending:
        candidate = pending.pop(0)
        tried.add(candidate)
        try:
            plan = _Chunks(program, logits, candidate)
        except _CannotCutError as error:
            refused.append(error)
            others = (replace(candidate, stride=s, chunks=n) for s, n in error.others(chunks))
            pending += [other for other in others if other not in tried and other.fits(logits)]
            pending.sort(key=lambda c: (c.chunks < chunks, abs(c.chunks - chunks)))
        else:
            plan.write()
            return candidate.chunks
    if refused:
        raise next((error for error in refused if not error.parts), refused[0])
    rows = " x ".join(str(shape_of(logits.value)[dim]) for dim in logits.rows)
    raise ValueError(
        f"chunks={chunks}, but {describe(logits.op)} has {rows} rows, too few for each device; use "
        "fewer chunks."
    )


def chunk_by_chunk(ops: Sequence[Operation], position: int) -> list[Operation]:
    """Reorder unrolled ops by chunk. position: index of the chunk axis in an op's `copy`."""
    later = {op for op in ops if (copy := copy_of(op)) and copy[position] > 0}
    touched = [i for i, op in enumerate(ops) if op in later or _makers(op) & later]
    if not touched:
        return list(ops)
    window = slice(touched[0], touched[-1] + 1)
    chunk: dict[Operation, int] = {}
    for op in ops[window]:
        copy = copy_of(op)
        makers = [chunk.get(maker, 0) for maker in _makers(op)]
        chunk[op] = max([copy[position] if copy else 0, *makers])
    return [*ops[: window.start], *sorted(ops[window], key=chunk.__getitem__), *ops[window.stop :]]


def _makers(op: Operation) -> set[Operation]:
    return {value.owner for value in op.operands if isinstance(value.owner, Operation)}


# Where the logits are


@dataclass(frozen=True)
class _Logits:
    """The result of the last product before the loss.

    rows: dims from the other operand, such as tokens. columns: dim from the weight, the classes.
    """

    op: AtenOp
    value: SSAValue
    rows: tuple[int, ...]
    columns: int
    sharding: Sharding


def logits_bytes(program: Program) -> int:
    """Bytes of the logits from which a program computes its loss; 0 if it has none."""
    heads = _heads_of(program)
    return max((num_bytes(tensor_type_of(op.results[0])) for op, _ in heads), default=0)


def _heads_of(program: Program) -> list[tuple[AtenOp, int]]:
    """Products with a parameter that are nearest to the loss, each with that operand's index."""
    losses = [s.value for s in program.results if s.kind == "output" and not shape_of(s.value)]
    made_of_parameters = {s.value for s in program.arguments if s.kind == "param"}
    for op in program.ops:
        if made_of_parameters.issuperset(op.operands):
            made_of_parameters.update(op.results)
    heads: list[tuple[AtenOp, int]] = []
    stack, seen = [value.owner for value in losses], set[Operation]()
    while stack:
        op = stack.pop()
        if not isinstance(op, Operation) or op in seen:
            continue
        seen.add(op)
        product = spec_of(op).product
        weights = [
            factor
            for factor in (product.factors if product is not None else ())
            if op.operands[factor] in made_of_parameters
        ]
        if len(weights) == 1 and isinstance(op, AtenOp):
            heads.append((op, weights[0]))
        else:
            stack += [value.owner for value in op.operands]
    return heads


def _logits_of(program: Program) -> _Logits:
    """The largest of the products with a parameter that are nearest to the loss."""
    heads = _heads_of(program)
    if not heads:
        raise ValueError(
            "chunk-loss has no loss to split: no matrix product with a parameter leads to a "
            "scalar output; let forward return the loss."
        )
    op, weight = max(heads, key=lambda head: prod(shape_of(head[0].results[0])))
    rule, (value,) = rule_of(op), op.results
    factors = {factor for names in rule.operands[weight] for factor in names}
    columns = [dim for dim, names in enumerate(rule.results[0]) if factors.intersection(names)]
    rows = [
        dim
        for dim, names in enumerate(rule.results[0])
        if names and not factors.intersection(names) and shape_of(value)[dim] > 1
    ]
    if len(columns) != 1 or not rows:
        raise ValueError(
            f"{describe(op)} gives logits without a dim of rows; chunk-loss needs one (tokens)."
        )
    (sharding,) = shardings_of(op, program)
    assert sharding is not None
    return _Logits(op, value, tuple(rows), columns[0], sharding)


@dataclass(frozen=True)
class _Candidate:
    """A way to chunk the logits: a dim of rows, and the stride and number of chunks along it."""

    dim: int
    stride: int
    chunks: int

    @property
    def placement(self) -> Placement:
        return Placement(CHUNKS, self.chunks, self.stride)

    def fits(self, logits: _Logits) -> bool:
        """True if the logits' dim can be sharded by these chunks beside its present sharding."""
        held, size = logits.sharding.dims[self.dim], shape_of(logits.value)[self.dim]
        return self.chunks > 1 and fits((*held, self.placement), size)


def _candidates(logits: _Logits, chunks: int) -> Iterator[_Candidate]:
    """Yield ways to chunk rows inside each device's shard; uneven ones only for unsharded rows."""
    for dim in logits.rows:
        size, held = shape_of(logits.value)[dim], logits.sharding.dims[dim]
        cuts = [
            (stride * minor, n)
            for own, minor in _free(held, size)
            for stride, n in _even(own, chunks)
        ]
        if not held and chunks <= size:
            stride = -(-size // chunks)
            cuts.insert(0, (stride, -(-size // stride)))
        yield from (c for cut in cuts if (c := _Candidate(dim, *cut)).fits(logits))


def _free(held: DimSharding, size: int) -> list[tuple[int, int]]:
    """Unsharded factors of a dim of `size`, as (size, stride), largest first."""
    digits: list[tuple[int, int]] = []
    for placement in held:
        digits.append((size // placement.span, placement.span))
        size = placement.stride
    return sorted([*digits, (size, 1)], reverse=True)


def _even(size: int, chunks: int) -> list[tuple[int, int]]:
    """(stride, number) of even chunks: the least number >= `chunks`, and the greatest below it."""
    numbers = [n for n in range(2, size + 1) if size % n == 0]
    near = [*[n for n in numbers if n >= chunks][:1], *[n for n in numbers if n < chunks][-1:]]
    return [(size // n, n) for n in near]


# What is cut with them


class _CannotCutError(ValueError):
    """Raised if an op cannot run on chunks of rows. parts: (size, stride) of factors to try."""

    def __init__(self, op: Operation, why: str, parts: Iterable[tuple[int, int]] = ()) -> None:
        self.parts = tuple(parts)
        super().__init__(f"the loss cannot be computed in chunks of rows: {describe(op)} {why}.")

    def others(self, chunks: int) -> Iterator[tuple[int, int]]:
        """Yield (stride, number) of chunks for each factor in `parts`, to be tried instead."""
        for size, minor in self.parts:
            for stride, number in _even(size, chunks):
                yield stride * minor, number


class _Chunks:
    """The ops to chunk, with the shardings of their operands (`read`) and results (`new`).

    Raises _CannotCutError if an op does not allow it; changes nothing before `write`.
    """

    def __init__(self, program: Program, logits: _Logits, candidate: _Candidate) -> None:
        self.program = program
        self.chunks, self.stride = candidate.chunks, candidate.stride
        mesh = program.needed_mesh()
        self.mesh = Mesh((*mesh.axes, Axis(CHUNKS, self.chunks, "time")))
        self.old = {s.value: program.sharding_of_slot(s) for s in program.arguments}
        for op in program.ops:
            for result, sharding in zip(op.results, shardings_of(op, program), strict=True):
                assert sharding is not None
                self.old[result] = sharding
        rank = len(shape_of(logits.value))
        rows = Sharding.replicated(rank).with_dim(candidate.dim, [candidate.placement]).dims
        self.rows: dict[SSAValue, Cut] = {logits.value: rows}
        """Placements of values over the chunk axis; large values come first."""
        self.columns = {logits.value: logits.columns}
        """Large values, each with its dim of columns."""
        self._spread(logits.value)
        self.ops = self._between()
        self.new: dict[SSAValue, Sharding] = {}
        self.read: dict[Operation, list[Sharding]] = {}
        self.sums: set[SSAValue] = set()
        for op in self.ops:
            self._cut(op)

    # Large values

    def _spread(self, start: SSAValue) -> None:
        """Find the values that have the logits' rows and columns, by walking from op to op."""
        stack = [start]
        while stack:
            value = stack.pop()
            users = [use.operation for use in value.uses]
            for op in [value.owner, *users] if isinstance(value, OpResult) else users:
                assert isinstance(op, Operation)
                stack += self._spread_at(op, value)

    def _spread_at(self, op: Operation, value: SSAValue) -> list[SSAValue]:
        if isinstance(op, ReturnOp):
            name = next(s.name for s in self.program.results if s.value is value)
            raise _CannotCutError(op, f"returns the logits as output '{name}'")
        values = [*op.operands, *op.results]
        added: list[SSAValue] = []
        if isinstance(op, ReshardOp):
            for other in values:
                if other not in self.columns:
                    self.rows[other], self.columns[other] = self.rows[value], self.columns[value]
                    added.append(other)
            return added
        rule = self._rule(op)
        factors = self._factors(op, rule, self.columns)
        dims_of = [*rule.operands, *rule.results]
        known = [(d, v) for d, v in zip(dims_of, values, strict=True) if v in self.columns]
        columns = {factor for dims, other in known for factor in dims[self.columns[other]]}
        # A dim that an op needs unsharded, as a softmax does, is no factor of its rule.
        whole = {
            shape_of(other)[self.columns[other]]
            for dims, other in known
            if not dims[self.columns[other]]
        }
        for dims, other in zip(dims_of, values, strict=True):
            cut, sizes = rule.dims_of(dims, factors), shape_of(other)
            dim = next(
                (
                    d
                    for d, names in enumerate(dims)
                    if columns.intersection(names) or (not names and sizes[d] in whole)
                ),
                None,
            )
            if other not in self.columns and any(cut) and dim is not None:
                self.rows[other], self.columns[other] = cut, dim
                added.append(other)
        return added

    def _between(self) -> list[Operation]:
        """The ops that read or make large values, and those on paths between them, in order."""
        ops = list(self.program.ops)
        large = {
            op for op in ops if not self.columns.keys().isdisjoint((*op.operands, *op.results))
        }
        behind: set[Operation] = set()
        for op in ops:
            if op in large or _makers(op) & behind:
                behind.add(op)
        before: set[Operation] = set()
        for op in reversed(ops):
            if op in large or op in before:
                before.add(op)
                before |= _makers(op)
        return [op for op in ops if op in behind and op in before]

    # The cut of an op

    def _rule(self, op: Operation) -> Rule:
        if not isinstance(op, AtenOp):
            raise _CannotCutError(op, "has no sharding rule")
        return rule_of(op)

    def _factors(
        self, op: Operation, rule: Rule, known: Mapping[SSAValue, object]
    ) -> list[DimSharding]:
        """Placements of the chunk axis on an op's factors, derived from its known values'."""
        factors: list[DimSharding] = [()] * len(rule.factors)
        pairs = zip((*rule.operands, *rule.results), (*op.operands, *op.results), strict=True)
        for dims, value in pairs:
            if value not in known:
                continue
            own = rule.factors_of(dims, self.rows[value])
            if own is None:
                parts = self._parts(rule, dims, value)
                raise _CannotCutError(op, "mixes rows of several chunks", parts)
            factors = [ordered({*x, *y}) for x, y in zip(factors, own, strict=True)]
        if sum(map(len, factors)) > 1:
            raise _CannotCutError(op, "has the rows of the logits in two of its dims")
        if any(cut and factor.reach for factor, cut in zip(rule.factors, factors, strict=True)):
            raise _CannotCutError(op, "reads rows of other chunks, as a convolution does")
        return factors

    def _parts(self, rule: Rule, dims: Dims, value: SSAValue) -> Iterator[tuple[int, int]]:
        """Yield (size, stride in the logits) of each unsharded factor in the rows of `value`."""
        held = rule.factors_of(dims, self.old[value].dims)
        if held is None:
            return
        for names, placements in zip(dims, self.rows[value], strict=True):
            for index, factor in enumerate(names) if placements else ():
                size = rule.factors[factor].size
                minor = prod(rule.factors[f].size for f in names[index + 1 :])
                for own, inner in _free(held[factor], size):
                    yield own, inner * minor * self.stride // placements[0].stride

    def _cut(self, op: Operation) -> None:
        summed = next((value for value in op.operands if value in self.sums), None)
        if summed is not None:
            name = summed.name_hint
            raise _CannotCutError(op, f"reads %{name}, a sum over all chunks")
        if isinstance(op, ReshardOp):
            self._cut_reshard(op)
            return
        rule = self._rule(op)
        factors = self._factors(op, rule, self.rows)
        if not any(factors):
            raise _CannotCutError(op, "has no dim of rows, but gradients of logits need it")
        operands, results = ([self.old[v] for v in vs] for vs in (op.operands, op.results))
        old = fitting_factors(rule, tuple(operands), tuple(results), self.program.needed_mesh())
        if isinstance(old, Misfit):
            raise ValueError(f"{describe(op)}: {old.text(op)}; add a dist.reshard before it.")
        cut = [ordered({*x, *y}) for x, y in zip(old, factors, strict=True)]
        carried = operands[min(rule.linear)].unreduced if rule.linear else ()
        made = [rule.result(i, cut, carried, self.mesh.names) for i in range(len(results))]
        if not all(map(rule.can_cut, range(len(cut)), cut)) or None in made:
            raise _CannotCutError(op, "cannot be computed on a chunk of the rows")
        self.read[op] = [
            Sharding(rule.dims_of(dims, cut), sharding.unreduced, sharding.reduction)
            for dims, sharding in zip(rule.operands, operands, strict=True)
        ]
        for dims, result, sharding in zip(rule.results, op.results, made, strict=True):
            assert sharding is not None
            self.new[result], self.rows[result] = sharding, rule.dims_of(dims, factors)
            if CHUNKS in sharding.unreduced:
                self.sums.add(result)

    def _cut_reshard(self, op: ReshardOp) -> None:
        (operand,), (result,) = op.operands, op.results
        rows = self.rows.get(operand)
        if rows is None:
            raise _CannotCutError(op, "has no dim of rows, but gradients of logits need it")

        def added(value: SSAValue) -> Sharding:
            old, shape = self.old[value], shape_of(value)
            dims = tuple(ordered((*x, *y)) for x, y in zip(old.dims, rows, strict=True))
            if not all(map(fits, dims, shape)):
                raise _CannotCutError(op, "moves rows in blocks that the chunks would split")
            return Sharding(dims, old.unreduced, old.reduction)

        self.read[op], self.new[result], self.rows[result] = [added(operand)], added(result), rows

    # Writing

    def write(self) -> None:
        """Write the new shardings into the program, and reshards at the borders of the chunks."""
        self.program.set_mesh(self.mesh)
        made: dict[tuple[SSAValue, Sharding], SSAValue] = {}
        inside = set(self.ops)
        for op in self.ops:
            for index, (value, wanted) in enumerate(
                zip(list(op.operands), self.read[op], strict=True)
            ):
                if self.new.get(value, self.old[value]) == wanted:
                    continue
                if (value, wanted) not in made:
                    why = f"{op.name} reads the rows of a chunk"
                    point = InsertPoint.before(op)
                    made[value, wanted] = self._reshard(value, wanted, op, point, why)
                op.operands[index] = made[value, wanted]
        for op in self.ops:
            set_shardings(op, [self.new[r] for r in op.results], [shape_of(r) for r in op.results])
            for result in op.results:
                self._join(op, result, inside)

    def _join(self, op: Operation, result: SSAValue, inside: set[Operation]) -> None:
        outside = [use for use in result.uses if use.operation not in inside]
        if not outside or self.new[result] == self.old[result]:
            return
        why = "terms of chunks are added" if result in self.sums else "chunks are joined"
        point = InsertPoint.after(op)
        whole = self._reshard(result, self.old[result], op, point, why)
        for use in outside:
            use.operation.operands[use.index] = whole

    def _reshard(
        self, value: SSAValue, goal: Sharding, like: Operation, point: InsertPoint, why: str
    ) -> SSAValue:
        op = create_dist(ReshardOp, [value], [value.type], why=why)
        set_shardings(op, [goal], [shape_of(value)])
        Builder.at(point, like).insert(op, value)
        return op.results[0]


@dataclass(frozen=True)
class ChunkLossPass(PassOnProgram):
    """Split the loss along its rows, such as tokens, over a new time axis `loss`.

    This covers the ops from the product that makes the logits to the gradients of its operands,
    found by the rules of ops alone: it works for any loss in which the gradient of a row of logits
    depends only on that row, and on values that are not computed from logits. `unroll-time-axes`
    then unrolls the chunks, each chunk's backward ops after its forward ops.

    Requires: a propagated global program that returns its loss. Ensures: the mesh has the time
    axis; numerics unchanged except for the order of sums. Takes time linear in the ops.
    """

    name = "chunk-loss"
    chunks: int = 8

    def run(self, program: Program) -> None:
        if self.chunks == 1:
            note("chunks=1 leaves the loss as it is; give chunks >= 2, or leave the pass out.")
            return
        if program.is_local or not is_propagated(program):
            raise ValueError(
                "chunk-loss needs a propagated global program; run it after propagate-shardings "
                "and before insert-collectives."
            )
        if self.chunks < 1:
            raise ValueError(f"chunks={self.chunks}; use chunks >= 1.")
        if CHUNKS in program.needed_mesh().names:
            raise ValueError(f"the mesh {program.mesh} has an axis '{CHUNKS}' already; rename it.")
        made = _cut_loss(program, self.chunks)
        if made != self.chunks:
            note(
                f"the loss is split into {made} chunks: a device's rows do not divide into "
                f"{self.chunks}."
            )
        if any(axis.kind == "stage" for axis in program.needed_mesh().axes):
            note(
                "the logits of a micro-batch are kept until its backward pass, so that chunks "
                "save no memory in a pipeline; leave the pass out."
            )
