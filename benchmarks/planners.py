"""The planners against published and measured data, one subcommand each.

`python benchmarks/planners.py amp --setup homogeneous [--measured FILE] [--json OUT] [--quick]`,
`python benchmarks/planners.py amp-baselines [--json OUT] [--quick]`,
`python benchmarks/planners.py amp-trials [--json OUT] [--quick]`,
`python benchmarks/planners.py axonn [--json OUT] [--quick]`,
`python benchmarks/planners.py axonn-overlap [--json OUT] [--quick]`,
`python benchmarks/planners.py axonn-rivals [--json OUT] [--quick]`,
`python benchmarks/planners.py oases [--json OUT] [--quick]`,
`python benchmarks/planners.py oases-baselines [--json OUT] [--quick]`,
`python benchmarks/planners.py oases-degrees [--json OUT] [--quick]`,
`python benchmarks/planners.py oppa [--json OUT] [--plot PNG] [--quick]`,
`python benchmarks/planners.py oppa-early-stop [--json OUT] [--quick]`,
`python benchmarks/planners.py oppa-surrogate [--json OUT] [--quick]`.
A subcommand is a module beside this one with `add_arguments(parser)` and `run(options)`, which
prints its tables and returns what `--json` writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from shardweave.benchmarks import (
    amp_baselines,
    amp_planner,
    amp_trials,
    axonn_overlap,
    axonn_planner,
    axonn_rivals,
    oases_baselines,
    oases_degrees,
    oases_planner,
    oppa_early_stop,
    oppa_planner,
    oppa_surrogate,
)

SUBCOMMANDS: dict[str, ModuleType] = {
    "amp": amp_planner,
    "amp-baselines": amp_baselines,
    "amp-trials": amp_trials,
    "axonn": axonn_planner,
    "axonn-overlap": axonn_overlap,
    "axonn-rivals": axonn_rivals,
    "oases": oases_planner,
    "oases-baselines": oases_baselines,
    "oases-degrees": oases_degrees,
    "oppa": oppa_planner,
    "oppa-early-stop": oppa_early_stop,
    "oppa-surrogate": oppa_surrogate,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 2 on bad input, with a line that says what to do."""
    options = _parser().parse_args(argv)
    try:
        report = SUBCOMMANDS[options.planner].run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
        print(f"wrote {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Planners against published and measured data.")
    commands = parser.add_subparsers(dest="planner", required=True, metavar="PLANNER")
    for name, module in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0])
        module.add_arguments(command)
        command.add_argument("--quick", action="store_true", help="time everything once")
        command.add_argument("--json", metavar="FILE", help="write the results there as well")
    return parser


if __name__ == "__main__":
    sys.exit(main())
