"""Results that own their memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor

_Key = TypeVar("_Key", bound=Hashable)


def owned(results: Mapping[_Key, Tensor], held: Iterable[Tensor]) -> dict[_Key, Tensor]:
    """The results, each contiguous and in memory that no other one nor any of `held` shares.

    A program may return a value twice, or a view of an argument; but gradients and buffers
    are changed in place. What shares memory is copied; disjoint parts of one buffer are not.
    """
    found = {key: tensor.contiguous() for key, tensor in results.items()}
    held_storages = {tensor.untyped_storage().data_ptr() for tensor in held if tensor.numel()}
    end = 0
    filled = [key for key in found if found[key].numel()]
    for key in sorted(filled, key=lambda key: found[key].data_ptr()):
        tensor = found[key]
        is_held = tensor.untyped_storage().data_ptr() in held_storages
        if is_held or tensor.data_ptr() < end:
            found[key] = tensor.clone()
        if not is_held:
            end = max(end, tensor.data_ptr() + tensor.nbytes)
    return found
