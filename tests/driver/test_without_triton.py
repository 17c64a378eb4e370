"""Where Triton does not exist, as on macOS and Windows, all but compiling kernels works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from shardweave.tests.test_structure import PACKAGE, ROOT, layer_files

HIDDEN = """
import importlib, sys
for name in ("triton", "fcntl", "resource"):
    sys.modules[name] = None
"""
"""Hides Triton, and what Windows does not have of Python."""

MODULES = sorted(
    ".".join([PACKAGE, *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in layer_files()
    if path.name != "philox.py" or path.parent.name != "triton"  # a kernel
)

RUN = """
import torch
import shardweave as sw
from shardweave.driver.cli import main

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
x = torch.randn(4, 8)
loss = lambda y: y.square().mean()
loss(model(x)).backward()
for backend in ("reference", "triton"):
    step = sw.compile(model, (x,), mesh="data=2" if backend == "reference" else "", loss=loss, backend=backend)
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


def test_package_works_without_triton(tmp_path: Path) -> None:
    imports = f"for name in {MODULES}:\n    importlib.import_module(name)\n"
    paths = [str(tmp_path / "program.mlir"), str(tmp_path / "kernels")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HIDDEN + imports + RUN, *paths],
        cwd=tmp_path,
        env={**os.environ, "SHARDWEAVE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "takes Triton, which is not installed here; compile them on Linux" in done.stderr
