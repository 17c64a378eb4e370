# pyright: basic
# torch's dispatch modes are private and only partly typed.
"""The values that an optimizer's step reads to update each parameter.

The step runs once on the meta device, from the optimizer's own code, while every ATen op is seen.
Where each op of an update reads only the same element of other tensors, the update may run on a
shard; where some op reads more (a norm, a product of matrices), it needs full values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardweave.ir.ops.registry import spec_named
from shardweave.ir.torch_private import OpOverload, TorchDispatchMode, memory_key, pytree, schema_of

_META = torch.device("meta")


@dataclass(frozen=True)
class Sizes:
    """The shape of a parameter, and those of the largest and the smallest of its shards."""

    full: tuple[int, ...]
    largest: tuple[int, ...]
    smallest: tuple[int, ...]


@dataclass(frozen=True)
class Reads:
    """The parameters, by index, whose updates need full values, and the reason.

    joint: those whose updates read other parameters, or may. may_draw: whether an op draws random
    numbers, or may; all updates then need full values.
    """

    full: frozenset[int]
    joint: frozenset[int]
    reason: str = ""
    may_draw: bool = False


def reads_of(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    sizes: Sequence[Sizes],
    has_gradient: Sequence[bool],
    *,
    has_closure: bool = False,
) -> Reads:
    """Find out what the next step of an optimizer reads; the optimizer stays as it is.

    parameters: those of all groups, in order. A step that cannot run on the meta device, since it
    decides by values of tensors, needs full values of everything.
    """
    runs: list[_Seen] = []
    everything = frozenset(range(len(parameters)))
    for shapes in (
        [size.full for size in sizes],
        [size.largest for size in sizes],
        [size.smallest for size in sizes],
    ):
        if runs and shapes == [size.full for size in sizes]:
            continue
        try:
            runs.append(
                _seen(_Observer(optimizer, parameters, sizes, shapes, has_gradient), has_closure)
            )
        except Exception as error:  # noqa: BLE001 - a user's code may raise anything here
            joint = runs[0].reads.joint if runs else everything
            return Reads(everything, joint, _first_line(error), may_draw=True)
    first, *others = runs
    if any(not _agree(first.calls, run.calls, sizes) for run in others):
        reason = "it computes with the shapes of parameters"
        return Reads(everything, first.reads.joint, reason, first.reads.may_draw)
    return first.reads


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


# One run


@dataclass(frozen=True)
class _Seen:
    """calls: the ops that ran, each with the arguments that are no tensors."""

    reads: Reads
    calls: tuple[tuple[str, tuple[Any, ...]], ...]


def _seen(observer: _Observer, has_closure: bool) -> _Seen:
    step: Any = type(observer.optimizer).step
    closure = (lambda: torch.zeros(()),) if has_closure else ()
    with observer.mode, torch.no_grad():
        getattr(step, "__wrapped__", step)(observer.optimizer, *closure)
    return _Seen(observer.reads(), tuple(observer.mode.calls))


class _Observer:
    """A copy of an optimizer on the meta device; scalars on the host keep their values."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        sizes: Sequence[Sizes],
        shapes: Sequence[tuple[int, ...]],
        has_gradient: Sequence[bool],
    ) -> None:
        self.mode = _OpsSeen()
        self.parameters = [
            nn.Parameter(torch.empty(shape, dtype=p.dtype, device="meta"), p.requires_grad)
            for p, shape in zip(parameters, shapes, strict=True)
        ]
        memo: dict[int, Any] = {}
        for index, (old, new) in enumerate(zip(parameters, self.parameters, strict=True)):
            vars(new).update(vars(old))
            if has_gradient[index]:
                new.grad = torch.empty_like(new)
                self.mode.note(new.grad, index)
            self.mode.note(new, index)
            memo[id(old)] = new
        for index, old in enumerate(parameters):
            for value in pytree.tree_leaves(optimizer.state.get(old)):
                if isinstance(value, Tensor):
                    memo[id(value)] = self._state(value, index, sizes[index], shapes[index])
        memo[id(optimizer)] = self.optimizer = object.__new__(type(optimizer))
        hooks = {name: value for name, value in vars(optimizer).items() if "hooks" in name}
        own = {name: x for name, x in vars(optimizer).items() if name not in {*hooks, "step"}}
        vars(self.optimizer).update(copy.deepcopy(own, memo) | hooks)
        self._kept = memo
        if type(optimizer).__module__.startswith("torch.optim"):
            # Their fused and joint forms compute the same, as do those that a graph can capture.
            for group in self.optimizer.param_groups:
                group.update({key: False for key in _FORMS if key in group})

    def _state(self, value: Tensor, index: int, size: Sizes, shape: tuple[int, ...]) -> Tensor:
        if not value.ndim:
            return value.detach().to("cpu", copy=True)
        is_beside = tuple(value.shape) == size.full
        made = torch.empty(shape if is_beside else value.shape, dtype=value.dtype, device="meta")
        self.mode.note(made, index, is_aligned=is_beside)
        return made

    def reads(self) -> Reads:
        full: set[int] = set()
        joint: set[int] = set()
        for index, parameter in enumerate(self.parameters):
            states = pytree.tree_leaves(self.optimizer.state.get(parameter))
            tensors = [parameter, *(x for x in states if isinstance(x, Tensor))]
            values = [value for x in tensors if (value := self.mode.value_of(x)) is not None]
            if any(not value.is_aligned for value in values):
                full.add(index)
            others = frozenset[int]().union(*(value.of for value in values)) - {index}
            if others:
                joint |= {index, *others}
        if self.mode.draws:
            full |= {*range(len(self.parameters))}
        reason = self.mode.draws or self.mode.reason
        return Reads(frozenset(full | joint), frozenset(joint), reason, bool(self.mode.draws))


