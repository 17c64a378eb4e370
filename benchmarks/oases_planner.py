"""Oases' planner on the published data: degrees and solve times beside the paper's.

`python benchmarks/planners.py oases [--quick] [--json FILE]`. The chains are those of Table 6 on
both clusters, the four profiled models, and 96 layers, which have four times a device's memory.
Each is solved by the exact dynamic program, and by the ILP with HiGHS and with CBC, which must
agree. Times are on the clock, the fastest of several, and include making the costs. `--quick`:
three chains, and no CBC.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.baselines.oases_ilp import solve_chain_ilp
from shardweave.benchmarks.oases_data import (
    BUDGET_BYTES,
    Model,
    chain_of,
    degrees_of,
    model_of,
    tables,
)
from shardweave.benchmarks.oases_literal import published_costs
from shardweave.planners.cost.quantity import GIB
from shardweave.planners.oases.chain import Chain, linearise, runs
from shardweave.planners.oases.dp import Solution, solve_chain

PROFILED = (1024, 2048, 3072, 4096)
DEEP = 96
TARGET_MS = {False: 10.0, True: 50.0}
"""What the dynamic program may take; True: for 96 layers."""


@dataclass(frozen=True)
class Known:
    """What Table 6 says of a model: milliseconds to plan, degrees, and the gain in throughput."""

    solve_ms: float
    degrees: str
    gain: float
    time_s: float | None
    memory_gib: float | None


@dataclass(frozen=True)
class Result:
    """One chain. gain: predicted time of the default degrees over that of the plan.

    one_switch: the plan that changes the degree at most once, as the paper's do. literal: the
    optimum of the released planner's own objective, on its own communication.
    """

    name: str
    num_blocks: int
    dp_ms: float
    ilp_ms: dict[str, float]
    degrees: str
    one_switch: str
    literal: str
    time_s: float
    memory_gib: float
    gain: float | None
    literal_loss: float
    paper: Known | None

    @property
    def is_fast(self) -> bool:
        """Whether the dynamic program is within its target."""
        return self.dp_ms <= TARGET_MS[self.num_blocks >= 2 * DEEP]


def timed(solve: Callable[[], Solution], rounds: int) -> tuple[Solution, float]:
    """A solution, and the fastest of `rounds` times in milliseconds."""
    times: list[float] = []
    solution = solve()
    for _ in range(rounds):
        begin = time.perf_counter()
        solution = solve()
        times.append(time.perf_counter() - begin)
    return solution, min(times) * 1e3


def per_layer(degrees: Sequence[int]) -> str:
    """Degrees as Table 6 writes them, counted in layers of two blocks."""
    parts = [one.split("*") for one in runs(degrees).split()]
    return " ".join(f"{degree}*{int(count) / 2:g}" for degree, count in parts)


def one_switch(chain: Chain, budget: float) -> tuple[int, ...]:
    """The degrees of least time that fit and change at most once along the chain."""
    costs, count = linearise(chain), len(chain.blocks)
    choices = range(len(chain.blocks[0].choices))
    places = product(range(count), choices, choices)
    paths = [(a,) * at + (b,) * (count - at) for at, a, b in places]
    return chain.degrees(min((p for p in paths if costs.memory(p) <= budget), key=costs.time_s))


def measure(model: Model, cluster: str, quick: bool, *, budget: float = BUDGET_BYTES) -> Result:
    """Solve one chain in all ways. Raises RuntimeError if the ILPs disagree with the search."""
    chain = chain_of(model, cluster)
    found, dp_ms = timed(lambda: solve_chain(chain, budget), 3 if quick else 20)
    ilp_ms: dict[str, float] = {}
    for solver in ("highs", "cbc"):
        if quick and solver == "cbc":
            continue
        ilp, ilp_ms[solver] = timed(
            lambda s=solver: solve_chain_ilp(chain, budget, solver=s), 1 if quick else 3
        )
        if abs(ilp.time_s - found.time_s) > 1e-6 * found.time_s:
            raise RuntimeError(f"{solver} finds {ilp.time_s} s, the search {found.time_s} s")
    published = chain_of(model, cluster, literal=True)
    literal = solve_chain(published, budget, costs=published_costs(published))
    return Result(
        name=f"{cluster} H={model.hidden} L={model.layers}",
        num_blocks=len(chain.blocks),
        dp_ms=dp_ms,
        ilp_ms=ilp_ms,
        degrees=per_layer(found.degrees),
        one_switch=per_layer(one_switch(chain, budget)),
        literal=per_layer(literal.degrees),
        time_s=found.time_s,
        memory_gib=found.memory_bytes / GIB,
        gain=time_of(chain, [model.tensor] * len(chain.blocks)) / found.time_s,
        literal_loss=literal_loss(model, cluster, budget),
        paper=known(chain, cluster, model),
    )


def literal_loss(model: Model, cluster: str, budget: float) -> float:
    """What the published objective loses: its plan's exact time over the exact optimum's, less 1.

    Both on the published communication, so that only the objectives differ.
    """
    chain = chain_of(model, cluster, literal=True)
    literal = solve_chain(chain, budget, costs=published_costs(chain))
    return time_of(chain, literal.degrees) / solve_chain(chain, budget).time_s - 1


def time_of(chain: Chain, degrees: Sequence[int]) -> float:
    """Predicted seconds of given degrees."""
    return linearise(chain).time_s(chain.path(degrees))


def known(chain: Chain, cluster: str, model: Model) -> Known | None:
    """Table 6's row, with what the chain predicts for its degrees, if it can have them."""
    for row in tables()["table6_planner"]:
        if (row["cluster"], row["H"], row["L"]) != (cluster, model.hidden, model.layers):
            continue
        degrees = [degree for degree, count in row["planner"] for _ in range(2 * count)]
        can = set(degrees) <= set(degrees_of(model))
        costs = linearise(chain)
        return Known(
            row["optim_ms"],
            per_layer(degrees),
            row["thr_planner"] / row["thr_default"],
            time_of(chain, degrees) if can else None,
            costs.memory(chain.path(degrees)) / GIB if can else None,
        )
    return None


