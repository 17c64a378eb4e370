"""The `kernel` dialect: regions of `aten` ops that one generated kernel computes.

    %y, %mean = kernel.fused(%x, %w, at = [3, 4, 6]) {layer = "h.0"} : tensor<..>, tensor<..> {
    ^bb0(%x : tensor<..>, %w : tensor<..>):
      ...
      kernel.yield(%5, %4)
    }

A region means what its ops mean one after another, so a backend that has no kernel for it runs
the ops. `at` remembers where the ops stood, so that `unfuse` gives back the program as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

from xdsl.dialects.builtin import ArrayAttr, IntegerAttr, i64
from xdsl.ir import Block, Dialect, Operation, Region, SSAValue
from xdsl.irdl import (
    AtLeast,
    MessageConstraint,
    irdl_op_definition,
    opt_prop_def,
    region_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.printer import Printer
from xdsl.rewriter import InsertPoint, Rewriter
from xdsl.traits import IsolatedFromAbove, IsTerminator, Pure
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.dialects.syntax import DefinedOp
from shardweave.ir.dialects.types import TENSOR

PLACES = MessageConstraint(
    ArrayAttr.constr(IntegerAttr.constr(i64, value=AtLeast(0))), "a list of places, such as [0, 2]"
)


@irdl_op_definition
class YieldOp(DefinedOp):
    """Ends a region: its operands are the results of the fused op."""

    name = "kernel.yield"
    values = var_operand_def(TENSOR)
    traits = traits_def(IsTerminator())


@irdl_op_definition
class FusedOp(DefinedOp):
    """A region of `aten` ops that one kernel computes.

    Shapes: the region's arguments are the operands; the values that it yields are the results.
    `at`: the index that each op of the region had among the step's ops before fusion.
    """

    name = "kernel.fused"
    inputs = var_operand_def(TENSOR)
    at_attr = opt_prop_def(PLACES, prop_name="at")
    body = region_def("single_block")
    outputs = var_result_def(TENSOR)
    traits = traits_def(Pure(), IsolatedFromAbove())

    @property
    def block(self) -> Block:
        return self.body.block

    @property
    def fused_ops(self) -> list[AtenOp]:
        return [op for op in self.block.ops if isinstance(op, AtenOp)]

    @property
    def yielded(self) -> tuple[SSAValue, ...]:
        """The values that the region yields as the op's results, in order."""
        last = self.block.last_op
        assert isinstance(last, YieldOp)
        return tuple(last.operands)

    @property
    def places(self) -> list[int]:
        """Indices of the region's ops among the step's ops before fusion; empty if not known."""
        return [] if self.at_attr is None else [place.value.data for place in self.at_attr]

    def print(self, printer: Printer) -> None:
        super().print(printer)
        printer.print_string(" ")
        printer.print_region(self.regions[0])

    @classmethod
    def parse(cls, parser: Parser) -> Self:
        op = super().parse(parser)
        op.add_region(parser.parse_region())
        return op

    def verify_(self) -> None:
        last = self.block.last_op
        if not isinstance(last, YieldOp):
            raise VerifyException("the region of a fused op must end in kernel.yield(..)")
        odd = [op.name for op in self.block.ops if not isinstance(op, AtenOp) and op is not last]
        if odd:
            raise VerifyException(f"a fused region may hold aten ops only, found {odd[0]}")
        _check_types("takes", self.operands, self.block.args)
        _check_types("gives", self.results, last.operands)
        count = sum(1 for _ in self.block.ops) - 1
        if self.at_attr is not None and len(self.places) != count:
            raise VerifyException(f"'at' must list {count} indices, one for each op of the region")


def _check_types(verb: str, outside: Sequence[SSAValue], inside: Sequence[SSAValue]) -> None:
    wanted = [value.type for value in outside]
    actual = [value.type for value in inside]
    if wanted != actual:
        words = ", ".join(map(str, actual))
        raise VerifyException(
            f"the op {verb} {', '.join(map(str, wanted))}, but its region {verb} {words}"
        )


def kernel_dialect() -> Dialect:
    return Dialect("kernel", [FusedOp, YieldOp])


def fuse(ops: list[Operation], before: Operation, places: list[int]) -> FusedOp:
    """Move `ops` into a new fused op before the op `before`; return the fused op.

    The caller has checked that every operand is defined above `before`, and that no result is used
    above it. It also sets the fused op's annotations.
    """
    members = set(ops)
    inputs = dict.fromkeys(v for op in ops for v in op.operands if v.owner not in members)
    outputs = escaping_values(ops)
    block = Block(arg_types=[value.type for value in inputs])
    fused = FusedOp.create(
        operands=list(inputs),
        result_types=[value.type for value in outputs],
        properties={"at": to_attribute(places)},
        regions=[Region(block)],
    )
    Rewriter.insert_op(fused, InsertPoint.before(before))
    for result, value in zip(fused.results, outputs, strict=True):
        value.replace_uses_with_if(result, lambda use: use.operation not in members)
        result.name_hint = value.name_hint
    arguments = dict(zip(inputs, block.args, strict=True))
    for value, argument in arguments.items():
        argument.name_hint = value.name_hint
    for op in ops:
        op.detach()
        for index, operand in enumerate(op.operands):
            if operand in arguments:
                op.operands[index] = arguments[operand]
        block.add_op(op)
    block.add_op(YieldOp.create(operands=outputs))
    fused.location = ops[-1].location
    return fused


def escaping_values(ops: Collection[Operation]) -> list[SSAValue]:
    """The results of `ops` that other ops read."""
    members = set(ops)
    return [
        result
        for op in ops
        for result in op.results
        if any(use.operation not in members for use in result.uses)
    ]


def inline(fused: FusedOp) -> list[Operation]:
    """Replace a fused op by the ops of its region; return these."""
    ops: list[Operation] = list(fused.fused_ops)
    values, last = fused.yielded, fused.block.last_op
    assert last is not None
    Rewriter.inline_block(fused.block, InsertPoint.before(fused), fused.operands)
    Rewriter.erase_op(last)
    Rewriter.replace_op(fused, [], values)
    return ops
