"""Staged programs of deep models, built from the program of the model with few blocks.

In a model of equal blocks, all stages except the first and the last run alike, so that the
functions of three stages give those of any number. Costs of a stage of n blocks are extrapolated
linearly from programs with few and with more blocks; exact if every further block adds the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import (
    CopiedFunction,
    CopiedStages,
    StageFunction,
    StageMessage,
    functions_of,
    name_of,
)
from shardweave.passes.stages.cut import runs_of_tasks
from shardweave.planners.lowering.stages.list_stages import tasks_of
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_parts import PlanError
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.planners.schedules.table import Table

KINDS = 3
"""Number of kinds of stages: the first, the inner ones, the last."""


@dataclass(frozen=True)
class Deeper:
    """Extrapolates numbers of a staged program with few blocks (`few`) to a deeper step.

    program: the same step with more blocks (`more`). times: by stage, the factor t in the
    extrapolation few + t * (more - few).
    """

    program: Program
    times: Sequence[float]

    def beyond(self, stages: Sequence[int], few: float, more: float) -> float:
        """Extrapolate a number that belongs to `stages`, such as bytes or seconds, from its values
        in the programs with few and with more blocks; at least 0."""
        times = sum(self.times[stage] for stage in stages) / len(stages)
        return max(0.0, few + times * (more - few))


def deepened_stages(
    plan: Plan, names: Sequence[str], few: Sequence[int], more: Sequence[int]
) -> list[float]:
    """Compute `Deeper.times`. few, more: number of blocks by kind of stage, in both programs."""
    assert plan.pipeline is not None
    blocks = {*names}
    counts = [sum(name in blocks for name in stage) for stage in plan.pipeline.stages]
    last = len(counts) - 1
    kinds = [len(few) - 1 if i == last else min(i, len(few) - 2) for i in range(last + 1)]
    return [
        (count - few[kind]) / (more[kind] - few[kind])
        for count, kind in zip(counts, kinds, strict=True)
    ]


def with_few_blocks(
    plan: Plan, names: Sequence[str], kept: Sequence[str]
) -> tuple[Plan, list[int]]:
    """Adapt a staged plan to a program with few blocks; also return each stage's number of blocks.

    The new plan has one stage of each kind, with functions like the plan's. names: all equal
    blocks; kept: those in the program. Raises PlanError if an inner stage has other layers.
    """
    assert plan.pipeline is not None
    pipeline, blocks = plan.pipeline, {*names}
    others = [[name for name in stage if name not in blocks] for stage in pipeline.stages]
    if any(others[1:-1]):
        raise PlanError(
            "a stage between the first and the last has layers that are not among the repeated "
            "blocks of the model; move them to the first or last stage."
        )
    kinds = min(KINDS, len(pipeline.stages))
    sizes = [len(kept) // kinds] * (kinds - 1)
    sizes.append(len(kept) - sum(sizes))
    ends = [0, *accumulate(sizes)]
    stages = [kept[start:end] for start, end in pairwise(ends)]
    stages[0], stages[-1] = (*others[0], *stages[0]), (*stages[-1], *others[-1])
    schedule = pipeline.schedule
    if len(pipeline.stages) >= KINDS:
        is_split = any(action.kind in "IW" for row in _table(plan) for action in row)
        schedule = "zero-bubble" if is_split else "1f1b"
    mesh = Mesh(**plan.mesh)
    axis = mesh.stage_axis
    degrees = {name: size for name, size in plan.mesh.items() if axis is None or name != axis.name}
    return replace(
        plan,
        mesh={axis.name if axis else "pipeline": kinds} | degrees,
        pipeline=replace(pipeline, stages=tuple(map(tuple, stages)), schedule=schedule),
    ), sizes


def _table(plan: Plan) -> Table:
    assert plan.pipeline is not None
    ranks = Mesh(**plan.mesh).num_stages
    chosen = find_schedule(plan.pipeline.schedule)
    return chosen.table(ranks, plan.pipeline.micro_batches, plan.num_stages // ranks)


def with_all_stages(program: Program, plan: Plan) -> Program:
    """Build a plan's staged program, for simulation, from the program of `with_few_blocks`: copies
    of its functions for each stage, in the order of the plan's schedule."""
    count = plan.num_stages
    if count < KINDS:
        return program
    mesh = program.needed_mesh()
    ranks = Mesh(**plan.mesh).num_stages
    axes = (replace(a, size=ranks) if a.kind == "stage" else a for a in mesh.axes)
    functions = functions_of(program).values()
    messages = _Messages.of(functions, count)
    copies = [
        messages.copied(function, stage)
        for stage in range(count)
        for function in functions
        if function.stage == messages.kind(stage)
    ]
    made = {copy.name: copy for copy in copies}
    runs = runs_of_tasks(tasks_of(_table(plan), count))
    return CopiedStages(
        program, Mesh(tuple(axes)), made, [run for run in runs if run.function in made]
    )


