"""The `simulate` command: what a program's schedule takes on a cluster."""

from __future__ import annotations

import argparse
import json

from shardweave.driver.text_commands import read
from shardweave.ir.verify import check
from shardweave.planners.simulate import simulate
from shardweave.planners.timeline import record


def simulate_command(options: argparse.Namespace) -> int:
    """Simulate a program; print its summary, or its numbers as JSON."""
    program = read(options.file)
    check(program)
    found = simulate(program, options.cluster, optimizer_multiplier=options.optimizer)
    written = f"{len(found.events)} events"
    if options.json:
        print(json.dumps(record(found), indent=2))
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