def cases(quick: bool) -> list[tuple[Model, str, float]]:
    """Models, clusters and budgets."""
    table6 = [(model_of(row["H"]), row["cluster"]) for row in tables()["table6_planner"]]
    profiled = [(model_of(hidden), "3090") for hidden in PROFILED]
    chosen = list(dict.fromkeys([*table6, *profiled]))[: 2 if quick else None]
    deep = replace(model_of(2048), layers=DEEP)
    return [*((m, c, BUDGET_BYTES) for m, c in chosen), (deep, "3090", 4 * BUDGET_BYTES)]


def table_of(results: Sequence[Result]) -> Table:
    """Times and degrees, the paper's beside ours."""
    table = Table(title="Oases' planner: milliseconds to solve, and degree*layers", show_lines=True)
    for title in ("chain", "ours", "HiGHS", "CBC", "paper", "our degrees", "one change",
                  "literal", "paper's degrees", "gain: ours", "paper's"):  # fmt: skip
        table.add_column(title)
    for one in results:
        paper = one.paper
        ilp = [f"{one.ilp_ms[name]:.0f}" if name in one.ilp_ms else "" for name in ("highs", "cbc")]
        table.add_row(
            one.name,
            f"{one.dp_ms:.1f}",
            *ilp,
            f"{paper.solve_ms:.0f}" if paper else "",
            one.degrees,
            one.one_switch,
            one.literal,
            _paper_text(paper) if paper else "",
            f"{one.gain:.2f}" if one.gain else "",
            f"{paper.gain:.2f}" if paper else "",
        )
    return table


def _paper_text(paper: Known) -> str:
    if paper.time_s is None:
        return f"{paper.degrees} (one sample a group: no two sub-batches)"
    return f"{paper.degrees} ({paper.time_s * 1e3:.0f} ms, {paper.memory_gib:.1f} GiB)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the arguments of every subcommand suffice."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Solve everything, print the table; what `--json` writes."""
    results = [measure(m, c, options.quick, budget=b) for m, c, b in cases(options.quick)]
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table_of(results))
    missed = [one.name for one in results if not one.is_fast]
    for line in (
        f"budget {BUDGET_BYTES / GIB:.1f} GiB ({DEEP} layers: four times that)",
        "on its own communication, the released planner's objective costs up to "
        f"{max(one.literal_loss for one in results):.2%} of the step",
        f"slower than {TARGET_MS[False]:g} ms ({TARGET_MS[True]:g} ms for {DEEP} layers): "
        f"{', '.join(missed) or 'none'}",
    ):
        console.print(line, highlight=False)
    return {"rows": [asdict(one) | {"is_fast": one.is_fast} for one in results]}
