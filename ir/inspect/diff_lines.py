"""The lines that single ops have in the text of their program."""

from __future__ import annotations

from io import StringIO

from xdsl.ir import Operation, SSAValue
from xdsl.printer import Printer

from shardweave.ir.program.program import Program


class Lines:
    """Prints ops one by one with the names that the whole text gives their values.

    Made in time linear in the program; a line costs only its own length.
    """

    def __init__(self, program: Program) -> None:
        self._printer = Printer(stream=StringIO())
        self._names: dict[SSAValue, str] = {}
        # The text names values in the order in which they are defined.
        for slot in program.arguments:
            self._names[slot.value] = self._printer.print_ssa_value(slot.value)
        for op in program.ops:
            for value in op.results:
                self._names[value] = self._printer.print_ssa_value(value)

    def name(self, value: SSAValue) -> str:
        """With the leading %."""
        return f"%{self._names[value]}"

    def line(self, op: Operation) -> str:
        """The op's line, without indentation; an op with a region has several."""
        stream = StringIO()
        self._printer.stream = stream
        self._printer.print_op(op)
        return stream.getvalue()
