# pyright: basic
# The dispatch modes of torch are only partly typed.
"""First values of a model on the meta device, computed parameter by parameter.

The ops of the model's own functions (`reset_parameters`, `init_weights`, ..) are recorded on fake
tensors, and replayed for one parameter at a time; if all are elementwise, for this rank's shard
alone. Random numbers are those of `sw.seeded`, the same on every mesh.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardweave.backends.state.places import places_of
from shardweave.ir.capture.draws import RECIPES
from shardweave.ir.capture.seeded import SeededRandom, Shard
from shardweave.ir.dialects.aten import op_name
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.mesh.shards import take_shard
from shardweave.ir.torch_private import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    memory_key,
    pytree,
)

_FILLING = ("normal_", "uniform_", "zero_", "fill_")
"""Ops that write a tensor without reading it."""

_ELEMENTWISE = (*_FILLING, "mul_", "add_", "sub_", "div_", "erfinv_", "clamp_", "detach", "alias")
"""Ops that compute a shard of a tensor from the same shard of others of its shape."""

_READ = "aten._local_scalar_dense"
"""The op that reads a Python number, such as in a loop that redraws until all are in bounds."""


class Source(ABC):
    """Source of a tensor's initial values; each rank computes or reads its own shard."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.ndim = tensor.shape, tensor.dtype, tensor.ndim

    @abstractmethod
    def part(
        self, sharding: Sharding, coordinates: Mapping[str, int], device: torch.device
    ) -> Tensor:
        """Make the shard of the rank at `coordinates`, as a new tensor."""


