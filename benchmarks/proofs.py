"""Which local programs are proved? `python benchmarks/proofs.py [--quick] [--json FILE]`

Small versions of sixteen kinds of models, on meshes of up to 64 ranks, by all presets, schedules,
policies of recomputation, schedules of stages and ZeRO, sequence, context and expert parallelism.
Each program is made by the passes and held against the captured one by `sw.prove`; none is run. A
row is a model, its mesh and what was done to it: proved, refused (with the proof's own words), or
not made (with those of the pass that says that the model cannot be cut so). Seconds are processor
time on one thread, of the passes (those that rows share count in the first of them) and of the
proof. Rows are written as they come, one a line. `--quick` takes every 29th. `--keep FILE` runs
what is not proved in a file of rows, and keeps its other rows. Exits 1 if a row is refused.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardweave.benchmarks.compile_time import machine
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import kept_bytes
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.memory.rematerialize import POLICIES
from shardweave.passes.notes import unheard
from shardweave.passes.pipeline import run_passes
from shardweave.passes.presets import PRESETS
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.overlap.overlap_communication import SCHEDULES
from shardweave.planners.plan.plan_parts import PIPELINE_SCHEDULES, Pipeline
from shardweave.planners.schedules.schedules import find_schedule

QUICK = 29
"""A quick run takes each so many-th row; no model, mesh or way comes again in such a step."""

TEXT = "hidden_size=16,num_hidden_layers=4,num_attention_heads=8,intermediate_size=32,vocab_size=32"
GPT = "gpt:layers=4,hidden=16,heads=8,vocab=32,seq=16,batch=16"

FOLDER = f"{Path(inspect.getfile(build_example)).parents[1]}/"
"""Left out of the words of a row, so that they are the same wherever the package is."""

MODELS = {
    "gpt": GPT,
    "gpt untied": f"{GPT},tie=false",
    "gpt dropout": f"{GPT},dropout=0.1",
    "gpt odd sizes": "gpt:layers=4,hidden=12,heads=3,vocab=33,seq=6,batch=16,ffn=21",
    "gpt experts": "gpt:layers=4,hidden=16,heads=4,vocab=32,seq=4,batch=16,experts=4,capacity=1",
    "gpt2": "hf:gpt2:n_layer=4,n_embd=16,n_head=8,vocab_size=32,n_positions=16,batch=16,seq=16",
    "gpt2 three heads": (
        "hf:gpt2:n_layer=4,n_embd=24,n_head=3,vocab_size=32,n_positions=16,batch=16,seq=16"
    ),
    "llama": f"hf:llama:{TEXT},num_key_value_heads=8,batch=16,seq=16",
    "llama grouped": f"hf:llama:{TEXT},num_key_value_heads=2,batch=16,seq=16",
    "qwen2": f"hf:qwen2:{TEXT},num_key_value_heads=8,batch=16,seq=16",
    "mistral": f"hf:mistral:{TEXT},num_key_value_heads=8,batch=16,seq=16",
    "bert": f"hf:bert:{TEXT},max_position_embeddings=16,batch=16,seq=16",
    "t5": "hf:t5:num_layers=4,d_model=16,d_kv=2,d_ff=32,num_heads=8,vocab_size=32,batch=16,seq=16",
    "vit": (
        "hf:vit:num_hidden_layers=4,hidden_size=16,num_attention_heads=8,intermediate_size=32,"
        "image_size=8,patch_size=4,num_labels=8,batch=16"
    ),
    "unet": "unet:channels=8,size=8,batch=16,levels=2,groups=4,heads=8",
    "cnn": "cnn:depth=10,channels=8,size=8,batch=16,pool=true",
}
MESHES = ("data=2,tensor=2", "data=8", "tensor=8", "data=8,tensor=8")
STAGED_MESHES = ("stage=2", "stage=2,data=2,tensor=2", "stage=4,data=2,tensor=8")
PLANNED_MESHES = ("context=4", "data=2,context=2,tensor=2", "expert=4,tensor=2", "data=2,expert=4")
MICRO_BATCHES = 4
"""At least; some schedules need as many as there are stages."""

STARTED = "start-collectives,overlap-communication{{schedule={schedule} cluster=perlmutter}}"


@dataclass(frozen=True)
class Way:
    """What is done to a model. first, passes: presets that rows share (else the plan's own passes),
    and what follows them. schedule: of stages. sequence: whether tensor parallelism cuts sequences.
    """

    name: str
    mesh: str
    first: str = ""
    passes: str = ""
    schedule: str = ""
    zero: int = 0
    sequence: bool = False
    attention_parts: int = 1


@dataclass(frozen=True)
class Row:
    """outcome: proved, refused or not made, and in whose words."""

    model: str
    mesh: str
    way: str
    outcome: str
    why: str
    ops: int
    passes_s: float
    proof_s: float


def ways() -> Iterator[Way]:
    """What is done to each model: a factor at a time, on each mesh."""
    for mesh in MESHES:
        yield from ways_on(mesh)
    for mesh in STAGED_MESHES:
        for schedule in PIPELINE_SCHEDULES:
            yield Way(f"stages {schedule}", mesh, schedule=schedule)
        for zero in (1, 2, 3) if "data" in mesh else ():
            yield Way(f"stages zero {zero}", mesh, schedule="1f1b", zero=zero)
        yield Way("stages kernels", mesh, passes="preset:kernels", schedule="1f1b")
    for mesh in PLANNED_MESHES:
        yield Way("planned", mesh)
    yield Way("attention in 2 parts", "context=4", attention_parts=2)


def ways_on(mesh: str) -> Iterator[Way]:
    """What is done without stages."""
    for preset in PRESETS:
        if preset not in ("kernels", "recompute"):
            yield Way(f"preset:{preset}", mesh, f"preset:{preset}")
    yield Way("kernels", mesh, "preset:default", "preset:kernels")
    for schedule in SCHEDULES:
        passes = STARTED.format(schedule=schedule)
        yield Way(f"schedule {schedule}", mesh, "preset:sub-batches", passes)
    for policy in POLICIES:
        passes = f"rematerialize{{policy={policy}}},delete-redundant-collectives"
        yield Way(f"recompute {policy}", mesh, "preset:partition", passes)
    for zero in (1, 2, 3) if "data" in mesh else ():
        yield Way(f"zero {zero}", mesh, zero=zero)
    if "tensor" in mesh:
        yield Way("sequence parallel", mesh, sequence=True)


@cache
def captured(model: str) -> Program:
    example = build_example(MODELS[model], dtype=torch.float64)
    program = capture(example.module, kwargs=example.kwargs)
    gc.collect()
    gc.freeze()
    return program


@lru_cache(maxsize=len(PRESETS))
def begun(model: str, mesh: str, passes: str) -> Program:
    """The local program after passes that several rows share."""
    program = captured(model)
    plan = plan_megatron(program, Mesh.parse(mesh))
    return run_passes(program, [ApplyPlanPass.of(plan), passes], mesh=mesh)


def made(model: str, way: Way) -> Program:
    """The local program. Raises ValueError where the model cannot be cut so."""
    if way.first:
        local = begun(model, way.mesh, way.first)
        passes = way.passes
        if "budget" in passes:
            passes = passes.replace("budget", f"budget bytes={budget_of(local)}")
        return run_passes(local, passes) if passes else local
    program, mesh = captured(model), Mesh.parse(way.mesh)
    parts = way.attention_parts
    plan = plan_megatron(program, mesh, sequence_parallel=way.sequence, attention_parts=parts)
    plan = replace(plan, zero=way.zero)
    if way.schedule:
        count = mesh.num_stages * find_schedule(way.schedule).chunks
        stages, micro_batches = balanced_stages(program, count), max(MICRO_BATCHES, count)
        pipeline = Pipeline(stages, micro_batches, schedule=way.schedule)
        plan = replace(plan, pipeline=pipeline)
    local = partition(program, mesh, plan)
    return run_passes(local, way.passes) if way.passes else local


def budget_of(local: Program) -> int:
    """Half way between the bytes that are kept without recomputation and with all of it."""
    return (kept_bytes(local) + kept_bytes(run_passes(local, "preset:recompute"))) // 2


def measured(model: str, way: Way) -> Row:
    program = captured(model)
    start_s = time.process_time()

    def row(outcome: str, why: str = "", ops: int = 0, made_s: float = 0.0) -> Row:
        proof_s = time.process_time() - made_s if made_s else 0.0
        passes_s = (made_s or time.process_time()) - start_s
        times = round(passes_s, 3), round(proof_s, 3)
        return Row(model, way.mesh, way.name, outcome, why.replace(FOLDER, ""), ops, *times)

    try:
        with unheard():
            local = made(model, way)
    except ValueError as error:
        return row("not made", str(error))
    made_s = time.process_time()
    try:
        proof = prove(local, against=program)
    except ProofError as error:
        return row("refused", str(error), made_s=made_s)
    return row("proved", ops=proof.num_ops, made_s=made_s)


def print_rows(rows: list[Row]) -> None:
    table = Table("model", "proved", "refused", "not made", "ops", "passes s", "proof s")
    for model in MODELS:
        own = [row for row in rows if row.model == model]
        counts = Counter(row.outcome for row in own)
        proved = [row for row in own if row.outcome == "proved"]
        table.add_row(
            model,
            *(str(counts[outcome]) for outcome in ("proved", "refused", "not made")),
            str(max((row.ops for row in proved), default=0)),
            f"{sum(row.passes_s for row in proved):.1f}",
            f"{sum(row.proof_s for row in proved):.1f}",
        )
    console = Console()
    console.print(table)
    for outcome in ("refused", "not made"):
        why = Counter((row.model, row.why) for row in rows if row.outcome == outcome)
        for (model, words), count in sorted(why.items()):
            console.print(f"{outcome} {count}: {model}: {words}", highlight=False, soft_wrap=True)


def sentence(data: Mapping[str, Any]) -> str:
    """What docs/proof.md says of the rows of a file."""
    counts = Counter(row["outcome"] for row in data["rows"])
    made = counts["proved"] + counts["refused"]
    return (
        f"Of {data['of']:,} rows {len(data['rows']):,} have been run: {counts['proved']:,} of "
        f"{made:,} programs are proved, and {counts['not made']:,} cannot be made."
    )


def write(path: Path, rows: list[Row], num_cases: int) -> None:
    """Write rows, one a line."""
    head = {"machine": machine(), "of": num_cases, "rows": []}
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f"{json.dumps(head)[:-2]}\n{lines}\n]}}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK}th row")
    parser.add_argument("--only", default="", help="a part of a model's name")
    parser.add_argument("--json", type=Path, help="where the rows are written")
    parser.add_argument("--keep", type=Path, help="a file of rows whose proved ones stand")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        (model, way)
        for mesh in dict.fromkeys(way.mesh for way in ways())
        for model in MODELS
        for way in ways()
        if options.only in model and way.mesh == mesh
    ]
    if options.quick:
        cases = cases[::QUICK]
    before = json.loads(options.keep.read_text())["rows"] if options.keep else []
    proved = {
        (r["model"], r["mesh"], r["way"]): Row(**r) for r in before if r["outcome"] == "proved"
    }
    keys = {(model, way.mesh, way.name): (model, way) for model, way in cases}
    found = {key: proved[key] for key in keys if key in proved}
    rows = list(found.values())
    for key in track(keys, console=Console(stderr=True)):
        if key not in found:
            found[key] = measured(*keys[key])
        rows = [found[key] for key in keys if key in found]
        if options.json:
            write(options.json, rows, len(cases))
    print_rows(rows)
    print(sentence({"of": len(cases), "rows": [asdict(row) for row in rows]}))
    return int(any(row.outcome == "refused" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
