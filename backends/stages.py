"""Functions of stages, and the values that they leave for later ones, on any backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

import torch

from shardweave.backends.programs import Key, sharding_held
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.mesh.placement import block_of
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import HELD, Run, StageFunction, functions_of, micro_axis
from shardweave.ir.program.storage import is_unshared

V = TypeVar("V")
"""A value of a function: a tensor, or a tensor for each rank of a virtual mesh."""

Place = tuple[int, str, int | None]
"""Key of a held value: its stage, name and micro-batch (None: of all micro-batches)."""

Cut = tuple[int, int, int]
"""Split of a value into micro-batches: the dim, the number of micro-batches, the block length."""

_OF_STEP = ("param", "buffer", "tangent", "input")
"""Kinds of slots that are arguments of the whole step."""

_RETURNED = ("output", "grad", "buffer")
"""Kinds of slots that are results of the whole step."""


@dataclass(frozen=True)
class Slots:
    """The arguments and results of a stage function.

    cuts: by slot, the split into micro-batches. maxima: names of values that are combined by
    maximum. unshared: names of sums that are in memory of their own.
    """

    function: StageFunction
    stage: int
    arguments: tuple[Slot, ...]
    results: tuple[Slot, ...]
    cuts: Mapping[Key, Cut]
    maxima: frozenset[str]
    unshared: frozenset[str]

    @staticmethod
    def of(function: StageFunction) -> Slots:
        axis = micro_axis(function)
        cuts: dict[Key, Cut] = {}
        maxima: set[str] = set()
        arguments, results = tuple(function.arguments), tuple(function.results)
        for slot in (*arguments, *results):
            sharding = sharding_held(function, slot)
            if sharding.reduction == "max":
                maxima.add(slot.name)
            seat = sharding.seat_of(axis.name) if axis is not None else None
            if seat is not None:
                dim, placement = seat
                block = block_of(sharding.dims[dim], placement)
                cuts[slot.kind, slot.name] = dim, placement.size, block
        sums = (slot for slot in results if slot.kind == "sum")
        unshared = frozenset(slot.name for slot in sums if is_unshared(slot.value))
        stage = function.stage
        return Slots(function, stage, arguments, results, cuts, frozenset(maxima), unshared)

    @cached_property
    def given(self) -> tuple[Key, ...]:
        """Keys of the step's arguments that are passed to this stage function as they are."""
        return tuple(
            (slot.kind, slot.name)
            for slot in self.arguments
            if slot.kind in _OF_STEP and (slot.kind, slot.name) not in self.cuts
        )

    @cached_property
    def made(self) -> tuple[Slot, ...]:
        """Slots of the arguments that neither `given` nor `kept` lists."""
        given = {*self.given, *(("kept", name) for name in self.kept)}
        return tuple(slot for slot in self.arguments if (slot.kind, slot.name) not in given)

    @cached_property
    def kept(self) -> tuple[str, ...]:
        return tuple(slot.name for slot in self.arguments if slot.kind == "kept")

    @cached_property
    def adding(self) -> tuple[Key, ...]:
        """Keys of results that the function can add in place to an earlier total."""
        return tuple(
            (slot.kind, slot.name)
            for slot in self.results
            if slot.kind == "grad" or (slot.kind == "sum" and slot.name not in self.maxima)
        )


def slots_of_runs(program: Program, runs: Iterable[Run]) -> dict[str, Slots]:
    """Return the slots of each function that runs, by name, in the order of first runs."""
    functions = functions_of(program)
    names = dict.fromkeys(run.function for run in runs)
    return {name: Slots.of(functions[name]) for name in names}


def last_reads(runs: Sequence[Run], functions: Mapping[str, Slots]) -> list[frozenset[Place]]:
    """Return for each run the held values that it reads and that no later run reads."""
    read: set[Place] = set()
    reads: list[frozenset[Place]] = []
    for run in reversed(runs):
        slots = functions[run.function]
        taken = {
            (slots.stage, slot.name, run.micro_batch if slot.kind == "kept" else None)
            for slot in slots.arguments
            if slot.kind in HELD
        }
        reads.append(frozenset(taken - read))
        read |= taken
    return reads[::-1]


