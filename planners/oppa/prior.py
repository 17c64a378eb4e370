"""OPPA's belief before any trial: throughput (11)-(18) and memory (19)-(20) by formula.

Each formula has a few unknown parameters, fitted together with the Gaussian process around it.
 Notation of the paper: n devices, dp, tp, pp degrees, mb micro-batches, mc chunks.

    compute      tc / n (mb + (pp - 1) / mc)                                (11)
    p2p          a + b size                                                 (12)
    all-reduce   a log2 p + (p - 1) / p b size                              (13)
    data         all-reduce of the gradients g among dp                     (14)
    tensor       D mb all-reduce of c / mb among tp                         (15)
    pipeline     mc mb p2p of c / mb                                        (16)
    throughput   1 / (compute + data + tensor + pipeline)                   (18)
    memory       m1 / (pp tp) + m2 / (n mb) + m3, at most the cap           (19), (20)

A fit cannot tell the size of a message from the seconds per byte, so that their product is one
parameter: `*_transfer` is b g or D b c, `*_latency` is a or D a.

Errors in the equations are corrected: in (11) tc is the work of a micro-batch, so that the whole
step's is divided by mb; (14) sends the gradients of a device, g / (tp pp); (15) and (16) send the
activations of a replica, c / dp, and a stage of (15) has D / pp layers; (16) is 0 for one stage.
Dimensions that the paper lacks are added: recomputation repeats part of the work and keeps less;
ZeRO shards optimizer state (12 of 16 bytes of a parameter), gradients (2) and weights (2) over dp;
a stage keeps pp micro-batches at once; (14) has a latency for each bucket; ZeRO stages 2 and 3
reduce every micro-batch's gradients (half an all-reduce), and stage 3 gathers weights twice (one
all-reduce).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from shardweave.planners.trials.space import Floats, SpaceTable

Columns = Mapping[str, Tensor]
"""Sizes of configurations by name, as in `SpaceTable.columns`."""

Values = Mapping[str, Tensor]
"""The parameters of a formula by name, all above 0."""

STATES = (12 / 16, 2 / 16, 2 / 16)
"""Shares of a parameter's bytes: optimizer, gradient, weight (Rajbhandari et al., Sec. 3.1)."""

FIRST_GUESS: Mapping[str, float] = {
    "work": 1.0,
    "recomputed": 0.3,
    "data_latency": 0.01,
    "data_transfer": 0.1,
    "tensor_latency": 0.0003,
    "tensor_transfer": 0.1,
    "pipeline_latency": 0.0003,
    "pipeline_transfer": 0.003,
    "weights": 1.0,
    "activations": 1.0,
    "constant": 0.1,
    "kept": 0.2,
}
"""First guess of each parameter, as a share of a step's work on one device, or of its memory."""


@dataclass(frozen=True)
class ThroughputPrior:
    """Formula of the logarithm of steps per second; see the module's docstring."""

    numbers: ClassVar[tuple[str, ...]] = (
        "work", "data_latency", "data_transfer", "tensor_latency", "tensor_transfer",
        "pipeline_latency", "pipeline_transfer", "recomputed",
    )  # fmt: skip

    def __call__(self, x: Columns, of: Values) -> Tensor:
        """Return -log(seconds) of each configuration."""
        return -torch.log(self.compute_s(x, of) + self.communication_s(x, of))

    def compute_s(self, x: Columns, of: Values) -> Tensor:
        """Seconds of compute, by (11)."""
        micro_batches = x["micro_batches"]
        work = of["work"] / micro_batches * (1 + of["recomputed"] * x["recomputed"])
        bubble = (x["pipeline"] - 1) / x["chunks"]
        return work / devices_of(x) * (micro_batches + bubble)

    def communication_s(self, x: Columns, of: Values) -> Tensor:
        """Seconds of communication, by (17): the sum of (14), (15) and (16)."""
        return self.data_s(x, of) + self.tensor_s(x, of) + self.pipeline_s(x, of)

    def data_s(self, x: Columns, of: Values) -> Tensor:
        """Seconds of data parallelism, by (14)."""
        share = 1 / (x["tensor"] * x["pipeline"])
        transfer = of["data_transfer"] * share
        bucket = torch.maximum(x["data_bucket_mib"], x["zero_bucket_mib"])
        messages = of["data_latency"] * share / bucket
        return _passes(x) * all_reduce(x["data"], messages, transfer)

    def tensor_s(self, x: Columns, of: Values) -> Tensor:
        """Seconds of tensor parallelism, by (15)."""
        micro_batches = x["micro_batches"]
        size = of["tensor_transfer"] / micro_batches
        seconds = all_reduce(x["tensor"], of["tensor_latency"], size / x["data"])
        return micro_batches * seconds / x["pipeline"]

    def pipeline_s(self, x: Columns, of: Values) -> Tensor:
        """Seconds of messages between stages, by (16)."""
        repeats = x["chunks"] * x["micro_batches"]
        size = of["pipeline_transfer"] / x["micro_batches"]
        seconds = of["pipeline_latency"] + size / x["data"]
        return torch.where(x["pipeline"] > 1, repeats * seconds, 0.0)


