"""Calls of a model: their arguments bound to the parameters of its forward, and their modes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from inspect import Parameter
from typing import Any

from torch import nn

from shardweave.backends.batch.rows import LOCAL, grown
from shardweave.backends.step.step_call import AUTOGRAD, StepCall
from shardweave.driver.step.precision import AUTOCAST, inputs_in_precision
from shardweave.driver.step.request import Request
from shardweave.ir.capture.arguments import named_arguments, taken_apart
from shardweave.ir.suggest import did_you_mean

NEAR = 0.85
"""Similarity to a parameter's name from which a keyword for **kwargs counts as a misspelling."""


class Binding:
    """Normalises calls of a model: binds arguments to the names of forward's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.signature = inspect.signature(model.forward)

    @cached_property
    def names(self) -> list[str]:
        """The named parameters of forward."""
        kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return [name for name, p in self.signature.parameters.items() if p.kind not in kinds]

    def bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_whole: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bind a call's arguments to forward's parameters. Raises TypeError for arguments that
        forward does not take, and for missing ones if `is_whole`."""
        self._check_keywords(kwargs)
        try:
            return named_arguments(self.signature, args, kwargs, is_whole=is_whole)
        except TypeError as error:
            names = ", ".join(self.signature.parameters) or "nothing"
            raise TypeError(
                f"the step takes the arguments of the model's forward, {names}: {error}."
            ) from None

    def _check_keywords(self, kwargs: Mapping[str, Any]) -> None:
        names = self.names
        for name in kwargs:
            if name in names:
                continue
            kinds = {parameter.kind for parameter in self.signature.parameters.values()}
            left = [known for known in names if known not in kwargs]
            if Parameter.VAR_KEYWORD not in kinds:
                raise TypeError(
                    f"the model's forward has no parameter '{name}'; "
                    f"{did_you_mean(name, names)}it has {', '.join(names) or 'none'}."
                )
            if get_close_matches(name, left, 1, NEAR):
                raise TypeError(
                    f"the model's forward has no parameter '{name}', and would take and ignore "
                    f"it as one of its **kwargs; {did_you_mean(name, left)}correct the name."
                )


def example_call(request: Request) -> StepCall:
    """Make the call of a request's example batch, in the modes that the model is in."""
    bound = Binding(request.model).bound(request.args, request.kwargs or {})
    form, inputs = taken_apart(*bound)
    modes = [module.training for module in request.model.modules()]
    if request.train is not None:
        modes = [request.train] * len(modes)
    call = StepCall(
        form,
        inputs_in_precision(inputs, request.precision),
        modes[0],
        tuple(modes),
        tuple(parameter.requires_grad for parameter in request.model.parameters()),
        AUTOCAST.get(request.precision),
        () if request.backward == AUTOGRAD and modes[0] and not request.program else None,
    )
    return grown(call, request.devices) if gives_rows(request) else call


def gives_rows(request: Request) -> bool:
    """True if each rank passes rows of its own; never on the reference backend."""
    is_joint = request.has_processes and request.devices.num_devices > 1
    return request.batch == LOCAL and is_joint
