"""Planners that try plans out: OPPA, and its baselines `random` and `boosted-trees`."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import cast, get_args

from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Program
from shardweave.ir.types import shape_of
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.quantity import gib
from shardweave.planners.degrees import asked_degrees, divisors
from shardweave.planners.lower import RECENT, Lowerings
from shardweave.planners.megatron import plan_megatron
from shardweave.planners.oppa.choosers import BayesianChooser, Chooser
from shardweave.planners.oppa.gp import Kernel
from shardweave.planners.oppa.prior import Form
from shardweave.planners.oppa.real_trials import RealTrials, launch_of, measured
from shardweave.planners.oppa.search import Found, search
from shardweave.planners.oppa.space import Configuration
from shardweave.planners.oppa.trials import Host, Outcome, Record, Trial, TrialFile
from shardweave.planners.plan import Plan
from shardweave.planners.plan_parts import PAPERS_RECOMPUTE, Candidate, PlanError, Predicted
from shardweave.planners.predict import simulate_plan, with_candidates

AXES = ("data", "tensor")
SUB_BATCH_SCHEDULES = ("none", "sub-batch", "cross-pass")
MAX_SUB_BATCHES = 4


@dataclass(frozen=True)
class TrialOptions:
    """The options of every planner that tries plans out.

    trials: how many, those in `file` included; `file` keeps them, and a search goes on from it.
    real: train for `steps` steps on local processes, each trial within `time_limit_s` seconds,
    instead of simulating. slow: a real trial ends after the first steps that take more than so many
    times a step of the fastest; 0: none does. top: candidates that the plan lists.
    """

    trials: int = 20
    file: str = ""
    real: bool = False
    steps: int = 5
    time_limit_s: float = 120.0
    slow: float = 2.0
    seed: int = 0
    top: int = 5


@dataclass(frozen=True)
class OppaOptions(TrialOptions):
    """first: random trials before anything is learned. form: of the formulas, `literal`,
    `corrected` or `extended`. kernel: `ard` or `additive`.
    """

    first: int = 5
    form: str = "extended"
    kernel: str = "ard"


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

    Objective: steps per second of a trial, of plans that fit into memory, over data x tensor
    degrees x sequence parallelism x recomputation x sub-batches x schedule on all devices of the
    cluster, or those of `mesh`. Not exact. Source: Hemachandra et al., OPPA, 2025; departures are
    in docs/planners.md. Needs botorch.

    Time: a trial each, and about a second to choose.

    Raises PlanError if no trial ran within the memory, TrialsError for a file that cannot be used.
    """
    for what, word, known in (
        ("form", options.form, get_args(Form)),
        ("kernel", options.kernel, get_args(Kernel)),
    ):
        if word not in known:
            raise PlanError(f"oppa's {what} is '{word}'; use one of {', '.join(known)}.")
    form, kernel = cast("Form", options.form), cast("Kernel", options.kernel)
    chooser = BayesianChooser(form, kernel, options.first)
    return plan_by_trials("oppa", program, mesh, cluster, chooser, options, host)


def plan_by_trials(
    name: str,
    program: Program,
    mesh: Mesh | None,
    cluster: Cluster,
    chooser: Chooser,
    options: TrialOptions,
    host: Host | None,
) -> Plan:
    """The fastest plan that a search finds; see `plan_oppa`."""
    plans = Plans(name, program)
    devices = cluster.num_devices if mesh is None else mesh.num_devices
    space = _space(program, devices)
    configurations = [one for one in space if _is_wanted(one, mesh, plans)]
    if not configurations:
        raise PlanError(
            f"no plan of data x tensor uses the {devices} devices of "
            f"{mesh or cluster.name} for this program; change the batch, or give a mesh."
        )
    problem = {
        "program": hashlib.sha256(str(program).encode()).hexdigest()[:16],
        "cluster": cluster.name,
        "mesh": "" if mesh is None else str(mesh),
        "trials": f"real, {options.steps} steps" if options.real else "simulated",
    }
    simulated = PlanTrial(plans, cluster)
    memory_bytes = min(one.memory_bytes for one in cluster.device_types(devices))
    opened = TrialFile.open(options.file, problem) if options.file else nullcontext()
    with opened as file:
        notes = tuple(file.notes) if file else ()
        earlier = [one.outcome for one in file.records] if file else []
        trial = _real_trial(plans, options, host, earlier) if options.real else simulated.run
        found = search(
            configurations,
            trial,
            chooser,
            options.trials,
            memory_bytes=memory_bytes,
            seed=options.seed,
            file=file,
            progress=_progress(options.trials, host),
        )

    def predict(one: Record) -> Predicted:
        return measured(one.outcome) if options.real else simulated.predict(one.configuration)

    plan = _plan_of(found, plans, memory_bytes, options, len(configurations), predict)
    return replace(plan, notes=(*plan.notes, *notes))


