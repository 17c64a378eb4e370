"""The setups of AMP (NeurIPS 2022) as clusters and layered models, and files of measured runs.

`data/amp_known_cost.csv` is the profile that the authors published with their code,
`data/amp_planner_runs.json` what their planner answers, `data/amp_results.csv` what they measured;
each file names its source. GPT-2 and TransGAN are described here: shapes, parameters, and the
work of their layers.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, repeat
from pathlib import Path

from shardweave.benchmarks.amp_work import LayerWork, Work, fixed_shares, reached_share
from shardweave.planners.amp.model import ByDegree, LayeredModel, Strategy, Tied
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster

DATA = Path(__file__).resolve().parent / "data"
DEGREES = (1, 2, 4)
DEVICES = {"G4": "T4", "P3": "V100-16GB"}
"""The profile's names of its machines, and the presets' of their devices."""

HIDDEN, VOCAB, SEQ, HEADS = 1024, 52256, 1024, 16
TRANSGAN_TOKENS, TRANSGAN_HEADS, TRANSGAN_SHRINK = 81, 4, 64
"""Tokens of the wide layers; the narrow ones have 64 times as many, of 1/64 of the features."""

LOGIT_BYTES = (4.0, 12.0)
"""Per logit, of the head and of the cast after it: 16-bit values and gradients; 32-bit values,
softmax and gradients."""


@dataclass(frozen=True)
class Setup:
    """A model on a cluster, as published.

    rows: of the published profile, by layer. work: of a sample, by layer.
    """

    name: str
    cluster: Cluster
    model: LayeredModel
    rows: Sequence[int]
    work: Work

    def cuts_of_rows(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Cuts between layers from cuts between rows of the published profile."""
        inner = [sum(row < cut for row in self.rows) for cut in rows[1:-1]]
        cuts = (0, *inner, self.model.num_layers)
        if any(right <= left for left, right in pairwise(cuts)):
            raise ValueError(
                f"model '{self.model.name}': the cuts {list(rows)} leave a stage without layers; "
                f"expected growing rows of its profile ({self.rows[0]} to {self.rows[-1]})."
            )
        return cuts


@dataclass(frozen=True)
class Measured:
    """One strategy of a file of runs.

    cuts: between rows of the published profile; empty if the file has none. published_s: the
    published estimate, measured_s the measured seconds, infinite for a run that failed; None
    where the file says nothing.
    """

    strategy: Strategy
    cuts: tuple[int, ...]
    published_s: float | None
    measured_s: float | None


def setups() -> list[str]:
    """Names of the published setups."""
    return list(_SETUPS)


def setup_of(name: str) -> Setup:
    """A published setup: `homogeneous`, `het_cluster` or `het_model`."""
    preset, model_of, work, rows = _SETUPS[name]
    cluster, model = find_cluster(preset), model_of()
    fixed = {
        device: {
            n: tuple(fixed_shares(model, work, cluster, device, n, reached=reached()))
            for n in DEGREES
        }
        for device in dict.fromkeys(node.device for node in cluster.nodes)
    }
    return Setup(name, cluster, replace(model, fixed=fixed), rows, work)


@cache
def reached() -> float:
    """The largest share of a roofline that a layer of the published profile reaches."""
    cluster = find_cluster("amp-het-cluster")
    t4, v100 = cluster.devices["T4"], cluster.devices["V100-16GB"]
    of_gpt2 = reached_share(gpt2(), _GPT2_WORK, (t4, v100))
    return max(of_gpt2, reached_share(transgan(), _TRANSGAN_WORK, (v100,)))


@cache
def published_profile() -> dict[str, tuple[float, ...]]:
    """Forward seconds of one sample by `model_machine_degree`, one for each row."""
    found: dict[str, list[float]] = {}
    for row in csv.DictReader(_lines(DATA / "amp_known_cost.csv")):
        for name, value in row.items():
            if name != "layer" and value:
                found.setdefault(name, []).append(float(value))
    return {name: tuple(values) for name, values in found.items()}


