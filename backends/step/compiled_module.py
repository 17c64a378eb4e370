"""The class of a compiled model, a subclass of the model's own whose calls run programs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardweave.backends.state.mesh_tensor import copy_of_tensor
from shardweave.backends.state.places import places_of, with_tensors
from shardweave.backends.state.state import STEP, ShardedState, state_of
from shardweave.backends.state.whole_state import is_first, whole_state_dicts
from shardweave.ir.capture.observed.loose_tensors import kept_constants
from shardweave.ir.library.philox import STATE

_SAID_OTHERWISE = {
    "module": "it is the model itself, with its own names, parameters and state_dict",
    "set_requires_gradient_sync": "call the model under model.no_sync(), or with accumulate=",
    "clip_grad_norm_": "call torch.nn.utils.clip_grad_norm_(model.parameters(), ..)",
}
"""Replacements for attributes that DistributedDataParallel or FSDP give a model."""

_CONVERT = "Convert the model before sw.compile, or compile with precision= or device=."


class CompiledModule(nn.Module):
    """A model that `sw.compile` has sharded in place.

    It is the same object, with its own modules, names, hooks and settings; on a mesh of several
    devices its parameters and buffers are DTensors. A call runs compiled programs, see `Step`. The
    model also has the public methods and properties of its `Step`; an attribute of the model hides
    one of the same name, which `Step.of(model)` still has.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return state_of(self)(*args, **kwargs)  # pyright: ignore[reportCallIssue, reportOptionalCall]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            step = None if name.startswith("_") else vars(self).get(STEP)
            if step is not None and hasattr(type(step), name):
                return getattr(step, name)
            if step is not None and name in _SAID_OTHERWISE:
                raise AttributeError(
                    f"a compiled model has no '{name}': {_SAID_OTHERWISE[name]}."
                ) from None
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        del recurse
        _require_unchanged(self, fn)
        return self

    def share_memory(self) -> NoReturn:
        """Refused: processes train together as ranks of a mesh. Raises ValueError."""
        raise ValueError(
            "the tensors of a compiled model cannot be shared with other processes; to train in "
            "several processes, give a mesh such as data=2."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the model and its tensors; the copy runs the same programs.
        `torch.optim.swa_utils.AveragedModel(model)` relies on it."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        # Torch's own copy of a DTensor's gradient fails where that is a view of a message.
        memo |= {
            id(t): copy_of_tensor(t) for t in vars(self)[STEP].stored.values() if id(t) not in memo
        }
        own = {name: value for name, value in vars(self).items() if name != STEP}
        vars(new).update(copy.deepcopy(own, memo))
        vars(new)[STEP] = vars(self)[STEP].copied(new, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a compiled model cannot be pickled, as it holds programs and process groups of this "
            "process; save it by sw.save_checkpoint or its model.full_state_dict(), and copy it "
            "by copy.deepcopy."
        )


def make_compiled(model: nn.Module, state: ShardedState) -> None:
    """Change a model's class in place, so that its calls run the programs of `state`, a `Step`."""
    vars(model)[STEP] = state
    model.__class__ = _class_of(type(model))


@functools.cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Derive the class of compiled models from the model's class, as FSDP2 does."""

    @functools.wraps(kind.forward)
    def forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        # As written, where it is captured: a `forward` that was set on the model calls this one.
        return (
            kind.forward(self, *args, **kwargs) if state_of(self) is None else self(*args, **kwargs)
        )

    names = ("__module__", "__doc__", "__qualname__")
    own = {"forward": forward, **{name: getattr(kind, name) for name in names}}
    save = getattr(kind, "save_pretrained", None)
    if save is not None:
        own["save_pretrained"] = _saving_whole_tensors(save)
    return type(kind.__name__, (CompiledModule, kind), own)


def _saving_whole_tensors(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Hugging Face's `save_pretrained`, so that rank 0 writes whole tensors. All ranks call
    it; rank 0 may call it alone if no tensor is sharded. Afterwards the model's config is as it was
    before."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def save_pretrained(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        if "is_main_process" in signature.parameters:
            is_main = given.arguments.get("is_main_process", True)
            given.arguments["is_main_process"] = is_main and is_first()
        config = getattr(self, "config", None)
        settings = dict(getattr(config, "__dict__", {}))
        with whole_state_dicts([self]):
            saved = save(*given.args, **given.kwargs)
        if settings:
            vars(config).clear()
            vars(config).update(settings)
        return saved

    return save_pretrained


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Context in which a compiled model has its original class, and no step."""
    kind, step = type(model), vars(model).pop(STEP, None)
    try:
        if step is not None:
            model.__class__ = kind.__mro__[2]
        yield
    finally:
        if step is not None:
            model.__class__ = kind
            vars(model)[STEP] = step


@contextmanager
def as_plain(model: nn.Module, *, with_hooks: bool) -> Generator[None]:
    """Context in which a model can be captured: it has its original class and plain tensors.

    Empty tensors of the global shape replace sharded ones; on a CPU they take no memory until they
    are written. with_hooks: keep the gradient hooks of parameters, for the program to run;
    otherwise autograd runs them.
    """
    plain = {
        id(module._buffers[name]): constant
        for module in model.modules()
        for name, constant in kept_constants(module).items()
    }
    places = [
        place
        for place in places_of(model)
        if isinstance(place.tensor, DTensor) or (place.tensor._backward_hooks and not with_hooks)
    ]
    for place in places:
        if id(place.tensor) not in plain:
            plain[id(place.tensor)] = _plain(place.tensor, with_hooks=with_hooks)
    state = model._buffers.pop(STATE, None) if state_of(model) is not None else None
    try:
        with with_tensors(places, plain), as_written(model):
            yield
    finally:
        if state is not None:
            model._buffers[STATE] = state


def _plain(tensor: Tensor, *, with_hooks: bool) -> Tensor:
    made = tensor.detach()
    if isinstance(tensor, DTensor):
        made = tensor.to_local().detach()
        if made.shape != tensor.shape or not all(p.is_replicate() for p in tensor.placements):
            made = torch.empty(tensor.shape, dtype=tensor.dtype, device=made.device)
    if not isinstance(tensor, nn.Parameter):
        return made
    made = nn.Parameter(made, tensor.requires_grad)
    vars(made).update(vars(tensor))
    for hook in (tensor._backward_hooks or {}).values() if with_hooks else ():
        made.register_hook(hook)
    return made


def _require_unchanged(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raises TypeError if `.to`, `.half` or `.cuda` would change the dtype or device of a tensor:
    programs are compiled for them."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        dtype, device = tensor.dtype, tensor.device
        try:
            changed = fn(torch.empty(0, dtype=dtype, device=device))
        except (AssertionError, RuntimeError) as error:  # torch's, for a device that is not there
            raise TypeError(f"'{name}' stays on {device} ({error}). {_CONVERT}") from error
        for before, after in ((dtype, changed.dtype), (device, changed.device)):
            if before != after:
                raise TypeError(
                    f"'{name}' is {before} in the compiled programs and cannot become {after}. "
                    f"{_CONVERT}"
                )
