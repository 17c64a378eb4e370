"""Is a program well formed? Every check beyond xDSL's own, in one walk.

Names are defined before use; types are those torch infers; collectives fit the mesh;
shardings fit shapes and mesh; pending sums reach only ops that are linear in them. A program
is one text that every rank runs, so all ranks issue the same collectives in the same order on
every group, which rules out deadlock between them.
"""

from __future__ import annotations

from typing import cast

from xdsl.dialects import builtin, func
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.aten import AtenOp
from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.dist import STARTED, AllReduceOp, DistOp, ReduceScatterOp, WaitOp
from shardweave.ir.infer import infer_types
from shardweave.ir.kernel import FusedOp, YieldOp
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program, sharding_of
from shardweave.ir.rules import rule_of
from shardweave.ir.sharding import Sharding
from shardweave.ir.source_text import excerpt, position
from shardweave.ir.syntax import layer_of
from shardweave.ir.types import shape_of, type_problem

Place = Operation | SSAValue | None
"""What a problem is about."""


class VerifyError(ValueError):
    """A program is not well formed. The message names the op, its layer and what to do."""


def check(program: Program) -> None:
    """Raises VerifyError with the first problem of the program.

    Of a program that was parsed it gives line and column, and as a note the line with a caret.
    """
    problems = located_problems(program)
    if not problems:
        return
    message, place = problems[0]
    source = program.source
    offset = None if source is None or place is None else source.offset_of(place)
    if source is None or offset is None:
        raise VerifyError(message)
    line, column = position(source.text, offset)
    error = VerifyError(f"{source.name}:{line}:{column}: {message}")
    error.add_note(excerpt(source.text, offset))
    raise error


def verify(program: Program) -> list[str]:
    """All problems of the program, in order; empty if it is well formed."""
    return [message for message, _ in located_problems(program)]


def located_problems(program: Program) -> list[tuple[str, Place]]:
    """All problems, each with the op or value that it is about, if it is about one."""
    return _Verifier(program).problems()


def describe(op: Operation) -> str:
    """How messages name an op: its name, first result, layer, and line of the model's source."""
    layer = layer_of(op)
    result = op.results[0].name_hint if op.results else None
    value = f" (%{result})" if result else ""
    place = op.location
    source = (
        f" at {place.filename.data}:{place.line.data}"
        if isinstance(place, builtin.FileLineColLoc)
        else ""
    )
    return f"{op.name}{value}" + (f" in layer '{layer}'" if layer else "") + source


