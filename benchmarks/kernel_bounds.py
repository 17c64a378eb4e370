"""What no fusion of a step's ops into kernels can go below, its library calls as they are.

A kernel runs in one phase of the step, and neither across a call of the library nor across a
message: it ends before a call that reads what it makes, and begins after one that it reads of. Its
programs do not wait for each other (Triton has no barrier of a whole grid), and none of them reads
more than `MOST_READ` elements for one result: what more is reduced to one number, row by row and
then over the rows, takes a second kernel. What is computed again counts as `recompute-producers`
left it.

Launches: the calls, and in each phase the longest chain of kernels of which each has to wait for a
call, or a reduction, that waits for the one before.

Bytes: of the calls; what other ops of a phase read of calls, messages, arguments and the other
phase, once; and what those read that they make, once. To that comes what has to be read again.
Along a chain of calls, ops that depend on one call and that the next depends on run between the
two. Of what they need, the smallest cut between memory and them is read there; in it, what is in
memory and was not needed before counts as nothing, as it is counted already, and what kernels make
for each other alone is written, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import pairwise

import networkx
from xdsl.ir import Operation, SSAValue

from shardweave.benchmarks.kernel_counts import Counts, is_call
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, num_elements, tensor_type_of
from shardweave.ir.ops.fusible import reductions_of, role_of
from shardweave.ir.ops.records.indexing import LOOKUP_GRADIENT
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.iteration_space import IterationSpace, is_kernel_alone, space_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import layout_source
from shardweave.ir.program.traffic import bytes_moved, traffic

MOST_READ = 1 << 20
"""Elements that one program reads for one result. An SM reads some 50 GB/s of an H100's 3.35 TB/s,
so that 4 MiB take it as long as twenty launches."""


def lower_bound(program: Program) -> Counts:
    """The bounds of an unfused local program, as said above."""
    counts = Counts()
    forward, backward = _Phase(), _Phase()
    phase = forward
    for op in program.ops:
        if phase_of(op) == "backward":
            phase = backward
        phase.add(op)
        if not _is_computed(op) and is_call(op):
            counts.add("library", op.name, bytes_moved(op))
    for name, phase in (("forward", forward), ("backward", backward)):
        moved = traffic(phase.computed) + phase.read_again()
        counts.add("kernel", name, moved, launches=phase.num_waves)
    return counts


@dataclass(frozen=True)
class _Wave:
    """When a kernel can compute an op at the earliest, or a call can begin.

    number: of kernels that have to run one after another until then, its own included. last: the op
    that it waits for. elements: read by one program of that kernel for one element of the op.
    reduction: the last reduction in that kernel on which the op depends.
    """

    number: int
    last: Operation | None = None
    elements: int = 1
    reduction: Operation | None = None


@dataclass
class _Phase:
    """The ops of a phase, and when they can be computed."""

    waves: dict[Operation, _Wave] = field(default_factory=dict[Operation, _Wave])

    def add(self, op: Operation) -> None:
        self.waves[op] = self._wave(op)

    @property
    def computed(self) -> list[Operation]:
        """The ops that kernels compute, and views."""
        return [op for op in self.waves if _is_computed(op)]

    @property
    def num_waves(self) -> int:
        return max((wave.number for wave in self.waves.values()), default=0)

    def _wave(self, op: Operation) -> _Wave:
        is_kernel = _is_for_kernels(op)
        owners = (layout_source(value).owner for value in op.operands)
        makers = [o for o in owners if isinstance(o, Operation) and o in self.waves]

        def begins(maker: Operation) -> int:
            return self.waves[maker].number + (is_kernel and not _is_for_kernels(maker))

        last = max(makers, key=begins, default=None)
        number = max(int(is_kernel), 0 if last is None else begins(last))
        if not is_kernel:
            return _Wave(number, last)
        own = _reduced_elements(op)
        reduces = op if own > 1 else None
        together = [self.waves[m] for m in makers if _is_for_kernels(m)]
        together = [wave for wave in together if wave.number == number]
        most = max(together, key=lambda wave: wave.elements, default=_Wave(number))
        if reduces is None or most.reduction is None or _are_of_one_row(reduces, most.reduction):
            return _Wave(number, last, max(own, most.elements), reduces or most.reduction)
        if own * most.elements > MOST_READ:
            return _Wave(number + 1, most.reduction, own, reduces)
        return _Wave(number, last, own * most.elements, reduces)

    def read_again(self) -> int:
        """Bytes that kernels after the end of a wave read which kernels before it had read or made,
        along the longest chain of waves."""
        every = frozenset(self.waves)
        ends = [(every, every), *self._ends(), (every, every)]
        seen: set[SSAValue] = set()
        total = 0
        for (_, after), (before, _) in pairwise(ends):
            wanted = [o for o in self.waves if o in after & before and self._is_wanted_whole(o)]
            total += _smallest_cut(wanted, self.waves, seen)
            seen |= {value for _, value, _ in _needed_by(wanted, self.waves)}
        return total

    def _is_wanted_whole(self, op: Operation) -> bool:
        """Whether kernels compute all elements of an op: it reduces, or others read it."""
        leaves = any(_leaves(value, self.waves) for value in op.results)
        return _is_for_kernels(op) and (leaves or _reduced_elements(op) > 1)

    def _ends(self) -> list[tuple[Set[Operation], Set[Operation]]]:
        """For each call on the longest chain, and each lookup's gradient of what another kernel has
        to reduce: the ops that run before, and those that run after.

        Of sums that a second kernel ends the first one may leave parts, which are few.
        """
        op = max(reversed(self.waves), key=lambda o: self.waves[o].number, default=None)
        found: list[tuple[Set[Operation], Set[Operation]]] = []
        while op is not None:
            last = self.waves[op].last
            if not _is_computed(op):
                found.append((self._before(op), self._behind(op)))
            elif op.name == LOOKUP_GRADIENT and last is not None and _is_for_kernels(last):
                if self.waves[last].number < self.waves[op].number:
                    found.append((self._before(last) | {last}, self._behind(op) | {op}))
            op = last
        return found[::-1]

    def _before(self, op: Operation) -> set[Operation]:
        return self._reached(op, lambda o: (value.owner for value in o.operands))

    def _behind(self, op: Operation) -> set[Operation]:
        return self._reached(op, lambda o: (use.operation for v in o.results for use in v.uses))

    def _reached(
        self, op: Operation, near: Callable[[Operation], Iterable[object]]
    ) -> set[Operation]:
        """The ops of the phase that one leads to."""
        found: set[Operation] = set()
        pending = [op]
        while pending:
            for other in near(pending.pop()):
                if isinstance(other, Operation) and other in self.waves and other not in found:
                    found.add(other)
                    pending.append(other)
        return found


def _needed_by(
    ops: Iterable[Operation], inside: Collection[Operation]
) -> Iterator[tuple[Operation, SSAValue, bool]]:
    """Each operand of ops, and of all that kernels of the phase compute for them; and whether it is
    there before the phase's kernels."""
    found = set(ops)
    pending = list(found)
    while pending:
        op = pending.pop()
        for value in op.operands:
            owner = value.owner
            is_made = isinstance(owner, Operation) and owner in inside and _is_computed(owner)
            yield op, value, not is_made
            if isinstance(owner, Operation) and is_made and owner not in found:
                found.add(owner)
                pending.append(owner)


