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
    """The peak bytes of a program, and their parts at the peak.

    Views share the memory of the value that they view; a value is freed after its last use,
    arguments and results never. The part `communication` holds the results of collectives in
    flight. host_bytes: the peak of host memory, counted separately.
    """

    peak_bytes: int
    parts: Mapping[str, int]
    host_bytes: int = 0


@dataclass(eq=False)
class Storage:
    """Memory of a value and its views. size: bytes on the device. host_size: bytes on the host.
    last_use: index of the last op that makes or reads it; the number of ops for a result of the
    program, -1 for an argument that nothing reads."""

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
            f"precision '{precision}' is unknown; use one of {shown}, or leave it out to compute "
            "in the dtypes of the parameters."
        )


def state_bytes(
    parameter_bytes: float,
    itemsize: int,
    precision: str = "",
    optimizer_multiplier: float | None = None,
) -> dict[str, float]:
    """Bytes of parameters, their gradients and their optimizer state, by part.

    itemsize: bytes of an element of the parameters in the program. Adam keeps two moments in the
    parameters' dtype. In a mixed precision a parameter takes 16 bytes in all, whatever its dtype:
    in 16 bits it has a 16-bit gradient, a 32-bit copy and two 32-bit moments (Rajbhandari et al.
    2020, Sec. 3.1). precision "" treats 16-bit parameters as mixed. optimizer_multiplier: bytes of
    optimizer state per byte of parameters, in place of Adam's.
    """
    if optimizer_multiplier is None:
        mixed = MIXED_BYTES / itemsize - 2
        optimizer_multiplier = mixed if is_mixed(itemsize, precision) else ADAM_STATE
    optimizer = optimizer_multiplier * parameter_bytes
    return {"parameters": parameter_bytes, "gradients": parameter_bytes, "optimizer": optimizer}


def is_mixed(itemsize: int, precision: str) -> bool:
    """True if parameters with `itemsize` bytes per element are trained in mixed precision."""
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
    this precision (`state_bytes`). update_bytes: temporaries of the optimizer's update afterwards.
    """
    tally = _Tally()
    optimizer = sum(
        state_bytes(
            num_bytes(tensor_type_of(slot.value)),
            dtype_of_value(slot.value).itemsize,
            precision,
            optimizer_multiplier,
        )["optimizer"]
        for slot in program.arguments
        if slot.kind == "param"
    )
    for tally in _walk(program, round(optimizer)):
        tally.look()
    tally.add("update", update_bytes)
    tally.look()
    parts = {part: tally.at_peak.get(part, 0) for part in PARTS}
    return Memory(tally.peak, parts, tally.host_peak)


def memory_over_time(program: Program, optimizer_bytes: int = 0) -> list[dict[str, int]]:
    """Bytes in use by part, before the first op and then during each op; see `peak_memory`."""
    walk = _walk(program, optimizer_bytes)
    return [{part: tally.parts[part] for part in PARTS} for tally in walk]


def _walk(program: Program, optimizer_bytes: int) -> Iterator[_Tally]:
    """Yield one tally, updated in place, before the first op and then for each op while it runs."""
    storages, created = storages_of(program)
    tally = _Tally()
    for value in program.function.body.block.args:
        tally.add(storages[value].part, storages[value].size)
    if program.has_host_states:
        tally.keep_on_host(optimizer_bytes)
    else:
        tally.add("optimizer", optimizer_bytes)
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
    """Map each value to its storage; also list, for each op, the storages that it allocates."""
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
    """Yield the values that an op keeps alive: its operands and, for a wait, the collective's."""
    yield from op.operands
    if isinstance(op, WaitOp):
        start = op.operands[0].owner
        # An all-reduce works on a copy, which is its result.
        if isinstance(start, Operation) and not isinstance(start, AllReduceOp):
            yield from start.operands
