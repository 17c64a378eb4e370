"""Memory that a program needs on one device, by the liveness of its values in program order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.dist import AllReduceOp, StartedOp, WaitOp, is_on_host
from shardweave.ir.dialects.types import dtype_of_value, num_bytes, tensor_type_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.storage import shared_operand
from shardweave.planners.plan.plan_parts import PRECISIONS

PARTS = (
    "parameters",
    "optimizer",
    "gradients",
    "buffers",
    "inputs",
    "activations",
    "communication",
    "update",
)

ADAM_STATE = 2.0
"""Bytes of optimizer state per byte of parameters: two moments in the parameters' dtype."""

MIXED_BYTES = 16
"""Bytes of a parameter, its gradient and its optimizer state in mixed precision."""

_PART_OF_KIND = {"param": "parameters", "buffer": "buffers", "input": "inputs", "tangent": "inputs"}


@dataclass(frozen=True)
class Memory:
    """The most bytes that live at once, and their parts at that moment.

    Views share the memory of what they view; a value is freed after its last use, arguments and
    results never. `communication` is what has been started and not waited for. host_bytes: the most
    that the step keeps on the host at once; they are no part of the others.
    """

    peak_bytes: int
    parts: Mapping[str, int]
    host_bytes: int = 0


@dataclass(eq=False)
class Storage:
    """The memory of a value and its views. last_use: the op behind which nothing reads it, by its
    number; that behind the last one for results, -1 where nothing ever does. size: bytes on the
    device; host_size: on the host."""

    size: int
    part: str
    last_use: int = -1
    host_size: int = 0


@dataclass(eq=False)
class _Tally:
    """Bytes alive by part, and the largest total so far."""

    parts: Counter[str] = field(default_factory=Counter[str])
    total: int = 0
    peak: int = 0
    at_peak: dict[str, int] = field(default_factory=dict[str, int])
    host: int = 0
    host_peak: int = 0

    def add(self, part: str, size: int) -> None:
        self.parts[part] += size
        self.total += size

    def keep_on_host(self, size: int) -> None:
        self.host += size
        self.host_peak = max(self.host, self.host_peak)

    def look(self) -> None:
        if self.total > self.peak:
            self.peak = self.total
            self.at_peak = dict(self.parts)


def check_plan_precision(precision: str) -> None:
    """Raises ValueError for a precision that no plan can have."""
    if precision not in PRECISIONS:
        shown = ", ".join(filter(None, PRECISIONS))
        raise ValueError(
            f"precision is '{precision}'; use one of {shown}, or leave it out to take the "
            "parameters' own."
        )


def state_bytes(
    parameter_bytes: float,
    itemsize: int,
    precision: str = "",
    optimizer_multiplier: float | None = None,
) -> dict[str, float]:
    """Bytes by part of parameters, their gradients and the state of their optimizer.

    itemsize: bytes of an element as the program has it. Adam has two moments in the parameters'
    dtype; with a mixed precision a parameter takes 16 bytes in all, whatever its dtype: of 16 bits,
    beside its gradient a copy and two moments of 32 bits (Rajbhandari et al. 2020, Sec. 3.1).
    Without a precision those of 16 bits have one. optimizer_multiplier: bytes of optimizer state
    per byte of parameters, in place of Adam's.
    """
    if optimizer_multiplier is None:
        mixed = MIXED_BYTES / itemsize - 2
        optimizer_multiplier = mixed if is_mixed(itemsize, precision) else ADAM_STATE
    optimizer = optimizer_multiplier * parameter_bytes
    return {"parameters": parameter_bytes, "gradients": parameter_bytes, "optimizer": optimizer}


def is_mixed(itemsize: int, precision: str) -> bool:
    """Say whether parameters of so many bytes are trained in mixed precision."""
    return precision.endswith("-mixed") or (not precision and itemsize == 2)