@dataclass(frozen=True, eq=False)
class _Op:
    """A recorded op. draw: number of random draws before it; None if it draws none."""

    func: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    draw: int | None

    @cached_property
    def name(self) -> str:
        """The op's name without its namespace and overload."""
        return op_name(self.func).split(".")[1]

    @cached_property
    def made(self) -> set[int]:
        """Keys of the memory of the op's results: new, written in place, or viewed."""
        return {memory_key(x) for x in pytree.tree_leaves(self.result) if _is_fake(x)}

    @cached_property
    def operands(self) -> list[Tensor]:
        """Tensors among the recorded arguments."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if _is_fake(x)]

    @property
    def fills(self) -> int | None:
        """The `memory_key` of the storage that an in-place op fills completely without reading it;
        None for other ops."""
        if self.name not in _FILLING or len(self.operands) != 1:
            return None
        (operand,) = self.operands
        is_all = operand.untyped_storage().nbytes() == operand.nbytes
        return memory_key(operand) if is_all else None


def _is_fake(value: Any) -> bool:
    return isinstance(value, FakeTensor)


class _Recorder(TorchDispatchMode):
    """Records ops on fake tensors; other ops run, drawing random numbers as under `sw.seeded`."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.ops: list[_Op] = []
        self._seed = seed
        self._seeded = SeededRandom(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(map(_is_fake, pytree.tree_leaves((args, kwargs)))):
            return self._seeded.__torch_dispatch__(func, types, args, kwargs)
        if op_name(func) == _READ:
            (tensor,) = args
            made = _Replay(tensor, self._seed, tensor.device).run(_slice_of(tensor, self.ops))
            return func(made)
        draws = torch.Tag.nondeterministic_seeded in func.tags and not kwargs.get("generator")
        if draws and op_name(func) not in RECIPES:
            raise ValueError(
                f"{op_name(func)} draws random numbers differently than sw.seeded does"
            )
        result = func(*args, **kwargs)
        draw = int(self._seeded.state[1]) if draws else None
        self._seeded.state[1] += int(draws)
        self.ops.append(_Op(func, args, kwargs, result, draw))
        return result


class _Recorded(Source):
    """A tensor whose values come from replaying recorded ops."""

    def __init__(self, tensor: Tensor, ops: Sequence[_Op], seed: int) -> None:
        super().__init__(tensor)
        self._tensor, self._seed = tensor, seed
        self._ops = _slice_of(tensor, ops)
        shapes = {operand.shape for op in self._ops for operand in op.operands}
        self._is_elementwise = shapes <= {tensor.shape} and all(
            op.name in _ELEMENTWISE and not op.kwargs.get("generator") for op in self._ops
        )

    @property
    def is_filled(self) -> bool:
        """True if some recorded op has written the tensor in place."""
        return any(op.name.endswith("_") for op in self._ops)

    def part(
        self, sharding: Sharding, coordinates: Mapping[str, int], device: torch.device
    ) -> Tensor:
        if not self._is_elementwise:
            whole = _Replay(self._tensor, self._seed, device).run(self._ops)
            return take_shard(whole, sharding, dict(coordinates)).clone()
        shard = Shard(tuple(self._tensor.shape), sharding, dict(coordinates))
        return _Replay(self._tensor, self._seed, device, shard).run(self._ops)


def _slice_of(tensor: Tensor, ops: Sequence[_Op]) -> list[_Op]:
    """Return the ops that a tensor's values depend on, in order. Takes time linear in the ops."""
    needed, chosen = {memory_key(tensor)}, list[_Op]()
    for op in reversed(ops):
        if op.made & needed:
            chosen.append(op)
            needed |= {memory_key(operand) for operand in op.operands}
            needed.discard(op.fills or 0)
    return chosen[::-1]


class _Replay:
    """Runs recorded ops on real tensors: on whole ones, or on `shard` of each if it is given."""

    def __init__(
        self, tensor: Tensor, seed: int, device: torch.device, shard: Shard | None = None
    ) -> None:
        self._tensor, self._seed, self._device, self._shard = tensor, seed, device, shard
        self._memory: dict[int, Any] = {}

    def run(self, ops: Sequence[_Op]) -> Tensor:
        """Run the ops and return the tensor."""
        for op in ops:
            args, kwargs = pytree.tree_map(self._real, (op.args, dict(op.kwargs)))
            if op.draw is None:
                result = op.func(*args, **kwargs)
            else:
                state = torch.tensor([self._seed, op.draw], dtype=torch.int64)
                with SeededRandom(state, self._shard):
                    result = op.func(*args, **kwargs)
            leaves = pytree.tree_leaves(op.result), pytree.tree_leaves(result)
            for fake, value in zip(*leaves, strict=True):
                if _is_fake(fake):
                    held = value if self._shard else value.untyped_storage()
                    self._memory.setdefault(memory_key(fake), held)
        return self._real(self._tensor)

    def _real(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self._device
        if not _is_fake(value):
            return value.to(self._device) if isinstance(value, Tensor) else value
        key = memory_key(value)
        if self._shard is not None:
            if key not in self._memory:
                shape = self._shard.sharding.held_shape(self._shard.shape, self._shard.coordinates)
                self._memory[key] = torch.empty(shape, dtype=value.dtype, device=self._device)
            return self._memory[key]
        if key not in self._memory:
            size = value.untyped_storage().nbytes()
            self._memory[key] = torch.UntypedStorage(size, device=self._device)
        empty = torch.empty(0, dtype=value.dtype, device=self._device)
        form = value.storage_offset(), tuple(value.shape), tuple(value.stride())
        return empty.set_(self._memory[key], *form)


def initial_values(
    model: nn.Module, seed: int, read: Mapping[int, Source] | None = None
) -> dict[int, Source]:
    """Return sources of initial values, by tensor id, for a model's tensors on the meta device.

    read: sources for tensors that files contain, which are returned unchanged.

    The model's own functions initialize the other tensors, as if under `sw.seeded(seed)`: first
    `reset_parameters` of each module, inner modules before outer ones, then the model's
    `init_weights` or `_init_weights`. Raises ValueError if none of these initializes a tensor, or
    if a function fails on fake tensors, for instance by reading values.
    """
    read = read or {}
    with _fakes_in(model) as fakes:
        recorder = _Recorder(seed)
        if fakes.keys() - read.keys():
            with torch.no_grad(), recorder:
                _fill(model)
    sources = {
        key: _Recorded(fake, recorder.ops, seed)
        for key, (_, fake) in fakes.items()
        if key not in read
    }
    unfilled = [fakes[key][0] for key, source in sources.items() if not source.is_filled]
    if unfilled:
        raise ValueError(
            f"'{unfilled[0]}' is on the meta device, and no function of the model initializes "
            "it: set its values in reset_parameters() of its module or init_weights() of the "
            "model, create it outside torch.device('meta'), or read it from files (weights=..)."
        )
    return {**sources, **read}


@contextmanager
def _fakes_in(model: nn.Module) -> Iterator[dict[int, tuple[str, Tensor]]]:
    """Context in which fake tensors replace a model's tensors. Yields, by id of each tensor on the
    meta device, its name and fake. Afterwards the tensors are put back, except for those on the
    meta device that the model's functions have replaced by tensors with values."""
    fakes: dict[int, Tensor] = {}
    absent: dict[int, tuple[str, Tensor]] = {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    places = list(places_of(model))
    for place in places:
        tensor = place.tensor
        if id(tensor) not in fakes:
            fakes[id(tensor)] = _fake_of(tensor, mode)
            if tensor.is_meta:
                absent[id(tensor)] = place.path, fakes[id(tensor)]
    try:
        if absent:
            for place in places:
                place.held[place.name] = fakes[id(place.tensor)]
        yield absent
    finally:
        for place in places:
            made = place.held.get(place.name)
            if made is None or _is_fake(made) or not place.tensor.is_meta:
                place.held[place.name] = place.tensor
            else:
                absent.pop(id(place.tensor), None)


def _fake_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return fake
    fake = nn.Parameter(fake, tensor.requires_grad)
    vars(fake).update(vars(tensor))
    return fake


def _fill(model: nn.Module) -> None:
    """Call the functions of a model and its modules that fill their tensors."""
    for module in model.modules():  # transformers' mark of modules that have values
        vars(module).pop("_is_hf_initialized", None)

    filled: set[int] = set()

    def reset(module: nn.Module) -> None:
        names = ("reset_parameters", "_reset_parameters")
        name = next((n for n in names if callable(getattr(module, n, None))), None)
        if name is None:
            return
        # A tied parameter has the values of the first module, as if it had been tied afterwards.
        own = module._parameters
        tied = {n: p for n, p in own.items() if p is not None and id(p) in filled}
        own.update({n: nn.Parameter(torch.empty_like(p)) for n, p in tied.items()})
        _explained(f"{type(module).__name__}.{name}", getattr(module, name))
        own.update(tied)
        filled.update(id(p) for p in own.values())

    model.apply(reset)
    own, each = (getattr(model, name, None) for name in ("init_weights", "_init_weights"))
    if callable(own):
        _explained(f"{type(model).__name__}.init_weights", own)
    elif callable(each):
        _explained(f"{type(model).__name__}._init_weights", model.apply, each)


def _explained(name: str, function: Callable[..., Any], *args: Any) -> None:
    try:
        function(*args)
    except Exception as error:
        raise ValueError(
            f"{name} cannot initialize tensors of the meta device shard by shard ({error}): it "
            "may use torch's in-place functions, but not read values. Change it, or create the "
            "model on a device with memory."
        ) from error
