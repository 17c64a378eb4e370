"""Parts of a plan that are not shardings, and strict readers of their JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Any, cast

from shardweave.ir.suggest import did_you_mean

PAPERS_RECOMPUTE = ("none", "layer", "after-communication")
"""Recomputation policies from which the planners and baselines of papers choose."""

PRODUCTS = "after-products"
"""The policy of `rematerialize` that keeps the results of products, attention and collectives."""

RECOMPUTE = (*PAPERS_RECOMPUTE, PRODUCTS)
"""Policies of `rematerialize` that a plan may name."""

STATES = "states"
OFFLOAD = ("none", "inputs", "all", STATES, f"inputs+{STATES}", f"all+{STATES}")
"""Choices of what the host keeps: values of `offload-activations`, optimizer states, or both."""


def offloaded(choice: str) -> tuple[str, bool]:
    """Split a choice of `OFFLOAD` into values of `offload-activations`, or `none`, and whether
    optimizer states are on the host."""
    return choice.removesuffix(STATES).removesuffix("+") or "none", choice.endswith(STATES)


AXONN_SCHEDULES = ("axonn-a", "axonn-ab", "axonn-abc")
SCHEDULES = ("", "blocking", "sub-batch", "cross-pass", "in-order", "list", *AXONN_SCHEDULES)
"""Schedules of `overlap-communication`; empty: as "in-order"."""

PIPELINE_SCHEDULES = (
    "1f1b", "gpipe", "interleaved-1f1b", "zero-bubble", "zero-bubble-h2", "zero-bubble-v",
    "dualpipe-v", "list",
)  # fmt: skip
"""Orders of micro-batches in a pipeline (`planners/schedules`)."""

PRECISIONS = ("", "fp32", "bf16-mixed", "fp16-mixed", "bf16-true")
"""Precisions that a plan may have. "" follows the parameters' dtype: 16-bit parameters are assumed
to be trained in mixed precision, with 32-bit master copies, because small updates are lost in 16
bits. `bf16-true` means that there are no master copies."""

SOURCES = ("", "estimated", "simulated", "measured")
"""Sources of predicted numbers: a formula (estimated), the simulator, or runs (measured)."""


class PlanError(ValueError):
    """Raised for a plan that is malformed, or made for another model or mesh."""


@dataclass(frozen=True)
class Pipeline:
    """Pipeline stages, each on devices of its own.

    stages: names or patterns of the layers of each stage, in order, such as `h.0`. micro_batches:
    number per step, on each replica. devices: the device type of each stage, if types differ;
    several types in one stage are joined by `+`. ranks: the device numbers of each stage, replica
    by replica; empty: in order. schedule: one of `PIPELINE_SCHEDULES`. shares: for stages at
    several coordinates of the stage axis, by stage, the micro-batches that each coordinate runs;
    with chunks, for the first chunk only. Empty: each stage is at one coordinate.
    """

    stages: tuple[tuple[str, ...], ...]
    micro_batches: int = 1
    devices: tuple[str, ...] = ()
    ranks: tuple[tuple[int, ...], ...] = ()
    schedule: str = PIPELINE_SCHEDULES[0]
    shares: tuple[tuple[int, ...], ...] = ()

    @property
    def num_places(self) -> int:
        """Number of ranks on the stage axis that `shares` lists; without shares, of stages."""
        return sum(map(len, self.shares)) if self.shares else len(self.stages)


@dataclass(frozen=True)
class SplitProjection:
    """A fused projection that is computed as several linear maps of equal size.

    parts: number of these maps. used: text of the sharding in which ops read the weight of each
    map; empty: propagation decides.
    """

    parts: int
    used: str = ""


@dataclass(frozen=True)
class Predicted:
    """The predicted time and memory of a step on one device.

    time_s: the whole step, in seconds. compute_s: compute within it. communication_s: by mesh axes,
    joined by commas. exposed_s: communication that no compute hides. bubble_s: waiting for other
    pipeline stages. update_s: the optimizer's update, which `time_s` includes; 0 if the plan names
    no optimizer. memory_bytes: by kind (parameters, gradients, optimizer, activations, workspace),
    in the stage that takes the largest share of its devices' memory. capacity_bytes: memory of the
    smallest device of that stage. source: one of `SOURCES`.
    """

    time_s: float
    compute_s: float = 0.0
    communication_s: Mapping[str, float] = field(default_factory=dict[str, float])
    exposed_s: float = 0.0
    bubble_s: float = 0.0
    memory_bytes: Mapping[str, float] = field(default_factory=dict[str, float])
    capacity_bytes: float = 0.0
    source: str = ""
    update_s: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return sum(self.memory_bytes.values())

    @property
    def fits(self) -> bool:
        """True if the step fits into the memory of its device."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True)
class Candidate:
    """One of the best plans that were compared: a name that lists its choices, and why it lost."""

    name: str
    predicted: Predicted
    reason: str = ""


Reader = Callable[[object, str], Any]
"""Checks a JSON value and converts it to a plan's value; the text locates it in errors."""


def _of_type(wanted: type, what: str, *also: type) -> Reader:
    def read(value: object, where: str) -> Any:
        if type(value) not in (wanted, *also):  # a bool is no int
            raise PlanError(f"{where} must be {what}.")
        return value

    return read


def at_least(least: int, most: float = math.inf) -> Reader:
    """Make a reader of integers from `least` to `most`, both included."""
    span = f", {least} or more" if most == math.inf else f" from {least} to {most}"

    def read(value: object, where: str) -> Any:
        if type(value) is not int or not least <= value <= most:
            raise PlanError(f"{where} must be a whole number{span}.")
        return value

    return read


