# pyright: basic
# torch's tracing API is private and only partly typed.
"""The files `trace`, `settings`, `observe` and `hooks` touch torch's private tracing API.

`trace` turns a model and its inputs into one functional graph of ATen ops, forward and
backward together, whose inputs and outputs say what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch._dynamo import functional_export
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.export._trace import _restore_state_dict

from shardweave.ir.capture.dense_attention import replace_attention
from shardweave.ir.capture.explain import check_data_dependence, explained
from shardweave.ir.capture.hooks import Hook, check_hooks, check_leaf_hooks, install_hooks
from shardweave.ir.capture.huggingface import eager_masks
from shardweave.ir.capture.loose_tensors import check_all_registered
from shardweave.ir.capture.meta_device import off_meta
from shardweave.ir.capture.module_tree import block_paths
from shardweave.ir.capture.observe import Observation, Write, observed
from shardweave.ir.capture.repeats import joint_graph, repeats_of
from shardweave.ir.capture.settings import settings
from shardweave.ir.capture.signs import replace_signs
from shardweave.ir.capture.site import CaptureError, Site, qualified, site_of_node
from shardweave.ir.capture.state import assigned_buffers, check_settles, python_state
from shardweave.ir.program import INPUT_GRADIENT

InputKind = Literal["param", "buffer", "input", "tangent"]
OutputKind = Literal["loss", "output", "grad", "buffer"]


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
_KEEPS_GRAPH = (
    "forward assigns a buffer that depends on parameters, so that the next step's backward pass "
    "would reach into this one; detach() what is assigned"
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
        self.assigned: dict[str, Site] = {}
        """Buffers that forward assigns, and where; the new values are returned after the output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._output(*args, **kwargs)
        return (output, *(_new_value(self.model, name) for name in self.assigned))

    def _output(self, *args: Any, **kwargs: Any) -> Any:
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


def _new_value(model: torch.nn.Module, name: str) -> torch.Tensor:
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    if value.requires_grad:
        raise ValueError(f"{_KEEPS_GRAPH}: '{name}'.")
    # A copy, since the value may be another buffer.
    return value.clone()


def _loss_of(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.ndim == 0 else None
    if isinstance(output, (tuple, list)):
        return _loss_of(output[0])
    if isinstance(output, dict):
        return output.get("loss")
    return getattr(output, "loss", None)


def trace(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, train: bool
) -> Traced:
    """One graph for forward and backward (`train`), or for the forward pass alone.

    Raises CaptureError if torch cannot trace the model.
    """
    model, args, kwargs = off_meta(model, args, kwargs)
    _check_arguments(args, kwargs)
    check_hooks(model)
    wrapped = _Wrapped(model, train)
    tensors = tuple(map(_as_input, args))
    named = {name: _as_input(value) for name, value in kwargs.items()}
    try:
        blocks = {path: model.get_submodule(path) for path in block_paths(model)}
        with (
            settings(model, train),
            eager_masks(named),
            observed() as seen,
            repeats_of(blocks),
        ):
            try:
                return _trace(wrapped, tensors, named, seen)
            except CaptureError:
                raise
            except Exception as error:  # torch raises many unrelated classes here
                raise explained(error, seen) from error
    finally:
        torch._dynamo.reset()


def _as_input(value: torch.Tensor) -> torch.Tensor:
    """A leaf that requires a gradient if `value` does."""
    return value.detach().requires_grad_(value.requires_grad)


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    values = zip(_input_names(tuple(args), kwargs), [*args, *kwargs.values()], strict=True)
    for name, value in values:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"argument '{name}' is a {type(value).__name__}; pass tensors only, and bind the "
                "rest with functools.partial or in the model."
            )


def _trace(
    wrapped: _Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Observation
) -> Traced:
    exported = _exported(wrapped, args, kwargs, seen)
    graph, joint = joint_graph(exported, partial(_joint, args=args, kwargs=kwargs))
    names = _input_names(args, kwargs)
    inputs = tuple(_input(node.meta["desc"], names) for node in graph.find_nodes(op="placeholder"))
    outputs = _outputs(graph.output_node(), names, wrapped)
    constants = {
        node.target: getattr(joint, node.target) for node in graph.find_nodes(op="get_attr")
    }
    return Traced(graph, inputs, outputs, constants)


