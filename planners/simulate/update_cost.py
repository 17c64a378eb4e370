"""What an optimizer's update takes, as a simulation says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardweave.planners.cost.quantity import bytes_text, seconds_text


@dataclass(frozen=True)
class UpdateCost:
    """An optimizer's update, of the rank that takes longest, sends most and holds most.

    state_bytes: of what the optimizer keeps. temporary_bytes: of full values during the update.
    """

    optimizer: str
    compute_s: float = 0.0
    communication_s: float = 0.0
    sent_bytes: int = 0
    messages: int = 0
    state_bytes: int = 0
    temporary_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s

    def record(self) -> dict[str, Any]:
        """The numbers as JSON data."""
        return asdict(self) | {"time_s": self.seconds}

    def line(self) -> str:
        """A line of a summary."""
        sent = f"{self.messages} messages of {bytes_text(self.sent_bytes)}"
        kept = f"state {bytes_text(self.state_bytes)}, temporary {bytes_text(self.temporary_bytes)}"
        times = f"{seconds_text(self.compute_s)} compute, {seconds_text(self.communication_s)}"
        return f"{seconds_text(self.seconds)} of {self.optimizer}: {times} in {sent}; {kept}"
