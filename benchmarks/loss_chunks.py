"""Measure what chunks of the loss save and cost: `python benchmarks/loss_chunks.py`.

The step of one device, for a GPT with a vocabulary of 50,257, whole and by `chunk-loss`: the peak
memory that is predicted, the memory that the reference backend holds, and the processor
time of one thread, in turn. Logits exist twice where they are whole: as they are, and their
gradients. `--quick` takes a small model.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import shardweave as sw
from shardweave.backends.reference.reference import Key, values_of
from shardweave.backends.reference.virtual_ranks import global_argument, run_op_by_op, virtual_mesh
from shardweave.driver.models.models import build_example
from shardweave.ir.program.program import Program
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.lowering.lower import local_program
from shardweave.tests.backends.test_reference_memory import Held

LAYERS, WIDTH, WORDS, LENGTH, BATCH = 8, 256, 50_257, 512, 8
CHUNKS = (1, 4, 8, 16, 32)


def held_and_seconds(program: Program, values: dict[Key, torch.Tensor]) -> tuple[int, float]:
    """The most bytes of values at once, and the processor time of the step."""
    held = Held()
    for slot in program.arguments:
        held[slot.value] = [global_argument(program, slot, values)]
    start = time.process_time()
    list(run_op_by_op(program, held, virtual_mesh(program)))
    return held.most, time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, once")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    layers, words, repeats = (1, 1_000, 1) if options.quick else (LAYERS, WORDS, 3)
    sizes = f"hidden={WIDTH},heads=4,vocab={words},seq={LENGTH},batch={BATCH}"
    example = build_example(f"gpt:layers={layers},{sizes}", dtype=torch.float32)
    program = sw.capture(example.module, kwargs=example.kwargs)
    values = dict(values_of(program, example.module, example.kwargs))
    plan = sw.plan(program, "data=1", "megatron")
    programs = {n: local_program(program, replace(plan, loss_chunks=n)) for n in CHUNKS}
    runs = {n: [] for n in CHUNKS}
    for _ in range(repeats):
        for n, each in programs.items():
            runs[n].append(held_and_seconds(each, values))
    logits = 4 * BATCH * LENGTH * words
    least = {n: min(s for _, s in found) for n, found in runs.items()}
    rows = [
        {
            "chunks": n,
            "predicted_bytes": peak_memory(programs[n]).peak_bytes,
            "held_bytes": runs[n][0][0],
            "saved_of_logits": (runs[1][0][0] - runs[n][0][0]) / (2 * logits),
            "time": least[n] / least[1],
        }
        for n in CHUNKS
    ]
    title = f"{layers} layers, {sizes}; logits and their gradients: {2 * logits / 2**20:.0f} MiB"
    table = Table("chunks", "predicted", "held", "saved of logits", "time", title=title)
    for row in rows:
        mib = [f"{row[key] / 2**20:.0f} MiB" for key in ("predicted_bytes", "held_bytes")]
        share, ratio = f"{row['saved_of_logits']:.1%}", f"{row['time']:.3f}"
        table.add_row(str(row["chunks"]), *mib, share, ratio)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
