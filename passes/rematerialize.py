from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.blocks import BLOCKS, blocks_of
from shardweave.ir.program import Program
from shardweave.ir.rewrite.rematerialize import rematerialize
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class RematerializePass(PassOnProgram):
    """Clone forward ops into the backward pass, so that their results need not be kept.

    Blocks are the repeated modules (`h.0`, `encoder.block.3`). Policies: `none` keeps
    everything; `layer` keeps what enters and leaves a block and runs the whole block again,
    communication included, also what nothing reads (Megatron's full recomputation);
    `after-communication` keeps the results of collectives too, so that recomputation starts
    after each (Oases' fine-grained strategy) and runs segment by segment; `after-products` keeps
    the results of matrix products, of attention and of collectives that do not merely gather, and
    computes again what is cheap between them: norms, activations, casts, gathers (what Megatron's
    sequence parallelism and `--recompute-modules` leave out); `budget` recomputes as
    few blocks as fit the kept bytes of one device into `bytes`, first by segments, then whole.
    `blocks` are names or patterns of the blocks in which, with commas between; without, in all.
    Results of random ops are always kept. Gathered parameters are not results of communication:
    they are gathered once more in the backward pass, for recomputation and gradients alike.

    Requires: a program with forward and backward ops; collectives are recomputed only where
    they are in the program, so run it after `insert-collectives` (and `unroll-time-axes`),
    and before `fuse-kernels`.
    Ensures: numerics unchanged, bit for bit; clones carry phase recompute and `origin`, and
    stand where their block's backward pass begins, or goes on behind a message. Linear in the
    ops; `budget` tries O(log blocks) times.
    """

    name = "rematerialize"
    policy: str = "layer"
    bytes: int | None = None
    blocks: str = ""

    def run(self, program: Program) -> None:
        count = rematerialize(program, self.policy, self.bytes, self.blocks)
        if not count:
            note(self._why_nothing(program))

    def _why_nothing(self, program: Program) -> str:
        if self.policy == "none":
            return "policy none recomputes nothing; leave the pass out, or give another policy."
        if not blocks_of(program).names:
            return (
                "the program has no repeated blocks, so that nothing is recomputed; name the "
                f'modules to recompute in its text, as in attributes {{{BLOCKS} = ["encoder"]}}.'
            )
        if self.bytes is not None:
            return f"the step fits bytes={self.bytes} as it is; give fewer to recompute anything."
        return (
            "nothing that the blocks compute is kept for a backward pass, so that nothing is "
            "recomputed; capture the step with train=True, or leave the pass out."
        )
