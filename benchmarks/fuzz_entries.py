"""More of what `benchmarks/fuzz.py` mutates: what people type, rather than files that tools write.

Meshes, pipelines of passes, names of models with their options, and whole command lines, on
programs, plans and clusters that are mutated too.
"""

from __future__ import annotations

import contextlib
import io
import random
import shlex
from functools import cache
from pathlib import Path

import torch

import shardweave as sw
from shardweave.benchmarks.fuzz_cases import (
    CLUSTERS,
    KINDS,
    MODELS,
    Kind,
    WrongError,
    captured,
    local_text,
    planned,
    small,
)
from shardweave.benchmarks.fuzz_plans import make_point, use_point
from shardweave.driver.checking.validate import Validator
from shardweave.driver.cli import main
from shardweave.driver.models.hf import default_fields
from shardweave.driver.models.models import build_example, size_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.pipeline import PassPipeline, as_mesh
from shardweave.passes.presets import PREFIX, SUMMARIES
from shardweave.passes.registry import PASSES
from shardweave.planners.lowering.partition import partition
from shardweave.tests.mutations import any_mutation

ODD = (
    "0", "-1", "1", "2", "3", "7", "0.5", "1e400", "nan", "inf", "true", "none", "nonsense", "",
    "-", "999", "1048577", "1000000000", "99999999999999999999", "9" * 5000, "[]",
    "\N{SUPERSCRIPT TWO}", "[1, 2]", "a b",
)  # fmt: skip
"""Values for options: edges of types, words, and digits that are no numbers."""

FEW_ELEMENTS = 300_000
FEW_MODULES = 150
"""Larger models than these are built without memory alone: capturing one takes a while."""


# Meshes

MESHES = ("data=2,tensor=2", "stage=2,data=2", "data=-1,tensor=2", "a=2,b=3,c.0=2", "tensor=8", "")


def make_mesh(rng: random.Random, folder: Path) -> str:
    del folder
    return _odd(rng.choice(MESHES), rng)


def use_mesh(text: str, folder: Path) -> None:
    """Read it, alone and for 8 processes; partition a program for it, if it is small."""
    del folder
    mesh = Mesh.parse(text)
    if mesh.axes and Mesh.parse(str(mesh)) != mesh:
        raise WrongError(f"{mesh} is not what it was read as")
    if mesh.rank(mesh.coordinates(mesh.num_devices - 1)) != mesh.num_devices - 1:
        raise WrongError(f"the last rank of {mesh} is another")
    as_mesh(text, 8)
    if mesh.num_devices <= 16:
        program = Program.parse(small())
        partition(program, mesh, sw.plan(program, mesh, "megatron"), observer=Validator())


def _odd(text: str, rng: random.Random) -> str:
    """The text with one slip, or with an odd value in place of one after an equals sign."""
    parts = text.split("=")
    if rng.random() < 0.5 or len(parts) < 2:
        return any_mutation(text, rng)
    at = rng.randrange(1, len(parts))
    _, comma, rest = parts[at].partition(",")
    parts[at] = rng.choice(ODD) + comma + rest
    return "=".join(parts)


# Pipelines


def make_pipeline(rng: random.Random, folder: Path) -> str:
    del folder
    names = [*PASSES, *(PREFIX + name for name in SUMMARIES)]
    chosen = rng.choices(names, k=rng.choice((1, 2, 4)))
    start = "plan-megatron,preset:partition," if rng.random() < 0.5 else ""
    options = ("", "", "{n=2}", "{axis=data}", "{mesh=2}", f"{{x={rng.choice(ODD)}}}")
    text = start + ",".join(name + rng.choice(options) for name in chosen)
    return any_mutation(text, rng) if rng.random() < 0.5 else text


def use_pipeline(text: str, folder: Path) -> None:
    """Read it, and run it with validation of each pass."""
    del folder
    pipeline = PassPipeline(text)
    if str(PassPipeline(str(pipeline))) != str(pipeline):
        raise WrongError("a pipeline is not what it was read as")
    program = Program.parse(small())
    pipeline.run(program, mesh=as_mesh("data=2"), observer=Validator())


# Models

SPECS = (
    "gpt:layers=1,hidden=8,heads=2,vocab=16,seq=4,batch=4,ffn=0,tie=true,dropout=0.0,experts=2,"
    "choices=1,capacity=1.0",
    "gpt:layers=1,hidden=8,heads=2,vocab=16,seq=4,batch=4",
    "unet:channels=8,size=8,batch=2,levels=2,blocks=1,groups=4,heads=2,image_channels=3",
    "cnn:depth=10,channels=4,size=8,classes=3,batch=4,pool=false,image_channels=3",
)
TYPES = ("llama", "gpt2", "bert", "vit", "t5", "mixtral", "resnet")


def make_model(rng: random.Random, folder: Path) -> str:
    del folder
    if rng.random() < 0.6:
        return _odd(rng.choice(SPECS), rng)
    name = rng.choice(TYPES)
    fields = rng.sample(sorted({*default_fields(name), "batch", "seq"}), rng.choice((1, 1, 2)))
    spec = ",".join([f"hf:{name}:tiny", *(f"{field}={rng.choice(ODD)}" for field in fields)])
    return any_mutation(spec, rng) if rng.random() < 0.1 else spec


