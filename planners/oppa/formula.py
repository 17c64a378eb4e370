"""A formula alone, fitted to trials: the cost model without a Gaussian process around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import least_squares
from torch import Tensor

from shardweave.planners.oppa.prior import FIRST_GUESS, Formula
from shardweave.planners.trials.space import Floats, SpaceTable

NUMBERS_DEVIATION = 1.5
"""Of the logarithm of a formula's numbers, around the first guess."""

SHARES = ("recomputed",)
"""Numbers of a formula of throughput that are no times."""

FORMULA_DEVIATION = 0.05
"""How far a fitted formula is believed to be off, with values of the order of 1."""


@dataclass(frozen=True)
class Samples:
    """What a model learns from: rows of a table, values, and their variances."""

    table: SpaceTable
    values: Floats
    variances: Floats


def columns_of(table: SpaceTable) -> dict[str, Tensor]:
    """The sizes of a table, as formulas take them."""
    return {name: torch.tensor(values) for name, values in table.columns.items()}


def first_guess(samples: Samples, formula: Formula) -> dict[str, float]:
    """`FIRST_GUESS`, with times such that the samples' median is right."""
    guess = {name: FIRST_GUESS[name] for name in formula.numbers}
    if "work" not in guess:
        return guess
    expected = predict(samples.table, formula, guess)
    # The formula is a logarithm of a rate: numbers that are times scale inversely.
    scale = float(np.exp(np.median(expected - samples.values)))
    return {name: one if name in SHARES else one * scale for name, one in guess.items()}


def predict(table: SpaceTable, formula: Formula, numbers: Mapping[str, float]) -> Floats:
    """The formula's value of each row."""
    values = {name: torch.tensor(one, dtype=torch.float64) for name, one in numbers.items()}
    return formula(columns_of(table), values).numpy()


def fit_formula(samples: Samples, formula: Formula) -> dict[str, float]:
    """The numbers of the largest posterior: log-normal around `first_guess`."""
    guess = first_guess(samples, formula)
    numbers, centre = list(guess), np.log(list(guess.values()))
    columns = columns_of(samples.table)
    deviation = np.sqrt(samples.variances + FORMULA_DEVIATION**2)
    weights = torch.tensor(1 / deviation)
    targets = torch.tensor(samples.values)

    def misfit(logs: Tensor) -> Tensor:
        """Of each sample, with numbers for all (in the last dim), or with numbers of its own."""
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

    found = least_squares(residuals, centre, jac=jacobian)
    return dict(zip(numbers, np.exp(found.x).tolist(), strict=True))
