"""What of a step is done once for each micro-batch, and what once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xdsl.ir import BlockArgument, Operation, SSAValue

from shardweave.ir import dist
from shardweave.ir.annotations import describe, sharding_attrs_of
from shardweave.ir.facts import facts_of
from shardweave.ir.program import Program
from shardweave.ir.staged import micro_axis

_Sources = frozenset[SSAValue]


class JoinedMicroBatches(ValueError):
    """Micro-batches that cannot run one by one, since an op brings their samples together."""


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """How the values of a step depend on micro-batches.

    varying: values that differ between them, terms of sums over them included. terms: these, which
    are sums (or maxima) once they are added up. whole: values that micro-batches read and that are
    made once before them, such as the number of tokens by which a loss is divided. early: ops that
    only lead to these. after: ops that read sums over all micro-batches, and these sums.
    """

    varying: set[SSAValue] = field(default_factory=set[SSAValue])
    terms: set[SSAValue] = field(default_factory=set[SSAValue])
    whole: dict[SSAValue, None] = field(default_factory=dict[SSAValue, None])
    after: dict[Operation, None] = field(default_factory=dict[Operation, None])
    early: set[Operation] = field(default_factory=set[Operation])


def micro_batches_of(program: Program, *, keep_gathered: bool = False) -> MicroBatches:
    """Tell what varies between the micro-batches of a local program. Linear in the ops.

    keep_gathered: parameters that are stored in finer shards than their uses read are gathered
    before the first micro-batch, and kept. Raises ValueError, naming the layer, for a step whose
    micro-batches cannot run one by one: some op on samples needs a value of all of them that
    depends on parameters.
    """
    axis = micro_axis(program)
    name = axis.name if axis else None
    found = MicroBatches()
    for slot in program.arguments:
        if name in program.sharding_of_slot(slot).axes:
            found.varying.add(slot.value)
    sources: dict[SSAValue, _Sources] = {}
    for op in program.ops:
        _follow(op, name, sources, found)
    for op in program.ops:
        read = sources.get(op.results[0], _NOTHING)
        if op.results[0] not in found.varying and not read <= found.whole.keys():
            found.after[op] = None
    for value in found.whole:
        _check_inputs_alone(value, program)
    if keep_gathered:
        found.whole.update(dict.fromkeys(_gathered(program)))
    _find_early(program, found)
    return found


_NOTHING: _Sources = frozenset()


def _follow(
    op: Operation, axis: str | None, sources: dict[SSAValue, _Sources], found: MicroBatches
) -> None:
    """Tell of one op whether it varies, and from which sums over micro-batches it comes."""
    read = _NOTHING.union(*(sources.get(value, _NOTHING) for value in op.operands))
    if isinstance(op, dist.DistOp) and axis in op.axes:
        if isinstance(op, dist.ShardIndexOp):
            found.varying.add(op.results[0])
            return
        _check_sum(op)
        read |= {op.results[0]}
    elif _has_terms(op, axis, found) or any(value in found.varying for value in op.operands):
        found.varying.update(op.results)
        found.whole.update(dict.fromkeys(read))
    if read:
        sources.update(dict.fromkeys(op.results, read))


def _find_early(program: Program, found: MicroBatches) -> None:
    """Find the ops that nobody reads but what is made before the first micro-batch."""
    read = set(program.return_op.operands)
    for op in reversed(list(program.ops)):
        if found.whole.keys().isdisjoint(op.results) and not read.isdisjoint(op.results):
            read.update(op.operands)
        else:
            found.early.add(op)


def _gathered(program: Program) -> Iterator[SSAValue]:
    """The parameters that are gathered, whole."""
    weights = {slot.value for slot in program.arguments if slot.kind == "param"}
    for op in program.ops:
        if len(op.operands) == 1 and op.operands[0] in weights:
            if isinstance(op, dist.AllGatherOp):
                weights.update(op.results)
                yield from op.results
            elif facts_of(op).keeps_weight:
                weights.update(op.results)


def _has_terms(op: Operation, axis: str | None, found: MicroBatches) -> bool:
    """Note the results that are terms of sums over micro-batches; whether there are any."""
    terms = [
        result
        for result, sharding in zip(op.results, sharding_attrs_of(op) or (), strict=False)
        if any(axis == name.data for name in sharding.unreduced)
    ]
    found.terms.update(terms)
    return bool(terms)


def _check_sum(op: dist.DistOp) -> None:
    if type(op) is dist.AllReduceOp and len(op.operands) == 1:
        return
    if isinstance(op, dist.AllReduceOp):
        raise ValueError(
            f"{describe(op)} reduces several values, or is started already; run merge-collectives "
            "and start-collectives after cut-stages."
        )
    raise JoinedMicroBatches(
        f"{describe(op)} brings the samples of all micro-batches together, so that they cannot run "
        "one by one. Where an op without a factor rule (a note names it) is why, mend that; "
        "where rows do not divide by the devices and micro-batches that cut them, give as many as "
        "do; else use one micro-batch, by a plan whose pipeline has micro_batches=1, or leave this "
        "layer out of the loss."
    )


def _check_inputs_alone(value: SSAValue, program: Program) -> None:
    """What micro-batches need of all micro-batches can be made before the first one."""
    slots = {slot.value: slot for slot in program.arguments}
    stack, seen = [value], {value}
    while stack:
        source = stack.pop()
        if isinstance(source, BlockArgument):
            if slots[source].kind in ("input", "buffer"):
                continue
            assert isinstance(value.owner, Operation)
            raise ValueError(
                f"{describe(value.owner)} is a sum over all micro-batches that depends on "
                f"{slots[source].kind} '{slots[source].name}', and each micro-batch needs it to go "
                "on, as batch norm does in training; so they cannot run one by one. Use one "
                "micro-batch, or another norm."
            )
        assert isinstance(source.owner, Operation)
        fresh = [v for v in source.owner.operands if v not in seen]
        seen.update(fresh)
        stack += fresh
