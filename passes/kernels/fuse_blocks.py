"""fuse-blocks: the ops of a block between two collectives become one region."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import copy_of, phase_of
from shardweave.ir.dialects.aten import AtenOp
from shardweave.ir.ops.fusible import role_of
from shardweave.ir.ops.registry import is_attention, is_random
from shardweave.ir.program.blocks import Blocks, blocks_of
from shardweave.ir.program.program import Program
from shardweave.passes.kernels.fuse_kernels import put_in_region
from shardweave.passes.kernels.unfuse_kernels import require_no_regions
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram

MAX_OPS = 256
"""Most ops in one region: the time to compile it grows faster than linearly in them."""


@dataclass(frozen=True)
class FuseBlocksPass(PassOnProgram):
    """Put the ops that a block computes between two collectives into one region, for a graph
    compiler.

    A region holds neighbouring ops of one block, phase and sub-batch, including matrix products,
    and at least two that a compiler can fuse. Ops stay in their order.

    Requires: a local program, or one without a mesh, without regions. Ensures: numerics unchanged;
    `unfuse-kernels` restores the program. Takes time linear in the ops.
    """

    name = "fuse-blocks"

    def run(self, program: Program) -> None:
        require_no_regions(program)
        places = {op: place for place, op in enumerate(program.ops)}
        runs = [run for run in _runs(program) if _gains(run)]
        for run in runs:
            after = run[-1].next_op
            assert after is not None
            put_in_region(run, after, [places[op] for op in run], phase_of(run[0]))
        if not runs:
            note("no two neighbouring ops can be fused into a region; leave the pass out.")


def _runs(program: Program) -> Iterator[list[Operation]]:
    blocks = blocks_of(program)
    for key, ops in groupby(list(program.ops), lambda op: _key(op, blocks)):
        if key is not None:
            run = list(ops)
            yield from (run[start : start + MAX_OPS] for start in range(0, len(run), MAX_OPS))


def _key(op: Operation, blocks: Blocks) -> tuple[object, ...] | None:
    """The key that all ops of a region share; None for an op that is never in a region."""
    if not isinstance(op, AtenOp) or not op.name.startswith("aten."):
        return None
    if is_attention(op) or is_random(op):
        return None
    return blocks.of_op(op), phase_of(op), copy_of(op)


def _gains(ops: list[Operation]) -> bool:
    return sum(role_of(op) not in (None, "view", "matmul") for op in ops) > 1
