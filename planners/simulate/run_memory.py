"""Memory of a staged step on each rank, run by run, as when the step is executed.

A value that a function leaves for later ones is freed after its last reader; a function's other
values are freed within its run. Sums over micro-batches are added to in place. A received message
takes memory from when its receive is posted, which is ahead of its use; a sent one until another
message shows that it has arrived.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardweave.ir.dialects.dist import is_on_host
from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.program.messages import ComingMessage, coming_messages
from shardweave.ir.program.program import Program, Slot
from shardweave.ir.program.staged import (
    HELD,
    RECEIVES_AHEAD,
    Run,
    StageFunction,
    StagePlaces,
    functions_of,
    runs_of,
)
from shardweave.ir.program.storage import adds_its_result, storage_of
from shardweave.planners.cost.memory import Storage, held_by, storages_of


@dataclass(frozen=True)
class PlaceMemory:
    """Peak bytes on a rank during one run, without parameters and inputs.

    parts: bytes at the peak: `activations`, `gradients` (with other sums over micro-batches) and
    `communication` (messages between stages).
    """

    peak_bytes: int = 0
    parts: Mapping[str, int] = field(default_factory=dict[str, int])


def memory_of_places(program: Program) -> list[PlaceMemory]:
    """Peak memory of each coordinate on the stage axis."""
    return [fullest(runs) for runs in memory_of_runs(program)]


def fullest(runs: Iterable[PlaceMemory]) -> PlaceMemory:
    """Return the (first) run with the most bytes; for no runs, one of 0 bytes."""
    return max(runs, key=lambda run: run.peak_bytes, default=PlaceMemory())


def memory_of_runs(program: Program) -> list[list[PlaceMemory]]:
    """Peak memory of each run, by coordinate on the stage axis. Takes time linear in the ops, and
    in the values that the runs read."""
    functions = functions_of(program)
    owners: dict[_Name, _Owner] = {}
    for function in functions.values():
        _find_owners(function, owners)
    works: dict[FuncOp, _Work] = {}
    profiles: dict[str, _Profile] = {}
    for name, function in functions.items():
        if function.function not in works:
            works[function.function] = _Work(function)
        profiles[name] = _Profile(function, works[function.function], owners)
    places = StagePlaces.of(program)
    runs = runs_of(program)
    coming = coming_messages(program)
    return [
        _Rank(place, runs, profiles, places, coming.get(place, {})).play()
        for place in range(program.needed_mesh().num_stages)
    ]


def parameters_of_places(program: Program) -> list[int]:
    """Bytes of the stored parameter shards, by coordinate on the stage axis."""
    places = StagePlaces.of(program)
    held: list[dict[str, int]] = [{} for _ in range(program.needed_mesh().num_stages)]
    for function in functions_of(program).values():
        for slot in function.arguments:
            if slot.kind == "param":
                for place in places.of_stage[function.stage]:
                    held[place][slot.name] = _size(slot.value)
    return [sum(sizes.values()) for sizes in held]


def devices_of_places(program: Program) -> list[list[int]]:
    """Devices at each coordinate on the stage axis, in the order of their ranks."""
    mesh = program.needed_mesh()
    axis, devices = mesh.stage_axis, program.devices
    devices_at: list[list[int]] = [[] for _ in range(mesh.num_stages)]
    for rank in range(mesh.num_devices):
        place = mesh.coordinates(rank)[axis.name] if axis else 0
        devices_at[place].append(devices[rank] if devices else rank)
    return devices_at


_Name = tuple[int, str, str]
"""Key of a function's result: stage; kind, if the step returns it (else ""); name."""


@dataclass(frozen=True, eq=False)
class _Owner:
    """An allocation that one stage's values share. is_kept: each micro-batch has its own."""

    size: int
    part: str
    is_kept: bool


def _name_of(slot: Slot, stage: int) -> _Name:
    return stage, "" if slot.kind in HELD else slot.kind, slot.name


def _find_owners(function: StageFunction, owners: dict[_Name, _Owner]) -> None:
    """Add to `owners` the allocation of each result of a function: a new one or an argument's."""
    stage, mesh = function.stage, function.mesh
    owner_of: dict[SSAValue, _Owner] = {
        slot.value: owners[_name_of(slot, stage)]
        if slot.kind in HELD
        else _Owner(0, "activations", False)
        for slot in function.arguments
    }
    for slot in function.results:
        root = storage_of(slot.value, mesh)
        if root not in owner_of:
            part = "gradients" if slot.kind in ("sum", "grad") else "activations"
            owner_of[root] = _Owner(_size(root), part, slot.kind == "kept")
        owners[_name_of(slot, stage)] = owner_of[root]


