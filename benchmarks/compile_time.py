"""How long it takes to compile a training step of GPT-3's shape, stage by stage, and in how much
memory: `python benchmarks/compile_time.py [--quick] [--staged | --model llama3-8b] [--json FILE]`.

The model's weights are fake: nothing of their size is allocated, and no step is run. Each number
of layers is measured in a process of its own, so that its peak memory is its own. A pass is timed
together with the verification that follows it.

Seconds are processor time, which other programs on the machine disturb little; every stage runs on
one thread, so on a quiet machine it is the time on the clock, which the JSON holds too. With
`--staged` the step is cut into 8 pipeline stages for 64 micro-batches, by all passes that a plan
needs, and is verified and simulated run by run. With `--prove` the program of a rank is proved to
compute the captured one, too. With `--repeat N` each is measured N times; the fastest time and the
highest peak of each stage count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from xdsl.passes import ModulePass

    from shardweave.ir.program.program import Program
    from shardweave.planners.plan.plan import Plan

MODELS = {
    "gpt3": "gpt:layers={layers},hidden=12288,heads=96,vocab=51200,seq=2048,batch=128",
    "llama3-8b": "hf:llama:num_hidden_layers={layers},hidden_size=4096,intermediate_size=14336,"
    "num_attention_heads=32,num_key_value_heads=8,vocab_size=128256,seq=2048,batch=128",
}
MESH = "tensor=8,data=128"
PLANNER = "megatron"
PASSES = (
    "apply-plan",
    "split-addmm",
    "add-pending-sums",
    "propagate-shardings",
    "insert-collectives",
    "cse",
    "dce",
    "merge-collectives",
)
STAGED_MODEL = MODELS["gpt3"].replace("batch=128", "batch=1024")
STAGED_MESH = "stage=8,tensor=8,data=16"
MICRO_BATCHES = 64
CLUSTER = "h100-pod:nodes=128"
"""What the staged step is simulated on."""

LAYERS = {"gpt3": (12, 24, 48, 96), "llama3-8b": (8, 16, 32)}
IMPORT = "import"
"""The stage that does not depend on the model."""

PROVE = "prove"
OTHERS = (IMPORT, "build", "capture", "plan", PROVE, "print", "parse")
"""The stages that are no passes."""

_GIB = 2**30


@dataclass(frozen=True)
class Stage:
    """One stage of one run.

    seconds: processor time. clock_s: on the clock. peak_gib: the largest resident set of the
    process from its start to the end of the stage.
    """

    name: str
    seconds: float
    clock_s: float
    peak_gib: float


@dataclass(frozen=True)
class Moment:
    """When a stage starts."""

    seconds: float = field(default_factory=time.process_time)
    clock_s: float = field(default_factory=time.perf_counter)


@dataclass
class Run:
    """The stages of one number of layers, and the sizes of what they made."""

    layers: int
    parameters: int = 0
    captured_ops: int = 0
    local_ops: int = 0
    text_bytes: int = 0
    stages: list[Stage] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is inside."""
        start = Moment()
        yield
        self.add(name, start)

    def add(self, name: str, start: Moment) -> None:
        """Note that a stage that began at `start` is over."""
        now = Moment()
        seconds, clock_s = now.seconds - start.seconds, now.clock_s - start.clock_s
        self.stages.append(Stage(name, seconds, clock_s, peak_gib()))

    @property
    def passes_s(self) -> float:
        """Seconds of all passes together, and what follows them of a staged program."""
        return sum(one.seconds for one in self.stages if one.name not in OTHERS)


@dataclass(frozen=True)
class Growth:
    """The straight line through a stage's seconds over the layers.

    worst_error: the largest distance of a measured point from the line, as a share of the point.
    """

    seconds_per_layer: float
    seconds_at_zero: float
    worst_error: float


def growth_of(layers: Sequence[int], seconds: Sequence[float]) -> Growth:
    """The least-squares line; needs two different numbers of layers."""
    slope, offset = np.polyfit(layers, seconds, 1)
    errors = [abs(slope * n + offset - s) / s for n, s in zip(layers, seconds, strict=True)]
    return Growth(float(slope), float(offset), max(map(float, errors)))


