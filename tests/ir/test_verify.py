"""verify finds every kind of mistake, and says which op, where, and what to do."""

from __future__ import annotations

import pytest
from xdsl.dialects import arith, builtin, func, scf
from xdsl.ir import Block

from shardweave.ir.dialects.attributes import ShardingAttr
from shardweave.ir.dialects.dist import AllReduceOp
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import ProgramTextError
from shardweave.ir.verify.program import VerifyError, check, verify
from shardweave.passes.pipeline import run_passes
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, captured, megatron, partitioned

GOOD = """
    param %w : tensor<8x16xf64> [{}, {"tensor"}]
    input %x : tensor<4x8xf64> [{"data"}, {}]
    %h = aten.mm(%x, %w) {layer = "fc"} : tensor<4x16xf64>
    %y = aten.relu(%h) {layer = "act", wanted = [#dist.sharding<[{"data"}, {}]>]} : tensor<4x16xf64>
    output %y
"""


def problems(text: str, mesh: str = "data=2,tensor=2", *, local: bool = False) -> list[str]:
    return verify(step(text, mesh, local=local))


@pytest.mark.parametrize("name", ["gpt", "cnn"])
def test_captured_and_partitioned_programs_are_well_formed(name: str) -> None:
    assert verify(captured(SPECS[name]).program) == []
    plan = megatron(SPECS[name], "data=2,tensor=2", sequence_parallel=True)
    assert verify(partitioned(SPECS[name], "data=2,tensor=2", plan)) == []


def test_well_formed_program_has_no_problems() -> None:
    assert problems(GOOD) == []
    check(step(GOOD, "data=2,tensor=2"))


def test_value_used_before_it_is_defined() -> None:
    program = step(GOOD, "data=2,tensor=2")
    first, second = program.ops
    first.detach()
    program.function.body.block.insert_op_after(first, second)
    (problem, *_) = verify(program)
    assert problem == (
        "aten.relu (%y) in layer 'act' uses %h before it is defined; move the definition up."
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            ": tensor<4x16xf64>",
            ": tensor<4x8xf64>",
            "aten.mm (%h) in layer 'fc': result type is tensor<4x8xf64>, expected "
            "tensor<4x16xf64>.",
        ),
        (
            "aten.mm(%x, %w)",
            "aten.mm(%w, %x)",
            "aten.mm (%h) in layer 'fc': torch refuses these operands: ",
        ),
        (
            "aten.relu(%h) {",
            "aten.slice.Tensor(%h, dim = 0, start = -4) {",
            "aten.slice.Tensor: start is -4, expected an index >= 0; "
            "count the index of the first element from the front.",
        ),
        ("aten.mm(%x, %w)", "aten.mm(%x)", "aten.mm is missing its tensor argument 'mat2'."),
        (
            "aten.mm(%x, %w)",
            "aten.mm(%x, %w, %w)",
            "aten.mm takes at most 2 tensor arguments, found 3.",
        ),
        (
            "aten.mm(%x, %w)",
            "aten.mm(%x, %w, k = 1)",
            "aten.mm takes no property 'k'; remove it.",
        ),
        ("aten.mm(%x, %w)", "aten.mm([%x], %w)", "aten.mm expects one tensor for 'self'."),
        (
            '{"data"}, {}]>]',
            '{"batch"}, {}]>]',
            "aten.relu (%y) in layer 'act': the mesh data=2,tensor=2 has no axis 'batch'; its axes "
            "are ['data', 'tensor']; use one of them, or add 'batch' to the mesh.",
        ),
        (
            '{"data"}, {}]>]',
            '{"data"}]>]',
            "aten.relu (%y) in layer 'act': sharding #dist.sharding<[{\"data\"}]> has 1 dims, but "
            "the value has shape (4, 16); give one {...} per dim.",
        ),
        (
            '{"data"}, {}]>]',
            '{"data"}, {"data"}]>]',
            "axis 'data' is used twice.",
        ),
        (
            '{"data"}, {}]>]',
            '{"data"}, {}]>, #dist.sharding<[{}, {}]>]',
            "wanted must list one #dist.sharding for each result.",
        ),
        (
            'wanted = [#dist.sharding<[{"data"}, {}]>]',
            "sharding = [1 : i64]",
            "sharding must list one #dist.sharding for each result.",
        ),
        (
            '[{}, {"tensor"}]',
            '[{}, {"expert"}]',
            "param 'w': the mesh data=2,tensor=2 has no axis 'expert'; its axes are ['data', "
            "'tensor']; use one of them, or add 'expert' to the mesh.",
        ),
        (
            "tensor<4x8xf64> [",
            "tensor<1x8xf64> [",
            "input 'x': a dim of size 1 is too small to shard over axes ['data'] of sizes [2]: with 1 "
            "indices for each shard over 'data', some ranks would get none; use smaller axes, or "
            "leave the dim unsharded.",
        ),
        ("output %y", 'output %y [{}, {"pipe"}]', "output '0': the mesh"),
    ],
)
def test_mistake_in_one_place_is_named(old: str, new: str, expected: str) -> None:
    assert old in GOOD
    found = problems(GOOD.replace(old, new, 1))
    assert any(expected in problem for problem in found), found
    assert all("\n" not in problem for problem in found)


