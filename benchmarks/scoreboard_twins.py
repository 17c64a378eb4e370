"""The least regret of who prices messages: a bound that measured rows set themselves.

Two runs of one group are *twins* if the one cuts layers over twice as many devices and takes twice
the samples in a micro-batch, on half of the replicas. Each device then does the same arithmetic,
and the first also sends larger messages; it spares what half of the parameters take at the end of
the step. An *oracle* that knows every measured step, but gives no run less than its twin's step
with the messages' time by the profile, is right wherever rows agree with that. The regret of its
choice is what no predictor avoids that prices messages by the profile.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardweave.benchmarks.runs.predict import ADAM_BYTES, micro_batch_of, placed, policy_of
from shardweave.benchmarks.runs.rows import MeasuredRun
from shardweave.benchmarks.scoreboard_score import Timed, groups_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.memory.rematerialize import CHECKPOINT
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.model import CostModel

ITEMSIZE = 2
"""Bytes of an activation, and of a gradient, in 16 bits."""


def oracle_regret(
    runs: Sequence[MeasuredRun], cluster: Cluster, share: float = 1.0
) -> float | None:
    """The oracle's worst regret over groups; None without groups. cluster: of the runs' device.
    share: of the profile's time that messages are given."""
    timed = [(run, run.step_s) for run in runs if run.step_s]
    groups = groups_of(timed)
    return max((_regret(rows, cluster, share) for rows in groups), default=None)


def _regret(rows: Sequence[Timed], cluster: Cluster, share: float) -> float:
    known = {_degrees(run): run for run, _ in rows}
    least: dict[tuple[int, ...], float] = {}
    for run, measured_s in sorted(rows, key=lambda row: row[0].tensor):
        degrees = _degrees(run)
        twin = known.get(_twin(run))
        least[degrees] = measured_s
        if twin is not None:
            more_s = share * (messages_s(run, cluster) - messages_s(twin, cluster))
            more_s += end_s(run, cluster) - end_s(twin, cluster)
            least[degrees] = max(measured_s, least[_degrees(twin)] + more_s)
    chosen = min(rows, key=lambda row: least[_degrees(row[0])])[0]
    return chosen.step_s / min(step for _, step in rows)


def _degrees(run: MeasuredRun) -> tuple[int, ...]:
    return run.data, run.tensor, run.pipeline, micro_batch_of(run)


def _twin(run: MeasuredRun) -> tuple[int, ...]:
    """The degrees of a run's twin with half of its tensor degree; of none that is a run if odd."""
    micro = micro_batch_of(run)
    if run.tensor % 2 or micro % 2:
        return ()
    return run.data * 2, run.tensor // 2, run.pipeline, micro // 2


def messages_s(run: MeasuredRun, cluster: Cluster) -> float:
    """Seconds of a step's all-reduces over `tensor`: two a layer, forward, backward, and where a
    layer is computed again."""
    passes = 3 if policy_of(run) == CHECKPOINT else 2
    micro = micro_batch_of(run)
    slots = run.batch // (run.data * micro) + run.pipeline - 1
    size = micro * run.seq * run.hidden * ITEMSIZE
    each_s = _links(run, cluster).sync_time_s("all_reduce", ("tensor",), size)
    return slots * run.layers / run.pipeline * 2 * passes * each_s if run.tensor > 1 else 0.0


def end_s(run: MeasuredRun, cluster: Cluster) -> float:
    """Seconds of a step's end: gradients' all-reduce and Adam, of a device's parameters."""
    weights = 4 * run.hidden**2 + 2 * run.hidden * run.ffn
    count = (run.layers / run.pipeline * weights + run.vocab * run.hidden) / run.tensor
    adam_s = (
        ADAM_BYTES
        * count
        / min(device.memory_bandwidth_bytes_s for device in cluster.device_types(1))
    )
    if run.data == 1:
        return adam_s
    links = _links(run, cluster)
    return adam_s + links.sync_time_s("all_reduce", ("data",), ITEMSIZE * count)


def _links(run: MeasuredRun, cluster: Cluster) -> CostModel:
    return CostModel(placed(run, cluster), Mesh(data=run.data, tensor=run.tensor))
