# pyright: basic
# torch's tracing API is private and only partly typed.
"""Torch's settings while it traces a model."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx

from shardweave.ir.capture.arguments import children_of
from shardweave.ir.capture.observed.constant_numbers import constant_numbers
from shardweave.ir.capture.observed.value_checks import without_value_checks
from shardweave.ir.capture.substitutes.written_out import written_out
from shardweave.ir.program.text import without_gc
from shardweave.ir.torch_private import (
    ExportOutput,
    FakeTensor,
    FakeTensorMode,
    UnknownVariable,
    configured,
    current_modes,
    disable_current_modes,
    functional_export,
    keep_tree_specs,
    marked_outputs_allowed,
    not_exporting,
    original_of,
    pytree,
    replaced,
    silent_logs,
    unordered,
)
from shardweave.ir.tracing import tracing


@contextlib.contextmanager
def exact_texts() -> Iterator[None]:
    """Patch dynamo, inside the context, so that exceptions have the text of eager Python. Where
    dynamo does not know the text, code that reads it raises CaptureError."""
    raise_, text_of = original_of("raised"), original_of("exception text")

    def raising(owner: Any, value: Any, *rest: Any, **options: Any) -> None:
        instruction = getattr(owner, "current_instruction", None)
        if instruction is not None:  # from torch 2.14 on, the translator raises
            is_raised_by_code = instruction.opname == "RAISE_VARARGS"
        else:
            is_raised_by_code = getattr(value, "python_stack", None) is not None
        if not is_raised_by_code and getattr(value, "exc_type", StopIteration) is not StopIteration:
            value.args[:] = map(_unread, value.args) if value.args else [_unread(None)]
        raise_(owner, value, *rest, **options)

    def exact_text_of(owner: Any, *rest: Any) -> Any:
        value = owner if hasattr(owner, "exc_type") else rest[-1]
        kind = getattr(value, "exc_type", None)
        if kind is not None and kind.__str__ is not BaseException.__str__:
            if value is not owner:
                return None
            value.args[:] = [_unread(None)]  # from torch 2.14 on, the exception makes its text
        return text_of(owner, *rest)

    def formatted(text: str, values: Any, named: Any) -> Any:
        if any(hasattr(value, "exc_type") for value in [*values, *named.values()]):
            UnknownVariable().python_type()  # dynamo refuses the line
        return format_(text, values, named)

    format_ = original_of("formatted text")
    news = {"raised": raising, "exception text": exact_text_of}
    with replaced(news | {"formatted text": staticmethod(formatted)}):
        yield


def _unread(argument: Any) -> Any:
    """Make a dynamo variable for an exception's argument: errors show it, no code can read it."""
    variable = UnknownVariable()
    variable.debug_repr = lambda: "" if argument is None else _shown(argument)
    return variable


def _shown(argument: Any) -> str:
    is_constant = argument.is_python_constant()
    return repr(argument.as_python_constant()) if is_constant else argument.debug_repr()


_WORDS = {print, warnings.warn, logging.debug, logging.info, logging.warning, logging.error}
"""Calls that print or log and compute nothing, which a program leaves out."""


