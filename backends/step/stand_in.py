"""What stands for the modules of a model in a step: without their code, with their settings."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self
from weakref import ReferenceType

import torch
from torch import Tensor, nn

_NONE = property()

_RESETS = ("reset_parameters", "reset_running_stats")
"""Methods of torch's layers that write into their tensors."""


class StandIn(nn.Module):
    """A module that stands for one of the model: what that has as plain attributes, such as a
    dropout's probability, is read and set there, where programs are captured."""

    _origin: ReferenceType[nn.Module] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not self._is_of_origin(name):
                raise
        if name in _RESETS:  # no AttributeError: loops over modules ask whether there is one
            raise ValueError(
                f"{name}() would reset the model's tensors, not the step's; call it on the model "
                "before that is compiled, or write into step.named_parameters()."
            )
        assert self._origin is not None
        value = getattr(self._origin(), name)
        if callable(value) or isinstance(value, Tensor):
            raise AttributeError(
                f"'{name}' of the model is code or a tensor, which a step does not have: it would "
                "be that of the weights before sw.compile. Keep the model under a name of its own, "
                "and use it there, with step.full_state_dict() loaded if weights matter."
            )
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in vars(self) and not hasattr(type(self), name) and self._is_of_origin(name):
            assert self._origin is not None
            setattr(self._origin(), name, value)
        else:
            super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A module with modules, parameters and buffers of its own."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a step holds the programs and groups of this process, so that neither it nor a module "
            "of it is pickled; save the step by sw.save_checkpoint, or its "
            "step.full_state_dict(), a module by its state_dict(), and copy by copy.deepcopy."
        )

    def _is_of_origin(self, name: str) -> bool:
        """Whether the model's module has an attribute that is no module, parameter or buffer."""
        origin = None if self._origin is None else self._origin()
        if origin is None or name.startswith("__"):
            return False
        if any(name in held for held in (origin._modules, origin._parameters, origin._buffers)):
            return False
        # Not properties: they may be computed of the model's own weights.
        return not isinstance(inspect.getattr_static(origin, name, _NONE), property)


class Mirrored(StandIn):
    """A module of the model without its code: its mode, and the step's parameters and buffers.

    It is an instance of the class of the model's, as loops ask that put all norms in evaluation
    mode, or give them no weight decay.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        StandIn.__init__(self)  # super() would read __class__
        self._kind = kind

    @property
    def __class__(self) -> Any:
        return self._kind

    @__class__.setter
    def __class__(self, kind: Any) -> NoReturn:
        raise ValueError(
            f"a module of a step stands for one of the model and becomes no {kind.__name__}, as "
            "parametrizations make it; change the model, and compile it anew."
        )

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise ValueError(
            "a step runs programs of the whole model, not its modules; call the step, or the "
            "module of the model itself."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        del recurse
        require_unchanged(self, fn)
        return self

    def _no_hooks(self, *args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise ValueError(
            "a step runs programs, so that a hook of its modules would never be called; register "
            "it on the model before it is compiled."
        )

    register_backward_hook = _no_hooks
    register_forward_hook = _no_hooks
    register_forward_pre_hook = _no_hooks
    register_full_backward_hook = _no_hooks
    register_full_backward_pre_hook = _no_hooks


class MirroredContainer(Mirrored):
    """A list or dict of modules or parameters, which gives those of the step."""

    def __getitem__(self, key: Any) -> Any:
        held = self._held()
        if issubclass(self._kind, _DICTS):
            return held[key]
        found = list(held.values())[key]
        return nn.ModuleList(found) if isinstance(key, slice) and self._modules else found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._held() if issubclass(self._kind, _DICTS) else self._held().values())

    def __len__(self) -> int:
        return len(self._held())

    def _held(self) -> dict[str, Any]:
        return {**self._modules, **self._parameters}


_DICTS = (nn.ModuleDict, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ParameterList, *_DICTS)


def mirrored(module: nn.Module) -> Mirrored:
    """What stands for a module of a model."""
    kind = type(module)
    return MirroredContainer(kind) if issubclass(kind, _CONTAINERS) else Mirrored(kind)


_CONVERT = "Convert the model before sw.compile, or compile with precision= or device=."


def require_unchanged(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise TypeError if what `.to`, `.half` or `.cuda` do would change a tensor's dtype or device:
    programs have those that the model had."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        dtype, device = tensor.dtype, tensor.device
        try:
            changed = fn(torch.empty(0, dtype=dtype, device=device))
        except (AssertionError, RuntimeError) as error:  # torch's, of a device that is not there
            raise TypeError(f"'{name}' stays on {device} ({error}). {_CONVERT}") from error
        for before, after in ((dtype, changed.dtype), (device, changed.device)):
            if before != after:
                raise TypeError(
                    f"'{name}' is {before} in the programs of the step and cannot become {after}. "
                    f"{_CONVERT}"
                )
