"""All rules together."""

from unittest.mock import patch

from shardweave.ir.dialects.aten import OWN_OPS, AtenOp, aten_dialect
from shardweave.ir.sharding.rules import has_rule, lookup, notes_on_rules, rule_of
from shardweave.ir.sharding.rules.base import RULES, Notation, Rule, rule
from shardweave.tests.ir_text import step

has_rule("")  # Loads the families.


def test_rules_are_of_ops_that_torch_has() -> None:
    assert set(RULES) - {op.name for op in aten_dialect().operations} == set(OWN_OPS)


def test_rules_give_their_einsum_as_a_docstring() -> None:
    assert [name for name, function in RULES.items() if not function.__doc__] == []


def test_op_without_a_rule_is_named_once_with_its_layers() -> None:
    program = step("""
        input %x : tensor<4x4xf64>
        %y = aten.matrix_exp(%x) {layer = "net.1"} : tensor<4x4xf64>
        %z = aten.matrix_exp(%y) {layer = "net.2"} : tensor<4x4xf64>
        %w = aten.neg(%z) : tensor<4x4xf64>
        output %w
    """)
    (note,) = notes_on_rules(program.ops)
    assert note.startswith("aten.matrix_exp (in layer 'net.1' and 1 more) has no factor rule")


def test_rule_that_is_registered_after_an_op_was_replicated_is_used() -> None:
    program = step("""
        input %x : tensor<4x4xf64>
        %y = aten.matrix_exp(%x) : tensor<4x4xf64>
        output %y
    """)
    (op,) = program.ops
    assert isinstance(op, AtenOp)

    def rows(op: AtenOp) -> Rule:
        """`i ., -> i .`"""
        return Notation(op, "i . -> i .").rule()

    with patch.dict(RULES), patch.dict(lookup._known):
        assert rule_of(op).factors == ()
        rule(op.name)(rows)
        assert [factor.size for factor in rule_of(op).factors] == [4]
    assert rule_of(op).factors == ()
