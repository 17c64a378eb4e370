# pyright: basic
"""Hooks on gradients: those of parameters become ops of the step, the others are refused.

Autograd runs the hooks of leaves, but a traced graph has no leaves. So the graph reads a hooked
parameter through a view with the same hooks, and traces their effect on the gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules import module as global_hooks

from shardweave.ir.capture.site import CaptureError, Site
from shardweave.ir.torch_private import assign_attribute

Hook = Callable[[Tensor], Tensor | None]
Export = Callable[[Hook, Tensor], torch.fx.GraphModule]
"""Traces a hook: (hook, an example of the gradient) -> the hook's graph."""

_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_GLOBAL = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def check_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks that torch cannot trace, naming module and function."""
    for path, module in model.named_modules():
        for kind in _BACKWARD:
            for hook in getattr(module, kind).values():
                raise CaptureError(
                    f"{_site(hook, path)}: a backward hook of a module cannot be traced; remove "
                    "it, or call y.register_hook(..) on the module's output in forward."
                )
    for kind in _GLOBAL:
        for hook in getattr(global_hooks, kind).values():
            raise CaptureError(
                f"{_site(hook, '')}: a global hook, which runs for all modules, cannot be "
                "traced; register it on single modules instead."
            )


def check_leaf_hooks(hooks: Iterable[tuple[str, Site]]) -> None:
    """Raises CaptureError if forward itself registers hooks on parameters or inputs."""
    for name, site in hooks:
        raise CaptureError(
            f"{site}: forward registers a hook on '{name}' each time that it runs, so that every "
            "step adds one more hook; register it once, in __init__, or on a view of the tensor "
            f"(w = {name}.view_as({name}))."
        )


def install_hooks(model: nn.Module, exported: torch.fx.GraphModule, export: Export) -> None:
    """Read each hooked parameter of the exported graph through a view that has its hooks. The graph
    reads attributes by `model.` plus the qualified name. export: traces a hook."""
    tensors = (*model.named_buffers(), *model.named_parameters())
    names = {id(tensor): f"model.{name}" for name, tensor in tensors}
    for name, parameter in model.named_parameters():
        hooks = list((parameter._backward_hooks or {}).values())
        nodes = exported.graph.find_nodes(op="get_attr", target=f"model.{name}")
        if hooks and nodes and parameter.requires_grad:
            graphs = [export(hook, parameter.detach()) for hook in hooks]
            _read_through_view(exported, nodes, graphs, names)
    exported.recompile()


def _read_through_view(
    exported: torch.fx.GraphModule,
    nodes: Sequence[torch.fx.Node],
    hooks: Sequence[torch.fx.GraphModule],
    names: Mapping[int, str],
) -> None:
    reads = [{key: names[id(t)] for key, t in _tensors(hook)} for hook in hooks]
    for hook in hooks:
        for _, tensor in _tensors(hook):
            assign_attribute(tensor, exported, names[id(tensor)])

    def hooked(parameter: Tensor, *states: Mapping[str, Tensor]) -> Tensor:
        view = parameter.view_as(parameter)
        for hook, state in zip(hooks, states, strict=True):
            view.register_hook(partial(_call, hook, state))
        return view

    graph, first = exported.graph, nodes[0]
    with graph.inserting_after(first):
        view = graph.call_function(hooked)
    view.meta.update(first.meta)
    for node in nodes:
        node.replace_all_uses_with(view)
    with graph.inserting_before(view):
        states = [{key: graph.get_attr(name) for key, name in read.items()} for read in reads]
    view.args = (first, *states)


def _tensors(hook: torch.fx.GraphModule) -> list[tuple[str, Tensor]]:
    return [*hook.named_parameters(), *hook.named_buffers()]


def _call(hook: torch.fx.GraphModule, state: Mapping[str, Tensor], grad: Tensor) -> Tensor | None:
    return functional_call(hook, dict(state), (grad,))


def _site(hook: Any, module: str) -> Site:
    code = getattr(inspect.unwrap(getattr(hook, "__func__", hook)), "__code__", None)
    return Site(module, code.co_filename, code.co_firstlineno) if code else Site(module)
