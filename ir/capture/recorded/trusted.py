# pyright: basic
# torch's tracing API is private and only partly typed.
"""Record a model's calls as a graph, and verify it by a second recording and eager PyTorch.

A recording contains the values that the model's Python computed while it ran. Values that differ
from call to call, such as numbers that Python draws or counters, show in a second recording.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from shardweave.ir.capture.observed.observe import UNKNOWN, Write
from shardweave.ir.capture.outputs import Wrapped
from shardweave.ir.capture.recorded.recorder import CallRecorder, Unseen
from shardweave.ir.capture.site import Site
from shardweave.ir.torch_private import FakeTensor, PyTreeInfo, TreeCodeGen, pytree, replaced

_CLOSE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_OTHERS = 2
"""The number of other inputs on which a recording is compared with eager."""


def recorded_graph(
    root: Wrapped, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, list[Write]]:
    """Record the calls of `root` and compare the recording with eager; return the graph, which
    reads parameters and buffers as attributes, and the writes to buffers. Raises Unseen if the
    recording differs or is incomplete, or a fake tensor's error."""
    tensors = [*args, *kwargs.values(), *root.parameters(), *root.buffers()]
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        raise Unseen("parameters have no values, so that a recording cannot be compared with eager")
    with _state_kept(root), torch.compiler.set_stance("force_eager"):
        graph, assigned = _record(root, args, kwargs)
        again, _ = _record(root, args, kwargs)
        if _code(graph) != _code(again):
            raise Unseen("forward calls other ops when it runs again on the same inputs")
        # What assigns buffers is recorded anew to return their values.
        if set(assigned) <= set(root.assigned):
            _compare(root, graph, [*args, *kwargs.values()], list(kwargs))
    return graph, [_write(name) for name in assigned]


def _code(graph: fx.GraphModule) -> str:
    return graph.graph.python_code("self").src


def _record(
    root: Wrapped, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, list[str]]:
    recorder = CallRecorder(root)
    values = dict(zip([f"arg{i}" for i in range(len(args))], args, strict=True)) | dict(kwargs)
    fakes = [recorder.placeholder(name, value) for name, value in values.items()]
    named = dict(zip(kwargs, fakes[len(args) :], strict=True))
    before = dict(root.model.named_buffers())
    with _buffers_kept(root), replaced({"is compiling": True}), recorder.seeing_all():
        returned = root(*fakes[: len(args)], **named)
        after = dict(root.model.named_buffers())
        tree = recorder.output(returned)
    if before.keys() != after.keys():
        raise Unseen("forward creates or removes a buffer")
    exported = fx.GraphModule(recorder.root, recorder.graph)
    in_tree = pytree.tree_flatten((tuple(args), dict(kwargs)))[1]
    exported.graph.set_codegen(TreeCodeGen(PyTreeInfo(list(values), in_tree, tree)))
    exported.recompile()
    return exported, [name for name in before if after[name] is not before[name]]


def _write(name: str) -> Write:
    path, _, own = name.rpartition(".")
    place = f"{path}._buffers['{own}']".lstrip(".")
    return Write(place, Site(path), UNKNOWN, UNKNOWN, is_read=False)


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the states of Python's and numpy's random number generators on exit."""
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)


@contextlib.contextmanager
def _state_kept(root: nn.Module) -> Iterator[None]:
    """Restore Python state on exit: attributes of modules, lists, dicts and sets among them, and
    random number generators."""
    modules = list(root.modules())
    before = [(dict(vars(module)), _contents(vars(module))) for module in modules]
    try:
        with random_numbers_kept():
            yield
    finally:
        for module, (attributes, contents) in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            for value, content in contents:
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)


def _contents(attributes: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    held = [value for value in attributes.values() if isinstance(value, (list, dict, set))]
    return [(value, value.copy()) for value in held]


@contextlib.contextmanager
def _buffers_kept(root: nn.Module) -> Iterator[None]:
    """Restore each module's buffers and their values on exit."""
    before = [(module._buffers, dict(module._buffers)) for module in root.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    try:
        yield
    finally:
        for buffers, old in before:
            buffers.clear()
            buffers.update(old)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)


def _compare(
    root: Wrapped, graph: fx.GraphModule, values: Sequence[Tensor], names: Sequence[str]
) -> None:
    """Raises Unseen unless a recording has eager's results on shuffled copies of the inputs."""
    num_args = len(values) - len(names)
    for seed in range(_OTHERS):
        generator = torch.Generator().manual_seed(seed)
        others = [_shuffled(value, generator) for value in values]
        named = dict(zip(names, others[num_args:], strict=True))
        results = [
            _results(function, root, others[:num_args], named, seed) for function in (root, graph)
        ]
        for theirs, ours in zip(*results, strict=True):
            if not _is_close(ours, theirs):
                raise Unseen("on other inputs, the recording and eager give different values")


def _shuffled(value: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(value.numel(), generator=generator).to(value.device)
    shuffled = value.detach().flatten()[order].view(value.shape)
    return shuffled.requires_grad_(value.requires_grad)


def _results(
    function: Callable[..., Any], root: Wrapped, args: Any, kwargs: Any, seed: int
) -> list[Any]:
    """Run forward and backward; return outputs, buffers changed in place, and gradients."""
    inputs = [*root.parameters(), *args, *kwargs.values()]
    own = [tensor.grad for tensor in inputs]
    try:
        with _state_kept(root), _buffers_kept(root), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            leaves = pytree.tree_leaves(function(*args, **kwargs))
            buffers = [
                buffer.detach().clone()
                for name, buffer in root.model.named_buffers()
                if name not in root.assigned
            ]
            outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            differentiable = [output.abs().sum() for output in outputs if output.requires_grad]
            for tensor in inputs:
                tensor.grad = None
            if differentiable:
                sum(differentiable, torch.zeros(())).backward()
        gradients = [tensor.grad for tensor in inputs]
    finally:
        for tensor, gradient in zip(inputs, own, strict=True):
            tensor.grad = gradient
    flags = [output.requires_grad for output in outputs]
    plain = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    return [flags, plain, *outputs, *buffers, *gradients]


def _is_close(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return type(ours) is type(theirs) and ours == theirs
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not ours.is_floating_point() and not ours.is_complex():
        return bool((ours == theirs).all())
    bound = _CLOSE.get(ours.dtype, 1e-2)
    largest = theirs.detach().abs().nan_to_num(0, 0, 0).max().item() if theirs.numel() else 0
    return torch.allclose(ours, theirs, rtol=bound, atol=bound * largest, equal_nan=True)
