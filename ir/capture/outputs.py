# pyright: basic
"""The outputs of a model: choosing the loss, and rebuilding the structure of the rest."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.ir.capture.arguments import CONSTANTS, Form, entry
from shardweave.ir.capture.site import CaptureError, Site
from shardweave.ir.torch_private import pytree

LossChoice = str | int | Callable[[Any], Tensor] | None
"""Key or index of the loss in the model's output, or a function of it; None: see `loss_of`."""

LOSS = "loss"
"""The name of the output that is the loss, in a program that returns all outputs."""

NO_LOSS = (
    "the model's output has no scalar loss; return the loss, a tuple that begins with it, or an "
    "object or dict with 'loss'. Where a criterion computes it outside of the model, write a "
    "module whose forward takes inputs and labels, calls both, and returns the loss."
)
_MANY_SCALARS = (
    "the model returns several scalars and no 'loss' among them; say which it is: loss='name' or "
    "loss=index of what forward returns, or a function of it."
)
_NO_OUTPUT = (
    "the model's output has neither 'loss' nor 'logits'; return a tensor, a tuple of tensors, or "
    "an object or dict with one of these."
)


@dataclass(frozen=True)
class OutputLeaf:
    """A tensor in the model's return value, by output name. is_differentiable: whether it requires
    a gradient in eager PyTorch; leaves `x` and `x.detach()` share a name and differ in this
    flag."""

    name: str
    is_differentiable: bool = False


@dataclass(frozen=True)
class Outputs:
    """The structure of a model's return value, with an `OutputLeaf` in place of each tensor.

    kinds: its dataclasses; the template has a dict for each, marked by the index in `kinds`.
    """

    template: Any
    kinds: tuple[type, ...] = ()

    @cached_property
    def leaves(self) -> list[OutputLeaf]:
        """The tensors, in the order of the template."""
        leaves = pytree.tree_leaves(self.template)
        return [leaf for leaf in leaves if isinstance(leaf, OutputLeaf)]

    @property
    def names(self) -> list[str]:
        return [leaf.name for leaf in self.leaves]

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Names of the output tensors that require gradients in eager PyTorch."""
        return frozenset(leaf.name for leaf in self.leaves if leaf.is_differentiable)

    def build(self, values: Mapping[str, Any]) -> Any:
        """Rebuild the model's return value. values: a tensor for each output name."""
        if isinstance(self.template, OutputLeaf):
            return _value_of(self.template, values)
        leaves, tree = pytree.tree_flatten(self.template)
        leaves = [_value_of(leaf, values) for leaf in leaves]
        built = pytree.tree_unflatten(leaves, tree)
        return self._with_dataclasses(built) if self.kinds else built

    def _with_dataclasses(self, built: Any) -> Any:
        if type(built) in (list, tuple):
            return type(built)(map(self._with_dataclasses, built))
        if type(built) is not dict:
            return built
        values = {key: self._with_dataclasses(value) for key, value in built.items()}
        number = str(next(iter(values), "")).removeprefix(_KIND)
        if f"{_KIND}{number}" not in values:
            return values
        del values[f"{_KIND}{number}"]
        return self.kinds[int(number)](**values)


def _value_of(leaf: Any, values: Mapping[str, Any]) -> Any:
    """Return the value of a template's leaf: `values` has tensors; other leaves are constants."""
    if not isinstance(leaf, OutputLeaf):
        return leaf
    value = values[leaf.name]
    if isinstance(value, Tensor) and value.requires_grad and not leaf.is_differentiable:
        return value.detach()
    return value


@dataclass(frozen=True)
class Kind:
    """Options of a trace.

    train: False puts the model in evaluation mode, True leaves its modules' modes as they are.
    grad: whether to trace the backward pass; None: as `train`. loss: which output is the loss.
    all_outputs: return all outputs, not the loss (or logits) alone. only_loss: with gradients,
    return the loss alone all the same. autocast: device type and dtype of torch.autocast around
    forward. tangents: positions of the output tensors whose gradients are inputs of the backward
    pass, in place of the loss. Empty: the backward pass starts from the loss, or without one from
    gradients of all differentiable outputs. None: it starts from the loss, which must exist.
    """

    train: bool = True
    grad: bool | None = None
    loss: LossChoice = None
    all_outputs: bool = False
    only_loss: bool = False
    autocast: tuple[str, torch.dtype] | None = None
    tangents: tuple[int, ...] | None = None

    @property
    def has_gradients(self) -> bool:
        return self.train if self.grad is None else self.grad


