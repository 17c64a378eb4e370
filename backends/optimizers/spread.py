"""Tensors of full shape, sharded over ranks, for updates that owners cannot compute.

An optimizer's own code runs on them op by op. Elementwise ops run on shards. Sums, means, norms and
extremes are reduced on each shard, then all-reduced, so that no matrix is sent. For any other op
its operands are gathered. All ranks run the same ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardweave.backends.optimizers.exchange import Index, layout_of, put, take
from shardweave.backends.optimizers.shards import beside, full_value, shard_of
from shardweave.ir.capture.update.ops_seen import is_elementwise, reduction_of
from shardweave.ir.torch_private import (
    OpOverload,
    make_wrapper,
    pytree,
    schema_of,
    version_of,
    without_dispatch,
    without_overrides,
)

GATHERED: list[str] = []
"""Names of the ops for which the running step has gathered full values."""


class Home:
    """This rank's shard of a tensor. like: the parameter with the same shape and placements.

    A view of another shape is taken of a gathered full value, which is kept: writes to the views
    reach the shard at the next op that reads it, and writes to the shard reach the views.
    """

    def __init__(self, local: Tensor, like: DTensor) -> None:
        self.local, self.like, self.layout = local, like, layout_of(like)
        self._full: Tensor | None = None
        self._views: list[Tensor] = []
        self._versions: list[int] = []
        shards, rank = self.layout.shards, dist.get_rank()
        nothing = (range(0), *map(range, like.shape[1:]))
        self.index: Index = shards[rank] if rank in shards else nothing
        firsts = {index: at for at, index in reversed(shards.items())}
        self.is_first = rank in firsts.values() and local.numel() > 0

    def full(self, op: str) -> Tensor:
        """Return the full value: gathered, or kept by `view`. op: name for `GATHERED`.
        Collective."""
        if self._full is not None:
            return self._full
        GATHERED.append(op)
        return full_value(beside(self.local, self.like))

    def view(self, func: OpOverload[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a view op on the full value, which is gathered and kept from then on. Collective."""
        self._full = self.full(str(func))
        views = func(self._full, *args, **kwargs)
        self._views += pytree.tree_leaves(views)
        self._versions = [version_of(view) for view in self._views]
        return views

    def write(self, full: Tensor) -> None:
        """Overwrite the shard with its slice of `full`."""
        self.local.copy_(take(full, self.index))

    def read_views(self) -> None:
        """Update the shard if views of the full value were written to."""
        versions = [version_of(view) for view in self._views]
        if self._full is not None and versions != self._versions:
            self._versions = versions
            self.write(self._full)

    def write_views(self) -> None:
        """Update the kept full value, and so its views, from the shards. Collective if kept."""
        if self._full is not None:
            self._full.copy_(full_value(beside(self.local, self.like)))


class _Seen(Tensor):
    """A tensor whose ops this module runs. value: the full tensor that they run on, or None."""

    value: Any
    like: DTensor

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_overrides():
            if func == getattr(Tensor.data, "__set__"):  # noqa: B009 - types of torch lack it
                return args[0].detach().copy_(args[1])
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], Spread):
            return args[0].turned(func, *args[1:], **(kwargs or {}))
        wholes = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, _Seen)]
        wholes = [x for x in wholes if x.value is not None]
        plain, options = pytree.tree_map_only(
            _Seen, lambda x: x if x.value is None else x.value, (args, kwargs or {})
        )
        if any(isinstance(x, Spread) for x in pytree.tree_leaves((plain, options))):
            result = _Call(func, plain, options).run()
        else:
            result = func(*plain, **options)
        for x in wholes:
            if result is x.value:
                return x
            if type(result) is Tensor and result.shape == x.like.shape and result.ndim > 1:
                return Spread(Home(shard_of(result, x.like).clone(), x.like))
        return result


class Spread(_Seen):
    """A tensor of a parameter's full shape, sharded like it. value: the full value, once an
    in-place view op (such as `t_`) has changed the tensor's own shape or strides."""

    home: Home

    @staticmethod
    def __new__(cls: type[Spread], home: Home) -> Spread:
        local = home.local
        return make_wrapper(cls, tuple(home.like.shape), dtype=local.dtype, device=local.device)

    def __init__(self, home: Home) -> None:
        self.home, self.like, self.value = home, home.like, None

    def turned(self, func: OpOverload[..., Any], *args: Any, **kwargs: Any) -> Spread:
        """Run an in-place view op on this tensor; returns the tensor. Collective."""
        if self.value is None:
            self.value = self.home.view(torch.ops.aten.alias.default)
        func(self.value, *args, **kwargs)
        with without_dispatch():
            func(self, *args, **kwargs)
        return self


class Whole(_Seen):
    """A state of another shape than its parameter's, equal on all ranks. A result computed only
    from such states that has the parameter's shape, as an outer product has, becomes a `Spread`."""

    @staticmethod
    def __new__(cls: type[Whole], value: Tensor, like: DTensor) -> Whole:
        return make_wrapper(cls, tuple(value.shape), dtype=value.dtype, device=value.device)

    def __init__(self, value: Tensor, like: DTensor) -> None:
        self.value, self.like = value, like


