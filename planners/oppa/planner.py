"""The planner `oppa`: tries plans, and chooses the next one by what it learned from the trials."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import numpy as np

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import counted, gib
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.oppa.choosers import BayesianChooser, Chooser, History
from shardweave.planners.oppa.joint import JointPlans
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import Candidate, PlanError, Predicted
from shardweave.planners.predict.predict import predict_plan, with_candidates
from shardweave.planners.trials.space import Configuration, SpaceTable
from shardweave.planners.trials.trials import (
    Deadline,
    Host,
    Outcome,
    RealTrials,
    Record,
    Trial,
    TrialFile,
    launch_of,
    measured,
)


@dataclass(frozen=True)
class Found:
    """Result of a search. records: all trials in order. best: the fastest that fits, if any."""

    records: tuple[Record, ...]
    best: Record | None


Progress = Callable[[Sequence[Record]], None]
"""Callback after every trial; its argument is all trials so far."""


def run_trials(
    configurations: Sequence[Configuration],
    trial: Trial,
    chooser: Chooser,
    trials: int,
    *,
    memory_bytes: float | None = None,
    time_limit_s: float = 0.0,
    seed: int = 0,
    file: TrialFile | None = None,
    progress: Progress | None = None,
) -> Found:
    """Try configurations until there are `trials` trials, or all configurations were tried.

    trials: includes trials of earlier searches. time_limit_s: seconds after which no trial begins,
    except the first of all; 0: no limit. memory_bytes: memory of a device; a trial that needs more
    does not fit. file: keeps the trials; a search continues after those in it, and makes the
    choices that it would have made without the interruption (random numbers depend on seed and
    number of the trial).

    Raises PlanError if the file has a trial of a configuration that is not among these.
    """
    table = SpaceTable.of(configurations)
    row_of = {c: row for row, c in enumerate(configurations)}
    records = list(file.records) if file else []
    rows = _rows(file, row_of) if file else []
    limit = Deadline(time_limit_s)
    while len(rows) < min(trials, len(configurations)):
        if rows and limit.is_past:
            break
        history = History(table, rows, records, memory_bytes)
        choice = chooser.choose(history, np.random.default_rng([seed, len(rows)]))
        start_s = time.monotonic()
        outcome = trial(configurations[choice.row])
        seconds = time.monotonic() - start_s
        record = Record(configurations[choice.row], outcome, choice.reason, seconds)
        if file is not None:
            file.add(record)
        rows.append(choice.row)
        records.append(record)
        if progress is not None:
            progress(records)
    history = History(table, rows, records, memory_bytes)
    kept = [record for record in records if history.fits(record)]
    best = max(kept, key=lambda record: record.outcome.throughput, default=None)
    return Found(tuple(records), best)


def _rows(file: TrialFile, row_of: Mapping[Configuration, int]) -> list[int]:
    rows: list[int] = []
    for number, record in enumerate(file.records, start=2):
        row = row_of.get(record.configuration)
        if row is None:
            raise PlanError(
                f"{file.path}:{number}: the trial's configuration '{record.configuration}' is "
                "not in this search space; give the trials file of this search, or a new one."
            )
        rows.append(row)
    return rows


@dataclass(frozen=True)
class TrialOptions:
    """The options of a planner that tries plans out.

    trials: number of trials, including those in `file`, which keeps all trials and from which a
    search continues. time_limit_s: seconds of search after which no trial begins, except the first;
    0: no limit. real: train for `steps` steps on local processes, each trial within `trial_limit_s`
    seconds, instead of simulating. slow: a real trial ends after the first steps that take more
    than this many times a step of the fastest; 0: never. top: number of candidates that the plan
    lists.
    """

    trials: int = 20
    file: str = ""
    real: bool = False
    steps: int = 5
    time_limit_s: float = 0.0
    trial_limit_s: float = 120.0
    slow: float = 2.0
    seed: int = 0
    top: int = 5


@dataclass(frozen=True)
class OppaOptions(TrialOptions):
    """Options of `plan_oppa`. first: number of random trials before choosing by a model."""

    first: int = 5


DEFAULTS = TrialOptions()
OPPA_DEFAULTS = OppaOptions()


def plan_oppa(
    program: Program,
    mesh: Mesh | None,
    *,
    cluster: Cluster,
    host: Host | None = None,
    options: OppaOptions = OPPA_DEFAULTS,
) -> Plan:
    """Try plans, and learn which to try next: constrained Bayesian optimisation.

    Objective: steps per second in a trial, among plans that fit into memory, over the space that
    `auto` searches on all devices of the cluster, or those of `mesh`, without schedules `list`. Not
    exact. It ends after a number of trials or seconds, as the paper's Algorithm 1 does. Source:
    Hemachandra et al., OPPA, 2025; departures are in docs/planners.md. Needs botorch.

    Time: a trial each, and about a second to choose.

    Raises PlanError if no trial ran within the memory, and for a file that cannot be used.
    """
    if options.trials < 1:
        raise PlanError(
            f"planner 'oppa' is asked for {counted(options.trials, 'trial')}; use trials >= 1."
        )
    chooser = BayesianChooser(first=options.first)
    return plan_by_trials(JointPlans("oppa", program, cluster, mesh), chooser, options, host)


class Plans(Protocol):
    """A search space: configurations, and the plan of each. space: its name in trial files."""

    planner: str
    program: Program
    cluster: Cluster
    mesh: Mesh | None
    space: ClassVar[str]

    def configurations(self) -> list[Configuration]:
        """Return all configurations, always in the same order."""
        ...

    def plan(self, configuration: Configuration) -> Plan:
        """Make a configuration's plan. Raises PlanError if it has none."""
        ...


