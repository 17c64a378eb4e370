"""The events of a pipelined step: in which order stages work, when, and who waits for whom.

Every stage is one device that stands for all of its ranks, and runs its tasks in a given order, one
at a time. Messages run beside, on `streams.Streams`: those that share a NIC run in turn, in the
order in which they were sent. Compute is slowed down by messages beside it that the stage sends
or receives, and these by compute, as on the streams of one rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shardweave.planners.cost.streams import Flight, Streams
from shardweave.planners.cost.timeline import COMPUTE, Event
from shardweave.planners.cost.zero import DATA_AXIS

PIPELINE_AXIS = "pipeline"


class Task(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage."""

    is_forward: bool
    micro_batch: int


def order_of(schedule: str, stage: int, num_stages: int, micro_batches: int) -> list[Task]:
    """What a stage runs, first to last.

    gpipe: all forward passes, then all backward (Huang et al. 2019). 1f1b: as many forward passes
    as there are stages after it, then one of each in turn, then what is left (Narayanan et al.
    2021, Sec. 2.2).
    """
    forward = [Task(True, number) for number in range(micro_batches)]
    backward = [Task(False, number) for number in range(micro_batches)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(num_stages - 1 - stage, micro_batches)
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += (one, other)
    return found + backward[micro_batches - ahead :]


def most_in_flight(tasks: Sequence[Task]) -> int:
    """The most micro-batches whose activations a stage holds at once.

    From the start of the forward to the end of the backward pass: min(S - s, m) of m micro-batches
    on stage s of S in 1f1b, all m in gpipe.
    """
    most = now = 0
    for task in tasks:
        now += 1 if task.is_forward else -1
        most = max(most, now)
    return most


@dataclass(frozen=True)
class Message:
    """What is sent. links: that it occupies beside a stream of its own, each for itself."""

    seconds: float
    links: tuple[Hashable, ...] = ()


@dataclass(frozen=True)
class TaskPart:
    """One block's share of a task.

    seconds: of the device, communication within the stage that nothing hides included. gather: of
    the parameters before it. scatter: of the gradients after it.
    """

    seconds: float
    gather: Message | None = None
    scatter: Message | None = None


@dataclass(frozen=True)
class StageTimes:
    """What a stage takes and sends for a micro-batch.

    backward: of all micro-batches but the last, whose is `last_backward`. to_next, to_previous:
    activations and their gradients, None at the ends. finish: after the last task, in order.
    overlaps: parameters are gathered while the block before computes, and gradients scattered while
    later ones do; else the stage waits for both.
    """

    forward: tuple[TaskPart, ...]
    backward: tuple[TaskPart, ...]
    last_backward: tuple[TaskPart, ...]
    to_next: Message | None = None
    to_previous: Message | None = None
    finish: tuple[Message, ...] = ()
    overlaps: bool = False


@dataclass(eq=False)
class Waits:
    """Why a stage stood still, in seconds: for messages of an axis, or for other stages.

    slowdown_s: what its compute lost to messages beside it.
    """

    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bubble_s: float = 0.0
    slowdown_s: float = 0.0


@dataclass(frozen=True)
class Played:
    """time_s: of the step. waits: by stage; sent_s counts what it takes part in or receives."""

    time_s: float
    waits: tuple[Waits, ...]
    events: tuple[Event, ...]


def play(
    stages: Sequence[StageTimes],
    orders: Sequence[Sequence[Task]],
    slowdown: float = 1.0,
    link_slowdown: float = 1.0,
    node_slowdown: float | None = None,
) -> Played:
    """Run the tasks of all stages. Each step of each message and block is one event.

    slowdown: how many times longer compute takes beside messages. link_slowdown: they beside it.
    node_slowdown: the first for messages without links, which stay within a node; None: the same.
    """
    node_slowdown = slowdown if node_slowdown is None else node_slowdown
    run = _Run(stages, orders, Streams(slowdown, link_slowdown), node_slowdown)
    ends = run.play()
    time_s = max(ends)
    for wait, end_s in zip(run.waits, ends, strict=True):
        wait.bubble_s += time_s - end_s
    events = [
        *run.events,
        *(one._replace(start_s=f.start_s, end_s=f.end_s) for f, one in run.sent),
    ]
    return Played(time_s, tuple(run.waits), tuple(sorted(events, key=lambda one: one.start_s)))


Process = Generator[Hashable, None, None]
"""What a stage does; it yields what it waits for."""


@dataclass(eq=False)
class _Run:
    """What was played so far. done: what has arrived. began_s: when messages were sent."""

    stages: Sequence[StageTimes]
    orders: Sequence[Sequence[Task]]
    streams: Streams = field(default_factory=Streams)
    node_slowdown: float = 1.0
    keys: dict[Flight, Hashable] = field(default_factory=dict[Flight, Hashable])
    done: set[Hashable] = field(default_factory=set[Hashable])
    began_s: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    sent: list[tuple[Flight, Event]] = field(default_factory=list[tuple[Flight, Event]])
    events: list[Event] = field(default_factory=list[Event])
    waits: list[Waits] = field(default_factory=list[Waits])

    def play(self) -> list[float]:
        """Returns when each stage is done."""
        self.waits += (Waits() for _ in self.stages)
        processes = [self._stage(number) for number in range(len(self.stages))]
        ends = [0.0] * len(processes)
        ready, waiting = deque(range(len(processes))), dict[Hashable, int]()
        while ready or waiting:
            while ready:
                stage = ready.popleft()
                key = next(processes[stage], None)
                if key is None:
                    ends[stage] = self.streams.now_s
                else:
                    waiting[key] = stage
            for flight in self.streams.advance() if waiting else ():
                key = self.keys.pop(flight)
                self.done.add(key)
                if key in waiting:
                    ready.append(waiting.pop(key))
        return ends

    def _stage(self, stage: int) -> Process:
        times = self.stages[stage]
        tasks = self.orders[stage]
        parts = [self._parts(times, task, task == tasks[-1]) for task in tasks]
        follows = dict(pairwise((t, p) for t, found in enumerate(parts) for p in range(len(found))))
        self._gather(stage, parts, (0, 0) if times.overlaps else None)
        for number, task in enumerate(tasks):
            yield from self._receive(stage, task)
            start_s = self.streams.now_s
            for index, part in enumerate(parts[number]):
                place = number, index
                if not times.overlaps:
                    self._gather(stage, parts, place)
                if part.gather is not None:
                    yield from self._wait(("gather", stage, place), stage)
                # Nobody else uses a stage's device, so that its compute has no queue.
                self._work(stage, place, part)
                if times.overlaps:
                    self._gather(stage, parts, follows.get(place))
                began_s = self.streams.now_s
                yield from self._until(("work", stage, place))
                self.waits[stage].slowdown_s += self.streams.now_s - began_s - part.seconds
                yield from self._scatter(stage, place, part)
            self.events.append(_event(stage, task, start_s, self.streams.now_s))
            self._send(stage, task)
        yield from self._finish(stage, parts)

    def _parts(self, times: StageTimes, task: Task, is_last: bool) -> tuple[TaskPart, ...]:
        if task.is_forward:
            return times.forward
        return times.last_backward if is_last else times.backward

    def _gather(
        self, stage: int, parts: Sequence[Sequence[TaskPart]], place: tuple[int, int] | None
    ) -> None:
        """Start to gather the parameters of the part at `place`, if there is one."""
        if place is None:
            return
        message = parts[place[0]][place[1]].gather
        if message is not None:
            self._collective(("gather", stage, place), message, stage, "forward")

    def _scatter(self, stage: int, place: tuple[int, int], part: TaskPart) -> Process:
        if part.scatter is None:
            return
        key = ("scatter", stage, place)
        self._collective(key, part.scatter, stage, "backward")
        if not self.stages[stage].overlaps:
            yield from self._wait(key, stage)

    def _finish(self, stage: int, parts: Sequence[Sequence[TaskPart]]) -> Process:
        """Wait for what is still on its way, and synchronise."""
        for number, found in enumerate(parts):
            for index, part in enumerate(found):
                if part.scatter is not None:
                    yield from self._wait(("scatter", stage, (number, index)), stage)
        for index, message in enumerate(self.stages[stage].finish):
            key = ("finish", stage, index)
            self._collective(key, message, stage, "optimizer")
            yield from self._wait(key, stage)

    def _receive(self, stage: int, task: Task) -> Process:
        """Wait for what a task needs: until it is sent the stage idles, then for the message."""
        source = stage - 1 if task.is_forward else stage + 1
        if not 0 <= source < len(self.stages):
            return
        key = ("message", stage, task)
        start_s = self.streams.now_s
        yield from self._until(key)
        end_s = self.streams.now_s
        sent_s = min(end_s, max(start_s, self.began_s[key]))
        self.waits[stage].bubble_s += sent_s - start_s
        self.waits[stage].exposed_s[PIPELINE_AXIS] += end_s - sent_s

    def _send(self, stage: int, task: Task) -> None:
        times = self.stages[stage]
        message = times.to_next if task.is_forward else times.to_previous
        goal = stage + 1 if task.is_forward else stage - 1
        if message is None:
            return
        stream = (PIPELINE_AXIS, stage, goal)
        name = f"stage {stage:02} to {goal:02}"
        event = _event(stage, task, 0.0, 0.0)._replace(name="send", stream=name)
        resources = (stream, *message.links)
        key = ("message", goal, task)
        flight = self._begin(key, message.seconds, resources, (stage, goal))
        self.sent.append((flight, event))
        self.waits[goal].sent_s[PIPELINE_AXIS] += message.seconds

    def _collective(
        self, key: tuple[str, Hashable, Hashable], message: Message, stage: int, phase: str
    ) -> None:
        resources = ((DATA_AXIS, stage), *message.links)
        flight = self._begin(key, message.seconds, resources, (stage,))
        name = f"stage {stage:02}"
        event = Event(key[0], name, phase, (), f"{name} {DATA_AXIS}", 0.0, 0.0)
        self.sent.append((flight, event))
        self.waits[stage].sent_s[DATA_AXIS] += message.seconds

    def _work(self, stage: int, place: tuple[int, int], part: TaskPart) -> None:
        key = ("work", stage, place)
        self._begin(key, part.seconds, ((COMPUTE, stage),), (stage,), is_compute=True)

    def _begin(
        self,
        key: Hashable,
        seconds: float,
        resources: tuple[Hashable, ...],
        devices: tuple[Hashable, ...],
        *,
        is_compute: bool = False,
    ) -> Flight:
        self.began_s[key] = self.streams.now_s
        is_inside = len(resources) == 1  # a stream of its own, and no adapter
        flight = self.streams.start(
            seconds,
            resources,
            devices,
            is_compute=is_compute,
            slowdown=self.node_slowdown if is_inside else None,
        )
        self.keys[flight] = key
        return flight

    def _until(self, key: Hashable) -> Process:
        if key not in self.done:
            yield key

    def _wait(self, key: Hashable, stage: int) -> Process:
        """Wait for a message among the replicas, which nothing hides any more."""
        start_s = self.streams.now_s
        yield from self._until(key)
        self.waits[stage].exposed_s[DATA_AXIS] += self.streams.now_s - start_s


def _event(stage: int, task: Task, start_s: float, end_s: float) -> Event:
    phase = "forward" if task.is_forward else "backward"
    name = f"stage {stage:02}"
    return Event(phase, name, phase, (task.micro_batch,), name, start_s, end_s)
