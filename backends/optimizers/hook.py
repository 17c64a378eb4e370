"""Hooks that run the steps of torch's optimizers on the shards of sharded parameters.

Without these hooks DTensor would run an optimizer's code op by op: slowly, with errors for some
optimizers, and with results that differ from one process's for others (`torch.optim.Muon`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardweave.backends.optimizers.host_states import (
    Copies,
    bring,
    copies_of,
    groups_of,
    keep_states,
    stream,
    without_parameters,
)
from shardweave.backends.optimizers.owned_step import run_owned
from shardweave.backends.optimizers.owners import Owned, owned_updates
from shardweave.backends.optimizers.repoint import check_not_replaced
from shardweave.backends.optimizers.shards import is_everywhere, shapes_of_shards
from shardweave.backends.optimizers.spread import GATHERED
from shardweave.backends.optimizers.stand_ins import StandIns
from shardweave.ir.capture.update.ops_seen import OwnMessagesError, is_torchs
from shardweave.ir.capture.update.reads import Reads, Sizes, reads_of, run_step
from shardweave.ir.notes import warn
from shardweave.ir.torch_private import step_hooks


class OptimizerNote(UserWarning):
    """Warns that an optimizer's step gathers full values, as its update is not elementwise."""


class _Running(NamedTuple):
    """A running step. args: its call's arguments, compared by identity. ends: called after it."""

    args: tuple[Any, ...]
    ends: Sequence[Callable[[], None]]


_KEY = -1
"""Key of `_before` and `_after` among an optimizer's hooks; torch's keys are not negative."""

_MESHES: dict[int, ref[DeviceMesh]] = {}
_RUNNING: list[_Running] = []
"""The step that is running, if any; at most one. A step that raised an error stays here."""

_KNOWN: WeakKeyDictionary[Optimizer, tuple[Any, Reads]] = WeakKeyDictionary()
"""By optimizer: the reads of its last step, and the settings on which they depend."""


def watch(mesh: DeviceMesh) -> DeviceMesh:
    """Handle steps of optimizers with parameters on this mesh from now on; returns the mesh."""
    _register()
    _MESHES[id(mesh)] = ref(mesh)
    return mesh


def keep_states_on_host(parameters: Iterable[Tensor], copies: Copies) -> None:
    """Keep these parameters' optimizer states on the host between updates from now on."""
    _register()
    keep_states(parameters, copies)


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_hook_innermost)