def plan_by_trials(
    plans: Plans, chooser: Chooser, options: TrialOptions, host: Host | None
) -> Plan:
    """Search `plans` by trials and return the fastest; see `plan_oppa`."""
    program, cluster, mesh = plans.program, plans.cluster, plans.mesh
    devices = cluster.num_devices if mesh is None else mesh.num_devices
    configurations = plans.configurations()
    if not configurations:
        raise PlanError(
            f"no plan of the search space {plans.space} uses all {devices} devices of "
            f"{mesh or cluster.name} for this program; change the batch, or give another mesh."
        )
    problem = {
        "program": program.digest()[:16],
        "cluster": cluster.name,
        "mesh": "" if mesh is None else str(mesh),
        "trials": f"real, {options.steps} steps" if options.real else "simulated",
        "space": plans.space,
    }
    simulated = PlanTrial(plans, cluster)
    memory_bytes = min(d.memory_bytes for d in cluster.device_types(devices))
    opened = TrialFile.open(options.file, problem) if options.file else nullcontext()
    with opened as file:
        notes = tuple(file.notes) if file else ()
        earlier = [r.outcome for r in file.records] if file else []
        trial = _real_trial(plans, options, host, earlier) if options.real else simulated.run
        result = run_trials(
            configurations,
            trial,
            chooser,
            options.trials,
            memory_bytes=memory_bytes,
            time_limit_s=options.time_limit_s,
            seed=options.seed,
            file=file,
            progress=_progress(options.trials, host),
        )

    def predict(record: Record) -> Predicted:
        return measured(record.outcome) if options.real else simulated.predict(record.configuration)

    plan = _plan_of(result, plans, memory_bytes, options, len(configurations), predict)
    return replace(plan, notes=(*plan.notes, *notes))


@dataclass(eq=False)
class PlanTrial:
    """Trials in the simulator: each lowers the program by a plan and simulates its step."""

    plans: Plans
    cluster: Cluster
    lowerings: Lowerings = field(init=False)
    _predicted: dict[Configuration, Predicted] = field(
        default_factory=dict[Configuration, Predicted]
    )

    def __post_init__(self) -> None:
        self.lowerings = Lowerings(self.plans.program, most=RECENT)

    def run(self, configuration: Configuration) -> Outcome:
        """Simulate once, since the simulator has no noise; a failed partition counts as a crash."""
        try:
            predicted = self.predict(configuration)
        except ValueError as error:
            return Outcome("crashed", message=str(error))
        if not predicted.fits:
            return Outcome("out_of_memory", peak_bytes=predicted.peak_bytes)
        return Outcome("ok", (predicted.time_s,), predicted.peak_bytes)

    def predict(self, configuration: Configuration) -> Predicted:
        """Return the predicted times of a configuration's step, simulated at the first call."""
        if configuration not in self._predicted:
            plan = self.plans.plan(configuration)
            self._predicted[configuration] = predict_plan(self.lowerings, plan, self.cluster)
        return self._predicted[configuration]


def _real_trial(
    plans: Plans, options: TrialOptions, host: Host | None, earlier: Sequence[Outcome]
) -> Trial:
    """Make a trial that runs on real processes, and ends early if slower than `earlier` ones."""
    launch = launch_of(host, plans.planner)
    real = RealTrials(launch, options.steps, options.trial_limit_s, options.slow)
    real.learn(earlier)
    return lambda configuration: real.run(plans.plan(configuration))


def _progress(trials: int, host: Host | None) -> Callable[[Sequence[Record]], None] | None:
    if host is None or host.tell is None:
        return None
    tell = host.tell

    def say(records: Sequence[Record]) -> None:
        rates = [r.outcome.throughput for r in records if r.outcome.status == "ok"]
        best = f"best {max(rates):.4g} steps/s" if rates else "none ran so far"
        last = records[-1]
        tell(
            f"trial {len(records)} of {trials}: {last.configuration}: "
            f"{last.outcome.status.replace('_', ' ')}; {best}"
        )

    return say


def _plan_of(
    result: Found,
    plans: Plans,
    capacity: float,
    options: TrialOptions,
    size: int,
    predict: Callable[[Record], Predicted],
) -> Plan:
    counts = Counter(r.outcome.status for r in result.records)
    told = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in counts.items())
    if result.best is None:
        last = next((r.outcome.message for r in reversed(result.records) if r.outcome.message), "")
        raise PlanError(
            f"none of {counted(len(result.records), 'trial')} ran within {gib(capacity)} GiB "
            f"({told}); make more trials, or use more devices. {last}".rstrip()
        )
    ran = [r for r in result.records if r.outcome.status == "ok" and r != result.best]
    ran.sort(key=lambda r: -r.outcome.throughput)
    best = [result.best, *ran][: max(1, options.top)]
    rows = [
        Candidate(str(r.configuration), replace(predict(r), capacity_bytes=capacity)) for r in best
    ]
    reason = f"the fastest of {counted(len(result.records), 'trial')} ({told}) of "
    reason += counted(size, "configuration")
    if options.time_limit_s and len(result.records) < min(options.trials, size):
        reason += f"; the time limit of {options.time_limit_s:g} s ended the search"
    plan = replace(plans.plan(result.best.configuration), reasons=(reason,))
    return with_candidates(plan, rows)