def peak_gib() -> float:
    """The largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _GIB if sys.platform == "darwin" else peak * 1024 / _GIB


def measure(
    layers: int, model: str = MODELS["gpt3"], *, staged: bool = False, proved: bool = False
) -> Run:
    """Compile the model in this process. staged: into pipeline stages, on `STAGED_MESH`. proved:
    held against the captured program."""
    run = Run(layers)
    with run.stage(IMPORT):
        from torch._subclasses.fake_tensor import FakeTensorMode

        from shardweave.driver.models.models import build_example
        from shardweave.ir.capture.capture import capture
        from shardweave.ir.program.program import Program
        from shardweave.ir.program.staged import parts_of
        from shardweave.passes.observers import Observer
        from shardweave.passes.pipeline import PassPipeline, as_mesh
        from shardweave.planners.lowering.apply_plan import ApplyPlanPass
        from shardweave.planners.megatron.planner import plan_megatron

    class Watch(Observer):
        def before(self, pass_: ModulePass, program: Program) -> None:
            self.start = Moment()

        def after(self, pass_: ModulePass, program: Program) -> None:
            run.add(pass_.name, self.start)

    with run.stage("build"), FakeTensorMode():
        example = build_example(model.format(layers=layers))
    run.parameters = sum(p.numel() for p in example.module.parameters())
    with run.stage("capture"):
        program = capture(example.module, kwargs=example.kwargs)
    run.captured_ops = sum(1 for _ in program.ops)
    mesh = as_mesh(STAGED_MESH if staged else MESH)
    program.set_mesh(mesh)
    with run.stage("plan"):
        plan = plan_megatron(program, mesh)
        passes = staged_passes(plan, program) if staged else [ApplyPlanPass.of(plan), *PASSES[1:]]
    local = PassPipeline(passes).run(program, observer=Watch())
    if proved:
        from shardweave.ir.proof.prove import prove

        with run.stage(PROVE):
            prove(local, against=program)
    if staged:
        verify_and_simulate(local, run)
    run.local_ops = sum(1 for part in parts_of(local) for _ in part.ops)
    with run.stage("print"):
        text = str(local)
    run.text_bytes = len(text.encode())
    with run.stage("parse"):
        parsed = Program.parse(text)
    assert parsed == local
    return run


def staged_passes(plan: Plan, program: Program) -> Sequence[ModulePass]:
    """All passes of a plan with stages of about equal work."""
    from shardweave.planners.lowering.plan_passes import plan_passes
    from shardweave.planners.lowering.stages.balance import balanced_stages
    from shardweave.planners.plan.plan_parts import Pipeline

    count = plan.mesh["stage"]
    pipeline = Pipeline(balanced_stages(program, count), MICRO_BATCHES)
    return plan_passes(replace(plan, pipeline=pipeline))


def verify_and_simulate(program: Program, run: Run) -> None:
    """Verify and simulate a staged program."""
    from shardweave.ir.verify.program import check
    from shardweave.planners.predict.predict import simulate_step

    with run.stage("verify"):
        check(program)
    with run.stage("simulate"):
        simulate_step(program, CLUSTER)


def measure_apart(layers: int, options: argparse.Namespace) -> Run:
    """Compile the model in a new process."""
    command = [sys.executable, __file__, "--measure", str(layers)]
    command += ["--staged"] if options.staged else ["--model", options.model]
    command += ["--prove"] if options.prove else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {layers} layers failed:\n{done.stderr}")
    data = json.loads(done.stdout)
    return Run(**data | {"stages": [Stage(**stage) for stage in data["stages"]]})


def combined(runs: Sequence[Run]) -> Run:
    """Equal runs as one: of each stage the fastest time and the highest peak."""
    stages = zip(*(run.stages for run in runs), strict=True)
    best = [
        Stage(
            same[0].name,
            min(stage.seconds for stage in same),
            min(stage.clock_s for stage in same),
            max(stage.peak_gib for stage in same),
        )
        for same in stages
    ]
    return replace(runs[0], stages=best)


def machine() -> str:
    """The machine in words, without its name."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    arch = platform.machine().replace("_", "-")
    torch = version("torch").partition("+")[0]
    return (
        f"{os.cpu_count()}-core {arch} CPU, {memory:.0f} GiB, Python "
        f"{platform.python_version()}, torch {torch}, xdsl {version('xdsl')}"
    )


