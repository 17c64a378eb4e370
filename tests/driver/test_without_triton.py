"""Where Triton does not exist, as on macOS and Windows, all but compiling kernels works."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from shardweave.tests.test_structure import layer_files, name_of

MISSING = ("triton", "fcntl", "resource")
"""Triton, and what Windows does not have of Python."""

RUN = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))

import torch
import shardweave as sw
from shardweave.driver.cli import main
from shardweave.tests.compiled import compile_copy

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
x = torch.randn(4, 8)
loss = lambda y: y.square().mean()
loss(model(x)).backward()
for backend in ("reference", "triton"):
    step = compile_copy(model, (x,), mesh="data=2" if backend == "reference" else "", loss=loss, backend=backend)
    torch.testing.assert_close(step(x)[0], loss(model(x)))
    for own, wanted in zip(step.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(sw.full_tensor(own.grad), wanted.grad)
assert "since Triton is not installed" in step.explain()
program, folder = sys.argv[1:]
spec = "gpt:layers=1,hidden=16,heads=2,vocab=16,seq=4,batch=4"
assert main(["capture", spec, "-o", program]) == 0
assert main(["plan", spec, "--cluster", "dgx-v100", "--mesh", "data=2"]) == 0
assert main(["kernels", program, "-o", folder, "--target", ""]) == 0
assert main(["kernels", program, "-o", folder, "--target", "sm_90"]) == 1
"""


def imported_at_once(path: Path) -> set[str]:
    """The top-level names of the modules that a file imports as it is imported."""
    tree = ast.parse(path.read_text())
    return {
        name.split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }


def test_no_file_but_a_kernel_imports_what_may_be_missing() -> None:
    importers = [name_of(path) for path in layer_files() if imported_at_once(path) & {*MISSING}]
    assert importers == ["backends/triton/kernels/philox.py"]


def test_package_works_without_triton(tmp_path: Path) -> None:
    paths = [str(tmp_path / "program.mlir"), str(tmp_path / "kernels")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN, *paths],
        cwd=tmp_path,
        env={**os.environ, "SHARDWEAVE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "needs Triton, which is not installed; compile on Linux" in done.stderr
