"""The kernel benchmarks: they say why they skip, and fusion moves no more bytes than Inductor's."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardweave.benchmarks import kernel_bytes
from shardweave.benchmarks.kernels import cases, fused_call

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("name", "would"),
    [
        ("kernels", "would time 8 kernels in bfloat16 at 4096x1024 beside eager, Inductor and"),
        ("step_gpu", "would time steps of GPT-2-medium blocks and Llama-1B blocks (2 layers, 256"),
    ],
)
def test_benchmark_of_a_gpu_says_without_one_what_it_would_measure(
    name: str, would: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = ROOT / "benchmarks" / f"{name}.py"
    monkeypatch.setattr("sys.argv", [str(file), "--quick"])
    monkeypatch.setattr("sys.path", [str(file.parent), *sys.path])  # as Python does for a script
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(file), run_name="__main__")
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"skipped: no GPU; {would}")
    assert said.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["kernels", "step_gpu"])
def test_benchmark_runs_on_a_gpu(name: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT.parent)},
    )
    assert done.returncode == 0, done.stderr
    assert file.exists()


def test_every_case_is_one_kernel() -> None:
    pytest.importorskip("triton")
    for case in cases():
        tensors = [torch.randn(s, dtype=torch.bfloat16) for s in case.shapes(32, 16)]
        call, moved = fused_call(case.run, tensors)
        assert call.reason is None, f"{case.name}: {call.reason}"
        assert moved > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", list(kernel_bytes.MODELS))
def test_fused_layer_moves_at_most_a_tenth_more_than_inductors(kind: str) -> None:
    found = kernel_bytes.layer_bytes(kind)
    assert found["fused"] <= 1.1 * found["Inductor"]
    assert found["fused, library products"] <= 1.1 * found["Inductor"]
    assert found["fused"] < found["fused, library products"] < found["op by op"]
