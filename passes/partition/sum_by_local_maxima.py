"""Softmax sums over a sharded dim, with one read of each shard.

A softmax over a sharded dim takes each shard's maximum, all-reduces it to max, and reads the shard
again to sum exp(x - max). With the shard's own maximum m instead, one read yields both maximum and
sum, and the sum is scaled once max has arrived (Milakov and Gimelshein, 2018: "Online normalizer
calculation for softmax"):

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
    """Rewrite each sum of exp(x - max) with max over ranks; returns how many. Takes linear time."""
    sums = [powers for op in program.ops if (powers := _sum_of_powers(op)) is not None]
    for powers in sums:
        _rewrite(powers)
    remove_dead_ops(program)
    return len(sums)


@dataclass(frozen=True)
class _SumOfPowers:
    """The ops of a sum of exponentials. total: sum(power). power: exp(distance). distance: x - the
    all-reduced maximum of `peak`. peak: amax(x)."""

    total: AtenOp
    power: AtenOp
    distance: AtenOp
    peak: AtenOp


def _sum_of_powers(total: Operation) -> _SumOfPowers | None:
    """Match a sum(exp(x - max)) whose exponentials have no other use; None for other ops."""
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
    after it. Softmaxes over dims that are not sharded stay as they are.

    Requires: a local program without regions. Ensures: numerics unchanged except for one more
    rounding of each sum, by its factor exp(m - max) <= 1. Takes time linear in the ops.
    """

    name = "sum-by-local-maxima"

    def run(self, program: Program) -> None:
        sum_by_local_maxima(program)
