"""unfuse-kernels; that it inverts fuse-kernels is tested there for every model."""

from __future__ import annotations

from shardweave.ir.program.staged import functions_of
from shardweave.passes.kernels.unfuse_kernels import without_regions
from shardweave.passes.pipeline import run_passes
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned


def test_program_without_regions_stays_as_it_is() -> None:
    program = captured(SPECS["gpt"]).program
    assert run_passes(program, "unfuse-kernels") == program


def test_fusing_again_gives_the_same_regions() -> None:
    program = captured(SPECS["gpt"]).program
    fused = run_passes(program, "fuse-kernels")
    assert run_passes(fused, "unfuse-kernels,fuse-kernels") == fused


def test_functions_of_stages_are_fused_and_unfused_each_by_itself() -> None:
    mesh = "data=2,tensor=2"
    local = partitioned(SPECS["gpt"], mesh, megatron(SPECS["gpt"], mesh))
    staged = run_passes(local, "cut-stages")
    fused = run_passes(staged, "fuse-kernels")
    assert fused != staged
    assert without_regions(fused) == staged
    before = functions_of(staged)
    for name, function in functions_of(fused).items():
        assert str(without_regions(function).function) == str(before[name].function)
    assert_equals_eager(fused, captured(SPECS["gpt"]))
