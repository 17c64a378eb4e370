"""Trials that nobody runs: a step model with the noise of measurements."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass

import numpy as np

from shardweave.planners.oppa.space import Configuration
from shardweave.planners.oppa.step_model import StepModel
from shardweave.planners.oppa.trials import Outcome


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
        text = json.dumps(configuration.to_dict(), sort_keys=True)
        rng = np.random.default_rng([self.seed, zlib.crc32(text.encode())])
        peak = cost.peak_bytes * float(np.exp(0.005 * rng.standard_normal()))
        if peak > self.memory_bytes:
            return Outcome("out_of_memory")
        run = self.run_noise * rng.standard_normal()
        steps = self.step_noise * rng.standard_normal(self.steps)
        times: list[float] = (cost.seconds * np.exp(run + steps)).tolist()
        return Outcome("ok", tuple(times), peak)
