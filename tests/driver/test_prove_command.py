"""The prove command, and proofs of passes as they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

import shardweave as sw
from shardweave.driver.checking.validate import ProvedPassError
from shardweave.driver.cli import main
from shardweave.ir.dialects import dist
from shardweave.ir.dialects.annotations import set_sharding_attrs
from shardweave.ir.program.program import Program
from shardweave.tests.compiled import compile_copy
from shardweave.tests.ir_text import step

PASSES = "propagate-shardings,insert-collectives,start-collectives"


@pytest.fixture
def program() -> Program:
    return step(
        """
        param %up : tensor<8x16xf64> [{}, {"tensor"}]
        param %down : tensor<16x8xf64> [{"tensor"}, {}]
        input %x : tensor<4x8xf64>
        %wide = aten.mm(%x, %up) {layer = "up", phase = forward} : tensor<4x16xf64>
        %narrow = aten.mm(%wide, %down) {layer = "down", phase = forward} : tensor<4x8xf64>
        %out = aten.gelu(%narrow) {layer = "act", phase = forward} : tensor<4x8xf64>
        output %out
        """,
        "tensor=2",
    )


def test_command_proves_a_local_program(
    program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = str(tmp_path / "step.mlir"), str(tmp_path / "local.mlir")
    program.save(before)
    assert main(["opt", before, "--passes", PASSES, "--prove", "-o", after]) == 0
    assert "proved every pass" in capsys.readouterr().out
    assert main(["prove", after, "--against", before]) == 0
    assert capsys.readouterr().out.startswith("proved: 5 ops compute the 1 results")
    assert main(["prove", after]) == 2
    assert "required: --against" in capsys.readouterr().err
    text = Path(after).read_text().replace("aten.gelu", "aten.tanh")
    Path(after).write_text(text)
    assert main(["prove", after, "--against", before]) == 1
    assert "aten.tanh (%out) in layer 'act'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("%up", "%gate", "of different models: param 'up' is only in the program;"),
        ("", "", "of different models: param 'bias' is only in the other program;"),
        ("16", "32", "different models or batches: param 'up' and 1 more arguments are of another"),
        (
            "4x",
            "6x",
            "batches: input 'x' is of another shape, globally (4, 8) in the program and (6, 8) in",
        ),
    ],
)
def test_command_says_that_programs_are_of_different_models(
    old: str, new: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        param %up : tensor<8x16xf64>
        param %down : tensor<16x8xf64>
        input %x : tensor<4x8xf64>
        %wide = aten.mm(%x, %up) {layer = "up", phase = forward} : tensor<4x16xf64>
        %narrow = aten.mm(%wide, %down) {layer = "down", phase = forward} : tensor<4x8xf64>
        output %narrow
    """
    files = [str(tmp_path / name) for name in ("a.mlir", "b.mlir")]
    step(text).save(files[0])
    other = text.replace(old, new) if old else f"param %bias : tensor<8xf64>\n{text}"
    step(other).save(files[1])
    assert main(["prove", files[0], "--against", files[1]]) == 1
    assert said in capsys.readouterr().err


@dataclass(frozen=True)
class DropReductionPass(ModulePass):
    """Takes each term for the sum."""

    name = "drop-reduction"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        for one in list(Program(op).ops):
            if isinstance(one, dist.AllReduceOp):
                owner = one.operands[0].owner
                set_sharding_attrs(owner, None)  # pyright: ignore[reportArgumentType]
                one.results[0].replace_all_uses_with(one.operands[0])
                one.detach()
                one.erase()


def test_error_names_the_pass_that_broke_the_program(program: Program) -> None:
    passes = ["propagate-shardings,insert-collectives", DropReductionPass()]
    with pytest.raises(
        ProvedPassError, match="after pass 'drop-reduction', the program is not proved"
    ):
        sw.run_passes(program, passes, prove=True)


def test_compiled_step_says_that_it_is_proved() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    step = compile_copy(
        model,
        (torch.randn(4, 8),),
        mesh="data=2,tensor=2",
        backend="reference",
        loss=lambda output: output.square().sum(),
        prove=True,
    )
    assert any("are proved to compute the model's results" in note for note in step.notes)