def test_value_that_is_no_tensor_of_fixed_shape() -> None:
    text = str(step(GOOD, "data=2,tensor=2"))
    for type_, expected in (
        ("vector<4x8xf64>", "vector<4x8xf64> is not a tensor type."),
        ("tensor<?x8xf64>", "tensor<?x8xf64> has a size that is not fixed; write every size as a"),
        ("tensor<4x8xi3>", "tensor<4x8xi3> has elements that torch does not have; use one of f64,"),
    ):
        (problem,) = verify(Program.parse(text.replace("tensor<4x8xf64>", type_)))
        assert problem.startswith(f"argument %x: {expected}")


def test_mistakes_in_several_places_are_all_named() -> None:
    text = """
        input %x : tensor<4x8xf64>
        %a = aten.relu(%x) : tensor<?x8xf64>
        %b = aten.neg(%a) : tensor<4x8xf64>
        %c = aten.exp(%x) : tensor<4x8xf32>
        %d = dist.all_reduce(%x, axes = ["pipe"]) : tensor<4x8xf64>
        output %d
    """
    shape, dtype, axis = problems(text)  # %b reads what has no shape: nothing is said of it
    assert shape.startswith("aten.relu (%a): tensor<?x8xf64> has a size that is not fixed;")
    assert dtype == "aten.exp (%c): result type is tensor<4x8xf32>, expected tensor<4x8xf64>."
    assert axis == "dist.all_reduce (%d): axes ['pipe'] are not in the mesh data=2,tensor=2."


def test_argument_or_result_of_an_unknown_kind() -> None:
    text = str(step(GOOD, "data=2,tensor=2"))
    assert verify(Program.parse(text.replace('"param"', '"weight"'))) == [
        "argument 0 ('w'): dist.kind is 'weight', expected one of param, buffer, input, tangent."
    ]
    assert verify(Program.parse(text.replace('"output"', '"loss"'))) == [
        "result 0 ('0'): dist.kind is 'loss', expected one of output, grad, buffer."
    ]


def test_return_that_does_not_give_what_the_function_promises() -> None:
    text = str(step(GOOD, "data=2,tensor=2"))
    changed = text.replace("func.return %y : tensor<4x16xf64>", "func.return %x : tensor<4x8xf64>")
    assert verify(Program.parse(changed)) == [
        "func.return: its operands are not of the function's result types."
    ]
    twice = text.replace(
        "    func.return", "    func.return %y : tensor<4x16xf64>\n    func.return"
    )
    assert verify(Program.parse(twice)) == [
        "func.return stands before the end; keep only the last."
    ]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (
            'dist.all_gather(%x, axes = ["data"], dim = 0, block = 2) : tensor<2x8xf64>',
            "dist.all_gather (%y): result shapes are [(2, 8)], expected [(4, 8)]; correct the types.",
        ),
        (
            'dist.all_reduce(%x, axes = ["data"]) : tensor<2x8xf32>',
            "dist.all_reduce (%y): a result has elements f32, expected f64; correct its type.",
        ),
        (
            'dist.all_reduce(%x, axes = ["data", "data"]) : tensor<2x8xf64>',
            "dist.all_reduce (%y): axes ['data', 'data'] name an axis twice; name each once.",
        ),
        (
            'dist.all_reduce(%x, axes = ["data"], op = "mean") : tensor<2x8xf64>',
            'dist.all_reduce: op must be "sum" or "max"',
        ),
        (
            'dist.all_reduce(%x, axes = ["pipe"]) : tensor<2x8xf64>',
            "dist.all_reduce (%y): axes ['pipe'] are not in the mesh data=2,tensor=2.",
        ),
        (
            "dist.all_reduce(%x) : tensor<2x8xf64>",
            "dist.all_reduce: missing ['axes'], unknown []; it takes axes, op",
        ),
        (
            'dist.all_reduce(%x, axes = "data") : tensor<2x8xf64>',
            'dist.all_reduce: axes must be a list such as ["tensor"]',
        ),
        (
            'dist.slice(%x, axes = ["data"], dim = 2, block = 2) : tensor<1x8xf64>',
            "dist.slice: dim must be in [0, 2)",
        ),
        (
            'dist.slice(%x, axes = ["data"], dim = 0.5, block = 2) : tensor<1x8xf64>',
            "dist.slice: dim must be a whole number",
        ),
    ],
)
def test_collective_that_does_not_fit_its_operand_or_the_mesh(op: str, expected: str) -> None:
    type_ = op.rpartition(" : ")[2]
    text = f"""
        input %x : tensor<2x8xf64> [{{"data"}}, {{}}]
        %y = {op}
        %z = aten.neg(%y) : {type_}
        output %z
    """
    found = problems(text, local=True)
    assert any(expected in problem for problem in found), found