class _Work:
    """Memory that the ops of a function take; equal for copies of the function in other stages.

    last: index of the op that last reads each storage. created, freed: bytes that each op allocates
    and frees. added: bytes of terms of sums over micro-batches, by the op that last reads the term;
    products: bytes of the terms that this op itself can add to the sum. alone: bytes of each sent
    value; 0 if an argument or result holds it.
    """

    def __init__(self, function: StageFunction) -> None:
        self.storages, created = storages_of(function)
        storages = self.storages
        last: dict[Storage, int] = {}
        for index, op in enumerate(function.ops):
            for value in (*op.results, *held_by(op)):
                last[storages[value]] = index
        self.last = last
        self.created = [sum(s.size for s in group) for group in created]
        self.freed: Counter[int] = Counter()
        for storage in (s for group in created for s in group):
            self.freed[storage.last_use] += storage.size
        ops = list(function.ops)
        self.added, self.products = Counter[int](), Counter[int]()
        for slot in function.results:
            if slot.kind == "sum" and storages[slot.value] in last:
                index, size = last[storages[slot.value]], storages[slot.value].size
                self.added[index] += size
                if slot.value.owner is ops[index] and adds_its_result(ops[index]):
                    self.products[index] += size
        held = {storages[slot.value] for slot in (*function.arguments, *function.results)}
        self.alone = {
            op.value: 0 if storages[op.value] in held else storages[op.value].size
            for op in function.sends
        }


class _Profile:
    """Memory profile of a run of a function.

    takes: results of earlier functions that it reads. last: index of the op that last reads each.
    leaves: its results; keeps: those that one micro-batch reads. sends, receives: stage and bytes
    of each message; of sent ones also those bytes that no argument or result holds.
    """

    def __init__(
        self, function: StageFunction, work: _Work, owners: Mapping[_Name, _Owner]
    ) -> None:
        self.stage = stage = function.stage
        self.work, self.owners = work, owners
        self.takes = {_name_of(s, stage): s for s in function.arguments if s.kind in HELD}
        self.leaves = {_name_of(s, stage): s for s in function.results}
        self.keeps = {name: slot for name, slot in self.leaves.items() if slot.kind == "kept"}
        self.last = {
            name: work.last[work.storages[slot.value]]
            for name, slot in self.takes.items()
            if work.storages[slot.value] in work.last
        }
        messages = [(m.is_sent, m.other, _size(m.value), m.value) for m in function.messages]
        self.sends = [(to, size, work.alone[v]) for is_sent, to, size, v in messages if is_sent]
        self.receives = [(source, size) for is_sent, source, size, _ in messages if not is_sent]
        self._peaks: dict[tuple[frozenset[_Name], bool], int] = {}

    def peak(self, dying: frozenset[_Name], *, adds: bool) -> int:
        """Peak bytes of a run, beyond the bytes in use before it. dying: values that it reads last
        and frees. adds: whether its terms are added to existing sums."""
        if (dying, adds) not in self._peaks:
            work = self.work
            gone = work.freed + work.added if adds else Counter(work.freed)
            for owner, names in _by_owner(dying, self.owners).items():
                gone[max(self.last.get(name, 0) for name in names)] += owner.size
            now = most = 0
            for index, size in enumerate(work.created):
                now += size
                most = max(most, now - work.products[index] if adds else now)
                now -= gone[index]
            self._peaks[dying, adds] = most
        return self._peaks[dying, adds]


def _size(value: SSAValue) -> int:
    """Bytes of a value on the device."""
    return 0 if is_on_host(value) else num_bytes(tensor_type_of(value))


def _by_owner(names: Iterable[_Name], owners: Mapping[_Name, _Owner]) -> dict[_Owner, list[_Name]]:
    names_of: dict[_Owner, list[_Name]] = {}
    for name in names:
        names_of.setdefault(owners[name], []).append(name)
    return names_of