def _profile(model: str, machines: Sequence[str], rows: Sequence[int]) -> dict[str, ByDegree]:
    table = published_profile()
    return {
        DEVICES[machine]: {
            n: tuple(table[f"{model}_{machine}_{n}"][row] for row in rows) for n in DEGREES
        }
        for machine in machines
    }


def _by_degree(values: Callable[[int], Sequence[float]]) -> ByDegree:
    return {n: tuple(values(n)) for n in DEGREES}


def transformer_work(tokens: int, hidden: int, heads: int) -> LayerWork:
    """A transformer layer on one sequence: products of weights and of attention, in FLOPs, and
    activations kept in 16 bit (Korthikanti et al. 2022, Eq. 1)."""
    flops = 24 * tokens * hidden**2 + 4 * tokens**2 * hidden
    return LayerWork(flops, 34 * tokens * hidden + 5 * heads * tokens**2, all_reduces=2)


def transformer_kept(tokens: int, hidden: int, heads: int, tensor: int) -> float:
    """Bytes that a layer keeps on one of `tensor` devices (Korthikanti et al. 2022, Eq. 2)."""
    return tokens * hidden * (10 + 24 / tensor) + 5 * heads * tokens**2 / tensor


def transformer_workspace(tokens: int, heads: int, tensor: int) -> float:
    """Bytes that a layer's backward pass needs for a while on one of `tensor` devices: gradients of
    the attention's scores behind dropout and behind softmax, in 16 bit."""
    return 2 * 2.0 * heads * tokens**2 / tensor


@cache
def gpt2() -> LayeredModel:
    """GPT-2 of 24 layers, 30 with the embedding, the head and what is between them."""
    table, layer, logits = HIDDEN * VOCAB, 12 * HIDDEN**2, SEQ * VOCAB

    def kept(n: int) -> list[float]:
        layers = repeat(transformer_kept(SEQ, HIDDEN, HEADS, n), 24)
        head = (size * logits / n for size in LOGIT_BYTES)
        hidden = 2.0 * SEQ * HIDDEN
        return [hidden, 0.0, *layers, 0.0, hidden, *head]

    return LayeredModel(
        name="gpt2",
        batch=32,
        profile=_profile("gpt2", ("G4", "P3"), _GPT2_ROWS),
        outputs=_by_degree(lambda n: [SEQ * HIDDEN] * 28 + [logits / n] * 2),
        parameters=_by_degree(
            lambda n: [table / n, 0.0, *repeat(layer / n, 24), 0.0, 0.0, table / n, 0.0]
        ),
        kept_bytes=_by_degree(kept),
        workspace_bytes=_by_degree(
            lambda n: [0.0, 0.0, *repeat(transformer_workspace(SEQ, HEADS, n), 24), *repeat(0.0, 4)]
        ),
        repeated=(2, 24),
        tied=(Tied(0, 28, {n: table / n for n in DEGREES}),),
    )


@cache
def transgan() -> LayeredModel:
    """TransGAN's generator: an embedding, 12 wide layers, and 12 narrow ones on many tokens."""

    def both(values: Callable[[int, int, int], float]) -> list[float]:
        return [*repeat(values(*_WIDE), 12), *repeat(values(*_NARROW), 12)]

    return LayeredModel(
        name="transgan",
        batch=64,
        profile=_profile("transgan", ("P3",), _TRANSGAN_ROWS),
        outputs=_by_degree(lambda n: [HIDDEN * TRANSGAN_TOKENS] * 25),
        parameters=_by_degree(
            lambda n: [0.0, *both(lambda tokens, hidden, heads: 12 * hidden**2 / n)]
        ),
        kept_bytes=_by_degree(
            lambda n: [
                2.0 * TRANSGAN_TOKENS * HIDDEN,
                *both(lambda tokens, hidden, heads: transformer_kept(tokens, hidden, heads, n)),
            ]
        ),
        workspace_bytes=_by_degree(
            lambda n: [
                0.0,
                *both(lambda tokens, hidden, heads: transformer_workspace(tokens, heads, n)),
            ]
        ),
        repeated=(0, 24),
    )


