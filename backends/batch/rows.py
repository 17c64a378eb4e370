"""Global batches: each rank gives its own rows, such as from a `DistributedSampler`.

Ranks exchange their numbers of rows before each call, since the program depends on them. As in DDP,
each rank computes a loss of its own rows of an output, and differentiates that; gradients are the
mean over ranks, here weighted by their numbers of rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardweave.backends.distributed.layout import as_dtensor
from shardweave.backends.distributed.runtime import Runtime
from shardweave.backends.optimizers.shards import is_everywhere
from shardweave.backends.state.on_whole import ROW_AXES
from shardweave.backends.step.step_call import StepCall
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import (
    AgreementError,
    digest_of,
    gathered_from_ranks,
    who_has_what,
)
from shardweave.ir.dialects.types import dtype_word, form_of
from shardweave.ir.mesh.mesh import Mesh, whole_axis
from shardweave.ir.mesh.placement import Sharding, contiguous
from shardweave.planners.plan.zero import BATCH_AXES

LOCAL, GLOBAL = "local", "global"
"""The two kinds of inputs: a rank's own rows, or the global batch, the same on all ranks."""

_SAME_ROWS = ("tensor", "context", "space")
"""Mesh axes whose ranks work on the same rows, besides the stage axis."""

_ADVICE = "pad inputs to one length on all ranks, as only the number of rows may differ"


def axes_of_rows(mesh: Mesh, cut: Collection[str] = ()) -> tuple[str, ...]:
    """Return the mesh axes along which ranks have different rows: `replica`, `data` and `cut`, and
    their sub-axes, except `tensor`, `context`, `space` and stages. cut: the axes over which a plan
    shards dim 0 of inputs."""
    chosen = {*BATCH_AXES, *cut}.difference(_SAME_ROWS)
    space = [axis for axis in mesh.device_axes if axis.kind == "space" and axis.size > 1]
    return tuple(a.name for a in space if not chosen.isdisjoint((a.name, whole_axis(a.name))))


