"""Measured runs predicted, on several processes where there are many."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from multiprocessing import get_context

from shardweave.benchmarks.runs.predict import RunPredictor, in_order, of_program, placed
from shardweave.benchmarks.runs.rows import MeasuredRun
from shardweave.benchmarks.scoreboard_score import Pair
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster

PRESETS: Mapping[str, str] = {
    "a100": "dgx-a100",
    "a10080": "dgx-a100",
    "a10040": "dgx-a100-40",
    "a800": "hgx-a800",
    "a80080": "hgx-a800",
    "h100": "dgx-h100",
    "h10080": "dgx-h100",
    "h10096": "grand-teton",
    "h800": "hgx-h800",
    "h80080": "hgx-h800",
    "h200": "dgx-h200",
    "h200141": "dgx-h200",
    "b200": "dgx-b200",
    "b200180": "dgx-b200",
    "v100": "dgx-v100",
    "v10016": "dgx-v100",
    "v10032": "dgx-v100-32",
    "gh96": "clariden",
    "gh200": "clariden",
    "gh20096": "clariden",
    "a10g": "aws-a10g",
    "a10g24": "aws-a10g",
    "l4": "gcp-l4",
    "l424": "gcp-l4",
    "t4": "aws-t4",
    "t416": "aws-t4",
    "rtx3090": "rtx-3090",
    "rtx309024": "rtx-3090",
    "rtx2080": "rtx-2080",
    "titanrtx": "titan-rtx",
    "rtxa5000": "rtx-a5000",
    "a5000": "rtx-a5000",
    "mi300x": "mi300x",
    "mi300x192": "mi300x",
    "tpuv5p": "tpu-v5p",
    "v5p": "tpu-v5p",
}
"""By kind of device as rows write it, without what does not tell them apart."""

BESIDE = re.compile(
    r"nvidia|amd|instinct|geforce|tesla|sxm\d?|[dh]gx|(?<=\d)\s*gi?b?\b|hbm\d?e?|[^a-z0-9]"
)
"""Of a kind of device's name: what `PRESETS` leave out."""

FEW = 20
"""Runs of a part at least: a process takes seconds to start."""


def cluster_of(run: MeasuredRun, asked: str | None) -> Cluster:
    """The cluster of a run, with its nodes. Raises ValueError for an unknown device."""
    return placed(run, preset_of(run, asked))


def preset_of(run: MeasuredRun, asked: str | None) -> Cluster:
    """The cluster of a run's kind of device, or of several kinds, `A100+V100`. Raises ValueError
    for an unknown device."""
    kinds = [PRESETS.get(BESIDE.sub("", kind)) for kind in run.gpu.lower().split("+")]
    name = asked or "+".join(kind or "" for kind in kinds)
    if not asked and None in kinds:
        raise ValueError(
            f"no preset is known for devices '{run.gpu}' ({', '.join(PRESETS)} are); give "
            "--cluster, a preset's name or a file (docs/clusters.md says how to write one)."
        )
    return find_cluster(name)


@dataclass(frozen=True)
class Predicted:
    """pairs: what is scored. contradicted: runs whose note contradicts the row, predicted by the
    row alone and not scored. refused: what cannot be predicted, with the reason."""

    pairs: list[Pair] = field(default_factory=list[Pair])
    contradicted: list[Pair] = field(default_factory=list[Pair])
    refused: list[tuple[MeasuredRun, str]] = field(default_factory=list[tuple[MeasuredRun, str]])

    def of(self, source: str) -> Predicted:
        """Those of one source."""
        return Predicted(
            [pair for pair in self.pairs if pair[0].source == source],
            [pair for pair in self.contradicted if pair[0].source == source],
            [one for one in self.refused if one[0].source == source],
        )

    def add(self, other: Predicted) -> None:
        """Take those of others too."""
        self.pairs.extend(other.pairs)
        self.contradicted.extend(other.contradicted)
        self.refused.extend(other.refused)


def predict_all(runs: Sequence[MeasuredRun], asked: str | None, jobs: int = 1) -> Predicted:
    """What the simulator says of each run, with progress on stderr.

    asked: a preset's name or a cluster file for all; None: by kind of device. jobs: processes,
    of which each has parts of at least `FEW` runs. Runs of one program are in one part, so that
    it is captured once.
    """
    parts = list(_parts(in_order(runs), max(FEW, len(runs) // (4 * jobs))))
    all_found = Predicted()
    if jobs < 2 or len(parts) < 2:
        for part in parts:
            _take(all_found, predict_part(part, asked), len(runs))
        return all_found
    with ProcessPoolExecutor(min(jobs, len(parts)), get_context("spawn")) as pool:
        for found in pool.map(partial(predict_part, asked=asked), parts):
            _take(all_found, found, len(runs))
    return all_found


def _take(all_found: Predicted, found: Predicted, num_runs: int) -> None:
    all_found.add(found)
    done = sum(map(len, (all_found.pairs, all_found.contradicted, all_found.refused)))
    print(f"{done} of {num_runs} runs are predicted", file=sys.stderr)


def _parts(runs: Sequence[MeasuredRun], size: int) -> Iterator[list[MeasuredRun]]:
    """Runs in parts of at least so many, if there are; those of one program in one."""
    part: list[MeasuredRun] = []
    for _, alike in groupby(runs, of_program):
        part += alike
        if len(part) >= size:
            yield part
            part = []
    if part:
        yield part


def predict_part(runs: Sequence[MeasuredRun], asked: str | None) -> Predicted:
    """As `predict_all`, of runs in this order, on this process."""
    predictor = RunPredictor()
    all_found = Predicted()
    for run in runs:
        told = all_found.contradicted if run.contradiction else all_found.pairs
        try:
            row = replace(run, note="") if run.contradiction else run
            told.append((run, predictor.predict(row, cluster_of(run, asked))))
        except ValueError as error:
            all_found.refused.append((run, str(error)))
    return all_found