def _hook_innermost(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make `_before` the last of all pre-hooks, and `_after` the first of all post-hooks: hooks of
    users then run before and after the whole update. Torch runs an optimizer's own hooks between
    the global ones."""
    del args, kwargs
    before, after = step_hooks(optimizer)
    if next(reversed(before), None) != _KEY:
        before.pop(_KEY, None)
        before[_KEY] = _before
    if next(iter(after), None) != _KEY:
        others = {key: hook for key, hook in after.items() if key != _KEY}
        after.clear()
        after.update({_KEY: _after, **others})


def _is_ours(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    known = _MESHES.get(id(parameter.device_mesh))
    return known is not None and known() is parameter.device_mesh


def _before(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Prepare a step; returns the arguments for torch to call it with, a stand-in first."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_sharded, copies = any(map(_is_ours, parameters)), copies_of(parameters)
    if not is_sharded:
        check_not_replaced(parameters)
        if copies is None or _is_nested():
            return None
    has_closure = _closure_of(args, kwargs) is not None
    has_gradient = _have_gradients(parameters, has_closure=has_closure)
    reads = Reads(frozenset(), frozenset())
    if is_sharded:
        reads = _reads(optimizer, parameters, has_gradient, has_closure=has_closure)
        _check_not_nested(optimizer)
    ends: list[Callable[[], None]] = []
    if copies is not None:
        if is_torchs(optimizer) and not (reads.full or has_closure):
            stream(optimizer, parameters, groups_of(parameters, has_gradient), copies, _update)
            return (without_parameters(optimizer), *args[1:]), kwargs
        ends.append(bring(optimizer, parameters, copies))
    if is_sharded:
        stand_ins, own_ends = _stand_ins(optimizer, parameters, reads, has_gradient, has_closure)
        args, kwargs = _replaced(stand_ins, args, kwargs)
        ends[:0] = own_ends
    _RUNNING[:] = [_Running(args, ends)]
    return args, kwargs


def _closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    return args[1] if len(args) > 1 else kwargs.get("closure")


def _stand_ins(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    reads: Reads,
    has_gradient: Sequence[bool],
    has_closure: bool,
) -> tuple[StandIns, list[Callable[[], None]]]:
    """Run the updates that owners compute; returns stand-ins for the others, and functions to call
    after the step. Collective."""
    owned: dict[int, Owned] = {}
    if reads.full and not has_closure:
        owned = owned_updates(optimizer, parameters, _sizes(parameters), reads, has_gradient)
    if owned:
        run_owned(optimizer, list(owned.values()))
        has_gradient = [has and i not in owned for i, has in enumerate(has_gradient)]
    GATHERED.clear()
    stand_ins = StandIns(optimizer, parameters, reads.full - owned.keys(), has_gradient)
    ends = [stand_ins.give_back, partial(_note, optimizer)]
    if reads.may_draw:
        ends.append(_shared_random_state(parameters[0].device))
    return stand_ins, ends


def _replaced(
    stand_ins: StandIns, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the optimizer and the closure in a step's arguments."""
    own = _closure_of(args, kwargs)
    new = None if own is None else stand_ins.closure(own)
    others = [new if x is own else x for x in args[1:]]
    named = {name: new if x is own else x for name, x in kwargs.items()}
    return (stand_ins.first, *others), named


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    del optimizer, kwargs
    if _RUNNING and _RUNNING[0].args is args:
        for end in _RUNNING.pop().ends:
            end()


def _update(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    """Run the step of an optimizer that has these parameters alone; each has a gradient."""
    stand_ins = StandIns(optimizer, parameters, (), [True] * len(parameters))
    run_step(stand_ins.first)
    stand_ins.give_back()


def _check_not_nested(optimizer: Optimizer) -> None:
    """Raises ValueError if another optimizer's running step calls this optimizer's step, since both
    would update parameters that the other has copied."""
    if _is_nested():
        outer = type(_RUNNING[0].args[0]).__name__
        raise ValueError(
            f"the step of optimizer {outer} calls the step of {type(optimizer).__name__}, "
            f"which is not an attribute of it; make it an attribute of {outer}, or call both "
            "steps in the training loop."
        )


def _is_nested() -> bool:
    """True if the running step calls this one."""
    frame = inspect.currentframe() if _RUNNING else None
    while frame is not None and frame.f_locals.get("args") is not _RUNNING[0].args:
        frame = frame.f_back
    return frame is not None


def _have_gradients(parameters: Sequence[Tensor], *, has_closure: bool) -> list[bool]:
    """Return for each parameter whether it has a gradient on any rank. Collective with stages."""
    has = [has_closure or parameter.grad is not None for parameter in parameters]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if has_closure or all(is_everywhere(parameter.device_mesh) for parameter in sharded):
        return has
    flags = torch.tensor(has, dtype=torch.int32, device=sharded[0].device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def _shared_random_state(device: torch.device) -> Callable[[], None]:
    """Give every rank the generator state of rank 0. Collective. Returns a function to call after
    the step, which restores this rank's state if it differed."""
    cuda = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else None
    own = [torch.get_rng_state(), *([] if cuda is None else [torch.cuda.get_rng_state(cuda)])]

    def set_states(states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if cuda is not None:
            torch.cuda.set_rng_state(states[1], cuda)

    states = [state.to(device) for state in own]
    for state in states:
        dist.broadcast(state, src=0)
    first = [state.cpu() for state in states]
    set_states(first)
    if all(map(torch.equal, own, first)):
        return lambda: None
    return lambda: set_states(own)


# What a step reads


def _reads(
    optimizer: Optimizer,
    parameters: Sequence[Tensor],
    has_gradient: Sequence[bool],
    *,
    has_closure: bool,
) -> Reads:
    """Find the tensors that each update of the next step reads; cached for torch's optimizers."""
    sharded = frozenset(i for i, p in enumerate(parameters) if isinstance(p, DTensor))
    is_known = is_torchs(optimizer)
    if has_closure and not is_known:
        return Reads(sharded, sharded, "its step calls a closure")
    key = (tuple(has_gradient), has_closure, tuple(map(_settings, optimizer.param_groups)))
    known = _KNOWN.get(optimizer)
    if known is not None and is_known and known[0] == key:
        return known[1]
    sizes = _sizes(parameters)
    try:
        reads = reads_of(optimizer, parameters, sizes, has_gradient, has_closure=has_closure)
    except OwnMessagesError as error:
        raise ValueError(
            f"the step of {type(optimizer).__name__} communicates itself ({error}), but "
            "shardweave does that for it; use its single-process version, such as "
            "SingleDeviceMuon."
        ) from error
    _KNOWN[optimizer] = key, reads
    return reads


def _sizes(parameters: Sequence[Tensor]) -> list[Sizes]:
    return [
        Sizes(tuple(p.shape), *shapes_of_shards(p) if isinstance(p, DTensor) else (p.shape,) * 2)
        for p in parameters
    ]


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    settings = ((key, group[key]) for key in sorted(group) if key != "params")
    kinds = (bool, str, type(None))
    return (
        tuple(map(id, group["params"])),
        tuple((key, value) for key, value in settings if isinstance(value, kinds)),
    )


_NOTED: WeakSet[Optimizer] = WeakSet()


def _note(optimizer: Optimizer) -> None:
    """Warn once, on rank 0, if an optimizer's step has gathered full values."""
    if GATHERED and optimizer not in _NOTED and dist.get_rank() == 0:
        warn(
            f"every step of {type(optimizer).__name__} gathers full tensors on each rank, since it "
            f"calls {', '.join(dict.fromkeys(GATHERED))}, which cannot run on shards.",
            OptimizerNote,
        )
    if GATHERED:
        _NOTED.add(optimizer)
