"""Proof of each pass: its program computes the same as the program before the first pass."""

from __future__ import annotations

from xdsl.passes import ModulePass

from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import Proof, prove
from shardweave.passes.observers import Observer
from shardweave.passes.pipeline import PassError
from shardweave.passes.prepare.block_experts import BlockExpertsPass


class ProvedPassError(PassError):
    """Raised if the program after a pass cannot be proved equal to the one before the passes."""


class Prover(Observer):
    """Proves, after each pass that changes the program, that it equals the one before all passes.

    From the pass block-experts on, proofs are against its result. last: the last proof. Raises
    ProvedPassError, which names the pass.
    """

    def __init__(self) -> None:
        self.last: Proof | None = None
        self._goal: Program | None = None

    def before(self, pass_: ModulePass, program: Program) -> None:
        if self._goal is None:
            self._goal = program.clone()

    def after(self, pass_: ModulePass, program: Program) -> None:
        assert self._goal is not None
        if pass_.name == BlockExpertsPass.name:
            self._goal = program.clone()
        try:
            self.last = prove(program, against=self._goal)
        except ProofError as error:
            raise ProvedPassError(
                f"after pass '{pass_.name}', the program is not proved to compute what it "
                f"computed before the passes: {error}"
            ) from error
