"""The events of a pipelined step: in which order stages work, when, and who waits for whom.

Every place on the axis of stages is one device that stands for all of its ranks. It has a stage, or
several (chunks), and runs its tasks in a given order, one at a time. Messages run beside, on
`DeviceStreams`: those between stages that share a NIC run in turn, in the order in which they
were sent, and so do collectives; but neither waits for the other, as a library of collectives sends
both at once, and what passes between stages is small beside gradients. Compute
is slowed down by messages beside it that the place sends or receives, and these by compute, as on
the streams of one rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from shardweave.benchmarks.stages.device_streams import DeviceFlight, DeviceStreams
from shardweave.planners.plan.zero import DATA_AXIS
from shardweave.planners.schedules.one_forward_one_backward import interleaved
from shardweave.planners.simulate.timeline import COMPUTE, Event

PIPELINE_AXIS = "pipeline"


INTERLEAVED = "interleaved-1f1b"


class Task(NamedTuple):
    """The forward or backward pass of one micro-batch through one stage, of which the device may
    have several: `chunk` of `n` devices' is stage `chunk * n + place`."""

    is_forward: bool
    micro_batch: int
    chunk: int = 0


def order_of(
    schedule: str, place: int, places: int, micro_batches: int, chunks: int = 1
) -> list[Task]:
    """What a device runs, first to last.

    gpipe: all forward passes, then all backward (Huang et al. 2019). 1f1b: as many forward passes
    as there are stages after it, then one of each in turn, then what is left (Narayanan et al.
    2021, Sec. 2.2). interleaved-1f1b: of several chunks (`planners.schedules`).
    """
    if schedule == INTERLEAVED and chunks > 1:
        return _interleaved(places, micro_batches, chunks)[place]
    forward = [Task(True, number) for number in range(micro_batches)]
    backward = [Task(False, number) for number in range(micro_batches)]
    if schedule == "gpipe":
        return forward + backward
    ahead = min(places - 1 - place, micro_batches)
    found = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        found += (one, other)
    return found + backward[micro_batches - ahead :]


