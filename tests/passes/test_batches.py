"""Gathers of samples across micro-batches: of inputs before the first, of weights refused."""

from __future__ import annotations

import pytest

from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.passes.stages.batches import JoinedMicroBatches, micro_batches_of
from shardweave.tests.ir_text import step


@pytest.mark.parametrize("source", ["param", "input"])
def test_samples_of_all_micro_batches_are_brought_together_if_they_are_of_inputs_alone(
    source: str,
) -> None:
    program = step(
        f"""
        {source} %x : tensor<4x8xf64> [{{"micro"}}, {{}}]
        %h = aten.relu(%x) : tensor<4x8xf64>
        %all = dist.all_gather(%h, axes = ["micro"], dim = 0, block = 4) : tensor<8x8xf64>
        %y = aten.neg(%all) : tensor<8x8xf64>
        output %y
        """,
        "micro=2",
        local=True,
    )
    program.set_mesh(Mesh([Axis("micro", 2, "time")]))
    if source == "input":
        assert [value.name_hint for value in micro_batches_of(program).whole] == ["all"]
        return
    with pytest.raises(
        JoinedMicroBatches, match=r"\(%all\) reads samples of several micro-batches at once"
    ):
        micro_batches_of(program)