def names_of_rows(inputs: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the inputs that hold rows: plain tensors with the most common length of dim 0."""
    lengths = {n: t.shape[0] for n, t in inputs.items() if t.ndim and not isinstance(t, DTensor)}
    most = Counter(lengths.values()).most_common(1)
    return frozenset(name for name, length in lengths.items() if length == most[0][0])


def grown(call: StepCall, mesh: Mesh) -> StepCall:
    """Return the call for the global batch: rows repeated once per rank along the axes of rows."""
    count, rows = math.prod(mesh.size(axis) for axis in axes_of_rows(mesh)), {}
    for name in names_of_rows(call.inputs):
        tensor = call.inputs[name]
        repeated = tensor.detach().repeat(count, *[1] * (tensor.ndim - 1))
        rows[name] = repeated.requires_grad_(tensor.requires_grad)
    return replace(call, inputs={**call.inputs, **rows})


@dataclass(frozen=True)
class Rows:
    """The number of rows of a global batch that each rank gives.

    counts: by position along `axes`, in row order. place: this rank's position.
    """

    runtime: Runtime
    axes: tuple[str, ...]
    counts: tuple[int, ...]
    place: int

    @property
    def total(self) -> int:
        """Number of rows of the global batch."""
        return sum(self.counts)

    @property
    def own(self) -> int:
        """Number of rows of this rank."""
        return self.counts[self.place]

    @property
    def share(self) -> float:
        """This rank's fraction of the rows."""
        return self.own / self.total

    @property
    def is_even(self) -> bool:
        """True if all ranks have equally many rows."""
        return len(set(self.counts)) == 1

    def joined(self, tensor: Tensor) -> Tensor:
        """Make the global tensor from this rank's rows: a DTensor, without communication; or, if
        ranks have different numbers of rows, a replicated tensor, by gathering. Collective."""
        return _Joined.apply(tensor, self) if tensor.requires_grad else self._joined(tensor)  # pyright: ignore[reportReturnType]

    def _joined(self, tensor: Tensor) -> Tensor:
        runtime, local = self.runtime, tensor.detach().to(self.runtime.device)
        if self.is_even:
            dim = contiguous(self.axes, self.total, runtime.mesh)
            return as_dtensor(local, Sharding((dim, *((),) * (tensor.ndim - 1))), runtime)
        most = max(self.counts)
        padded = local.new_zeros(most, *local.shape[1:])
        padded[: self.own] = local
        for axis in reversed(self.axes):  # the first axis is the slowest
            padded = runtime.all_gather(padded, (axis,), 0, padded.shape[0])
        return torch.cat([p[:n] for p, n in zip(padded.split(most), self.counts, strict=True)])

    def own_of(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows of a global tensor as a plain tensor. Collective."""
        if isinstance(tensor, DTensor) and self.is_even and is_everywhere(tensor.device_mesh):
            names = tensor.device_mesh.mesh_dim_names
            assert names is not None
            goal = [Shard(0) if name in self.axes else Replicate() for name in names]
            return tensor.redistribute(placements=goal).to_local()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.narrow(0, sum(self.counts[: self.place]), self.own)

    def joined_gradient(self, gradient: Tensor) -> Tensor:
        """Make the global gradient of an output from the ranks' gradients of their own losses, each
        weighted by its `share`. Collective."""
        return self.joined(gradient * self.share)

    def split(self, count: int) -> Rows:
        """Return the `Rows` of each of `count` micro-batches. Raises ValueError if ranks have
        different numbers of rows."""
        if not self.is_even:
            raise ValueError(
                f"accumulate={count} needs the same number of rows on every rank, but ranks have "
                f"{list(self.counts)} rows; call the step for each micro-batch, under no_sync()."
            )
        return replace(self, counts=tuple(number // count for number in self.counts))


class _Joined(torch.autograd.Function):
    """Joins rows that require a gradient; its backward returns the gradient of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Rows) -> Tensor:
        ctx.rows, ctx.device = rows, tensor.device
        return rows._joined(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = ctx.rows.own_of(gradient)
        return (own / ctx.rows.share if ctx.rows.own else own).to(ctx.device), None


class LocalRows:
    """Makes the call of the global batch from the calls that ranks make with their own rows.

    axes: mesh axes along which ranks have different rows. example: the example inputs, which tell
    the inputs with rows from others.
    """

    def __init__(
        self, runtime: Runtime, axes: tuple[str, ...], example: Mapping[str, Tensor]
    ) -> None:
        self.runtime = runtime
        self.axes = axes
        ROW_AXES.update(axes)
        self._known = dict.fromkeys(example, False)
        self._known |= dict.fromkeys(names_of_rows(example), True)
        mesh = runtime.mesh
        self._places = {
            process: mesh.position(axes, mesh.coordinates(rank))
            for rank, process in enumerate(runtime.processes)
        }
        self._numbers: dict[Any, int] = {}

    def joined(self, call: StepCall) -> StepCall:
        """Make the call of the global batch. Raises AgreementError on every rank if calls differ in
        more than the number of rows, or if ranks that must have the same rows differ in their
        number. Collective."""
        names, new = self._names(call.inputs)
        lengths = {call.inputs[name].shape[0] for name in names}
        if len(lengths) > 1:
            forms = ", ".join(f"{name} {form_of(call.inputs[name])}" for name in sorted(names))
            raise ValueError(
                f'batch="local": inputs have different numbers of rows: {forms}; give all one '
                "number."
            )
        if not names:
            return call
        (length,) = lengths
        watchdog.approach(call)
        as_long = [int(call.inputs[name].shape[0] == length) for name in new]
        told = self.runtime.numbers_of_ranks([length, self._number(call, names), *as_long])
        if len({number for _, number, *_ in told}) > 1:
            words = dict(enumerate(gathered_from_ranks(_words(call, names, new))))
            raise AgreementError(f"ranks differ in the call: {who_has_what(words)}; {_ADVICE}.")
        names |= {name for index, name in enumerate(new) if all(each[2 + index] for each in told)}
        counts: dict[int, int] = {}
        for process, (count, *_) in enumerate(told):
            if counts.setdefault(self._places[process], count) != count:
                words = {rank: f"{number} rows" for rank, (number, *_) in enumerate(told)}
                raise AgreementError(
                    f"ranks that must have the same rows differ: {who_has_what(words)}; "
                    f"{self.advice}."
                )
        place = self.runtime.position(self.axes)
        rows = Rows(self.runtime, self.axes, tuple(counts[n] for n in sorted(counts)), place)
        if not rows.total:
            raise ValueError("all ranks have an empty batch in this call; skip the call.")
        # In the same order on every rank: each tensor is a message, and a set has no order.
        whole = {n: rows.joined(x) if n in names else x for n, x in call.inputs.items()}
        return replace(call, inputs=whole, rows=rows)

    @property
    def advice(self) -> str:
        """Advice for a message: ranks that must give the same rows gave different ones."""
        axes = ", ".join(f"'{axis}'" for axis in self.axes)
        return f"give the same rows on ranks with equal coordinates on {axes}"

    def _names(self, inputs: Mapping[str, Tensor]) -> tuple[frozenset[str], list[str]]:
        """Return the inputs that hold rows, and the inputs that the example lacks. The latter hold
        rows if on every rank they are as long as the former."""
        plain = {n: t for n, t in inputs.items() if t.ndim and not isinstance(t, DTensor)}
        names = frozenset(name for name in plain if self._known.get(name))
        new = [name for name in plain if name not in self._known]
        return (names, new) if names else (names_of_rows({n: plain[n] for n in new}), [])

    def _number(self, call: StepCall, names: Collection[str]) -> int:
        """Digest a call, except for its number of rows, to a number; cached by `call.key`."""
        key = call.key
        if key not in self._numbers:
            words = _words(call, names, self._names(call.inputs)[1])
            self._numbers[key] = int(digest_of(words.encode())[:15], 16)
        return self._numbers[key]


def _words(call: StepCall, names: Collection[str], new: Collection[str]) -> str:
    """Describe a call without its number of rows. names, new: as from `LocalRows._names`."""
    tensors = [
        f"{name} {_form_of_row(tensor) if name in names or name in new else form_of(tensor)}"
        for name, tensor in call.inputs.items()
    ]
    constants = [f"{name}={value!r}" for name, value in call.form.constants]
    return f"{', '.join([*tensors, *constants])} in {call.mode}"


def _form_of_row(tensor: Tensor) -> str:
    sizes = ", ".join(["rows", *map(str, tensor.shape[1:])])
    return f"({sizes}) {dtype_word(tensor.dtype)}"
