"""All rules together."""

from unittest.mock import patch

from shardweave.ir.dialects.aten import OWN_OPS, AtenOp, aten_dialect
from shardweave.ir.ops import registry
from shardweave.ir.ops.registry import register_op, specs
from shardweave.ir.ops.spec import OpSpec
from shardweave.ir.sharding.rules import notes_on_rules, rule_of
from shardweave.ir.sharding.rules.base import Notation, Rule
from shardweave.ir.sharding.rules.lookup import rule_function
from shardweave.tests.ir_text import step


def test_rules_are_of_ops_that_torch_has() -> None:
    names = {spec.name for spec in specs() if spec.has_rule}
    assert names - {op.name for op in aten_dialect().operations} <= set(OWN_OPS)


def test_rules_give_their_einsum_as_a_docstring() -> None:
    functions = {spec.name: rule_function(spec) for spec in specs()}
    assert [name for name, function in functions.items() if not function.__doc__] == []


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

    with patch.dict(registry._RECORDS):
        assert rule_of(op).factors == ()
        register_op(OpSpec(op.name, rule=rows))
        assert [factor.size for factor in rule_of(op).factors] == [4]
    assert rule_of(op).factors == ()
