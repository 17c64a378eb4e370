"""The published data of Oases (arXiv 2305.16121) as chains for the planner and as clusters.

`data/oases_tables.json` holds the paper's tables, `data/oases_profile_3090.csv` the profile that
the authors published with their code; both name their source. The paper's setting: 32 RTX 3090,
sequences of 1024, heads of 64, float32.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardweave.planners.cost.cluster import Cluster, CollectiveTimes, time_at
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import GIB
from shardweave.planners.oases.chain import Chain, ChainBlock, DegreeOption, Matrix, PassTimes

DATA = Path(__file__).resolve().parent / "data"
NUM_DEVICES = 32
SEQ = 1024
BUDGET_BYTES = 0.95 * 24 * GIB
"""What the published planner lets a plan use of a device."""

CLUSTERS = {"3090": "oases-3090", "NVLink3090": "oases-nvlink-3090"}
"""The paper's names of its clusters, and our presets."""

NVLINK_BYTES_S = 45e9
"""What a pair of RTX 3090 on an NVLink bridge sends one way: 80% of the bridge's 56 GB/s."""


@dataclass(frozen=True)
class Row:
    """One line of the profile: milliseconds of blocks, forward and backward; MB of workspace."""

    attn: tuple[float, float]
    mlp: tuple[float, float]
    comm_ms: float
    runtime_mb: float

    @property
    def twice(self) -> Row:
        """The row of twice the batch, without what a larger batch gains."""
        attn, mlp = ((2 * forward, 2 * backward) for forward, backward in (self.attn, self.mlp))
        return Row(attn, mlp, 2 * self.comm_ms, 2 * self.runtime_mb)


@dataclass(frozen=True)
class Model:
    """A model of Table 4: its default degrees and global batch."""

    hidden: int
    layers: int
    tensor: int
    data: int
    batch: int

    def group_batch(self, degree: int) -> int:
        """Samples of one group of `degree` devices; 0 if a sample would have to be shared."""
        return self.batch * degree // NUM_DEVICES


@cache
def tables() -> dict[str, Any]:
    """The paper's tables."""
    return json.loads((DATA / "oases_tables.json").read_text())


@cache
def profile() -> dict[tuple[int, int, int], Row]:
    """The published profile by (hidden, degree, batch of a group), without the runs that failed."""
    lines = (DATA / "oases_profile_3090.csv").read_text().splitlines()
    found: dict[tuple[int, int, int], Row] = {}
    for line in csv.DictReader(line for line in lines if not line.startswith("#")):
        values = {key: float(text) for key, text in line.items()}
        if values["comm_ms"] > 0:
            key = int(values["hidden"]), int(values["tmp"]), int(values["batch"])
            found[key] = Row(
                (values["attn_fp_ms"], values["attn_bp_ms"]),
                (values["mlp_fp_ms"], values["mlp_bp_ms"]),
                values["comm_ms"],
                values["runtime_memory_MB"],
            )
    return found


def models() -> list[Model]:
    """The models of Table 4."""
    return [
        Model(row["H"], row["L"], row["tmp"], row["dp"], row["global_batch"])
        for row in tables()["table4_configs"]
    ]


def model_of(hidden: int) -> Model:
    """The model of Table 4 with this hidden size."""
    return next(model for model in models() if model.hidden == hidden)


