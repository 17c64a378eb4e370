# pyright: basic
# torch's dispatch modes are private and only partly typed.
"""Observe the ops of an update, and the parameters that each value is computed from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from shardweave.ir.ops.registry import spec_named
from shardweave.ir.torch_private import OpOverload, TorchDispatchMode, memory_key, pytree, schema_of

_META = torch.device("meta")


@dataclass(frozen=True)
class _Value:
    """The contents of a tensor's memory. of: indices of the parameters that they derive from (none
    for a constant). is_aligned: whether each element derives only from the same element of these
    parameters."""

    of: frozenset[int]
    is_aligned: bool
    shape: tuple[int, ...]


class OwnMessagesError(ValueError):
    """Raised if an optimizer's step communicates itself; the message names the c10d op."""


class OpsSeen(TorchDispatchMode):
    """Tracks the parameters that values derive from, by the memory that ops write to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.of: list[frozenset[int]] = []
        self.reason = ""
        self.draws = ""
        self._values: dict[int, _Value] = {}
        self._alive: list[Tensor] = []
        """Keeps tracked tensors alive, so that no other tensor gets the key of their memory."""

    def note(self, tensor: Tensor, index: int, *, is_aligned: bool = True) -> None:
        """Begin to track parameter `index`, its gradient, or a tensor of its optimizer state."""
        self._keep(tensor, _Value(frozenset([index]), is_aligned, tuple(tensor.shape)))

    def _keep(self, tensor: Tensor, value: _Value) -> None:
        self._alive.append(tensor)
        self._values[memory_key(tensor)] = value

    def value_of(self, tensor: Tensor) -> _Value | None:
        return self._values.get(memory_key(tensor))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            raise OwnMessagesError(str(func))
        leaves = pytree.tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kwargs = on_host(func, args, kwargs, given)
        result = _computed(func, args, kwargs, leaves, given)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = f"{func} draws random numbers"
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if any(tensor.is_meta for tensor in (*given, *made)):
            plain = tuple(x for x in _arguments(args, kwargs) if not isinstance(x, Tensor))
            self.calls.append((str(func), plain))
            values = map(self.value_of, given)
            self.of.append(frozenset[int]().union(*(value.of for value in values if value)))
        self._follow(func, args, kwargs, given, made)
        return result

    def _follow(
        self,
        func: OpOverload[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        made: Sequence[Tensor],
    ) -> None:
        if func.is_view:
            self._look_at_views(func, given, made)
            return
        if func.name().startswith("aten::_foreach_") and is_elementwise(func):
            rows = zip(*_rows(args, kwargs, len(args[0])), strict=True)
            each = [[x for x in row if isinstance(x, Tensor)] for row in rows]
            for tensors in each:
                self._join(func, tensors, tensors[:1], is_elementwise=True)
            for tensors, x in zip(each, made, strict=False):  # nothing is made in place
                self._join(func, tensors, [x], is_elementwise=True)
            return
        written = [x for x in given if _is_written(func, x, args, kwargs)]
        self._join(func, given, [*made, *written], is_elementwise=is_elementwise(func, args))

    def _look_at_views(
        self, func: OpOverload[..., Any], given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Mark writes through a view with another order of elements as not aligned."""
        for source in given:
            value = self.value_of(source)
            for view in made:
                if value is None or not value.is_aligned or _geometry(view) == _geometry(source):
                    continue
                self.reason = self.reason or f"{func} reads elements in another order"
                self._keep(view, _Value(value.of, False, value.shape))

    def _join(
        self,
        func: OpOverload[..., Any],
        given: Sequence[Tensor],
        written: Sequence[Tensor],
        *,
        is_elementwise: bool,
    ) -> None:
        values = [v for x in given if (v := self.value_of(x)) is not None]
        of = frozenset[int]().union(*(value.of for value in values))
        if not of:
            return
        shapes = {tuple(x.shape) for x in given if x.ndim or self.value_of(x) is not None}
        shapes |= {value.shape for value in values} | {tuple(x.shape) for x in written}
        is_aligned = is_elementwise and len(shapes) == 1 and len(of) == 1
        for value in values:
            is_aligned = is_aligned and value.is_aligned
        if not is_aligned and not self.reason:
            self.reason = f"{func} reads more than one element"
        for x in written:
            self._keep(x, _Value(of, is_aligned, tuple(x.shape)))