_GPT2_ROWS = range(30)
_GPT2_WORK: Work = (
    *repeat(None, 2),
    *repeat(transformer_work(SEQ, HIDDEN, HEADS), 24),
    *repeat(None, 4),
)
_WIDE = (TRANSGAN_TOKENS, HIDDEN, TRANSGAN_HEADS)
_NARROW = (TRANSGAN_TOKENS * TRANSGAN_SHRINK, HIDDEN // TRANSGAN_SHRINK, TRANSGAN_HEADS)
_TRANSGAN_ROWS = (0, *range(3, 15), *range(41, 53))
_TRANSGAN_WORK: Work = (
    None,
    *repeat(transformer_work(*_WIDE), 12),
    *repeat(transformer_work(*_NARROW), 12),
)
_SETUPS: Mapping[str, tuple[str, Callable[[], LayeredModel], Work, Sequence[int]]] = {
    "homogeneous": ("amp-homogeneous", gpt2, _GPT2_WORK, _GPT2_ROWS),
    "het_cluster": ("amp-het-cluster", gpt2, _GPT2_WORK, _GPT2_ROWS),
    "het_model": ("amp-het-model", transgan, _TRANSGAN_WORK, _TRANSGAN_ROWS),
}


def planner_runs(setup: str) -> list[Measured]:
    """What the published planner answers for a setup: its strategies, cuts and estimates."""
    data = json.loads((DATA / "amp_planner_runs.json").read_text())
    return [
        Measured(
            Strategy(one["pp"], one["dp"], one["tmp"], one["mbs"]),
            tuple(one["partition"]),
            one["est_s"],
            None,
        )
        for one in data["setups"][setup]["ranked"]
    ]


def published_cpu_s(setup: str) -> float:
    """Processor seconds of the published planner's search."""
    data = json.loads((DATA / "amp_planner_runs.json").read_text())
    return float(data["setups"][setup]["cpu_s"])


def read_measured(path: Path, setup: str) -> list[Measured]:
    """The strategies of one setup in a file like `data/amp_results.csv`.

    Raises ValueError if the file cannot be read, lacks a column, or has nothing of the setup.
    """
    try:
        lines = _lines(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ValueError(f"'{path}' cannot be read: {reason}; give a CSV file of runs.") from error
    rows = list(csv.DictReader(lines))
    columns = set(rows[0]) if rows else set[str]()
    missing = {"mbs", "tmp", "dp", "pp", "measured_s"} - columns
    if missing:
        raise ValueError(
            f"'{path}': there is no column '{min(missing)}'; expected mbs, tmp, dp, pp, "
            "measured_s, and if known setup, ds_partition, est_s, status."
        )
    chosen = [row for row in rows if row.get("setup", setup) == setup]
    if not chosen:
        names = ", ".join(sorted({row["setup"] for row in rows}))
        raise ValueError(f"'{path}': found no run of setup '{setup}'; it has {names}.")
    return [_measured(path, row) for row in chosen]


def _measured(path: Path, row: Mapping[str, str]) -> Measured:
    try:
        strategy = Strategy(int(row["pp"]), int(row["dp"]), int(row["tmp"]), int(row["mbs"]))
        cuts = tuple(map(int, (row.get("ds_partition") or "").split()))
        published, measured = (
            float(text) if text else None for text in (row.get("est_s"), row["measured_s"])
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"'{path}': in row {dict(row)}: {error}; write numbers.") from error
    failed = row.get("status", "ok") not in ("ok", "not_run", "")
    return Measured(strategy, cuts, published, math.inf if failed else measured)


def _lines(path: Path) -> list[str]:
    """The lines of a CSV file without those that say where it is from."""
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]
