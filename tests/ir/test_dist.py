"""The ops of `dist`: their definitions, their texts, and what is said of wrong ones."""

from __future__ import annotations

import pytest
import torch
from xdsl.dialects.builtin import IntegerAttr, StringAttr, i64
from xdsl.ir import Block
from xdsl.utils.exceptions import VerifyException

from shardweave.ir.dialects import dist
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.dialects.types import tensor_type
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import ProgramTextError
from shardweave.ir.verify.program import verify
from shardweave.tests.ir_text import lines, step

MESH = "data=2,tensor=2"
ANNOTATED = ' {layer = "h.0", phase = backward, origin = "mm", copy = [0 : i64, 1 : i64]}'

OPS = {
    "all_reduce": '%y = dist.all_reduce(%x, axes = ["data"]) : tensor<4x8xf32>',
    "all_reduce max": '%y = dist.all_reduce(%x, axes = ["data"], op = "max") : tensor<4x8xf32>',
    "all_reduce of two": (
        '%y, %z = dist.all_reduce(%x, %x, axes = ["data"]) : tensor<4x8xf32>, tensor<4x8xf32>'
    ),
    "reduce_scatter": (
        '%y = dist.reduce_scatter(%x, axes = ["data"], dim = 0, block = 2) : tensor<2x8xf32>'
    ),
    "all_gather": (
        '%y = dist.all_gather(%x, axes = ["data", "tensor"], dim = 1, block = 8) : tensor<4x32xf32>'
    ),
    "all_to_all": (
        '%y = dist.all_to_all(%x, axes = ["data"], dim = 0, block = 2, from_dim = 1, '
        "from_block = 8) : tensor<2x16xf32>"
    ),
    "slice": '%y = dist.slice(%x, axes = ["data"], dim = 0, block = 2) : tensor<2x8xf32>',
    "shard_index": '%y = dist.shard_index(axes = ["data"]) : tensor<i64>',
    "reshard": '%y = dist.reshard(%x, why = "the plan\'s wish") : tensor<4x8xf32>',
}
STARTED = {
    f"start_{kind}": OPS[kind].replace("dist.", "dist.start_").replace("%y", "%s")
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
}
RESHARD = OPS["reshard"]


def program_of(text: str, *, local: bool = True) -> Program:
    """A program of one argument and these ops, that returns %y."""
    head = "input %x : tensor<4x8xf32>"
    return step(f"{head}\n{text}\noutput %y", MESH, local=local)


def with_wait(text: str) -> str:
    """A started collective with its wait."""
    type_ = text.rpartition(" : ")[2]
    return f"{text}\n%y = dist.wait(%s) : {type_}"


@pytest.mark.parametrize("text", OPS.values(), ids=OPS)
def test_text_of_an_op_is_read_verified_and_printed_as_it_was(text: str) -> None:
    program = program_of(text, local=text != RESHARD)
    assert verify(program) == []
    assert lines(program)[0] == text
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("text", OPS.values(), ids=OPS)
def test_every_op_carries_the_annotations(text: str) -> None:
    call, _, types = text.rpartition(" : ")
    program = program_of(f"{call}{ANNOTATED} : {types}", local=text != RESHARD)
    assert verify(program) == []
    assert ANNOTATED in str(program)
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize("text", STARTED.values(), ids=STARTED)
def test_what_starts_a_collective_has_the_text_of_the_collective(text: str) -> None:
    program = program_of(with_wait(text))
    assert verify(program) == []
    assert "\n".join(lines(program)[:2]) == with_wait(text)
    assert Program.parse(str(program)) == program


def test_what_starts_a_collective_has_the_definition_of_the_collective() -> None:
    for blocking, started in dist.STARTS.items():
        assert started.get_irdl_definition() is blocking.get_irdl_definition()
        assert started.name == blocking.name.replace("dist.", "dist.start_")


