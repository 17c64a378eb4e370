"""Simulated cost of an optimizer's update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from shardweave.ir.program.program import Program
from shardweave.planners.cost.quantity import bytes_text, seconds_text

FOR_THE_REST = "AdamW"
"""Optimizer class for other parameters, if the requested class only updates matrices."""


@dataclass(frozen=True)
class UpdateCost:
    """Cost of an optimizer's update; each number is the maximum over ranks.

    state_bytes: optimizer state. temporary_bytes: memory during the update alone: full values that
    a rank gathers, temporaries of one parameter's update, and states that the host keeps. states:
    state bytes by rank. host_s: time of copies from the host and back that compute does not hide.
    """

    optimizer: str
    compute_s: float = 0.0
    communication_s: float = 0.0
    sent_bytes: int = 0
    messages: int = 0
    state_bytes: int = 0
    temporary_bytes: int = 0
    states: tuple[int, ...] = field(default=(), repr=False)
    host_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s + self.host_s

    def record(self) -> dict[str, Any]:
        """The costs as JSON data, without `states`."""
        numbers = asdict(self) | {"time_s": self.seconds}
        return {name: number for name, number in numbers.items() if name != "states"}

    def line(self) -> str:
        """Return the update's line in a summary."""
        sent = f"{self.messages} messages of {bytes_text(self.sent_bytes)}"
        kept = f"state {bytes_text(self.state_bytes)}, temporary {bytes_text(self.temporary_bytes)}"
        times = f"{seconds_text(self.compute_s)} compute, {seconds_text(self.communication_s)}"
        sent += f", {seconds_text(self.host_s)} of copies to the host" if self.host_s else ""
        return f"{seconds_text(self.seconds)} of {self.optimizer}: {times} in {sent}; {kept}"


def update_of(program: Program, name: str) -> str:
    """Name of the optimizer whose update is simulated: `name`; without one, AdamW if the host keeps
    optimizer states, as their copies take time; else empty."""
    return name or (FOR_THE_REST if program.has_host_states else "")


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """Find a class of torch.optim by name, ignoring case. Raises ValueError for another name."""
    named = {key.lower(): value for key, value in vars(torch.optim).items()}
    cls = named.get(name.lower())
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        raise ValueError(
            f"optimizer '{name}' is not in torch.optim; use the name of a class there, such as "
            "AdamW or Muon."
        )
    return cls
