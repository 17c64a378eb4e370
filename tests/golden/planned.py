"""Golden cases of planning: the plan that each planner chooses, and what it predicts and says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardweave.passes.notes import unheard
from shardweave.planners.planning import plan as make_plan
from shardweave.tests.golden.figures import Figures
from shardweave.tests.golden.lowered import CLUSTERS
from shardweave.tests.golden.programs import stored

PROBLEMS: dict[str, tuple[str, str, str | None, str, dict[str, Any]]] = {
    "megatron": ("megatron", "gpt", "data=2,tensor=2", "slow", {"sequence_parallel": True}),
    "megatron on uneven heads": ("megatron", "llama", "tensor=8", "rings", {}),
    "megatron of t5": ("megatron", "t5", "context=2,tensor=2", "slow", {}),
    "megatron of experts": ("megatron", "experts", "data=2,expert=2", "mixed", {}),
    "megatron of a unet": ("megatron", "unet", "space=2,tensor=2", "mixed", {}),
    "replicated": ("replicated", "cnn", "replica=2,data=2", "slow", {}),
    "oases": ("oases", "gpt", "data=1,tensor=4", "slow", {"refine": 3}),
    "oases of llama": (
        "oases",
        "llama",
        "data=2,tensor=2",
        "rings",
        {"recompute": "layer", "refine": 2},
    ),
    "oases in stages": (
        "oases",
        "deep",
        "pipeline=2,tensor=2",
        "slow",
        {"micro_batches": 2, "refine": 1},
    ),
    "axonn": ("axonn", "gpt", None, "slow", {"top": 8}),
    "axonn with checkpoints": (
        "axonn",
        "deep",
        None,
        "rings",
        {"checkpointing": True, "keep_gathered": True, "aware": False},
    ),
    "axonn on a grid": ("axonn", "gpt", "x=2,y=1,z=2,data=1", "slow", {}),
    "amp": ("amp", "gpt", None, "slow", {}),
    "amp on mixed devices": ("amp", "deep", None, "mixed", {"anneal": 2}),
    "auto": ("auto", "gpt", None, "slow", {"simulate": 2}),
    "auto on a mesh": ("auto", "llama", "data=2,tensor=2", "rings", {"simulate": 2}),
    "auto in little memory": (
        "auto",
        "dropout",
        "data=2,tensor=2",
        "slow",
        {"simulate": 2, "memory": "90KiB", "update": "AdamW", "propose": False},
    ),
    "auto with constraints": (
        "auto",
        "deep",
        "pipeline=2,data=2",
        "slow",
        {"simulate": 2, "fix": "stages=2", "forbid": "zero=0", "propose": False},
    ),
    "auto of experts": ("auto", "slots", "data=2,expert=2", "slow", {"simulate": 2}),
    "auto of a cnn": ("auto", "cnn", "data=2", "slow", {"simulate": 1}),
    "oppa": ("oppa", "gpt", "data=2,tensor=2", "slow", {"trials": 3, "first": 3}),
}
"""Problems by name: planner, model, mesh, cluster, and the planner's options."""


def planner_figures(name: str) -> Figures:
    """Figures of a planner's answer: the plan, its prediction and reasons, and all candidates."""
    planner, model, mesh, cluster, options = PROBLEMS[name]
    with unheard():
        plan = make_plan(stored(model), mesh, planner, cluster=CLUSTERS[cluster], **options)
    predicted = plan.predicted
    assert predicted is not None
    bare = replace(plan, predicted=None, reasons=(), candidates=(), notes=())
    return {
        "mesh": ",".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
        "choice": f"zero={plan.zero} recompute={plan.recompute} schedule={plan.schedule}",
        "time_s": predicted.time_s,
        "peak_bytes": predicted.peak_bytes,
        "plan": bare.to_json(),
        "predicted": vars(predicted),
        "said": [*plan.reasons, *plan.notes],
        "candidates": [(c.name, vars(c.predicted), c.reason) for c in plan.candidates],
    }