class _Rank:
    """Memory of the ranks at one coordinate.

    readers: number of reads still to come of each allocation. inbox: by sending coordinate, its
    messages in order: bytes, and the number of our messages that it had received. sent: by
    coordinate, bytes of the messages that are not known to have arrived; arrived: number that have.
    here: bytes of messages between two stages of this rank.
    """

    def __init__(
        self,
        place: int,
        runs: Sequence[Run],
        profiles: Mapping[str, _Profile],
        places: StagePlaces,
        coming: Mapping[int, Sequence[ComingMessage]],
    ) -> None:
        self.profiles = profiles
        self.place, self.places = place, places
        self.runs = [run for run in runs if run.at == place]
        self.inbox = {
            at: deque((_size(m.message.value), m.seen) for m in messages)
            for at, messages in coming.items()
        }
        self.readers: Counter[tuple[_Owner, int | None]] = Counter()
        self.left: set[_Name] = set()
        self.ran: set[_Profile] = set()
        self.parts: Counter[str] = Counter()
        self.sent: dict[int, deque[int]] = {}
        self.arrived: Counter[int] = Counter()
        self.here = 0
        self.seen: list[PlaceMemory] = []

    def play(self) -> list[PlaceMemory]:
        for run, names in zip(self.runs, self._last_reads(), strict=True):
            self._run(run, names)
        return self.seen

    def _last_reads(self) -> list[frozenset[_Name]]:
        """For each run, the values that no later run reads."""
        read: set[tuple[_Name, int | None]] = set()
        reads: list[frozenset[_Name]] = []
        for run in reversed(self.runs):
            taken = {
                (name, run.micro_batch if slot.kind == "kept" else None)
                for name, slot in self.profiles[run.function].takes.items()
            }
            reads.append(frozenset(name for name, _ in taken - read))
            read |= taken
        return reads[::-1]

    def _run(self, run: Run, last: frozenset[_Name]) -> None:
        profile, number = self.profiles[run.function], run.micro_batch
        adds = all(name in self.left for name, slot in profile.leaves.items() if slot.kind == "sum")
        fresh = self._leave(profile, number)
        self._receive(profile, number)
        dying = frozenset(
            name
            for owner, names in _by_owner(last, profile.owners).items()
            if self.readers[self._key(owner, number)] == len(names)
            for name in names
        )
        self._look(profile.peak(dying, adds=adds))
        for owner in fresh:
            self.parts[owner.part] += owner.size
        self.readers.subtract(self._key(profile.owners[name], number) for name in last)
        for owner in _by_owner(dying, profile.owners):
            self.parts[owner.part] -= owner.size
        self._send(profile, run)

    def _leave(self, profile: _Profile, number: int | None) -> list[_Owner]:
        """Count a run's results as kept for later runs; returns the allocations that are new."""
        fresh: dict[_Owner, None] = {}
        # A function leaves most results in its first run alone: sums, and what it reads again.
        again = profile in self.ran
        self.ran.add(profile)
        for name, slot in (profile.keeps if again else profile.leaves).items():
            if slot.kind != "kept" and name in self.left:
                continue
            owner = profile.owners[name]
            key = self._key(owner, number)
            if not self.readers[key]:
                fresh[owner] = None
            self.left.add(name)
            self.readers[key] += 1
        return list(fresh)

    def _key(self, owner: _Owner, number: int | None) -> tuple[_Owner, int | None]:
        return owner, number if owner.is_kept else None

    def _look(self, beside: int) -> None:
        """Update the peak with the bytes in use during a run. beside: the run's own peak."""
        posted = sum(
            size for coming in self.inbox.values() for size, _ in islice(coming, RECEIVES_AHEAD)
        )
        sent = sum(sum(sizes) for sizes in self.sent.values())
        parts = dict(self.parts)
        parts["activations"] = parts.get("activations", 0) + beside
        parts["communication"] = posted + sent + self.here
        held = {part: size for part, size in parts.items() if size}
        self.seen.append(PlaceMemory(sum(held.values()), held))

    def _receive(self, profile: _Profile, number: int | None) -> None:
        """Take a run's messages out of the inbox, and drop sent ones now known to have arrived."""
        for source, size in profile.receives:
            place = self.places.source(source, number)
            if place == self.place:
                self.here -= size
            else:
                _, seen = self.inbox[place].popleft()
                for _ in range(seen - self.arrived[place]):
                    self.sent[place].popleft()
                self.arrived[place] = max(seen, self.arrived[place])

    def _send(self, profile: _Profile, run: Run) -> None:
        for to, size, alone in profile.sends:
            for place in self.places.goals(run, profile.stage, to):
                if place == self.place:
                    self.here += size
                else:
                    self.sent.setdefault(place, deque()).append(alone)