PENDING = """
    input %x : tensor<2x8xf64> [{}, {"tensor"}]
    param %w : tensor<8x4xf64> [{"tensor"}, {}]
    %y = aten.mm(%x, %w) {sharding = [#dist.sharding<[{}, {}], unreduced = ["tensor"]>]} : tensor<2x4xf64>
"""


@pytest.mark.parametrize(
    "op",
    [
        "%z = aten.native_layer_norm(%y, none, none, eps = 1.0e-05) : "
        "tensor<2x4xf64>, tensor<2x1xf64>, tensor<2x1xf64>",
        "%z = aten.relu(%y) : tensor<2x4xf64>",
        "%z = aten.mul.Tensor(%y, %y) : tensor<2x4xf64>",
        "%z = aten.add.Scalar(%y, other = 1) : tensor<2x4xf64>",
    ],
)
def test_unreduced_sum_does_not_leak_into_an_op_that_is_not_linear_in_it(op: str) -> None:
    op = op.replace("%z", "%z, %m, %r") if "layer_norm" in op else op
    name = op.split(" = ")[1].split("(")[0]
    (problem,) = problems(f"{PENDING}    {op}\n    output %z", local=True)
    assert problem == (
        f"{name} (%z): operand 0 (%y) is an unreduced sum over ['tensor'], and the op is not linear "
        "in it; reduce it first with dist.all_reduce."
    )


LINEAR = [
    "%z = aten.mul.Scalar(%y, other = 2.0) : tensor<2x4xf64>",
    "%z = aten.neg(%y) : tensor<2x4xf64>",
    "%z = aten.add.Tensor(%y, %y) : tensor<2x4xf64>",
]
REDUCED = '%r = dist.all_reduce(%z, axes = ["tensor"]) {layer = "fc"} : tensor<2x4xf64>'


@pytest.mark.parametrize("op", LINEAR)
def test_unreduced_sum_goes_through_linear_ops_to_its_reduction(op: str) -> None:
    assert problems(f"{PENDING}    {op}\n    {REDUCED}\n    output %r", local=True) == []


@pytest.mark.parametrize("op", LINEAR)
def test_what_is_linear_in_an_unreduced_sum_cannot_be_returned(op: str) -> None:
    name = op.split(" = ")[1].split("(")[0]
    assert problems(f"{PENDING}    {op}\n    output %z", local=True) == [
        f"output '0', the result of {name} (%z), is an unreduced sum over ['tensor']; reduce it "
        "before it is returned, with dist.all_reduce."
    ]


@pytest.mark.parametrize(
    "op",
    [
        '%z = dist.all_reduce(%y, axes = ["tensor"]) : tensor<2x4xf64>',
        '%z = dist.reduce_scatter(%y, axes = ["tensor"], dim = 0, block = 1) : tensor<1x4xf64>',
    ],
)
def test_reductions_take_an_unreduced_sum(op: str) -> None:
    assert problems(f"{PENDING}    {op}\n    output %z", local=True) == []


@pytest.mark.parametrize("op", LINEAR)
def test_linear_op_that_is_said_to_reduce_is_noticed(op: str) -> None:
    told = op.replace(" : ", ' {layer = "fc", sharding = [#dist.sharding<[{}, {}]>]} : ')
    (problem,) = problems(f"{PENDING}    {told}\n    output %z", local=True)
    assert "in layer 'fc': its operands are unreduced sums over ['tensor'] and so is %z" in problem


