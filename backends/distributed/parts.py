"""Parts of tensors as a step keeps them, and as its programs compute on them.

A step keeps what DTensor keeps: of a dim that is cut unevenly the last ranks have less, or nothing.
In a program every rank's part has the same shape, with padding at its end.
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
    """Between both, for the arguments and results of a program on the rank at `coordinates`."""

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
        """The arguments with zeros as padding. Gradients to add to are left out where they have
        none: a program adds to what has the shape of its own."""
        own = dict(given)
        for key in self._held:
            own.pop(key, None)
        for key, shape in self._padded.items():
            own[key] = resized(given[key], shape)
        return own

    def held(self, results: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """The results without their padding."""
        if not self._held:
            return results
        return results | {
            key: resized(results[key], shape) for key, shape in self._held.items() if key in results
        }


def is_uneven(program: Program, slot: Slot) -> bool:
    """Whether an argument or result of a local program is cut unevenly."""
    return any(True for _ in _uneven(program, [slot]))


def _uneven(program: Program, slots: Sequence[Slot]) -> Iterator[tuple[Slot, Shape]]:
    """The slots that are cut unevenly, and their global shapes."""
    for slot in slots:
        sharding = sharding_held(program, slot)
        shape = sharding.global_shape(shape_of(slot.value))
        if not sharding.is_even(shape):
            yield slot, shape
