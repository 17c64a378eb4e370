"""What `benchmarks/fuzz.py` mutates, and what must hold of each mutation that is accepted."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

import shardweave as sw
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.emit.emit import emit, load_step
from shardweave.backends.programs import Key
from shardweave.backends.reference.reference import run_reference
from shardweave.driver.checking.sample import sample_values
from shardweave.driver.checking.validate import Validator, find_differences, in_float64, work_of
from shardweave.driver.models.models import build_example
from shardweave.driver.training.checkpoint_files import MANIFEST, digests_of
from shardweave.ir.dialects.types import num_bytes
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import check
from shardweave.passes.pipeline import as_mesh
from shardweave.planners.cost.cluster_file import parse_cluster
from shardweave.planners.lowering.partition import partition
from shardweave.planners.plan.plan import Plan
from shardweave.tests.mutations import any_mutation, mutated_data, rewired

MODELS = (
    "gpt:layers=1,hidden=8,heads=2,vocab=16,seq=4,batch=4",
    "cnn:depth=10,channels=4,size=8,batch=4",
)
MESH = "data=2,tensor=2"
MOST_BYTES = 2**26
MOST_FLOPS = 1e8
"""Above these a program that is accepted is not run: a mutated shape may be of any size."""


DATA_SHARE = 0.6
"""How many plans and clusters are changed as data, and programs rewired: text with a slip is seldom
JSON, or a program, at all."""


class WrongError(Exception):
    """A mutation was accepted, and means two things."""


@dataclass(frozen=True)
class Kind:
    """A kind of input. make: a mutation, as text or as a folder; use: reads it and runs it.

    `use` raises ValueError or OSError to refuse it, and WrongError for what must not happen.
    writes: whether it may write to the folder that it is given.
    """

    make: Callable[[random.Random, Path], str]
    use: Callable[[str, Path], None]
    writes: bool = False


@cache
def captured(spec: str) -> Program:
    example = build_example(spec)
    return sw.capture(example.module, kwargs=example.kwargs)


@cache
def planned(spec: str, *, sequence_parallel: bool = False) -> Plan:
    return sw.plan(captured(spec), MESH, "megatron", sequence_parallel=sequence_parallel)


@cache
def local_text(spec: str) -> str:
    program = partition(captured(spec), as_mesh(MESH), planned(spec))
    return str(sw.run_passes(program, "start-collectives"))


# Programs


class Small(nn.Module):
    """A model whose step takes a tenth of a second on a virtual mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.norm(self.up(x).relu()) + x).softmax(-1) * x).square().mean()


@cache
def small() -> str:
    return str(sw.capture(Small(), args=(torch.ones(8, 8),)))


def make_program(rng: random.Random, folder: Path) -> str:
    del folder
    if rng.random() < DATA_SHARE:
        text = small()
        for _ in range(rng.choice((1, 2, 4))):
            text = rewired(text, rng)
        return text
    spec = rng.choice(MODELS)
    text = rng.choice((str(captured(spec)), local_text(spec)))
    return any_mutation(text, rng)


def use_program(text: str, folder: Path) -> None:
    """Parse, verify, print, emit and run; a global program also partitioned, with validation."""
    del folder
    program = Program.parse(text)
    check(program)
    if str(Program.parse(str(program))) != str(program):
        raise WrongError("its text does not parse back to the same text")
    load_step(emit(program))
    if not _is_small(program):
        return
    exact = in_float64(program)
    values = sample_values(exact)
    results = run_reference(exact, values)
    if not program.is_local:
        _compare(exact, results, load_step(emit(exact))(Runtime(), _given(exact, values)))
        plan = sw.plan(program, MESH, "megatron")
        partition(program, as_mesh(MESH), plan, observer=Validator())


