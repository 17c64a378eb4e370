"""All that needs a GPU, in one command: exactness, NCCL, CUDA graphs, a profile, steps, kernels.

`python benchmarks/gpu.py [--seconds S] [--json FILE] [--quick]`: checks beside eager run first,
side by side; what is timed runs after them, alone. Parts that do not end in time say so. Exits 1 if
a check failed. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import gpu_exact
import gpu_timing
from rank_processes import path_of_package

HERE = Path(__file__).parent
FOR_CHECKS = 0.4
"""Share of the seconds after which checks that still run are stopped."""

CHECKS = ("NCCL", "training", "dropout", "two processes")
TIMED = {"profile": 0.4, "steps": 0.6, "kernels": 0.8, "offload": 1.0}
"""Share of the seconds that are left after which each is stopped."""


@dataclass(frozen=True)
class Part:
    """A command that writes its figures to a file. name: of the part, and of the file."""

    name: str
    command: Sequence[str]


def checks_of(quick: bool) -> list[Part]:
    """One process for each model and backend, since most of their time is the host's."""
    models = gpu_exact.QUICK if quick else tuple(gpu_exact.MODELS)
    steps = [f"{model}, {backend}" for model in models for backend in gpu_exact.PLAIN]
    return [_exact(name) for name in (*steps, *CHECKS)]


def _exact(name: str) -> Part:
    return Part(name, [str(HERE / "gpu_exact.py"), "--only", name])


def timed_of(quick: bool, folder: Path) -> list[Part]:
    fewer = ["--quick"] if quick else []
    cluster = folder / "cluster.yaml"
    profile = ["-m", "shardweave", "profile", "--nproc", "1", "-o", str(cluster)]
    return [
        Part("profile", profile),
        Part("steps", [str(HERE / "step_gpu.py"), "--cluster", str(cluster), *fewer]),
        Part("kernels", [str(HERE / "kernels.py"), *fewer]),
        _exact("offload"),
    ]


class Started:
    """A part that runs, its output in a file."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part = part
        self.file = folder / f"{part.name}.json"
        self._log = (folder / f"{part.name}.txt").open("w+")
        # The profile's own file is its result.
        own = [] if part.name == "profile" else ["--json", str(self.file)]
        self._process = subprocess.Popen(
            [sys.executable, *part.command, *own],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path_of_package()},
            start_new_session=True,
        )

    def ended(self, end_s: float) -> dict[str, Any]:
        """Wait, at most until `end_s`; returns the part's state, its output and its figures."""
        try:
            status = self._process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, 9)
                self._process.wait()
        self._log.seek(0)
        output = self._log.read()
        self._log.close()
        figures = json.loads(self.file.read_text()) if self.file.exists() else {}
        state = "stopped" if status is None else f"failed ({status})" if status else "ok"
        return {"state": state, "output": output[-4000:], **figures}


def main() -> int:
    options = parse_options()
    reason = gpu_timing.why_not()
    if reason is not None:
        print(
            f"skipped: {reason}; would check, beside eager, {', '.join(gpu_exact.MODELS)} on "
            f"{', '.join(gpu_exact.BACKENDS)}, then {', '.join(CHECKS)}; and time "
            f"{', '.join(TIMED)}, in {options.seconds:.0f} s"
        )
        return 0
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardweave-") as name:
        folder = Path(name)
        running = [Started(part, folder) for part in checks_of(options.quick)]
        end_s = start_s + FOR_CHECKS * options.seconds
        parts = {started.part.name: started.ended(end_s) for started in running}
        write(options.json, parts)
        for part in timed_of(options.quick, folder):
            left_s = max(0.0, start_s + options.seconds - time.monotonic())
            end_s = time.monotonic() + TIMED[part.name] * left_s
            parts[part.name] = Started(part, folder).ended(end_s)
            cluster = folder / "cluster.yaml"
            if part.name == "profile" and cluster.exists():
                parts["profile"]["cluster"] = cluster.read_text()
            write(options.json, parts)
    show(parts)
    print(f"{time.monotonic() - start_s:.0f} s")
    rows = [row for part in parts.values() for row in part.get("rows", ())]
    return int(any(row.get("ok") is False for row in rows))


def write(file: str | None, parts: dict[str, dict[str, Any]]) -> None:
    if file:
        record = {**gpu_timing.machine(), "parts": parts}
        Path(file).write_text(json.dumps(record, indent=1) + "\n")


def show(parts: dict[str, dict[str, Any]]) -> None:
    """A line for each check, and the tables of what was timed."""
    gpu_exact.show(
        [
            {"state": part["state"], **row}
            for name, part in parts.items()
            if name not in TIMED
            for row in part.get("rows", [{"check": name, "ok": None}])
        ]
    )
    for name in TIMED:
        if name in parts:
            print(f"\n{name}: {parts[name]['state']}\n{parts[name]['output']}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=480.0, help="for all of it (default: 480)")
    parser.add_argument("--quick", action="store_true", help="two models, small sizes")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
