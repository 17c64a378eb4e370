"""Passes that find nothing to do, or whose option has no effect, say so and what to do."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from shardweave.driver.cli import main
from shardweave.ir.program.program import Program
from shardweave.passes.notes import PassNote, heard_by, note, unheard
from shardweave.passes.pipeline import PassError, PassPipeline, run_passes
from shardweave.tests.compiled import compile_copy
from shardweave.tests.ir_text import step

GLOBAL = """
    param %w : tensor<4x4xf64>
    input %x : tensor<8x4xf64>
    %y = aten.mm(%x, %w) {layer = "fc", phase = forward} : tensor<8x4xf64>
    %t = aten.tanh(%y) {layer = "act", phase = forward} : tensor<8x4xf64>
    %g = aten.tanh_backward(%t, %t) {layer = "act", phase = backward} : tensor<8x4xf64>
    %xt = aten.permute(%x, dims = [1, 0]) {phase = backward} : tensor<4x8xf64>
    %dw = aten.mm(%xt, %g) {layer = "fc", phase = backward} : tensor<4x4xf64>
    output %t
    grad w = %dw
"""
BLOCKS = GLOBAL.replace('"fc"', '"h.0"').replace('"act"', '"h.0"')
FORWARD = BLOCKS.split("    %g =")[0] + "    output %t\n"
ALONE = """
    param %w : tensor<4x4xf64>
    input %x : tensor<8x4xf64>
    %y = aten.mm(%x, %w) : tensor<8x4xf64>
    output %y
"""
SHARDED = """
    input %x : tensor<4x4xf64>
    %s = dist.all_reduce(%x, axes = ["tensor"], op = "sum") {phase = forward} : tensor<4x4xf64>
    %y = aten.tanh(%s) {phase = forward} : tensor<4x4xf64>
    output %y
"""
POINTWISE = """
    input %x : tensor<8x4xf64>
    %y = aten.tanh(%x) : tensor<8x4xf64>
    %z = aten.mul.Tensor(%y, %x) : tensor<8x4xf64>
    output %z
"""
RECOMPUTED = """
    input %x : tensor<4x4xf64>
    %s = dist.all_reduce(%x, axes = ["tensor"], op = "sum") {phase = forward} : tensor<4x4xf64>
    %t = aten.tanh(%s) {phase = forward} : tensor<4x4xf64>
    %r = dist.all_reduce(%x, axes = ["tensor"], op = "sum") {phase = recompute} : tensor<4x4xf64>
    %g = aten.tanh(%r) {phase = backward} : tensor<4x4xf64>
    output %t
    output %g
