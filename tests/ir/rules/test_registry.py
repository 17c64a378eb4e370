"""All rules together."""

from shardweave.ir.aten import aten_dialect
from shardweave.ir.rules import has_rule
from shardweave.ir.rules.base import RULES

has_rule("")  # Loads the families.


def test_rules_are_of_ops_that_torch_has() -> None:
    assert set(RULES) - {op.name for op in aten_dialect().operations} == set()


def test_rules_give_their_einsum_as_a_docstring() -> None:
    assert [name for name, function in RULES.items() if not function.__doc__] == []
