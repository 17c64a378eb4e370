"""The losses of examples/train.py beside those of its eager twin, on the same data.

`python benchmarks/loss_curve.py [--quick] [--json FILE] [--plot FILE]`: bfloat16, two micro-batches
a step. The sharded run is killed twice, with SIGKILL, and goes on from its last checkpoint on
another mesh: first of as many processes, then of fewer. Eager runs a second time with four
micro-batches a step: the same training up to rounding, by whose distance ours is to be judged.
With `--dropout 0.05`, eager drops the same elements (`sw.seeded`), and does not run a second time,
since micro-batches of another size drop others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardweave.benchmarks.compile_time import machine
from shardweave.benchmarks.training_runs import sharded, start

MESHES = ("data=2,tensor=2", "data=4", "tensor=2")
Losses = dict[int, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="24 steps instead of 200")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--json", default="", help="write the losses to this file")
    parser.add_argument("--plot", default="", help="draw them to this file")
    options = parser.parse_args()
    num_steps, save_every = (24, 8) if options.quick else (200, 20)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), num_steps, save_every, options.dropout)
    Console(width=max(110, Console().width)).print(table_of(results))
    others = [name for name in results["losses"] if name != "eager"]
    distances = {name: distance(results["losses"], name) for name in others}
    for name, (mean, largest) in distances.items():
        print(f"{name}: {mean:.4f} from eager on average, {largest:.4f} at most")
    if options.json:
        results["machine"] = machine()
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    if options.plot:
        plot(results, options.plot)
    return 0


def measure(folder: Path, num_steps: int, save_every: int, dropout: float) -> dict[str, Any]:
    """Losses by run and step, validation losses, and where the sharded run went on."""
    common = ["--steps", str(num_steps), "--show-every", "1", "--save-every", str(save_every)]
    common += ["--dropout", str(dropout)]
    losses: dict[str, Losses] = {}
    validation: dict[str, list[float]] = {}
    for name, parts in {"eager": 2, **({} if dropout else {"eager, 4 parts": 4})}.items():
        run = start("train_eager.py", [*common, *at(folder / name), "--accumulate", str(parts)])
        run.finish()
        losses[name] = run.losses
        if parts == 2:  # with smaller micro-batches the validation leaves out fewer samples
            validation[name] = run.validation
    found: Losses = {}
    resumed: list[int] = []
    for index, mesh in enumerate(MESHES):
        run = sharded([*common, *at(folder / "sharded")], mesh)
        if index < len(MESHES) - 1:
            third = num_steps * (index + 1) // len(MESHES) // save_every * save_every
            run.until(third + save_every // 2)
            run.kill()
        else:
            run.finish()
        resumed.append(run.starts[0] + 1)
        found |= run.losses
        validation["sharded"] = run.validation
    assert resumed[0] == 1, "the first run found a checkpoint"
    losses["sharded"] = found
    return {"meshes": dict(zip(MESHES, resumed, strict=True)), "losses": losses} | {
        "validation": {name: given[-1] for name, given in validation.items()}
    }


def at(path: Path) -> list[str]:
    return ["--checkpoint", str(path)]


def distance(losses: Mapping[str, Losses], name: str) -> tuple[float, float]:
    """Mean and largest distance of a run's losses from those of eager."""
    apart = [abs(loss - losses["eager"][step]) for step, loss in losses[name].items()]
    return statistics.mean(apart), max(apart)


def table_of(results: Mapping[str, Any]) -> Table:
    """The losses of some steps, and of the validation at the end."""
    losses: Mapping[str, Losses] = results["losses"]
    table = Table(title="Loss, nats per byte")
    for title in ("step", "mesh", *losses):
        table.add_column(title, justify="left" if title == "mesh" else "right")
    last = max(losses["eager"])
    shown: Sequence[int] = [1, *range(last // 8, last + 1, last // 8)]
    for step in shown:
        mesh = [mesh for mesh, first in results["meshes"].items() if first <= step][-1]
        table.add_row(str(step), mesh, *(f"{of[step]:.4f}" for of in losses.values()))
    at_end = [results["validation"].get(name) for name in losses]
    table.add_row("validation", mesh, *("-" if x is None else f"{x:.4f}" for x in at_end))
    return table


def plot(results: Mapping[str, Any], path: str) -> None:
    """Losses over steps, and below the distance of each run from eager."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses: Mapping[str, Losses] = results["losses"]
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    styles = {"eager": "black", "eager, 4 parts": "tab:orange", "sharded": "tab:blue"}
    for name, of in sorted(losses.items()):
        width = 3.0 if name == "eager" else 1.2
        above.plot(list(of), list(of.values()), color=styles[name], linewidth=width, label=name)
        if name != "eager":
            apart = [loss - losses["eager"][step] for step, loss in of.items()]
            below.plot(list(of), apart, color=styles[name], linewidth=1.2)
    for mesh, first in results["meshes"].items():
        for axes in (above, below):
            axes.axvline(first, color="gray", linewidth=0.8, linestyle=":")
        above.text(first + 1, above.get_ylim()[1] * 0.97, mesh, color="gray", va="top")
    above.set_ylabel("loss, nats per byte")
    above.legend(loc="upper right")
    below.set_ylabel("minus eager's")
    below.set_xlabel("step")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