def _joint(exported: Any, args: Any, kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        return aot_export_joint_with_descriptors(
            stack, exported, args, kwargs, decompositions=None
        ).graph_module


def _exported(
    wrapped: _Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Observation
) -> Any:
    """Dynamo's graph, which returns the buffers that forward assigns as well."""
    exported = _dynamo_graph(wrapped, args, kwargs)
    writes = seen.writes
    _check_state(writes, exported, seen, partial(_dynamo_graph, wrapped, args, kwargs))
    assigned = assigned_buffers(wrapped.model, writes)
    if assigned and not wrapped.assigned:
        wrapped.assigned = assigned
        return _exported(wrapped, args, kwargs, seen)
    check_leaf_hooks(seen.leaf_hooks)
    check_data_dependence(exported.graph)
    replace_attention(exported)
    replace_signs(exported)
    check_all_registered(wrapped.model, exported)
    _restore_state_dict(wrapped, exported)
    install_hooks(wrapped.model, exported, partial(_exported_hook, wrapped.model, seen))
    return exported


def _dynamo_graph(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return functional_export._dynamo_graph_capture_for_export(function)(*args, **kwargs)


def _check_state(
    writes: Sequence[Write], exported: Any, seen: Observation, trace: Callable[[], Any]
) -> None:
    def again() -> tuple[list[Write], str]:
        graph = trace()
        return seen.writes, graph.code

    check_settles(python_state(writes), exported.code, again)


def _exported_hook(
    model: torch.nn.Module, seen: Observation, hook: Hook, gradient: torch.Tensor
) -> torch.fx.GraphModule:
    """A hook on a gradient as a graph; what it may do is what forward may do."""
    exported = _dynamo_graph(hook, (gradient,), {})
    writes = seen.writes
    _check_state(writes, exported, seen, partial(_dynamo_graph, hook, (gradient,), {}))
    assigned_buffers(model, writes)
    check_data_dependence(exported.graph)
    check_all_registered(model, exported)
    exported.recompile()  # dynamo has renamed what its code reads
    return exported


def _outputs(
    output: torch.fx.Node, names: list[str], wrapped: _Wrapped
) -> tuple[tuple[OutputKind, str], ...]:
    descs, nodes = output.meta["desc"], cast("Sequence[Any]", output.args[0])
    num_plain = sum(isinstance(desc, aot.PlainAOTOutput) for desc in descs) - len(wrapped.assigned)
    slots: list[tuple[OutputKind, str]] = []
    for desc, node in zip(descs, nodes, strict=True):
        if isinstance(desc, aot.InputMutationAOTOutput):
            slots.append(_mutated(*_input(desc.mutated_input, names), site_of_node(node)))
        elif isinstance(desc, aot.PlainAOTOutput) and desc.idx >= num_plain:
            name, site = list(wrapped.assigned.items())[desc.idx - num_plain]
            _check_fits(name, site, node, wrapped.model.get_buffer(name))
            slots.append(("buffer", name))
        else:
            slots.append(_output(desc, names))
    return tuple(slots)


def _mutated(kind: InputKind, name: str, site: Site) -> tuple[OutputKind, str]:
    if kind != "buffer":
        what = "parameter" if kind == "param" else "input"
        raise CaptureError(
            f"{site}: forward changes {what} '{name}' in place; copy it first (clone), or make it "
            "a buffer."
        )
    return "buffer", name


def _check_fits(name: str, site: Site, node: torch.fx.Node, old: torch.Tensor) -> None:
    new = node.meta["val"]
    if new.shape != old.shape or new.dtype != old.dtype:
        raise CaptureError(
            f"{site}: forward makes buffer '{name}' of shape {tuple(old.shape)} "
            f"and {old.dtype} one of shape {tuple(new.shape)} and {new.dtype}; keep its form."
        )


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
        return ("output", f"{INPUT_GRADIENT}{name}") if kind == "input" else ("grad", name)
    return "output", str(getattr(desc, "idx", 0))


def called_again(graph: torch.fx.Graph) -> set[str]:
    """The qualified names of modules that are called more than once."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.nodes)
    entries = (item for stack in stacks for item in stack.items())
    return {qualified(path) for key, (path, _) in entries if "@" in key}
