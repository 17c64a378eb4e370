"""What torchrun shows of a rank that the watchdog ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardweave.backends.batch.replicas import FIRST_CALLS

SCRIPT = """
import os, sys, time, torch
import shardweave as sw
from shardweave.tests.compiled import compile_copy
x = torch.ones(2, 4)
class Summed(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).sum()
model = Summed(4, 4)
for timeout in (None, 12):  # on a busy machine the first may take one rank much longer than another
    step = compile_copy(model, (x,), mesh="data=2", timeout=timeout)
    for _ in range(int(sys.argv[1])):
        step(x)
if os.environ["RANK"] == "1":
    time.sleep(200)
step(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_calls", "says"),
    [
        (1, "LostRankError: no answer within 12 s"),  # the first calls agree on their inputs
        (FIRST_CALLS, "shardweave: rank 0 stops: no answer within 12 s"),
    ],
)
def test_torchrun_shows_the_message(tmp_path: Path, num_calls: int, says: str) -> None:
    script = tmp_path / "late.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(script), str(num_calls)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 1
    assert says in ended.stderr
    assert "traceback : no answer within 12 s" in ended.stderr
    assert f"rank 1 is at {script}:12" in ended.stderr
