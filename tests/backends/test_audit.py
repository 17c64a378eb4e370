"""Emitted source is looked at before it runs: it may only do what a step does."""

from __future__ import annotations

import pytest
import torch

from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.emit.audit import SourceError
from shardweave.backends.emit.emit import emit, load_step
from shardweave.ir.capture.capture import CaptureError, capture
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.types import tensor_type
from shardweave.ir.library.pure_ops import pure_ops
from shardweave.ir.program.text import ProgramTextError
from shardweave.tests.ir_text import step

PROGRAM = step("input %x : tensor<4xf32>\n%y = aten.neg(%x) : tensor<4xf32>\noutput %y")
LINE = "y = torch.neg(x)"


def test_what_is_emitted_is_let_through() -> None:
    x = torch.randn(4)
    result = load_step(emit(PROGRAM))(Runtime(), {("input", "x"): x})
    assert torch.equal(result["output", "0"], -x)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('y = aten.from_file.default("/etc/passwd", False, 4)', "calls aten.from_file.default"),
        ("y = aten.neg_.default(x)", "calls aten.neg_.default"),
        ('y = open("/etc/passwd")', "calls open"),
        ("y = torch.load(x)", "calls torch.load"),
        ("y = torch.neg_(x)", "calls torch.neg_"),
        ("y = torch.hub.load(x)", "calls torch.hub.load"),
        ("f = aten.from_file; y = f(x)", "calls f"),
        ("y = rt.__class__.mro()", "calls rt.__class__.mro"),
        ("y = rt._groups(x)", "calls rt._groups"),
        ("y = x.__class__", "reads x.__class__"),
        ("y = kernels[x](x)", "calls kernels[x]"),
        ("aten = x; y = aten.neg.default(x)", "assigns aten"),
        ("import os; y = x", "is a Import"),
        ("y = [x for x in x]", "is a ListComp"),
        ("y = (lambda: x)()", "calls lambda: x"),
        ('y = f"{x}"', "is a JoinedStr"),
    ],
)
def test_source_that_does_more_is_refused_with_its_line(code: str, said: str) -> None:
    source = emit(PROGRAM)
    assert LINE in source
    source = source.replace(LINE, code)
    number = next(i for i, line in enumerate(source.splitlines(), 1) if code in line)
    with pytest.raises(SourceError) as refused:
        load_step(source)
    assert str(refused.value) == f"line {number} of emitted source {said}, which no step does."


@pytest.mark.parametrize("place", ["import torch\n", "def step"])
def test_source_with_another_header_is_refused(place: str) -> None:
    source = emit(PROGRAM).replace(place, f"import os\n{place}", 1)
    with pytest.raises(SourceError, match="emitted source must be its header"):
        load_step(source)


@pytest.mark.parametrize(
    "name", ["from_file", "empty.memory_format", "set.source_Storage", "randn"]
)
def test_a_text_has_pure_ops_only(name: str) -> None:
    assert f"aten.{name}" not in pure_ops()
    with pytest.raises(ProgramTextError, match=f"there is no op 'aten.{name}'"):
        step(f"%y = aten.{name}() : tensor<4xf32>\noutput %y")


def test_an_impure_op_that_is_built_does_not_verify() -> None:
    op = create("aten.from_file", [], [tensor_type([4], torch.float32)], {"filename": "/etc/hosts"})
    with pytest.raises(Exception, match="does more than compute tensors from its operands"):
        op.verify()


def test_a_model_that_reads_a_file_is_refused_with_its_line(tmp_path) -> None:  # noqa: ANN001
    file = str(tmp_path / "numbers")

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + torch.from_file(file, size=4)).sum()

    with pytest.raises(CaptureError, match=r"test_audit\.py:\d+"):
        capture(Model(), [torch.zeros(4)])
