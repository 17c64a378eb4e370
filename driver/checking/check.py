"""Comparison of a sharded step with the eager model: loss, every gradient, every updated buffer.

The error of a gradient g against eager's e is the relative L2 error per parameter, ||g - e|| /
||e||. Some gradients are zero except for rounding (of the bias of an attention's keys: softmax is
invariant to it), so that no digit of them is right. Therefore the divisor is at least a small
fraction of the norm of all gradients together; the check names the gradients below it. Buffers are
measured in the same way.

A check takes two steps with different inputs, since a step may leave errors for the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardweave.backends.optimizers.shards import full_copy
from shardweave.backends.state.state import state_of
from shardweave.backends.step.bound import device_of
from shardweave.ir.capture.outputs import NO_LOSS, LossChoice, chosen_loss
from shardweave.ir.dialects.types import dtype_of_value
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts


@dataclass(frozen=True)
class Tolerance:
    """Bounds of a comparison: the largest relative error that counts as equal, and `floor`.

    An error is divided by at least `floor` times the norm of all gradients together.
    """

    bound: float
    floor: float


@dataclass(frozen=True)
class EagerOptions:
    """Options of an eager step: which output is the loss, and the dtype of torch.autocast."""

    loss: LossChoice = None
    autocast: torch.dtype | None = None


PLAIN = EagerOptions()

TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: Tolerance(bound=1e-9, floor=1e-6),
    torch.float32: Tolerance(bound=1e-4, floor=1e-3),
    torch.bfloat16: Tolerance(bound=1e-1, floor=1e-2),
}
"""Tolerances by dtype.

A sum taken in another order differs by some 1e-13 in float64 and 1e-6 in float32 for models of a
few layers, a wrong program by 1e-1 or more; the bounds lie between, with room for deeper models.
A gradient that is zero in exact arithmetic comes out as less than a tenth of eps times the norm of
all gradients, for which bound * floor leaves room.

bfloat16 has 3 digits: the gradients of small transformers in eager mode are themselves up to
5e-2 away from those in float64. Its bound tells a wrong program from a right one, and no
more; a model that amplifies rounding (batch norm over few samples) can fail it, and is better
checked in float64.
"""


@dataclass(frozen=True)
class Expected:
    """Results of the eager model: loss, and by name gradients and buffers after the step."""

    loss: float
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class CheckResult:
    """Errors of a step against eager, and whether all are within `bound`.

    `worst_parameter` has the largest gradient error. `at_floor` names the parameters whose gradient
    is so small that its error is relative to `floor` (see the module's docstring). `worst_buffer`
    is None for a model without buffers.
    """

    bound: float
    loss: float
    eager_loss: float
    loss_error: float
    max_rel_grad_error: float
    worst_parameter: str
    num_parameters: int
    floor: float
    at_floor: tuple[str, ...]
    buffer_error: float = 0.0
    worst_buffer: str | None = None
    num_steps: int = 1
    bound_of: str = ""
    """Origin of the bound, if it is not that of the model's dtype."""

    @property
    def ok(self) -> bool:
        """True if all errors are within the bound; False if one is NaN."""
        errors = (self.loss_error, self.max_rel_grad_error, self.buffer_error)
        return all(error <= self.bound for error in errors)


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """The tolerance for a dtype. Raises ValueError for one that has none."""
    if dtype not in TOLERANCES:
        known = ", ".join(str(known) for known in TOLERANCES)
        raise ValueError(
            f"dtype {dtype} has no error bound to check against; check in one of {known}."
        )
    return TOLERANCES[dtype]


CONDITION = 20.0
"""Error allowed, in multiples of the change that a last-digit change of all inputs causes."""


def check_steps(
    actual: Sequence[Expected],
    eager: Sequence[Expected],
    dtype: torch.dtype,
    program: Program,
    moved: Callable[[], Sequence[Expected]],
) -> CheckResult:
    """Compare steps by the tolerance of `dtype`; if that fails, by a bound that fits the model.

    A model that computes parts in a less precise dtype than `dtype` (norms, angles, losses) gets
    the bound of the coarsest dtype in the program. A model that amplifies rounding gets a multiple
    of the error that eager itself has when its inputs change in the last digit, up to float32's
    bound. moved: returns eager's results on such inputs (`moved_steps`); called only if needed.
    """
    result = compare_steps(actual, eager, dtype)
    coarsest = coarsest_dtype(program, dtype)
    if not result.ok and coarsest != dtype:
        why = f"that of {coarsest}, in which the model computes a part"
        result = replace(compare_steps(actual, eager, coarsest), bound_of=why)
    return result if result.ok else _conditioned(result, compare_steps(moved(), eager, dtype))


def _conditioned(result: CheckResult, own: CheckResult) -> CheckResult:
    """Raise a result's bound to `CONDITION` times eager's error `own`, up to float32's bound."""
    own_error = max(own.loss_error, own.max_rel_grad_error, own.buffer_error)
    bound = min(CONDITION * own_error, TOLERANCES[torch.float32].bound)
    why = (
        f"{CONDITION:.0f} times {own_error:.0e}, by which eager itself moves where weights and "
        "inputs change in their last digit"
    )
    return replace(result, bound=bound, bound_of=why) if bound > result.bound else result


def moved_steps(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], how: EagerOptions = PLAIN
) -> list[Expected]:
    """Run eager steps with weights and inputs changed in the last digit. Changes the model."""
    generator = torch.Generator().manual_seed(0)

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
        return value.detach() * (1 + torch.finfo(value.dtype).eps * signs)

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(moved(parameter))
    steps = [{name: moved(value) for name, value in batch.items()} for batch in batches]
    return [run_eager(model, step, how) for step in steps]