def report(runs: Sequence[Run], options: argparse.Namespace) -> dict[str, object]:
    """What `--json` writes."""
    layers = [run.layers for run in runs]
    names = [stage.name for stage in runs[0].stages]
    columns = {name: [run.stages[i].seconds for run in runs] for i, name in enumerate(names)}
    del columns[IMPORT]
    columns["passes"] = [run.passes_s for run in runs]
    return {
        "command": "python benchmarks/compile_time.py"
        + (" --quick" if options.quick else "")
        + (" --staged" if options.staged else f" --model {options.model}")
        + (" --prove" if options.prove else "")
        + f" --repeat {options.repeat}",
        "machine": machine(),
        "model": model_of(options).format(layers="N"),
        "mesh": STAGED_MESH if options.staged else MESH,
        "planner": PLANNER,
        "runs": [asdict(run) | {"passes_s": run.passes_s} for run in runs],
        "growth": {name: asdict(growth_of(layers, column)) for name, column in columns.items()},
    }


def model_of(options: argparse.Namespace) -> str:
    """The model that is compiled, with a place for its number of layers."""
    return STAGED_MODEL if options.staged else MODELS[options.model]


def table_of(runs: Sequence[Run], options: argparse.Namespace) -> Table:
    """Stages as rows; per number of layers the seconds and the peak memory."""
    layers = [run.layers for run in runs]
    mesh = STAGED_MESH if options.staged else MESH
    table = Table(title=f"{model_of(options).format(layers='N')} on {mesh}, {PLANNER}")
    table.add_column("stage")
    for count in layers:
        table.add_column(f"{count} layers", justify="right")
    table.add_column("s/layer", justify="right")
    for index, stage in enumerate(runs[0].stages):
        stages = [run.stages[index] for run in runs]
        growth = growth_of(layers, [one.seconds for one in stages])
        slope = "" if stage.name == IMPORT else f"{growth.seconds_per_layer:.4f}"
        cells = [f"{one.seconds:.2f} s  {one.peak_gib:.2f} GiB" for one in stages]
        table.add_row(stage.name, *cells, slope)
    table.add_section()
    growth = growth_of(layers, [run.passes_s for run in runs])
    cells = [f"{run.passes_s:.2f} s" for run in runs]
    table.add_row("all passes", *cells, f"{growth.seconds_per_layer:.4f}")
    table.add_row("ops captured", *(f"{run.captured_ops:,}" for run in runs), "")
    table.add_row("ops per rank", *(f"{run.local_ops:,}" for run in runs), "")
    table.add_row("text", *(f"{run.text_bytes / 1e6:.1f} MB" for run in runs), "")
    table.add_row("parameters", *(f"{run.parameters / 1e9:.1f}e9" for run in runs), "")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print one table, write the JSON if asked."""
    options = _parser().parse_args(argv)
    if options.measure is not None:
        kind = {"staged": options.staged, "proved": options.prove}
        run = measure(options.measure, model_of(options), **kind)
        print(json.dumps(asdict(run)))
        return 0
    runs: list[Run] = []
    with Console(stderr=True).status("measuring") as status:
        for layers in LAYERS[options.model][: 2 if options.quick else None]:
            status.update(f"measuring {layers} layers ...")
            same = [measure_apart(layers, options) for _ in range(options.repeat)]
            runs.append(combined(same))
    console = Console(width=None if sys.stdout.isatty() else 120, emoji=False)
    console.print(table_of(runs, options))
    growth = growth_of([run.layers for run in runs], [run.passes_s for run in runs])
    console.print(
        f"passes: {growth.seconds_at_zero:.2f} s + {growth.seconds_per_layer:.4f} s per layer; "
        f"no point is more than {growth.worst_error:.0%} off this line ({len(runs)} points)",
        highlight=False,
    )
    console.print(machine(), highlight=False)
    if options.json:
        Path(options.json).write_text(json.dumps(report(runs, options), indent=2) + "\n")
        print(f"wrote {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time the compilation of a step, by stage.")
    parser.add_argument("--quick", action="store_true", help="only the two smallest models")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", choices=sorted(MODELS), default="gpt3", help="(default: gpt3)")
    which.add_argument("--staged", action="store_true", help="GPT-3 cut into 8 pipeline stages")
    parser.add_argument("--prove", action="store_true", help="prove the program of a rank, too")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="times (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write the results there as well")
    parser.add_argument("--measure", type=int, metavar="LAYERS", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
