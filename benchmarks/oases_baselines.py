"""Oases beside its paper's other baselines, its pipelined models, and the accuracy of its costs.

`python benchmarks/planners.py oases-baselines [--quick] [--json FILE]`. Of arXiv 2305.16121:

- Figure 4: Oases over the best of four baselines, seven models on two clusters. Megatron-LM, Merak
  and Oases are simulated programs, as in `oases_table3.py`; the other two are no programs, and take
  Megatron-LM's simulated step times what the published profile says of them. *Alpa-like*: the best
  degrees by a cost without overlap, which then run without. *Wang et al.*: the default degrees,
  each all-reduce as a reduce-scatter and a gather, cut into as many parts as the degree, of which
  all but one travel beside the product that makes or takes them. Parts lose no efficiency here, so
  that this baseline is better than a real one.
- Figure 5: a stage's micro-batch of GPT-18.4B and GPT-39.1B under three methods. The global batch
  is not given; with as many micro-batches in all methods the bubble is the same share.
- Figure 7: weak scaling. A group of tensor ranks does the same work at any size of the cluster;
  what grows is the reduction of gradients over the groups.
- Figure 6: the rank correlation of predicted and measured throughput, here of all programs of
  Table 3. The paper's two numbers are of strategies whose times it does not list.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.layer_stack import step_of_layers
from shardweave.benchmarks.oases_data import (
    BUDGET_BYTES,
    CLUSTERS,
    SEQ,
    Model,
    all_reduce_s,
    chain_of,
    degrees_of,
    model_of,
    models,
    row_of,
    tables,
)
from shardweave.benchmarks.oases_table3 import (
    METHODS,
    SIMULATED_LAYERS,
    planner_gain,
    scheduled,
    step_times,
    sync_s,
)
from shardweave.driver.models.gpt import GPTConfig
from shardweave.ir.mesh.mesh import Mesh
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.oases.chain import Chain, ChainBlock, DegreeOption, PassTimes
from shardweave.planners.oases.dp import solve_chain
from shardweave.planners.simulate.simulate import simulate

TABLE_3 = Path(__file__).resolve().parent / "results" / "oases_table3.json"
BASELINES = ("Megatron-LM", "Merak", "Alpa-like", "Wang et al.")
PIPELINED = ("Megatron-LM", "Merak", "fine_grained_recompute")
"""Methods of Figure 5, by the names of Table 3; the last is Oases."""


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of a block on the whole batch of a group: passes, an all-reduce, and the share of the
    compute that is the product which ends the block and the one that begins it."""

    forward_s: float
    backward_s: float
    all_reduce_s: float
    first_share: float
    last_share: float

    @property
    def blocking_s(self) -> float:
        """Forward, recomputation and backward, each with its all-reduce."""
        return 2 * self.forward_s + self.backward_s + 3 * self.all_reduce_s

    def decomposed_s(self, parts: int) -> float:
        """The same, with messages in parts beside the products next to them."""
        forward_s = self._hidden(self.forward_s, parts)
        return 2 * forward_s + self._hidden(self.backward_s, parts)

    def _hidden(self, compute_s: float, parts: int) -> float:
        half = self.all_reduce_s / 2
        exposed = 0.0
        for share in (self.first_share, self.last_share):
            product_s = share * compute_s
            exposed += max(0.0, half - product_s) + min(half, product_s) / parts
        return compute_s + exposed


def block_times(model: Model, part: str, degree: int, cluster: str) -> BlockTimes:
    """A block by the published profile, unsplit. part: `attn` or `mlp`."""
    batch = model.group_batch(degree)
    row = row_of(model.hidden, degree, batch)
    assert row is not None, "degrees_of keeps only what is profiled"
    forward_ms, backward_ms = row.attn if part == "attn" else row.mlp
    # FLOPs of a token: 6 h^2 and 2 h^2 in products, 4 s h in scores; an MLP's products are equal.
    whole = 8 * model.hidden + 4 * SEQ
    shares = (6 * model.hidden / whole, 2 * model.hidden / whole)
    first, last = shares if part == "attn" else (0.5, 0.5)
    reduce_s = all_reduce_s(4 * batch * SEQ * model.hidden, degree, cluster)
    return BlockTimes(forward_ms / 1e3, backward_ms / 1e3, reduce_s, first, last)


def blocking_chain(model: Model, cluster: str) -> Chain:
    """The chain of `oases_data.chain_of` where nothing overlaps: all is compute of a batch that is
    not split. Solved, it gives the degrees that a planner without overlap takes."""
    chain = chain_of(model, cluster)

    def option(name: str, one: DegreeOption) -> DegreeOption:
        times = block_times(model, name.partition(".")[2], one.degree, cluster)
        return DegreeOption(
            one.degree,
            PassTimes((times.blocking_s, 0.0), (0.0, 0.0)),
            PassTimes((0.0, 0.0), (0.0, 0.0)),
            one.state_bytes,
            one.kept_bytes,
            one.runtime_bytes,
        )

    blocks = tuple(
        ChainBlock(block.name, tuple(option(block.name, one) for one in block.choices))
        for block in chain.blocks
    )
    return Chain(blocks, chain.gather_s)