class Wrapped(nn.Module):
    """Calls the model and returns the outputs of the step.

    A step with gradients returns its loss first, unless the gradients of outputs are inputs of the
    step (`tangents` in `Kind`). If `all_outputs`, the model's own return value follows (a step with
    gradients and `only_loss` returns the loss once more instead). Without `all_outputs` the loss
    alone is returned, or the logits of a model without a loss. The new values of the buffers that
    forward assigns come last.
    """

    def __init__(self, model: nn.Module, kind: Kind, form: Form | None = None) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.choice = kind.loss
        self.form = form
        self.assigned: dict[str, Site] = {}
        """Buffers that forward assigns, and where; their new values follow the output."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.form is not None:
            args, kwargs = self.form.arguments(args)
        if self.kind.autocast is None:
            output = self.model(*args, **kwargs)
        else:
            device, dtype = self.kind.autocast
            with torch.autocast(device, dtype):
                output = self.model(*args, **kwargs)
        returned = self._everything(output) if self.kind.all_outputs else (self._output(output),)
        return (*returned, *(_new_value(self.model, name) for name in self.assigned))

    def _everything(self, output: Any) -> tuple[Any, ...]:
        output = tree_of(output)
        loss = None
        if callable(self.choice):
            loss = self.choice(output)
            output = (loss, output)
        elif self.kind.has_gradients and not self.kind.tangents:
            loss = chosen_loss(output, self.choice, is_needed=self.kind.tangents is None)
        if self.kind.tangents is not None and isinstance(loss, Tensor) and not loss.requires_grad:
            loss = None  # a metric, say: gradients may arrive for other outputs
        if not self.kind.has_gradients:
            return (output,)
        if self.kind.tangents or (loss is None and self.kind.tangents is not None):
            return (self._cut(output),)
        if loss is None:
            raise ValueError(NO_LOSS)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"the loss is a {type(loss).__name__}; return a tensor, computed from the model's "
                "outputs."
            )
        if loss.ndim:
            raise ValueError(
                f"the loss has shape {tuple(loss.shape)}; reduce it to a scalar (.mean())."
            )
        returned = loss if self.kind.only_loss else output
        leaves = [leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, Tensor)]
        _note_differentiable(tuple([leaf.requires_grad for leaf in leaves]))
        return loss, pytree.tree_map_only(Tensor, _detached, returned)

    def _cut(self, output: Any) -> Any:
        """Detach the output's tensors from autograd, except those whose gradients are inputs."""
        leaves, tree = pytree.tree_flatten(output)
        flags: list[bool] = []
        kept: list[Any] = []
        known: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                is_new = all(leaf is not other for other in known)
                is_chosen = not self.kind.tangents or len(flags) in self.kind.tangents
                flags.append(leaf.requires_grad)
                known.append(leaf)
                is_leaf = leaf.requires_grad and is_new and is_chosen
                leaf = leaf.clone() if is_leaf else leaf.detach()
            kept.append(leaf)
        _note_differentiable(tuple(flags))
        _note_cut()
        return pytree.tree_unflatten(kept, tree)

    def _output(self, output: Any) -> Any:
        loss = chosen_loss(output, self.choice)
        if loss is not None:
            return loss
        if self.kind.has_gradients:
            raise ValueError(NO_LOSS)
        if isinstance(output, (Tensor, tuple, list)):
            return output
        logits = output.get("logits") if isinstance(output, dict) else output.logits
        if logits is None:
            raise ValueError(_NO_OUTPUT)
        return logits


def chosen_loss(output: Any, choice: LossChoice, *, is_needed: bool = True) -> Tensor | None:
    """Return the loss in a model's output. choice: its key or index, or a function of the output;
    None to find it by `loss_of`."""
    if choice is None:
        return loss_of(output, is_needed=is_needed)
    if callable(choice):
        return choice(output)
    if isinstance(choice, str) and not isinstance(output, dict):
        loss = getattr(output, choice) if hasattr(output, choice) else None
    else:
        try:
            loss = output[choice]
        except (IndexError, KeyError, TypeError):
            loss = None
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"loss={choice!r} names no tensor among the outputs of forward, which returns "
            f"{_described(output)}; give the index or name of the loss, or a function of what "
            "forward returns."
        )
    return loss


def _described(output: Any) -> str:
    """Describe a model's output by the parts that `loss=` can choose."""
    if isinstance(output, Tensor):
        return "a tensor"
    if isinstance(output, (tuple, list)):
        return f"{type(output).__name__} of {len(output)}"
    names = list(output) if isinstance(output, dict) else list(vars(output))
    return f"{type(output).__name__} with {', '.join(map(str, names))}"