def _fake_mode_of(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    modes = (tensor.fake_mode for tensor in model.parameters() if isinstance(tensor, FakeTensor))
    return next(modes, contextlib.nullcontext())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log of errors, since they are explained anyway, and warnings that do not
    matter: before torch 2.13 at a hook that forward registers, and at functions with an lru_cache,
    which are traced like other functions."""
    with silent_logs(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TF32 acceleration on top of oneDNN")
        warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
        warnings.filterwarnings("ignore", "Sparse .* support is in beta")  # refused with its line
        warnings.filterwarnings("ignore", "Dynamo does not know how to trace")  # refused, too
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        yield


@contextlib.contextmanager
def _outside_of_modes() -> Iterator[None]:
    """Hide the trace from the caller's dispatch modes, such as `sw.seeded` or a FLOP counter. A
    step compiles a program in the middle of a call. Modes of fake tensors stay active."""
    modes = current_modes()
    with contextlib.ExitStack() as stack:
        if not all(isinstance(mode, FakeTensorMode) for mode in modes):
            stack.enter_context(disable_current_modes())
            for mode in modes:
                if isinstance(mode, FakeTensorMode):
                    stack.enter_context(mode)
        yield


class _FlatRoot(torch.nn.Module):
    """Replaces torch's wrapper of the exported module. It does not search the arguments for
    tensors, which dynamo would trace too: a quarter of the time that a small model takes."""

    def __init__(self, root: Any, num_args: int, names: tuple[str, ...]) -> None:
        super().__init__()
        self._export_root = root
        self.num_args = num_args
        self.names = names

    def forward(self, *flat: Any) -> Any:
        named = dict(zip(self.names, flat[self.num_args :], strict=True))
        returned = self._export_root(*flat[: self.num_args], **named)
        return ExportOutput(*pytree.tree_flatten(returned))


def _root_of(root: Any, in_spec: Any) -> torch.nn.Module:
    """Replace `ModuleToTrace` by a module for arguments that are all tensors."""
    args, kwargs = children_of(in_spec)
    assert in_spec.num_leaves == len(children_of(args)) + len(children_of(kwargs))
    return _FlatRoot(root, len(children_of(args)), tuple(kwargs.context))


_recompile = fx.GraphModule.recompile


def _without_code(graph: fx.GraphModule) -> None:
    """Replace `recompile`, a tenth of the time of a capture: a graph gets its code when it is
    called, which most never are."""
    keep_tree_specs(graph)
    type(graph).forward = _run_with_code


def _run_with_code(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    _recompile(graph)
    return graph(*args, **kwargs)


@contextlib.contextmanager
def _forgetting() -> Iterator[None]:
    """Delete the compiled functions that torch adds to globals, which would keep the model's
    parameters alive."""
    roots = [vars(functional_export), globals()]
    before = [set(names) for names in roots]
    try:
        yield
    finally:
        for names, old in zip(roots, before, strict=True):
            for name in set(names) - old:
                if name.startswith("__compiled_fn"):
                    del names[name]


_REPLACED: dict[str, Any] = {
    # Code that asks is told that it is compiled, but not exported: a program has fixed shapes, so
    # that a model is to leave what it does for the sake of others (a mask for causal attention).
    "export state": lambda: replaced({"is compiling": True}),
    # Shapes are fixed: the guards that would be made to check dynamic ones, a quarter of the
    # time that a small GPT takes, guard nothing.
    "shape guards": mock.DEFAULT,
    # It would keep a copy of each parameter, which cannot be made inside torch.vmap.
    "cloned input": lambda value, _: value,
    # Dynamo parses each source file for a line of a log that nobody reads.
    "source lines": lambda frame, lineno=None: "",
    "exported root": _root_of,
    "triton ops": lambda: True,  # they stay ops
    # `flex_attention` is written out: it needs no GPU, nor head dims that its kernels take.
    "flex device": lambda *tensors: None,
    "flex width": lambda *tensors: None,
}
"""Replacements, during a trace, for parts of torch's tracing, by the part's name."""


@contextlib.contextmanager
def settings(model: torch.nn.Module, train: bool, grad: bool) -> Iterator[None]:
    """Configure torch to trace `model`, in evaluation mode unless `train`; restore it on exit.

    grad: whether gradients are enabled. The fake mode of fake parameters is entered. Recurrent
    layers are traced as basic ops.
    """
    was_training = {name: module.training for name, module in model.named_modules()}
    mha = torch.backends.mha
    with contextlib.ExitStack() as stack:
        for context in (
            _quiet(),
            _outside_of_modes(),
            without_gc(),
            tracing(),
            _forgetting(),
            replaced(_REPLACED),
            mock.patch.object(fx.GraphModule, "recompile", _without_code),
            # Dynamo writes the whole graph out to say why it cannot be stored.
            mock.patch.object(fx.GraphModule, "print_readable", return_value=""),
            # What is computed of a tensor that forward marks has no gradient by it outside; nobody
            # asks for the gradient of what a step returns.
            marked_outputs_allowed(),
            not_exporting(),
            configured(allow_rnn=True, trace_autograd_ops=True, ignore_logging_functions=_WORDS),
            # A graph does not order the assertions of linear algebra (that no matrix is singular).
            unordered("aten::_linalg_check_errors"),
            written_out(),
            without_value_checks(),
            constant_numbers(model),
            exact_texts(),
            # The kernel of a float32 nn.LSTM on the CPU is one op that nothing could cut.
            torch.backends.mkldnn.flags(enabled=False),
            _fake_mode_of(model),
            # Whatever the caller is in: a step compiles programs in the middle of calls.
            torch.inference_mode(mode=False),
        ):
            stack.enter_context(context)
        # Encoders and attention in evaluation have kernels for inference that nothing could cut.
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        stack.enter_context(torch.set_grad_enabled(grad))
        if not train:
            model.eval()
        try:
            yield
        finally:
            for name, module in model.named_modules():
                module.training = was_training[name]
