"""How long the tools of the IR take on a large program:
`python benchmarks/ir_tools.py [--quick] [--json FILE]`.

The program is what each rank of `data=2,tensor=2` runs of a GPT with small sizes, its step
repeated in one function, under other layer names each time, until there are 50,000 ops (--quick:
5,000). The tools are measured on the program read from a file in a new process, so that `verify`
infers every type anew. Seconds are on the clock, on one thread. Exits with 1 if a tool takes
longer than its bound.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.compile_time import machine

if TYPE_CHECKING:
    from shardweave.ir.program.program import Program

MODEL = "gpt:layers=12,hidden=16,heads=4,vocab=32,seq=8,batch=4"
MESH = "data=2,tensor=2"
NUM_OPS = 50_000
QUICK_NUM_OPS = 5_000
BOUNDS_S = {"verify": 3.0, "print": 3.0, "parse": 15.0, "diff": 10.0}
"""Seconds that each tool may take on NUM_OPS ops; a tenth of the ops has a tenth, and a second."""

_LAYER = re.compile(r"^h\.(\d+)")
_Result = TypeVar("_Result")


def large_program(num_ops: int, model: str = MODEL) -> Program:
    """A local program of at least `num_ops` ops."""
    from shardweave.driver.models.models import build_example
    from shardweave.ir.capture.capture import capture
    from shardweave.passes.pipeline import as_mesh, run_passes
    from shardweave.planners.lowering.apply_plan import ApplyPlanPass
    from shardweave.planners.megatron.planner import plan_megatron

    example = build_example(model)
    program = capture(example.module, kwargs=example.kwargs)
    plan = ApplyPlanPass.of(plan_megatron(program, as_mesh(MESH)))
    local = run_passes(program, [plan, "preset:partition"], mesh=MESH)
    repeat_step(local, num_ops)
    return local


def repeat_step(program: Program, num_ops: int) -> None:
    """Repeat the ops on the same arguments until there are `num_ops`; the first results stay."""
    from xdsl.ir import SSAValue

    from shardweave.ir.dialects.annotations import layer_of, set_layer

    step = list(program.ops)
    layers = {int(found[1]) for op in step if (found := _LAYER.match(layer_of(op)))}
    for copy in range(1, -(-num_ops // len(step))):
        values: dict[SSAValue, SSAValue] = {}
        shift = copy * len(layers)
        for op in step:
            clone = op.clone(values)
            layer = _LAYER.sub(lambda found: f"h.{int(found[1]) + shift}", layer_of(op))  # noqa: B023
            set_layer(clone, layer)
            program.function.body.block.insert_op_before(clone, program.return_op)


def measure(path: str) -> dict[str, float]:
    """Seconds of each tool on the program in a file."""
    from shardweave.ir.inspect.diff import structural_diff
    from shardweave.ir.program.program import Program
    from shardweave.ir.verify.program import verify

    text = Path(path).read_text()
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], _Result]) -> _Result:
        start_s = time.perf_counter()
        result = work()
        seconds[name] = time.perf_counter() - start_s
        return result

    program = timed("parse", lambda: Program.parse(text))
    problems = timed("verify", lambda: verify(program))
    printed = timed("print", lambda: str(program))
    if problems or printed != text:
        raise AssertionError(f"the program did not come back as it was: {problems[:1]}")
    changed = program.clone()
    plant_op(changed)
    found = timed("diff", lambda: structural_diff(program, changed))
    if found.num_hunks != 1 or found.count("added") != 1:
        raise AssertionError(f"one op was added, and the diff has {found.num_hunks} hunks")
    return {name: seconds[name] for name in BOUNDS_S}


def plant_op(program: Program) -> None:
    """Repeat one op in the middle of a program."""
    ops = list(program.ops)
    op = next(op for op in ops[len(ops) // 2 :] if op.name == "aten.gelu")
    program.function.body.block.insert_op_after(op.clone(), op)


def measure_apart(path: str) -> dict[str, float]:
    """The same in a new process."""
    command = [sys.executable, __file__, "--measure", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {path} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def bound_s(tool: str, num_ops: int) -> float:
    """What a tool may take on `num_ops` ops: in proportion, and a second to start when small."""
    share = num_ops / NUM_OPS
    return BOUNDS_S[tool] * share + (1.0 if share < 0.5 else 0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON if asked."""
    options = _parser().parse_args(argv)
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return 0
    num_ops = QUICK_NUM_OPS if options.quick else NUM_OPS
    with Console(stderr=True).status("measuring"), tempfile.TemporaryDirectory() as folder:
        program = large_program(num_ops)
        path = Path(folder) / "step.mlir"
        path.write_text(str(program))
        count, size_bytes = sum(1 for _ in program.ops), path.stat().st_size
        runs = [measure_apart(str(path)) for _ in range(options.repeat)]
    seconds = {tool: min(run[tool] for run in runs) for tool in BOUNDS_S}
    table = Table(title=f"{count:,} ops, {size_bytes / 2**20:.1f} MiB of text")
    for name in ("tool", "seconds", "bound", "ops per second"):
        table.add_column(name, justify="left" if name == "tool" else "right")
    for tool, taken in seconds.items():
        limit = bound_s(tool, num_ops)
        table.add_row(tool, f"{taken:.2f}", f"{limit:.1f}", f"{count / taken:,.0f}")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    console.print(machine(), highlight=False)
    if options.json:
        report = {
            "machine": machine(),
            "model": MODEL,
            "mesh": MESH,
            "num_ops": count,
            "text_bytes": size_bytes,
            "seconds": seconds,
            "bounds_s": {tool: bound_s(tool, num_ops) for tool in BOUNDS_S},
        }
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {options.json}")
    return int(any(taken > bound_s(tool, num_ops) for tool, taken in seconds.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the tools of the IR on a large program.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_NUM_OPS:,} ops only")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="times (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
