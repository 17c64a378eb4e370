"""Capturing a model's training step as a program."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from shardweave.ir.capture.arguments import Form, check_example, named_arguments
from shardweave.ir.capture.fx_import import import_graph
from shardweave.ir.capture.module_tree import block_paths
from shardweave.ir.capture.outputs import Kind, Outputs
from shardweave.ir.capture.site import CaptureError
from shardweave.ir.capture.trace import Traced, called_again, trace
from shardweave.ir.dialects.annotations import describe
from shardweave.ir.dialects.types import dtype_of_value, is_float8
from shardweave.ir.notes import CaptureNote, warn
from shardweave.ir.ops.registry import spec_of
from shardweave.ir.program.blocks import store_blocks
from shardweave.ir.program.dead_code import remove_dead_ops
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import without_gc

__all__ = ["CaptureError", "capture"]


def capture(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
) -> Program:
    """The global program of one training step of `model` on inputs of these shapes.

    The model returns its scalar loss, or a tuple that begins with it, or an object or dict
    with `loss`. The program's results are the loss, the gradient of every parameter that the
    loss depends on, and the new values of the buffers that the model updates.

    args, kwargs: a batch, as forward takes it; inputs are named after forward's parameters.
    train: False captures only the outputs, with the model in evaluation mode.

    Parameters may be fake tensors (torch's FakeTensorMode): nothing is allocated then.
    Means, normalised losses and batch norm come out as explicit sums over the global batch.

    Random numbers are `dist.random` ops; their state is the program's buffer `random_state`.

    Raises CaptureError, naming the module, for code without an exact form: data-dependent shapes,
    distributions such as `torch.multinomial`, untraceable code; TypeError for arguments that
    forward does not take.
    """
    check_example(model, args, kwargs or {})
    named = tuple(args), dict(kwargs or {})
    with suppress(TypeError):  # `trace` raises a clearer error
        named = named_arguments(inspect.signature(model.forward), *named)
    traced = trace(model, *named, Kind(train=train))
    for note in traced.notes:
        warn(note, CaptureNote)
    return _program(traced, model)


@dataclass(frozen=True)
class Captured:
    """A captured global program, and the structure of the value that the model's forward returns.

    seconds: the time that capture took. notes: sentences for the user on differences from eager.
    constants: by name, tensors that the model's code reads and that capture registered as buffers.
    """

    program: Program
    returned: Outputs
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


def capture_step(
    model: torch.nn.Module, form: Form, tensors: Sequence[torch.Tensor], kind: Kind
) -> Captured:
    """Capture a call of `model` as a global program; each module stays in its training mode. form,
    tensors: the call's structure and its tensors. Raises CaptureError as `capture` does."""
    if form.tree is None:
        args, kwargs = form.arguments(tensors)
        traced = trace(model, args, kwargs, kind)
    else:
        traced = trace(model, tensors, {}, kind, form)
    assert traced.returned is not None
    program = _program(traced, model)
    return Captured(program, traced.returned, notes=traced.notes, constants=traced.kept)


def _program(traced: Traced, model: torch.nn.Module) -> Program:
    with without_gc():
        program = Program(import_graph(traced, tied_names(model)))
        _check_dtypes_of_products(program)
        remove_dead_ops(program)
        store_blocks(program, block_paths(model, called_again(traced.graph)))
    return program


def _check_dtypes_of_products(program: Program) -> None:
    """Raises CaptureError for a product of two dtypes: eager refuses it, fake tensors do not."""
    for op in program.ops:
        product = spec_of(op).product
        if product is None:
            continue
        first, second = [dtype_of_value(op.operands[index]) for index in product.factors]
        if first != second and not (is_float8(first) and is_float8(second)):
            raise CaptureError(
                f"{describe(op)}: the operands of a matrix product must have one dtype, but have "
                f"{first} and {second}; cast one of them, for instance an input of the batch."
            )


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Map each shared parameter's first qualified name to its other qualified names."""
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return {names[0]: names[1:] for names in by_identity.values() if len(names) > 1}
