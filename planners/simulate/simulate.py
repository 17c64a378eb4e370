"""Simulation of a program's schedule on a cluster, for one rank of its mesh.

Every rank runs the same program, so one rank stands for all. Its ops run in program order on the
compute stream; an asynchronous collective runs on the stream of its mesh axes (see `streams`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from xdsl.ir import Operation, SSAValue

from shardweave.ir.dialects.annotations import copy_of, layer_of, phase_of
from shardweave.ir.dialects.dist import DistOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import is_staged
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.links import HOST_LINK
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.cost.model import CostModel, kind_of
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.simulate.simulation import Axes, LowerBound, Simulation
from shardweave.planners.simulate.streams import Flight, Streams
from shardweave.planners.simulate.timeline import COMPUTE, Event


def simulate(
    program: Program,
    cluster: Cluster | str | Path,
    mesh: Mesh | None = None,
    *,
    optimizer_multiplier: float | None = 0.0,
    precision: str = "",
) -> Simulation:
    """Simulate one step of a local program, or of a program without a mesh on one device.

    cluster: a Cluster, a preset's name or a YAML file. mesh: by default the program's own.
    optimizer_multiplier: bytes of optimizer state per byte of parameters (2 for Adam); None: Adam's
    in `precision`, a plan's precision.
    Raises ValueError for a program that is not partitioned, or a mesh that does not fit.
    """
    model = CostModel(find_cluster(cluster), _mesh_of(program, mesh))
    return simulate_by(
        model, program, optimizer_multiplier=optimizer_multiplier, precision=precision
    )


def simulate_by(
    model: CostModel,
    program: Program,
    *,
    optimizer_multiplier: float | None = 0.0,
    precision: str = "",
) -> Simulation:
    """Simulate as `simulate` does, by a cost model, which caches prices of ops."""
    _mesh_of(program, model.mesh)
    cluster = model.cluster
    run = _Run(model, Streams(cluster.overlap_slowdown, cluster.link_slowdown))
    op_end_s: list[float] = []
    for op in program.ops:
        run.step(op)
        op_end_s.append(run.streams.now_s)
    run.finish()
    time_s = run.streams.now_s
    events = [*run.events, *(run.event_of(op, flight) for op, flight in run.flights)]
    bound = LowerBound(run.compute_s, dict(run.link_s), run.critical_path_s)
    return Simulation(
        cluster=cluster,
        mesh=model.mesh,
        time_s=time_s,
        lower_bound_s=bound.seconds,
        compute_s=run.compute_s,
        slowdown_s=run.streams.lost_s,
        host_s=run.host_wait_s,
        communication_s=dict(run.communication_s),
        exposed_s=dict(run.exposed_s),
        bound=bound,
        memory=peak_memory(program, optimizer_multiplier=optimizer_multiplier, precision=precision),
        events=tuple(sorted(events, key=lambda event: event.start_s)),
        op_end_s=tuple(op_end_s),
    )


def _mesh_of(program: Program, mesh: Mesh | None) -> Mesh:
    if is_staged(program):
        raise ValueError(
            "the program has stages, which this function does not simulate; use sw.simulate or "
            "`shardweave simulate`."
        )
    own = program.mesh
    if mesh is not None and own is not None and mesh.on_parts_of(own) != own:
        raise ValueError(
            f"the program is partitioned for mesh {own}, but mesh {mesh} is given; leave the "
            "mesh out, or partition the program for that mesh."
        )
    chosen = own or mesh or Mesh()
    if not program.is_local and chosen.num_devices > 1:
        raise ValueError(
            f"the program is not partitioned for its mesh {chosen}; first run the passes "
            "apply-plan, propagate-shardings and insert-collectives on it."
        )
    return chosen


@dataclass(eq=False)
class _Run:
    """State of a simulation after the ops simulated so far."""

    model: CostModel
    streams: Streams
    events: list[Event] = field(default_factory=list[Event])
    flights: list[tuple[DistOp, Flight]] = field(default_factory=list[tuple[DistOp, Flight]])
    in_flight: dict[Operation, Flight] = field(default_factory=dict[Operation, Flight])
    compute_s: float = 0.0
    host_s: float = 0.0
    host_wait_s: float = 0.0
    communication_s: defaultdict[Axes, float] = field(default_factory=lambda: defaultdict(float))
    exposed_s: defaultdict[Axes, float] = field(default_factory=lambda: defaultdict(float))
    link_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ready_s: dict[SSAValue, float] = field(default_factory=dict[SSAValue, float])
    critical_path_s: float = 0.0

    def step(self, op: Operation) -> None:
        kind = kind_of(op)
        if self.model.issue_s and kind in ("compute", "collective", "start"):
            self._issue()
        arrives_s = self._compute(op)
        if kind == "wait":
            start = cast(DistOp, op.operands[0].owner)
            self._wait(start, self.in_flight.pop(start, None))
        elif kind in ("collective", "start"):
            arrives_s += self._start(cast(DistOp, op))
        for result in op.results:
            self.ready_s[result] = arrives_s
        if arrives_s > self.critical_path_s:
            self.critical_path_s = arrives_s

    def _issue(self) -> None:
        """Let the host issue the next op. The host never waits; the compute stream waits for it."""
        self.host_s += self.model.issue_s
        if self.streams.now_s < self.host_s:
            self.host_wait_s += self.host_s - self.streams.now_s
            self.streams.idle_until(self.host_s)

    def _compute(self, op: Operation) -> float:
        """Run an op on the compute stream; returns its earliest end (s) by dependencies alone."""
        work_s = self.model.op_time_s(op)
        ready = self.ready_s
        earliest_s = max((ready.get(value, 0.0) for value in op.operands), default=0.0) + work_s
        if work_s:
            start_s = self.streams.now_s
            self.compute_s += work_s
            end_s = self.streams.compute(work_s)
            self.events.append(_event(op, COMPUTE, start_s, end_s))
        return earliest_s

    def _start(self, op: DistOp) -> float:
        """Start a collective, and wait for it if it blocks; returns the seconds that it takes."""
        seconds = self.model.collective_time_s(op)
        if seconds == 0:
            return 0.0
        axes, ring = self.model.stream_of(op), self.model.ring(op)
        links = ring.links
        # Copies to and from the host have engines of their own.
        is_copy = HOST_LINK in links
        slowdown = 1.0 if is_copy else self.model.cluster.slowdown_beside(is_inside=ring.nodes == 1)
        flight = self.streams.start(seconds, (axes, *links), slowdown=slowdown)
        self.communication_s[axes] += seconds
        for link in links:
            self.link_s[link] += seconds
        self.flights.append((op, flight))
        if kind_of(op) == "start":
            self.in_flight[op] = flight
        else:
            self._wait(op, flight)
        return seconds

    def _wait(self, start: DistOp, flight: Flight | None) -> None:
        if flight is None:  # over axes of size 1
            return
        before_s = self.streams.now_s
        waited_s = self.streams.wait(flight) - before_s
        if waited_s:
            self.exposed_s[self.model.stream_of(start)] += waited_s

    def finish(self) -> None:
        for start, flight in self.in_flight.items():
            self._wait(cast(DistOp, start), flight)

    def event_of(self, op: DistOp, flight: Flight) -> Event:
        stream = ",".join(self.model.stream_of(op))
        return _event(op, stream, flight.start_s, flight.end_s)


def _event(op: Operation, stream: str, start_s: float, end_s: float) -> Event:
    return Event(op.name, layer_of(op), phase_of(op), copy_of(op) or (), stream, start_s, end_s)
