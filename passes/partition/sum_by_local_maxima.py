"""Sums of exponentials, of the distance to a maximum over several ranks, in one pass over a shard.

A softmax over a cut dim takes the largest element of each shard, sends it, and reads the shard
once more to sum exp(x - max) over all ranks' max. With the shard's own maximum m instead, both
numbers come of one pass, and the sum is scaled where max has arrived (Milakov and Gimelshein,
2018: "Online normalizer calculation for softmax"):

    sum exp(x - max)  =  sum exp(x - m) * exp(m - max)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from xdsl.ir import Operation, OpResult, SSAValue

from shardweave.ir.dialects.annotations import set_sharding_attrs, sharding_attrs_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.dialects.builder import Builder
from shardweave.ir.dialects.dist import AllReduceOp, WaitOp
from shardweave.ir.dialects.types import shape_of, tensor_type
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.passes.program_pass import PassOnProgram


def sum_by_local_maxima(program: Program) -> int:
    """Rewrite sums of exponentials of distances to maxima over ranks; returns how many. Linear."""
    sums = [powers for op in program.ops if (powers := _sum_of_powers(op)) is not None]
    for powers in sums:
        _rewrite(powers)
    remove_dead_ops(program)
    return len(sums)


@dataclass(frozen=True)
class _SumOfPowers:
    """A sum of exponentials. total: sum(exp(distance)). distance: x - highest. peak: amax(x).
    highest: the maximum of `peak` over ranks."""

    total: AtenOp
    power: AtenOp
    distance: AtenOp
    peak: AtenOp


def _sum_of_powers(total: Operation) -> _SumOfPowers | None:
    """The sum, if its exponentials are of nothing but that distance, and nobody else reads them."""
    if not isinstance(total, AtenOp) or total.name != "aten.sum.dim_IntList":
        return None
    power = _made_by(total.operands[0], "aten.exp")
    if power is None or not power.results[0].has_one_use():
        return None
    distance = _made_by(power.operands[0], "aten.sub.Tensor")
    if distance is None or distance.value("alpha") != 1:
        return None
    peak = _largest_of_shard(distance.operands[1])
    if peak is None or peak.operands[0] is not distance.operands[0]:
        return None
    is_alike = all(peak.value(name) == total.value(name) for name in ("dim", "keepdim"))
    is_alike &= peak.result_types == total.result_types
    return _SumOfPowers(total, power, distance, peak) if is_alike else None


def _made_by(value: SSAValue, name: str) -> AtenOp | None:
    owner = value.owner
    return owner if isinstance(owner, AtenOp) and owner.name == name else None


def _largest_of_shard(highest: SSAValue) -> AtenOp | None:
    if isinstance(highest, OpResult) and isinstance(highest.op, WaitOp):
        highest = highest.op.operands[highest.index]
    if not isinstance(highest, OpResult):
        return None
    message = highest.op
    if not isinstance(message, AllReduceOp) or message.reduction != "max":
        return None
    return _made_by(message.operands[highest.index], "aten.amax")


def _rewrite(powers: _SumOfPowers) -> None:
    total, peak = powers.total, powers.peak
    x, highest = powers.distance.operands
    (local,) = peak.results
    set_sharding_attrs(peak, None)  # it is read as the shard's own now, too
    after = Builder.after(peak, total)
    near = after.aten("aten.sub.Tensor", [x, local])
    power = after.aten("aten.exp", [near])
    over = {name: total.value(name) for name in ("dim", "keepdim")}
    part = after.aten(total.name, [power], local.type, **over)
    # The sum of a shard of -inf alone is NaN; its part of the whole sum is that of its maximum.
    truth = tensor_type(shape_of(local), torch.bool)
    is_lowest = after.aten("aten.eq.Scalar", [local], truth, other=-math.inf)
    part = after.aten("aten.masked_fill.Scalar", [part, is_lowest], value=1.0)
    before = Builder.before(total)
    away = before.aten("aten.sub.Tensor", [local, highest])
    scale = before.aten("aten.exp", [away])
    scaled = before.aten("aten.mul.Tensor", [part, scale], hint=total.results[0])
    assert isinstance(scaled.owner, Operation)
    set_sharding_attrs(scaled.owner, sharding_attrs_of(total))
    total.results[0].replace_all_uses_with(scaled)


@dataclass(frozen=True)
class SumByLocalMaximaPass(PassOnProgram):
    """Sum exponentials relative to each shard's maximum, and scale the sums once all are known.

    A kernel then reads the logits of a sharded vocabulary once before the message, and not again
    after it. Nothing changes where softmaxes are of whole rows.

    Requires: a local program without regions. Ensures: numerics unchanged except for how sums are
    rounded: once more, by factors exp(m - max) of at most 1. Linear in the ops.
    """

    name = "sum-by-local-maxima"

    def run(self, program: Program) -> None:
        sum_by_local_maxima(program)
