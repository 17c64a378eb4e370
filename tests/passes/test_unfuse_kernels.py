"""unfuse-kernels; that it inverts fuse-kernels is tested there for every model."""

from __future__ import annotations

from shardweave.passes.pipeline import run_passes
from shardweave.tests.zoo import SPECS, captured


def test_program_without_regions_stays_as_it_is() -> None:
    program = captured(SPECS["gpt"]).program
    assert run_passes(program, "unfuse-kernels") == program


def test_fusing_again_gives_the_same_regions() -> None:
    program = captured(SPECS["gpt"]).program
    fused = run_passes(program, "fuse-kernels")
    assert run_passes(fused, "unfuse-kernels,fuse-kernels") == fused
