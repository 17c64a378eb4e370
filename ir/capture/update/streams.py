"""Groups of parameters whose optimizer states stream through a device, one group after another."""

from __future__ import annotations

from collections.abc import Sequence

STREAM_BYTES = 64 * 2**20
"""Bytes of parameters in a group. Larger groups take more memory, as the states of three groups are
on the device at once; copies of smaller ones do not fill a link."""


def stream_groups(sizes: Sequence[int]) -> list[list[int]]:
    """Group consecutive parameters, by index, of at most `STREAM_BYTES`, and at least one each.
    sizes: bytes of each parameter on this rank."""
    groups: list[list[int]] = []
    left = 0
    for index, size in enumerate(sizes):
        if not groups or size > left:
            groups.append([])
            left = STREAM_BYTES
        groups[-1].append(index)
        left -= size
    return groups


def streamed_bytes(sizes: Sequence[int], states: Sequence[int]) -> int:
    """Most bytes of states on the device at once: of the group that computes, and its neighbours.
    states: bytes of each parameter's optimizer states on this rank."""
    held = [sum(states[index] for index in group) for group in stream_groups(sizes)]
    return max((sum(held[max(0, i - 1) : i + 2]) for i in range(len(held))), default=0)