def coarsest_dtype(program: Program, dtype: torch.dtype) -> torch.dtype:
    """The least precise floating-point dtype among a program's values and `dtype`."""
    dtypes = {dtype_of_value(value) for op in ops_of_parts(program) for value in op.results}
    known = [known for known in (*dtypes, dtype) if known in TOLERANCES]
    return max(known, key=lambda known: torch.finfo(known).eps, default=dtype)


def eager_step(model: nn.Module, batch: Mapping[str, Tensor], how: EagerOptions = PLAIN) -> Tensor:
    """Run a forward and a backward pass, adding to the model's gradients; returns the loss."""
    with torch.autocast(device_of(model).type, how.autocast, enabled=how.autocast is not None):
        loss = scalar_loss(model(**batch), how.loss)
    loss.backward()
    return loss


def scalar_loss(output: object, choice: LossChoice = None) -> Tensor:
    """Pick the loss from a model's output. Raises ValueError if there is none."""
    loss = chosen_loss(output, choice)
    if loss is None:
        raise ValueError(NO_LOSS)
    return loss


def run_eager(model: nn.Module, batch: Mapping[str, Tensor], how: EagerOptions = PLAIN) -> Expected:
    """Run one forward and backward pass; it leaves the model's gradients and buffers changed."""
    model.zero_grad(set_to_none=True)
    return results_of(model, eager_step(model, batch, how))


def results_of(module: nn.Module, loss: Tensor) -> Expected:
    """Copy the loss, gradients and buffers of a model or a step, unsharded. Collective."""
    state = state_of(module)
    if state is not None:
        gradients, buffers = state.full_gradients(), state.full_buffers()
    else:
        gradients = {
            name: full_copy(torch.zeros_like(p) if p.grad is None else p.grad)
            for name, p in module.named_parameters()
        }
        buffers = {name: full_copy(buffer) for name, buffer in module.named_buffers()}
    return Expected(loss.detach().double().item(), gradients, buffers)


