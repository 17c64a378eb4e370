"""ZeRO: what of the training state is divided over the data axis, and what that makes ranks send.

Source: Rajbhandari et al., ZeRO, SC 2020, Sec. 5 and 7. An axis of further replicas beside `data`
makes it hybrid sharding (Zhao et al., PyTorch FSDP, VLDB 2023, Sec. 3.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping

DATA_AXIS = "data"
"""The mesh axis of replicas, over which ZeRO divides."""

REPLICA_AXIS = "replica"
"""The mesh axis of further replicas, over which nothing is divided but the batch: ranks that differ
in it alone hold the same shards, and sum their gradients' shards once they are scattered."""

BATCH_AXES = (REPLICA_AXIS, DATA_AXIS)
"""The mesh axes over which the batch is cut."""

DIVIDED: tuple[tuple[str, ...], ...] = (
    (),
    ("optimizer",),
    ("optimizer", "gradients"),
    ("optimizer", "gradients", "parameters"),
)
"""By ZeRO stage: the parts of a parameter's state of which each replica holds its share."""


def divided(state: Mapping[str, float], zero: int, data: int) -> dict[str, float]:
    """A state's bytes by part on one of `data` replicas."""
    return {part: size / data if part in DIVIDED[zero] else size for part, size in state.items()}


def whole_for_a_while(zero: int) -> int:
    """Number of times a block's parameters are whole at once: gradients (2, 3), parameters (3)."""
    return max(0, zero - 1)


def ring_passes(zero: int, micro_batches: int) -> int:
    """Number of times that a step sends the parameters' bytes around the ring of replicas.

    An all-reduce takes two, a reduce-scatter or an all-gather one. Stage 1 scatters gradients and
    gathers parameters once a step; stage 2 scatters gradients for every micro-batch, lest they
    are ever whole; stage 3 also gathers parameters for each of its two passes.
    """
    return (2, 2, 1 + micro_batches, 3 * micro_batches)[zero]
