"""A plan's shardings of arguments, looked up by name and rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardweave.ir.attributes import ShardingAttr
from shardweave.ir.mesh import Mesh
from shardweave.ir.program import Slot
from shardweave.ir.types import shape_of
from shardweave.planners.plan import Lookup, is_pattern, parse_sharding, read_sharding
from shardweave.planners.plan_parts import PlanError


class ShardingTable:
    """A plan's shardings of arguments. A pattern is for tensors of its sharding's rank."""

    def __init__(self, kind: str, table: Mapping[str, str]) -> None:
        self.kind = kind
        self.table = table
        self.ranks = {
            key: len(read_sharding(text, f"{kind} '{key}'").dims) for key, text in table.items()
        }
        self._lookups: dict[int, Lookup] = {}

    def entry(self, slot: Slot, mesh: Mesh) -> ShardingAttr | None:
        """What the table says of an argument. Raises PlanError if it does not fit."""
        shape = shape_of(slot.value)
        text = self._lookup(len(shape)).find(slot.name, *slot.aliases)
        if text is None:
            return None
        return parse_sharding(text, shape, mesh, f"{slot.kind} '{slot.name}'")

    def _lookup(self, rank: int) -> Lookup:
        if rank not in self._lookups:
            fitting = {
                key: text
                for key, text in self.table.items()
                if self.ranks[key] == rank or not is_pattern(key)
            }
            self._lookups[rank] = Lookup(fitting)
        return self._lookups[rank]

    def check_patterns(self, slots: Sequence[Slot]) -> None:
        """Raises PlanError for a pattern that fits names, but no tensor of its rank."""
        for key in filter(is_pattern, self.table):
            lookup = Lookup({key: ""})
            matched = [s for s in slots if lookup.key(s.name, *s.aliases) is not None]
            if matched and all(len(shape_of(s.value)) != self.ranks[key] for s in matched):
                raise PlanError(
                    f"{self.kind} '{matched[0].name}' of shape {list(shape_of(matched[0].value))}: "
                    f"sharding {self.table[key]} of '{key}' has {self.ranks[key]} dims; give one "
                    "{...} per dim."
                )
