"""Training for a few steps, and how long a step takes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardweave.driver.processes import world

LEARNING_RATE = 1e-3
ENOUGH_SLOW = 2
"""Number of timed steps that must all be slow for early stopping: one may be slow by chance."""


@dataclass(frozen=True)
class Training:
    """The loss before each update, and the seconds of the steps, optimizer included.

    times_s: without the first of several steps, which pays for allocations and optimizer state.
    """

    losses: tuple[float, ...]
    times_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a typical step."""
        return statistics.median(self.times_s)


@dataclass(frozen=True)
class Work:
    """Amount of work in one step, in the unit of its throughput."""

    count: int
    unit: str


def tokens_or_samples(batch: Mapping[str, Tensor]) -> Work:
    """Tokens of a batch that has `input_ids`; else its samples, the size of dim 0."""
    ids = batch.get("input_ids")
    if ids is not None:
        return Work(ids.numel(), "tokens")
    return Work(next((t.shape[0] for t in batch.values() if t.ndim), 1), "samples")


def train(
    forward_backward: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    num_steps: int,
    *,
    stop_above_s: float = math.inf,
) -> Training:
    """Take `num_steps` >= 1 steps of AdamW; `forward_backward` fills `.grad`, returns the loss.
    stop_above_s: stop after the first `ENOUGH_SLOW` timed steps if each took more seconds than this
    on rank 0, which tells the other ranks outside the timed part."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses: list[float] = []
    times_s: list[float] = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = forward_backward()
        optimizer.step()
        # Reading the loss waits for the device only up to the backward pass.
        losses.append(loss.detach().double().item())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times_s.append(time.perf_counter() - start_s)
        if stop_above_s < math.inf and len(times_s) == 1 + ENOUGH_SLOW:
            least_s = min(times_s[1:])
            if world.from_rank_0(lambda least_s=least_s: least_s > stop_above_s):
                break
    return Training(tuple(losses), tuple(times_s[1:] or times_s))
