"""The fit of a cluster's numbers to measured steps.

Each number is scaled by a factor. The logarithm of a run's predicted over its measured step is
nearly linear in the factors' logarithms, so a ridge regression finds them: least squares with a
penalty on each logarithm (Hoerl and Kennard 1970). A number that no run depends on stays as it is.
The penalty with the least leave-one-out error is taken; a linear fit needs no refit for it, since
the error of a run left out is its residual over one less its leverage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardweave.planners.cost.cluster import (
    Cluster,
    CollectiveTimes,
    DeviceType,
    Island,
    MeasuredRing,
    NodeType,
    Points,
)
from shardweave.planners.cost.quantity import counted

Floats = NDArray[np.float64]
Linked = TypeVar("Linked", NodeType, Island, MeasuredRing)


class Timed(Protocol):
    """A run with the measured seconds of its step; 0 if none was measured."""

    @property
    def step_s(self) -> float: ...


Run = TypeVar("Run", bound=Timed)
Predict = Callable[[Run, Cluster], float]
"""Seconds of a run's step on a cluster. Clusters of one name are equal."""

KNOBS: Mapping[str, str] = {
    "products": "efficiency of matrix products and of attention",
    "memory": "memory_bandwidth_bytes_s",
    "host": "issue_s and overhead_s",
    "links": "bandwidth within a node, of islands and rings too",
    "network": "nic_bandwidth_bytes_s",
    "starting": "start_overhead_s and message_overhead_s",
}
"""Scaled quantities, by the name of their factor."""

STEP = 0.1
"""Change of a factor's logarithm for a finite difference: large enough that a step time which is
a maximum of two terms shows the slopes of both."""

ROUNDS = 2
"""Number of linearised fits; each starts from the factors of the one before."""

PENALTIES = tuple(10.0**power for power in range(-4, 2))
"""Ridge penalties to try, the largest first: weights of squared logarithms of factors."""


@dataclass(frozen=True)
class Calibration:
    """Result of a fit. cluster: the fitted cluster. factors: by knob. before, after: mean absolute
    error over the runs, before and after the fit. left_out: mean error of each run under a fit to
    the other runs. unmoved: knobs that no run depends on."""

    cluster: Cluster
    factors: Mapping[str, float]
    runs: int
    before: float
    after: float
    left_out: float
    unmoved: tuple[str, ...]


def calibrate(cluster: Cluster, runs: Sequence[Run], predict: Predict[Run]) -> Calibration:
    """Fit a cluster's numbers to runs with a measured step. Time: `ROUNDS` times a prediction of
    each run for each knob and one more. Raises ValueError for fewer than three such runs."""
    timed = [run for run in runs if run.step_s > 0]
    if len(timed) < 3:
        raise ValueError(
            f"only {counted(len(timed), 'run')} with a measured step time (step_ms), too few to "
            "fit a cluster's numbers; give three runs or more, of different sizes and degrees."
        )
    names = list(KNOBS)
    logs: Floats = np.zeros(len(names))
    first: Floats | None = None
    slopes, left_out = np.zeros((len(timed), len(names))), math.inf
    for _ in range(ROUNDS):
        errors, slopes = _linearised(cluster, timed, predict, logs)
        first = errors if first is None else first
        # Errors as they were at factors of one, by the slopes here.
        logs, left_out = _ridge(errors - slopes @ logs, slopes)
    factors = dict(zip(names, np.exp(logs).tolist(), strict=True))
    refined = scaled(cluster, factors, most=1.0)
    after = _log_errors(refined, timed, predict)
    assert first is not None, "there is a round at least"
    return Calibration(
        cluster=refined,
        factors=factors,
        runs=len(timed),
        before=_mean_error(first),
        after=_mean_error(after),
        left_out=left_out,
        unmoved=tuple(
            name
            for name, row in zip(names, slopes.T, strict=True)
            if not np.any(np.abs(row) > 1e-6)
        ),
    )