ANNOTATED = ' {layer = "fc", sharding = [#dist.sharding<[{}, {}]>]}'


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (
            '%z = dist.all_reduce(%y, axes = ["data", "tensor"])A : tensor<2x4xf64>',
            "the operand is not an unreduced sum over ['data']; reducing over these axes would add "
            "equal values several times, so leave the axes out.",
        ),
        (
            '%z = dist.all_reduce(%y, axes = ["tensor"], op = "max")A : tensor<2x4xf64>',
            'the op reduces by "max", but its operand is an unreduced sum; reduce it by "sum".',
        ),
        (
            '%z = dist.slice(%y, axes = ["data"], dim = 0, block = 1)A : tensor<1x4xf64>',
            'its result is in #dist.sharding<[{"data"}, {}], unreduced = ["tensor"]>, but its '
            "sharding says #dist.sharding<[{}, {}]>; write the former.",
        ),
        (
            '%z = dist.all_gather(%x, axes = ["tensor"], dim = 0, block = 2)A : tensor<4x8xf64>',
            "the op gathers dim 0 over ['tensor'] in blocks of 2, but its operand is not sharded so; "
            "gather the operand as it is sharded.",
        ),
        (
            '%z = dist.all_gather(%x, axes = ["tensor"], dim = 1, block = 4)A : tensor<2x16xf64>',
            "the op gathers dim 1 over ['tensor'] in blocks of 4, but its operand is not sharded so; "
            "gather the operand as it is sharded.",
        ),
        (
            '%z = dist.slice(%x, axes = ["data"], dim = 0, block = 1)A : tensor<1x8xf64>',
            'its result is in #dist.sharding<[{"data"}, {"tensor"}]>, but its sharding says '
            "#dist.sharding<[{}, {}]>; write the former.",
        ),
        (
            '%z = dist.slice(%x, axes = ["tensor"], dim = 0, block = 1)A : tensor<1x8xf64>',
            "the operand is already sharded or unreduced over ['tensor']; shard it only over axes on "
            "which it is replicated.",
        ),
    ],
)
def test_collective_that_does_not_fit_what_its_operand_holds(op: str, expected: str) -> None:
    text = f"{PENDING}    {op.replace('A', ANNOTATED, 1)}\n    output %z"
    found = problems(text, local=True)
    name = op.split(" = ")[1].split("(")[0]
    assert f"{name} (%z) in layer 'fc': {expected}" in found


def test_sum_of_a_whole_and_an_unreduced_value_would_add_the_whole_several_times() -> None:
    text = f"""{PENDING}
        param %b : tensor<2x4xf64> [{{}}, {{}}]
        %z = aten.add.Tensor(%y, %b) : tensor<2x4xf64>
        output %z
    """
    (problem,) = problems(text, local=True)
    assert "operand 0 (%y) is an unreduced sum over ['tensor']" in problem


@pytest.mark.parametrize("mesh", ["tensor=2", "data=2", "data=2,tensor=2"])
def test_deleted_all_reduce_is_noticed(mesh: str) -> None:
    spec = "gpt:layers=1,hidden=16,heads=4,vocab=32,seq=8,batch=4"
    program = partitioned(spec, mesh, megatron(spec, mesh))
    reductions = [op for op in program.ops if isinstance(op, AllReduceOp)]
    for index in range(len(reductions)):
        clone = program.clone()
        doomed = [op for op in clone.ops if isinstance(op, AllReduceOp)][index]
        for old, new in zip(doomed.results, doomed.operands, strict=True):
            old.replace_all_uses_with(new)
        doomed.detach()
        doomed.erase()
        problems_found = verify(clone)
        assert problems_found, f"the {index}th all-reduce can go unnoticed"
        assert "is an unreduced" in problems_found[0]


STARTED = """
    input %x : tensor<2x8xf64> [{}, {"tensor"}]
    param %w : tensor<8x4xf64> [{"tensor"}, {}]
    %y = aten.mm(%x, %w) {sharding = [#dist.sharding<[{}, {}], unreduced = ["tensor"]>]} : tensor<2x4xf64>
    %s, %t = dist.start_all_reduce(%y, %y, axes = ["tensor"]) {layer = "fc"} : tensor<2x4xf64>, tensor<2x4xf64>
    %d, %e = dist.wait(%s, %t) {layer = "fc"} : tensor<2x4xf64>, tensor<2x4xf64>
    %z = aten.relu(%d) {layer = "act"} : tensor<2x4xf64>
    output %z
"""


