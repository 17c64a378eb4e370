"""Conversion between the shards that a step keeps, and the padded ones that programs compute on.

A step keeps DTensor's shards: if a dim is sharded unevenly, the last ranks have fewer elements, or
none. In a program every rank's shard has the same shape, with padding at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from shardweave.backends.programs import Key, sharding_held
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.shards import resized
from shardweave.ir.program.program import Program, Slot

Shape = tuple[int, ...]


class Parts:
    """Pads uneven shards of a program's arguments, and removes the padding of its results, on the
    rank at `coordinates`."""

    def __init__(self, program: Program, coordinates: Mapping[str, int]) -> None:
        self._padded = {
            (slot.kind, slot.name): shape_of(slot.value)
            for slot, _ in _uneven(program, program.arguments)
        }
        self._held = {
            (slot.kind, slot.name): sharding_held(program, slot).held_shape(shape, coordinates)
            for slot, shape in _uneven(program, program.results)
        }

    def pad(self, given: dict[Key, Tensor]) -> None:
        """Pad the arguments with zeros, in the dict. Removes the caller's unpadded gradients from
        it, since a program can only add to tensors of the padded shape."""
        for key in self._held:
            given.pop(key, None)
        for key, shape in self._padded.items():
            given[key] = resized(given[key], shape)

    def unpad(self, results: dict[Key, Tensor]) -> None:
        """Remove the padding of the results, in the dict."""
        for key in self._held.keys() & results.keys():
            results[key] = resized(results[key], self._held[key])


def is_uneven(program: Program, slot: Slot) -> bool:
    """True if an argument or result of a local program is sharded unevenly."""
    return any(True for _ in _uneven(program, [slot]))


def _uneven(program: Program, slots: Sequence[Slot]) -> Iterator[tuple[Slot, Shape]]:
    """Yield the slots that are sharded unevenly, with their global shapes."""
    for slot in slots:
        sharding = sharding_held(program, slot)
        shape = sharding.global_shape(shape_of(slot.value))
        if not sharding.is_even(shape):
            yield slot, shape
