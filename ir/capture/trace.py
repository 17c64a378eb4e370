# pyright: basic
# torch's tracing API is private and only partly typed.
"""The one file that touches torch's private tracing API.

`trace` turns a model and its inputs into one functional graph of ATen ops, forward and
backward together, whose inputs and outputs say what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch._dynamo import functional_export
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export._trace import _restore_state_dict

InputKind = Literal["param", "buffer", "input", "tangent"]
OutputKind = Literal["loss", "output", "grad", "buffer"]


class CaptureError(ValueError):
    """The model cannot be captured; the message says which part and what to change."""


@dataclass(frozen=True)
class Traced:
    """A functional graph with the meaning of each placeholder and of each flat output.

    Names are qualified names of the model, or names of arguments.
    """

    graph: torch.fx.Graph
    inputs: tuple[tuple[InputKind, str], ...]
    outputs: tuple[tuple[OutputKind, str], ...]
    constants: Mapping[str, torch.Tensor]


_NO_LOSS = (
    "the model's output has no scalar loss; return the loss, a tuple that begins with it, or an "
    "object or dict with 'loss'."
)
_NO_OUTPUT = (
    "the model's output has neither 'loss' nor 'logits'; return a tensor, a tuple of tensors, or "
    "an object or dict with one of these."
)


class _Wrapped(torch.nn.Module):
    """Calls the model and keeps of its output what the step is about."""

    def __init__(self, model: torch.nn.Module, train: bool) -> None:
        super().__init__()
        self.model = model
        self.train_step = train

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs)
        loss = _loss_of(output)
        if loss is not None:
            return loss
        if self.train_step:
            raise ValueError(_NO_LOSS)
        if isinstance(output, (torch.Tensor, tuple, list)):
            return output
        logits = output.get("logits") if isinstance(output, dict) else output.logits
        if logits is None:
            raise ValueError(_NO_OUTPUT)
        return logits


def _loss_of(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.ndim == 0 else None
    if isinstance(output, (tuple, list)):
        return _loss_of(output[0])
    if isinstance(output, dict):
        return output.get("loss")
    return getattr(output, "loss", None)


def _fake_mode_of(model: torch.nn.Module) -> FakeTensorMode | None:
    for tensor in model.parameters():
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None


@contextlib.contextmanager
def _tracing(model: torch.nn.Module, train: bool) -> Iterator[None]:
    """Train or inference mode, restored afterwards; the fake mode of fake parameters."""
    was_training = {name: module.training for name, module in model.named_modules()}
    with contextlib.ExitStack() as stack:
        mode = _fake_mode_of(model)
        if mode is not None:
            stack.enter_context(mode)
        if not train:
            model.eval()
            stack.enter_context(torch.no_grad())
        try:
            yield
        finally:
            for name, module in model.named_modules():
                module.training = was_training[name]


def trace(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool
) -> Traced:
    """One graph for forward and backward (`train`), or for the forward pass alone.

    Raises CaptureError if torch cannot trace the model.
    """
    if any(tensor.is_meta for tensor in model.parameters()):
        raise CaptureError(
            "the model has parameters on the meta device, which have no gradients; build it "
            "under torch._subclasses.fake_tensor.FakeTensorMode() on cpu instead."
        )
    _check_arguments(args, kwargs)
    wrapped = _Wrapped(model, train)
    # A gradient for an input that happens to require one is nobody's parameter.
    tensors = tuple(value.detach() for value in args)
    named = {name: value.detach() for name, value in kwargs.items()}
    try:
        with _tracing(model, train):
            return _trace(wrapped, tensors, named)
    except CaptureError:
        raise
    except Exception as error:  # torch raises many unrelated classes here
        raise CaptureError(_explain(error)) from error
    finally:
        torch._dynamo.reset()


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    values = zip(_input_names(tuple(args), kwargs), [*args, *kwargs.values()], strict=True)
    for name, value in values:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"argument '{name}' is a {type(value).__name__}; pass tensors only, and bind the "
                "rest with functools.partial or in the model."
            )


def _explain(error: Exception) -> str:
    ours = next((text for text in (_NO_LOSS, _NO_OUTPUT) if text in str(error)), None)
    if ours is not None:
        return ours
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in lines if line.startswith("Developer debug context")), "")
    first = lines[0] if lines else type(error).__name__
    where = next((line for line in reversed(lines) if line.startswith("File ")), "")
    return " ".join(
        part
        for part in (
            f"torch could not trace the model: {first}",
            reason,
            where,
            "Make this part of the model traceable (no data-dependent shapes or branches).",
        )
        if part
    )


def _trace(wrapped: _Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    # Shapes are fixed: the guards that would be made to check dynamic ones, a quarter of the time
    # that a small GPT takes, guard nothing.
    with patch.object(functional_export, "_suggest_or_raise_constraint_violation"):
        exported: Any = functional_export._dynamo_graph_capture_for_export(wrapped)(*args, **kwargs)
    _restore_state_dict(wrapped, exported)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(
            stack, exported, args, kwargs, decompositions=None
        ).graph_module
    graph = joint.graph
    names = _input_names(args, kwargs)
    inputs = tuple(_input(node.meta["desc"], names) for node in graph.find_nodes(op="placeholder"))
    outputs = tuple(_output(desc, names) for desc in graph.output_node().meta["desc"])
    constants = {
        node.target: getattr(joint, node.target) for node in graph.find_nodes(op="get_attr")
    }
    return Traced(graph, inputs, outputs, constants)


def _input_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    return [f"arg{index}" for index in range(len(args))] + list(kwargs)


def _input(desc: Any, names: list[str]) -> tuple[InputKind, str]:
    if isinstance(desc, aot.ParamAOTInput):
        return "param", desc.target.removeprefix("model.")
    if isinstance(desc, aot.BufferAOTInput):
        return "buffer", desc.target.removeprefix("model.")
    if isinstance(desc, aot.TangentAOTInput):
        return "tangent", "loss"
    if isinstance(desc, aot.PlainAOTInput):
        return "input", names[desc.idx]
    raise CaptureError(f"input {desc} of the traced graph is of a kind that is not supported.")


def _output(desc: Any, names: list[str]) -> tuple[OutputKind, str]:
    if isinstance(desc, aot.GradAOTOutput):
        kind, name = _input(desc.grad_of, names)
        assert kind in ("param", "buffer"), desc
        return "grad", name
    if isinstance(desc, aot.InputMutationAOTOutput):
        kind, name = _input(desc.mutated_input, names)
        if kind != "buffer":
            raise CaptureError(
                f"the model changes its {kind} '{name}' in place; copy it in the model first."
            )
        return "buffer", name
    return "output", str(getattr(desc, "idx", 0))


def called_again(graph: torch.fx.Graph) -> set[str]:
    """The qualified names of modules that are called more than once."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.nodes)
    entries = (item for stack in stacks for item in stack.items())
    return {_qualified(path) for key, (path, _) in entries if "@" in key}


def module_path(stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
    """The qualified name of the innermost module of an fx module stack; None without one."""
    return _qualified(list(stack.values())[-1][0]) if stack else None


def _qualified(path: str) -> str:
    path = path.removeprefix("L['self']").removeprefix("self").lstrip(".")
    return path.removeprefix("model").lstrip(".")
