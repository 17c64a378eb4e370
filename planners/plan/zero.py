"""ZeRO: training state that is sharded over the data axis, and the traffic that this causes.

Source: Rajbhandari et al., ZeRO, SC 2020, Sec. 5 and 7. With a second axis of replicas beside
`data` it is hybrid sharding (Zhao et al., PyTorch FSDP, VLDB 2023, Sec. 3.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping

DATA_AXIS = "data"
"""The mesh axis of replicas, over which ZeRO shards training state."""

REPLICA_AXIS = "replica"
"""A second mesh axis of replicas, over which only the batch is sharded: ranks that differ only in
this coordinate hold equal shards, and all-reduce their shards of gradients."""

BATCH_AXES = (REPLICA_AXIS, DATA_AXIS)
"""The mesh axes over which the batch is sharded."""

DIVIDED: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer",),
    ("optimizer", "gradients"),
    ("optimizer", "gradients", "parameters"),
)
"""By ZeRO stage, the kinds of training state that are sharded over the replicas."""


def divided(state: Mapping[str, float], zero: int, data: int) -> dict[str, float]:
    """Return bytes by kind of state on one of `data` replicas, under ZeRO stage `zero`."""
    return {part: size / data if part in DIVIDED[zero] else size for part, size in state.items()}


def whole_for_a_while(zero: int) -> int:
    """Count a block's tensors that ZeRO briefly holds whole: gradients (2, 3), weights (3)."""
    return max(0, zero - 1)


def ring_passes(zero: int, micro_batches: int) -> int:
    """Count how many times a step sends the parameters' bytes around the ring of replicas.

    An all-reduce counts two, a reduce-scatter or an all-gather one. Stage 1 scatters gradients and
    gathers parameters once a step; stage 2 scatters gradients for every micro-batch, so that none
    accumulate unsharded; stage 3 also gathers parameters for both passes of every micro-batch.
    """
    return (2, 2, 1 + micro_batches, 3 * micro_batches)[zero]
