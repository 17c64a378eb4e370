"""The streams of several devices, whose compute and communication slow each other down."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from shardweave.planners.simulate.streams import Flight, Streams


@dataclass(eq=False)
class DeviceFlight(Flight):
    """A message, or the compute of a device. devices: the devices that take part. is_compute:
    whether it stands for compute on them, not communication."""

    devices: tuple[Hashable, ...] = ()
    is_compute: bool = False


@dataclass(eq=False)
class DeviceStreams(Streams):
    """State of all flights of several devices. landed: flights that ended since `advance`."""

    landed: list[DeviceFlight] = field(default_factory=list[DeviceFlight])

    def advance(self) -> list[DeviceFlight]:
        """Let time pass until some flight ends; returns the flights that ended since the last call.

        A device's compute and its communication slow each other down.
        """
        if not self.landed:
            factors = self._factors()
            pairs = list(zip(self._active, factors, strict=True))
            elapsed_s = min(flight.left_s * factor for flight, factor in pairs)
            self.now_s += elapsed_s
            for flight, factor in pairs:
                flight.left_s -= elapsed_s / factor
            self._land()
        landed, self.landed = self.landed, []
        return landed

    def _factors(self) -> list[float]:
        """Factor by which concurrent flights slow down each active flight."""
        active = [flight for flight in self._active if isinstance(flight, DeviceFlight)]
        busy = {device for flight in active if flight.is_compute for device in flight.devices}
        linked: dict[Hashable, float] = {}
        for flight in active:
            if not flight.is_compute:
                for device in flight.devices:
                    linked[device] = max(flight.slowdown, linked.get(device, 1.0))
        return [
            max((linked.get(device, 1.0) for device in flight.devices), default=1.0)
            if flight.is_compute
            else (1.0 if busy.isdisjoint(flight.devices) else self.link_slowdown)
            for flight in active
        ]

    def _finish(self, done: list[Flight]) -> None:
        self.landed += (flight for flight in done if isinstance(flight, DeviceFlight))
        super()._finish(done)
