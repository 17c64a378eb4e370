# pyright: basic
# torch's tracing API is private and only partly typed.
"""Trace a model and its inputs into one graph, by torch's private tracing API.

`trace` turns a model and its inputs into one functional graph of ATen ops, forward and
backward together, and gives the kind and name of each input and output.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import fx

from shardweave.ir.capture.arguments import Form, children_of
from shardweave.ir.capture.module_tree import block_paths
from shardweave.ir.capture.observed.explain import check_data_dependence, explained
from shardweave.ir.capture.observed.hooks import Hook, check_hooks, check_leaf_hooks, install_hooks
from shardweave.ir.capture.observed.layouts import check_layouts, dense_gradients
from shardweave.ir.capture.observed.loose_tensors import check_all_registered, keep_constants
from shardweave.ir.capture.observed.observe import Observation, Write, observed
from shardweave.ir.capture.observed.settings import settings
from shardweave.ir.capture.observed.state import assigned_buffers, check_settles, python_state
from shardweave.ir.capture.observed.value_checks import drop_unread_numbers
from shardweave.ir.capture.outputs import (
    LOSS,
    Kind,
    Outputs,
    Wrapped,
    are_cut,
    noting_outputs,
    outputs_of,
)
from shardweave.ir.capture.recorded.trusted import random_numbers_kept, recorded_graph
from shardweave.ir.capture.repeats import joint_graph, repeats_of
from shardweave.ir.capture.site import CaptureError, Site, qualified, site_of_node
from shardweave.ir.capture.substitutes.boolean_rows import replace_boolean_rows
from shardweave.ir.capture.substitutes.decomposed import decompositions, interpolation_kept
from shardweave.ir.capture.substitutes.dense_attention import replace_attention
from shardweave.ir.capture.substitutes.huggingface import as_in_eager
from shardweave.ir.capture.substitutes.meta_device import off_meta
from shardweave.ir.capture.substitutes.stand_ins import replace_calls
from shardweave.ir.program.program import INPUT_GRADIENT, TANGENT
from shardweave.ir.torch_private import (
    aot,
    dynamo_graph,
    joint_export,
    note_newer,
    restore_state_dict,
)

logger = logging.getLogger(__name__)

InputKind = Literal["param", "buffer", "input", "tangent"]
OutputKind = Literal["loss", "output", "grad", "buffer"]


@dataclass(frozen=True)
class Traced:
    """A functional graph of forward and backward, with the kind and name of each input and output.

    Names are qualified names in the model, or names of forward's arguments.
    """

    graph: torch.fx.Graph
    inputs: tuple[tuple[InputKind, str], ...]
    outputs: tuple[tuple[OutputKind, str], ...]
    constants: Mapping[str, torch.Tensor]
    returned: Outputs | None = None
    """The model's return value in terms of the outputs; None where the loss alone is traced."""
    notes: tuple[str, ...] = ()
    """Sentences for the user on differences between the trace and the model."""
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors that the model's code reads and that the trace made buffers, by name."""


def trace(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kind: Kind,
    form: Form | None = None,
) -> Traced:
    """Trace forward and backward as one graph, or the forward pass alone, as `kind` says. form: the
    structure of the call whose tensors are `args`; None if `args` and `kwargs` are the call's own
    arguments. Raises CaptureError if torch cannot trace the model."""
    note_newer()
    model, args, kwargs = off_meta(model, args, kwargs)
    _check_arguments(args, kwargs)
    if form is None:
        _check_signature(model, args, kwargs)
    check_hooks(model)
    wrapped = Wrapped(model, kind, form)
    tensors = tuple(map(_as_input, args))
    named = {name: _as_input(value) for name, value in kwargs.items()}
    names = _input_names(tensors, named) if form is None else list(form.names)
    try:
        blocks = {path: model.get_submodule(path) for path in block_paths(model)}
        with (
            settings(model, kind.train, kind.has_gradients),
            as_in_eager(model, names, is_step=kind.all_outputs),
            noting_outputs(),
            observed() as seen,
            random_numbers_kept(),
            repeats_of(blocks),
        ):
            try:
                return _trace(wrapped, tensors, named, names, seen)
            except CaptureError:
                raise
            except Exception as error:  # torch raises many unrelated classes here
                raise explained(error, seen) from error
    finally:
        torch.compiler.reset()


def _as_input(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_(value.requires_grad)


def _check_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    values = zip(_input_names(tuple(args), kwargs), [*args, *kwargs.values()], strict=True)
    for name, value in values:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"argument '{name}' is a {type(value).__name__}; pass tensors only, and bind the "
                "rest with functools.partial or in the model."
            )


