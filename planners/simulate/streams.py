"""The streams of one rank in time: compute, and one per communication group, over shared links.

Collectives are served in the order in which they are started: one begins when its stream and
all of its links are free of those started before it. So a faster link never makes anything
later, which sharing links by time would not promise.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Flight:
    """A collective on its way. start_s, end_s: when it began to move data, and arrived.

    devices: that take part in it, where there are several; is_compute: it is their own work.
    slowdown: how many times longer compute takes beside it.
    """

    resources: tuple[Hashable, ...]
    left_s: float
    devices: tuple[Hashable, ...] = ()
    is_compute: bool = False
    slowdown: float = 1.0
    start_s: float = -1.0
    end_s: float = -1.0

    @property
    def arrived(self) -> bool:
        return self.end_s >= 0


@dataclass(eq=False)
class Streams:
    """The state of a rank after what was issued so far.

    slowdown: how many times longer compute takes while a collective moves data, unless that says
    otherwise (of several the most counts); link_slowdown: and collectives while the device
    computes. now_s: the time of the compute stream. lost_s: what compute has lost to collectives
    beside it. landed: what arrived since this was last emptied.
    """

    slowdown: float = 1.0
    link_slowdown: float = 1.0
    now_s: float = 0.0
    lost_s: float = 0.0
    landed: list[Flight] = field(default_factory=list[Flight])
    _active: list[Flight] = field(default_factory=list[Flight])
    _queues: dict[Hashable, deque[Flight]] = field(default_factory=dict[Hashable, "deque[Flight]"])

    def compute(self, work_s: float) -> float:
        """Run an op that takes `work_s` alone; returns its end."""
        while self._active and work_s > 0:
            first_s = min(flight.left_s for flight in self._active) * self.link_slowdown
            slowdown = max(flight.slowdown for flight in self._active)
            elapsed_s = min(work_s * slowdown, first_s)
            is_last = elapsed_s < first_s
            work_s = 0.0 if is_last else max(0.0, work_s - elapsed_s / slowdown)
            self.lost_s += elapsed_s - elapsed_s / slowdown
            self._advance(elapsed_s, elapsed_s / self.link_slowdown, not is_last)
        self.now_s += work_s
        return self.now_s

    def idle_until(self, end_s: float) -> None:
        """Let the compute stream stand still until a time, while collectives move on."""
        while self._active and self.now_s < end_s:
            first_s = min(flight.left_s for flight in self._active)
            elapsed_s = min(first_s, end_s - self.now_s)
            self._advance(elapsed_s, elapsed_s, elapsed_s == first_s)
        self.now_s = max(self.now_s, end_s)

    def start(
        self,
        seconds: float,
        resources: Iterable[Hashable],
        devices: tuple[Hashable, ...] = (),
        *,
        is_compute: bool = False,
        slowdown: float | None = None,
    ) -> Flight:
        """Start a collective that occupies a stream and links (`resources`) for `seconds`.

        devices, is_compute: see `Flight`, for `advance`. slowdown: None takes that of all.
        """
        if seconds == math.inf:
            raise ValueError("a message takes for ever on the cluster's links; give faster ones.")
        beside = self.slowdown if slowdown is None else slowdown
        flight = Flight(tuple(resources), seconds, devices, is_compute, beside)
        is_free = True
        for resource in flight.resources:
            queue = self._queues.setdefault(resource, deque())
            is_free = is_free and not queue
            queue.append(flight)
        if is_free:
            self._begin(flight)
        return flight

    def wait(self, flight: Flight) -> float:
        """Let the compute stream stand still until a collective has arrived; returns then."""
        while not flight.arrived:
            first_s = min(active.left_s for active in self._active)
            self._advance(first_s, first_s, True)
        self.now_s = max(self.now_s, flight.end_s)
        return self.now_s

    def advance(self) -> list[Flight]:
        """Let time pass until something arrives, if nothing has; returns and forgets all that did.

        For simulations of several devices, whose compute takes flights too: it and what they send
        or receive beside it slow each other down.
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
        """Factors by which each active flight is slowed by those beside it."""
        busy = {device for flight in self._active if flight.is_compute for device in flight.devices}
        linked: dict[Hashable, float] = {}
        for flight in self._active:
            if not flight.is_compute:
                for device in flight.devices:
                    linked[device] = max(flight.slowdown, linked.get(device, 1.0))
        return [
            max((linked.get(device, 1.0) for device in flight.devices), default=1.0)
            if flight.is_compute
            else (1.0 if busy.isdisjoint(flight.devices) else self.link_slowdown)
            for flight in self._active
        ]

    def _begin(self, flight: Flight) -> None:
        flight.start_s = self.now_s
        if flight.left_s <= 0:
            self._finish([flight])
        else:
            self._active.append(flight)

    def _advance(self, elapsed_s: float, moved_s: float, some_arrive: bool) -> None:
        """Let time pass in which every active collective moves on by `moved_s`."""
        self.now_s += elapsed_s
        for flight in self._active:
            flight.left_s -= moved_s
        if some_arrive:
            self._land()

    def _land(self) -> None:
        least_s = min(flight.left_s for flight in self._active)
        # The first to arrive has nothing left but what rounding makes of it.
        done = [flight for flight in self._active if flight.left_s <= max(least_s, 1e-15)]
        self._active = [flight for flight in self._active if flight not in done]
        self._finish(done)

    def _finish(self, done: list[Flight]) -> None:
        """Free what arrived flights occupied, and begin those that waited for it."""
        for flight in done:
            flight.end_s = self.now_s
        self.landed += done
        waiting: dict[Flight, None] = {}
        for flight in done:
            for resource in flight.resources:
                queue = self._queues[resource]
                queue.popleft()
                if queue:
                    waiting[queue[0]] = None
        for flight in waiting:
            if flight.start_s < 0 and all(self._queues[r][0] is flight for r in flight.resources):
                self._begin(flight)
