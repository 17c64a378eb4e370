"""The `simulate` command: what a program's schedule takes on a cluster."""

from __future__ import annotations

import argparse
import json

from shardweave.driver.commands.text import read
from shardweave.driver.plans import simulate_plan
from shardweave.ir.program import Program
from shardweave.ir.verify.program import check
from shardweave.planners.cost.pipeline import PipelineSimulation
from shardweave.planners.cost.simulate import Simulation, simulate


def simulate_command(options: argparse.Namespace) -> int:
    """Simulate a program, or one under a plan; print a summary, or the numbers as JSON."""
    program = read(options.file)
    check(program)
    found = _simulated(program, options)
    written = f"{len(found.events)} events"
    if options.json:
        print(json.dumps(found.record(), indent=2))
    else:
        print(found.summary())
    if options.trace:
        found.save_trace(options.trace)
    if options.plot:
        found.plot(options.plot)
    for path, what in ((options.trace, written), (options.plot, "a picture")):
        if path and not options.json:
            print(f"wrote {path} ({what})")
    return 0


def _simulated(program: Program, options: argparse.Namespace) -> Simulation | PipelineSimulation:
    given: float | None = options.optimizer
    if options.plan is None:
        return simulate(program, options.cluster, optimizer_multiplier=given or 0.0)
    if program.is_local:
        raise ValueError(
            f"'{options.file}' is the program of one rank already; with --plan give the captured "
            "one, which `shardweave capture` writes."
        )
    return simulate_plan(program, options.plan, options.cluster, optimizer_multiplier=given)