@dataclass(frozen=True)
class _Messages:
    """Messages between the kinds of stages, and their receivers among all `count` stages.

    A message goes to a neighbour, from one end to the other, or from an end to all stages. goals:
    by (stage, name), its receivers. order: by (stage, receiver, name), its index among the messages
    of this pair, which replaces its name: inner stages name the values that they pass differently.
    """

    count: int
    goals: Mapping[tuple[int, str], set[int]]
    order: Mapping[tuple[int, int, str], int]

    @staticmethod
    def of(functions: Collection[StageFunction], count: int) -> _Messages:
        """Collect the messages of stages. PlanError if inner stages do not all send alike."""
        goals: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
        sends = [
            (function.stage, message.other, message.name)
            for function in functions
            for message in function.messages
            if message.is_sent
        ]
        for stage, to, name in sends:
            goals[stage, name].add(to)
        order: dict[tuple[int, int, str], int] = {}
        sent: Counter[tuple[int, int]] = Counter()
        for stage, to, name in sends:
            if len(goals[stage, name]) == 1 and (stage, to, name) not in order:
                order[stage, to, name] = sent[stage, to]
                sent[stage, to] += 1
        spreads = any(stage == 1 and len(to) > 1 for (stage, _), to in goals.items())
        if spreads or sent[0, 1] != sent[1, 2] or sent[1, 0] != sent[2, 1]:
            raise PlanError("stages between the first and the last send different messages.")
        return _Messages(count, goals, order)

    def kind(self, stage: int) -> int:
        """The stage of the small program that stands for a stage."""
        return KINDS - 1 if stage == self.count - 1 else min(stage, KINDS - 2)

    def copied(self, function: StageFunction, stage: int) -> StageFunction:
        kind, messages = function.stage, list[StageMessage]()
        for message in function.messages:
            sender = kind if message.is_sent else message.other
            others, name = self._ends(sender, kind, message.other, message.name, stage)
            # One that goes to several stages arrives from one.
            others = others if message.is_sent else others[:1]
            messages += (replace(message, other=other, name=name) for other in others)
        arguments = function.arguments
        if kind == KINDS - 2:
            arguments = [
                replace(slot, name=f"{slot.name} of stage {stage}")
                if slot.kind == "param"
                else slot
                for slot in arguments
            ]
        return CopiedFunction(function, name_of(function.direction, stage), messages, arguments)

    def _ends(
        self, sender: int, kind: int, other: int, name: str, stage: int
    ) -> tuple[list[int], str]:
        """Return the stages at the other end of a message of `stage`, and its name among all
        stages. sender, kind, other: stages of the small program: the sender, the representative of
        `stage`, and the other end."""
        goals = self.goals[sender, name]
        if len(goals) > 1:
            is_all = other == KINDS - 2 and other != sender
            return ([*range(1, self.count - 1)] if is_all else [self._end(other)]), name
        if abs(other - kind) == 1:
            receiver = kind if sender == other else other
            return [stage + other - kind], f"{self.order[sender, receiver, name]}"
        return [self._end(other)], name

    def _end(self, kind: int) -> int:
        return 0 if kind == 0 else self.count - 1