def compare_steps(
    actual: Sequence[Expected], eager: Sequence[Expected], dtype: torch.dtype
) -> CheckResult:
    """Compare several steps; returns the largest error of each kind, and the first step's loss."""
    steps = [compare(step, wanted, dtype) for step, wanted in zip(actual, eager, strict=True)]
    gradients = max(steps, key=lambda step: _by_size(step.max_rel_grad_error))
    buffers = max(steps, key=lambda step: _by_size(step.buffer_error))
    return replace(
        gradients,
        loss=steps[0].loss,
        eager_loss=steps[0].eager_loss,
        loss_error=max((step.loss_error for step in steps), key=_by_size),
        buffer_error=buffers.buffer_error,
        worst_buffer=buffers.worst_buffer,
        num_steps=len(steps),
    )


def compare(actual: Expected, eager: Expected, dtype: torch.dtype) -> CheckResult:
    """Compare a step's results, as global tensors, with eager's. Raises ValueError if the step
    lacks a parameter of the model, or has one of another shape."""
    tolerance = tolerance_of(dtype)
    everything = math.sqrt(sum(_norm(g) ** 2 for g in eager.gradients.values()))
    floor = tolerance.floor * everything
    errors = {
        name: _error(_named(actual.gradients, name, g), g, floor)
        for name, g in eager.gradients.items()
    }
    floats = (buffer for buffer in eager.buffers.values() if _is_float(buffer))
    buffer_floor = tolerance.floor * math.sqrt(sum(_norm(b) ** 2 for b in floats))
    buffers = {
        name: _error(_named(actual.buffers, name, b), b, buffer_floor if _is_float(b) else 0.0)
        for name, b in eager.buffers.items()
        if name in actual.buffers
    }
    worst, worst_buffer = _worst(errors), _worst(buffers)
    return CheckResult(
        bound=tolerance.bound,
        loss=actual.loss,
        eager_loss=eager.loss,
        loss_error=relative_error(actual.loss, eager.loss),
        max_rel_grad_error=errors.get(worst or "", 0.0),
        worst_parameter=worst or "",
        num_parameters=len(errors),
        floor=floor,
        at_floor=tuple(n for n, g in eager.gradients.items() if _norm(g) < floor),
        buffer_error=buffers.get(worst_buffer or "", 0.0),
        worst_buffer=worst_buffer,
    )


def relative_error(actual: float, expected: float) -> float:
    """Return |actual - expected| / |expected|; the absolute difference if `expected` is 0."""
    return abs(actual - expected) / (abs(expected) or 1.0)


def _named(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None:
        raise ValueError(
            f"the step returned no gradient or buffer '{name}', which eager has; the program may "
            "be of another model: compile this one again."
        )
    if tensor.shape != like.shape:
        raise ValueError(
            f"'{name}' has shape {tuple(tensor.shape)} in the step, but {tuple(like.shape)} in "
            "the eager model; the program may be of another model: compile this one again."
        )
    return tensor


def _error(actual: Tensor, expected: Tensor, floor: float) -> float:
    actual, expected = _wide(actual).to(expected.device), _wide(expected)
    is_finite = expected.isfinite()
    # What is infinite or not a number in eager has to be the same; a mask of -inf is.
    rest = actual[~is_finite], expected[~is_finite]
    if not torch.equal(rest[0].nan_to_num(), rest[1].nan_to_num()) or not torch.equal(
        rest[0].isnan(), rest[1].isnan()
    ):
        return math.inf
    difference = torch.linalg.vector_norm(actual[is_finite] - expected[is_finite]).item()
    scale = max(_norm(expected), floor)
    return difference / scale if scale else difference


def _norm(tensor: Tensor) -> float:
    wide = _wide(tensor)
    return torch.linalg.vector_norm(wide[wide.isfinite()]).item()


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.to(torch.complex128 if dense.is_complex() else torch.float64)


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _worst(errors: Mapping[str, float]) -> str | None:
    return max(errors, key=lambda name: _by_size(errors[name]), default=None)


def _by_size(error: float) -> tuple[bool, float]:
    return math.isnan(error), error
