"""Choices of configurations on disk: what is kept, shared and mended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardweave.backends.triton.kernels.generate import generate
from shardweave.backends.triton.launch import tune
from shardweave.backends.triton.source.source import Kernel
from shardweave.tests.backends.kernel_cases import POINTWISE, region

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tune.VARIABLE, str(tmp_path))


def a_kernel(rows: int = 4) -> Kernel:
    import torch

    return generate(region(POINTWISE["bias, gelu and residual"], rows, 8, 1, torch.float32))


def test_recorded_choice_is_read_again() -> None:
    kernel = a_kernel()
    path = tune.entry_path(kernel, "NVIDIA H200")
    assert tune.read_choice(path, kernel) is None
    tune.record_choice(path, kernel, kernel.configs[2])
    assert tune.read_choice(path, kernel) == kernel.configs[2]
    tune.record_choice(path, kernel, tune.ATEN)
    assert tune.read_choice(path, kernel) == tune.ATEN


def test_choices_are_of_one_device_and_one_shape() -> None:
    paths = {
        tune.entry_path(a_kernel(rows), device) for rows in (4, 5) for device in ("A100", "H200")
    }
    assert len(paths) == 4
    assert tune.entry_path(a_kernel(4), "A100") in paths


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"config": 3}', '{"config": {"BLOCK": 3}}', "\x00\x01"]
)
def test_corrupt_entry_is_measured_again(content: str) -> None:
    kernel = a_kernel()
    path = tune.entry_path(kernel, "NVIDIA H200")
    tune.write_file(path, content)
    assert tune.read_choice(path, kernel) is None
    tune.record_choice(path, kernel, kernel.configs[0])
    assert tune.read_choice(path, kernel) == kernel.configs[0]


def test_processes_that_write_at_once_leave_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "entry.json"
    tune.write_file(path, "{}")
    code = (
        "import sys, json\n"
        f"sys.path.insert(0, {str(ROOT.parent)!r})\n"
        "from pathlib import Path\n"
        "from shardweave.backends.triton.launch.tune import write_file\n"
        f"path = Path({str(path)!r})\n"
        "for n in range(200):\n"
        "    write_file(path, json.dumps({'who': sys.argv[1] * 500, 'n': n}))\n"
        "    assert json.loads(path.read_text())\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, who]) for who in "ab"]
    try:
        assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    finally:
        for writer in writers:
            writer.kill()
    assert json.loads(path.read_text())["n"] == 199
    assert [file.name for file in tmp_path.iterdir()] == ["entry.json"]


def test_fastest_configuration_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    kernel = a_kernel()
    ran: list[object] = []

    def do_bench(run: object, warmup: int, rep: int) -> float:
        assert callable(run)
        run()
        return {1: 0.5}.get(len(ran), 1.0) if ran[-1] != kernel.configs[2] else 0.1

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    choice = tune.fastest_config(kernel, lambda config: lambda: ran.append(config))
    assert choice == tune.Choice(kernel.configs[2])
    assert ran == [*kernel.configs, tune.ATEN]