@dataclass(eq=False)
class Plans:
    """The plan of a configuration: Megatron's shardings, and what the configuration adds."""

    planner: str
    program: Program
    _bases: dict[tuple[int, int, bool], Plan] = field(
        default_factory=dict[tuple[int, int, bool], Plan]
    )

    def base(self, data: int, tensor: int, sequence_parallel: bool) -> Plan:
        key = (data, tensor, sequence_parallel)
        if key not in self._bases:
            mesh = Mesh(data=data, tensor=tensor)
            found = plan_megatron(self.program, mesh, sequence_parallel=sequence_parallel)
            self._bases[key] = replace(found, planner=self.planner)
        return self._bases[key]

    def is_useful(self, one: Configuration) -> bool:
        """Whether every axis cuts something."""
        base = self.base(one.data, one.tensor, one.sequence_parallel)
        is_cut = (one.data == 1 or base.inputs) and (one.tensor == 1 or base.parameters)
        return bool(is_cut and (not one.sequence_parallel or base.activations))

    def plan(self, one: Configuration) -> Plan:
        return replace(
            self.base(one.data, one.tensor, one.sequence_parallel),
            recompute=one.recompute,
            batch_split=one.micro_batches,
            schedule="" if one.schedule == "none" else one.schedule,
        )


@dataclass(eq=False)
class PlanTrial:
    """A trial in the simulator: the program is partitioned by the plan, and its step simulated."""

    plans: Plans
    cluster: Cluster
    lowerings: Lowerings = field(init=False)
    _predicted: dict[Configuration, Predicted] = field(
        default_factory=dict[Configuration, Predicted]
    )

    def __post_init__(self) -> None:
        self.lowerings = Lowerings(self.plans.program, most=RECENT)

    def run(self, configuration: Configuration) -> Outcome:
        """One time, for the simulator has no noise. What cannot be partitioned has crashed."""
        try:
            found = self.predict(configuration)
        except ValueError as error:
            return Outcome("crashed", message=str(error))
        if not found.fits:
            return Outcome("out_of_memory", peak_bytes=found.peak_bytes)
        return Outcome("ok", (found.time_s,), found.peak_bytes)

    def predict(self, configuration: Configuration) -> Predicted:
        """The step of a trial by part; simulated here if the trial is of an earlier search."""
        if configuration not in self._predicted:
            plan = self.plans.plan(configuration)
            self._predicted[configuration] = simulate_plan(self.lowerings, plan, self.cluster)
        return self._predicted[configuration]


def _real_trial(
    plans: Plans, options: TrialOptions, host: Host | None, earlier: Sequence[Outcome]
) -> Trial:
    """A trial on real processes, which knows what earlier ones took."""
    launch = launch_of(host, plans.planner)
    real = RealTrials(launch, options.steps, options.time_limit_s, options.slow)
    real.learn(earlier)
    return lambda one: real.run(plans.plan(one))


def _space(program: Program, devices: int) -> list[Configuration]:
    """What backends run on so many devices, always in the same order.

    The data degree divides the batch, and sub-batches a replica's share of it. Without two
    sub-batches there is nothing to alternate between, and without a tensor axis no sequence to cut.
    """
    inputs = [shape_of(slot.value) for slot in program.arguments if slot.kind == "input"]
    batch = max((shape[0] for shape in inputs if shape), default=1)
    found: list[Configuration] = []
    for tensor in divisors(devices & -devices):
        data = devices // tensor
        if batch % data:
            continue
        counts = [n for n in divisors(batch // data) if n <= MAX_SUB_BATCHES]
        sequences = (False, True) if tensor > 1 else (False,)
        for count, recompute, sequence in product(counts, PAPERS_RECOMPUTE, sequences):
            found += [
                Configuration(
                    data=data,
                    tensor=tensor,
                    micro_batches=count,
                    recompute=recompute,
                    schedule=schedule,
                    sequence_parallel=sequence,
                )
                for schedule in (SUB_BATCH_SCHEDULES if count > 1 else ("none",))
            ]
    return found


def _is_wanted(one: Configuration, mesh: Mesh | None, plans: Plans) -> bool:
    sizes = asked_degrees(mesh, AXES, plans.planner, PlanError)
    asked = sizes.get("data", 1), sizes.get("tensor", 1)
    return (mesh is None or asked == (one.data, one.tensor)) and plans.is_useful(one)


def _progress(trials: int, host: Host | None) -> Callable[[Sequence[Record]], None] | None:
    if host is None or host.tell is None:
        return None
    tell = host.tell

    def say(records: Sequence[Record]) -> None:
        rates = [one.outcome.throughput for one in records if one.outcome.status == "ok"]
        best = f"best {max(rates):.4g} steps/s" if rates else "none ran so far"
        last = records[-1]
        tell(
            f"trial {len(records)} of {trials}: {last.configuration}: "
            f"{last.outcome.status.replace('_', ' ')}; {best}"
        )

    return say


def _plan_of(
    found: Found,
    plans: Plans,
    capacity: float,
    options: TrialOptions,
    size: int,
    predict: Callable[[Record], Predicted],
) -> Plan:
    counts = Counter(one.outcome.status for one in found.records)
    told = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in counts.items())
    if found.best is None:
        last = next((r.outcome.message for r in reversed(found.records) if r.outcome.message), "")
        raise PlanError(
            f"none of {len(found.records)} trials ran within {gib(capacity)} GiB ({told}); "
            f"make more trials, or use more devices. {last}".rstrip()
        )
    ran = [one for one in found.records if one.outcome.status == "ok" and one != found.best]
    ran.sort(key=lambda one: -one.outcome.throughput)
    best = [found.best, *ran][: max(1, options.top)]
    rows = [
        Candidate(str(one.configuration), replace(predict(one), capacity_bytes=capacity))
        for one in best
    ]
    reason = f"the fastest of {len(found.records)} trials ({told}) of {size} configurations"
    plan = replace(plans.plan(found.best.configuration), reasons=(reason,))
    return with_candidates(plan, rows)
