"""Progress of a training: lines with the loss, throughput, time and memory of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from shardweave.backends.step.compiled_module import CompiledModule
from shardweave.driver.checking.measure import peak_bytes
from shardweave.driver.processes import world
from shardweave.planners.call import ClusterLike
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.cost.quantity import bytes_text, seconds_text
from shardweave.planners.plan.plan import Plan
from shardweave.planners.predict.predict import simulate_step


@dataclass(frozen=True)
class Prediction:
    """The simulator's prediction for a call of a step: seconds, and bytes with optimizer state."""

    time_s: float
    memory_bytes: int


class Progress:
    """Prints, on rank 0, a line every `every` steps of a training.

    accumulate: micro-batches of a step. cluster: a Cluster, a preset's name or a YAML file, such as
    `shardweave profile` writes; lines then also show the simulated memory and seconds of a
    step's call, without optimizer and data loading. unit: name of what the throughput counts.

    Seconds and throughput are means over whole steps since the last line, or since the last text
    that `say` printed; the first step of all does not count. Memory is the peak of the GPU's, or of
    the whole process.
    """

    def __init__(
        self,
        step: CompiledModule,
        num_steps: int,
        *,
        every: int = 10,
        accumulate: int = 1,
        cluster: ClusterLike | None = None,
        unit: str = "tokens",
    ) -> None:
        self.step = step
        self.num_steps = num_steps
        self.every = every
        self.accumulate = accumulate
        self.unit = unit
        self.cluster: Cluster | None = None if cluster is None else find_cluster(cluster)
        self._prediction: Prediction | None = None
        self._start_s = time.perf_counter()
        self._timed = -1  # the first step pays for allocations and optimizer state
        self._num_units = 0

    def __call__(self, number: int, loss: Tensor, num_units: int) -> None:
        """Record a step. number: from 1. num_units: tokens, or other units, in the step."""
        if self.cluster is not None and self._prediction is None:
            self._prediction = predict_step(self.step, self.cluster, self.accumulate)
        self._timed += 1
        self._num_units += num_units
        is_shown = number % self.every == 0 or number == self.num_steps
        value = loss.item() if is_shown or not self._timed else 0.0  # waits for the device
        step_s = (time.perf_counter() - self._start_s) / max(1, self._timed)
        if is_shown:
            rate = self._num_units / (step_s * max(1, self._timed))
            self.say(self._line(number, value, rate, step_s))
        elif not self._timed:
            self._start_s, self._num_units = time.perf_counter(), 0

    def say(self, text: str) -> None:
        """Print a text on rank 0, and restart the clock: time until now counts for no step."""
        if world.rank() == 0:
            print(text, flush=True)
        self._start_s, self._timed, self._num_units = time.perf_counter(), 0, 0

    def _line(self, number: int, loss: float, rate: float, step_s: float) -> str:
        memory = peak_bytes(self.step.backend.device)
        expected = self._prediction
        beside = ("", "")
        if expected is not None:
            beside = (
                f" (simulated {seconds_text(expected.time_s)})",
                f" (simulated {bytes_text(expected.memory_bytes)})",
            )
        return (
            f"step {number}/{self.num_steps}  loss {loss:.4f}  {rate:,.0f} {self.unit}/s  "
            f"{seconds_text(step_s)} a step{beside[0]}  {bytes_text(memory)}{beside[1]}"
        )


def predict_step(step: CompiledModule, cluster: Cluster, accumulate: int = 1) -> Prediction:
    """Predict a step's last call on a cluster, split into `accumulate` micro-batches. Assumes that
    gradients are only reduced after the last micro-batch, if that is possible."""
    plan = step.plan or Plan()
    precision, update = plan.precision, plan.update
    whole = simulate_step(step.program, cluster, precision=precision, update=update)
    time_s = whole.time_s
    if accumulate > 1:
        time_s += (accumulate - 1) * simulate_step(step.bound.pending.program, cluster).time_s
    return Prediction(time_s, int(whole.peak_bytes))
