"""The passes by name, as data: nothing is imported until it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from shardweave.ir.suggest import did_you_mean

if TYPE_CHECKING:
    from xdsl.passes import ModulePass

PASSES: dict[str, str] = {
    "add-pending-sums": "shardweave.passes.prepare.add_pending_sums:AddPendingSumsPass",
    "bucket-collectives": "shardweave.passes.messages.bucket_collectives:BucketCollectivesPass",
    "chunk-loss": "shardweave.passes.memory.chunk_loss:ChunkLossPass",
    "cse": "shardweave.passes.prepare.cse:CsePass",
    "dce": "shardweave.passes.prepare.dce:DcePass",
    "decompose-collectives": (
        "shardweave.passes.messages.decompose_collectives:DecomposeCollectivesPass"
    ),
    "delete-redundant-collectives": (
        "shardweave.passes.messages.delete_redundant_collectives:DeleteRedundantCollectivesPass"
    ),
    "dispatch-experts": "shardweave.passes.messages.dispatch_experts:DispatchExpertsPass",
    "fuse-blocks": "shardweave.passes.kernels.fuse_blocks:FuseBlocksPass",
    "fuse-kernels": "shardweave.passes.kernels.fuse_kernels:FuseKernelsPass",
    "insert-collectives": "shardweave.passes.partition.insert_collectives:InsertCollectivesPass",
    "merge-collectives": "shardweave.passes.messages.merge_collectives:MergeCollectivesPass",
    "offload-activations": ("shardweave.passes.memory.offload_activations:OffloadActivationsPass"),
    "offload-states": "shardweave.passes.memory.offload_states:OffloadStatesPass",
    "propagate-shardings": "shardweave.passes.partition.propagate_shardings:PropagateShardingsPass",
    "recompute-producers": "shardweave.passes.kernels.recompute_producers:RecomputeProducersPass",
    "reduce-in": "shardweave.passes.messages.reduce_in:ReduceInPass",
    "rematerialize": "shardweave.passes.memory.rematerialize:RematerializePass",
    "block-experts": "shardweave.passes.prepare.block_experts:BlockExpertsPass",
    "split-addmm": "shardweave.passes.prepare.split_addmm:SplitAddmmPass",
    "split-attention": "shardweave.passes.prepare.split_attention:SplitAttentionPass",
    "split-batch": "shardweave.passes.prepare.split_batch:SplitBatchPass",
    "split-axes": "shardweave.passes.prepare.split_axes:SplitAxesPass",
    "split-projections": "shardweave.passes.prepare.split_projections:SplitProjectionsPass",
    "start-collectives": "shardweave.passes.messages.start_collectives:StartCollectivesPass",
    "sum-by-local-maxima": "shardweave.passes.partition.sum_by_local_maxima:SumByLocalMaximaPass",
    "unfuse-kernels": "shardweave.passes.kernels.unfuse_kernels:UnfuseKernelsPass",
    "unroll-time-axes": "shardweave.passes.partition.unroll_time_axes:UnrollTimeAxesPass",
}
"""`name` -> `module:class`. The planners add the passes that need a plan or a cost model."""


GENERATED: dict[str, str] = {}
"""Further passes, as in `PASSES`, that listings leave out: `plan-<name>` of each planner."""


def find_pass(name: str) -> type[ModulePass]:
    """Return the pass class of a registered name; an unknown name is a ValueError."""
    target = PASSES.get(name) or GENERATED.get(name)
    if target is None:
        known = sorted([*PASSES, *GENERATED])
        raise ValueError(
            f"there is no pass '{name}'; {did_you_mean(name, known)}the passes are: "
            f"{', '.join(known)}."
        )
    module, _, attribute = target.partition(":")
    return cast("type[ModulePass]", getattr(import_module(module), attribute))


def register_pass(kind: type[ModulePass]) -> type[ModulePass]:
    """Register a user's pass class under its name, for pass lists and the command line (`--load`).

    kind: the pass class; this function can decorate it. A class may be registered again, also in a
    new version. Raises ValueError if another pass has the name.
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
