"""One case of `models.py`: a model captured once, and three steps on each mesh against eager."""

from __future__ import annotations

import copy
import math
import re
import time
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.driver.checking.check import (
    CheckResult,
    Expected,
    check_steps,
    moved_steps,
    results_of,
    run_eager,
)
from shardweave.ir.dialects.types import shape_of
from shardweave.planners.lowering.partition import partition
from shardweave.planners.planning import resolve_plan

NUM_STEPS = 3
SEED = 0
"""Of the random numbers that a model draws, on both sides."""
_FOLDER = re.compile(r"/[\w./-]*/(?=[\w.-]+\.py)")
_SITE = re.compile(r"[\w./-]+\.py:\d+")


@dataclass(frozen=True)
class Configuration:
    """A mesh, and what is done on it beside Megatron's plan."""

    mesh: str
    sequence_parallel: bool = False
    stored: bool = False
    passes: str = ""


CONFIGURATIONS = {
    "data=2": Configuration("data=2"),
    "tensor=2": Configuration("tensor=2"),
    "data=2,tensor=2": Configuration("data=2,tensor=2"),
    "sequence": Configuration("tensor=2", sequence_parallel=True),
    "stored": Configuration("data=2", stored=True),
    "oases": Configuration("data=2,tensor=2", passes="preset:oases"),
}
"""By the name of the table's column. stored: every weight in shards over `data`."""

RESULTS = ("exact", "refused", "wrong", "crashed", "not built")
"""From the best to the worst; the result of a case is the worst of its configurations."""


@dataclass(frozen=True)
class Example:
    """A model and the inputs of each step."""

    module: nn.Module
    batches: Sequence[Mapping[str, Tensor]]


@dataclass
class Row:
    """What came of a case: a result, the largest error, the bound, and why it is not exact."""

    group: str
    name: str
    result: str
    error: float = 0.0
    bound: float = 0.0
    why: str = ""
    seconds: float = 0.0
    num_ops: int = 0
    configurations: dict[str, str] = field(default_factory=dict[str, str])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    group: str, name: str, example: Example, configurations: Iterable[str] = CONFIGURATIONS
) -> Row:
    """Capture a model, and compare three steps of it with eager in some configurations."""
    torch.manual_seed(0)
    start_s = time.perf_counter()
    row = Row(group, name, "exact")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _fill(row, example, configurations)
    row.seconds = round(time.perf_counter() - start_s, 2)
    return row


def _fill(row: Row, example: Example, configurations: Iterable[str]) -> None:
    # The model itself, not a copy, has the hooks of its parameters.
    try:
        captured = sw.capture(example.module, kwargs=example.batches[0])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's
        captured = error
    start = copy.deepcopy(example.module)  # with constants as buffers, before anything runs
    try:
        eager = _eager(example)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's
        row.result, row.why = "not built", _text(error)
        return
    if isinstance(captured, Exception):
        row.result, row.why = _kind(captured), _text(captured)
        return
    row.num_ops = sum(1 for _ in captured.ops)
    for configuration in configurations:
        _measure(row, configuration, Example(start, example.batches), captured, eager)


def _eager(example: Example) -> list[Expected]:
    with sw.seeded(SEED):
        steps = [run_eager(example.module, _fresh(batch)) for batch in example.batches]
    gradients = [gradient for step in steps for gradient in step.gradients.values()]
    if not all(math.isfinite(step.loss) for step in steps) or not any(map(torch.any, gradients)):
        raise ValueError("the loss is not finite, or no parameter has a gradient")
    return steps


def _fresh(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in batch.items()}


def _measure(
    row: Row, name: str, example: Example, program: sw.Program, eager: Sequence[Expected]
) -> None:
    """Add one configuration to a row."""
    try:
        check = _check(CONFIGURATIONS[name], example, program, eager)
        row.why = row.why or check.bound_of
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's
        result, why = _kind(error), _text(error)
    else:
        errors = (check.loss_error, check.max_rel_grad_error, check.buffer_error)
        row.error = max((row.error, *errors), key=lambda e: (math.isnan(e), e))
        row.bound = max(row.bound, check.bound)
        result = "exact" if check.ok else "wrong"
        worst = check.worst_buffer if check.buffer_error > check.bound else check.worst_parameter
        why = "" if check.ok else f"loss off by {errors[0]:.1e}, '{worst}' by {max(errors):.1e}"
    row.configurations[name] = result
    if RESULTS.index(result) > RESULTS.index(row.result):
        row.result, row.why = result, f"on {name}: {why}"


def _check(
    configuration: Configuration,
    example: Example,
    program: sw.Program,
    eager: Sequence[Expected],
) -> CheckResult:
    mesh = sw.Mesh(**{k: int(v) for k, v in (a.split("=") for a in configuration.mesh.split(","))})
    plan = resolve_plan(
        "megatron", program, mesh, sequence_parallel=configuration.sequence_parallel
    )
    if configuration.stored:
        plan = _stored(plan, program)
    local = partition(program, mesh, plan, configuration.passes)
    step = sw.compile(
        copy.deepcopy(example.module),
        kwargs=_fresh(example.batches[0]),
        program=local,
        backend="reference",
        backward="in_call",
        seed=SEED,
    )
    found: list[Expected] = []
    for batch in example.batches:
        step.zero_grad(set_to_none=True)
        found.append(results_of(step, step(**_fresh(batch))))

    def moved() -> list[Expected]:
        with sw.seeded(SEED):
            return moved_steps(copy.deepcopy(example.module), example.batches)

    return check_steps(found, eager, torch.float64, local, moved)


def _stored(plan: sw.Plan, program: sw.Program) -> sw.Plan:
    """The plan with every weight stored along the first dim that divides by two."""
    parameters: dict[str, str] = {}
    for slot in program.arguments:
        shape = shape_of(slot.value)
        dim = next((d for d, size in enumerate(shape) if size % 2 == 0 and size), None)
        if slot.kind == "param" and dim is not None:
            cuts = ", ".join('{"data"}' if d == dim else "{}" for d in range(len(shape)))
            parameters[slot.name] = f"[{cuts}]"
    return sw.Plan(mesh=plan.mesh, parameters=parameters, inputs=plan.inputs)


def _kind(error: Exception) -> str:
    """A ValueError is for users; everything else is a crash, and so is a refusal without a line."""
    if isinstance(error, sw.CaptureError) and _SITE.search(str(error)):
        return "refused"
    return "crashed"


def _text(error: Exception) -> str:
    text = _FOLDER.sub("", " ".join(str(error).split()))
    if isinstance(error, ValueError):
        return text[:600]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "shardweave" in f.filename] or list(frames)
    place = f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"
    return f"{type(error).__name__} at {place}: {text}"[:600]