def test_started_collective_with_its_wait_has_no_problems() -> None:
    assert problems(STARTED, local=True) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            '    %d, %e = dist.wait(%s, %t) {layer = "fc"} : tensor<2x4xf64>, tensor<2x4xf64>\n'
            "    %z = aten.relu(%d)",
            "    %z = aten.relu(%s)",
            "dist.start_all_reduce (%s) in layer 'fc': found 0 dist.wait among 1 users, expected one "
            "wait that reads all its results and nothing else that reads them; add "
            "%done = dist.wait(%started) and use %done.",
        ),
        (
            "    %z = aten.relu",
            "    %f, %g = dist.wait(%s, %t) : tensor<2x4xf64>, tensor<2x4xf64>\n    %z = aten.relu",
            "dist.start_all_reduce (%s) in layer 'fc': found 2 dist.wait among 2 users",
        ),
        (
            "aten.relu(%d)",
            "aten.relu(%s)",
            "dist.start_all_reduce (%s) in layer 'fc': found 1 dist.wait among 2 users",
        ),
        ("output %z", "output %t", "dist.start_all_reduce (%s) in layer 'fc': found 1 dist.wait"),
        (
            "dist.wait(%s, %t)",
            "dist.wait(%t, %s)",
            "dist.wait (%d) in layer 'fc': it must take the results of dist.start_all_reduce (%s) in "
            "layer 'fc' each once and in their order.",
        ),
        ("dist.wait(%s, %t)", "dist.wait(%s, %s)", "expected one wait that reads all its results"),
        (
            "dist.wait(%s, %t)",
            "dist.wait(%y, %y)",
            "dist.wait (%d) in layer 'fc': its operands must be the results of one started "
            "collective; give it those of the dist.start_* that it waits for.",
        ),
    ],
    ids=["deleted", "twice", "passed-by", "returned", "order", "same-twice", "not-started"],
)
def test_started_collective_without_exactly_one_wait(old: str, new: str, expected: str) -> None:
    assert old in STARTED
    found = problems(STARTED.replace(old, new), local=True)
    assert any(expected in problem for problem in found), found
    assert all("\n" not in problem for problem in found)


BRANCH = """
    %c = arith.constant true
    scf.if %c {
      %r = dist.all_reduce(%x, axes = ["data"]) : tensor<4x8xf64>
    }
"""


@pytest.mark.parametrize("branch", [BRANCH, "    cf.br ^bb1\n  ^bb1:\n"])
def test_text_in_which_ranks_could_issue_collectives_in_different_orders_is_refused(
    branch: str,
) -> None:
    text = str(step(GOOD, "data=2,tensor=2"))
    with pytest.raises(ProgramTextError, match=r"^<text>:\d+:\d+: "):
        Program.parse(text.replace("    %h", f"{branch}    %h", 1))


def test_op_with_a_branch_that_is_put_into_a_program_is_noticed() -> None:
    program = step(GOOD, "data=2,tensor=2")
    block = program.function.body.block
    first = next(program.ops)
    condition = arith.ConstantOp(builtin.BoolAttr.from_bool(True))
    block.insert_ops_before([condition, scf.IfOp(condition, [], [scf.YieldOp()])], first)
    assert "scf.if is not an op of the aten or dist dialect; write the step in these." in verify(
        program
    )


def test_function_of_several_blocks_is_noticed() -> None:
    program = step(GOOD, "data=2,tensor=2")
    program.function.body.add_block(Block([func.ReturnOp(*program.return_op.operands)]))
    assert verify(program) == [
        "func.func has 2 blocks, expected 1; a step has no branches, so that all ranks issue the "
        "same collectives."
    ]


def test_check_raises_the_first_problem() -> None:
    program = step(GOOD.replace('{"data"}, {}]>]', "{}]>]"), "data=2,tensor=2")
    with pytest.raises(
        VerifyError, match=r"^<text>:4:5: aten\.relu \(%y\) in layer 'act': sharding .* 1 dims"
    ):
        check(program)


def test_result_that_is_not_in_the_shards_it_promises() -> None:
    after = run_passes(step(GOOD, "data=2,tensor=2"), "propagate-shardings,insert-collectives")
    assert verify(after) == []
    after.set_result_attributes("dist.sharding", {0: ShardingAttr.parse_text('[{}, {"data"}]')})
    assert verify(after) == [
        "output '0', the result of dist.all_gather (%all_gather) in layer 'act', is returned as #dist.sharding<[{\"data\"}, {}]>, but dist.sharding "
        'of the result says #dist.sharding<[{}, {"data"}]>; make them equal.'
    ]
