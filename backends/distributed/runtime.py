"""Functions that an emitted module calls: collectives over named mesh axes on torch.distributed.

A collective returns a new tensor and leaves its operand unchanged, unless `in_place` says that the
operand is not read any more. Over axes of size 1 it does nothing, so that a program for one device
needs no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardweave.backends.distributed import in_flight, rows
from shardweave.backends.distributed.in_flight import Group, InFlight, here
from shardweave.backends.optimizers.hook import watch
from shardweave.backends.watch import watchdog
from shardweave.backends.watch.agreement import require_same
from shardweave.ir.dialects.dist import KINDS, CollectiveOp
from shardweave.ir.dialects.dist_ring import join_of_ring
from shardweave.ir.dialects.kernel import FusedOp
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.mesh.shards import cut_out, take_blocks
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Start = Callable[Concatenate["Runtime", Tensor, Sequence[str], _P], InFlight]


def _over_axes(start: Callable[Concatenate[Tensor, Group, _P], InFlight]) -> _Start[_P]:
    """Wrap `start` so that it takes mesh axes by name; axes that join one rank start nothing."""

    @wraps(start)
    def started(
        self: Runtime, x: Tensor, axes: Sequence[str], *args: _P.args, **kwargs: _P.kwargs
    ) -> InFlight:
        group = self.group(axes)
        return here(x) if group is None else start(x, group, *args, **kwargs)

    return started


def _waited(
    start: Callable[Concatenate[Runtime, _P], InFlight],
) -> Callable[Concatenate[Runtime, _P], Tensor]:
    """Make the collective that calls `start` and waits for its result at once."""

    @wraps(start)
    def collective(self: Runtime, *args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        return start(self, *args, **kwargs).wait()

    return collective


class Messages(Protocol):
    """Sends and receives the messages of one micro-batch between stages."""

    def send(self, x: Tensor, to: int, name: str) -> None: ...

    def recv(self, source: int, name: str) -> Tensor: ...


class Runtime:
    """The devices of a mesh as this rank sees them.

    mesh: the mesh that the program is for; None or a mesh of one device needs no
    torch.distributed. device: where this rank computes; by default the current GPU under
    NCCL and else the CPU. processes: for each rank of the mesh, the global rank of its process; by
    default the same number.

    Making one is collective: every rank makes its runtimes in the same order. Raises
    ValueError if the process group is missing or is not of the mesh's size.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        device: torch.device | str | None = None,
        processes: Sequence[int] = (),
    ) -> None:
        self.mesh = mesh or Mesh()
        self.processes = tuple(processes) or tuple(range(self.mesh.num_devices))
        self._groups: dict[tuple[str, ...], Group] = {}
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self._message_groups: dict[tuple[int, int], Any] = {}
        self._host: Any = None
        self.messages: Messages | None = None
        """The messages of the stage function that runs; None outside of one."""
        if self.mesh.num_devices == 1:
            self.rank = 0
            self.device = torch.device(device or "cpu")
            self.device_mesh: DeviceMesh | None = None
        else:
            _check_world(self.mesh, self.processes)
            watchdog.start()
            require_same("the mesh", str(self.mesh), "give every rank the same mesh")
            self.rank = dist.get_rank()
            self.device = torch.device(device or _default_device())
            self.device_mesh = self._device_mesh()
        self.coordinates = self.mesh.coordinates(self.processes.index(self.rank))
        self._of_places = self._processes_of_places()

    def _device_mesh(self) -> DeviceMesh:
        sizes = tuple(axis.size for axis in self.mesh.device_axes)
        names = tuple(axis.name for axis in self.mesh.device_axes)
        if self.processes == tuple(range(self.mesh.num_devices)):
            mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
            return watch(mesh)
        ranks = torch.tensor(self.processes).view(sizes)
        return watch(DeviceMesh(self.device.type, ranks, mesh_dim_names=names))

    def prepare(self, program: Program) -> None:
        """Create the process groups that a program needs before it runs, since this is slow."""
        for part in parts_of(program):
            for op in part.ops:
                if isinstance(op, CollectiveOp):
                    self.group(op.axes)
                elif isinstance(op, FusedOp):
                    self.group(self._axes_in_stage)

    def group(self, axes: Sequence[str]) -> Group | None:
        """Return this rank's group over `axes`; None if it is one rank. Collective at first use."""
        wide = tuple(axis for axis in axes if self.mesh.size(axis) > 1)
        if not wide:
            return None
        if wide not in self._groups:
            self._groups[wide] = self._make_group(wide)
        return self._groups[wide]

    def _make_group(self, axes: tuple[str, ...]) -> Group:
        groups = [[self.processes[rank] for rank in ranks] for ranks in self.mesh.groups(axes)]
        mine = next(ranks for ranks in groups if self.rank in ranks)
        in_mesh_order = tuple(axis.name for axis in self.mesh.device_axes if axis.name in axes)
        if in_mesh_order != axes and in_mesh_order in self._groups:
            process_group = self._groups[in_mesh_order].process_group
        elif len(axes) == 1:
            assert self.device_mesh is not None
            process_group = self.device_mesh.get_group(axes[0])
        elif len(mine) == self.mesh.num_devices:
            process_group = dist.group.WORLD
        else:
            # Every rank takes part in making every group, its own or not.
            made = [dist.new_group(sorted(ranks)) for ranks in groups]
            process_group = made[groups.index(mine)]
        assert isinstance(process_group, dist.ProcessGroup)
        order = tuple(sorted(mine).index(rank) for rank in mine)
        return Group(process_group, tuple(mine), order)

    # Collectives: each starts a message, and returns an `InFlight` for `wait`

    start_all_reduce = _over_axes(in_flight.start_all_reduce)
    start_all_gather = _over_axes(in_flight.start_all_gather)
    start_reduce_scatter = _over_axes(in_flight.start_reduce_scatter)
    start_all_to_all = _over_axes(in_flight.start_all_to_all)
    start_shift = _over_axes(in_flight.start_shift)

    def start_all_reduce_coalesced(
        self, tensors: Sequence[Tensor], axes: Sequence[str], op: str = "sum"
    ) -> list[InFlight]:
        """Start all-reduces of several tensors over `axes`, in one message per dtype."""
        group = self.group(axes)
        if group is None:
            return [here(x) for x in tensors]
        return in_flight.start_all_reduces(tensors, group, op)

    def start_halo(self, x: Tensor, axes: Sequence[str], **halo: Any) -> InFlight:
        """Start extending shards by their neighbours' indices: `dist.halo`, with its arguments."""
        return in_flight.start_halo(x, self.group(axes), **halo)

    def start_halo_add(self, x: Tensor, axes: Sequence[str], **halo: Any) -> InFlight:
        """Start adding to the neighbours' shards: `dist.halo_add`, with its arguments."""
        return in_flight.start_halo(x, self.group(axes), adds=True, **halo)

    def start_fetch_rows(
        self, table: Tensor, numbers: Tensor, routes: Tensor, axes: Sequence[str]
    ) -> InFlight:
        """Start fetching rows, by index, of a table that is sharded over `axes`."""
        group = self.group(axes)
        if group is None:
            return here(table[numbers])
        return rows.start_fetch(table, numbers, routes, group, self.position(axes))

    def start_add_rows(
        self, x: Tensor, numbers: Tensor, routes: Tensor, axes: Sequence[str]
    ) -> InFlight:
        """Start adding rows `x`, by index, into a table of zeros; gives this rank's shard."""
        group = self.group(axes)
        if group is None:
            return here(x.new_zeros((routes.shape[1], *x.shape[1:])).index_add_(0, numbers, x))
        return rows.start_add(x, numbers, routes, group, self.position(axes))

    def start_collective(
        self, kind: str, x: Tensor, axes: Sequence[str], **arguments: Any
    ) -> InFlight:
        """Start a user's collective that is registered as `kind` (`CollectiveOp.on_group`)."""
        group = self.group(axes)
        if group is None:
            return here(x)
        started = KINDS[kind].on_group(x, group, **arguments)
        return started if isinstance(started, InFlight) else here(started)

    def start_to_host(self, x: Tensor, into: Tensor | None = None) -> InFlight:
        """Start copying a tensor to the host's memory, to `into` or a new tensor."""
        return in_flight.start_copy(x, torch.device("cpu"), into)

    def start_to_device(self, x: Tensor) -> InFlight:
        """Start copying a tensor from the host's memory back to this rank's device."""
        return in_flight.start_copy(x, self.device)

    wait = staticmethod(InFlight.wait)

    # The same collectives, waited for at once

    all_reduce = _waited(start_all_reduce)
    all_gather = _waited(start_all_gather)
    reduce_scatter = _waited(start_reduce_scatter)
    all_to_all = _waited(start_all_to_all)
    shift = _waited(start_shift)
    halo = _waited(start_halo)
    halo_add = _waited(start_halo_add)
    fetch_rows = _waited(start_fetch_rows)
    add_rows = _waited(start_add_rows)
    to_host = _waited(start_to_host)
    to_device = _waited(start_to_device)

    def collective(self, kind: str, x: Tensor, axes: Sequence[str], **arguments: Any) -> Tensor:
        """Run `start_collective` and wait for its result."""
        return self.start_collective(kind, x, axes, **arguments).wait()

    def all_reduce_coalesced(
        self, tensors: Sequence[Tensor], axes: Sequence[str], op: str = "sum"
    ) -> list[Tensor]:
        return [transfer.wait() for transfer in self.start_all_reduce_coalesced(tensors, axes, op)]

    def all_reduce_in_place(self, tensors: Sequence[Tensor], axes: Sequence[str]) -> None:
        """Sum dense tensors over `axes` in place, without a second copy of large ones."""
        group = self.group(axes)
        if group is not None:
            in_flight.all_reduce_in_place(tensors, group)

    # Stages

    @property
    def place(self) -> int:
        """This rank's coordinate on the stage axis; 0 without one."""
        axis = self.mesh.stage_axis
        return 0 if axis is None else self.coordinates[axis.name]

    @property
    def _axes_in_stage(self) -> tuple[str, ...]:
        """The axes along which ranks run the same functions."""
        return tuple(axis.name for axis in self.mesh.device_axes if axis != self.mesh.stage_axis)

    def agreed_on_stage(self, choose: Callable[[], _T]) -> _T:
        """Return the choice of the first rank that runs the same functions as this one; only that
        rank calls `choose`. The choice must be picklable. Collective among these ranks."""
        group = self.group(self._axes_in_stage)
        if group is None:
            return choose()
        first = group.ranks[0]
        chosen = [choose() if self.rank == first else None]
        dist.broadcast_object_list(chosen, src=first, group=group.process_group)
        return cast("_T", chosen[0])

    def rank_at(self, place: int) -> int:
        """Return the global rank at `place` of the stage axis with our other coordinates."""
        return self._of_places[place]

    def _processes_of_places(self) -> tuple[int, ...]:
        """Compute `rank_at` of each coordinate on the stage axis."""
        axis = self.mesh.stage_axis
        if axis is None:
            return (self.rank,)
        own = ({**self.coordinates, axis.name: place} for place in range(axis.size))
        return tuple(self.processes[self.mesh.rank(at)] for at in own)

    def group_at(self, places: Sequence[int]) -> Group | None:
        """Return the group of ranks at `places` on the stage axis with this rank's other
        coordinates. None if `places` is one coordinate, or lacks this rank's. Collective at first
        use."""
        axis = self.mesh.stage_axis
        if axis is None or len(places) == 1:
            return None
        device_mesh = self.mesh_at(places)
        if self.place not in places:
            return None
        ranks = tuple(self.rank_at(place) for place in places)
        order = tuple(sorted(ranks).index(rank) for rank in ranks)
        return Group(device_mesh.get_group(axis.name), ranks, order)

    def mesh_at(self, places: Sequence[int]) -> DeviceMesh:
        """Return the DeviceMesh of the devices at `places`. Collective at first use."""
        assert self.device_mesh is not None
        axis = self.mesh.stage_axis
        if axis is None or len(places) == axis.size:
            return self.device_mesh
        key = tuple(places)
        if key not in self._meshes:
            names = self.device_mesh.mesh_dim_names
            assert names is not None
            ranks = self.device_mesh.mesh.index_select(names.index(axis.name), torch.tensor(key))
            mesh = DeviceMesh(self.device.type, ranks, mesh_dim_names=names)
            self._meshes[key] = watch(mesh)
        return self._meshes[key]

    @property
    def groups_messages(self) -> bool:
        """True if each direction between two ranks needs a process group of its own."""
        return self.device_mesh is not None and "nccl" in dist.get_backend()

    def message_groups(self, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Any]:
        """Return the process groups of this rank's messages, by (sender, receiver). places: pairs
        of coordinates on the stage axis (sender, receiver), in the same order on all ranks. Empty
        if the default group suffices. Collective."""
        if not self.groups_messages:
            return {}
        inner = self.mesh.within_stage
        axis = self.mesh.stage_axis
        assert axis is not None
        for pair in places:
            for rank in range(inner.num_devices):
                at = inner.coordinates(rank)
                source, goal = (
                    self.processes[self.mesh.rank({**at, axis.name: place})] for place in pair
                )
                if (source, goal) not in self._message_groups:
                    # Every rank takes part in making every group, its own or not.
                    self._message_groups[source, goal] = dist.new_group([source, goal])
        return {pair: group for pair, group in self._message_groups.items() if self.rank in pair}

    def send(self, x: Tensor, to: int, name: str) -> None:
        """Send a tensor to this rank's counterpart in stage `to`."""
        assert self.messages is not None
        self.messages.send(x, to, name)

    def recv(self, source: int, name: str) -> Tensor:
        """Receive the tensor `name` from this rank's counterpart in stage `source`."""
        assert self.messages is not None
        return self.messages.recv(source, name)

    @staticmethod
    def added(given: Mapping[tuple[str, str], Tensor], key: tuple[str, str], x: Tensor) -> Tensor:
        """Add gradient `x` in place to the caller's tensor `given[key]`, and return that tensor;
        return `x` itself if `given` has no tensor for the key."""
        into = given.get(key)
        return x if into is None else into.add_(x)

    @staticmethod
    def added_product(
        given: Mapping[tuple[str, str], Tensor], key: tuple[str, str], left: Tensor, right: Tensor
    ) -> Tensor:
        """Add the product of two matrices to a gradient, as `added` adds a tensor."""
        into = given.get(key)
        return torch.mm(left, right) if into is None else into.addmm_(left, right)

    @staticmethod
    def added_to(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Add the product of two matrices to `total` in place, and return it."""
        return total.addmm_(left, right)

    @staticmethod
    def rows(x: Tensor) -> int:
        """Return the number of rows of a ragged value on this rank."""
        return x.shape[0]

    def numbers_of_ranks(self, own: Sequence[int]) -> list[list[int]]:
        """Gather the numbers of all ranks, by global rank, in host memory. Collective."""
        if self._host is None and "nccl" in dist.get_backend():
            self._host = dist.new_group(backend="gloo")
        sent = torch.tensor(own, dtype=torch.int64)
        told = [torch.empty_like(sent) for _ in range(self.mesh.num_devices)]
        dist.all_gather(told, sent, group=self._host)
        return [numbers.tolist() for numbers in told]

    # This rank's position

    def position(self, axes: Sequence[str]) -> int:
        """Return this rank's position among the ranks of `axes`, the first axis slowest."""
        return self.mesh.position(axes, self.coordinates)

    def slice(self, x: Tensor, axes: Sequence[str], dim: int, block: int) -> Tensor:
        """Return this rank's shard along `dim` of a tensor that is replicated over `axes`."""
        return cut_out(x, dim, self.mesh.sizes(axes), block, self.position(axes))

    def ring_slice(self, x: Tensor, axes: Sequence[str], dim: int, block: int, turn: int) -> Tensor:
        """Return the shard along `dim` of the rank that is `turn` positions further."""
        size = self.mesh.sizes(axes)
        return take_blocks(x, dim, size, block, (self.position(axes) + turn) % size)

    def ring_join(self, *blocks: Tensor, axes: Sequence[str], dim: int, block: int) -> Tensor:
        """Join the blocks that this rank held at turns 0, 1, .. along `dim`."""
        return join_of_ring(blocks, self.position(axes), dim, block)

    def shard_index(self, axes: Sequence[str], device: str | None = None) -> Tensor:
        """Return `position` as a scalar int64 tensor, by default on this rank's device."""
        index = self.position(axes)
        return torch.full((), index, dtype=torch.int64, device=device or self.device)


def _default_device() -> torch.device:
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _check_world(mesh: Mesh, processes: Sequence[int]) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"mesh {mesh} has {mesh.num_devices} devices, but torch.distributed is not "
            "initialized here; start one process for each device (torchrun --nproc-per-node "
            f"{mesh.num_devices} ...) and call torch.distributed.init_process_group() first."
        )
    if dist.get_world_size() != mesh.num_devices:
        raise ValueError(
            f"mesh {mesh} has {mesh.num_devices} devices, but {dist.get_world_size()} processes "
            "run; start one process for each device."
        )
    if sorted(processes) != list(range(mesh.num_devices)):
        raise ValueError(
            f"the program is for devices {list(processes)}, but the processes are numbered 0 to "
            f"{mesh.num_devices - 1}; use these numbers in the plan's 'ranks'."
        )