def gains(model: Model, cluster: str) -> dict[str, float]:
    """Of the two baselines that are no programs, over Megatron-LM, by the profile."""
    solution = solve_chain(blocking_chain(model, cluster), BUDGET_BYTES)
    blocks = [block_times(model, part, model.tensor, cluster) for part in ("attn", "mlp")]
    default_s = model.layers * sum(one.blocking_s for one in blocks)
    decomposed_s = model.layers * sum(one.decomposed_s(model.tensor) for one in blocks)
    return {"Alpa-like": default_s / solution.time_s, "Wang et al.": default_s / decomposed_s}


def figure_4(chosen: Sequence[Model]) -> list[dict[str, Any]]:
    """Thousands of tokens a second of every method, and Oases over the best baseline."""
    rows: list[dict[str, Any]] = []
    for model in chosen:
        tokens = model.batch * SEQ / 1e3
        times = {name: step_times(model, name, preset=False) for name in METHODS}
        for cluster in CLUSTERS:
            schedules = {name: tokens / times[name][cluster] for name in METHODS}
            first, ours = schedules["Megatron-LM"], schedules["fine_grained_recompute"]
            rates = {name: schedules[name] for name in BASELINES[:2]}
            rates |= {name: first * gain for name, gain in gains(model, cluster).items()}
            ours *= planner_gain(model, cluster)
            best = max(rates, key=lambda name: rates[name])
            rows.append(
                {
                    "cluster": cluster,
                    "hidden": model.hidden,
                    "degrees": degrees_of(model),
                    "rates": rates | {"Oases": ours},
                    "schedules": schedules,
                    "best_baseline": best,
                    "over_best": ours / rates[best],
                    "over_megatron": ours / first,
                }
            )
    return sorted(rows, key=lambda row: (row["cluster"], row["hidden"]))


SCALED = (2048, 4096)
"""Hidden sizes of the models of Figure 7; the paper does not say which two it takes."""


def figure_7(hidden: int) -> list[dict[str, Any]]:
    """Weak scaling from one node to eight, as shares of linear scaling."""
    model, rows = model_of(hidden), list[dict[str, Any]]()
    for method in ("Megatron-LM", "fine_grained_recompute"):
        for cluster, step_s in step_times(model, method, preset=False).items():
            group_s = step_s - sync_s(model)
            each = {
                str(4 * nodes): group_s
                / (group_s + sync_s(replace(model, data=4 * nodes // model.tensor)))
                for nodes in (1, 2, 4, 8)
            }
            rows.append({"hidden": hidden, "cluster": cluster, "method": method, "share": each})
    return rows


def figure_5(row: Mapping[str, Any], cluster_name: str, depths: Sequence[int]) -> dict[str, float]:
    """Oases' fine-grained schedule over Megatron-LM and Merak, on a stage's micro-batch."""
    cluster = find_cluster(CLUSTERS[cluster_name])
    layers = row["L"] // row["pmp"]
    seconds: dict[str, float] = {}
    for method in PIPELINED:
        points: list[float] = []
        for depth in depths:
            config = GPTConfig(depth, row["H"], row["heads"], seq=SEQ, batch=row["micro_batch"])
            program = step_of_layers(config)
            program.set_mesh(Mesh(tensor=row["tmp"]))
            points.append(simulate(scheduled(program, method), cluster).time_s)
        slope = (points[-1] - points[0]) / (depths[-1] - depths[0])
        seconds[method] = points[0] + (layers - depths[0]) * slope
    megatron, merak, ours = (seconds[method] for method in PIPELINED)
    return {"over_megatron": megatron / ours, "over_merak": merak / ours, "micro_batch_s": ours}


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each cluster and model of Table 4."""
    table = Table(title="Thousands of tokens a second; Oases over the best baseline")
    for title in ("cluster", "hidden", *BASELINES, "Oases", "over best", "over Megatron-LM"):
        table.add_column(title)
    for row in rows:
        rates = [f"{row['rates'][name]:.1f}" for name in (*BASELINES, "Oases")]
        gained = f"{row['over_best']:.2f}", f"{row['over_megatron']:.2f}"
        table.add_row(row["cluster"], str(row["hidden"]), *rates, *gained)
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the arguments of every subcommand suffice."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compare with every baseline, print the tables; what `--json` writes."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    rows = figure_4(models()[: 1 if options.quick else None])
    console.print(table_of(rows))
    pipelined: dict[str, dict[str, dict[str, float]]] = {}
    for row in tables()["table5_gpt"][: 1 if options.quick else None]:
        pipelined[row["name"]] = {name: figure_5(row, name, SIMULATED_LAYERS) for name in CLUSTERS}
        console.print(f"{row['name']}: {pipelined[row['name']]}", highlight=False)
    published = tables()
    spearman = json.loads(TABLE_3.read_text())["spearman"]
    console.print(f"Spearman with Table 3 as measured: {spearman}", highlight=False)
    return {
        "figure_4": rows,
        "figure_7": [row for hidden in SCALED for row in figure_7(hidden)],
        "published_over_best": published["fig4_speedup_range_over_best_baseline"],
        "published_over_megatron": published["fig4_max_over_megatron"],
        "figure_5": pipelined,
        "published_figure_5": published["fig5_speedups"],
        "spearman_with_table_3": spearman,
        "published_spearman": published["fig6_spearman_cost_model"],
    }
