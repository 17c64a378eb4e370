"""Verification of a program: every check beyond xDSL's own, in one walk.

Values are defined before use; types equal those that torch infers; collectives fit the mesh and
the shardings of their operands; shardings fit shapes and mesh; partial sums reach only ops that are
linear in them, and no result; in a propagated global program operands fit their ops' rules. Takes
time linear in the ops.

A function is one block without branches, and every rank of its mesh, or stage, runs it. So all
ranks issue the same collectives in the same order on every group; no program can express another
order on some rank, so none can deadlock. `verify/stages.py` checks messages between stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xdsl.dialects import func
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import describe, sharding_attrs_of, wanted_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.dist import (
    DistOp,
    ReshardOp,
    StartedOp,
    ToDeviceOp,
    WaitOp,
    is_copied_back,
    is_on_host,
)
from shardweave.ir.dialects.kernel import FusedOp, YieldOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of, type_problem
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program, Slot, require_program, sharding_of
from shardweave.ir.program.staged import STAGE_KINDS, functions_of, is_staged
from shardweave.ir.program.text import excerpt, position, without_gc
from shardweave.ir.sharding.fit import Misfit, fitting_factors
from shardweave.ir.sharding.flow import has_shardings
from shardweave.ir.sharding.reshard import reshard
from shardweave.ir.sharding.rules import rule_of
from shardweave.ir.verify.ops import is_known_right, problem_of_op, problems_of_rows
from shardweave.ir.verify.stages import problems_of_stages

Place = Operation | SSAValue | None
"""The op or value that a problem is about."""


class VerifyError(ValueError):
    """Raised for a program that is not well formed; names the op, its layer and what to do."""


def check(program: Program) -> None:
    """Raise VerifyError for the first problem, with its line if the program was parsed."""
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
    """All problems as (message, the op or value concerned; None if there is none)."""
    require_program(program)
    blocks = len(program.function.body.blocks)
    if blocks != 1:
        problem = (
            f"func.func has {blocks} blocks, expected 1; a step has no branches, so that all ranks "
            "issue the same collectives."
        )
        return [(problem, None)]
    with without_gc():
        problems = [*_devices(program), *_Verifier(program).problems()]
        problems = problems or list(problems_of_rows(program))
        if is_staged(program):
            for function in functions_of(program).values():
                inside = list(_Verifier(function, STAGE_KINDS).problems())
                inside = inside or list(problems_of_rows(function))
                problems += [(f"@{function.name}: {message}", place) for message, place in inside]
            problems = problems or list(problems_of_stages(program))
        return problems


def _devices(program: Program) -> Iterator[tuple[str, Place]]:
    try:
        program.devices  # noqa: B018
    except ValueError as error:
        yield str(error), None


class _Verifier:
    def __init__(self, program: Program, kinds: Sequence[str] = ()) -> None:
        self.program = program
        self.kinds = kinds
        """Kinds of slots that are allowed in addition to a step's."""
        self.mesh = program.mesh or Mesh()
        self.defined: set[SSAValue] = set(program.function.body.block.args)
        self.is_local = program.is_local
        self.is_propagated = not self.is_local and has_shardings(program)
        # By ids, as hashing contents takes longer; the program keeps its attributes alive.
        self.read: dict[tuple[int, int], Sharding] = {}
        self.shardings: dict[SSAValue, Sharding] = {}
        self.pending: dict[SSAValue, Sharding] = {}  # unreduced values, annotated or not
        self.untyped: set[SSAValue] = set()  # results of ops whose types are no tensors
        self.away = {v for v in self.defined if kinds and is_copied_back(v)}  # on the host

    def problems(self) -> Iterator[tuple[str, Place]]:
        boundary = list(self._boundary())
        yield from boundary
        if boundary:  # without its arguments' types nothing can be said of the ops
            return
        yield from self._slots()
        for op in self.program.function.body.block.ops:
            if not self._is_right(op):
                for problem in self._op(op):
                    yield problem, op
        for slot in self.program.results:
            if slot.value in self.away and slot.kind != "kept":
                yield f"{slot.kind} '{slot.name}' is on the host; return what is copied back.", None
            for problem in self._result(slot):
                yield problem, slot.value

    def _boundary(self) -> Iterator[tuple[str, Place]]:
        """Check that arguments are tensors and the only return has the function's result types."""
        function = self.program.function
        for argument in function.body.block.args:
            problem = type_problem(argument.type)
            if problem is not None:
                yield f"argument %{argument.name_hint}: {problem}.", argument
        last = self.program.return_op
        if any(type(op) is func.ReturnOp and op is not last for op in function.body.block.ops):
            yield "func.return stands before the end; keep only the last.", last
        if tuple(last.operand_types) != tuple(function.function_type.outputs.data):
            yield "func.return: its operands are not of the function's result types.", last

    def _slots(self) -> Iterator[tuple[str, Place]]:
        arguments, results = self.program.arguments, self.program.results
        for slots, what, kinds in (
            (arguments, "argument", ("param", "buffer", "input", "tangent")),
            (results, "result", ("output", "grad", "buffer")),
        ):
            for index, slot in enumerate(slots):
                if slot.kind not in (*kinds, *self.kinds):
                    problem = (
                        f"{what} {index} ('{slot.name}'): dist.kind is '{slot.kind}', expected one "
                        f"of {', '.join(kinds)}."
                    )
                    yield problem, slot.value
        for slot in arguments:
            try:
                self._know(slot.value, self.program.sharding_of_slot(slot))
            except ValueError as error:
                yield str(error), slot.value

    def _read(self, attribute: ShardingAttr, value: SSAValue) -> Sharding:
        key = id(attribute), id(value.type)
        known = self.read.get(key)
        if known is None:
            known = self.read[key] = sharding_of(attribute, shape_of(value), self.program)
        return known

    def _know(self, value: SSAValue, sharding: Sharding) -> None:
        self.shardings[value] = sharding
        if sharding.unreduced:
            self.pending[value] = sharding

    def _result(self, slot: Slot) -> Iterator[str]:
        """Check that a result has the sharding that its slot declares, unreduced axes included."""
        try:
            promised = self.program.sharding_of_slot(slot)
        except ValueError as error:
            yield str(error)
            return
        if not (self.is_local or self.is_propagated):
            return
        what = f"{slot.kind} '{slot.name}', {_origin(slot.value)},"
        pending = self.pending.get(slot.value, NOTHING)
        held = self.shardings.get(slot.value)
        if pending.unreduced != promised.unreduced:
            yield f"{what} {_unreduced_problem(pending, promised)}."
        elif held is not None and held != promised:
            shape = shape_of(slot.value)
            shape = held.global_shape(shape) if self.is_local else shape
            yield (
                f"{what} is returned as {ShardingAttr.of(held, shape)}, but dist.sharding of the "
                f"result says {slot.sharding_attr}; make them equal."
            )

    # Ops

    def _is_right(self, op: Operation) -> bool:
        """True if an op equals a verified op, reads no partial sum, and has fitting shardings. A
        fast path for most ops; `_op` checks the others and describes their problems."""
        if self.untyped or not is_known_right(op):
            return False
        for operand in op.operands:
            if operand not in self.defined or operand in self.pending or operand in self.away:
                return False
        self.defined.update(op.results)
        if self.is_propagated or "wanted" in op.properties:
            return next(self._shardings(op), None) is None
        attributes = sharding_attrs_of(op)
        if attributes is None:
            return True
        try:
            for result, attribute in zip(op.results, attributes, strict=True):
                self._know(result, self._read(attribute, result))
        except ValueError:
            return False
        return True

    def _op(self, op: Operation) -> Iterator[str]:
        """Problems of an op and of the ops in its region, which may read only the op's operands."""
        problems = [f"{describe(op)}{problem}." for problem in self._problems(op)]
        yield from problems
        if op.regions and isinstance(op, FusedOp) and not problems and self._is_typed(op):
            outside, self.defined = self.defined, set[SSAValue](op.block.args)
            self._take_over(op.block.args, op.operands)
            for inner in op.block.ops:
                yield from self._op(inner)
            self.defined = outside
            self._take_over(op.results, op.yielded)

    def _problems(self, op: Operation) -> Iterator[str]:
        for operand in op.operands:
            if operand not in self.defined:
                yield f" uses %{operand.name_hint} before it is defined; move the definition up"
        self.defined.update(op.results)
        yield from self._place(op)
        if not isinstance(op, (AtenOp, DistOp, FusedOp, YieldOp, func.ReturnOp)):
            self.untyped.update(op.results)
            yield " is not an op of the aten or dist dialect; write the step in these"
            return
        for result in op.results:
            problem = type_problem(result.type)
            if problem is not None:
                self.untyped.update(op.results)
                yield f": {problem}"
        if type(op) in (func.ReturnOp, YieldOp) or not self._is_typed(op):
            return
        problem = self._problem_of(op)
        if problem is not None:
            yield f": {problem}"  # what follows relies on its types
        elif not isinstance(op, FusedOp):
            if isinstance(op, DistOp):
                yield from self._in_flight(op)
            yield from self._shardings(op)

    def _is_typed(self, op: Operation) -> bool:
        return not self.untyped or self.untyped.isdisjoint((*op.operands, *op.results))

    def _problem_of(self, op: Operation) -> str | None:
        problem = problem_of_op(op)
        if problem is not None:
            return problem
        if isinstance(op, ReshardOp) and self.is_local:
            return "it stands in a local program; run insert-collectives on the global one"
        return op.problem_on(self.mesh) if isinstance(op, DistOp) else None

    def _take_over(self, values: Sequence[SSAValue], sources: Sequence[SSAValue]) -> None:
        """Copy shardings and partial sums of `sources` to `values`, across a region's border."""
        for value, source in zip(values, sources, strict=True):
            for known in (self.shardings, self.pending):
                if source in known:
                    known[value] = known[source]

    def _place(self, op: Operation) -> Iterator[str]:
        """Check that a value on the host is only copied back, or left for a later function."""
        may_read = isinstance(op, (ToDeviceOp, WaitOp, func.ReturnOp))
        if not may_read and not self.away.isdisjoint(op.operands):
            (name, *_) = (operand.name_hint for operand in op.operands if operand in self.away)
            yield f" reads %{name}, which is on the host; read what dist.to_device brings back"
        if isinstance(op, ToDeviceOp) and op.value not in self.away:
            yield f": %{op.value.name_hint} is on the device; give it what dist.to_host gives"
        self.away.update(result for result in op.results if is_on_host(result))

    def _in_flight(self, op: Operation) -> Iterator[str]:
        """Check that one wait, and nothing else, reads all results of a started collective."""
        if isinstance(op, StartedOp):
            users = {use.operation for result in op.results for use in result.uses}
            waits = [user for user in users if isinstance(user, WaitOp)]
            if len(users) != 1 or len(waits) != 1 or any(r.first_use is None for r in op.results):
                yield (
                    f": found {len(waits)} dist.wait among {len(users)} users, expected one wait "
                    "that reads all its results and nothing else that reads them; add %done = "
                    "dist.wait(%started) and use %done"
                )
        if isinstance(op, WaitOp):
            starts = {operand.owner for operand in op.operands}
            start = next(iter(starts), None)
            if len(starts) != 1 or not isinstance(start, StartedOp):
                yield (
                    ": its operands must be the results of one started collective; give it those "
                    "of the dist.start_* that it waits for"
                )
            elif set(op.operands) == set(start.results) and [*op.operands] != [*start.results]:
                begun = describe(start)
                yield f": it must take the results of {begun} each once and in their order"

    # Shardings

    def _shardings(self, op: Operation) -> Iterator[str]:
        attributes = sharding_attrs_of(op)
        if attributes is None and self.is_propagated:
            yield (
                " has no sharding, but other ops do; write the one that its result is in, or ask "
                "for shardings with wanted = [..] and leave sharding to propagate-shardings"
            )
        for is_fact, attrs in ((True, attributes), (False, wanted_attrs_of(op))):
            for result, attr in () if attrs is None else zip(op.results, attrs, strict=True):
                try:
                    sharding = self._read(attr, result)
                except ValueError as error:
                    yield f": {str(error).rstrip('.')}"
                    continue
                if is_fact:
                    self._know(result, sharding)
        if self.is_local:
            yield from self._move(op) if isinstance(op, DistOp) else self._leaks(op)
        elif self.is_propagated:
            yield from self._fit(op)

    def _fit(self, op: Operation) -> Iterator[str]:
        """Check, in a propagated global program, that operands fit and reshards can be made. Skips
        ops with a value of unknown sharding; another check reports these."""
        if not all(value in self.shardings for value in (*op.operands, *op.results)):
            return
        operands = tuple(self.shardings[value] for value in op.operands)
        results = tuple(self.shardings[value] for value in op.results)
        if isinstance(op, ReshardOp):
            try:
                reshard(shape_of(op.value), operands[0], results[0], self.mesh)
            except ValueError as error:
                yield f": {str(error).rstrip('.')}"
        if isinstance(op, AtenOp):
            fit = fitting_factors(rule_of(op), operands, results, self.mesh)
            if isinstance(fit, Misfit):
                yield f": {fit.text(op)}; add a dist.reshard before it, or correct its sharding"

    def _leaks(self, op: Operation) -> Iterator[str]:
        """Check that a local program only reduces partial sums, or uses them in linear ops."""
        if not self.pending:
            return
        pending = [i for i, operand in enumerate(op.operands) if operand in self.pending]
        if not pending:
            return
        assert isinstance(op, AtenOp)
        problem = self._problem_of_linearity(op, pending)
        if problem is None:
            yield from self._carry(op, self.pending[op.operands[pending[0]]])
        else:
            yield f": {problem}; reduce it first with dist.all_reduce"

    def _problem_of_linearity(self, op: AtenOp, pending: Sequence[int]) -> str | None:
        first, sharding = pending[0], self.pending[op.operands[pending[0]]]
        what = (
            f"operand {first} (%{op.operands[first].name_hint}) is an unreduced "
            f"{sharding.reduction} over {list(sharding.unreduced)}"
        )
        # Sub-batches are combined by the maximum of their partial maxima.
        is_max = sharding.reduction == "max"
        of_max = frozenset((0, 1)) if spec_of(op).merge == "max" else frozenset[int]()
        linear = of_max if is_max else _linear_operands(op)
        if not linear.issuperset(pending):
            return f"{what}, and the op is not linear in it"
        for index in sorted(linear):
            other = self.pending.get(op.operands[index], NOTHING)
            if (other.unreduced, other.reduction) != (sharding.unreduced, sharding.reduction):
                return (
                    f"{what}, but operand {index} (%{op.operands[index].name_hint}), to which the "
                    "op is linear together with it, is not"
                )
        return None

    def _carry(self, op: Operation, pending: Sharding) -> Iterator[str]:
        """Check that a linear op's results are unreduced over the axes of its operands."""
        for result in op.results:
            known = self.shardings.get(result)
            if known is None:
                self.pending[result] = pending
            elif not set(pending.unreduced) <= set(known.unreduced):
                yield (
                    f": its operands are unreduced sums over {list(pending.unreduced)} and so is "
                    f"%{result.name_hint}, but its sharding does not say so; reduce the operands "
                    "or write unreduced"
                )

    def _move(self, op: DistOp) -> Iterator[str]:
        for operand, result in zip(op.operands, op.results, strict=False):
            before, after = self.shardings.get(operand), self.shardings.get(result)
            if after is None:
                left = self.pending.get(operand, NOTHING)
                if op.effect is not None and op.effect.reduces is not None:
                    left = left.reduced(op.axes)
                if left.unreduced:
                    self.pending[result] = left
            elif before is not None:
                yield from self._effect(op, before, result, after)

    def _effect(
        self, op: DistOp, before: Sharding, result: SSAValue, says: Sharding
    ) -> Iterator[str]:
        """Check that a result's sharding is what the collective makes of its operand's sharding."""
        try:
            after = op.after(before, self.mesh)
        except ValueError as error:
            yield f": {str(error).rstrip('.')}"
            return
        if after != says:
            left, said = (
                ShardingAttr.of(each, each.global_shape(shape_of(result))) for each in (after, says)
            )
            yield f": its result is in {left}, but its sharding says {said}; write the former"


NOTHING = Sharding(())
"""The sharding of a scalar: nothing is sharded or unreduced."""


def _linear_operands(op: AtenOp) -> frozenset[int]:
    """Indices of operands in which an op is jointly linear; casts between floats count, too."""
    is_cast = spec_of(op).view == "cast"
    if is_cast and all(dtype_of_value(x).is_floating_point for x in (*op.operands, *op.results)):
        return frozenset((0,))
    return rule_of(op).linear


def _unreduced_problem(held: Sharding, promised: Sharding) -> str:
    if not held.unreduced:
        return (
            "is whole, but dist.sharding of the result says that it is unreduced over "
            f"{list(promised.unreduced)}; make them equal"
        )
    return (
        f"is an unreduced {held.reduction} over {list(held.unreduced)}; reduce it before it is "
        "returned, with dist.all_reduce"
    )


def _origin(value: SSAValue) -> str:
    """Name the origin of a value for messages."""
    if isinstance(value.owner, Operation):
        return f"the result of {describe(value.owner)}"
    return f"argument %{value.name_hint}"