def _smallest_cut(
    ops: Collection[Operation], inside: Collection[Operation], seen: Collection[SSAValue]
) -> int:
    """The fewest bytes from which ops can be computed, those that are written for that with them.

    seen: what ops before these needed. Of other values those that are there before the phase's
    kernels count as nothing, and those that kernels make and no other op reads count twice.
    """
    graph: networkx.DiGraph[object] = networkx.DiGraph()
    graph.add_nodes_from([_MEMORY, _WANTED])
    for op, value, is_there in _needed_by(ops, inside):
        times = 1
        if value not in seen:
            times = 0 if is_there else 1 + (not _leaves(value, inside))
        graph.add_edge(_MEMORY if is_there else value.owner, (value, "made"))
        size = times * num_bytes(tensor_type_of(value))
        graph.add_edge((value, "made"), (value, "read"), capacity=size)
        if spec_of(op).role == "move":  # it reads a part of the operand
            taken = num_elements(op.results[0]) * dtype_of_value(value).itemsize
            graph.add_edge((value, "read"), op, capacity=taken)
        else:
            graph.add_edge((value, "read"), op)
    for op in ops:
        graph.add_edge(op, _WANTED)
    cut: int = networkx.minimum_cut_value(graph, _MEMORY, _WANTED)
    return cut


_MEMORY, _WANTED = "memory", "wanted"
"""Where bytes come from, and where they go."""


def _reduced_elements(op: Operation) -> int:
    """How many elements of its operand make one of an op's; of several results, the fewest."""
    if op.name == LOOKUP_GRADIENT:
        return num_elements(op.operands[1])
    if role_of(op) != "reduce" or not isinstance(op, AtenOp):
        return 1
    return min(r.size if r.over == "row" else r.numel // r.size for r in reductions_of(op))


def _are_of_one_row(op: Operation, other: Operation) -> bool:
    """Whether two ops reduce the same rows, so that one program reads a row for both."""
    if not (isinstance(op, AtenOp) and isinstance(other, AtenOp)):
        return False
    if LOOKUP_GRADIENT in (op.name, other.name):
        return False
    rows = ({r for r in reductions_of(o) if r.over == "row"} for o in (op, other))
    return bool(set.intersection(*rows))


def _leaves(value: SSAValue, inside: Collection[Operation]) -> bool:
    """Whether an op that no kernel of the phase computes reads a value, or a view of it."""
    for use in value.uses:
        reader = use.operation
        if reader not in inside or not _is_computed(reader):
            return True
        if spec_of(reader).is_layout and any(_leaves(v, inside) for v in reader.results):
            return True
    return False


def _is_for_kernels(op: Operation) -> bool:
    """Whether a kernel computes an op, but for products."""
    if op.name == LOOKUP_GRADIENT and not _has_kernel(op):
        return False
    return role_of(op) not in (None, "view", "matmul")


def _has_kernel(gradient: Operation) -> bool:
    """Whether the gradient of a lookup is ours, and no call of the library's."""
    users = [use.operation for use in gradient.results[0].uses]
    added = (space_of([gradient, user], user.results) for user in users)
    return is_kernel_alone(gradient) or any(isinstance(s, IterationSpace) for s in added)


def _is_computed(op: Operation) -> bool:
    """Whether a kernel computes an op, or sees a value through it."""
    return _is_for_kernels(op) or spec_of(op).is_layout