def factor(value: object, where: str) -> float:
    """Read a JSON number of 1 or more. Raises PlanError for anything else."""
    if type(value) not in (int, float) or not 1 <= cast("float", value) < math.inf:
        raise PlanError(f"{where} must be a number, 1 or more.")
    return float(cast("float", value))


def one_of(words: Iterable[object]) -> Reader:
    """Make a reader that accepts only the values in `words`."""
    known = tuple(words)

    def read(value: object, where: str) -> Any:
        if value not in known:
            shown = ", ".join(str(word) or '""' for word in known)
            raise PlanError(f"{where} is {value!r}; use one of {shown}.")
        return value

    return read


def list_of(reader: Reader, what: str) -> Reader:
    """Make a reader of a JSON list as a tuple. what: noun for its items in errors."""

    def read(value: object, where: str) -> Any:
        if not isinstance(value, list | tuple):
            raise PlanError(f"{where} must be a list of {what}.")
        items = cast("list[object]", value)
        return tuple(reader(x, f"{where}[{index}]") for index, x in enumerate(items))

    return read


def object_of(reader: Reader, what: str) -> Reader:
    """Make a reader of a JSON object whose values `reader` reads. what: their noun in errors."""

    def read(value: object, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise PlanError(f"{where} must be an object of {what}.")
        items = cast("Mapping[str, object]", value).items()
        return {key: reader(x, f"{where}['{key}']") for key, x in items}

    return read


def optional(reader: Reader) -> Reader:
    """Make a reader that accepts null as None, and passes other values to `reader`."""
    return lambda value, where: None if value is None else reader(value, where)


text = _of_type(str, "a string")
number = _of_type(float, "a number", int)


def record_of(kind: type[Any], readers: Mapping[str, Reader]) -> Reader:
    """Make a reader of a JSON object as dataclass `kind`. readers: one for each field."""
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}

    def read(value: object, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise PlanError(f"{where} must be an object.")
        data = cast("Mapping[str, object]", value)
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise PlanError(
                f"{where}: the keys {unknown} are unknown; {did_you_mean(unknown[0], known)}the "
                f"keys can be {', '.join(sorted(known))}."
            )
        for name, f in known.items():
            has_default = f.default is not MISSING or f.default_factory is not MISSING
            if name not in data and not has_default:
                raise PlanError(f"{where}: the key '{name}' is missing; add it.")
        return kind(**{key: readers[key](x, f"{where}.{key}") for key, x in data.items()})

    return read


projection = record_of(SplitProjection, {"parts": at_least(2), "used": text})


def _checked_pipeline(value: object, where: str) -> Pipeline:
    read = cast("Pipeline", _pipeline(value, where))
    if not read.stages or not all(read.stages):
        raise PlanError(f"{where}.stages must be lists of layer names, none of them empty.")
    if read.shares:
        check_shares(read.shares, len(read.stages), read.micro_batches, f"{where}.shares")
    for key in ("devices", "ranks"):
        count = len(getattr(read, key))
        if count not in (0, len(read.stages)):
            raise PlanError(
                f"{where}.{key} has {count} entries, expected one for each of the "
                f"{len(read.stages)} stages, or an empty list."
            )
    return read


def check_shares(
    shares: Sequence[Sequence[int]], stages: int, micro_batches: int, where: str = "shares"
) -> None:
    """Raise PlanError, which names `where`, unless shares (by stage, the number of micro-batches on
    each of its ranks) match these numbers of stages and micro-batches."""
    if not shares or stages % len(shares):
        raise PlanError(
            f"{where} has {len(shares)} entries, which do not divide {stages} stages; give one "
            "entry for each stage, or for each coordinate of the stage axis if ranks hold "
            "several stages."
        )
    for stage, own in enumerate(shares):
        if not own or min(own) < 1 or sum(own) != micro_batches:
            raise PlanError(
                f"{where}[{stage}] is {list(own)}; list the number of micro-batches of each rank "
                f"of the stage, each 1 or more, {micro_batches} in all."
            )


_pipeline = record_of(
    Pipeline,
    {
        "stages": list_of(list_of(text, "layer names"), "stages"),
        "micro_batches": at_least(1),
        "devices": list_of(text, "device types"),
        "ranks": list_of(list_of(at_least(0), "ranks"), "stages"),
        "schedule": one_of(PIPELINE_SCHEDULES),
        "shares": list_of(list_of(at_least(1), "micro-batches"), "stages"),
    },
)
predicted: Reader = record_of(
    Predicted,
    {
        "time_s": number,
        "compute_s": number,
        "communication_s": object_of(number, "seconds"),
        "exposed_s": number,
        "bubble_s": number,
        "update_s": number,
        "memory_bytes": object_of(number, "bytes"),
        "capacity_bytes": number,
        "source": one_of(SOURCES),
    },
)
candidate: Reader = record_of(Candidate, {"name": text, "predicted": predicted, "reason": text})
pipeline: Reader = _checked_pipeline


def without_defaults(value: Any) -> dict[str, Any]:
    """Return a dataclass's fields that are neither empty nor at their defaults, for JSON."""
    empty = {f.name: f.default if f.default is not MISSING else None for f in fields(value)}
    return {key: x for key, x in asdict(value).items() if x != empty[key] and x not in ({}, ())}