class _Verifier:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.mesh = program.mesh or Mesh()
        self.defined: set[SSAValue] = set(program.function.body.block.args)
        self.shardings: dict[SSAValue, Sharding] = {}
        self.untyped: set[SSAValue] = set()  # results of ops whose types are no tensors
        self.found: list[str] = []
        self.places: list[Place] = []

    def problems(self) -> list[tuple[str, Place]]:
        self._boundary()
        if self.found:  # without its arguments' types nothing can be said of the ops
            return self._located()
        self._slots()
        for op in self.program.function.body.block.ops:
            self._op(op)
            self._place(op)
        return self._located()

    def _place(self, place: Place) -> None:
        """What was found since the last call is about `place`."""
        self.places += [place] * (len(self.found) - len(self.places))

    def _located(self) -> list[tuple[str, Place]]:
        self._place(self.program.return_op)
        return list(zip(self.found, self.places, strict=True))

    def _boundary(self) -> None:
        """Arguments are tensors; the one return gives what the function promises."""
        function = self.program.function
        for argument in function.body.block.args:
            problem = type_problem(argument.type)
            if problem is not None:
                self.found.append(f"argument %{argument.name_hint}: {problem}.")
                self._place(argument)
        last = self.program.return_op
        if any(isinstance(op, func.ReturnOp) and op is not last for op in function.body.block.ops):
            self.found.append("func.return stands before the end; keep only the last.")
        if tuple(last.operand_types) != tuple(function.function_type.outputs.data):
            self.found.append("func.return: its operands are not of the function's result types.")

    def _slots(self) -> None:
        for slot in (*self.program.arguments, *self.program.results):
            try:
                sharding = self.program.sharding_of_slot(slot)
            except ValueError as error:
                self.found.append(str(error))
                self._place(slot.value)
                continue
            if slot.value in self.defined:
                self.shardings[slot.value] = sharding

    def _op(self, op: Operation) -> None:
        for operand in op.operands:
            if operand not in self.defined:
                self.found.append(
                    f"{describe(op)} uses %{operand.name_hint} before it is defined; move the "
                    "definition up."
                )
        self.defined.update(op.results)
        problems = list(filter(None, (type_problem(result.type) for result in op.results)))
        self.found += [f"{describe(op)}: {problem}." for problem in problems]
        self.untyped.update(op.results if problems else ())
        is_typed = self.untyped.isdisjoint((*op.operands, *op.results))
        if isinstance(op, (func.ReturnOp, YieldOp)) or not is_typed:
            return
        problem = self._problem_of(op)
        if problem is not None:
            self.found.append(f"{describe(op)}{problem}.")
            return  # what follows relies on its types
        if isinstance(op, FusedOp):
            self._fused(op)
            return
        if isinstance(op, WaitOp):
            self._wait(op)
        self._in_flight(op)
        self._shardings(op)

    def _problem_of(self, op: Operation) -> str | None:
        """What is wrong with an op by itself: its arguments, its types."""
        try:
            op.verify(verify_nested_ops=False)
        except VerifyException as error:
            return f": {str(error).splitlines()[-1]}"
        if isinstance(op, AtenOp):
            return self._problem_of_types(op)
        if isinstance(op, DistOp):
            problem = op.problem_on(self.mesh)
            return None if problem is None else f": {problem}"
        return None if isinstance(op, FusedOp) else " is not an op of a known dialect"

    def _fused(self, op: FusedOp) -> None:
        """The ops of a region are checked like any others; they see the operands only."""
        outside = self.defined
        self.defined = set[SSAValue](op.block.args)
        for argument, operand in zip(op.block.args, op.operands, strict=True):
            if operand in self.shardings:
                self.shardings[argument] = self.shardings[operand]
        for inner in op.block.ops:
            self._op(inner)
        self.defined = outside
        for result, value in zip(op.results, op.yielded, strict=True):
            if value in self.shardings:
                self.shardings[result] = self.shardings[value]

    def _in_flight(self, op: Operation) -> None:
        """Results of a started collective go, all of them, to exactly one wait."""
        if not isinstance(op, STARTED):
            return
        users = {use.operation for result in op.results for use in result.uses}
        waits = [user for user in users if isinstance(user, WaitOp)]
        if len(users) != 1 or len(waits) != 1 or any(r.first_use is None for r in op.results):
            self.found.append(
                f"{describe(op)}: found {len(waits)} dist.wait among {len(users)} users, expected "
                "one wait that reads all its results and nothing else that reads them; add "
                "%done = dist.wait(%started) and use %done."
            )

    def _wait(self, op: WaitOp) -> None:
        starts = {operand.owner for operand in op.operands}
        if len(starts) != 1 or not isinstance(next(iter(starts)), STARTED):
            self.found.append(
                f"{describe(op)}: its operands must be the results of one started collective."
            )

    def _problem_of_types(self, op: AtenOp) -> str | None:
        types = infer_types(op)
        if isinstance(types, str):
            return f": torch refuses these operands: {types.rstrip('.')}"
        if types == tuple(result.type for result in op.results):
            return None
        found = ", ".join(str(result.type) for result in op.results)
        wanted = ", ".join(str(t) for t in types)
        return f": result type is {found}, expected {wanted}"

    # Shardings

    def _shardings(self, op: Operation) -> None:
        attribute = op.properties.get("sharding")
        if attribute is None:
            self._leaks(op)
            return
        attributes = cast("builtin.ArrayAttr[ShardingAttr]", attribute)
        if not _is_sharding_list(attribute) or len(attributes) != len(op.results):
            self.found.append(
                f"{describe(op)}: sharding must list one #dist.sharding for each result."
            )
            return
        for result, one in zip(op.results, attributes, strict=True):
            try:
                self.shardings[result] = sharding_of(one, shape_of(result), self.program)
            except ValueError as error:
                self.found.append(f"{describe(op)}: {error}")
        self._leaks(op)

    def _leaks(self, op: Operation) -> None:
        """In a local program a pending sum may only meet what is linear in it, or be reduced."""
        if not self.program.is_local or isinstance(op, (AllReduceOp, ReduceScatterOp)):
            return
        pending = {
            index: sharding.unreduced
            for index, operand in enumerate(op.operands)
            if (sharding := self.shardings.get(operand)) is not None and sharding.unreduced
        }
        if not pending or isinstance(op, DistOp):
            return
        assert isinstance(op, AtenOp)
        linear = rule_of(op).linear
        if set(pending) <= linear and all(i in pending for i in linear):
            return
        index = min(pending)
        self.found.append(
            f"{describe(op)}: operand {index} (%{op.operands[index].name_hint}) is an unreduced "
            f"sum over {list(pending[index])}, and the op is not linear in it; reduce it first "
            "with dist.all_reduce."
        )


def _is_sharding_list(attribute: object) -> bool:
    if not isinstance(attribute, builtin.ArrayAttr):
        return False
    items = cast("builtin.ArrayAttr[Attribute]", attribute)
    return all(isinstance(item, ShardingAttr) for item in items)
