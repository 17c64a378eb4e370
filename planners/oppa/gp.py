"""Gaussian processes for throughput and memory, by botorch, which is imported at first use.

The kernel is Matern-5/2 over all features at once (ARD, as in the released code); the mean is a
constant or a formula (`prior`). Parameters of mean and kernel are fitted together, by their
posterior mode; their priors are log-normal.
"""
# gpytorch has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false, reportMissingTypeStubs=false

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from shardweave.planners.oppa.prior import (
    NUMBERS_DEVIATION,
    Columns,
    Formula,
    Samples,
    columns_of,
    first_guess,
    fit_formula,
)
from shardweave.planners.trials.space import Floats, SpaceTable


@cache
def botorch() -> ModuleType:
    """Import and return botorch. Raises ValueError, with how to install it, if that fails."""
    try:
        with warnings.catch_warnings():
            # linear_operator compiles a function as it is imported.
            warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
            import botorch as module

            importlib.import_module("botorch.fit")
    except ImportError as error:
        raise ValueError(
            f"planner 'oppa' needs botorch, which cannot be imported ({error}); install it with "
            "pip install 'shardweave[oppa]'."
        ) from error
    return module


@dataclass(frozen=True)
class Belief:
    """A fitted Gaussian process."""

    model: Any = field(repr=False)
    samples: Samples = field(repr=False)

    def at(self, table: SpaceTable) -> tuple[Floats, Floats]:
        """Mean and variance, without observation noise, for each row of a table. Takes time rows x
        samples x features; the process's own call would compute rows x rows covariances."""
        with torch.no_grad():
            model, seen = self.model, _inputs(self.samples.table)
            there = _inputs(table)
            residual = torch.tensor(self.samples.values) - _mean(model, self.samples.table)
            noise = torch.diag(torch.tensor(self.samples.variances))
            root = torch.linalg.cholesky(model.covar_module(seen).to_dense() + noise)
            cross = model.covar_module(there, seen).to_dense()
            solved = torch.linalg.solve_triangular(root, cross.T, upper=False)
            weights = torch.cholesky_solve(residual[:, None], root)[:, 0]
            mean = _mean(model, table) + cross @ weights
            variance = model.covar_module(there, diag=True) - solved.square().sum(0)
        return mean.numpy(), variance.clamp_min(0.0).numpy()


def fit(samples: Samples, formula: Formula | None) -> Belief:
    """Fit a first-order process to at least one sample. formula: its mean, or a constant."""
    library = botorch()
    features = _inputs(samples.table)
    mean = _formula_mean(samples, formula) if formula else None
    with warnings.catch_warnings():
        # An optimiser that stops early, or a matrix that needs jitter, still gives a usable fit.
        warnings.simplefilter("ignore")
        model = library.models.SingleTaskGP(
            features,
            torch.tensor(samples.values)[:, None],
            torch.tensor(samples.variances)[:, None],
            covar_module=_kernel(features.shape[1], 0.05 if mean is not None else 1.0),
            mean_module=mean,
            outcome_transform=None,
        )
        from gpytorch.mlls import ExactMarginalLogLikelihood

        likelihood = ExactMarginalLogLikelihood(model.likelihood, model)
        options = {"options": {"maxiter": 30}}
        library.fit.fit_gpytorch_mll(likelihood, optimizer_kwargs=options, max_attempts=2)
    model.eval()
    return Belief(model, samples)


def _inputs(table: SpaceTable) -> Tensor:
    return torch.tensor(table.features, dtype=torch.float64)


def _kernel(features: int, size: float) -> Any:
    """Create the kernel. size: scale of the values; smaller for the residuals of a formula."""
    from gpytorch.kernels import MaternKernel, ScaleKernel
    from gpytorch.priors import LogNormalPrior

    # Grows with the root of the dims, as distances do (Hvarfner et al. 2024).
    centre = math.log(features) / 2 - 0.5
    prior = LogNormalPrior(centre, 1.0)
    matern: Any = MaternKernel(nu=2.5, ard_num_dims=features, lengthscale_prior=prior)
    matern.lengthscale = math.exp(centre)
    kernel = ScaleKernel(matern, outputscale_prior=LogNormalPrior(math.log(size), 1.0))
    kernel.outputscale = size
    return kernel


def _formula_mean(samples: Samples, formula: Formula) -> Any:
    """Wrap a formula as a mean module of gpytorch. A process passes its mean the features, but
    formulas need sizes. So the mean holds the samples' sizes, as the likelihood only asks for the
    mean of all samples; means of other rows are computed by `_mean`."""
    from gpytorch.means import Mean
    from gpytorch.priors import NormalPrior

    guess = first_guess(samples, formula)
    start = fit_formula(samples, formula)

    class FormulaMean(Mean):  # a class of a library that is imported late
        def __init__(self) -> None:
            super().__init__()
            self.columns = columns_of(samples.table)
            for name in guess:
                key, double = f"log_{name}", torch.float64
                value = torch.tensor(math.log(start[name]), dtype=double)
                self.register_parameter(key, torch.nn.Parameter(value))
                centre = torch.tensor(math.log(guess[name]), dtype=double)
                prior = NormalPrior(centre, torch.tensor(NUMBERS_DEVIATION, dtype=double))
                self.register_prior(f"{key}_prior", prior, key)

        def forward(self, x: Tensor) -> Tensor:
            assert x.shape[-2] == len(samples.values), "only the samples' own mean is asked for"
            return self.of(self.columns)

        def of(self, columns: Columns) -> Tensor:
            return formula(columns, {name: getattr(self, f"log_{name}").exp() for name in guess})

    return FormulaMean()


def _mean(model: Any, table: SpaceTable) -> Tensor:
    mean = model.mean_module
    return cast(Tensor, mean.of(columns_of(table)) if hasattr(mean, "of") else mean(_inputs(table)))
