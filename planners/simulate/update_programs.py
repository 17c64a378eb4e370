"""The update of one parameter, captured as programs that the simulator prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from shardweave.ir.capture.site import CaptureError
from shardweave.ir.capture.update.cut import CutUpdate, cut_update
from shardweave.ir.capture.update.program import Assumed, Update, capture_update, program_of
from shardweave.ir.capture.update.reads import Sizes, calls_of, run_step
from shardweave.ir.program.program import Program
from shardweave.ir.torch_private import pytree
from shardweave.planners.cost.memory import peak_memory
from shardweave.planners.simulate.update_cost import optimizer_class


@dataclass(frozen=True)
class _Captured:
    """Captured update of a parameter. states: shape and dtype of each non-scalar optimizer state.
    by_values: its code branches on tensors' values, so that it runs op by op on shards."""

    update: Update
    states: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    by_values: bool


class Core(NamedTuple):
    """The part of an update that needs full values. held_bytes: bytes of its inputs and results, on
    the owner."""

    parts: CutUpdate
    program: Program
    held_bytes: int


@dataclass(frozen=True)
class PricedUpdate:
    """The update of a parameter as programs. core: the part that reads the whole parameter.
    on_shards: the programs on a rank's shard, before and after it.

    extra_bytes: temporaries while the update runs, besides full values or shards. joined: bytes of
    each sum, mean or norm that the ranks all-reduce.
    """

    on_shards: Sequence[Program]
    core: Core | None
    state_bytes: int
    extra_bytes: int
    joined: Sequence[int] = ()


@cache
def _captured(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> _Captured:
    """Trace, on the meta device, a parameter's update by an optimizer that has its states."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    made: Optimizer = optimizer_class(name)([parameter])
    parameter.grad = torch.empty_like(parameter)
    sizes = [Sizes(shape, shape, shape)]
    assumed = Assumed()
    try:
        with Assumed():
            run_step(made)
        _keep_scalars(made, parameter)
        with assumed:
            calls = calls_of(made, [parameter], sizes, [True])[0]
        update = capture_update(made, [parameter], sizes, 0, calls, is_assumed=True)
    except (RuntimeError, NotImplementedError, TypeError, CaptureError) as error:
        raise ValueError(
            f"the step of optimizer {name} cannot be simulated: it calls a closure, needs sparse "
            "gradients, or reads tensors outside its state; use another class of torch.optim."
        ) from error
    states = [x for x in pytree.tree_leaves(calls.state) if isinstance(x, Tensor) and x.is_meta]
    return _Captured(update, tuple((tuple(x.shape), x.dtype) for x in states), bool(assumed.asked))


def _keep_scalars(optimizer: Optimizer, parameter: Tensor) -> None:
    """Replace scalar states by tensors with values, since later steps may read the values."""
    state: dict[str, Any] = optimizer.state[parameter]
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_meta and not value.ndim:
            state[name] = torch.ones((), dtype=value.dtype)


@cache
def priced_update(
    name: str, shape: tuple[int, ...], local: tuple[int, ...], dtype: torch.dtype
) -> PricedUpdate:
    captured = _captured(name, shape, dtype)
    numbers = captured.update.numbers or ()

    def on_meta(full: tuple[int, ...], kind: torch.dtype) -> Tensor:
        return torch.empty(local if full == shape else full, dtype=kind, device="meta")

    states = [on_meta(*state) for state in captured.states]
    if captured.by_values:
        return _by_values(captured.update, _captured(name, local, dtype), sum(map(_size, states)))
    own = [on_meta(shape, dtype), on_meta(shape, dtype), *states]
    parts = cut_update(captured.update, torch.device("meta"))
    gathered = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in parts.gathered]
    back = [on_meta(x.shape, x.dtype) for x in parts.results]
    before = program_of(parts.before, own, numbers)
    core = program_of(parts.core, gathered, numbers)
    after = program_of(parts.after, [*own, *back], numbers)
    held_bytes = sum(x.num_bytes for x in (*parts.gathered, *parts.results))
    extra = peak_memory(core).peak_bytes - held_bytes
    # New values of what is updated in place are written where the old ones are.
    kept = sum(map(_size, own)) - _size(own[1])
    for program, given in ((before, own), (after, [*own, *back])):
        new = kept if program is after else 0
        extra = max(extra, peak_memory(program).peak_bytes - sum(map(_size, given)) - new)
    needs_full = Core(parts, core, held_bytes) if parts.results else None
    return PricedUpdate((before, after), needs_full, sum(map(_size, states)), max(0, extra))


def _by_values(update: Update, on_shard: _Captured, state_bytes: int) -> PricedUpdate:
    """Price an update that runs op by op on shards, with the all-reduces of `update.joined`."""
    count = len(on_shard.update.inputs) - len(on_shard.update.numbers or ())
    values = [node.meta["val"] for node in on_shard.update.inputs[:count]]
    given = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in values]
    part = fx.GraphModule({}, on_shard.update.graph).forward
    program = program_of(part, given, on_shard.update.numbers or ())
    kept = 2 * sum(map(_size, given)) - _size(given[1])
    extra = max(0, peak_memory(program).peak_bytes - kept)
    joined = tuple(_size(x) for x in update.joined)
    return PricedUpdate([program], None, state_bytes, extra, joined)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
