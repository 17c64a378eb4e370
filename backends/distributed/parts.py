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
    """Pads a program's arguments, and unpads its results, on the rank at `coordinates`."""

    def __init__(self, program: Program, coordinates: Mapping[str, int]) -> None:
        self._padded = {
            (slot.kind, slot.name): shape_of(slot.value)
            for slot, _ in _uneven(program, program.arguments)
        }
        self._held = {
            (slot.kind, slot.name): sharding_held(program, slot).held_shape(shape, coordinates)
            for slot, shape in _uneven(program, program.results)
        }

    def padded(self, given: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Pad the arguments with zeros. A gradient to add to that lacks padding is left out, since
        a program only adds to tensors of the padded shape."""
        own = dict(given)
        for key in self._held:
            own.pop(key, None)
        for key, shape in self._padded.items():
            own[key] = resized(given[key], shape)
        return own

    def held(self, results: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Remove the padding of the results."""
        if not self._held:
            return results
        return results | {
            key: resized(results[key], shape) for key, shape in self._held.items() if key in results
        }


def is_uneven(program: Program, slot: Slot) -> bool:
    """Whether an argument or result of a local program is sharded unevenly."""
    return any(True for _ in _uneven(program, [slot]))


def _uneven(program: Program, slots: Sequence[Slot]) -> Iterator[tuple[Slot, Shape]]:
    """Yield the slots that are sharded unevenly, with their global shapes."""
    for slot in slots:
        sharding = sharding_held(program, slot)
        shape = sharding.global_shape(shape_of(slot.value))
        if not sharding.is_even(shape):
            yield slot, shape
