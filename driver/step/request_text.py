"""What is compiled, as text: ranks compare it, since rank 0 compiles for all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardweave.backends.watch.agreement import without_addresses
from shardweave.driver.step.request import Request
from shardweave.ir.capture.outputs import LossChoice
from shardweave.ir.program.text import print_module
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.plan.plan import Plan
from shardweave.planners.planning import PlanLike
from shardweave.planners.registry import PLANNERS


def describe(request: Request, **options: Any) -> str:
    """A request without its model, which has its own description, and more options: by lines."""
    named = {
        "mesh": "the plan's" if request.is_mesh_open else request.mesh,
        "cluster": None if request.cluster is None else find_cluster(request.cluster),
        "backend": request.backend,
        "passes": request.passes,
        "train": request.train,
        "loss": _loss(request.loss),
        "only_loss": request.only_loss,
        "precision": request.precision,
        "seed": request.seed,
        "sequence_parallel": request.sequence_parallel,
        "zero": request.zero,
        "validate": request.validate,
        "prove": request.prove,
        "cuda_graph": request.cuda_graph,
        **options,
    }
    lines = [f"{name}={value!s}" for name, value in named.items()]
    lines += [f"plan: {line}" for line in _plan(request.plan).splitlines()]
    if request.program is not None:
        lines += print_module(request.program.module).splitlines()
    return without_addresses("\n".join(lines))


def _loss(choice: LossChoice) -> str:
    return f"{choice.__module__}.{choice.__qualname__}" if callable(choice) else repr(choice)


def _plan(plan: PlanLike | None) -> str:
    """What a plan says, a file by its content: ranks may have it under other paths."""
    if isinstance(plan, Plan):
        return plan.to_json()
    if isinstance(plan, Mapping):
        return "\n".join(f"{name}: {value}" for name, value in plan.items())
    if plan is not None and plan not in PLANNERS and Path(plan).is_file():
        return Path(plan).read_text()
    return str(plan)