_RESULTS: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""Results on the meta device by op and arguments: shape, strides and dtype; empty, if the op
writes to its first operand. Torch takes milliseconds to find out."""

_MOST_RESULTS = 10_000


def _computed(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    given: Sequence[Tensor],
) -> Any:
    """Compute an op, from the cache of equal calls' results if on the meta device. Keys ignore the
    values of floats."""
    if func.is_view or not given or not all(x.is_meta for x in given):
        return func(*args, **kwargs)
    key = func, len(args), *kwargs, *map(_described, leaves)
    known = _RESULTS.get(key)
    if known is None:
        result = func(*args, **kwargs)
        if result is args[0]:
            _RESULTS[key] = ()
        elif isinstance(result, Tensor) and not schema_of(func).is_mutable:
            _RESULTS[key] = result.shape, result.stride(), result.dtype
        if len(_RESULTS) > _MOST_RESULTS:
            _RESULTS.clear()
        return result
    if not known:
        return args[0]
    shape, stride, dtype = known
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _described(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, Tensor):
        return *_geometry(leaf), leaf.dtype
    return type(leaf), None if isinstance(leaf, float) else leaf


def is_torchs(optimizer: object) -> bool:
    """True if an optimizer's class is from torch.optim."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def on_host(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Sequence[Tensor]
) -> dict[str, Any]:
    """Return a call's keywords, with device CPU if it would make a scalar on `meta`: the scalar is
    a rate or a count, whose value code may read. given: the call's tensor operands."""
    if kwargs.get("device") == _META and not any(tensor.is_meta for tensor in given):
        if not func(*args, **kwargs).ndim:
            return {**kwargs, "device": torch.device("cpu")}
    return kwargs


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    arguments: list[Any] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Sequence) and not isinstance(x, str):
            items = cast("Sequence[Any]", x)
            numbers = all(isinstance(item, int) for item in items)
            arguments += [tuple(items)] if numbers else list(items)
        else:
            arguments.append(x)
    return arguments


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[Sequence[Any]]:
    """Expand each argument of a foreach op to `count` items, one for each tensor."""
    return [
        x if isinstance(x, Sequence) and len(cast("Sequence[Any]", x)) == count else [x] * count
        for x in (*args, *kwargs.values())
    ]


def is_elementwise(func: OpOverload[..., Any], args: Sequence[Any] = ()) -> bool:
    """True if each element of an op's result depends only on the same element of its operands.
    args: the call's arguments, needed for an op that writes a number under a mask."""
    if torch.Tag.pointwise in func.tags or torch.Tag.inplace_view in func.tags:
        return torch.Tag.inplace_view not in func.tags
    namespace, name = func.name().split("::")
    base, _, overload = name.partition(".")
    if base.startswith("_foreach_"):
        packet = getattr(torch.ops.aten, base.removeprefix("_foreach_").rstrip("_"), None)
        names = [] if packet is None else packet.overloads()
        return any(is_elementwise(getattr(packet, each)) for each in names)
    spec = spec_named(".".join(filter(None, (namespace, base.rstrip("_"), overload))))
    if spec.rule == "pointwise" or base.endswith("_like"):
        return True
    # Every element is overwritten: an op that writes only some reads indices from an operand.
    operands = [x for x in schema_of(func).arguments if isinstance(x.type, torch.TensorType)]
    return spec.overwrites and (len(operands) == 1 or is_masked(args))


def is_masked(args: Sequence[Any]) -> bool:
    """True if a call's arguments are a tensor, a mask of its shape, and a scalar to write."""
    match args:
        case [Tensor() as into, [Tensor() as mask], Tensor() as value, *_]:
            return mask.dtype == torch.bool and mask.shape == into.shape and not value.ndim
        case _:
            return False


def reduction_of(func: OpOverload[..., Any]) -> str:
    """Return the kind of a reduction that can be computed on shards and combined: sum, mean, norm,
    max or min; empty for other ops."""
    name = func.name().partition("::")[2].partition(".")[0]
    if name in ("mean", "norm", "linalg_vector_norm"):
        return name.rpartition("_")[2]
    return spec_named(func.name().replace("::", ".")).combine or ""


def _is_written(
    func: OpOverload[..., Any], x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    for index, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if any(leaf is x for leaf in pytree.tree_leaves(value)):
            return True
    return False