TYPE, WORD = " : tensor<4x8xf32>", "a whole number"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"dist.all_reduce(%x){TYPE}", "missing ['axes'], unknown []; it takes axes, op"),
        (
            f'dist.all_reduce(%x, axes = ["data"], dim = 0){TYPE}',
            "missing [], unknown ['dim']; it takes axes, op",
        ),
        (
            f'dist.all_to_all(%x, axes = ["data"], dim = 0){TYPE}',
            "missing ['block', 'from_block', 'from_dim'], unknown []; it takes axes, block, dim, "
            "from_block, from_dim",
        ),
        (f"dist.reshard(%x){TYPE}", "missing ['why'], unknown []; it takes why"),
        (f"dist.reshard(%x, why = 3){TYPE}", "why must be a string"),
        (f'dist.wait(%x, axes = ["data"]){TYPE}', "missing [], unknown ['axes']; it takes none"),
        (f"dist.all_reduce(%x, axes = []){TYPE}", 'axes must be a list such as ["tensor"]'),
        (f"dist.all_reduce(%x, axes = [1]){TYPE}", 'axes must be a list such as ["tensor"]'),
        (f'dist.all_reduce(%x, axes = ["data"], op = 1){TYPE}', 'op must be "sum" or "max"'),
        (f'dist.slice(%x, axes = ["data"], dim = true, block = 2){TYPE}', f"dim must be {WORD}"),
        (f'dist.slice(%x, axes = ["data"], dim = 0, block = "2"){TYPE}', f"block must be {WORD}"),
        (
            f'dist.all_gather(%x, axes = ["data"], dim = -1, block = 2){TYPE}',
            "dim must be in [0, 2)",
        ),
        (
            f'dist.all_to_all(%x, axes = ["data"], dim = 0, block = 2, from_dim = 2, '
            f"from_block = 8){TYPE}",
            "from_dim must be in [0, 2)",
        ),
        (f'dist.slice(%x, %x, axes = ["data"], dim = 0, block = 2){TYPE}', "Expected 1 operand"),
        ('dist.all_reduce(axes = ["data"]) : tensor<4x8xf32>', "expected at position 0"),
        ('dist.shard_index(axes = ["data"]) : tensor<4xi64>', "Expected attribute tensor<i64>"),
        (
            f'dist.all_reduce(%x, axes = ["data"]) {{layer = 3 : i64}}{TYPE}',
            "layer is 3 : i64, expected a string",
        ),
        (
            f'dist.all_reduce(%x, axes = ["data"]) {{copy = ["a"]}}{TYPE}',
            'copy is ["a"], expected a list of whole numbers',
        ),
        (
            f'dist.all_reduce(%x, axes = ["data"]) {{sharding = []}}{TYPE}',
            "sharding must list one #dist.sharding for each result",
        ),
        (
            f'dist.all_reduce(%x, axes = ["data"]) {{sharding = ["a"]}}{TYPE}',
            "sharding must list one #dist.sharding for each result",
        ),
    ],
)
def test_wrong_op_gets_one_line_that_names_it_and_what_was_expected(
    text: str, expected: str
) -> None:
    name = text.partition("(")[0]
    (problem,) = verify(program_of(f"%y = {text}"))
    assert problem.startswith(f"{name} (%y)")
    assert f"{name}: " in problem
    assert expected in problem
    assert "\n" not in problem


def test_values_that_are_no_tensors_are_refused() -> None:
    (value,) = Block(arg_types=[i64]).args
    op = dist.create_dist(dist.AllReduceOp, [value], [i64], axes=["data"])
    with pytest.raises(VerifyException, match=r"^dist\.all_reduce: operand 'terms' at position 0"):
        op.verify()


def test_unknown_op_is_named_with_the_one_that_may_be_meant() -> None:
    with pytest.raises(ProgramTextError, match=r"no op 'dist\.al_gather'; did you mean 'dist\.all"):
        program_of('%y = dist.al_gather(%x, axes = ["data"]) : tensor<4x8xf32>')


def test_arguments_of_an_op_are_read_as_python_values() -> None:
    (x,) = Block(arg_types=[tensor_type((4, 8), torch.float32)]).args
    given = {"axes": ("data",), "dim": 0, "block": 2, "from_dim": 1, "from_block": 8}
    op = dist.create_dist(dist.AllToAllOp, [x], [tensor_type((2, 16), torch.float32)], **given)
    assert (op.axes, op.dim, op.block, op.from_dim, op.from_block) == (("data",), 0, 2, 1, 8)
    assert op.dim_attr == IntegerAttr(0, i64)
    op.verify()
    total = dist.create_dist(dist.AllReduceOp, [x], [x.type], axes=["data"])
    assert (total.reduction, total.op_attr) == ("sum", None)
    total.op_attr = StringAttr("max")
    assert total.reduction == "max"
    assert total.properties["op"] == to_attribute("max")


def test_reshard_keeps_the_type_sends_nothing_and_says_why() -> None:
    (x,) = Block(arg_types=[tensor_type((4, 8), torch.float32)]).args
    op = dist.create_dist(dist.ReshardOp, [x], [x.type], why="a stored weight is used")
    assert op.why == "a stored weight is used"
    assert (op.axes, op.sent_elements(Mesh.parse(MESH))) == ((), 0.0)
    assert op.problem_on(Mesh.parse(MESH)) is None
    assert not isinstance(op, dist.CollectiveOp)


def test_reshard_to_another_type_is_refused() -> None:
    (problem,) = verify(program_of(RESHARD.replace("4x8", "2x8"), local=False))
    assert "result shapes are [(2, 8)], expected [(4, 8)]" in problem
    (problem,) = verify(program_of(RESHARD.replace("f32", "f64"), local=False))
    assert "a result has elements f64, expected f32" in problem


def test_reshard_stands_in_global_programs_alone() -> None:
    assert verify(program_of(RESHARD, local=False)) == []
    assert verify(program_of(RESHARD)) == [
        "dist.reshard (%y): it stands in a local program; run insert-collectives on the global one."
    ]