class _Call:
    """A call of an op with `Spread` tensors among its operands."""

    def __init__(
        self, func: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name = func.name().partition("::")[2].partition(".")[0]
        leaves = pytree.tree_leaves((args, kwargs))
        self.tensors = [x for x in leaves if isinstance(x, Tensor)]
        self.spread = [x for x in self.tensors if isinstance(x, Spread)]
        self.home = self.spread[0].home
        self.shape = tuple(self.home.like.shape)
        self.writes = schema_of(func).is_mutable

    def run(self) -> Any:
        for x in self.spread:
            x.home.read_views()
        if self.func.is_view:
            return self._view()
        if self._is_on_shards():
            return self._on_shards()
        if self.name.startswith("new_"):
            return self._new()
        is_single = len(self.tensors) == 1 and not self.writes
        kind = reduction_of(self.func) if is_single and self.home.local.is_floating_point() else ""
        reduced = self._reduced(kind) if kind else None
        return self._on_full() if reduced is None else reduced

    def _called(self, of: Callable[[Tensor], Any]) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, of, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    # On shards

    def _is_on_shards(self) -> bool:
        if self.writes and not isinstance(self.args[0], Spread):
            return False
        if not is_elementwise(self.func, self.args):
            return False
        if torch.Tag.nondeterministic_seeded in self.func.tags or self.name.startswith("_foreach_"):
            return False
        if any(x.home.layout != self.home.layout for x in self.spread[1:]):
            return False
        return all(map(self._is_within, self.tensors))

    def _is_within(self, x: Tensor) -> bool:
        own = self.shape[len(self.shape) - x.ndim :]
        return len(own) == x.ndim and all(n in (1, m) for n, m in zip(x.shape, own, strict=True))

    def _on_shards(self) -> Any:
        result = self._called(self._part)
        if self.writes:
            self.args[0].home.write_views()
            return self.args[0]
        return self._spread(result)

    def _part(self, x: Tensor) -> Tensor:
        """Return the slice of an operand that an elementwise op on this rank's shard reads."""
        if isinstance(x, Spread):
            return x.home.local
        behind = len(self.shape) - x.ndim
        own = zip(x.shape, self.shape[behind:], self.home.index[behind:], strict=True)
        return take(x, tuple(index if n == size else range(n) for n, size, index in own))

    def _spread(self, local: Tensor) -> Spread:
        return Spread(Home(local, self.home.like))

    def _new(self) -> Tensor:
        """Run a `new_*` op: a `Spread` if the result has this shape, else a `Whole`."""
        local, (_, size, *rest) = self.home.local, self.args
        if tuple(size) == self.shape:
            return self._spread(self.func(local, local.shape, *rest, **self.kwargs))
        return Whole(self.func(local, size, *rest, **self.kwargs), self.home.like)

    # Reductions

    def _reduced(self, kind: str) -> Tensor | None:
        """Reduce over all ranks; None if a norm's order is not a positive number. Collective."""
        names = [argument.name for argument in schema_of(self.func).arguments]
        given = dict(zip(names, self.args, strict=False)) | self.kwargs
        order = given.get("ord", given.get("p", 2)) if kind == "norm" else 1
        order = 2 if order is None else order
        if not isinstance(order, int | float) or order <= 0:
            return None
        wanted = given.get("dim")
        wanted = [wanted] if isinstance(wanted, int) else wanted or range(len(self.shape))
        dims = [dim % len(self.shape) for dim in wanted]
        dtype = given.get("dtype") or self.home.local.dtype
        local = self.home.local.to(torch.promote_types(dtype, torch.float32))
        local = local.abs() if kind == "norm" else -local if kind == "min" else local
        is_max = kind in ("max", "min") or order == math.inf
        whole = self._joined(local if is_max else local**order, dims, is_max=is_max)
        if kind == "mean":
            whole = whole / math.prod(self.shape[dim] for dim in dims)
        whole = whole if is_max else whole ** (1 / order)
        whole = (-whole if kind == "min" else whole).to(dtype)
        return whole if given.get("keepdim") else whole.squeeze(dims)

    def _joined(self, local: Tensor, dims: list[int], *, is_max: bool) -> Tensor:
        """Sum, or maximize, over `dims`, taking each distinct shard once. Collective."""
        shape = [1 if dim in dims else size for dim, size in enumerate(self.shape)]
        whole = local.new_full(shape, -math.inf if is_max else 0.0)
        if self.home.is_first:
            own = (local.amax if is_max else local.sum)(dims, keepdim=True) if dims else local
            index = tuple(range(1) if d in dims else x for d, x in enumerate(self.home.index))
            put(whole, index, own)
        dist.all_reduce(whole, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)
        return whole

    # On full values

    def _view(self) -> Any:
        source = self.args[0]
        on_meta = torch.empty(self.shape, device="meta", dtype=source.dtype)
        view = self.func(on_meta, *self.args[1:], **self.kwargs)
        same = on_meta.shape, on_meta.stride()
        if isinstance(view, Tensor) and (view.shape, view.stride()) == same:
            return Spread(self.home)
        return self.home.view(self.func, *self.args[1:], **self.kwargs)

    def _on_full(self) -> Any:
        made: dict[int, Tensor] = {}

        def full(x: Tensor) -> Tensor:
            if not isinstance(x, Spread):
                return x
            if id(x.home) not in made:
                made[id(x.home)] = self._full(x)
            return made[id(x.home)]

        result = self._called(full)
        if not self.writes:
            return result
        for x in {id(x.home): x for x in self.spread}.values():
            x.home.write(made[id(x.home)])
            x.home.write_views()
        of = {id(made[id(x.home)]): x for x in self.spread}
        return pytree.tree_map_only(Tensor, lambda x: of.get(id(x), x), result)

    def _full(self, x: Spread) -> Tensor:
        if self.name.endswith("_like"):  # random: of the shape alone
            return x.home.local.new_empty(self.shape)
        return x.home.full(str(self.func))


def local_of(value: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard: of a `Spread` with writes to its views, or of a full tensor, placed
    as `like`."""
    if isinstance(value, Spread):
        value.home.read_views()
        return value.home.local
    return shard_of(value, like).clone()
