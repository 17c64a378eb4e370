"""Assignment of ops to stages: forward ops by layer, backward ops by the forward ops' stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import layer_of, phase_of
from shardweave.ir.ops.registry import is_random, spec_of
from shardweave.ir.program.program import Program
from shardweave.passes.stages.batches import MicroBatches

Freedom = Literal["free", "input", "again"]
"""The reason why an op is copied wherever its results are read. free: it reads constants and
parameters and is cheap, so that each function has a copy. input: it reads inputs and constants, so
that each stage has a copy. again: it is recomputed for the backward pass, or gathers a weight."""


@dataclass(eq=False)
class Places:
    """Stages of ops. stage: by op, if it has one. freedom: for ops that are copied, the reason."""

    num_stages: int
    stage: dict[Operation, int] = field(default_factory=dict[Operation, int])
    freedom: dict[Operation, Freedom] = field(default_factory=dict[Operation, Freedom])
    by_layer: dict[str, set[int]] = field(default_factory=dict[str, set[int]])

    def of(self, values: Iterable[SSAValue], *, is_forward: bool) -> list[int]:
        """The stages of the ops that produce `values`: of forward ops, or of all others."""
        owners = (value.owner for value in values)
        return [
            self.stage[op]
            for op in owners
            if isinstance(op, Operation)
            and op in self.stage
            and (phase_of(op) == "forward") == is_forward
        ]


def places_of_ops(
    program: Program, batches: MicroBatches, stages: Mapping[str, int], num_stages: int
) -> Places:
    """Assign the ops of a local program to stages. Takes time linear in the ops.

    stages: the stage of each layer. Ops of other layers go to the stage that computes their
    operands or, if none does, to the first that reads their results. A layer that is called again
    after a later stage is in both. Raises ValueError for a stage whose ops would all run in a later
    stage.
    """
    places = Places(num_stages)
    _tell_freedom(program, batches, places)
    waiting: list[Operation] = []
    for op in program.ops:
        if op in places.freedom or op in batches.early:
            continue
        if op in batches.after or _joins_stages(op, places, batches):
            # Terms of several stages are added once, when each has added up its own.
            batches.after[op] = None
        elif phase_of(op) == "forward" and _reads_no_stage(op, places, stages):
            waiting.append(op)
        elif phase_of(op) == "forward":
            places.stage[op] = _forward_stage(op, places, stages)
            places.by_layer.setdefault(layer_of(op), set()).add(places.stage[op])
        else:
            _place_where_read(waiting, places)
            places.stage[op] = _backward_stage(op, places, stages)
    _place_where_read(waiting, places)
    _check_order(places, stages)
    return places


def _check_order(places: Places, stages: Mapping[str, int]) -> None:
    """Raise ValueError for a stage without ops whose layers have ops in another stage."""
    with_ops = set(places.stage.values())
    for number in range(places.num_stages):
        layers = [name for name, stage in stages.items() if stage == number]
        moved = [name for name in layers if places.by_layer.get(name)]
        if moved and number not in with_ops:
            shown = " .. ".join(dict.fromkeys((moved[0], moved[-1])))
            raise ValueError(
                f"stage {number} has layers {shown}, but all their ops would run in stage "
                f"{max(places.by_layer[moved[0]])}, because they read values from there; list "
                "the stages in the order of the model."
            )


def _joins_stages(op: Operation, places: Places, batches: MicroBatches) -> bool:
    """True if an op adds terms of sums over micro-batches that come from several stages."""
    if op.results[0] not in batches.terms:
        return False
    owners = (value.owner for value in op.operands if value in batches.terms)
    terms = [owner for owner in owners if isinstance(owner, Operation)]
    stages = {places.stage[owner] for owner in terms if owner in places.stage}
    return len(stages) > 1 or any(owner in batches.after for owner in terms)


def _reads_no_stage(op: Operation, places: Places, stages: Mapping[str, int]) -> bool:
    """True if an op outside all layers reads nothing that a stage computed, such as a count of
    labels over all replicas."""
    return layer_of(op) not in stages and not places.of(op.operands, is_forward=True)


def _place_where_read(waiting: list[Operation], places: Places) -> None:
    """Place ops in the first stage whose forward ops read them, or the last stage. The backward
    pass runs from the last stage to the first, so that it does not wait for them there."""
    while waiting:
        op = waiting.pop()
        users = (use.operation for result in op.results for use in result.uses)
        stages = [places.stage[u] for u in users if u in places.stage and phase_of(u) == "forward"]
        places.stage[op] = min(stages, default=places.num_stages - 1)


def _forward_stage(op: Operation, places: Places, stages: Mapping[str, int]) -> int:
    read = places.of(op.operands, is_forward=True)
    return max([*read, stages.get(layer_of(op), 0)])


def _backward_stage(op: Operation, places: Places, stages: Mapping[str, int]) -> int:
    layer = layer_of(op)
    came = min(places.of(op.operands, is_forward=False), default=places.num_stages - 1)
    read = places.of(op.operands, is_forward=True)
    forward = places.by_layer.get(layer, set[int]()) if layer in stages else set[int]()
    if len(forward) == 1:
        return min(came, *forward)
    if read:
        return min(came, max(read))
    return min(came, stages.get(layer, came))


_OF_WEIGHT = frozenset(("param",))
"""Kinds of arguments that an op reads if it depends on parameters alone."""

_GIVEN = {"param": "param", "buffer": "none", "tangent": "none", "input": "input"}


def _tell_freedom(program: Program, batches: MicroBatches, places: Places) -> None:
    """Record the ops that are copied to wherever their results are read, with the reason."""
    reads: dict[SSAValue, frozenset[str]] = {
        slot.value: frozenset((_GIVEN[slot.kind],)) for slot in program.arguments
    }
    whole, parts = batches.whole, batches.parts
    reads |= dict.fromkeys(whole, frozenset(("none",)))
    reads |= dict.fromkeys(parts, frozenset(("input",)))
    for op in program.ops:
        if op in batches.after or op.results[0] in whole or op.results[0] in parts:
            continue
        known = [reads.get(value) for value in op.operands]
        if phase_of(op) == "recompute":
            places.freedom[op] = "again"
            if known == [_OF_WEIGHT]:  # such as a weight that is gathered for the backward pass
                reads.update(dict.fromkeys(op.results, _OF_WEIGHT))
            continue
        if isinstance(op, dist.CollectiveOp) and op.is_gather and known == [_OF_WEIGHT]:
            # A weight is gathered where it is used: in each stage that has its shards.
            places.freedom[op] = "again"
            reads.update(dict.fromkeys(op.results, _OF_WEIGHT))
            continue
        if None in known or not _is_cheap(op) or _is_term(op, batches):
            continue
        kinds = frozenset[str]().union(*(read for read in known if read))
        if "input" not in kinds and op.results[0] not in batches.varying:
            places.freedom[op] = "free"
        elif "param" not in kinds:
            places.freedom[op] = "input"
        else:
            continue
        reads.update(dict.fromkeys(op.results, kinds))


def _is_cheap(op: Operation) -> bool:
    """True if an op may be computed in several functions: not random, no message or product."""
    is_message = isinstance(op, dist.DistOp) and not isinstance(
        op, (dist.ShardIndexOp, dist.SliceOp)
    )
    return not (is_message or is_random(op) or spec_of(op).product is not None)


def _is_term(op: Operation, batches: MicroBatches) -> bool:
    return (
        op.results[0] in batches.varying
        and not isinstance(op, dist.ShardIndexOp)
        and not any(value in batches.varying for value in op.operands)
    )
