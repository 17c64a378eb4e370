"""Simulated trials, a step model with the noise of measurements, and a search by formulas alone."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import numpy as np

from shardweave.benchmarks.oppa_step_model import StepModel
from shardweave.driver.training.training import ENOUGH_SLOW
from shardweave.planners.oppa.choosers import History, Suggestion, first_choice, random_instead
from shardweave.planners.oppa.prior import MemoryPrior, ThroughputPrior, fit_formula, predict
from shardweave.planners.trials.space import Configuration
from shardweave.planners.trials.trials import Outcome

JOINT = ("replica", "context", "sub_batches", "order", "recomputed_share")
"""What the space of `oppa_space` leaves at its least."""


@dataclass(frozen=True)
class SimulatedTrial:
    """A trial of `steps` steps. Two runs of one configuration differ by `run_noise`, two steps of
    one run by `step_noise`, both shares of the time; the noise follows from seed and configuration.
    """

    machine: StepModel
    seed: int = 0
    steps: int = 10
    run_noise: float = 0.015
    step_noise: float = 0.03

    @property
    def memory_bytes(self) -> int:
        """Of a device."""
        cluster = self.machine.cluster
        return min(one.memory_bytes for one in cluster.device_types(cluster.num_devices))

    def run(self, configuration: Configuration) -> Outcome:
        """Times with noise; out of memory if the peak is above a device's memory."""
        cost = self.machine.cost(configuration)
        own = {name: value for name, value in asdict(configuration).items() if name not in JOINT}
        text = json.dumps(own, sort_keys=True)
        rng = np.random.default_rng([self.seed, zlib.crc32(text.encode())])
        peak = cost.peak_bytes * float(np.exp(0.005 * rng.standard_normal()))
        if peak > self.memory_bytes:
            return Outcome("out_of_memory")
        run = self.run_noise * rng.standard_normal()
        steps = self.step_noise * rng.standard_normal(self.steps)
        times: list[float] = (cost.seconds * np.exp(run + steps)).tolist()
        return Outcome("ok", tuple(times), peak)


@dataclass(eq=False)
class StoppedTrial:
    """Simulated trials of which slow ones end early, as real ones do (`RealTrials`).

    slow: as there; 0: none ends. fastest_s: a step of the fastest so far.
    """

    trial: SimulatedTrial
    slow: float = 0.0
    fastest_s: float = math.inf

    def run(self, configuration: Configuration) -> Outcome:
        """A trial, with fewer times if its first ones are slow."""
        outcome = self.trial.run(configuration)
        if outcome.status != "ok":
            return outcome
        first = outcome.times_s[:ENOUGH_SLOW]
        if self.slow and min(first) > self.slow * self.fastest_s:
            return replace(outcome, times_s=first)
        self.fastest_s = min(self.fastest_s, fmean(outcome.times_s))
        return outcome


@dataclass(frozen=True)
class CostModelChooser:
    """The formulas alone: fitted to the trials, and the best that they predict to fit is tried."""

    first: int = 5

    def choose(self, history: History, rng: np.random.Generator) -> Suggestion:
        """The open row of the largest predicted throughput, among those predicted to fit."""
        instead = random_instead(history, self.first, rng)
        seen = history.throughputs()
        if instead is not None or seen is None:
            return instead or first_choice(history, rng)
        rows = history.open_rows
        there = history.table.rows(rows)
        prior, cap = ThroughputPrior(), MemoryPrior()
        throughput = predict(there, prior, fit_formula(seen, prior))
        memory, used = np.zeros(len(rows)), history.memories()
        if used is not None:
            memory = predict(there, cap, fit_formula(used, cap))
        fitting = np.where(memory <= 1.0, throughput, -1e3 * memory)
        # Many configurations look the same to the formulas.
        index = int(rng.choice(np.flatnonzero(fitting == fitting.max())))
        return Suggestion(
            rows[index], f"predicted {np.exp(throughput[index]) * history.scale:.4g} steps/s"
        )
