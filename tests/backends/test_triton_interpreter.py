"""The generated kernels compute what ATen computes, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardweave.tests.marks import slow
from shardweave.tests.warm import run_warm

ROOT = Path(__file__).resolve().parents[2]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_interpreted(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Python in a process where Triton interprets kernels."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "SHARDWEAVE_CACHE": str(folder),
    }
    return run_warm([sys.executable, *arguments], env=environment, cwd=ROOT, timeout_s=600)


def assert_tests_pass(names: Sequence[str], folder: Path, chosen: str = "") -> str:
    """Run the tests of `interpreted_NAME.py`, those that `-k` chooses; what pytest says."""
    files = [str(ROOT / "tests" / "backends" / f"interpreted_{name}.py") for name in names]
    options = ["-q", "-p", "no:cacheprovider", *(["-k", chosen] if chosen else [])]
    done = run_interpreted(["-m", "pytest", *options, *files], folder)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@needs_triton
def test_every_family_of_kernels_equals_aten(tmp_path: Path) -> None:
    assert " passed" in assert_tests_pass(["kernels"], tmp_path)


@needs_triton
def test_kernels_of_one_size_equal_aten(tmp_path: Path) -> None:
    assert_tests_pass(["kernels"], tmp_path, "half or strided")


@needs_triton
@pytest.mark.parametrize(
    "names", ["asides corners", slow("indices lookups"), slow("steps")], ids=lambda names: names
)
def test_kernels_are_right_in_corners_and_with_the_dtypes_of_cuda(
    names: str, tmp_path: Path
) -> None:
    assert_tests_pass(names.split(), tmp_path, "not llama and not bert")


@pytest.mark.slow
@needs_triton
def test_bfloat16_steps_run_with_the_dtypes_of_cuda(tmp_path: Path) -> None:
    assert "3 passed" in assert_tests_pass(["steps"], tmp_path)


@needs_triton
@pytest.mark.parametrize(
    "count", [30, pytest.param(2000, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_kernels_of_random_regions_equal_eager(count: int, tmp_path: Path) -> None:
    file = str(ROOT / "tests" / "backends" / "interpreted_regions.py")
    done = run_interpreted([file, "0", str(count)], tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(rf"{count} kernels of \d+ regions and \d+ ops, 0 wrong", done.stdout)


@needs_triton
@pytest.mark.parametrize(
    "model",
    [
        pytest.param("gpt:layers=1,hidden=16,heads=2,vocab=32,seq=8,batch=2", id="gpt"),
        pytest.param(
            "unet:channels=8,size=8,batch=2,levels=2,groups=4,heads=2",
            id="unet",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_step_of_interpreted_kernels_equals_eager(model: str, tmp_path: Path) -> None:
    done = run_interpreted(
        ["-m", "shardweave", "run", model, "--backend", "triton", "--check"], tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal to eager" in done.stdout
