from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program import Program
from shardweave.ir.sharding.attention_parts import split_attention
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class SplitAttentionPass(PassOnProgram):
    """Compute attention in parts of its keys, where these are cut along the sequence.

    Parts merge by their log-sum-exp. Each part's keys and values are gathered by themselves, so
    that one can travel while the attention of another is computed, and so do their gradients.
    Attention whose keys are not cut along the sequence stays as it is.

    Requires: a global program with a mesh, before `propagate-shardings`; every device has a piece
    of every part, as it does where sequences are cut in stripes. Ensures: numerics unchanged.
    Linear in the ops.
    """

    name = "split-attention"
    parts: int = 2

    def run(self, program: Program) -> None:
        if not split_attention(program, self.parts) and self.parts > 1:
            note(
                "no fused attention has keys that are cut along the sequence, and none is "
                "computed in parts; cut the inputs' sequences first, over an axis as context=2."
            )
