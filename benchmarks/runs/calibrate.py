"""A cluster file refined by published runs, of whatever framework.

`python benchmarks/runs/calibrate.py CLUSTER RUNS.csv .. [-o FILE]`: rows in the columns of
`data/runs/README.md`, each predicted as the scoreboard predicts it. The fit is that of
`shardweave calibrate`, whose own rows are models and plans of shardweave.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from shardweave.benchmarks.runs.predict import RunPredictor, in_order, placed
from shardweave.benchmarks.runs.rows import MeasuredRun, note_on_columns, read_runs
from shardweave.driver.profile.calibrate import calibrate
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.cluster_file import save_cluster
from shardweave.planners.cost.presets import find_cluster


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cluster", help="a preset's name, or a YAML file")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--output", default="calibrated.yaml")
    options = parser.parse_args(arguments)
    predictor = RunPredictor()

    def predict(run: MeasuredRun, cluster: Cluster) -> float:
        return predictor.predict(run, placed(run, cluster)).step_s

    for note in filter(None, map(note_on_columns, options.runs)):
        print(note)
    found = calibrate(find_cluster(options.cluster), in_order(read_runs(options.runs)), predict)
    save_cluster(found.cluster, options.output)
    print("\n".join(f"{name:<10}x {factor:.3f}" for name, factor in found.factors.items()))
    print(
        f"mean error of the step over {found.runs} runs: {found.before:.1%} before, "
        f"{found.after:.1%} after; {found.left_out:.1%} for runs that are left out of the fit"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
