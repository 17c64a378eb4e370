"""The passes by name, as data: nothing is imported until it is used."""

from __future__ import annotations

PASSES: dict[str, str] = {
    "apply-plan": "shardweave.passes.apply_plan:ApplyPlanPass",
    "bucket-collectives": "shardweave.passes.bucket_collectives:BucketCollectivesPass",
    "cse": "shardweave.passes.cse:CsePass",
    "dce": "shardweave.passes.dce:DcePass",
    "delete-redundant-collectives": (
        "shardweave.passes.delete_redundant_collectives:DeleteRedundantCollectivesPass"
    ),
    "fuse-kernels": "shardweave.passes.fuse_kernels:FuseKernelsPass",
    "insert-collectives": "shardweave.passes.insert_collectives:InsertCollectivesPass",
    "merge-collectives": "shardweave.passes.merge_collectives:MergeCollectivesPass",
    "overlap-communication": "shardweave.passes.overlap_communication:OverlapCommunicationPass",
    "propagate-shardings": "shardweave.passes.propagate_shardings:PropagateShardingsPass",
    "rematerialize": "shardweave.passes.rematerialize:RematerializePass",
    "split-batch": "shardweave.passes.split_batch:SplitBatchPass",
    "start-collectives": "shardweave.passes.start_collectives:StartCollectivesPass",
    "unfuse-kernels": "shardweave.passes.unfuse_kernels:UnfuseKernelsPass",
    "unroll-time-axes": "shardweave.passes.unroll_time_axes:UnrollTimeAxesPass",
}
"""`name` -> `module:class`."""
