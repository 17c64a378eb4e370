"""Three steps of AdamW by a program on a virtual mesh, beside three of eager."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from shardweave.backends.reference.reference import Key, run_reference
from shardweave.driver.checking.check import run_eager
from shardweave.ir.capture.seeded import SeededRandom
from shardweave.ir.program.program import Program
from shardweave.tests.zoo import GRADIENT_BOUND, captured, check_against_eager, gradient_errors

STEPS = 3
LEARNING_RATE = 1e-2

BOUND = 1e-9
"""Of the parameters: of a gradient that is zero but for rounding, AdamW makes a step of some 1e-11,
which has no digit that is right."""


@dataclass(frozen=True)
class EagerStep:
    """A step of eager: its loss and gradients, and the parameters that it leaves."""

    loss: float
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


@cache
def eager_steps(spec: str) -> list[EagerStep]:
    """The steps of a model, from the state in which it was built, on one batch."""
    example = captured(spec).example
    model = copy.deepcopy(example.module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    found: list[EagerStep] = []
    with SeededRandom(0):
        for _ in range(STEPS):
            optimizer.zero_grad()
            step = run_eager(model, example.kwargs)
            optimizer.step()
            parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
            found.append(EagerStep(step.loss, step.gradients, parameters))
    return found


def assert_trains_as_eager(program: Program, spec: str) -> None:
    """Run steps on all ranks of a program's mesh, each on the parameters that AdamW made of the one
    before, and compare losses, gradients and parameters with eager's."""
    values: dict[Key, Tensor] = dict(captured(spec).values)
    parameters = {
        name: value.clone().requires_grad_()
        for (kind, name), value in values.items()
        if kind == "param"
    }
    optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE)
    for number, expected in enumerate(eager_steps(spec)):
        given = {("param", name): parameter.detach() for name, parameter in parameters.items()}
        results = run_reference(program, values | given)
        if number == 0:
            check_against_eager(results, captured(spec))
        loss = results["output", "0"].item()
        assert abs(loss - expected.loss) <= GRADIENT_BOUND * abs(expected.loss), number
        gradients = {name: value for (kind, name), value in results.items() if kind == "grad"}
        errors = gradient_errors(gradients, expected.gradients)
        assert {name: one for name, one in errors.items() if one > GRADIENT_BOUND} == {}, number
        for name, parameter in parameters.items():
            parameter.grad = gradients.get(name)
        optimizer.step()
        values |= {key: value for key, value in results.items() if key[0] == "buffer"}
        assert set(parameters) == set(expected.parameters)
        for name, parameter in parameters.items():
            torch.testing.assert_close(
                parameter.detach(), expected.parameters[name], rtol=BOUND, atol=BOUND
            )
