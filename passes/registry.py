"""The passes by name, as data: nothing is imported until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xdsl.passes import ModulePass

PASSES: dict[str, str] = {
    "add-pending-sums": "shardweave.passes.add_pending_sums:AddPendingSumsPass",
    "apply-plan": "shardweave.passes.apply_plan:ApplyPlanPass",
    "bucket-collectives": "shardweave.passes.bucket_collectives:BucketCollectivesPass",
    "cse": "shardweave.passes.cse:CsePass",
    "cut-stages": "shardweave.passes.cut_stages:CutStagesPass",
    "dce": "shardweave.passes.dce:DcePass",
    "delete-redundant-collectives": (
        "shardweave.passes.delete_redundant_collectives:DeleteRedundantCollectivesPass"
    ),
    "fuse-kernels": "shardweave.passes.fuse_kernels:FuseKernelsPass",
    "insert-collectives": "shardweave.passes.insert_collectives:InsertCollectivesPass",
    "merge-collectives": "shardweave.passes.merge_collectives:MergeCollectivesPass",
    "overlap-communication": "shardweave.passes.overlap_communication:OverlapCommunicationPass",
    "propagate-shardings": "shardweave.passes.propagate_shardings:PropagateShardingsPass",
    "recompute-producers": "shardweave.passes.recompute_producers:RecomputeProducersPass",
    "reduce-in": "shardweave.passes.reduce_in:ReduceInPass",
    "rematerialize": "shardweave.passes.rematerialize:RematerializePass",
    "repeat-key-heads": "shardweave.passes.repeat_key_heads:RepeatKeyHeadsPass",
    "split-addmm": "shardweave.passes.split_addmm:SplitAddmmPass",
    "split-attention": "shardweave.passes.split_attention:SplitAttentionPass",
    "split-batch": "shardweave.passes.split_batch:SplitBatchPass",
    "split-projections": "shardweave.passes.split_projections:SplitProjectionsPass",
    "start-collectives": "shardweave.passes.start_collectives:StartCollectivesPass",
    "sum-by-local-maxima": "shardweave.passes.sum_by_local_maxima:SumByLocalMaximaPass",
    "unfuse-kernels": "shardweave.passes.unfuse_kernels:UnfuseKernelsPass",
    "unroll-time-axes": "shardweave.passes.unroll_time_axes:UnrollTimeAxesPass",
}
"""`name` -> `module:class`."""

PLANNER_PREFIX = "plan-"
"""`plan-<name>` is a pass for each planner that there is (`planner_pass`)."""


def register_pass(kind: type[ModulePass]) -> type[ModulePass]:
    """Make a pass of one's own known by its name, in specs and on the command line (`--load`).

    kind: the pass's class, above which this can stand. Registering it again is allowed, and so is a
    new version of it. Raises ValueError if another pass has the name.
    """
    target = f"{kind.__module__}:{kind.__qualname__}"
    known = PASSES.get(kind.name, target)
    if known.rpartition(":")[2] != kind.__qualname__:
        raise ValueError(
            f"there is a pass '{kind.name}' already, {known}; give {kind.__qualname__} another "
            "name."
        )
    PASSES[kind.name] = target
    return kind