_FORMS = ("foreach", "fused", "capturable")


@dataclass(frozen=True)
class _Value:
    """What is in some memory: the parameters that it was made of, and whether each element was
    made of the same element of theirs. Nothing: a constant."""

    of: frozenset[int]
    is_aligned: bool
    shape: tuple[int, ...]


class _OpsSeen(TorchDispatchMode):
    """Follows what ops write, by the memory that they write to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.reason = ""
        self.draws = ""
        self._values: dict[int, _Value] = {}
        self._alive: list[Tensor] = []
        """Tensors whose memory is followed: its key is not to be another's."""

    def note(self, tensor: Tensor, index: int, *, is_aligned: bool = True) -> None:
        """Begin to follow a parameter, or what is kept beside it."""
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
        leaves = pytree.tree_leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if kwargs.get("device") == _META and not any(tensor.is_meta for tensor in given):
            if not func(*args, **kwargs).ndim:  # a rate or a count, whose value code may ask for
                kwargs = {**kwargs, "device": torch.device("cpu")}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws = f"{func} draws random numbers"
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if any(tensor.is_meta for tensor in (*given, *made)):
            plain = tuple(x for x in _arguments(args, kwargs) if not isinstance(x, Tensor))
            self.calls.append((str(func), plain))
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
        if func.name().startswith("aten::_foreach_") and _is_elementwise(func):
            for row in zip(*_rows(args, kwargs, len(args[0])), strict=True):
                tensors = [x for x in row if isinstance(x, Tensor)]
                self._join(func, tensors, [tensors[0]], is_elementwise=True)
            for index, x in enumerate(made):
                rows = _rows(args, kwargs, len(args[0]))
                tensors = [row[index] for row in rows if isinstance(row[index], Tensor)]
                self._join(func, tensors, [x], is_elementwise=True)
            return
        written = [x for x in given if _is_written(func, x, args, kwargs)]
        self._join(func, given, [*made, *written], is_elementwise=_is_elementwise(func))

    def _look_at_views(
        self, func: OpOverload[..., Any], given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Where a view has another order of elements, what is written through it is not aligned."""
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


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Sequence) and not isinstance(x, str):
            items = cast("Sequence[Any]", x)
            numbers = all(isinstance(item, int) for item in items)
            found += [tuple(items)] if numbers else list(items)
        else:
            found.append(x)
    return found


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int) -> list[Sequence[Any]]:
    """The arguments of a joint op, each as one item for each tensor."""
    return [
        x if isinstance(x, Sequence) and len(cast("Sequence[Any]", x)) == count else [x] * count
        for x in (*args, *kwargs.values())
    ]


def _is_elementwise(func: OpOverload[..., Any]) -> bool:
    """Say whether each element of an op's result reads that element of its operands alone."""
    if torch.Tag.pointwise in func.tags or torch.Tag.inplace_view in func.tags:
        return torch.Tag.inplace_view not in func.tags
    namespace, name = func.name().split("::")
    base, _, overload = name.partition(".")
    if base.startswith("_foreach_"):
        packet = getattr(torch.ops.aten, base.removeprefix("_foreach_").rstrip("_"), None)
        names = [] if packet is None else packet.overloads()
        return any(_is_elementwise(getattr(packet, each)) for each in names)
    spec = spec_named(".".join(filter(None, (namespace, base.rstrip("_"), overload))))
    return spec.rule == "pointwise" or spec.overwrites or base.endswith("_like")


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


def _agree(
    first: Sequence[tuple[str, tuple[Any, ...]]],
    other: Sequence[tuple[str, tuple[Any, ...]]],
    sizes: Sequence[Sizes],
) -> bool:
    """Say whether two runs on other sizes compute alike: the same ops, with the same numbers."""
    if len(first) != len(other):
        return False
    pairs = {(s.full, shard) for s in sizes for shard in (s.largest, s.smallest)}
    for (op, arguments), (op_2, arguments_2) in zip(first, other, strict=True):
        if op != op_2 or len(arguments) != len(arguments_2):
            return False
        for x, y in zip(arguments, arguments_2, strict=True):
            same = x == y or (isinstance(x, float) and x != x and y != y)
            if not same and (x, y) not in pairs:
                return False
    return True