"""


def local(text: str) -> Program:
    return step(text, "tensor=2", local=True)


CASES = {
    "no-blocks": (step(GLOBAL), "rematerialize", "has no repeated blocks, so that nothing is reco"),
    "policy-none": (step(BLOCKS), "rematerialize{policy=none}", "policy none recomputes nothing"),
    "fits": (
        step(BLOCKS),
        "rematerialize{policy=budget bytes=1000000}",
        "the step fits bytes=1000000 as it is; give fewer",
    ),
    "no-backward": (step(FORWARD), "rematerialize", "capture the step with train=True"),
    "one-sub-batch": (step(GLOBAL), "split-batch{n=1}", "give n >= 2, or leave the pass out"),
    "nothing-to-hide": (
        step(GLOBAL),
        "overlap-communication",
        "communicates nothing that could be",
    ),
    "no-sub-batches": (
        local(SHARDED),
        "start-collectives,overlap-communication{schedule=cross-pass}",
        "schedule cross-pass lets sub-batches take turns, and the program has none; run split-batch",
    ),
    "none-recomputed": (
        local(SHARDED),
        "delete-redundant-collectives",
        "no recomputed collective repeats an earlier one; run insert-collectives and then rematerialize",
    ),
    "no-budget": (
        local(RECOMPUTED),
        "delete-redundant-collectives{budget=0}",
        "budget=0 bytes keep none of 1 redundant results; give more",
    ),
    "no-gradients": (
        local(SHARDED),
        "bucket-collectives",
        "no gradient is reduced on its own, and no weight is gathered; run",
    ),
    "no-collectives": (
        step(GLOBAL),
        "start-collectives",
        "no collective that blocks; shard it first",
    ),
    "no-time-axis": (local(SHARDED), "unroll-time-axes", "no time axis; run split-batch before"),
    "nothing-fused": (step(ALONE), "fuse-kernels", "nothing is fused: no two ops"),
    "nothing-annotated": (
        step(GLOBAL, "data=2,tensor=2"),
        "propagate-shardings",
        "no value is annotated over data=2 and tensor=2, so that its devices all compute the same; "
        "run apply-plan or plan-<planner>",
    ),
    "one-axis-annotated": (
        step(
            GLOBAL.replace("8x4xf64>\n    %y", '8x4xf64> [{"data"}, {}]\n    %y'), "data=2,tensor=2"
        ),
        "propagate-shardings",
        "no value is annotated over tensor=2, so",
    ),
    "no-cut-keys": (
        step(GLOBAL, "data=2"),
        "split-attention{parts=2}",
        "no fused attention has keys that are sharded along the sequence, and none is computed in",
    ),
    "padding": (
        step(GLOBAL.replace("8x4xf64>\n    %y", '8x4xf64> [{"data"}, {}]\n    %y'), "data=3"),
        "propagate-shardings,insert-collectives",
        "sizes that do not divide are padded, and devices compute the padding in vain: 8 over "
        "data=3 as 9",
    ),
    "undone": (
        step("input %short : tensor<1x4xf64>" + FORWARD, "data=2"),
        "plan-replicated",
        "input 'short' stays whole: its first dim 1 is too short for data=2",
    ),
}
"""A program, passes of which the last has nothing to do, and a part of what it says."""


@pytest.mark.parametrize("case", CASES)
def test_pass_without_work_warns(case: str) -> None:
    program, passes, said = CASES[case]
    name = PassPipeline(passes).passes[-1].name
    with pytest.warns(PassNote, match=f"^{name}: .*{re.escape(said)}") as caught:
        run_passes(program, passes)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("case", CASES)
def test_command_line_prints_a_note(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, passes, said = CASES[case]
    name = PassPipeline(passes).passes[-1].name
    (tmp_path / "step.mlir").write_text(str(program))
    assert main(["opt", str(tmp_path / "step.mlir"), "--passes", passes]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert len(notes) == 1
    assert notes[0].startswith(f"note: {name}: ")
    assert said in notes[0]


WORKING = {
    "rematerialize": (step(BLOCKS), "rematerialize"),
    "split-batch": (step(GLOBAL), "split-batch{n=2}"),
    "start": (local(SHARDED), "start-collectives,overlap-communication{schedule=blocking}"),
    "redundant": (local(RECOMPUTED), "delete-redundant-collectives"),
    "fuse": (step(POINTWISE), "fuse-kernels"),
    "one-device": (step(GLOBAL, "data=1"), "propagate-shardings,insert-collectives"),
    "unreduced": (
        step(GLOBAL.replace("8x4xf64>\n    %y", '8x4xf64> [{"data"}, {}]\n    %y'), "data=2"),
        "propagate-shardings,insert-collectives,bucket-collectives,start-collectives",
    ),
    "sub-batches": (
        step(GLOBAL, "data=1"),
        "split-batch,propagate-shardings,insert-collectives,unroll-time-axes",
    ),
}


@pytest.mark.parametrize("case", WORKING)
def test_pass_with_work_says_nothing(case: str) -> None:
    program, passes = WORKING[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_passes(program, passes)


def test_oases_without_a_plan_says_that_nothing_is_sharded() -> None:
    heard: list[str] = []
    with heard_by(heard.append):
        run_passes(step(BLOCKS), "preset:oases", mesh="tensor=2")
    assert heard[0].startswith("propagate-shardings: no value is annotated over tensor=2")
    assert [text.partition(":")[0] for text in heard] == [
        "propagate-shardings",
        "delete-redundant-collectives",
        "start-collectives",
        "overlap-communication",
    ]


def test_notes_of_a_failing_pipeline_are_given_once() -> None:
    heard: list[str] = []
    with heard_by(heard.append), pytest.raises(PassError, match="n=0"):
        run_passes(step(GLOBAL), "start-collectives,split-batch{n=0}")
    assert [text.partition(":")[0] for text in heard] == ["start-collectives"]


def test_note_outside_a_pipeline_warns_and_can_be_dropped() -> None:
    with pytest.warns(PassNote, match="^nothing$"):
        note("nothing")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with unheard():
            note("nothing")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.square(self.fc(x)).sum()


@pytest.mark.parametrize("mesh", [None, "data=2,tensor=3"])
def test_compile_warns_of_the_passes_that_were_asked_for_alone(mesh: str | None) -> None:
    given = {"kwargs": {"x": torch.ones(5, 4)}, "mesh": mesh, "backend": "reference"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", PassNote)
        compile_copy(Small(), **given)
    with pytest.warns(PassNote) as caught:
        compile_copy(Small(), **given, passes="rematerialize")
    of_passes = [str(one.message) for one in caught if one.category is PassNote]
    assert [message.partition(":")[0] for message in of_passes] == ["rematerialize"]
