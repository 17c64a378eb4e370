"""The programs that ranks run, written out and compared between two versions of the code:
`python benchmarks/local_programs.py --write DIR` before a change, `--against DIR` after it.

Each of eight small models is partitioned on three meshes (tensor=2; data=2,tensor=2; data=4 with
every weight stored in shards) by every preset. `--against` prints which texts differ, with the
collectives and bytes of both sides, and exits 1 if any does or if one of the new programs sends
more. A program that names its blocks (`dist.blocks`) where the other does not is the same if all
else is. Nothing is kept in the repository: a change that is meant to alter programs says so itself.
`--quick` takes two models; `--json FILE` writes the table as data.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import shardweave as sw
from shardweave.driver.models.models import build_example
from shardweave.ir.dialects.types import shape_of
from shardweave.passes.presets import PRESETS

MODELS = {
    "gpt": "gpt:layers=2,hidden=16,heads=8,vocab=32,seq=16,batch=8",
    "llama": (
        "hf:llama:num_hidden_layers=2,hidden_size=16,num_attention_heads=8,"
        "num_key_value_heads=8,intermediate_size=32,vocab_size=32,batch=8,seq=16"
    ),
    "gpt2": "hf:gpt2:n_layer=2,n_embd=16,n_head=8,vocab_size=32,n_positions=16,batch=8,seq=16",
    "bert": (
        "hf:bert:num_hidden_layers=2,hidden_size=16,num_attention_heads=8,intermediate_size=32,"
        "vocab_size=32,max_position_embeddings=16,batch=8,seq=16"
    ),
    "t5": "hf:t5:num_layers=2,d_model=16,d_kv=2,d_ff=32,num_heads=8,vocab_size=32,batch=8,seq=16",
    "vit": (
        "hf:vit:num_hidden_layers=2,hidden_size=16,num_attention_heads=8,intermediate_size=32,"
        "image_size=8,patch_size=4,num_labels=8,batch=8"
    ),
    "unet": "unet:channels=8,size=8,batch=8,levels=2,groups=4,heads=8",
    "cnn": "cnn:depth=10,channels=8,size=8,batch=8,pool=true",
}
QUICK = ("gpt", "cnn")
MESHES = {"tensor=2": False, "data=2,tensor=2": False, "data=4": True}
"""Whether the weights are stored in shards over the axis `data`."""


@dataclass(frozen=True)
class Partitioned:
    """One case: its name, the program's text, collectives, and bytes that a rank sends."""

    name: str
    text: str
    collectives: int
    sent_bytes: float


def presets() -> dict[str, str]:
    """The passes of each preset; one that takes a local program is run on a partitioned one."""
    return {
        name: f"preset:partition,preset:{name}"
        if name in ("recompute", "kernels")
        else f"preset:{name}"
        for name in PRESETS
    }


def plan_for(program: sw.Program, mesh: str, stored: bool) -> sw.Plan:
    """Megatron's plan, with every weight stored along the first dim that divides by four."""
    plan = sw.plan(program, mesh)
    if not stored:
        return plan
    parameters: dict[str, str] = {}
    for slot in program.arguments:
        shape = shape_of(slot.value)
        dim = next((d for d, size in enumerate(shape) if size % 4 == 0), None)
        if slot.kind == "param" and dim is not None:
            cuts = ", ".join('{"data"}' if d == dim else "{}" for d in range(len(shape)))
            parameters[slot.name] = f"[{cuts}]"
    return sw.Plan(mesh=plan.mesh, parameters=parameters, inputs=plan.inputs)


def cases(models: tuple[str, ...]) -> Iterator[Partitioned]:
    """All cases of some models; each is captured once, in float64."""
    from shardweave.planners.lowering.apply_plan import ApplyPlanPass

    for model in models:
        example = build_example(MODELS[model], dtype=torch.float64)
        program = sw.capture(example.module, kwargs=example.kwargs)
        for mesh, stored in MESHES.items():
            apply = ApplyPlanPass.of(plan_for(program, mesh, stored))
            planned = sw.PassPipeline([apply]).run(program)
            for preset, passes in presets().items():
                local = sw.PassPipeline(passes).run(planned)
                yield measured(f"{model}-{mesh}-{preset}", local)


def measured(name: str, local: sw.Program) -> Partitioned:
    """A case with what its program sends."""
    found = local.stats().collectives
    count = sum(one.count for one in found)
    sent = sum(one.sent_bytes for one in found)
    return Partitioned(name, str(local), count, sent)


def compare(found: list[Partitioned], folder: Path) -> list[dict[str, object]]:
    """A row for each case whose text is not that of the folder."""
    rows: list[dict[str, object]] = []
    for one in found:
        path = folder / f"{one.name}.mlir"
        before = path.read_text() if path.is_file() else None
        if before == one.text:
            continue
        row: dict[str, object] = {"case": one.name, "collectives": one.collectives}
        row["sent_bytes"] = one.sent_bytes
        head = folder / f"{one.name}.json"
        if before is not None and head.is_file():
            old = json.loads(head.read_text())
            row |= {f"{key}_before": value for key, value in old.items()}
        rows.append(row)
    return rows


def main() -> int:
    """Write the programs, or compare them; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--write", type=Path, metavar="DIR")
    where.add_argument("--against", type=Path, metavar="DIR")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    models = QUICK if arguments.quick else tuple(MODELS)
    total = len(models) * len(MESHES) * len(PRESETS)
    console = Console(file=sys.stderr)
    found = list(track(cases(models), "partitioning", total, console=console))
    if arguments.write is not None:
        arguments.write.mkdir(parents=True, exist_ok=True)
        for one in found:
            (arguments.write / f"{one.name}.mlir").write_text(one.text)
            totals = {"collectives": one.collectives, "sent_bytes": one.sent_bytes}
            (arguments.write / f"{one.name}.json").write_text(json.dumps(totals))
        print(f"{len(found)} programs written to {arguments.write}")
        return 0
    rows = compare(found, arguments.against)
    table = Table(title=f"{len(found) - len(rows)} of {len(found)} programs are the same")
    for column in ("case", "collectives", "before", "bytes sent", "before"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row["case"]),
            str(row["collectives"]),
            str(row.get("collectives_before", "-")),
            str(row["sent_bytes"]),
            str(row.get("sent_bytes_before", "-")),
        )
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"programs": len(found), "different": rows}, indent=1))
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
