"""Measured steps as rows of a table: a model, the plan that it was trained by, and milliseconds."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shardweave.driver.commands.read_programs import read_or_capture
from shardweave.ir.program.program import Program
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.lowering.lower import Lowerings
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.plan_check import check_plan
from shardweave.planners.planning import plan as planned
from shardweave.planners.predict.predict import predict_plan

COLUMNS = ("model", "plan", "step_ms")


@dataclass(frozen=True)
class MeasuredStep:
    """A row of the table. model: spec of a model, or file of a captured program. plan: file of a
    plan, or a mesh for Megatron's plan. place: file and line of the row."""

    model: str
    plan: str
    step_s: float
    place: str


def read_steps(paths: Iterable[Path]) -> list[MeasuredStep]:
    """The rows of CSV files, ordered by model. Raises ValueError, naming file and line, for a row
    that cannot be read; OSError."""
    steps = [step for path in paths for step in _steps_of(path)]
    return sorted(steps, key=lambda step: step.model)


def _steps_of(path: Path) -> Iterable[MeasuredStep]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, skipinitialspace=True)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(
                f"{path}:1: the header lacks the column {', '.join(map(repr, missing))}; the "
                f"columns are {', '.join(COLUMNS)}, separated by commas. Put a cell that holds "
                "commas in quotes."
            )
        for row in rows:
            place = f"{path}:{rows.line_num}"
            model, plan, text = (row[name] or "" for name in COLUMNS)
            if None in row or not model or not plan:
                raise ValueError(
                    f"{place}: the row has too many cells, or its model or plan is empty; put a "
                    'cell that holds commas in quotes ("..").'
                )
            yield MeasuredStep(model, _beside(path, plan), _seconds(text, place), place)


def _beside(table: Path, plan: str) -> str:
    """Resolve the path of a plan's file relative to its table; other text stays as it is."""
    file = table.parent / plan
    return str(file) if file.is_file() else plan


def _seconds(text: str, place: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 0 < milliseconds < float("inf"):
        raise ValueError(
            f"{place}: step_ms is '{text}'; write the measured time of a step in milliseconds."
        )
    return milliseconds / 1e3


class StepPredictor:
    """Simulates measured steps. Keeps the programs of one model: rows come ordered by model."""

    def __init__(self) -> None:
        self._model = ""
        self._lowerings: Lowerings | None = None
        self._plans: dict[str, Plan] = {}

    def predict(self, step: MeasuredStep, cluster: Cluster) -> float:
        """Predict a step's seconds on a cluster. ValueError, naming the row, if impossible."""
        try:
            lowerings = self._of_model(step.model)
            if step.plan not in self._plans:
                self._plans[step.plan] = _plan(step.plan, lowerings.program)
            return predict_plan(lowerings, self._plans[step.plan], cluster).time_s
        except ValueError as error:
            raise ValueError(f"{step.place}: {error}") from error

    def _of_model(self, model: str) -> Lowerings:
        if self._lowerings is None or model != self._model:
            self._lowerings, self._plans = Lowerings(read_or_capture(model)), {}
            self._model = model
        return self._lowerings


def _plan(text: str, program: Program) -> Plan:
    """The plan in a file, or Megatron's on a mesh."""
    if not Path(text).is_file():
        return planned(program, text, "megatron")
    plan = Plan.load(text)
    check_plan(plan, program)
    return plan
