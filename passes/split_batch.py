from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.sub_batches import split_batch
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class SplitBatchPass(PassOnProgram):
    """Cut dim `dim` of the inputs over a new mesh axis of kind time, of size `n`.

    A sub-batch is a virtual rank: propagation and partitioning treat the axis like any other,
    so any mix of tensor, data and sequence parallelism splits, for any model, and stays exact;
    `unroll-time-axes` then writes the sub-batches out. Inputs whose dim has another size than
    most stay whole.

    Requires: a global program before `propagate-shardings`. Ensures: the mesh has the time
    axis, the inputs are cut over it inside each device's shard; numerics unchanged.
    """

    name = "split-batch"
    n: int = 2
    dim: int = 0
    axis: str = "batch"

    def run(self, program: Program) -> None:
        split_batch(program, self.n, self.dim, self.axis)
        if self.n == 1:
            note("n=1 leaves the batch as it is; give n >= 2, or leave the pass out.")
