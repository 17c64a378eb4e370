"""Streams of one rank over time: compute, and one for each group of collectives; links are shared.

Collectives are served in the order in which they are started: each begins when its stream and all
of its links are free of earlier ones. So a faster link never delays anything, which would not be
certain if concurrent collectives divided a link's bandwidth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(eq=False)
class Flight:
    """A collective in flight. resources: the stream and links that it occupies. start_s, end_s:
    times at which it begins to move data, and ends. slowdown: factor on the time of concurrent
    compute."""

    resources: tuple[Hashable, ...]
    left_s: float
    slowdown: float = 1.0
    start_s: float = -1.0
    end_s: float = -1.0

    @property
    def arrived(self) -> bool:
        return self.end_s >= 0


_Flight = TypeVar("_Flight", bound=Flight)


@dataclass(eq=False)
class Streams:
    """State of a rank's compute stream and of its collectives in flight.

    slowdown: factor on compute time while a collective without a slowdown of its own moves data (of
    several, the largest counts). link_slowdown: factor on the time of collectives while the device
    computes. now_s: current time of the compute stream. lost_s: seconds that compute lost to
    concurrent collectives.
    """

    slowdown: float = 1.0
    link_slowdown: float = 1.0
    now_s: float = 0.0
    lost_s: float = 0.0
    _active: list[Flight] = field(default_factory=list[Flight])
    _queues: dict[Hashable, deque[Flight]] = field(default_factory=dict[Hashable, "deque[Flight]"])

    def compute(self, work_s: float) -> float:
        """Run an op of `work_s` seconds at full speed; returns the time of its end."""
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
        """Let the compute stream idle until time `end_s`, while collectives go on."""
        while self._active and self.now_s < end_s:
            first_s = min(flight.left_s for flight in self._active)
            elapsed_s = min(first_s, end_s - self.now_s)
            self._advance(elapsed_s, elapsed_s, elapsed_s == first_s)
        self.now_s = max(self.now_s, end_s)

    def start(
        self, seconds: float, resources: Iterable[Hashable], *, slowdown: float | None = None
    ) -> Flight:
        """Start a collective that occupies `resources`, a stream and links, for `seconds`.
        slowdown: None for `self.slowdown`."""
        if seconds == math.inf:
            raise ValueError("a link of the cluster has no bandwidth; give it one above 0.")
        beside = self.slowdown if slowdown is None else slowdown
        return self.launch(Flight(tuple(resources), seconds, beside))

    def launch(self, flight: _Flight) -> _Flight:
        """Begin a collective as soon as its resources are free; returns it."""
        is_free = True
        for resource in flight.resources:
            queue = self._queues.setdefault(resource, deque())
            is_free = is_free and not queue
            queue.append(flight)
        if is_free:
            self._begin(flight)
        return flight

    def wait(self, flight: Flight) -> float:
        """Let the compute stream idle until a collective has ended; returns the time."""
        while not flight.arrived:
            first_s = min(active.left_s for active in self._active)
            self._advance(first_s, first_s, True)
        self.now_s = max(self.now_s, flight.end_s)
        return self.now_s

    def _begin(self, flight: Flight) -> None:
        flight.start_s = self.now_s
        if flight.left_s <= 0:
            self._finish([flight])
        else:
            self._active.append(flight)

    def _advance(self, elapsed_s: float, moved_s: float, some_arrive: bool) -> None:
        """Let `elapsed_s` pass, in which each active collective does `moved_s` of its work."""
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
        """Free the resources of ended collectives, and begin those that waited for them."""
        for flight in done:
            flight.end_s = self.now_s
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
