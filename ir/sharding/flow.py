"""Shardings known so far while a global program is walked in order.

A value may exist in several versions: its producer's sharding, and the shardings to which
it was resharded for an earlier use. A later use of the same version is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from xdsl.dialects.builtin import ArrayAttr
from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import describe, sharding_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.dist import CollectiveOp
from shardweave.ir.dialects.types import dtype_of_value, shape_of
from shardweave.ir.mesh.placement import DimSharding, Sharding
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program
from shardweave.ir.sharding.assignment import Assignment, Operand, assign, cheapest_version
from shardweave.ir.sharding.reshard import ReshardStep, UnreachableSharding, reshard
from shardweave.ir.sharding.rules import Rule, rule_of

MAX_VERSIONS = 4
"""Versions of one value that are remembered; more would only cost time."""


class Flow:
    """Keeps the versions (shardings) in which each value exists while ops are visited in order.

    If a parameter is stored in finer shards than ops read (`dist.used`), ops know only the version
    that they read; `stored` has the shardings of arguments as stored.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.mesh = program.needed_mesh()
        self.rules: dict[AtenOp, Rule] = {}
        self.versions: dict[SSAValue, list[Sharding]] = {}
        self.stored: dict[SSAValue, Sharding] = {}
        self.pinned: set[SSAValue] = set()
        # Noted before the program changes: reshards take over uses, and operands of views.
        self.views: dict[SSAValue, tuple[AtenOp, SSAValue]] = {}
        self.read_twice: set[SSAValue] = set()
        for op in program.ops:
            if isinstance(op, AtenOp) and spec_of(op).is_rearrangement:
                self.views[op.results[0]] = op, op.operands[0]
            self.read_twice.update(r for r in op.results if r.has_more_than_one_use())
        for slot in program.arguments:
            self.versions[slot.value] = [program.sharding_of_slot(slot, used=True)]
            self.stored[slot.value] = program.sharding_of_slot(slot)
            if slot.value.has_more_than_one_use():
                self.read_twice.add(slot.value)
            if slot.kind == "param" and not self.stored[slot.value].is_replicated:
                self.pinned.add(slot.value)

    def rule(self, op: AtenOp) -> Rule:
        """The rule of an op, looked up once."""
        rule = self.rules.get(op)
        if rule is None:
            rule = self.rules[op] = rule_of(op)
        return rule

    def operand(self, value: SSAValue) -> Operand:
        return Operand(
            shape_of(value),
            dtype_of_value(value).itemsize,
            tuple(self.all_versions(value)),
            value in self.pinned,
        )

    def all_versions(self, value: SSAValue) -> list[Sharding]:
        """The versions of a value; for a view also the versions that follow from its operand's."""
        versions = list(self.versions[value])
        for sharding, _ in self.moved_versions(value):
            if sharding not in versions and len(versions) < MAX_VERSIONS:
                versions.append(sharding)
        return versions

    def moved_versions(self, value: SSAValue) -> list[tuple[Sharding, Sharding]]:
        """Pairs (version of the view `value`, version of its operand from which it follows)."""
        if value not in self.views:
            return []
        view, source = self.views[value]
        if len(self.versions[source]) == 1 and not self.moved_versions(source):
            return []
        moved = [(moved_through(view, s), s) for s in self.all_versions(source)]
        return [(new, old) for new, old in moved if new is not None]

    def sharding(self, value: SSAValue) -> Sharding:
        return self.versions[value][0]

    def assign(
        self,
        op: AtenOp,
        goals: Sequence[Sharding | None],
        hints: Iterable[tuple[str, int, int]] = (),
        moved: Mapping[SSAValue, Sharding] | None = None,
    ) -> Assignment:
        """Choose the assignment of an op. Raises ValueError, naming the op, for an unreachable
        goal. moved: shardings to assume for some operands in place of their versions."""
        operands = [self.operand(value) for value in op.operands]
        if moved:
            operands = [
                operand._replace(versions=(moved[value],)) if value in moved else operand
                for operand, value in zip(operands, op.operands, strict=True)
            ]
        try:
            return assign(
                self.mesh,
                self.rule(op),
                tuple(operands),
                tuple([shape_of(r) for r in op.results]),
                tuple(goals),
                tuple(hints),
            )
        except UnreachableSharding as error:
            raise ValueError(f"{describe(op)}: {error}") from error

    def define(self, op: Operation, shardings: Sequence[Sharding]) -> None:
        """Record the shardings of an op's results."""
        pinned = spec_of(op).keeps_weight and op.operands[0] in self.pinned
        for result, sharding in zip(op.results, shardings, strict=True):
            self.versions[result] = [sharding]
            if pinned and not sharding.is_replicated:
                self.pinned.add(result)

    def steps(self, value: SSAValue, wanted: Sharding) -> tuple[Sharding, tuple[ReshardStep, ...]]:
        """The version of a value cheapest to reshard to `wanted`, and the steps to do so."""
        version = cheapest_version(self.mesh, self.operand(value), wanted)
        return version, reshard(shape_of(value), version, wanted, self.mesh)

    def remember(self, value: SSAValue, sharding: Sharding) -> bool:
        """Add a version of a value. Returns False if it is there already, or `MAX_VERSIONS` are."""
        known = self.versions[value]
        if sharding in known or len(known) >= MAX_VERSIONS:
            return False
        known.append(sharding)
        return True

    def origin(self, value: SSAValue, wanted: Sharding) -> tuple[SSAValue, Sharding] | None:
        """Return a view's operand, and the operand's sharding that gives the view `wanted`.

        None unless it pays to reshard the operand in place of the view: if this takes collectives,
        and other uses of the operand may need the same sharding. (Both gradients of a linear map
        read the output's gradient.)
        """
        if value not in self.views:
            return None
        view, source = self.views[value]
        if source not in self.read_twice or source in self.pinned:
            return None
        before = moved_back(view, wanted)
        if before is None or moved_through(view, before) != wanted:
            return None
        steps = self.steps(value, wanted)[1]
        return (
            (source, before) if any(issubclass(step.op, CollectiveOp) for step in steps) else None
        )

    def use(self, value: SSAValue, wanted: Sharding) -> None:
        """Remember the versions of a value that exist once it is resharded to `wanted`."""
        if wanted in self.versions[value]:
            return
        origin = self.origin(value, wanted)
        if origin is not None:
            self.use(*origin)
        else:
            for step in self.steps(value, wanted)[1]:
                self.remember(value, step.after)