def _given(program: Program, values: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    tangents = {
        (slot.kind, slot.name): torch.ones((), dtype=torch.float64)
        for slot in program.arguments
        if slot.kind == "tangent"
    }
    return tangents | dict(values)


def _is_small(program: Program) -> bool:
    values = [value for op in program.ops for value in op.results]
    sizes = [num_bytes(value.type) for value in values if hasattr(value.type, "get_shape")]  # pyright: ignore[reportArgumentType]
    return sum(sizes) < MOST_BYTES and work_of(program) < MOST_FLOPS


def _compare(program: Program, one: Mapping[Key, Tensor], other: Mapping[Key, Tensor]) -> None:
    if not all(x.isfinite().all() for x in one.values() if x.is_floating_point()):
        return
    differences = find_differences(program, one, other)
    if differences:
        raise WrongError(f"emitted and reference differ: {differences[0]}")


# Plans

BY_HAND = """{
  "mesh": {"data": 2, "tensor": 2},
  "parameters": {
    "h.*.mlp.fc_in.weight": "[{\\"tensor\\"}, {}]",
    "h.*.mlp.fc_out.weight": "[{}, {\\"tensor\\"}]",
    "wte.weight": "[{\\"tensor\\", \\"data\\"}, {}]"
  },
  "inputs": {"*": "[{\\"data\\"}, {}]"},
  "used": {"wte.weight": "[{\\"tensor\\"}, {}]"},
  "activations": {"h.0.mlp": "[{\\"data\\"}, {}, {}]"},
  "batch_split": 2,
  "loss_chunks": 2,
  "recompute": "layer",
  "schedule": "sub-batch"
}"""


def make_plan(rng: random.Random, folder: Path) -> str:
    del folder
    spec = MODELS[0]
    texts = [BY_HAND, *(planned(spec, sequence_parallel=on).to_json() for on in (False, True))]
    text = rng.choice(texts)
    if rng.random() < DATA_SHARE:
        return json.dumps(mutated_data(json.loads(text), rng))
    return any_mutation(text, rng)


def use_plan(text: str, folder: Path) -> None:
    """Follow the plan as compile does, every pass validated."""
    del folder
    plan = Plan.from_json(text)
    if Plan.from_json(plan.to_json()) != plan:
        raise WrongError("a plan is not what it was written as")
    mesh = sw.Mesh(**plan.mesh) if plan.mesh else as_mesh(MESH)
    if mesh.num_devices > 64:
        return
    partition(captured(MODELS[0]), mesh, plan, observer=Validator())


# Clusters

CLUSTERS = Path(__file__).resolve().parent.parent / "planners" / "cost" / "clusters"


def make_cluster(rng: random.Random, folder: Path) -> str:
    del folder
    text = rng.choice([path.read_text() for path in sorted(CLUSTERS.glob("*.yaml"))])
    if rng.random() < DATA_SHARE:
        return yaml.safe_dump(mutated_data(yaml.safe_load(text), rng))
    return any_mutation(text, rng)


def use_cluster(text: str, folder: Path) -> None:
    """Simulate a step on the cluster."""
    del folder
    cluster = parse_cluster(text)
    if parse_cluster(text) != cluster:
        raise WrongError("a text is read as two clusters")
    program = Program.parse(local_text(MODELS[0]))
    found = sw.simulate(program, cluster)
    if not (math.isfinite(found.time_s) and found.time_s >= 0):
        raise WrongError(f"a step takes {found.time_s} s")


# Checkpoints


class Model(nn.Module):
    """What is saved: numbers of several dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.rand(5, 3, generator=generator))
        self.register_buffer("count", torch.randint(0, 9, (4,), generator=generator))


def _state(seed: int) -> dict[str, object]:
    model = Model(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "seed": seed, "text": ["a", 1.5, None]}


def make_checkpoint(rng: random.Random, folder: Path) -> str:
    """A folder of two checkpoints, in whose last one a file is changed; half the time, its
    manifest has the digest of what is there, as if somebody meant it."""
    for number in (1, 2):
        sw.save_checkpoint(folder, number, _state(number))
    path = rng.choice(sorted((folder / "checkpoint-2").iterdir()))
    content = bytearray(path.read_bytes())
    if path.name == MANIFEST:
        path.write_text(any_mutation(content.decode(), rng))
        return f"{path.name} changed"
    for _ in range(rng.choice((1, 1, 4))):
        at = rng.randrange(len(content))
        kind = rng.randrange(4)
        if kind == 0:
            content[at] = rng.randrange(256)
        elif kind == 1:
            del content[at : at + rng.choice((1, 100))]
        elif kind == 2:
            content[at:at] = content[: rng.choice((1, 100))]
        else:
            content = content[: at + 1]
    path.write_bytes(content)
    is_meant = rng.random() < 0.5
    if is_meant:
        manifest = folder / "checkpoint-2" / MANIFEST
        record = json.loads(manifest.read_text())
        record["files"] |= digests_of(folder / "checkpoint-2", path.name)
        manifest.write_text(json.dumps(record))
    return f"{path.name} changed{', and its digest' if is_meant else ''}"


def use_checkpoint(text: str, folder: Path) -> None:
    """Load the last one: it is the second, or the first, but nothing between them."""
    state = _state(3)
    del state["seed"], state["text"]
    loaded = sw.load_checkpoint(folder, state)
    if loaded is None or loaded.number not in (1, 2):
        raise WrongError(f"{loaded} was loaded")
    wanted = _state(loaded.number)
    if "and its digest" in text:
        return  # whoever writes digests may write other numbers
    found, expected = state["model"], wanted["model"]
    assert isinstance(found, Model)
    assert isinstance(expected, Model)
    if not all(map(torch.equal, found.state_dict().values(), expected.state_dict().values())):
        raise WrongError("other numbers were loaded")


def clean(folder: Path) -> None:
    """Remove what a case has made."""
    shutil.rmtree(folder, ignore_errors=True)


KINDS = {
    "program": Kind(make_program, use_program),
    "plan": Kind(make_plan, use_plan),
    "cluster": Kind(make_cluster, use_cluster),
    "checkpoint": Kind(make_checkpoint, use_checkpoint, writes=True),
}


def warm_up(kind: str) -> None:
    """Make what all cases of a kind share, once."""
    if kind == "checkpoint":
        return
    for spec in MODELS:
        planned(spec)
        local_text(spec)
    planned(MODELS[0], sequence_parallel=True)
    small()
