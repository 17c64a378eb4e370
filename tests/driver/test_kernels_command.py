"""`shardweave kernels`: what it writes and how it says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")

from shardweave.backends.triton.launch import tune
from shardweave.driver.cli import main
from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import captured

GPT = "gpt:layers=2,hidden=16,heads=2,vocab=32,seq=8,batch=4,tie=false"

TEXT = """
    input %x : tensor<64x32xf32>
    input %y : tensor<64x32xf32>
    %a = aten.add.Tensor(%x, %y) : tensor<64x32xf32>
    %g = aten.gelu(%a) : tensor<64x32xf32>
    output %g
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tune.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    step(TEXT).save(tmp_path / "step.mlir")


def test_sources_and_binaries_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["kernels", str(tmp_path / "step.mlir"), "-o", str(out)]) == 0
    name = "00_pointwise_add_gelu"
    written = {path.name for path in out.iterdir()}
    assert written == {
        "kernels.json", f"{name}.py", f"{name}.gfx942.hsaco", f"{name}.gfx942.amdgcn",
        *(f"{name}.{target}.{kind}" for target in ("sm_80", "sm_90") for kind in ("ptx", "cubin")),
    }  # fmt: skip
    records = json.loads((out / "kernels.json").read_text())
    assert [record["target"] for record in records] == ["sm_80", "sm_90", "gfx942"]
    assert all(record["registers"] > 0 and record["problem"] is None for record in records)
    assert "wrote 1 kernels of 1 regions" in capsys.readouterr().out


def test_sources_alone_are_written_without_targets(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["kernels", str(tmp_path / "step.mlir"), "-o", str(out), "--target", ""]) == 0
    assert {path.suffix for path in out.iterdir()} == {".py", ".json"}


@pytest.mark.parametrize("passes", ["", "fuse-kernels{matmul=false}"], ids=["plain", "fused"])
def test_kernels_of_all_stages_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], passes: str
) -> None:
    layers = (("wte", "wpe", "h.0"), ("h.1", "ln_f", "head"))
    plan = Plan({"stage": 2}, pipeline=Pipeline(layers, 2))
    staged = run_passes(partition(captured(GPT).program, Mesh(stage=2), plan), passes)
    staged.save(tmp_path / "staged.mlir")
    out = tmp_path / "out"
    assert main(["kernels", str(tmp_path / "staged.mlir"), "-o", str(out), "--target", ""]) == 0
    sources = "".join(path.read_text() for path in out.glob("*.py"))
    assert "aten.gelu" in sources
    assert "aten.exp" in sources  # of the loss, in the last stage
    assert "kernels of 0 regions" not in capsys.readouterr().out


def test_unknown_target_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["kernels", str(tmp_path / "step.mlir"), "-o", str(tmp_path), "--target", "sm_1"]
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: target 'sm_1' is unknown; use some of")
