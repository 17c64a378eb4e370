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
    """A pass after which the program could not be proved."""


class Prover(Observer):
    """Proves the program after each pass that changed it, against the one before the first.

    block-experts begins a proof of its own, against what it gives. last: the last proof. Raises
    ProvedPassError, with the name of the pass.
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
                f"pass '{pass_.name}' gives a program that is not proved to compute what the one "
                f"before the passes does: {error}"
            ) from error
