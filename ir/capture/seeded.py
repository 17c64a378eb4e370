# pyright: basic
# The dispatch modes of torch are only partly typed.
"""Eager PyTorch that draws the random numbers of programs: `sw.seeded`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardweave.ir.capture.canonical.creation import NO_RECIPE
from shardweave.ir.capture.draws import RECIPES, Draw, is_in_place
from shardweave.ir.dialects.aten import op_name, overload_named
from shardweave.ir.library.philox import Distribution, numbers_at, positions_of, random_state
from shardweave.ir.mesh.placement import Sharding
from shardweave.ir.mesh.shards import take_shard
from shardweave.ir.torch_private import (
    HigherOrderOperator,
    OpOverload,
    TorchDispatchMode,
    backward_pass_number,
    schema_of,
)


class Shard(NamedTuple):
    """The shard of a tensor of global `shape` that the device at mesh `coordinates` holds."""

    shape: tuple[int, ...]
    sharding: Sharding
    coordinates: dict[str, int]


class SeededRandom(TorchDispatchMode):
    """A context in which torch draws the random numbers that a step draws.

    `with sw.seeded(seed): loss = model(**batch)` draws the same numbers as the first call of
    `sw.compile(model, .., seed=seed)` on any mesh. Entered again, it continues the sequence.

    seed: a number, or the `random_state` of a step to continue from. state: (2,) int64, the seed
    and the number of draws so far. An op without a form in programs, such as `torch.multinomial`,
    raises ValueError, and so does a draw in a backward pass, since activation checkpoints of eager
    PyTorch would draw again. Ops with a `generator` argument draw as ever. shard: the shard
    that ops run on; they then draw the numbers of this shard of the global tensor.
    in_backward: allow draws in a backward pass, if it repeats the forward pass's draws.
    """

    supports_higher_order_operators = True

    def __init__(
        self, seed: int | Tensor, shard: Shard | None = None, *, in_backward: bool = False
    ) -> None:
        super().__init__()
        self._shard = shard
        self._in_backward = in_backward
        is_state = isinstance(seed, Tensor)
        self.state = seed.detach().cpu().clone() if is_state else random_state(seed)
        self._stances: list[Any] = []

    def __enter__(self) -> SeededRandom:
        # torch compiles nothing under a dispatch mode, and refuses what must be compiled, as eager
        # flex_attention does inside.
        self._stances.append(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._stances.pop().__exit__(*error)
        return super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            if not func.name().startswith("flex_attention"):
                raise ValueError(
                    f"sw.seeded: torch.{func.name()} may draw other random numbers than a "
                    "compiled step does; remove it to compare with a step."
                )
            return func(*args, **kwargs)  # scores and masks draw nothing
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        given = _bound(func, args, kwargs)
        if given.get("dropout_p") == 0.0 or given.get("generator") is not None:
            return func(*args, **kwargs)
        name = op_name(func)
        recipe = RECIPES.get(name)
        if recipe is None:
            with self:  # composites, which inference mode does not take apart, draw by these ops
                taken_apart = func.decompose(*args, **kwargs)
            if taken_apart is NotImplemented:
                raise ValueError(f"sw.seeded: {name} {NO_RECIPE}.")
            return taken_apart
        if backward_pass_number() != -1 and not self._in_backward:
            raise ValueError(
                f"sw.seeded: {name} draws random numbers in the backward pass, as "
                "torch.utils.checkpoint does when it recomputes the forward pass; remove "
                "activation checkpointing from the model to compare it with a step."
            )
        drawn = recipe(self._draw(given))
        if is_in_place(name):
            return args[0].copy_(drawn)
        return tuple(drawn) if isinstance(drawn, list) else drawn

    def _draw(self, given: Mapping[str, Any]) -> Draw:
        like = next((v for v in given.values() if isinstance(v, Tensor)), None)
        size = given.get("size", [given["n"]] if "n" in given else ())
        shape = torch.Size(size) if like is None else like.shape
        if "mean" in given and isinstance(given["std"], Tensor):
            shape = torch.broadcast_shapes(shape, given["std"].shape)
        dtype = given.get("dtype")
        if not isinstance(dtype, torch.dtype):  # schemas write a default as a number
            dtype = _default(given, like)
        device = given.get("device") or ("cpu" if like is None else like.device)
        return Draw(
            _OnTensors(self.state, torch.device(device), self._shard), given, tuple(shape), dtype
        )


def _default(given: Mapping[str, Any], like: Tensor | None) -> torch.dtype:
    if like is not None:
        return like.dtype
    return torch.int64 if "high" in given or "n" in given else torch.get_default_dtype()


def _bound(func: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    parameters = schema_of(func).arguments
    given = {p.name: p.default_value for p in parameters if p.has_default_value()}
    given |= {p.name: value for p, value in zip(parameters, args, strict=False)}
    return given | dict(kwargs)


class _OnTensors:
    """A `Maker` that runs recipes on eager tensors."""

    def __init__(self, state: Tensor, device: torch.device, shard: Shard | None) -> None:
        self.state = state
        self.device = device
        self.shard = shard

    def call(self, name: str, *operands: Any, **values: Any) -> Any:
        return self.calls(name, *operands, **values)[0]

    def calls(self, name: str, *operands: Any, **values: Any) -> Sequence[Any]:
        returned = overload_named(name)(*operands, **values)
        return returned if isinstance(returned, tuple) else (returned,)

    def cast(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype)

    def full(self, shape: Sequence[int], value: Any, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def draw(self, shape: Sequence[int], distribution: Distribution, dtype: torch.dtype) -> Tensor:
        shape = shape if self.shard is None else self.shard.shape
        positions = positions_of(shape, distribution, dtype, self.device)
        if self.shard is not None:
            positions = [
                take_shard(each, Sharding((dim,)), self.shard.coordinates)
                for each, dim in zip(positions, self.shard.sharding.dims, strict=True)
            ]
        numbers = numbers_at(self.state, positions, draw=0, distribution=distribution, dtype=dtype)
        self.state[1] += 1
        return numbers.to(self.device)