class StagedStep(ABC, Generic[V]):
    """One step, with the values that its stages hold between runs of their functions.

    given: the step's arguments. kept: values of one micro-batch, or of the whole step. totals:
    combined results of the micro-batches so far, or (of slots of kind `part`) a list with one of
    each; owned: keys of totals in memory of their own, which may be added to in place.
    """

    def __init__(self, given: Mapping[Key, V]) -> None:
        self.given = given
        self.kept: dict[Place, V] = {}
        self.totals: dict[Place, list[V]] = {}
        self.cuts: dict[Place, Cut] = {}
        self.owned: set[Place] = set()

    @abstractmethod
    def results_of(self, slots: Slots, run: Run, arguments: dict[Key, V]) -> Mapping[Key, V]:
        """Run a function; may remove arguments from the dict, to free them."""

    @abstractmethod
    def give(self, slots: Slots, slot: Slot, value: V) -> None:
        """Receive a result of the whole step."""

    @abstractmethod
    def scalar(self, number: int, dtype: torch.dtype) -> V:
        """Return a micro-batch's index, `number`, as a value of the backend with `dtype`."""

    @abstractmethod
    def taken(self, value: V, cut: Cut, number: int) -> V:
        """Return the slice of a whole batch's value that micro-batch `number` reads."""

    @abstractmethod
    def merged(self, parts: list[V], cut: Cut) -> V:
        """Invert `taken`: merge the slices of all micro-batches."""

    @abstractmethod
    def combined(self, place: Place, total: V, term: V, *, is_max: bool) -> V:
        """Add a term to a total of earlier micro-batches, or take the maximum."""

    def run(self, run: Run, slots: Slots, last: frozenset[Place]) -> None:
        """Run a function. last: the held values that no later run reads."""
        stage, number = slots.stage, run.micro_batch
        results = self.results_of(slots, run, self._arguments(slots, number, last))
        for slot in slots.results:
            kind, name = key = slot.kind, slot.name
            if kind == "kept":
                self.kept[stage, name, number] = results[key]
            elif kind in _RETURNED:
                self.give(slots, slot, results[key])
            else:
                self._keep(slot, results[key], slots)

    def _arguments(self, slots: Slots, number: int | None, last: frozenset[Place]) -> dict[Key, V]:
        """Return a function's arguments, with the buffers that it adds gradients and sums to."""
        stage, kept, given = slots.stage, self.kept, self.given
        arguments = {key: given[key] for key in slots.given}
        for name in slots.kept:
            place = stage, name, number
            arguments["kept", name] = kept.pop(place) if place in last else kept[place]
        for slot in slots.made:
            arguments[slot.kind, slot.name] = self._argument(slot, slots, number, last)
        for key in slots.adding:
            place = stage, key[1], None
            if key[0] == "grad" and key in given:
                arguments[key] = given[key]
            elif key[0] == "sum" and place in self.owned:
                arguments[key] = self.totals[place][0]
        return arguments

    def _argument(self, slot: Slot, slots: Slots, number: int | None, last: frozenset[Place]) -> V:
        if slot.kind in _OF_STEP:
            return self._part(slot, self.given[slot.kind, slot.name], slots, number)
        if slot.kind == "micro_batch":
            return self.scalar(number or 0, dtype_of_value(slot.value))
        place = slots.stage, slot.name, None
        is_last = place in last
        if slot.kind == "whole":
            value = self.kept.pop(place) if is_last else self.kept[place]
            return self._part(slot, value, slots, number)
        parts = self.totals.pop(place) if is_last else self.totals[place]
        return self.merged(parts, self.cuts[place]) if place in self.cuts else parts[0]

    def _part(self, slot: Slot, value: V, slots: Slots, number: int | None) -> V:
        cut = slots.cuts.get((slot.kind, slot.name))
        return value if cut is None or number is None else self.taken(value, cut, number)

    def _keep(self, slot: Slot, value: V, slots: Slots) -> None:
        """Keep a result of a function, or combine it with earlier micro-batches' results."""
        place = slots.stage, slot.name, None
        if slot.kind == "whole":
            self.kept[place] = value
        elif slot.kind == "part":
            self.totals.setdefault(place, []).append(value)
            self.cuts[place] = slots.cuts[slot.kind, slot.name]
        elif slot.kind == "sum" and place in self.totals:
            total = self.totals[place][0]
            if total is not value:  # else the function has added to it
                is_max = slot.name in slots.maxima
                self.totals[place] = [self.combined(place, total, value, is_max=is_max)]
        else:
            self.totals[place] = [value]
            if slot.name in slots.unshared:
                self.owned.add(place)
