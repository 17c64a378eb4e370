"""AxoNN's overlaps as orders of ops; each hides the messages that AxoNN's own code hides.

Singh et al., arXiv 2305.13525, Sec. 4, for a layer with input I and weight W: (A) the all-reduce of
the gradient of I overlaps the computation of the gradient of W, (B) reductions of the gradients of
W and other parameters are waited for at the end of the backward pass, (C) the next weight is
gathered while a layer computes. All other messages block. Keeping gathered weights (D) does not
change the order (`delete-redundant-collectives`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.dist import STARTS, AllReduceOp, StartedOp, WaitOp
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.planners.overlap.graph import OpOrder, leading_to, wait_of
from shardweave.planners.overlap.in_order import Weights, is_last
from shardweave.planners.plan.plan_parts import AXONN_SCHEDULES

AXONN_ORDERS: Mapping[str, frozenset[str]] = {
    name: frozenset(name.removeprefix("axonn-")) for name in AXONN_SCHEDULES
}
"""Sets of overlaps by the order's name; they accumulate as in the paper's Figure 3."""


def axonn_order(
    program: Program, ops: Sequence[Operation], overlaps: Collection[str]
) -> list[Operation]:
    """Order a started program's ops with some `overlaps` (`a`, `b`, `c`); other messages block."""
    return _AxonnOrder(program, ops, overlaps).run()


class _AxonnOrder(OpOrder):
    def __init__(
        self, program: Program, ops: Sequence[Operation], overlaps: Collection[str]
    ) -> None:
        super().__init__()
        self.ops = ops
        self.blocks = blocks_of(program)
        self.gathers = Weights(program, ops).starts if "c" in overlaps else []
        self.place = {op: number for number, op in enumerate(self.gathers)}
        reductions = STARTS[AllReduceOp]
        self.input_gradients = {
            op
            for op in (ops if "a" in overlaps else ())
            if isinstance(op, reductions) and phase_of(op) == "backward" and not is_last(op)
        }
        self.gradients = {
            op
            for op in (ops if "b" in overlaps else ())
            if isinstance(op, StartedOp) and phase_of(op) == "backward" and is_last(op)
        }
        self.leading = leading_to(self.ops, self.input_gradients)

    def run(self) -> list[Operation]:
        for op in self.ops:
            if op in self.place:
                for gather in self.gathers[self.place[op] : self.place[op] + 2]:
                    self.add(gather)
            if op in self.order or isinstance(op, WaitOp) or self._shows_gradient(op):
                continue  # is added before what reads it, or at the end
            if self._may_wait(op):
                self.deferred.append(op)
                continue
            self.add(op)
            if op in self.input_gradients:
                self.catch_up()
        return self.finished(self.ops)

    def _may_wait(self, op: Operation) -> bool:
        """True if an op can be deferred until an input gradient of its block is being reduced."""
        if not self.input_gradients or phase_of(op) != "backward" or op in self.leading:
            return False
        if self.deferred and self.blocks.of_op(self.deferred[0]) != self.blocks.of_op(op):
            self.catch_up()
        return True

    def _shows_gradient(self, op: Operation) -> bool:
        """True if an op reads a reduced gradient, which is only returned: it can come last."""
        owners = (value.owner for value in op.operands)
        return any(
            isinstance(owner, WaitOp) and owner.operands[0].owner in self.gradients
            for owner in owners
        )

    def append(self, op: Operation) -> None:
        """Append an op and, if it blocks, its wait."""
        super().append(op)
        travels = op in self.input_gradients or op in self.gradients or op in self.place
        if isinstance(op, StartedOp) and not travels:
            self.add(wait_of(op))
