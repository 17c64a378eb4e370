"""Planning a program for a person: a plan, why it was chosen, and two plans side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from shardweave.driver.commands.arguments import DTYPES, messages
from shardweave.driver.commands.read_programs import is_text, read_or_capture
from shardweave.driver.models.models import parse_options
from shardweave.driver.processes.trials import host_of
from shardweave.driver.report.plan import (
    comparison_table,
    plot_candidates,
    print_candidates,
    print_plan,
    print_throughput,
)
from shardweave.driver.report.text import status
from shardweave.ir.program.program import Program
from shardweave.planners.call import require_cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import bytes_text
from shardweave.planners.lowering.plan_passes import PlanPasses
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_plan
from shardweave.planners.plan.plan_parts import Candidate
from shardweave.planners.planning import on_cluster, plan, with_update
from shardweave.planners.registry import DEFAULT_PLANNER, PLANNERS, no_such_plan

DIFFERENCES = 20
"""Largest number of lines that show differences between two plans."""


def plan_program(options: argparse.Namespace) -> int:
    """Plan a program, or compare two plans of it."""
    _check_useful(options)
    # Before the work that a cluster is needed for.
    if options.cluster:
        find_cluster(options.cluster)
    for name in _planners(options):
        require_cluster(name, options.cluster, is_mesh_given=True)
    given = _options(options)
    program = _program(options)
    out = messages(options.output or "")
    if options.compare:
        return _compare(options, given, program)
    (planner,) = _planners(options)
    with status(f"planning with {planner}") as shown:
        plan = _planned(options, planner, given, program, tell=shown.update)
    considered = plan.candidates or _rows([plan.planner], [plan])
    if options.explain:
        print_candidates(considered, out)
    if options.cluster and plan.predicted is not None:
        print_throughput(program, options.cluster, plan, plan.predicted, out)
    print_plan(plan, out)
    if options.show_passes:
        print(f"passes: {PlanPasses.of(plan)}", file=out)
    _plot(considered, options.plot, out)
    _check_fits(plan)
    if options.output == "-":
        sys.stdout.write(plan.to_json() + "\n")
    elif options.output:
        plan.save(options.output)
        print(f"wrote {options.output}")
    return 0


def _planners(options: argparse.Namespace) -> list[str]:
    """Names of the planners to run, leaving out plan files among the arguments."""
    if not options.compare:
        return [options.planner or DEFAULT_PLANNER]
    return [name for name in _compared(options) if name in PLANNERS]


def _compared(options: argparse.Namespace) -> list[str]:
    names = [name.strip() for name in options.compare.split(",")]
    if len(names) != 2 or not all(names):
        raise ValueError(
            f"--compare '{options.compare}' must name two planners or plan files, separated by a "
            "comma, such as megatron,amp."
        )
    return names


def _check_useful(options: argparse.Namespace) -> None:
    """Raises ValueError for an argument that would do nothing."""
    if options.compare:
        _check_useful_to_compare(options)
    if not options.cluster and (options.explain or (options.plot and not options.compare)):
        raise ValueError(
            f"{('--explain' if options.explain else '--plot')} shows predicted step times, which "
            "need a cluster; give --cluster."
        )
    if options.dtype and is_text(options.file):
        raise ValueError(
            f"--dtype {options.dtype} applies to a model, but '{options.file}' is a captured "
            "program, which has fixed dtypes; leave --dtype out, or give the model."
        )


def _check_useful_to_compare(options: argparse.Namespace) -> None:
    if options.output:
        raise ValueError(
            "--compare compares two plans and writes none; leave -o out, or plan without --compare."
        )
    given = (name for name in ("explain", "show_passes", "planner") if getattr(options, name))
    useless = next(given, "").replace("_", "-")
    if useless:
        raise ValueError(
            f"--compare already chooses the plans and shows its own table; leave --{useless} "
            "out, or plan without --compare."
        )
    if _options(options) and not _planners(options):
        raise ValueError(
            f"--compare {options.compare} compares existing plan files; leave out "
            f"{', '.join(_options(options))}, which are options of planners."
        )


def _options(options: argparse.Namespace) -> dict[str, Any]:
    """Collect the planner's options, from -O and from arguments of their own."""
    given: dict[str, Any] = dict(parse_options(",".join(text.strip() for text in options.option)))
    own = {
        "fix": ",".join(options.fix),
        "forbid": ",".join(options.forbid),
        "memory": options.memory,
        "time_limit_s": options.time_limit,
    }
    for name, value in own.items():
        if value and name in given:
            raise ValueError(
                f"option '{name}' is given both by -O and by an option of its own; keep one of "
                "them."
            )
    return given | {name: value for name, value in own.items() if value}


