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
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program, Slot, sharding_of
from shardweave.ir.rules import rule_of
from shardweave.ir.sharding import Sharding
from shardweave.ir.syntax import layer_of
from shardweave.ir.types import shape_of, type_problem


class VerifyError(ValueError):
    """A program is not well formed. The message names the op, its layer and what to do."""


def check(program: Program) -> None:
    """Raises VerifyError with the first problem of the program."""
    problems = verify(program)
    if problems:
        raise VerifyError(problems[0])


def verify(program: Program) -> list[str]:
    """All problems of the program, in order; empty if it is well formed."""
    return _Verifier(program).problems()


def describe(op: Operation) -> str:
    """How messages name an op: its name, its first result, its layer."""
    layer = layer_of(op)
    result = op.results[0].name_hint if op.results else None
    value = f" (%{result})" if result else ""
    return f"{op.name}{value}" + (f" in layer '{layer}'" if layer else "")


class _Verifier:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.mesh = program.mesh or Mesh()
        self.defined: set[SSAValue] = set(program.function.body.block.args)
        self.shardings: dict[SSAValue, Sharding] = {}
        self.untyped: set[SSAValue] = set()  # results of ops whose types are no tensors
        self.found: list[str] = []

    def problems(self) -> list[str]:
        self._boundary()
        if self.found:  # without its arguments' types nothing can be said of the ops
            return self.found
        self._slots()
        for op in self.program.function.body.block.ops:
            self._op(op)
        for slot in self.program.results:
            self._result(slot)
        return self.found

    def _boundary(self) -> None:
        """Arguments are tensors; the one return gives what the function promises."""
        function = self.program.function
        for argument in function.body.block.args:
            problem = type_problem(argument.type)
            if problem is not None:
                self.found.append(f"argument %{argument.name_hint}: {problem}.")
        last = self.program.return_op
        if any(isinstance(op, func.ReturnOp) and op is not last for op in function.body.block.ops):
            self.found.append("func.return stands before the end; keep only the last.")
        if tuple(last.operand_types) != tuple(function.function_type.outputs.data):
            self.found.append("func.return: its operands are not of the function's result types.")

    def _slots(self) -> None:
        arguments, results = self.program.arguments, self.program.results
        for slots, what, kinds in (
            (arguments, "argument", ("param", "buffer", "input", "tangent")),
            (results, "result", ("output", "grad", "buffer")),
        ):
            for index, slot in enumerate(slots):
                if slot.kind not in kinds:
                    self.found.append(
                        f"{what} {index} ('{slot.name}'): dist.kind is '{slot.kind}', expected one "
                        f"of {', '.join(kinds)}."
                    )
        for slot in arguments:
            try:
                self.shardings[slot.value] = self.program.sharding_of_slot(slot)
            except ValueError as error:
                self.found.append(str(error))

    def _result(self, slot: Slot) -> None:
        """In a local program a result is where it says to be, and nothing is left to reduce."""
        try:
            promised = self.program.sharding_of_slot(slot)
        except ValueError as error:
            self.found.append(str(error))
            return
        given = self.shardings.get(slot.value)
        if not self.program.is_local or given is None or given == promised:
            return
        what = f"{slot.kind} '{slot.name}' (%{slot.value.name_hint})"
        shape = given.global_shape(shape_of(slot.value))
        if given.unreduced != promised.unreduced:
            self.found.append(
                f"{what} is an unreduced sum over {list(given.unreduced)}; reduce it before it is "
                "returned, with dist.all_reduce."
            )
        else:
            self.found.append(
                f"{what} is returned as {ShardingAttr.of(given, shape)}, but dist.sharding of the "
                f"result says {slot.sharding_attr}; make them equal."
            )

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
        if isinstance(op, func.ReturnOp) or not is_typed:
            return
        problem = self._problem_of(op)
        if problem is not None:
            self.found.append(f"{describe(op)}{problem}.")
            return  # what follows relies on its types
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
        return " is not an op of the aten or dist dialect"

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