def row_of(hidden: int, degree: int, batch: int) -> Row | None:
    """The profile's row; None if it has none.

    The profile has hidden sizes up to 4096. A size r times as large has at degree p the products of
    the smaller size at degree p / r^2, element for element of the weights. Below degree 1 the
    batch is r^2 / p times as large instead: as much work, with weights as many times smaller;
    a batch that is not profiled takes twice the time of its half. Attention's scores, an eighth of
    the work at most, are r times too many.
    """
    if found := profile().get((hidden, degree, batch)):
        return found
    ratio, base = _SCALED.get(hidden, (1, hidden))
    if ratio == 1:
        return None
    at, more = divmod(degree, ratio**2)
    if not at and not ratio**2 % degree:
        at, batch = 1, batch * ratio**2 // degree
    elif more:
        return None
    half = profile().get((base, at, batch // 2))
    return profile().get((base, at, batch)) or (half and half.twice)


_SCALED = {6144: (2, 3072), 8192: (2, 4096), 12288: (4, 3072)}
"""By hidden size that is not profiled: how many times a profiled size, and that size."""


@cache
def all_reduce_curve() -> tuple[tuple[float, float], ...]:
    """Seconds of the profile's all-reduces by bytes. They span all 32 ranks, not the group."""
    times: dict[int, list[float]] = {}
    for (hidden, _, batch), row in profile().items():
        times.setdefault(4 * batch * SEQ * hidden, []).append(row.comm_ms / 1e3)
    return tuple((float(size), sum(t) / len(t)) for size, t in sorted(times.items()))


def ring_share(ranks: int, cluster: str) -> float:
    """An all-reduce among `ranks` neighbours as a share of one of equal bytes among all 32.

    Both move at the bandwidth of the slowest hop, 2 (n-1)/n times the bytes. On the cluster with
    NVLink, a pair uses the bridge alone; of a ring of four, two hops use bridges and two share
    what four share on the other cluster; larger rings wait for the network on both.
    """
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks / ((NUM_DEVICES - 1) / NUM_DEVICES)
    if cluster == "NVLink3090" and ranks == 2:
        largest, seconds = all_reduce_curve()[-1]
        return share * (1.9375 * largest / seconds) / NVLINK_BYTES_S
    return share / 2 if cluster == "NVLink3090" and ranks == 4 else share


def all_reduce_s(size: float, ranks: int, cluster: str) -> float:
    """Seconds of an all-reduce of `size` bytes in a group of the cluster."""
    return ring_share(ranks, cluster) * time_at(all_reduce_curve(), size)


def profiled_cluster(name: str) -> Cluster:
    """The preset with the profile's all-reduces, and no parameter that Table 3 gave."""
    sizes = [1e4, *(size for size, _ in all_reduce_curve())]
    measured = tuple(
        CollectiveTimes(
            "all_reduce",
            ranks,
            max(1, ranks // 4),
            tuple((size, all_reduce_s(size, ranks, name)) for size in sizes),
        )
        for ranks in (2, 4, 8, 16, 32)
    )
    return replace(
        find_cluster(CLUSTERS[name]), collectives=measured, overlap_slowdown=1.0, link_slowdown=1.0
    )


def degrees_of(model: Model) -> list[int]:
    """Degrees whose groups have a sample, and that the profile has."""
    return [
        degree
        for degree in (1, 2, 4, 8, 16, 32)
        if (batch := model.group_batch(degree))
        and (batch == 1 or batch % 2 == 0)
        and row_of(model.hidden, degree, batch)
        and row_of(model.hidden, degree, sub_batch(batch))
    ]


def sub_batch(batch: int) -> int:
    """Samples of sub-batch 0. A single sample makes one sub-batch, and the other is empty."""
    return batch // 2 if batch > 1 else batch


def chain_of(model: Model, cluster: str, *, literal: bool = False) -> Chain:
    """The chain of a model: attention and MLP of each layer, by the published profile.

    Where a degree leaves a group one sample, its blocks run it unsplit, with nothing beside their
    communication.

    `literal`: all-reduces and gathers as the published planner takes them, the former of all 32
    ranks at any degree. Otherwise both are modelled in their groups (`ring_share`).
    """
    degrees = degrees_of(model)
    blocks = tuple(
        ChainBlock(
            f"{layer}.{part}",
            tuple(_choice(model, part, degree, cluster, literal) for degree in degrees),
        )
        for layer in range(model.layers)
        for part in ("attn", "mlp")
    )
    gather = tuple(
        tuple(_gather_s(model, a, b, cluster, literal) for b in degrees) for a in degrees
    )
    gathers: tuple[Matrix, ...] = (gather,) * (len(blocks) - 1)
    return Chain(blocks, gathers)


def _row(model: Model, degree: int, batch: int) -> Row:
    row = row_of(model.hidden, degree, batch)
    assert row is not None, "degrees_of keeps only what is profiled"
    return row


def _communication_s(model: Model, degree: int, cluster: str, literal: bool) -> float:
    """The all-reduce of a sub-batch."""
    batch = sub_batch(model.group_batch(degree))
    if literal:
        return _row(model, degree, batch).comm_ms / 1e3
    return all_reduce_s(4 * batch * SEQ * model.hidden, degree, cluster)


def _choice(model: Model, part: str, degree: int, cluster: str, literal: bool) -> DegreeOption:
    batch = model.group_batch(degree)
    row = _row(model, degree, sub_batch(batch))
    forward_ms, backward_ms = row.attn if part == "attn" else row.mlp
    forward_s = forward_ms / 1e3
    both_s = (forward_ms + backward_ms) / 1e3  # the backward recomputes
    all_reduce = _communication_s(model, degree, cluster, literal)
    other = 1.0 if batch > 1 else 0.0
    communication = (all_reduce, other * all_reduce)
    matrices, vectors = (4, 6) if part == "attn" else (8, 7)
    parameters = matrices * model.hidden**2 // degree + vectors * model.hidden
    return DegreeOption(
        degree,
        PassTimes((forward_s, other * forward_s), communication),
        PassTimes((both_s, other * both_s), communication),
        state_bytes=5 * 4 * parameters,
        kept_bytes=12 * batch * SEQ * model.hidden,
        runtime_bytes=int(_row(model, degree, batch).runtime_mb * 2**20),
    )


def _gather_s(model: Model, a: int, b: int, cluster: str, literal: bool) -> float:
    """The all-gather of both sub-batches among the groups of the smaller degree in a larger one.

    It moves half of what an all-reduce of the larger group's values among b/a ranks would.
    """
    if a == b:
        return 0.0
    small, large = min(a, b), max(a, b)
    if literal:
        return large // small * _communication_s(model, small, cluster, True)
    # Groups of the smaller degree lie next to each other, so that a gather crosses what the
    # larger group's ring crosses.
    size = 4 * model.group_batch(large) * SEQ * model.hidden
    ratio = large // small
    whole = ring_share(large, cluster) / ((large - 1) / large)
    return (ratio - 1) / ratio * whole * time_at(all_reduce_curve(), size) / 2