def loss_of(output: Any, *, is_needed: bool = True) -> Tensor | None:
    """Find the scalar loss in a model's output: the output itself, its `loss`, its first item, or
    its only scalar; None if there is none. Several scalars raise ValueError, or return None unless
    `is_needed`."""
    if isinstance(output, Tensor):
        return output if output.ndim == 0 else None
    loss = None
    if isinstance(output, (tuple, list)):
        loss = loss_of(output[0]) if output else None
    elif isinstance(output, dict):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    scalars = [
        leaf
        for leaf in pytree.tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point()
    ]
    if len(scalars) > 1 and is_needed:
        raise ValueError(_MANY_SCALARS)
    if len(scalars) > 1:
        return None
    return scalars[0] if scalars else None


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def tree_of(output: Any) -> Any:
    """Replace each dataclass in a model's output by a dict, as torch does not take those apart."""
    if type(output) is tuple:
        return tuple([tree_of(item) for item in output])
    if type(output) is list:
        return [tree_of(item) for item in output]
    if type(output) is dict:
        return {key: tree_of(item) for key, item in output.items()}
    if isinstance(output, (Tensor, tuple, list, dict, *CONSTANTS)):
        return output
    kind, names = _dataclass(type(output))
    fields = {name: tree_of(getattr(output, name)) for name in names}
    return {kind: True, **fields} if kind else output


_KIND = "__dataclass__"
"""Prefix of the first key of a dict that replaces a dataclass; the index in `_KINDS` follows."""

_KINDS: list[type] = []
"""The dataclasses in the return value of the model that is being traced."""

_CUT: list[bool] = []
"""Has an entry if the gradients of the model's outputs are inputs of the backward pass."""

_DIFFERENTIABLE: list[bool] = []
"""For each tensor that a step with gradients returns: whether it requires gradients."""


@contextlib.contextmanager
def noting_outputs() -> Iterator[None]:
    """Collect facts about outputs that the traced graph lacks, for a trace in the context."""
    noted: tuple[list[Any], ...] = (_KINDS, _DIFFERENTIABLE, _CUT)
    for notes in noted:
        notes.clear()
    try:
        yield
    finally:
        for notes in noted:
            notes.clear()


def are_cut() -> bool:
    """True if the backward pass takes the gradients of outputs as inputs: it has no loss."""
    return bool(_CUT)


@torch.compiler.assume_constant_result
def _note_cut() -> None:
    _CUT[:] = [True]


@torch.compiler.assume_constant_result
def _note_differentiable(flags: tuple[bool, ...]) -> None:
    _DIFFERENTIABLE[:] = flags


@torch.compiler.assume_constant_result
def _dataclass(kind: type) -> tuple[str, tuple[str, ...]]:
    """Register a dataclass; return its dict's first key and its fields (empty: no dataclass)."""
    if not dataclasses.is_dataclass(kind):
        return "", ()
    if kind not in _KINDS:
        _KINDS.append(kind)
    return f"{_KIND}{_KINDS.index(kind)}", tuple(field.name for field in dataclasses.fields(kind))


def _new_value(model: nn.Module, name: str) -> Tensor:
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    if value.requires_grad:
        raise ValueError(f"{_KEEPS_GRAPH}: '{name}'.")
    # A copy, since the value may be another buffer.
    return value.clone()


_KEEPS_GRAPH = (
    "forward assigns a buffer that depends on parameters, so that the next step's backward pass "
    "would reach into this one; detach() what is assigned"
)


def outputs_of(tree: Any, nodes: Sequence[Any], loss: Any) -> tuple[Outputs, list[str]]:
    """Return the structure of the outputs, and for each leaf an output name ('' for a constant).

    tree: torch's tree spec of the outputs. nodes: its leaves in the traced graph. loss: the node of
    the loss, if any. Raises CaptureError for a leaf that is neither tensor, number nor string.
    """
    names: dict[Any, str] = {} if loss is None else {loss: LOSS}
    output_names: list[str] = []
    leaves: list[Any] = []
    is_differentiable = iter(_DIFFERENTIABLE)
    for path, node in zip(_paths(tree), nodes, strict=True):
        if not isinstance(node, torch.fx.Node):
            if not isinstance(node, CONSTANTS):
                raise CaptureError(
                    f"the model returns a {type(node).__name__} as '{path}'; return tensors, "
                    "numbers and strings, in lists, tuples, dicts or dataclasses."
                )
            output_names.append("")
            leaves.append(node)
            continue
        source: Any = node
        while source.op == "call_function" and _is_same(source.target):
            source = source.args[0]
        if source not in names:
            names[source] = _free(path or "output", names.values())
        output_names.append(names[source])
        leaves.append(OutputLeaf(names[source], next(is_differentiable, False)))
    return Outputs(pytree.tree_unflatten(leaves, tree), tuple(_KINDS)), output_names


def _is_same(target: Any) -> bool:
    return str(target) in ("aten.detach.default", "aten.alias.default")


def _paths(tree: Any) -> list[str]:
    dummy = pytree.tree_unflatten(list(range(tree.num_leaves)), tree)
    return [".".join(map(entry, path)) for path, _ in pytree.tree_flatten_with_path(dummy)[0]]


def _free(word: str, taken: Any) -> str:
    name, count = word, 1
    while name in taken:
        count += 1
        name = f"{word}_{count}"
    return name
