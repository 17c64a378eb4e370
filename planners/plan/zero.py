"""ZeRO: the training state that is sharded over the data axis, and the traffic that this causes.

Source: Rajbhandari et al., ZeRO, SC 2020, Sec. 5 and 7. An axis of further replicas beside `data`
makes it hybrid sharding (Zhao et al., PyTorch FSDP, VLDB 2023, Sec. 3.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping

DATA_AXIS = "data"
"""The mesh axis of replicas, over which ZeRO divides."""

REPLICA_AXIS = "replica"
"""The mesh axis of further replicas, over which only the batch is sharded: ranks that differ only
in this coordinate hold the same shards, and all-reduce the shards of scattered gradients."""

BATCH_AXES = (REPLICA_AXIS, DATA_AXIS)
"""The mesh axes over which the batch is cut."""

DIVIDED: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer",),
    ("optimizer", "gradients"),
    ("optimizer", "gradients", "parameters"),
)
"""By ZeRO stage, the kinds of training state that are sharded over the replicas."""


def divided(state: Mapping[str, float], zero: int, data: int) -> dict[str, float]:
    """Divide the bytes of each kind of state by `data` replicas, as ZeRO stage `zero` does."""
    return {part: size / data if part in DIVIDED[zero] else size for part, size in state.items()}


def whole_for_a_while(zero: int) -> int:
    """Count block-sized tensors that ZeRO holds unsharded: gradients (2, 3) and weights (3)."""
    return max(0, zero - 1)


def ring_passes(zero: int, micro_batches: int) -> int:
    """Count how often a step sends the parameters' bytes around the ring of replicas.

    An all-reduce counts two, a reduce-scatter or an all-gather one. Stage 1 scatters gradients and
    gathers parameters once a step; stage 2 scatters gradients for every micro-batch, so that none
    accumulate unsharded; stage 3 also gathers parameters for both passes of every micro-batch.
    """
    return (2, 2, 1 + micro_batches, 3 * micro_batches)[zero]
