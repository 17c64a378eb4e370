"""The bubbles that a schedule has by its closed form, beside which the simulated ones stand.

Of equal stages, messages that take no time, and enough micro-batches to fill the pipeline. A step
ends when the last rank does, so that the last rank's wait for its first micro-batch counts: what
Qi et al. 2024 (Table 1) give for ZB-H2 and ZB-V leaves that out.
"""

from __future__ import annotations


def bubble_bound_s(
    schedule: str, ranks: int, chunks: int, forward_s: float, inputs_s: float, weights_s: float
) -> float:
    """Seconds of a step in which the rank that waits least waits.

    forward_s, inputs_s, weights_s: of a micro-batch through all stages of one rank. For
    `zero-bubble-v`, `dualpipe-v` and `list` a lower bound: the last rank has nothing to do until
    the first micro-batch has come through a stage of each rank before. For the others what they
    have, of those with halves if weight gradients take no longer than forward passes.
    """
    fill_s = (ranks - 1) * forward_s / chunks
    both_s = (ranks - 1) * (forward_s + inputs_s) / chunks
    put_off_s = (ranks - 1) * weights_s / chunks
    if schedule in ("gpipe", "1f1b", "interleaved-1f1b"):
        return both_s + put_off_s
    if schedule == "zero-bubble":
        return max(fill_s, both_s - put_off_s)
    if schedule == "zero-bubble-h2":
        return max(fill_s, both_s - 2 * put_off_s)
    return fill_s