def _program(options: argparse.Namespace) -> Program:
    program = read_or_capture(options.file, options.dtype or DTYPES[0])
    if program.is_local:
        raise ValueError(
            f"'{options.file}' is a local program, already partitioned for one rank; give the "
            "global program, which `shardweave capture` writes."
        )
    return program


def _check_fits(plan: Plan) -> None:
    """Raises ValueError for a plan that needs more memory than the cluster's devices have."""
    predicted = plan.predicted
    if predicted is not None and predicted.capacity_bytes and not predicted.fits:
        missing = bytes_text(predicted.peak_bytes - predicted.capacity_bytes)
        raise ValueError(
            f"the plan of '{plan.planner}' needs {missing} more memory than its fullest device "
            "has, and is not written; use planner 'auto', which looks for a plan that fits, or "
            "more devices."
        )


def _planned(
    options: argparse.Namespace,
    planner: str,
    given: dict[str, Any],
    program: Program,
    *,
    tell: Callable[[str], None] | None = None,
) -> Plan:
    model = None if is_text(options.file) else options.file
    host = host_of(model, dtype=options.dtype or DTYPES[0], tell=tell)
    return plan(
        program,
        options.mesh or None,
        planner,
        cluster=options.cluster,
        host=host,
        update=options.update,
        **given,
    )


def _compare(options: argparse.Namespace, given: dict[str, Any], program: Program) -> int:
    names, plans = _compared(options), list[Plan]()
    for name in names:
        with status(f"planning with {name}"):
            plans.append(_plan_named(options, name, given, program))
    Console().print(comparison_table(names, plans))
    lines = [line for line in plans[0].diff(plans[1]) if not _is_outcome(line)]
    for line in lines[:DIFFERENCES]:
        print(line)
    if len(lines) > DIFFERENCES:
        print(f"and {len(lines) - DIFFERENCES} more lines")
    for name, compared in zip(names, plans, strict=True):
        for note in compared.notes:
            print(f"note: {name}: {note}")
    _plot(_rows(names, plans), options.plot, sys.stdout)
    return 0


def _plan_named(
    options: argparse.Namespace, name: str, given: dict[str, Any], program: Program
) -> Plan:
    if name in PLANNERS:
        return _planned(options, name, given, program)
    if not Path(name).is_file():
        raise ValueError(no_such_plan(name))
    plan = Plan.load(name)
    check_plan(plan, program)
    plan = with_update(plan, options.update)
    return on_cluster(program, plan, options.cluster) if options.cluster else plan


def _is_outcome(line: str) -> bool:
    """True if a line of a difference is about the prediction, which the table shows already."""
    what = line[2:].split(":")[0].split(" ")[0]
    return what in ("predicted", "reasons", "candidates", "planner", "notes")


def _rows(names: Sequence[str], plans: Sequence[Plan]) -> tuple[Candidate, ...]:
    """The plans that have a prediction, as rows of a table."""
    pairs = zip(names, plans, strict=True)
    return tuple(Candidate(name, plan.predicted) for name, plan in pairs if plan.predicted)


def _plot(rows: Sequence[Candidate], path: str | None, out: TextIO) -> None:
    if path:
        plot_candidates(rows, path)
        print(f"wrote {path} (a picture)", file=out)
