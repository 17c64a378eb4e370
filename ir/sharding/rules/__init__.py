"""Factor rules of ATen ops, by family. `rule_of` finds the rule of an op."""

from __future__ import annotations

from shardweave.ir.sharding.rules.base import Factor, Rule
from shardweave.ir.sharding.rules.lookup import notes_on_rules, rule_of

__all__ = ["Factor", "Rule", "notes_on_rules", "rule_of"]
