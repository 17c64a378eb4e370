"""Models with a right program for a mesh, whose mutants are judged by running them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from shardweave.backends.reference.reference import Key, run_reference
from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.tests.ir.proof.mutants import distinct, mutant
from shardweave.tests.ir.proof.slips import SLIPS
from shardweave.tests.ir_text import random_values

BOUND = 1e-9
"""Largest difference to what a right program gives, relative to the largest element."""

SMALL = 1e-3
"""Elements of results that are all smaller than this are compared as if one were as large."""


@dataclass(frozen=True)
class Case:
    """A global program with its arguments and results, and a right program of a rank or of
    stages."""

    program: Program
    values: Mapping[Key, Tensor]
    expected: Mapping[Key, Tensor]
    local: Program

    @staticmethod
    def of(program: Program, values: Mapping[Key, Tensor], local: Program) -> Case:
        """Weights are moved by noise: biases that are zero and norms that are one hide slips."""
        noise = torch.Generator().manual_seed(0)
        noisy = {
            key: value + 0.3 * torch.randn(value.shape, generator=noise, dtype=value.dtype)
            if key[0] == "param"
            else value
            for key, value in values.items()
        }
        return Case(program, noisy, run_reference(program, noisy), distinct(local.clone()))

    def outcome(self, program: Program) -> str:
        """What running a program shows: right, wrong, or fails."""
        try:
            found = run_reference(program, self.values)
        except Exception:  # noqa: BLE001  a broken program may fail in any way
            return "fails"
        is_right = all(
            found[key].shape == value.shape and _difference(found[key], value) <= BOUND
            for key, value in self.expected.items()
        )
        return "right" if is_right else "wrong"

    def is_right(self, program: Program) -> bool:
        return self.outcome(program) == "right"


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference of elements, relative to the largest element."""
    if not expected.numel():
        return 0.0
    scale = max(SMALL, float(expected.abs().max()))
    return float((found.double() - expected.double()).abs().max()) / scale


def refused_slips(case: Case, slips: Iterable[str], num_seeds: int) -> tuple[int, int]:
    """How many slips of some kinds are refused in a right program, and how many of these refusals
    name the place of the slip; those that are proved must compute the same."""
    num_refused = num_named = 0
    for kind, seed in product(slips, range(num_seeds)):
        made = mutant(case.local, kind, seed)
        if made is None:
            continue
        try:
            prove(made.program, against=case.program)
        except ProofError as error:
            num_refused += 1
            num_named += made.is_named_in(str(error))
            continue
        assert case.is_right(made.program), (kind, seed)
    return num_refused, num_named


def num_refused_slips(local: Program, whole: Program) -> int:
    """How many slips, one of each kind, are refused in a right program of a rank; those that are
    proved must compute what the global program does."""
    values = random_values(whole)
    expected = run_reference(whole, values)
    num_refused = 0
    for made in filter(None, (mutant(local, kind, 0) for kind in SLIPS)):
        try:
            prove(made.program, against=whole)
        except ProofError:
            num_refused += 1
            continue
        found = run_reference(made.program, values)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)
    return num_refused
