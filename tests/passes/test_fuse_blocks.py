"""fuse-blocks: regions for a compiler of graphs."""

from __future__ import annotations

from collections import Counter

import pytest

from shardweave.backends.inductor.compiled_region import text_of
from shardweave.ir.dialects.annotations import phase_of
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import run_passes
from shardweave.tests.marks import slow_where
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned


def regions(program: Program) -> list[FusedOp]:
    return [op for op in program.ops if isinstance(op, FusedOp)]


@pytest.mark.parametrize("kind", slow_where(lambda kind: kind not in ("gpt", "llama"), SPECS))
def test_step_with_regions_equals_eager_and_unfuses_to_the_same_program(kind: str) -> None:
    case = captured(SPECS[kind])
    fused = run_passes(case.program, "fuse-blocks")
    assert regions(fused)
    assert verify(fused) == []
    assert run_passes(fused, "unfuse-kernels") == case.program
    assert_equals_eager(fused, case)


def test_regions_of_a_rank_lie_between_messages_and_hold_products() -> None:
    mesh = "data=2,tensor=2"
    local = partitioned(SPECS["gpt"], mesh, megatron(SPECS["gpt"], mesh))
    fused = run_passes(local, "start-collectives,fuse-blocks")
    assert_equals_eager(fused, captured(SPECS["gpt"]))
    inside = Counter(op.name for region in regions(fused) for op in region.fused_ops)
    assert inside["aten.mm"] > 0
    for region in regions(fused):
        assert len({phase_of(op) for op in region.fused_ops}) == 1
        assert region.places == list(range(region.places[0], region.places[-1] + 1))


def test_equal_layers_have_regions_of_one_text() -> None:
    spec = "gpt:layers=4,hidden=8,heads=2,vocab=16,seq=4,batch=2"
    texts = Counter(
        text_of(op) for op in regions(run_passes(captured(spec).program, "fuse-blocks"))
    )
    assert max(texts.values()) >= 4


def test_fused_program_is_refused() -> None:
    fused = run_passes(captured(SPECS["gpt"]).program, "fuse-blocks")
    with pytest.raises(ValueError, match="unfuse-kernels"):
        run_passes(fused, "fuse-blocks")
