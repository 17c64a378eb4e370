"""Checks that refuse a request before anything is captured."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shardweave.backends.batch.rows import GLOBAL, LOCAL
from shardweave.backends.registry import BACKENDS
from shardweave.backends.state.state import state_of
from shardweave.backends.step.step_call import AUTOGRAD, IN_CALL
from shardweave.driver.artifact.artifact import Artifact
from shardweave.driver.artifact.options import with_artifact
from shardweave.driver.processes import world
from shardweave.driver.step.precision import check_precision, reducing_in
from shardweave.driver.step.request import (
    DEFAULT_PLAN,
    OUTPUTS,
    CompileOptions,
    Request,
    check_given_alone,
    loaded,
    mesh_for,
)
from shardweave.ir.capture.arguments import check_example, check_loss
from shardweave.ir.program.program import Program
from shardweave.planners.planning import check_resolvable
from shardweave.planners.registry import DEFAULT_PLANNER, PLANNERS


def check_request(request: Request, *, is_ahead: bool = False) -> Request:
    """Return the request with `mesh`, `program` and `artifact` converted to their classes.

    is_ahead: the step is compiled ahead, for processes that do not run yet.

    Raises ValueError or TypeError for models that cannot be compiled, and for options that have no
    effect or exclude each other.
    """
    _check_types(request)
    check_example(request.model, request.args, request.kwargs or {})
    _check_model(request.model)
    if request.backend not in BACKENDS:
        raise ValueError(
            f"backend '{request.backend}' is unknown; use one of {', '.join(BACKENDS)}."
        )
    check_given_alone(request)
    if request.artifact is not None:
        request = with_artifact(request)
    _check_planned(request)
    is_real = request.has_processes and not is_ahead
    checked = replace(
        request,
        kwargs=request.kwargs or {},
        optimizers=_as_optimizers(request.optimizers),
        mesh=mesh_for(request, world.world_size() if is_real else None),
        program=None if request.program is None else loaded(request.program),
    )
    if request.reduce_dtype is not None and checked.devices.num_devices > 1:
        checked = replace(checked, passes=reducing_in(request.reduce_dtype, request.passes))
    _check_options(checked)
    _check_optimizers(checked)
    return checked


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool | np.bool_), "True or False"),
    "int": (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "an int"),
    "float": (
        lambda value: isinstance(value, Real) and not isinstance(value, bool) and float(value) >= 0,
        "a number of 0 or more",
    ),
    "str": (lambda value: isinstance(value, str), "text"),
    "Path": (lambda value: isinstance(value, os.PathLike), "a path"),
    "Program": (lambda value: isinstance(value, Program), "a Program"),
    "Artifact": (lambda value: isinstance(value, Artifact), "an Artifact"),
    "torch.device": (lambda value: isinstance(value, torch.device), "a torch.device"),
    "torch.dtype": (lambda value: isinstance(value, torch.dtype), "a torch.dtype"),
    "None": (lambda value: value is None, "None"),
}
"""By the name of a type in an option's annotation: a test of its values, and words for them."""


def _check_types(request: Request) -> None:
    """Raise ValueError for an option of the types in `_KINDS` that has a value of none of them."""
    for option in fields(CompileOptions):
        names = str(option.type).split(" | ")
        value = getattr(request, option.name)
        if _KINDS.keys() >= {*names} and not any(_KINDS[name][0](value) for name in names):
            expected = " or ".join(_KINDS[name][1] for name in names)
            raise ValueError(f"{option.name}={reprlib.repr(value)} must be {expected}.")
    try:
        torch.device(request.device or "cpu")
    except RuntimeError:
        raise ValueError(
            f"device={str(request.device)!r} is no device of torch; give cpu, cuda, or cuda:0."
        ) from None


def _as_optimizers(given: Any) -> tuple[Optimizer, ...]:
    """The optimizers as a tuple. Raises ValueError for something else."""
    optimizers = tuple(given) if isinstance(given, list | tuple) else (given,)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(
                f"optimizers: a {type(optimizer).__name__} is not a torch.optim.Optimizer."
            )
    return optimizers


def _check_optimizers(request: Request) -> None:
    """Raise ValueError for an optimizer that would train nothing of the model."""
    own = {id(parameter) for parameter in request.model.parameters()}
    for optimizer in cast("tuple[Optimizer, ...]", request.optimizers):
        if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                f"optimizers: the {type(optimizer).__name__} holds no parameter of the model, as "
                "if it were made for a copy; make it of model.parameters()."
            )


def _check_planned(request: Request) -> None:
    """Raise ValueError for a cluster beside a given plan: nothing would be planned for it."""
    plan = request.plan
    is_planner = plan is None or (isinstance(plan, str) and plan in PLANNERS)
    if request.cluster is not None and not is_planner:
        raise ValueError(
            "cluster= is for planners, but a plan is given; leave cluster out, or name a planner "
            f"({', '.join(PLANNERS)}) as the plan."
        )


def _check_options(request: Request) -> None:
    check_loss(request.loss)
    check_precision(request.precision)
    _check_among("backward", request.backward, (IN_CALL, AUTOGRAD))
    if request.batch is not None:
        _check_among("batch", request.batch, (LOCAL, GLOBAL))
    if request.batch == LOCAL and request.mesh is None and request.has_processes:
        raise ValueError(
            'batch="local" needs mesh=, from which the number of rows of the global batch '
            "follows; give mesh=, or pass the global batch."
        )
    if request.outputs is not None:
        _check_among("outputs", request.outputs, OUTPUTS)
    if request.max_programs < 1:
        raise ValueError(
            f"max_programs={request.max_programs} would keep no program; give 1 or more."
        )
    if request.zero not in range(4):
        raise ValueError(f"zero={request.zero!r} is no ZeRO stage; give 0, 1, 2 or 3.")
    if request.zero and request.cluster is not None:
        raise ValueError(
            f"zero={request.zero} has no effect with cluster=.., since the planner chooses the "
            "ZeRO stage; leave zero out, or fix it when you plan (`shardweave plan --fix "
            "zero=..`)."
        )
    if request.program is None:
        default = DEFAULT_PLAN if request.cluster is None else DEFAULT_PLANNER
        plan = default if request.plan is None else request.plan
        check_resolvable(plan, request.cluster, sequence_parallel=request.sequence_parallel)


def _check_among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(known)}.")


def _check_model(model: nn.Module) -> None:
    if state_of(model) is not None:
        raise ValueError(
            "the model is compiled already, which sharded its tensors in place; to compile it "
            "again, compile a copy (copy.deepcopy) that was made before the first sw.compile."
        )
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"the model is wrapped in {type(model).__name__}, but a compiled step communicates "
            "itself; pass model.module."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            "the model is a TorchScript module; pass the Python module that it was made from."
        )
    if "_orig_mod" in model._modules:
        raise ValueError(
            "the model was compiled by torch.compile, which sw.compile does not accept; pass the "
            "original model, model._orig_mod."
        )
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise ValueError(
            f"parameter '{sharded[0]}' of the model is a DTensor already, as fully_shard and "
            "parallelize_module make them; pass the unsharded model, and use mesh= and plan= to "
            "shard it."
        )
