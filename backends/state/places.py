"""Places of a model's tensors: the dicts of its modules that hold parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class TensorPlace(NamedTuple):
    """A parameter or buffer, called `path` in the model, which a module holds as `held[name]`.

    kind: "param" or "buffer".
    """

    kind: str
    path: str
    module: nn.Module
    held: dict[str, Any]
    name: str
    tensor: Tensor


def places_of(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[TensorPlace]:
    """Yield the places of a model's tensors, in order of its modules; a tied tensor has several.

    remove_duplicate: whether a module that has several names yields its first one alone.
    """
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        dot = f"{path}." if path else ""
        for kind, held in (("param", module._parameters), ("buffer", module._buffers)):
            for name, tensor in held.items():
                if tensor is not None:
                    yield TensorPlace(kind, dot + name, module, held, name, tensor)


@contextmanager
def in_modes(
    modules: Sequence[nn.Module],
    modes: Sequence[bool],
    parameters: Sequence[Tensor] = (),
    trained: Sequence[bool] = (),
) -> Iterator[None]:
    """Context with these training modes of modules, and `requires_grad` flags of parameters."""
    own = [module.training for module in modules], [p.requires_grad for p in parameters]
    try:
        _set_modes(modules, modes, parameters, trained)
        yield
    finally:
        _set_modes(modules, own[0], parameters, own[1])


def _set_modes(
    modules: Sequence[nn.Module],
    modes: Sequence[bool],
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode
    for parameter, is_trained in zip(parameters, trained, strict=True):
        if parameter.requires_grad != is_trained:
            parameter.requires_grad_(is_trained)


@contextmanager
def with_tensors(places: Iterable[TensorPlace], new: Mapping[int, Tensor]) -> Iterator[None]:
    """Context in which other tensors replace the model's. new: by the id of the replaced one."""
    chosen = [place for place in places if id(place.tensor) in new]
    try:
        for place in chosen:
            place.held[place.name] = new[id(place.tensor)]
        yield
    finally:
        for place in chosen:
            place.held[place.name] = place.tensor