def _linearised(
    cluster: Cluster, runs: Sequence[Run], predict: Predict[Run], logs: Floats
) -> tuple[Floats, Floats]:
    """Return the runs' errors at the current factors, and their slopes: runs x knobs. Run by run,
    so that its program is made once."""
    names = list(KNOBS)
    here = dict(zip(names, np.exp(logs).tolist(), strict=True))
    clusters = [_named(scaled(cluster, here), "here")]
    for name in names:
        moved = {**here, name: here[name] * math.exp(STEP)}
        clusters.append(_named(scaled(cluster, moved), name))
    rows = [[math.log(predict(run, variant) / run.step_s) for variant in clusters] for run in runs]
    table = np.array(rows)
    return table[:, 0], (table[:, 1:] - table[:, :1]) / STEP


def _named(cluster: Cluster, knob: str) -> Cluster:
    numbers = [device.flops for device in cluster.devices.values()], cluster
    return replace(cluster, name=f"{cluster.name} {knob} {hash(repr(numbers))}")


def _log_errors(cluster: Cluster, runs: Sequence[Run], predict: Predict[Run]) -> Floats:
    named = _named(cluster, "refined")
    return np.array([math.log(predict(run, named) / run.step_s) for run in runs])


def _ridge(errors: Floats, slopes: Floats) -> tuple[Floats, float]:
    """Return the factors' logarithms, and the mean leave-one-out error."""
    best: tuple[Floats, float] | None = None
    for penalty in reversed(PENALTIES):
        inverse = np.linalg.inv(slopes.T @ slopes + len(errors) * penalty * np.eye(slopes.shape[1]))
        logs = -inverse @ slopes.T @ errors
        leverage = np.einsum("ij,jk,ik->i", slopes, inverse, slopes)
        left_out = _mean_error((errors + slopes @ logs) / (1 - leverage))
        if best is None or left_out < best[1]:
            best = logs, left_out
    assert best is not None, "there are penalties"
    return best


def _mean_error(log_errors: Floats) -> float:
    return float(np.abs(np.exp(log_errors) - 1).mean())


def scaled(cluster: Cluster, factors: Mapping[str, float], *, most: float = math.inf) -> Cluster:
    """Multiply a cluster's numbers by the factors of `KNOBS` (1 for a missing factor). most: the
    largest efficiency; cluster files cannot have one above 1."""

    def of(name: str) -> float:
        return factors.get(name, 1.0)

    def points(curve: Points) -> Points:
        return tuple((work, min(most, share * of("products"))) for work, share in curve)

    def device(of_type: DeviceType) -> DeviceType:
        return replace(
            of_type,
            efficiency=points(of_type.efficiency),
            attention_efficiency=points(of_type.attention_efficiency),
            memory_bandwidth_bytes_s=of_type.memory_bandwidth_bytes_s * of("memory"),
            issue_s=of_type.issue_s * of("host"),
            overhead_s=of_type.overhead_s * of("host"),
        )

    def linked(part: Linked) -> Linked:
        return replace(part, bandwidth_bytes_s=part.bandwidth_bytes_s * of("links"))

    def node(of_type: NodeType) -> NodeType:
        return replace(
            linked(of_type),
            islands=tuple(map(linked, of_type.islands)),
            rings=tuple(map(linked, of_type.rings)),
            nic_bandwidth_bytes_s=of_type.nic_bandwidth_bytes_s * of("network"),
        )

    def table(times: CollectiveTimes) -> CollectiveTimes:
        share = of("links" if times.nodes == 1 else "network")
        return replace(times, points=tuple((size, s / share) for size, s in times.points))

    return replace(
        cluster,
        devices={name: device(d) for name, d in cluster.devices.items()},
        nodes=tuple(node(n) for n in cluster.nodes),
        collectives=tuple(map(table, cluster.collectives)),
        start_overhead_s=cluster.start_overhead_s * of("starting"),
        message_overhead_s=cluster.message_overhead_s * of("starting"),
    )
