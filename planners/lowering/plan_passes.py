"""Passes that carry out a plan.

Planners, `run --plan` and `sw.compile` all run these passes, so that planners price the program
that runs. They follow `apply-plan`. A plan may list them (`Plan.passes`), including a user's own;
otherwise they are derived from its other fields.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from xdsl.passes import ModulePass

from shardweave.ir.program.staged import MICRO
from shardweave.passes.messages.merge_collectives import BUCKET_BYTES
from shardweave.passes.pipeline import PassPipeline, parse_passes
from shardweave.passes.registry import find_pass
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError, offloaded
from shardweave.planners.schedules.uneven import shares_text

PARTITIONING = (
    "split-addmm",
    "split-axes",
    "block-experts",
    "add-pending-sums",
    "propagate-shardings",
    "insert-collectives",
)
RECOMPUTATION = (
    "rematerialize",
    "offload-activations",
    "offload-states",
    "cut-stages",
    "decompose-collectives",
)
FINISHING = ("bucket-collectives", "start-collectives", "overlap-communication")
DEFAULT_SCHEDULE = "in-order"


@dataclass(frozen=True)
class PlanPasses:
    """The passes of a plan in order, after `apply-plan`, in three groups.

    partitioning: up to a local program that waits for every message. recomputation: from the first
    pass that recomputes, offloads, cuts stages or decomposes. finishing: from the first pass that
    joins, starts or orders messages.
    """

    passes: tuple[ModulePass, ...]

    @staticmethod
    def of(plan: Plan) -> PlanPasses:
        """Return the passes that the plan lists, or else those that its other fields require.

        Raises PlanError if the schedule needs a cluster that the plan does not name, or if the list
        lacks a pass that other fields require; ValueError if the list does not parse.
        """
        derived = _derived(plan)
        if not plan.passes:
            return PlanPasses(derived)
        listed = parse_passes(plan.passes)
        asked = _names(derived) - _names(_derived(Plan())) - _names(listed)
        if asked:
            raise PlanError(
                f"the plan's 'passes' do not include '{min(asked)}', which its other fields "
                "need; add that pass, or change those fields. The plan's fields need: "
                f"{PassPipeline(derived)}"
            )
        return PlanPasses(listed)

    @cached_property
    def partitioning(self) -> tuple[ModulePass, ...]:
        return self.passes[: self._first(RECOMPUTATION + FINISHING)]

    @cached_property
    def recomputation(self) -> tuple[ModulePass, ...]:
        return self.passes[len(self.partitioning) : self._first(FINISHING)]

    @cached_property
    def finishing(self) -> tuple[ModulePass, ...]:
        return self.passes[self._first(FINISHING) :]

    @property
    def own_last(self) -> tuple[ModulePass, ...]:
        """Passes in the finishing group that the user added to the plan."""
        return tuple(each for each in self.finishing if each.name not in FINISHING)

    def _first(self, names: Collection[str]) -> int:
        """Index of the first pass with one of these names, or the number of passes."""
        places = (index for index, each in enumerate(self.passes) if each.name in names)
        return next(places, len(self.passes))

    def __str__(self) -> str:
        return str(PassPipeline(self.passes))


def plan_passes(plan: Plan) -> list[ModulePass]:
    """All passes of a plan, which turn a global program on a mesh into the local program."""
    return [ApplyPlanPass.of(plan), *PlanPasses.of(plan).passes]


def passes_before(plan: Plan) -> list[ModulePass]:
    """The plan's passes up to the local program in which every message blocks."""
    parts = PlanPasses.of(plan)
    return [ApplyPlanPass.of(plan), *parts.partitioning, *parts.recomputation]


def passes_after(plan: Plan, names: Collection[str] = ()) -> list[ModulePass]:
    """The passes of a plan that join, start and order messages. names: passes that a user ran
    before these; they are not repeated, and none remain once messages were started or ordered."""
    if not {"start-collectives", "overlap-communication"}.isdisjoint(names):
        return []
    return [each for each in PlanPasses.of(plan).finishing if each.name not in names]


