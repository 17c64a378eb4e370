"""split-batch: the inputs' batch is sharded over a time axis, into sub-batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from xdsl.ir import Attribute

from shardweave.ir.dialects.annotations import set_wanted_attrs, wanted_attrs_of
from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.types import shape_of
from shardweave.ir.mesh.mesh import Axis, Mesh
from shardweave.ir.mesh.placement import Placement, Sharding, fits, padded_size
from shardweave.ir.program.program import Program, Slot, wishes_of
from shardweave.ir.sharding.flow import check_not_propagated
from shardweave.passes.notes import note
from shardweave.passes.program_pass import PassOnProgram


@dataclass(frozen=True)
class SplitBatchPass(PassOnProgram):
    """Shard dim `dim` of the inputs over a new time axis: `n` sub-batches that run in turn.

    Propagation and partitioning treat the time axis like any other, so that any mix of tensor, data
    and sequence parallelism can be split, for any model, and stays exact; `unroll-time-axes` then
    unrolls the sub-batches. Inputs whose dim `dim` has not the most common size are not sharded.

    Requires: a global program before `propagate-shardings`. Ensures: the mesh has the time axis,
    the inputs are sharded over it inside each device's shard; numerics unchanged.
    """

    name = "split-batch"
    n: int = 2
    dim: int = 0
    axis: str = "batch"

    def run(self, program: Program) -> None:
        check_not_propagated(program, self.name)
        if self.n < 1:
            raise ValueError(f"n={self.n} sub-batches; use n >= 1.")
        if self.dim < 0:
            raise ValueError(f"dim={self.dim}; count dims from 0.")
        if self.n == 1:
            note("n=1 leaves the batch as it is; give n >= 2, or leave the pass out.")
            return
        mesh = program.mesh or Mesh()
        if self.axis in mesh.names:
            raise ValueError(
                f"the mesh {mesh} has an axis '{self.axis}' already; name another with axis=..."
            )
        inputs = self._batched(program)
        split: dict[int, Attribute | None] = {}
        strides: set[int] = set()
        for index, slot in inputs.items():
            shape = shape_of(slot.value)
            placed = self._placed(program.sharding_of_slot(slot), shape, slot.name)
            strides.update(p.stride for p in placed.dims[self.dim] if p.axis == self.axis)
            split[index] = ShardingAttr.of(placed, shape)
        batch = shape_of(next(iter(inputs.values())).value)[self.dim]
        self._split_annotated(program, batch, min(strides))
        program.set_mesh(Mesh((*mesh.axes, Axis(self.axis, self.n, "time"))))
        program.set_argument_attributes("dist.sharding", split)

    def _batched(self, program: Program) -> dict[int, Slot]:
        slots = {
            index: slot
            for index, slot in enumerate(program.arguments)
            if slot.kind == "input" and len(shape_of(slot.value)) > self.dim
        }
        sizes = Counter(shape_of(slot.value)[self.dim] for slot in slots.values())
        if not sizes:
            raise ValueError(
                f"no input has a dim {self.dim} to split; give the dim along which inputs hold "
                "the samples, as split-batch{dim=0}."
            )
        batch = sizes.most_common(1)[0][0]
        return {i: s for i, s in slots.items() if shape_of(s.value)[self.dim] == batch}

    def _split_annotated(self, program: Program, batch: int, stride: int) -> None:
        """Split shardings that a plan wants for values whose dim `dim` is the batch, too. They get
        the inputs' stride if it fits, so that a sub-batch has the same samples everywhere; layers
        whose batch a plan shards further are split inside these shards."""
        for op in program.ops:
            if wanted_attrs_of(op) is None:
                continue
            new: list[ShardingAttr] = []
            for result, sharding in zip(op.results, wishes_of(op, program), strict=True):
                shape = shape_of(result)
                assert sharding is not None
                if len(shape) > self.dim and shape[self.dim] == batch:
                    sharding = self._placed(sharding, shape, op.name, stride)
                new.append(ShardingAttr.of(sharding, shape))
            set_wanted_attrs(op, new)

    def _placed(
        self, sharding: Sharding, shape: tuple[int, ...], name: str, stride: int = 0
    ) -> Sharding:
        """Add the time axis to `dim`, with `stride` if that fits, else inside a device's shard."""
        held = sharding.dims[self.dim]
        smallest = min((p.stride for p in held), default=shape[self.dim])
        aligned, inside = (
            sharding.with_dim(self.dim, (*held, Placement(self.axis, self.n, where)))
            for where in (stride or 1, max(1, smallest // self.n))
        )
        size = shape[self.dim]

        def is_even(split: Sharding) -> bool:
            cut = split.dims[self.dim]
            return fits(cut, size) and padded_size(cut, size) == padded_size(held, size)

        placed = aligned if stride and is_even(aligned) else inside
        if not is_even(placed):
            divisors = [d for d in range(1, smallest + 1) if smallest % d == 0]
            raise ValueError(
                f"input '{name}' has {smallest} samples per device along dim {self.dim}, which "
                f"do not divide into {self.n} sub-batches; use n in {divisors}."
            )
        return placed