@dataclass(frozen=True)
class MemoryPrior:
    """Peak memory of configurations as a share of a device's, by Equations (19) and (20).

    cap: the share that a trial counts as if it ran out of memory, which is also the largest
    possible share; the formula approaches it smoothly.
    """

    numbers: ClassVar[tuple[str, ...]] = ("weights", "activations", "constant", "kept")
    cap: float = 1.2

    def __call__(self, x: Columns, of: Values) -> Tensor:
        """Return the share of memory that each configuration needs."""
        weights = of["weights"] / (x["pipeline"] * x["tensor"]) * _share_of_states(x)
        kept = 1 - x["recomputed"] * (1 - of["kept"])
        activations = of["activations"] / (devices_of(x) * x["micro_batches"])
        share = weights + activations * kept * x["pipeline"] + of["constant"]
        return self.cap - torch.nn.functional.softplus(self.cap - share, beta=20.0)


Formula = ThroughputPrior | MemoryPrior
"""Formula: computes values of configurations from their sizes and from fitted `numbers`."""


def _share_of_states(x: Columns) -> Tensor:
    """Share of a stage's parameter state (optimizer, gradients, weights) on each device."""
    parts = (
        torch.where(x["zero"] >= stage, size * x["replica"] / x["data"], size)
        for stage, size in enumerate(STATES, start=1)
    )
    return torch.stack(list(parts)).sum(0)


def _passes(x: Columns) -> Tensor:
    """Traffic of a step on the data axis, in units of one all-reduce of the gradients."""
    micro_batches = x["micro_batches"]
    sharded = torch.where(x["zero"] == 2, (micro_batches + 1) / 2, 1.5 * micro_batches)
    return torch.where(x["zero"] < 2, 1.0, sharded)


def devices_of(x: Columns) -> Tensor:
    return x["data"] * x["tensor"] * x["pipeline"] * x["context"]


def all_reduce(ranks: Tensor, latency: Tensor, transfer: Tensor) -> Tensor:
    """Seconds of an all-reduce among `ranks`, by (13)."""
    return latency * torch.log2(ranks) + (ranks - 1) / ranks * transfer


NUMBERS_DEVIATION = 1.5
"""Prior standard deviation of the logarithm of a formula's parameters, around the guess."""

SHARES = ("recomputed",)
"""Parameters of the throughput formula that are not times."""

FORMULA_DEVIATION = 0.05
"""Assumed deviation of a fitted formula from values of about 1."""


@dataclass(frozen=True)
class Samples:
    """Training samples of a model: rows of a table, values, and their variances."""

    table: SpaceTable
    values: Floats
    variances: Floats


def columns_of(table: SpaceTable) -> dict[str, Tensor]:
    """The sizes in a table, as input of formulas."""
    return {name: torch.tensor(values) for name, values in table.columns.items()}


def first_guess(samples: Samples, formula: Formula) -> dict[str, float]:
    """`FIRST_GUESS`, with its times scaled so that the formula fits the samples' median."""
    guess = {name: FIRST_GUESS[name] for name in formula.numbers}
    if "work" not in guess:
        return guess
    expected = predict(samples.table, formula, guess)
    # The formula is a logarithm of a rate: numbers that are times scale inversely.
    scale = float(np.exp(np.median(expected - samples.values)))
    return {name: number if name in SHARES else number * scale for name, number in guess.items()}


def predict(table: SpaceTable, formula: Formula, numbers: Mapping[str, float]) -> Floats:
    """The formula's value for each row of the table."""
    values = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
    return formula(columns_of(table), values).numpy()


def fit_formula(samples: Samples, formula: Formula) -> dict[str, float]:
    """Find the parameters of largest posterior; the prior is log-normal around `first_guess`."""
    guess = first_guess(samples, formula)
    numbers, centre = list(guess), np.log(list(guess.values()))
    columns = columns_of(samples.table)
    deviation = np.sqrt(samples.variances + FORMULA_DEVIATION**2)
    weights = torch.tensor(1 / deviation)
    targets = torch.tensor(samples.values)

    def misfit(logs: Tensor) -> Tensor:
        """Misfit of each sample. logs: of the parameters, for all or (last dim) for each sample."""
        values = {name: logs[..., i].exp() for i, name in enumerate(numbers)}
        return (formula(columns, values) - targets) * weights

    def residuals(logs: Floats) -> Floats:
        from_guess = (logs - centre) / NUMBERS_DEVIATION
        return np.concatenate([misfit(torch.tensor(logs)).numpy(), from_guess])

    def jacobian(logs: Floats) -> Floats:
        # A sample's misfit depends on its own row alone, so that one sum has all gradients.
        rows = torch.tensor(logs).repeat(len(targets), 1).requires_grad_()
        (gradient,) = torch.autograd.grad(misfit(rows).sum(), rows)
        return np.concatenate([gradient.numpy(), np.eye(len(numbers)) / NUMBERS_DEVIATION])

    fit = least_squares(residuals, centre, jac=jacobian)
    return dict(zip(numbers, np.exp(fit.x).tolist(), strict=True))
