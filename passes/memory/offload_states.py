"""Optimizer states on the host: a mark on the program, which the step of an optimizer follows."""

from __future__ import annotations

from dataclasses import dataclass

from shardweave.ir.program.program import Program
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class OffloadStatesPass(PassOnProgram):
    """Keep optimizer states in the host's memory between updates.

    An update copies the states of a group of parameters to the device while the group before it
    computes, and back while the next one does. The program only gets the mark `dist.host_states`,
    since updates are no part of it.

    Requires: nothing. Ensures: numerics unchanged, bit for bit; no op changes. Takes constant time.
    """

    name = "offload-states"

    def run(self, program: Program) -> None:
        if not any(slot.kind == "grad" for slot in program.results):
            note(
                "no optimizer state is offloaded: the step computes no gradients; capture it with "
                "train=True, or leave the pass out."
            )
            return
        program.set_host_states()