def _check_signature(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "nothing"
        raise CaptureError(
            f"the batch does not fit the model's forward, which takes {names}: {error}."
        ) from None


def _trace(
    wrapped: Wrapped,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: list[str],
    seen: Observation,
) -> Traced:
    exported = _exported(wrapped, args, kwargs, seen)
    run_again = (
        _read_in_checkpoints(exported.graph) if wrapped.kind.has_gradients else frozenset[str]()
    )
    graph, joint = joint_graph(exported, partial(_joint, args=args, kwargs=kwargs))
    returned, plain = _returned(graph.output_node(), wrapped, joint.meta["out_spec"])
    inputs = tuple(
        _input(node.meta["desc"], names, plain) for node in graph.find_nodes(op="placeholder")
    )
    outputs = _outputs(graph.output_node(), names, plain, wrapped)
    updated = sorted(run_again & {name for kind, name in outputs if kind == "buffer"})
    if updated:
        seen.notes.append(
            _UPDATED_ONCE.format(names=", ".join([*updated[:3], *([".."] if updated[3:] else [])]))
        )
    constants = {
        node.target: getattr(joint, node.target) for node in graph.find_nodes(op="get_attr")
    }
    first = _first_names(wrapped.model)
    return Traced(
        graph,
        tuple([(kind, first.get(name, name)) for kind, name in inputs]),
        tuple([(kind, first.get(name, name)) for kind, name in outputs]),
        constants,
        returned,
        tuple(dict.fromkeys(seen.notes)),
        seen.constants,
    )


_UPDATED_ONCE = (
    "buffers under torch.utils.checkpoint ({names}) are updated once in a step; eager updates "
    "them twice, since backward runs that part of forward again"
)


def _read_in_checkpoints(graph: fx.Graph) -> frozenset[str]:
    """The names of parameters and buffers that regions under torch.utils.checkpoint read."""
    parts = [node for node in graph.nodes if str(node.target) == "tag_activation_checkpoint"]
    reads = [arg for part in parts for arg in part.args if isinstance(arg, fx.Node)]
    return frozenset(
        str(read.target).removeprefix("model.") for read in reads if read.op == "get_attr"
    )


def _first_names(model: torch.nn.Module) -> dict[str, str]:
    """Map each further name of a shared buffer to its first name: torch may choose any of them."""
    first: dict[int, str] = {}
    renamed: dict[str, str] = {}
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if first.setdefault(id(buffer), name) != name:
            renamed[name] = first[id(buffer)]
    return renamed


def _joint(exported: Any, args: Any, kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack, interpolation_kept():
        table = decompositions()
        described = joint_export(stack, exported, args, kwargs, decompositions=table)
    joint = described.graph_module
    joint.meta["out_spec"] = described.out_spec
    return joint


def _exported(
    wrapped: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Observation
) -> Any:
    """Trace by dynamo; the graph returns the new values of assigned buffers after the outputs."""
    exported = _graph_of(wrapped, args, kwargs, seen)
    writes = seen.writes
    _check_state(writes, exported, seen, partial(_dynamo_graph, wrapped, args, kwargs))
    assigned = assigned_buffers(wrapped.model, writes)
    if assigned and not wrapped.assigned:
        wrapped.assigned = assigned
        return _exported(wrapped, args, kwargs, seen)
    check_leaf_hooks(seen.leaf_hooks)
    drop_unread_numbers(exported.graph)
    replace_boolean_rows(exported)
    check_data_dependence(exported.graph)
    check_layouts(exported.graph)
    seen.notes += dense_gradients(exported.graph)
    replace_attention(exported)
    replace_calls(exported)
    kept, notes = keep_constants(wrapped.model, exported, seen.arrays)
    if kept:  # as buffers they have names, by which blocks are told apart
        seen.constants |= kept
        seen.notes += notes
        return _exported(wrapped, args, kwargs, seen)
    restore_state_dict(wrapped, exported)
    install_hooks(wrapped.model, exported, partial(_exported_hook, wrapped.model, seen))
    return exported


def _graph_of(wrapped: Wrapped, args: Any, kwargs: Any, seen: Observation) -> fx.GraphModule:
    """Trace by dynamo; if it cannot follow the Python code, run that and record its calls."""
    if seen.refusal is None:
        try:
            return _dynamo_graph(wrapped, args, kwargs)
        except CaptureError:
            raise
        except Exception as error:  # noqa: BLE001 - torch raises many unrelated classes here
            seen.refusal = explained(error, seen)
            seen.refusal.__cause__ = error
    try:
        graph, seen.writes = recorded_graph(wrapped, args, kwargs)
    except Exception as error:  # noqa: BLE001 - of the model's own Python too
        logger.info("the model is not recorded either: %s", error)
        cause = seen.refusal.__cause__
        assert isinstance(cause, Exception)
        raise explained(cause, seen, error) from cause
    seen.notes.append(_RECORDED.format(reason=str(seen.refusal).partition(";")[0]))
    return graph


_RECORDED = (
    "{reason}; so its Python was run, and what it called was recorded and compared with eager on "
    "two other inputs; parts under torch.utils.checkpoint keep their activations"
)


def _dynamo_graph(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return dynamo_graph(function)(*args, **kwargs)


def _check_state(
    writes: Sequence[Write], exported: Any, seen: Observation, trace: Callable[[], Any]
) -> None:
    def again() -> tuple[list[Write], str]:
        graph = trace()
        return seen.writes, _code_of(graph)

    check_settles(python_state(writes), partial(_code_of, exported), again)


def _code_of(exported: torch.fx.GraphModule) -> str:
    return exported.graph.python_code("self").src


def _exported_hook(
    model: torch.nn.Module, seen: Observation, hook: Hook, gradient: torch.Tensor
) -> torch.fx.GraphModule:
    """Trace a hook on a gradient as a graph, under the same restrictions as forward."""
    exported = _dynamo_graph(hook, (gradient,), {})
    writes = seen.writes
    _check_state(writes, exported, seen, partial(_dynamo_graph, hook, (gradient,), {}))
    assigned_buffers(model, writes)
    check_data_dependence(exported.graph)
    check_all_registered(model, exported)
    exported.recompile()  # dynamo has renamed what its code reads
    return exported


def _returned(
    output: torch.fx.Node, wrapped: Wrapped, spec: Any
) -> tuple[Outputs | None, list[str]]:
    """Return the structure of the model's outputs, and each output's name ('' for a constant)."""
    descs, nodes = output.meta["desc"], cast("Sequence[Any]", output.args[0])
    plain = [n for n, d in zip(nodes, descs, strict=True) if isinstance(d, aot.PlainAOTOutput)]
    plain = plain[: len(plain) - len(wrapped.assigned)]
    if not wrapped.kind.all_outputs:
        return None, [str(index) for index in range(len(plain))]
    first = 1 if wrapped.kind.has_gradients and not are_cut() else 0
    loss = plain[0] if first else None
    returned, names = outputs_of(children_of(spec)[first], plain[first:], loss)
    return returned, [*([LOSS] if first else []), *names]


def _outputs(
    output: torch.fx.Node, names: list[str], plain: Sequence[str], wrapped: Wrapped
) -> tuple[tuple[OutputKind, str], ...]:
    """Return the kind and name of each flat output; a constant has an empty name."""
    descs, nodes = output.meta["desc"], cast("Sequence[Any]", output.args[0])
    num_plain = len(plain)
    slots: list[tuple[OutputKind, str]] = []
    for desc, node in zip(descs, nodes, strict=True):
        if isinstance(desc, aot.InputMutationAOTOutput):
            slots.append(_mutated(*_input(desc.mutated_input, names), node))
        elif isinstance(desc, aot.PlainAOTOutput) and desc.idx >= num_plain:
            name, site = list(wrapped.assigned.items())[desc.idx - num_plain]
            _check_fits(name, site, node, wrapped.model.get_buffer(name))
            slots.append(("buffer", name))
        elif isinstance(desc, aot.PlainAOTOutput):
            slots.append(("output", plain[int(desc.idx)]))
        else:
            slots.append(_output(desc, names))
    return tuple(slots)


def _mutated(kind: InputKind, name: str, node: torch.fx.Node) -> tuple[OutputKind, str]:
    if kind != "buffer":
        what = "parameter" if kind == "param" else "input"
        remedy = "copy it first (clone), or make it a buffer"
        if node.target is torch.ops.aten.embedding_renorm.default:
            remedy = (
                "max_norm does so; leave it out, and limit what is looked up: "
                "x * (max_norm / x.norm(dim=-1, keepdim=True)).clamp(max=1)"
            )
        raise CaptureError(
            f"{site_of_node(node)}: forward changes {what} '{name}' in place; {remedy}."
        )
    return "buffer", name


def _check_fits(name: str, site: Site, node: torch.fx.Node, old: torch.Tensor) -> None:
    new = node.meta["val"]
    if new.shape != old.shape or new.dtype != old.dtype:
        raise CaptureError(
            f"{site}: forward replaces buffer '{name}' (shape {tuple(old.shape)}, {old.dtype}) by "
            f"a tensor of shape {tuple(new.shape)} and {new.dtype}; keep its shape and dtype."
        )


def _input_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    return [f"arg{index}" for index in range(len(args))] + list(kwargs)


def _input(desc: Any, names: Sequence[str], outputs: Sequence[Any] = ()) -> tuple[InputKind, str]:
    if isinstance(desc, aot.ParamAOTInput):
        return "param", desc.target.removeprefix("model.")
    if isinstance(desc, aot.BufferAOTInput):
        return "buffer", desc.target.removeprefix("model.")
    if isinstance(desc, aot.TangentAOTInput):
        if not are_cut():
            return "tangent", "loss"
        return "input", TANGENT + str(outputs[cast(Any, desc.output).idx])
    if isinstance(desc, aot.PlainAOTInput):
        return "input", names[int(desc.idx)]
    raise CaptureError(f"the traced graph has an input that is not supported: {desc}.")


def _output(desc: Any, names: list[str]) -> tuple[OutputKind, str]:
    if isinstance(desc, aot.GradAOTOutput):
        kind, name = _input(desc.grad_of, names)
        return ("output", f"{INPUT_GRADIENT}{name}") if kind == "input" else ("grad", name)
    return "output", ""


def called_again(graph: torch.fx.Graph) -> set[str]:
    """The qualified names of modules that a step calls more than once."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.nodes)
    entries = (item for stack in stacks for item in stack.items())
    return {qualified(path) for key, (path, _) in entries if "@" in key}