def moved_through(op: AtenOp, sharding: Sharding) -> Sharding | None:
    """The sharding of a view's result, from its operand's; None if the view loses a placement."""
    rule = rule_of(op)
    return _carried(sharding, rule.carry(rule.operands[0], rule.results[0], sharding.dims))


def moved_back(op: AtenOp, sharding: Sharding) -> Sharding | None:
    """The sharding of a view's operand, from its result's; None if the view loses a placement."""
    rule = rule_of(op)
    return _carried(sharding, rule.carry(rule.results[0], rule.operands[0], sharding.dims))


def _carried(sharding: Sharding, dims: tuple[DimSharding, ...] | None) -> Sharding | None:
    return None if dims is None else Sharding(dims, sharding.unreduced, sharding.reduction)


def has_shardings(program: Program) -> bool:
    """True if some op has a `sharding` annotation."""
    return any(isinstance(op.properties.get("sharding"), ArrayAttr) for op in program.ops)


def is_propagated(program: Program) -> bool:
    """True if every op of a global program has its shardings. Raises ValueError if only some do."""
    if not has_shardings(program):
        return False
    for op in program.ops:
        if sharding_attrs_of(op) is None:
            raise ValueError(
                f"{describe(op)} has no `sharding` property, but other ops do; "
                "propagate-shardings writes it on all ops. To ask for the sharding of a result, "
                "write wanted = [..] in place of sharding."
            )
    return True


def check_not_propagated(program: Program, name: str) -> None:
    """Raises ValueError if a program is partitioned or propagated: too late for pass `name`."""
    if program.is_local or is_propagated(program):
        state = "local" if program.is_local else "propagated"
        raise ValueError(f"the program is {state} already; run {name} before propagate-shardings.")


def aten_ops(program: Program) -> list[AtenOp]:
    """The ops of a global program. Raises ValueError if it is partitioned already."""
    ops: list[AtenOp] = []
    for op in program.ops:
        if not isinstance(op, AtenOp):
            raise ValueError(
                f"the program holds {op.name}, so that it was partitioned or fused already; run "
                "propagate-shardings once, on the captured global program (run unfuse-kernels "
                "first if it has fused kernels)."
            )
        ops.append(op)
    return ops