def peak_memory(
    program: Program,
    *,
    optimizer_multiplier: float | None = 0.0,
    precision: str = "",
    update_bytes: int = 0,
) -> Memory:
    """Peak bytes of a step on one device.

    optimizer_multiplier: bytes of optimizer state per byte of parameters; None: those of Adam in
    this precision (`state_bytes`). update_bytes: of what lives during the update, behind the step.
    """
    tally = _Tally()
    for tally in _walk(program, optimizer_multiplier, precision):
        tally.look()
    tally.add("update", update_bytes)
    tally.look()
    parts = {part: tally.at_peak.get(part, 0) for part in PARTS}
    return Memory(tally.peak, parts, tally.host_peak)


def memory_over_time(
    program: Program, *, optimizer_multiplier: float | None = 0.0, precision: str = ""
) -> list[dict[str, int]]:
    """Bytes by part before the first op and while each op runs; as for `peak_memory`."""
    return [
        {part: tally.parts[part] for part in PARTS}
        for tally in _walk(program, optimizer_multiplier, precision)
    ]


def _walk(program: Program, optimizer_multiplier: float | None, precision: str) -> Iterator[_Tally]:
    """The tally, always the same, before the first op and while each op runs."""
    storages, created = storages_of(program)
    tally = _Tally()
    optimizer = 0.0
    for value in program.function.body.block.args:
        part, size = storages[value].part, storages[value].size
        tally.add(part, size)
        if part == "parameters":
            itemsize = dtype_of_value(value).itemsize
            state = state_bytes(size, itemsize, precision, optimizer_multiplier)
            optimizer += state["optimizer"]
    tally.add("optimizer", round(optimizer))
    yield tally
    dying: dict[int, list[Storage]] = {}
    for storage in (s for group in created for s in group):
        dying.setdefault(storage.last_use, []).append(storage)
    in_flight: set[Storage] = set()
    for index, op in enumerate(program.ops):
        starts = isinstance(op, StartedOp)
        for storage in created[index]:
            tally.add("communication" if starts else storage.part, storage.size)
            tally.keep_on_host(storage.host_size)
            if starts:
                in_flight.add(storage)
        yield tally
        if isinstance(op, WaitOp):
            _land(op, storages, in_flight, tally)
        for storage in dying.get(index, ()):
            tally.add(storage.part, -storage.size)
            tally.keep_on_host(-storage.host_size)


def _land(
    op: Operation, storages: Mapping[SSAValue, Storage], in_flight: set[Storage], tally: _Tally
) -> None:
    for storage in {storages[value] for value in op.operands} & in_flight:
        in_flight.discard(storage)
        tally.add("communication", -storage.size)
        tally.add(storage.part, storage.size)


def storages_of(program: Program) -> tuple[dict[SSAValue, Storage], list[list[Storage]]]:
    """The memory behind each value, and what each op creates."""
    mesh = program.mesh
    storages: dict[SSAValue, Storage] = {}
    for slot in program.arguments:
        part = _PART_OF_KIND.get(slot.kind, "inputs")
        storages[slot.value] = Storage(num_bytes(tensor_type_of(slot.value)), part)
    created: list[list[Storage]] = []
    for index, op in enumerate(program.ops):
        created.append([])
        for position, result in enumerate(op.results):
            source = shared_operand(op, position, mesh)
            if source is None:
                sizes = num_bytes(tensor_type_of(result)), 0
                size, host_size = sizes[::-1] if is_on_host(result) else sizes
                storage = Storage(size, "activations", host_size=host_size)
                created[-1].append(storage)
            else:
                storage = storages[source]
            storages[result] = storage
            storage.last_use = index
        for value in held_by(op):
            storages[value].last_use = index
    for slot in program.results:
        storage = storages[slot.value]
        storage.last_use = len(created)
        if slot.kind == "grad" and storage.part == "activations":
            storage.part = "gradients"
    return storages, created


def held_by(op: Operation) -> Iterator[SSAValue]:
    """Yield values that live until an op is done: of a wait, also the collective's operands."""
    yield from op.operands
    if isinstance(op, WaitOp):
        start = op.operands[0].owner
        # An all-reduce works on a copy, which is its result.
        if isinstance(start, Operation) and not isinstance(start, AllReduceOp):
            yield from start.operands