def use_model(text: str, folder: Path) -> None:
    """Build it without memory; if it is small, capture and verify its step."""
    del folder
    size = size_of(text, torch.float32)
    is_small = size is not None and size.elements < FEW_ELEMENTS and size.modules < FEW_MODULES
    if size is None or is_small:  # what no family has is a factory, of which there is none
        example = build_example(text)
        check(sw.capture(example.module, kwargs=example.kwargs))


# Command lines

COMMANDS = (
    "show step.mlir --layer h.0.* --counts",
    "show step.mlir --phase forward --op aten.mm --all",
    "show local.mlir --schedule",
    "diff step.mlir other.mlir --json --all",
    "diff local.mlir local.mlir --cluster testbed --exit-code --html page.html",
    "simulate local.mlir --cluster h100-pod:nodes=2 --json --optimizer 2",
    "simulate step.mlir --plan plan.json --cluster cluster.yaml --trace trace.json",
    "explore step.mlir --passes cse,dce --mesh data=2 --cluster testbed -o page.html",
    "explore step.mlir --plan plan.json -o page.html --optimizer 2",
    "opt step.mlir --passes plan-megatron,preset:partition --mesh data=2 -o out.mlir",
    "opt step.mlir --passes fuse-kernels,dce --validate --validate-limit 1e9 --time-passes",
    "opt step.mlir --passes cse --stop-after cse --print-after-change --dump-dir dump",
    "prove local.mlir --against step.mlir --certificate proof.json",
    "report step.mlir --cluster testbed --plan plan.json -o page.html",
    "kernels local.mlir -o kernels --target=",
    "calibrate testbed runs.csv -o calibrated.yaml",
    "plan step.mlir --cluster testbed:nodes=2 --planner megatron --mesh data=2 -o plan2.json",
    "plan step.mlir --cluster testbed --planner oases --time-limit 5 --memory 8GiB --explain",
    "plan step.mlir --cluster testbed --planner auto --time-limit 5 --fix tensor=2 --forbid zero=3",
    f"capture {MODELS[0]} -o captured.mlir --dtype bfloat16 --seed 3",
    f"run {MODELS[0]} --backend reference --mesh data=2 --steps 2 --no-eager --json run.json",
    f"run {MODELS[0]} --backend reference --plan plan.json --check --seed 1 --dtype float64",
    "completion bash",
)


@cache
def _files() -> dict[str, str]:
    return {
        "step.mlir": str(captured(MODELS[0])),
        "other.mlir": small(),
        "local.mlir": local_text(MODELS[0]),
        "plan.json": planned(MODELS[0]).to_json(),
        "cluster.yaml": (CLUSTERS / "testbed.yaml").read_text(),
        "runs.csv": "framework,model\nmegatron,gpt\n",
    }


def make_flags(rng: random.Random, folder: Path) -> str:
    """A command line with an odd word, on files of which one may be damaged."""
    for name, text in _files().items():
        (folder / name).write_text(text)
    if rng.random() < 0.3:
        path = folder / rng.choice(sorted(_files()))
        path.write_text(any_mutation(path.read_text(), rng))
    words = shlex.split(rng.choice(COMMANDS))
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(words))
        kind = rng.randrange(6)
        if kind == 0 and at:
            del words[at]
        elif kind == 1:
            words.insert(at, words[at])
        elif kind == 2:
            words[at] = rng.choice(ODD)
        elif kind == 3:
            words[at] = rng.choice(words[1:] or words)
        elif kind == 4:
            words[at] = any_mutation(words[at], rng)
        else:
            words[at] = _odd(words[at], rng)
    return shlex.join(words)


MOST_LINES = 8
"""Of an error with its notes; usage is as long as a command's options."""


def use_flags(text: str, folder: Path) -> None:
    """Run the command: it succeeds, or fails with a few lines and no traceback."""
    words = shlex.split(text)
    if _is_no_case(words):
        return
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.suppress(BrokenPipeError),
    ):
        code = main(words)
    said = err.getvalue()
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    if "Traceback" in said:
        raise WrongError(f"a traceback: {said.strip().splitlines()[-1]}")
    if code not in (0, 1, 2):
        raise WrongError(f"the exit code is {code}")
    if code == 1 and "--exit-code" not in words and not lines:
        raise WrongError(f"it fails without a word: {said[-200:]!r}")
    if code == 1 and len(said.splitlines()) > MOST_LINES and not said.startswith("//"):
        raise WrongError(f"{len(said.splitlines())} lines: {lines}")
    if code:
        raise ValueError(lines[-1] if lines else "usage")


def _is_no_case(words: list[str]) -> bool:
    """Whether a command starts others, reads standard input, or is asked to train for hours."""
    starts = words[:1] == ["run"] and "reference" not in words
    return (
        starts
        or words[:1] == ["profile"]
        or "-" in words
        or ("--time-limit" in words[:-1:] and words[0] == "run")
    )


KINDS |= {
    "mesh": Kind(make_mesh, use_mesh),
    "pipeline": Kind(make_pipeline, use_pipeline),
    "model": Kind(make_model, use_model),
    "flags": Kind(make_flags, use_flags, writes=True),
    "point": Kind(make_point, use_point),
}