@lru_cache(maxsize=4)
def _interleaved(places: int, micro_batches: int, chunks: int) -> list[list[Task]]:
    return [
        [Task(one.kind == "F", one.micro_batch, one.stage // places) for one in row]
        for row in interleaved(places, micro_batches, chunks)
    ]


def most_in_flight(tasks: Sequence[Task], sizes: Sequence[int] = (1,)) -> int:
    """The most micro-batches whose activations a device holds at once, or what they are of, by
    chunk, in all.

    From the start of the forward to the end of the backward pass: min(S - s, m) of m micro-batches
    on stage s of S in 1f1b, all m in gpipe.
    """
    most = now = 0
    for task in tasks:
        size = sizes[task.chunk]
        now += size if task.is_forward else -size
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
    """Why a place stood still, in seconds: for messages of an axis, or for other stages.

    slowdown_s: what its compute lost to messages beside it.
    """

    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bubble_s: float = 0.0
    slowdown_s: float = 0.0


@dataclass(frozen=True)
class Played:
    """time_s: of the step. waits: by place; sent_s counts what it takes part in or receives."""

    time_s: float
    waits: tuple[Waits, ...]
    events: tuple[Event, ...]


def play(
    stages: Sequence[StageTimes],
    orders: Sequence[Sequence[Task]],
    slowdown: float = 1.0,
    link_slowdown: float = 1.0,
    node_slowdown: float | None = None,
    *,
    blocking: bool = False,
) -> Played:
    """Run the tasks of all stages. Each step of each message and block is one event.

    orders: by place; where stages are more, each has as many chunks, placed round and round.
    slowdown: how many times longer compute takes beside messages. link_slowdown: they beside it.
    node_slowdown: the first for messages without links, which stay within a node; None: the same.
    blocking: a place waits until what it hands to another stage is there.
    """
    node_slowdown = slowdown if node_slowdown is None else node_slowdown
    run = _Run(stages, orders, DeviceStreams(slowdown, link_slowdown), node_slowdown, blocking)
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
"""What a place does; it yields what it waits for."""


@dataclass(eq=False)
class _Run:
    """What was played so far. done: what has arrived. began_s: when messages were sent."""

    stages: Sequence[StageTimes]
    orders: Sequence[Sequence[Task]]
    streams: DeviceStreams = field(default_factory=DeviceStreams)
    node_slowdown: float = 1.0
    blocking: bool = False
    keys: dict[DeviceFlight, Hashable] = field(default_factory=dict[DeviceFlight, Hashable])
    done: set[Hashable] = field(default_factory=set[Hashable])
    began_s: dict[Hashable, float] = field(default_factory=dict[Hashable, float])
    sent: list[tuple[DeviceFlight, Event]] = field(default_factory=list[tuple[DeviceFlight, Event]])
    events: list[Event] = field(default_factory=list[Event])
    waits: list[Waits] = field(default_factory=list[Waits])

    def play(self) -> list[float]:
        """Returns when each place is done."""
        self.waits += (Waits() for _ in self.orders)
        processes = [self._place(number) for number in range(len(self.orders))]
        ends = [0.0] * len(processes)
        ready, waiting = deque(range(len(processes))), defaultdict[Hashable, list[int]](list)
        while ready or waiting:
            while ready:
                place = ready.popleft()
                key = next(processes[place], None)
                if key is None:
                    ends[place] = self.streams.now_s
                else:
                    waiting[key].append(place)
            for flight in self.streams.advance() if waiting else ():
                key = self.keys.pop(flight)
                self.done.add(key)
                ready += waiting.pop(key, ())
        return ends

    def _number(self, place: int, task: Task) -> int:
        """The stage that a task of a place runs."""
        return task.chunk * len(self.orders) + place

    def _place(self, place: int) -> Process:
        overlaps = self.stages[place].overlaps
        tasks = self.orders[place]
        last = {task.chunk: task for task in tasks if not task.is_forward}
        parts = [self._parts(place, task, task == last.get(task.chunk)) for task in tasks]
        follows = dict(pairwise((t, p) for t, found in enumerate(parts) for p in range(len(found))))
        self._gather(place, parts, (0, 0) if overlaps else None)
        for number, task in enumerate(tasks):
            yield from self._receive(place, task)
            start_s = self.streams.now_s
            for index, part in enumerate(parts[number]):
                at = number, index
                if not overlaps:
                    self._gather(place, parts, at)
                if part.gather is not None:
                    yield from self._wait(("gather", place, at), place)
                # Nobody else uses a place's device, so that its compute has no queue.
                self._work(place, at, part)
                if overlaps:
                    self._gather(place, parts, follows.get(at))
                began_s = self.streams.now_s
                yield from self._until(("work", place, at))
                self.waits[place].slowdown_s += self.streams.now_s - began_s - part.seconds
                yield from self._scatter(place, at, part)
            self.events.append(_event(self._number(place, task), task, start_s, self.streams.now_s))
            key = self._send(place, task)
            if self.blocking and key is not None:
                yield from self._wait(key, place, PIPELINE_AXIS)
        yield from self._finish(place, parts)

    def _parts(self, place: int, task: Task, is_last: bool) -> tuple[TaskPart, ...]:
        times = self.stages[self._number(place, task)]
        if task.is_forward:
            return times.forward
        return times.last_backward if is_last else times.backward

    def _gather(
        self, place: int, parts: Sequence[Sequence[TaskPart]], at: tuple[int, int] | None
    ) -> None:
        """Start to gather the parameters of the part `at` some number, if there is one."""
        if at is None:
            return
        message = parts[at[0]][at[1]].gather
        if message is not None:
            self._collective(("gather", place, at), message, place, "forward")

    def _scatter(self, place: int, at: tuple[int, int], part: TaskPart) -> Process:
        if part.scatter is None:
            return
        key = ("scatter", place, at)
        self._collective(key, part.scatter, place, "backward")
        if not self.stages[place].overlaps:
            yield from self._wait(key, place)

    def _finish(self, place: int, parts: Sequence[Sequence[TaskPart]]) -> Process:
        """Wait for what is still on its way, and synchronise."""
        for number, found in enumerate(parts):
            for index, part in enumerate(found):
                if part.scatter is not None:
                    yield from self._wait(("scatter", place, (number, index)), place)
        chunks = self.stages[place :: len(self.orders)]
        messages = [message for times in chunks for message in times.finish]
        for index, message in enumerate(messages):
            key = ("finish", place, index)
            self._collective(key, message, place, "optimizer")
            yield from self._wait(key, place)

    def _receive(self, place: int, task: Task) -> Process:
        """Wait for what a task needs: until it is sent the place idles, then for the message."""
        number = self._number(place, task)
        source = number - 1 if task.is_forward else number + 1
        if not 0 <= source < len(self.stages):
            return
        key = ("message", number, task[:2])
        start_s = self.streams.now_s
        yield from self._until(key)
        end_s = self.streams.now_s
        sent_s = min(end_s, max(start_s, self.began_s[key]))
        self.waits[place].bubble_s += sent_s - start_s
        self.waits[place].exposed_s[PIPELINE_AXIS] += end_s - sent_s

    def _send(self, place: int, task: Task) -> Hashable | None:
        """Start what a task hands on, and return its key; None if there is nothing."""
        number = self._number(place, task)
        times = self.stages[number]
        message = times.to_next if task.is_forward else times.to_previous
        goal = number + 1 if task.is_forward else number - 1
        if message is None:
            return None
        there = goal % len(self.orders)
        stream = (PIPELINE_AXIS, place, there)
        name = f"stage {number:02} to {goal:02}"
        event = _event(number, task, 0.0, 0.0)._replace(name="send", stream=name)
        resources = (stream, *((PIPELINE_AXIS, link) for link in message.links))
        key = ("message", goal, task[:2])
        flight = self._begin(key, message.seconds, resources, (place, there))
        self.sent.append((flight, event))
        self.waits[there].sent_s[PIPELINE_AXIS] += message.seconds
        return key

    def _collective(
        self, key: tuple[str, Hashable, Hashable], message: Message, place: int, phase: str
    ) -> None:
        resources = ((DATA_AXIS, place), *message.links)
        flight = self._begin(key, message.seconds, resources, (place,))
        name = f"stage {place:02}"
        event = Event(key[0], name, phase, (), f"{name} {DATA_AXIS}", 0.0, 0.0)
        self.sent.append((flight, event))
        self.waits[place].sent_s[DATA_AXIS] += message.seconds

    def _work(self, place: int, at: tuple[int, int], part: TaskPart) -> None:
        key = ("work", place, at)
        self._begin(key, part.seconds, ((COMPUTE, place),), (place,), is_compute=True)

    def _begin(
        self,
        key: Hashable,
        seconds: float,
        resources: tuple[Hashable, ...],
        devices: tuple[Hashable, ...],
        *,
        is_compute: bool = False,
    ) -> DeviceFlight:
        self.began_s[key] = self.streams.now_s
        is_inside = len(resources) == 1  # a stream of its own, and no adapter
        slowdown = self.node_slowdown if is_inside else self.streams.slowdown
        flight = DeviceFlight(resources, seconds, slowdown, devices=devices, is_compute=is_compute)
        self.streams.launch(flight)
        self.keys[flight] = key
        return flight

    def _until(self, key: Hashable) -> Process:
        if key not in self.done:
            yield key

    def _wait(self, key: Hashable, place: int, axis: str = DATA_AXIS) -> Process:
        """Wait for a message of an axis, by default among the replicas, which nothing hides."""
        start_s = self.streams.now_s
        yield from self._until(key)
        self.waits[place].exposed_s[axis] += self.streams.now_s - start_s


def _event(stage: int, task: Task, start_s: float, end_s: float) -> Event:
    phase = "forward" if task.is_forward else "backward"
    name = f"stage {stage:02}"
    return Event(phase, name, phase, (task.micro_batch,), name, start_s, end_s)


def beside_s(
    work_s: float, sent_s: float, slowdown: float, link_slowdown: float
) -> tuple[float, float]:
    """Seconds until work and communication that begin at once are done, and what work loses."""
    both_s = min(work_s * slowdown, sent_s * link_slowdown)
    left_s = max(work_s - both_s / slowdown, sent_s - both_s / link_slowdown)
    return both_s + left_s, both_s - both_s / slowdown
