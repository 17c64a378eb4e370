"""How far gradients under bfloat16 autocast are from float64, beside those of eager autocast.

`python benchmarks/precision.py [--quick] [--json FILE]`: a small GPT on virtual meshes. A ratio is
the relative distance of all gradients together from those of float64, over that of eager autocast
of the same weights and batch; its mean is geometric, over seeds. Biases are drawn, as after some
training: adding zeros would round nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardweave as sw
from shardweave.benchmarks.compile_time import machine
from shardweave.driver.models.gpt import GPTConfig, build_gpt
from shardweave.ir.dialects.types import dtype_word

MESHES = ("data=2", "data=4", "tensor=2", "tensor=4", "data=2,tensor=2")
DTYPES = (None, torch.float32, torch.bfloat16)
CONFIG = GPTConfig(layers=2, hidden=64, heads=4, vocab=256, seq=16, batch=8)
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Row:
    """Ratios on a mesh, gradients being reduced in a dtype. spread: standard error of the mean's
    logarithm."""

    mesh: str
    reduce_dtype: str
    mean: float
    spread: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 seeds instead of 40")
    parser.add_argument("--json", default="", help="write the rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", sw.PlanNote)
    rows = [measure(mesh, dtype, 4 if options.quick else 40) for mesh in MESHES for dtype in DTYPES]
    table = Table("mesh", "reduce_dtype", "distance / eager's", title="Gradients in bfloat16")
    for row in rows:
        table.add_row(row.mesh, row.reduce_dtype, f"{row.mean:.3f} +- {row.spread:.3f}")
    Console(width=max(110, Console().width)).print(table)
    if options.json:
        found = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


def measure(mesh: str, reduce_dtype: torch.dtype | None, num_seeds: int) -> Row:
    """The ratios of a mesh."""
    torch.manual_seed(0)
    model, batch = example()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "reduce-in: ")  # it has nothing to do everywhere
        step = sw.compile(
            copy.deepcopy(model),
            kwargs=batch,
            mesh=mesh,
            backend="reference",
            precision="bf16",
            reduce_dtype=reduce_dtype,
        )
    logs: list[float] = []
    for seed in range(num_seeds):
        torch.manual_seed(seed)
        model, batch = example()
        exact = copy.deepcopy(model).double()
        backward(exact, batch, cast=False)
        backward(model, batch, cast=True)
        step.load_state_dict({name: t.detach() for name, t in model.state_dict().items()})
        step.zero_grad()
        step(**batch).backward()
        logs.append(math.log(distance(step, exact) / distance(model, exact)))
    name = "" if reduce_dtype is None else dtype_word(reduce_dtype)
    spread = statistics.stdev(logs) / math.sqrt(num_seeds)
    return Row(mesh, name, math.exp(statistics.mean(logs)), spread)


def example() -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a batch."""
    model, batch = build_gpt(CONFIG)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.normal_(parameter, std=0.1)
    return model, batch


def backward(model: nn.Module, batch: Mapping[str, Tensor], *, cast: bool) -> None:
    with torch.autocast("cpu", BF16, enabled=cast):
        loss = model(**batch)
    loss.backward()


def distance(module: nn.Module, exact: nn.Module) -> float:
    """Of all gradients together, relative."""
    error = size = 0.0
    for name, parameter in exact.named_parameters():
        found = module.get_parameter(name).grad
        assert found is not None
        assert parameter.grad is not None
        error += (found.double() - parameter.grad).square().sum().item()
        size += parameter.grad.square().sum().item()
    return math.sqrt(error / size)


if __name__ == "__main__":
    sys.exit(main())
