# pyright: basic
# torch's tracing API is private and only partly typed.
"""Record the torch calls of a model as a graph while its own Python runs.

If dynamo cannot follow a model's Python, Python runs it on fake tensors, under a mode that sees
each call of a torch function. Values that depend on no data are computed as ever; code that reads
a number out of data raises.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from shardweave.ir.capture.arguments import CONSTANTS
from shardweave.ir.capture.observed.constant_numbers import REAL, constant_value
from shardweave.ir.capture.observed.loose_tensors import CONSTANT, equal_constant
from shardweave.ir.torch_private import FakeTensor, FakeTensorMode, assign_attribute, pytree

_PLAIN = (
    *CONSTANTS, type(...), slice, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size,
)  # fmt: skip
"""Types of constants that the code of a graph may contain."""

_OPERATORS: dict[str, Any] = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}
_NUMBERS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__")
_REFUSED = ("requires_grad_", "backward", "__set__")
_VariableMeta: Any = type(torch.autograd.Variable)


class Unseen(Exception):
    """Raised if code does something that a recording cannot hold; the message says what."""


class CallRecorder(TorchFunctionMode):
    """Torch function mode that records torch calls in an fx graph and runs them on fake tensors."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        constants = root.named_buffers()
        self.constants = [b for name, b in constants if name.startswith(f"model.{CONSTANT}")]
        self.owned = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
        self.paths = {id(module): path for path, module in root.named_modules()}
        self.nodes: dict[int, fx.Node] = {}
        self.fakes: dict[int, Tensor] = {}
        self.kept: list[Any] = []
        self.stack: list[tuple[str, tuple[str, type]]] = []
        self.calls: dict[int, int] = {}
        self.is_inside = False

    def placeholder(self, name: str, value: Tensor) -> Tensor:
        fake = self.mode.from_tensor(value)
        self._keep(fake, self.graph.placeholder(name))
        return fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function on fake tensors and record the call, unless it only reads a plain
        value."""
        if self.is_inside:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_read = name == "__get__"
        if is_read:
            attribute, args = func.__self__.__name__, args[:1]
            func = torch.detach if attribute == "data" else _attribute(attribute)
        elif name in _REFUSED:
            raise Unseen(f"`{name}` is not recorded")
        leaves, tree = pytree.tree_flatten((args, kwargs))
        leaves = [leaf.item() if isinstance(leaf, np.generic) else leaf for leaf in leaves]
        self.is_inside = True
        try:
            fakes = [self._fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            if name in _NUMBERS and (value := constant_value(self.nodes[id(fakes[0])])) is not None:
                return func(value)
            fake_args, fake_kwargs = pytree.tree_unflatten(fakes, tree)
            with self.mode:
                result = func(*fake_args, **fake_kwargs)
        finally:
            self.is_inside = False
        if not is_read or isinstance(result, Tensor):
            self._write(func, fakes, tree, result)
        return result

    def _fake(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.nodes:
            return tensor
        if isinstance(tensor, FakeTensor) or type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise Unseen("the code makes a tensor in a way that recording does not see")
        if id(tensor) not in self.fakes:
            # Python makes some constants anew each time.
            constant = equal_constant(self.constants, tensor)
            tensor = tensor if constant is None else constant
        if id(tensor) not in self.fakes:
            name = f"tensor{len(self.fakes)}"
            assign_attribute(tensor, self.root, name)
            self.kept.append(tensor)
            fake = self.fakes[id(tensor)] = self.mode.from_tensor(tensor)
            node = self.graph.get_attr(name)
            node.meta |= {} if id(tensor) in self.owned else {REAL: tensor}
            self._keep(fake, node)
        return self.fakes[id(tensor)]

    def _keep(self, fake: Any, node: fx.Node) -> None:
        self.kept.append(fake)
        self.nodes[id(fake)] = node
        node.meta["example_value"] = fake

    def _write(self, func: Any, leaves: list[Any], tree: Any, result: Any) -> None:
        """Record a call, unless all its results are Python constants, or objects made of such."""
        results = pytree.tree_leaves(result)
        if result is not None and all(isinstance(value, _PLAIN) for value in results):
            return
        values = [self.nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        is_plain = all(isinstance(value, (fx.Node, *_PLAIN)) for value in values)
        is_of_tensors = any(isinstance(value, Tensor) for value in (*leaves, *results))
        if not is_of_tensors and (result is not None or not is_plain):
            return  # such as a range of torch.profiler, and its end
        if is_plain:
            args, kwargs = pytree.tree_unflatten(values, tree)
            kind, target = _target(func)
            node = self.graph.create_node(kind, target, tuple(args), kwargs)
        else:
            nodes = tuple(value for value in values if isinstance(value, fx.Node))
            node = self.graph.call_function(_with_objects(func, values, tree), nodes)
        node.meta["nn_module_stack"] = dict(self.stack)
        node.meta["stack_trace"] = _stack_trace()
        self._results(node, result)

    def _results(self, node: fx.Node, result: Any) -> None:
        node.meta["example_value"] = result
        if isinstance(result, Tensor):
            self._keep(result, node)
        elif isinstance(result, (tuple, list)):
            self.kept.append(result)
            for index, item in enumerate(result):
                if isinstance(item, (Tensor, tuple, list)):
                    part = self.graph.call_function(operator.getitem, (node, index))
                    part.meta.update(node.meta)
                    self._results(part, item)

    def output(self, returned: Any) -> Any:
        """End the recorded graph with the model's return value; return that value's pytree spec."""
        leaves, tree = pytree.tree_flatten(returned)
        fakes = [self._fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.graph.output(
            [self.nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in fakes]
        )
        return tree

    @contextlib.contextmanager
    def seeing_all(self) -> Iterator[None]:
        """Record modules, autograd functions and autocast too, which function modes do not see."""
        call_module = nn.Module.__call__

        def calling(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self._in_module(module):
                return call_module(module, *args, **kwargs)

        with (
            mock.patch.object(nn.Module, "__call__", calling),
            self._seeing_functions(),
            self._seeing_autocast(),
            self,
        ):
            yield

    @contextlib.contextmanager
    def _seeing_functions(self) -> Iterator[None]:
        """Record each torch.autograd.Function as one call with its own backward."""
        applied: Any = vars(torch.autograd.Function)["apply"]
        make_variable = _VariableMeta.__call__

        def applying(kind: Any, *args: Any, **kwargs: Any) -> Any:
            apply = applied.__get__(None, kind)
            if self.is_inside:
                return apply(*args, **kwargs)
            if kind is CheckpointFunction:
                return args[0](*args[2:])
            return self.call(_named(partial(apply), kind.__name__), args, kwargs)

        def making(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if self.is_inside or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
                return make_variable(kind, *args, **kwargs)
            return self.call(torch.detach, args, {})

        with (
            mock.patch.object(torch.autograd.Function, "apply", classmethod(applying)),
            mock.patch.object(_VariableMeta, "__call__", making),
        ):
            yield

    @contextlib.contextmanager
    def _seeing_autocast(self) -> Iterator[None]:
        enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
        nodes: list[fx.Node] = []

        def entering(context: Any) -> Any:
            if not self.is_inside:
                options = context.device, context.fast_dtype, context._enabled
                nodes.append(self.graph.call_function(enter_autocast, options))
            return enter(context)

        def leaving(context: Any, *error: Any) -> Any:
            if not self.is_inside:
                self.graph.call_function(leave_autocast, (nodes.pop(),))
            return leave(context, *error)

        with (
            mock.patch.object(torch.autocast, "__enter__", entering),
            mock.patch.object(torch.autocast, "__exit__", leaving),
        ):
            yield

    @contextlib.contextmanager
    def _in_module(self, module: nn.Module) -> Iterator[None]:
        path = self.paths.get(id(module))
        if path is None or self.is_inside:
            yield
            return
        count = self.calls[id(module)] = self.calls.get(id(module), -1) + 1
        self.stack.append((f"{path}@{count}" if count else path, (path, type(module))))
        try:
            yield
        finally:
            self.stack.pop()


def _target(func: Any) -> tuple[str, Any]:
    name, owner = getattr(func, "__name__", ""), getattr(func, "__qualname__", "").split(".")[0]
    if owner in ("TensorBase", "Tensor") and hasattr(Tensor, name):
        is_operator = name in _OPERATORS
        return ("call_function", _OPERATORS[name]) if is_operator else ("call_method", name)
    if owner == "_VariableFunctionsClass" and hasattr(torch, name):
        return "call_function", getattr(torch, name)
    module = sys.modules.get(getattr(func, "__module__", None) or "")
    is_torchs = module is not None and module.__name__.split(".")[0] == "torch"
    is_there = is_torchs and getattr(module, name, None) is func
    return "call_function", func if is_there else _named(func, name)


def _named(func: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    call.__name__ = call.__qualname__ = name if name.isidentifier() else "call"
    return call


def _with_objects(func: Any, values: list[Any], tree: Any) -> Callable[..., Any]:
    """Bind all arguments that are not tensors; return a function of the tensors alone."""
    places = [index for index, value in enumerate(values) if isinstance(value, fx.Node)]

    def call(*tensors: Any) -> Any:
        leaves = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        return func(*args, **kwargs)

    return _named(call, getattr(func, "__name__", ""))


def _attribute(name: str) -> Callable[[Tensor], Any]:
    return _named(operator.attrgetter(name), name)


def enter_autocast(device: str, dtype: torch.dtype, enabled: bool) -> Any:
    context = torch.autocast(device, dtype, enabled)
    context.__enter__()
    return context


def leave_autocast(context: Any) -> None:
    context.__exit__(None, None, None)


def _stack_trace() -> str:
    frame, lines = sys._getframe(3), []
    while frame is not None and len(lines) < 64:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n')
        frame = frame.f_back
    return "".join(reversed(lines))
