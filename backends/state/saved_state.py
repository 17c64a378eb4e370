"""Contents of a checkpoint of a training run: sharded tensors and a tree of plain values.

Tensors have the key `entry/name` or, in an optimizer, `entry/parameter/name`. Optimizer state is
saved under the names of parameters, so that it can be loaded on another mesh.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from shardweave.backends.optimizers.host_states import send_away
from shardweave.backends.state.checkpoint import checkpointable
from shardweave.backends.state.state import state_of
from shardweave.backends.watch.watch import first_line
from shardweave.ir.library.philox import STATE
from shardweave.ir.torch_private import pytree


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be saved or read, or does not fit the state to load it into."""


class Part(NamedTuple):
    """A saved tensor: its path within its entry's nested state, and its key in the checkpoint."""

    path: tuple[Any, ...]
    key: str


@dataclass(frozen=True)
class SavedState:
    """A state in two parts. tensors: by key. values: by entry, the nested state without these
    tensors; parts: by entry, the path and key of each tensor."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    parts: dict[str, list[Part]]

    def index(self) -> bytes:
        """Serialize values and parts with torch.save. Raises CheckpointError for values that
        torch.load(weights_only=True) would not load."""
        parts = {entry: [tuple(part) for part in parts] for entry, parts in self.parts.items()}
        for entry, value in self.values.items():
            _packed(f"entry '{entry}' of the state", value)
        return _packed("the state", {"values": self.values, "parts": parts})


def take_apart(state: Mapping[str, Any]) -> SavedState:
    """Split a state into tensors and values. Each entry is a module, optimizer, object with
    `state_dict`, or plain value."""
    saved = SavedState({}, {}, {})
    for entry, content in state.items():
        if not isinstance(entry, str) or not entry or "/" in entry:
            raise CheckpointError(f"a state has an entry {entry!r}; name it by text without '/'.")
        tree, parts = _taken_apart(entry, content, state)
        saved.values[entry], saved.parts[entry] = tree, [Part(p, _key(entry, p)) for p, _ in parts]
        for part, (_, tensor) in zip(saved.parts[entry], parts, strict=True):
            if part.key in saved.tensors:
                raise CheckpointError(f"the state has two tensors named '{part.key}'; rename one.")
            saved.tensors[part.key] = checkpointable(tensor.detach())
    return saved


_Parts = list[tuple[tuple[Any, ...], Tensor]]


def _taken_apart(entry: str, content: Any, state: Mapping[str, Any]) -> tuple[Any, _Parts]:
    """Split an entry into the tree without the tensors saved by key, and these tensors by path."""
    if isinstance(content, nn.Module):
        own = content.state_dict()
        tensors = [((name,), x) for name, x in own.items() if isinstance(x, Tensor)]
        return {name: x for name, x in own.items() if not isinstance(x, Tensor)}, tensors
    if isinstance(content, Optimizer):
        return _optimizer_apart(content, _names(entry, content, state))
    value = content.state_dict() if is_stateful(content) else content
    # NumPy's scalars are numbers; torch.load would not take them for data.
    value = pytree.tree_map_only(np.generic, lambda number: number.item(), value)
    if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
        raise CheckpointError(
            f"entry '{entry}' of the state is a {type(content).__name__} that holds sharded "
            "tensors, which can only be saved as part of a module or an optimizer; make the "
            "tensors buffers of a module."
        )
    return value, []


def is_stateful(content: Any) -> bool:
    """True if an object has `state_dict` and `load_state_dict`, as schedulers do."""
    names = ("state_dict", "load_state_dict")
    has_both = all(callable(getattr(content, name, None)) for name in names)
    return has_both and not isinstance(content, type)


def _key(entry: str, path: tuple[Any, ...]) -> str:
    return "/".join([entry, *map(str, path)])


def _packed(what: str, value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:  # pickle raises whatever the objects do
        raise CheckpointError(
            f"{what} cannot be saved: {first_line(error)}. Save numbers, text and tensors, in "
            "lists, tuples and dicts."
        ) from error
    return buffer.getvalue()


# Optimizers


def _names(entry: str, optimizer: Optimizer, state: Mapping[str, Any]) -> list[list[str]]:
    """Return the names of an optimizer's parameters by group, from the modules of the state."""
    modules = {name: module for name, module in state.items() if isinstance(module, nn.Module)}
    known: dict[int, str] = {}
    for owner, module in modules.items():
        prefix = f"{owner}." if len(modules) > 1 else ""
        for name, parameter in module.named_parameters():
            known.setdefault(id(parameter), prefix + name)
    groups = [[known.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
    if not all(all(group) for group in groups):
        raise CheckpointError(
            f"optimizer '{entry}' updates a parameter that belongs to no module in the saved "
            "state; add the compiled step of that module to the state."
        )
    return groups


def _optimizer_apart(optimizer: Optimizer, names: list[list[str]]) -> tuple[Any, _Parts]:
    flat = [name for group in names for name in group]
    parameters = _parameters(optimizer)
    own = optimizer.state_dict()
    groups = [
        {**group, "params": named} for group, named in zip(own["param_groups"], names, strict=True)
    ]
    values: dict[str, dict[str, Any]] = {}
    tensors: _Parts = []
    for index, entries in own["state"].items():
        if not isinstance(index, int):  # torch lets optimizers keep more under other keys
            raise CheckpointError(f"the optimizer has state for {index!r}, which is no parameter.")

        def apart(path: tuple[Any, ...], x: Any, name: str = flat[index], at: int = index) -> Any:
            """Return None for a tensor that is saved by key."""
            if not _is_saved_in_shards(path[-1], x, parameters[at]):
                return x
            tensors.append(((name, *path), x))
            return None

        values[flat[index]] = _mapped_by_path(apart, entries)
    return {"groups": groups, "state": values}, tensors


def _mapped_by_path(change: Callable[[tuple[Any, ...], Any], Any], value: Any) -> Any:
    """Copy nested dicts, lists and tuples, with their leaves changed by path and value."""

    def key_of(step: Any) -> Any:
        return next(getattr(step, name) for name in ("key", "idx", "name") if hasattr(step, name))

    return pytree.tree_map_with_path(
        lambda path, leaf: change(tuple(map(key_of, path)), leaf), value
    )


def _is_saved_in_shards(key: Any, value: Any, parameter: Tensor) -> bool:
    """True if a value of optimizer state is a tensor saved by key, not a plain scalar or "step"."""
    if not isinstance(value, Tensor) or key == "step":
        return False
    return isinstance(value, DTensor) or value.ndim > 0 or value.shape == parameter.shape


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# Loading


def read_index(text: bytes, keys: Iterable[str]) -> SavedState:
    """Parse an index: a state without its tensors. keys: keys of the saved tensors. Raises
    CheckpointError if the index is damaged."""
    try:
        read = torch.load(io.BytesIO(text), weights_only=True)
        parts = {
            entry: [Part(tuple(path), key) for path, key in rows]
            for entry, rows in read["parts"].items()
        }
        index = SavedState({}, dict(read["values"]), parts)
    except Exception as error:  # torch.load raises whatever a damaged file leads to
        raise CheckpointError(f"its index cannot be read: {first_line(error)}") from error
    missing = {part.key for rows in parts.values() for part in rows} - {*keys}
    if missing:
        raise CheckpointError(
            f"its index lists tensor '{min(missing)}', but its files do not hold it."
        )
    return index


def check_entries(index: SavedState, state: Mapping[str, Any]) -> None:
    """Raises CheckpointError unless the checkpoint has every entry of the state, and exactly the
    entries that are optimizers were saved from optimizers."""
    for entry, content in state.items():
        if entry not in index.values:
            raise CheckpointError(
                f"the checkpoint has no entry '{entry}', only {', '.join(index.values) or 'none'}."
            )
        value = index.values[entry]
        saved = isinstance(value, Mapping) and value.keys() == {"groups", "state"}
        if saved != isinstance(content, Optimizer):
            kind = "an optimizer's state" if saved else "no optimizer's state"
            raise CheckpointError(
                f"entry '{entry}' was saved as {kind}, but is loaded into a "
                f"{type(content).__name__}; load it into an object like the one that was saved."
            )


def targets(index: SavedState, state: Mapping[str, Any], saved: Metadata) -> dict[str, Tensor]:
    """Return the tensors to load into, by key: a module's own tensors, new ones for optimizers."""
    tensors: dict[str, Tensor] = {}
    for entry, content in state.items():
        rows = index.parts.get(entry, [])
        sizes = {part.key: _tensor_of(saved, part.key) for part in rows}
        if isinstance(content, nn.Module):
            tensors |= _module_targets(entry, content, rows, sizes)
        elif isinstance(content, Optimizer):
            flat = [name for group in _names(entry, content, state) for name in group]
            parameters = dict(zip(flat, _parameters(content), strict=True))
            for part in rows:
                parameter = parameters.get(part.path[0])
                if parameter is not None:
                    tensors[part.key] = _beside(parameter, sizes[part.key])
    return {key: checkpointable(tensor) for key, tensor in tensors.items()}


def _tensor_of(saved: Metadata, key: str) -> TensorStorageMetadata:
    stored = saved.state_dict_metadata[key]
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"the entry '{key}' of the checkpoint is not a tensor.")
    return stored


def _module_targets(
    entry: str,
    module: nn.Module,
    rows: Iterable[Part],
    sizes: Mapping[str, TensorStorageMetadata],
) -> dict[str, Tensor]:
    saved = {part.path[0]: part.key for part in rows}
    state = state_of(module)
    if STATE in saved and state is not None and STATE not in module.state_dict():
        state.draw_from(0)  # the state follows
    own = {name: x for name, x in module.state_dict().items() if isinstance(x, Tensor)}
    for name in own.keys() ^ saved.keys():
        where, other = ("the checkpoint", entry) if name in own else (f"'{entry}'", "checkpoint")
        raise CheckpointError(
            f"{where} has no tensor '{name}', which the {other} has; load into the model that "
            "was saved."
        )
    for name, key in saved.items():
        if tuple(own[name].shape) != tuple(sizes[key].size):
            raise CheckpointError(
                f"'{name}' of '{entry}' has shape {tuple(own[name].shape)}, but "
                f"{tuple(sizes[key].size)} in the checkpoint; load it into the model that was "
                "saved."
            )
    return {key: own[name].detach() for name, key in saved.items()}


def _beside(parameter: Tensor, saved: TensorStorageMetadata) -> Tensor:
    """Make an empty tensor for optimizer state, placed as the parameter if it has its shape."""
    parameter = parameter.detach()
    dtype = saved.properties.dtype
    if tuple(saved.size) == tuple(parameter.shape):
        return torch.empty_like(parameter, dtype=dtype)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        local = torch.empty(saved.size, dtype=dtype, device=parameter.to_local().device)
        return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.empty(saved.size, dtype=dtype, device=parameter.device)


def put_together(index: SavedState, state: Mapping[str, Any], loaded: Mapping[str, Tensor]) -> None:
    """Load each entry's values and tensors into its module, optimizer or other object."""
    for entry, content in state.items():
        value, rows = index.values[entry], index.parts.get(entry, [])
        if isinstance(content, nn.Module):
            content.load_state_dict({**value, **{p.path[0]: loaded[p.key] for p in rows}})
        elif isinstance(content, Optimizer):
            tensors = {part.path: loaded[part.key] for part in rows if part.key in loaded}
            _load_optimizer(entry, content, _names(entry, content, state), value, tensors)
        else:
            try:
                content.load_state_dict(value)
            except Exception as error:  # the object is a user's, and may raise anything
                raise CheckpointError(
                    f"a {type(content).__name__} cannot load entry '{entry}' of the checkpoint: "
                    f"{type(error).__name__}: {first_line(error)}"
                ) from error


def _load_optimizer(
    entry: str,
    optimizer: Optimizer,
    names: list[list[str]],
    value: Mapping[str, Any],
    tensors: Mapping[tuple[Any, ...], Tensor],
) -> None:
    groups = value["groups"]
    if [set(group["params"]) for group in groups] != [set(group) for group in names]:
        raise CheckpointError(
            f"optimizer '{entry}' has other parameter groups than the checkpoint's; create the "
            "optimizer with the groups that it had when it was saved."
        )
    own = optimizer.param_groups[0].keys() - {"initial_lr"}
    other = own ^ (groups[0].keys() - {"initial_lr"})
    if other:
        raise CheckpointError(
            f"optimizer '{entry}' is of another class than the checkpoint's: only one of them "
            f"has {', '.join(sorted(map(repr, other)))}; create it as it was when it was saved."
        )
    numbers = {name: n for n, name in enumerate(name for group in names for name in group)}
    whole = _mapped_by_path(lambda path, x: tensors.get(path, x), value["state"])
    state: dict[int, Any] = {numbers[name]: own for name, own in whole.items()}
    packed = [
        {**group, "params": [numbers[name] for name in named]}
        for group, named in zip(groups, names, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": packed})
    send_away(optimizer)