def chosen_by(plan: Plan) -> set[str]:
    """Names of passes that carry out explicit choices of the plan; their notes are shown."""
    names = {"split-projections", "split-attention", *RECOMPUTATION} - {"cut-stages"}
    # The functions of a pipeline are ordered one by one, and some may well send nothing.
    if plan.schedule not in ("", DEFAULT_SCHEDULE) and not plan.is_pipeline:
        names.add("overlap-communication")
    if plan.passes:
        names |= _names(parse_passes(plan.passes)) - _names(_derived(plan))
    return names


def _names(passes: Collection[ModulePass]) -> set[str]:
    return {each.name for each in passes}


def _derived(plan: Plan) -> tuple[ModulePass, ...]:
    return (*_partitioning(plan), *_recomputation(plan), *_finishing(plan))


def _make(name: str, **options: Any) -> ModulePass:
    return find_pass(name)(**options)


def _partitioning(plan: Plan) -> list[ModulePass]:
    passes: list[ModulePass] = []
    if plan.pipeline and plan.pipeline.micro_batches > 1:
        passes.append(_make("split-batch", n=plan.pipeline.micro_batches, axis=MICRO))
    if plan.batch_split > 1:
        passes.append(_make("split-batch", n=plan.batch_split))
    if plan.projections:
        passes.append(_make("split-projections"))
    for name in PARTITIONING:
        passes.append(_make(name, **_options(name, plan)))
        if name == "split-axes" and plan.attention_parts > 1:
            passes.append(_make("split-attention", parts=plan.attention_parts))
        if name == "propagate-shardings" and plan.loss_chunks > 1:
            passes.append(_make("chunk-loss", chunks=plan.loss_chunks))
    if plan.batch_split > 1 or plan.loss_chunks > 1:
        keep = {"keep": MICRO} if plan.is_pipeline else {}
        passes.append(_make("unroll-time-axes", **keep))
    passes += [_make("cse"), _make("dce"), _make("dispatch-experts")]
    if not plan.is_pipeline:
        passes.append(_make("merge-collectives"))
    if plan.zero in (1, 2):
        passes.append(_make("delete-redundant-collectives"))
    return passes


def _options(name: str, plan: Plan) -> dict[str, Any]:
    """Options that a partitioning pass gets from the plan."""
    if name == "block-experts" and plan.expert_load != 1:
        return {"load": plan.expert_load}
    # Each rank selects key heads in attention to all keys; of a part of the keys, they are shards.
    return {"groups": True} if name == "split-axes" and plan.attention_parts > 1 else {}


def _recomputation(plan: Plan) -> list[ModulePass]:
    passes: list[ModulePass] = []
    if plan.recompute != "none":
        blocks = ",".join(plan.recompute_in)
        passes.append(_make("rematerialize", policy=plan.recompute, blocks=blocks))
    values, has_host_states = offloaded(plan.offload)
    if values != "none":
        passes.append(_make("offload-activations", values=values))
    if has_host_states:
        passes.append(_make("offload-states"))
    if plan.is_pipeline and plan.pipeline is not None:
        # After it every pass works on one function at a time.
        options: dict[str, Any] = {"schedule": plan.pipeline.schedule, "zero": plan.zero or 3}
        if plan.pipeline.shares:
            options["shares"] = shares_text(plan.pipeline.shares)
        if plan.orders_stages and plan.cluster:
            options["cluster"] = plan.cluster
        passes += [_make("cut-stages", **options), _make("merge-collectives")]
    if plan.decompose:
        passes.append(_make("decompose-collectives", layers=",".join(plan.decompose)))
    return passes


def _finishing(plan: Plan) -> list[ModulePass]:
    if plan.schedule == "list" and not plan.cluster:
        raise PlanError(
            "the plan's schedule 'list' orders ops for a cluster, but the plan names no cluster; "
            "set 'cluster' to a preset's name or a file, or use another schedule."
        )
    schedule = plan.schedule or DEFAULT_SCHEDULE
    cluster = {"cluster": plan.cluster} if plan.schedule and plan.cluster else {}
    passes = [_make("start-collectives"), _make(FINISHING[-1], schedule=schedule, **cluster)]
    if schedule not in (DEFAULT_SCHEDULE, "list"):
        return passes  # The papers' schedules are as they are there.
    alone = plan.alone_bytes
    sizes = {"bytes": max(BUCKET_BYTES, alone), "alone_bytes": alone} if alone else {}
    return [_make("bucket-collectives", **sizes), *passes]
