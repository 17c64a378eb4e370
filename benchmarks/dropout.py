"""What random numbers cost: `python benchmarks/dropout.py`.

Dropout as eager PyTorch has it, which draws from the state of one generator, and as programs have
it: Philox by the index of each element, the same on every mesh. On the CPU with one thread, or on a
GPU if there is one; the two take turns, and the table gives medians. `--quick` takes small tensors.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardweave.backends.emit.calls import random_numbers
from shardweave.ir.library.philox import positions_of, random_state

P = 0.1
SIZES = {"hidden": (4096, 1024), "attention": (16, 16, 128, 128), "odd rows": (4096, 1001)}


def ours(x: Tensor, state: Tensor, positions: list[Tensor]) -> Tensor:
    """As a program does it: see the recipe in `ir/capture/draws.py`."""
    kept = random_numbers(state, positions, draw=0, dtype=torch.float32) < 1 - P
    return x * kept.to(x.dtype) * (1 / (1 - P))


def median_s(calls: list[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each, called in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, found in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
    return [statistics.median(found[1:]) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small tensors, few repeats")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table("tensor", "elements", "PyTorch, ns", "Philox, ns", "ratio", title=f"{device}")
    rows: list[dict[str, object]] = []
    for name, shape in SIZES.items():
        shape = (max(shape[0] // 16, 1), *shape[1:]) if options.quick else shape
        x, state = torch.randn(shape, device=device), random_state(0).to(device)
        positions = positions_of(shape, "uniform", torch.float32, device)
        calls: list[Callable[[], object]] = [
            lambda x=x: torch.nn.functional.dropout(x, P),
            lambda x=x, state=state, positions=positions: ours(x, state, positions),
        ]
        torchs, philoxs = median_s(calls, 3 if options.quick else 15, device)
        per = 1e9 / x.numel()
        rows.append({"tensor": name, "shape": shape, "torch_s": torchs, "philox_s": philoxs})
        table.add_row(
            name, str(x.numel()), f"{torchs * per:.1f}", f"{philoxs * per:.1f}",
            f"{philoxs / torchs:.2f}",
        )  # fmt: skip
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
