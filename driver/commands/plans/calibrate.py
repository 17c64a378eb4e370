"""The `calibrate` command: a cluster file refined by measured runs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from shardweave.driver.commands.arguments import Commands, new_command


def add_parser(commands: Commands) -> None:
    command = new_command(commands, calibrate_command)
    command.add_argument("cluster", metavar="CLUSTER", help="a preset's name, or a YAML file")
    command.add_argument(
        "runs",
        metavar="RUNS.csv",
        nargs="+",
        help="rows of model, plan (a file, or a mesh) and step_ms",
    )
    command.add_output("default: calibrated.yaml", default="calibrated.yaml")


def calibrate_command(options: argparse.Namespace) -> int:
    """Refine a cluster file by measured runs."""
    start_s = time.monotonic()
    from shardweave.driver.commands.plans.measured_steps import StepPredictor, read_steps
    from shardweave.driver.profile.calibrate import KNOBS, calibrate
    from shardweave.planners.cost.cluster_file import save_cluster
    from shardweave.planners.cost.presets import find_cluster

    cluster = find_cluster(options.cluster)
    steps = read_steps(map(Path, options.runs))
    fit = calibrate(cluster, steps, StepPredictor().predict)
    save_cluster(fit.cluster, options.output)
    for name, factor in fit.factors.items():
        shown = "as before: no run depends on it" if name in fit.unmoved else f"x {factor:.3f}"
        print(f"{name:<10}{shown}  ({KNOBS[name]})")
    print(
        f"mean error of the step over {fit.runs} runs: {fit.before:.1%} before, {fit.after:.1%} "
        f"after; {fit.left_out:.1%} for runs that are left out of the fit"
    )
    if fit.left_out >= fit.before:
        print("no better for runs left out of the fit: keep the old file, or give more runs")
    print(f"wrote {options.output} in {time.monotonic() - start_s:.0f} s")
    return 0
