"""Costs of a program's blocks under each partition of the search space, each computed once.

`cuts` lists the partitions. Recomputation and pipeline stages change no block's own cost, and need
no partition of their own.

For a model of many equal blocks, a program with a few of them (`prepare/fewer_blocks`) is used
instead, and its middle block stands for the removed ones: exact if blocks are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from shardweave.ir.dialects.types import num_bytes, tensor_type_of
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.blocks import blocks_of
from shardweave.ir.program.program import Program
from shardweave.passes.prepare.fewer_blocks import with_fewer_blocks
from shardweave.planners.auto.space.cuts import cut_plan, expert_share
from shardweave.planners.auto.space.point import ReplicaCut
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import divisors
from shardweave.planners.cost.workload import BlockWork, Workload, batch_of, workload_of
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.plan.plan import Plan
from shardweave.planners.plan.zero import DATA_AXIS

FEW = 3
"""Blocks of the short program for a deep model: the first, one for all others, the last."""

MORE = 6
"""Blocks of a second, longer program, for extrapolation: two for each kind of stage."""

ROWS_READ = (1, 4)
"""Rows (samples) of a micro-batch for which a deep model's costs are read; others are interpolated,
because large ops take time linear in the rows. For other models all are read."""

RECENT_FEW = 48
"""Most programs with few blocks to cache, about 2 MB each: simulations reuse the programs from
which costs were read."""

REPEATING = ("layer", "after-communication")
"""Policies that recompute a known share of each block's forward pass, so that the block's costs
tell the cost of recomputation. Other policies need partitions of their own."""

DEEP = 8
"""Most equal blocks with which a model is read whole; a deeper one is read by a few blocks."""


@dataclass(frozen=True)
class Depths:
    """A program and, if it has many equal blocks (`names`), shorter versions with fewer of them."""

    program: Program
    few: Program | None
    more: Program | None
    names: tuple[str, ...]

    @staticmethod
    def of(program: Program, deep: int = DEEP) -> Depths:
        names = blocks_of(program).names
        more = with_fewer_blocks(program, MORE) if len(names) > deep else None
        few = with_fewer_blocks(more, FEW) if more is not None else None
        return Depths(program, few, more, names)

    @property
    def is_deep(self) -> bool:
        return self.few is not None

    @property
    def read(self) -> Program:
        return self.few or self.program

    @property
    def priced(self) -> tuple[Program, ...]:
        """Programs to simulate plans on: those with few and more blocks, or the whole program."""
        if self.few is None or self.more is None:
            return (self.program,)
        return self.few, self.more

    @property
    def copies(self) -> Mapping[str, tuple[str, ...]]:
        """Maps each block of the program read to the equal blocks that it stands for."""
        return {self.names[FEW - 2]: self.names[FEW - 1 : -1]} if self.is_deep else {}

    def deepened(self, work: Workload) -> Workload:
        """Expand the costs of the program read to the costs of the whole program."""
        if not self.is_deep:
            return work
        places = [index for index, block in enumerate(work.blocks) if block.name in self.names]
        middle = places[FEW - 2]
        missing = self.names[FEW - 1 : -1]
        like = work.blocks[middle]
        added = [replace(like, name=name, layers=(name,)) for name in missing]
        blocks = (*work.blocks[: middle + 1], *added, *work.blocks[middle + 1 :])
        shift = len(added)
        shared = tuple(
            replace(s, first=_moved(s.first, middle, shift), second=_moved(s.second, middle, shift))
            for s in work.shared
        )
        return replace(work, blocks=blocks, shared=shared)


def _moved(index: int, middle: int, shift: int) -> int:
    return index + shift if index > middle else index


@dataclass(frozen=True)
class PieceCost:
    """Costs by block of one micro-batch (or sub-batch) on a rank.

    forward_s, backward_s: compute on the slowest device type; recomputation by `REPEATING`
    policies is not included, that of other policies is part of the backward pass.
    inside_forward_s, inside_backward_s: messages within a replica. Bytes: as in `BlockWork`.
    """

    blocks: tuple[BlockWork, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    inside_forward_s: tuple[float, ...]
    inside_backward_s: tuple[float, ...]
    itemsize: int

    @cached_property
    def repeated(self) -> tuple[bool, ...]:
        return tuple(block.is_repeated for block in self.blocks)

    @cached_property
    def sums(self) -> Mapping[str, float]:
        """Totals over all blocks, totals over repeated blocks and the largest block, by name."""
        sums: dict[str, float] = {}
        rows = {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "inside_forward": self.inside_forward_s,
            "inside_backward": self.inside_backward_s,
            "parameters": [float(block.parameter_bytes) for block in self.blocks],
            "kept": [float(block.kept_bytes) for block in self.blocks],
            "crossing": [float(block.crossing_bytes) for block in self.blocks],
        }
        for name, row in rows.items():
            sums[name] = sum(row)
            sums[f"repeated {name}"] = sum(
                x for x, is_in in zip(row, self.repeated, strict=True) if is_in
            )
            sums[f"largest {name}"] = max(row, default=0.0)
        sums["workspace"] = max((float(b.workspace_bytes) for b in self.blocks), default=0.0)
        return sums

    def passes_s(self, recompute: str, share: float = 1.0) -> list[float]:
        """Seconds of both passes of each block, with all messages exposed. share: fraction of the
        repeated blocks to which policy `recompute` applies, spread evenly over them."""
        rows = zip(
            self.forward_s,
            self.backward_s,
            self.inside_forward_s,
            self.inside_backward_s,
            self.repeated,
            strict=True,
        )
        again = {"layer": (1.0, 1.0), "after-communication": (0.75, 0.0)}
        compute, inside = again[recompute] if recompute in REPEATING else (0.0, 0.0)
        compute, inside = share * compute, share * inside
        return [
            forward
            + backward
            + there
            + back
            + ((compute * forward + inside * there) if is_in else 0)
            for forward, backward, there, back, is_in in rows
        ]


@dataclass(eq=False)
class CostReader:
    """Computes costs of a program's blocks on a cluster, for each partition once.

    num_partitions: number of partitions made so far.
    """

    depths: Depths
    cluster: Cluster
    expert_load: float = 1.0
    lowerings: Lowerings = field(init=False)
    num_partitions: int = 0
    _known: dict[tuple[ReplicaCut, int, str], PieceCost] = field(
        default_factory=dict[tuple[ReplicaCut, int, str], PieceCost]
    )
    _expert_shares: dict[ReplicaCut, float] = field(default_factory=dict[ReplicaCut, float])
    _bases: dict[tuple[int, int, ReplicaCut, int], Plan] = field(
        default_factory=dict[tuple[int, int, ReplicaCut, int], Plan]
    )

    def __post_init__(self) -> None:
        most = RECENT_FEW if self.depths.is_deep else RECENT
        self.lowerings = Lowerings(self.depths.read, most=most)
        self.batch = batch_of(self.depths.program)

    @cached_property
    def parameter_bytes(self) -> tuple[int, ...]:
        slots = self.depths.program.arguments
        return tuple(num_bytes(tensor_type_of(s.value)) for s in slots if s.kind == "param")

    def base(self, program: Program, data: int, cut: ReplicaCut, replica: int = 1) -> Plan:
        """Make a Megatron plan with `data` x `replica` copies of the model, each sharded as `cut`
        says. program: the captured one, or one with fewer of its blocks."""
        key = id(program), data, cut, replica
        if key not in self._bases:
            base = cut_plan(program, data, cut, replica)
            self._bases[key] = replace(base, expert_load=self.expert_load)
        return self._bases[key]

    def expert_share(self, cut: ReplicaCut) -> float:
        """Share of a device's parameter bytes in parameters that the expert axis shards."""
        if cut not in self._expert_shares:
            program = self.depths.program
            self._expert_shares[cut] = expert_share(program, self.base(program, 1, cut), cut)
        return self._expert_shares[cut]

    def cost(self, cut: ReplicaCut, rows: int, recompute: str = "none") -> PieceCost:
        """Costs of `rows` samples, with the replica sharded as `cut`. ValueError if impossible."""
        recompute = "none" if recompute in REPEATING else recompute
        key = cut, rows, recompute
        if key not in self._known:
            read = self._rows_read(cut)
            if rows in read:
                self._known[key] = self._read(cut, rows, recompute)
            else:
                low, high = _around(rows, read)
                before, after = self.cost(cut, low, recompute), self.cost(cut, high, recompute)
                self._known[key] = _between(before, after, (rows - low) / (high - low))
        return self._known[key]

    def _rows_read(self, cut: ReplicaCut) -> list[int]:
        """Numbers of rows whose costs are read; costs of other numbers are interpolated."""
        rows = divisors(self.batch // cut.expert)
        few = [n for n in rows if n in ROWS_READ]
        return few if self.depths.is_deep and len(few) > 1 else rows

    def _read(self, cut: ReplicaCut, rows: int, recompute: str) -> PieceCost:
        self.num_partitions += recompute == "none"
        data = self.batch // rows // cut.expert
        plan = replace(self.base(self.depths.read, data, cut), recompute=recompute)
        local = self.lowerings.blocking(plan)
        return self._priced(workload_of(local, self.cluster, self._mesh(cut)))

    def _mesh(self, cut: ReplicaCut) -> Mesh:
        """Mesh for pricing messages within a replica; with all replicas if they share NICs."""
        inside = cut.mesh()
        if all(node.devices % inside.num_devices == 0 for node in self.cluster.nodes):
            return inside
        return cut.mesh(self.cluster.num_devices // inside.num_devices)

    def _priced(self, work: Workload) -> PieceCost:
        work = self.depths.deepened(work)
        devices = self.cluster.device_types(self.cluster.num_devices)
        names = [device.name for device in devices]
        issue_s = max(device.issue_s for device in devices)
        return PieceCost(
            blocks=work.blocks,
            forward_s=tuple(
                max(issue_s * b.issued[0], *(b.forward_s[n] for n in names)) for b in work.blocks
            ),
            backward_s=tuple(
                max(issue_s * b.issued[1], *(b.backward_s[n] for n in names)) for b in work.blocks
            ),
            inside_forward_s=_inside(work.blocks, is_forward=True),
            inside_backward_s=_inside(work.blocks, is_forward=False),
            itemsize=work.itemsize,
        )


def _around(rows: int, read: Sequence[int]) -> tuple[int, int]:
    """The two entries of `read` on both sides of `rows`, or the nearest two."""
    place = min(max(1, bisect_left(read, rows)), len(read) - 1)
    return read[place - 1], read[place]


def _between(low: PieceCost, high: PieceCost, share: float) -> PieceCost:
    """Interpolate costs linearly (share 0 gives `low`, 1 `high`, others allowed), at least 0."""

    def line(few: float, other: float) -> float:
        return max(0.0, few + share * (other - few))

    def each(few: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
        return tuple(map(line, few, other))

    def block(few: BlockWork, other: BlockWork) -> BlockWork:
        return replace(
            few,
            kept_bytes=int(line(few.kept_bytes, other.kept_bytes)),
            crossing_bytes=int(line(few.crossing_bytes, other.crossing_bytes)),
            workspace_bytes=int(line(few.workspace_bytes, other.workspace_bytes)),
        )

    return replace(
        low,
        blocks=tuple(map(block, low.blocks, high.blocks)),
        forward_s=each(low.forward_s, high.forward_s),
        backward_s=each(low.backward_s, high.backward_s),
        inside_forward_s=each(low.inside_forward_s, high.inside_forward_s),
        inside_backward_s=each(low.inside_backward_s, high.inside_backward_s),
    )


def _inside(blocks: Sequence[BlockWork], *, is_forward: bool) -> tuple[float, ...]:
    """Seconds of messages within a replica, by block, in the forward or the backward pass."""
    return tuple(
        sum(
            seconds
            for (axes, phase), seconds in block.communication_s.items()
            if DATA_AXIS not in axes and (phase == "forward") == is_forward
        )
        for block in blocks
    )
