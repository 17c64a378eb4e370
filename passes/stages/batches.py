"""Classification of ops: run for each micro-batch, or once before or after all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import describe, sharding_attrs_of
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.program import Program, shardings_of
from shardweave.ir.program.staged import micro_axis
from shardweave.ir.program.storage import arguments_behind

_Sources = frozenset[SSAValue]


class JoinedMicroBatches(ValueError):
    """Raised if micro-batches cannot run one by one. reason: which op needs all of them."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}, so that they cannot run one by one. {remedy}")
        self.reason = reason


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Values and ops of a step by their dependence on micro-batches.

    varying: values that differ between micro-batches. terms: varying values that are terms of sums
    (or maxima) over micro-batches. whole: values that micro-batches read and that are computed once
    before the first, such as the number of tokens by which a loss is divided. parts: values that
    are a micro-batch's shard of a value computed before the first, such as random numbers for all
    samples, or inputs in another order. early: ops that compute whole and parts, and ops whose
    results only these use. after: sums over all micro-batches, and ops that read them.
    """

    varying: set[SSAValue] = field(default_factory=set[SSAValue])
    terms: set[SSAValue] = field(default_factory=set[SSAValue])
    whole: dict[SSAValue, None] = field(default_factory=dict[SSAValue, None])
    parts: dict[SSAValue, None] = field(default_factory=dict[SSAValue, None])
    after: dict[Operation, None] = field(default_factory=dict[Operation, None])
    early: set[Operation] = field(default_factory=set[Operation])


def micro_batches_of(program: Program, *, keep_gathered: bool = False) -> MicroBatches:
    """Classify the values of a local program by micro-batch. Takes time linear in the ops.

    keep_gathered: parameters that are stored in finer shards than ops read are gathered before the
    first micro-batch, and kept. Raises ValueError, naming the layer, for a step whose micro-batches
    cannot run one by one: some op on samples needs a value of all samples that depends on
    parameters.
    """
    axis = micro_axis(program)
    walk = _Walk(program, axis.name if axis else None)
    for op in program.ops:
        walk.follow(op)
    batches = walk.batches
    for op in program.ops:
        read = walk.sources.get(op.results[0], _NOTHING)
        if op.results[0] not in batches.varying and not read <= batches.whole.keys():
            batches.after[op] = None
    for value in batches.whole:
        _check_inputs_alone(value, program)
    if keep_gathered:
        batches.whole.update(dict.fromkeys(_gathered(program)))
    _find_early(program, batches)
    return batches


_NOTHING: _Sources = frozenset()


class _Walk:
    """Finds, op by op in order, values that vary and the sums over micro-batches that each reads.

    of_weights: values that depend on an argument other than an input or a buffer.
    """

    def __init__(self, program: Program, axis: str | None) -> None:
        self.program = program
        self.axis = axis
        self.batches = MicroBatches()
        self.sources: dict[SSAValue, _Sources] = {}
        self.of_weights: set[SSAValue] = set()
        for slot in program.arguments:
            if axis in program.sharding_of_slot(slot).axes:
                self.batches.varying.add(slot.value)
            if slot.kind not in _OF_DATA:
                self.of_weights.add(slot.value)

    def follow(self, op: Operation) -> None:
        """Classify the results of one op."""
        batches, operands = self.batches, op.operands
        if any(value in self.of_weights for value in operands):
            self.of_weights.update(op.results)
        read = _NOTHING.union(*(self.sources.get(value, _NOTHING) for value in operands))
        if isinstance(op, dist.DistOp) and self.axis in op.axes:
            _check_single(op)
            if not op.is_reduction:
                self._place(op)
                return
            read |= {op.results[0]}
        elif self._has_terms(op) or any(value in batches.varying for value in operands):
            batches.varying.update(op.results)
            batches.whole.update(dict.fromkeys(read))
        if read:
            self.sources.update(dict.fromkeys(op.results, read))

    def _place(self, op: dist.DistOp) -> None:
        """Classify an op that moves samples; an op on inputs alone runs before micro-batches."""
        (result,) = op.results
        if isinstance(op, dist.ShardIndexOp):
            self.batches.varying.add(result)
        elif result in self.of_weights or not self._is_told(op):
            raise JoinedMicroBatches(
                f"{describe(op)} reads samples of several micro-batches at once",
                "If the model compares samples with each other, as a contrastive loss does, use a "
                "plan whose pipeline has micro_batches=1. If a note names an op without a factor "
                "rule, write its rule. Otherwise give as many rows as divide by the devices and "
                "micro-batches.",
            )
        elif op.is_gather:
            self.batches.whole[result] = None
        else:
            self.batches.varying.add(result)
            self.batches.parts[result] = None

    def _is_told(self, op: dist.DistOp) -> bool:
        """True if an op's result is sharded over the micro-batches, or the op gathers samples."""
        (sharding,) = shardings_of(op, self.program)
        is_cut = sharding is not None and sharding.seat_of(self.axis or "") is not None
        return is_cut or op.is_gather

    def _has_terms(self, op: Operation) -> bool:
        """Record results that are terms of sums over micro-batches; returns whether any are."""
        terms = [
            result
            for result, sharding in zip(op.results, sharding_attrs_of(op) or (), strict=False)
            if any(self.axis == name.data for name in sharding.unreduced)
        ]
        self.batches.terms.update(terms)
        return bool(terms)


_OF_DATA = ("input", "buffer")
"""Kinds of arguments from which values for all micro-batches may be computed beforehand."""


def _find_early(program: Program, batches: MicroBatches) -> None:
    read, made = set(program.return_op.operands), batches.whole.keys() | batches.parts.keys()
    for op in reversed(list(program.ops)):
        is_made_before = not made.isdisjoint(op.results)
        if not is_made_before and not read.isdisjoint(op.results):
            read.update(op.operands)
        else:
            batches.early.add(op)


def _gathered(program: Program) -> Iterator[SSAValue]:
    weights = {slot.value for slot in program.arguments if slot.kind == "param"}
    for op in program.ops:
        if len(op.operands) == 1 and op.operands[0] in weights:
            if isinstance(op, dist.CollectiveOp) and op.is_gather:
                weights.update(op.results)
                yield from op.results
            elif spec_of(op).keeps_weight:
                weights.update(op.results)


def _check_single(op: dist.DistOp) -> None:
    if len(op.operands) > 1 or isinstance(op, dist.StartedOp):
        raise ValueError(
            f"{describe(op)} has several operands or is a started collective, which cut-stages "
            "cannot split by micro-batch; run merge-collectives and start-collectives after "
            "cut-stages."
        )


def _check_inputs_alone(value: SSAValue, program: Program) -> None:
    """Check that a value that all micro-batches need depends only on inputs and buffers."""
    slots = {slot.value: slot for slot in program.arguments}
    for slot in (slots[source] for source in arguments_behind(value)):
        if slot.kind not in _OF_DATA:
            assert isinstance(value.owner, Operation)
            raise JoinedMicroBatches(
                f"{describe(value.owner)} sums over all micro-batches, and each micro-batch "
                "needs the sum to go on, as in batch norm in training; but the sum depends on "
                f"{slot.kind} '{slot.name}', so that it cannot be computed before the "
                "micro-batches",
                "Use one micro-batch, by a plan whose pipeline has micro_batches=1, or another "
                "norm.",
            )
