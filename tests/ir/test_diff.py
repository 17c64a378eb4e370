"""Structural diffs: a planted change is found, all of it and nothing else; layers fold."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise
from random import Random

import pytest
from xdsl.dialects import builtin
from xdsl.ir import Operation

from shardweave.ir.dialects.annotations import annotate, layer_of, set_origin
from shardweave.ir.dialects.aten import create
from shardweave.ir.dialects.literals import to_attribute
from shardweave.ir.inspect.diff import Change, blocks_text, structural_diff
from shardweave.ir.inspect.diff_match import _common, longest_increasing
from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import captured, megatron

Planted = tuple[str, str, int | None, int | None, tuple[str, ...]]
"""Kind, op, its place before and after, and what changed of it."""

GPT = "gpt:layers=10,hidden=16,heads=8,vocab=32,seq=16,batch=8"
PASSES = "split-addmm,add-pending-sums,propagate-shardings,insert-collectives,cse,dce"


@cache
def base(name: str) -> Program:
    """A program of about 1,000 ops: global, of each rank, or of each rank with recomputation."""
    program = captured(GPT).program
    if name == "global":
        return program
    plan = ApplyPlanPass.of(megatron(GPT, "data=2,tensor=2"))
    local = run_passes(program, [plan, PASSES], mesh="data=2,tensor=2")
    return local if name == "local" else run_passes(local, "rematerialize,start-collectives")


def places(program: Program) -> dict[Operation, int]:
    return {op: index for index, op in enumerate(program.ops)}


def insert(program: Program, random: Random) -> Planted:
    """A new op behind a value, read by some of its users."""
    at = places(program)
    op = random.choice([op for op in at if len(op.results) == 1 and op.name.startswith("aten.")])
    value = op.results[0]
    uses = [use for use in value.uses if use.operation in at]
    name = random.choice(["aten.neg", "aten.tanh", "aten.view"])
    new = create(name, [value], [value.type])
    annotate(new, op)
    program.function.body.block.insert_op_after(new, op)
    for use in random.sample(uses, random.randint(1, len(uses)) if uses else 0):
        use.operation.operands[use.index] = new.results[0]
    return "added", name, None, places(program)[new], ()


def delete(program: Program, random: Random) -> Planted:
    """An op less; its users read what it read."""
    at = places(program)
    ops = [
        op
        for op in at
        if len(op.results) == 1 and op.operands and op.operands[0].type == op.results[0].type
    ]
    op = random.choice(ops)
    op.results[0].replace_all_uses_with(op.operands[0])
    op.detach()
    op.erase()
    return "removed", op.name, at[op], None, ()


def move(program: Program, random: Random) -> Planted:
    """An op at another place, two or more away, that its operands and users allow."""
    at = places(program)
    order = list(at)
    while True:
        op = random.choice(order)
        made = [v.owner for v in op.operands if isinstance(v.owner, Operation)]
        first = max((at[owner] for owner in made), default=-1) + 1
        users = [at[use.operation] for r in op.results for use in r.uses if use.operation in at]
        last = min(users, default=len(order)) - 1
        goals = [goal for goal in range(first, last + 1) if abs(goal - at[op]) >= 2]
        if goals:
            break
    goal = random.choice(goals)
    anchor = order[goal]
    op.detach()
    block = program.function.body.block
    if goal > at[op]:
        block.insert_op_after(op, anchor)
    else:
        block.insert_op_before(op, anchor)
    return "moved", op.name, at[op], goal, ()


def retype(program: Program, random: Random) -> Planted:
    """A result of another type."""
    at = places(program)
    op = random.choice([op for op in at if op.results])
    index = random.randrange(len(op.results))
    op.results[index]._type = builtin.TensorType(builtin.f16, [3, 3])  # pyright: ignore[reportPrivateUsage]
    return "changed", op.name, at[op], at[op], ("type",)


def rewire(program: Program, random: Random) -> Planted:
    """An operand that is another value of the same type."""
    at = places(program)
    order = list(at)
    while True:
        op = random.choice([op for op in order if op.operands])
        index = random.randrange(len(op.operands))
        old = op.operands[index]
        earlier = [r for one in order[: at[op]] for r in one.results]
        others = [v for v in earlier if v.type == old.type and v is not old]
        if others:
            break
    op.operands[index] = random.choice(others)
    return "changed", op.name, at[op], at[op], (f"operand {index}",)


def edit(program: Program, random: Random) -> Planted:
    """A property more, or with another value."""
    at = places(program)
    op = random.choice(list(at))
    name = random.choice(["origin", "layer", "copy"])
    op.properties[name] = to_attribute([7] if name == "copy" else "elsewhere")
    return "changed", op.name, at[op], at[op], (name,)


PLANTS: list[Callable[[Program, Random], Planted]] = [insert, delete, move, retype, rewire, edit]


def summary(change: Change) -> Planted:
    return change.kind, change.op, *change.at, tuple(d.what for d in change.details)


def assert_found(plant: Callable[[Program, Random], Planted], name: str, seed: int) -> None:
    before = base(name)
    assert 900 < sum(1 for _ in before.ops) < 2000
    after = before.clone()
    planted = plant(after, Random(seed))
    found = structural_diff(before, after)
    assert [summary(change) for change in found.changes] == [planted], f"seed {seed}"
    assert found.num_hunks == 1


@pytest.mark.parametrize("plant", PLANTS, ids=lambda f: f.__name__)
def test_planted_change_is_found_and_nothing_else(
    plant: Callable[[Program, Random], Planted],
) -> None:
    for seed in range(2):
        assert_found(plant, "local", seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["global", "local", "recomputed"])
@pytest.mark.parametrize("plant", PLANTS, ids=lambda f: f.__name__)
def test_every_planted_change_is_found(
    plant: Callable[[Program, Random], Planted], name: str
) -> None:
    for seed in range(100, 112):  # 12 of 6 kinds in 3 programs: 216 plants
        assert_found(plant, name, seed)


SMALL = """
    param %w : tensor<4x4xf64> [{"tensor"}, {}]
    input %x : tensor<4x4xf64>
    %a = aten.mm(%x, %w) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %b = aten.tanh(%a) {layer = "h.0", phase = forward} : tensor<4x4xf64>
    %c = aten.mm(%b, %w) {layer = "h.1", phase = forward} : tensor<4x4xf64>
    %d = aten.tanh(%c) {layer = "h.1", phase = forward} : tensor<4x4xf64>
    output %d
"""


def changes_to(text: str, before: str = SMALL) -> list[str]:
    """The changes as one line each: kind, op, and what changed."""
    found = structural_diff(step(before, "tensor=2"), step(text, "tensor=2"))
    return [
        f"{c.kind} {c.op}" + "".join(f"; {d.what}: {d.before} -> {d.after}" for d in c.details)
        for c in found.changes
    ]


def test_names_of_values_do_not_count() -> None:
    renamed = SMALL.replace("%a", "%first").replace("%c", "%z9").replace("%d", "%a")
    assert changes_to(renamed) == []


def test_new_op_between_a_value_and_its_users_is_one_change() -> None:
    text = SMALL.replace(
        "%b = aten.tanh(%a)", "%n = aten.neg(%a) : tensor<4x4xf64>\n%b = aten.tanh(%n)"
    )
    assert changes_to(text) == ["added aten.neg"]
    assert changes_to(SMALL, text) == ["removed aten.neg"]


def test_op_replaced_by_another_leaves_its_users_alone() -> None:
    text = SMALL.replace("%b = aten.tanh", "%b = aten.neg")
    assert changes_to(text) == ["removed aten.tanh", "added aten.neg"]


def test_rewired_op_says_which_operand_reads_what() -> None:
    text = SMALL.replace("aten.mm(%b, %w)", "aten.mm(%a, %w)")
    assert changes_to(text) == ["changed aten.mm; operand 0: %b -> %a"]


def test_op_with_more_operands_says_so() -> None:
    before = SMALL.replace("aten.tanh(%c)", "aten.cat([%c])")
    text = SMALL.replace("aten.tanh(%c)", "aten.cat([%c, %b])")
    assert changes_to(text, before) == [
        "changed aten.cat; operand_structure: [[1 : i64]] -> [[1 : i64, 1 : i64]]; "
        "operands: %c -> %c, %b"
    ]


def test_sharding_of_an_argument_is_a_change_of_its_layer() -> None:
    text = SMALL.replace('[{"tensor"}, {}]', '[{}, {"tensor"}]')
    (found,) = changes_to(text)
    assert found.startswith(
        "changed argument param 'w'; sharding: #dist.sharding<[{\"tensor\"}, {}]>"
    )


def test_argument_and_result_more_are_added() -> None:
    text = SMALL.replace("    input %x", "    input %y : tensor<f64>\n    input %x")
    assert changes_to(text + "    grad w = %a\n") == [
        "added argument input 'y'",
        "added result grad 'w'",
    ]


def test_result_that_returns_another_value_is_a_change() -> None:
    assert changes_to(SMALL.replace("output %d", "output %c")) == [
        "changed result output '0'; value: %d -> %c"
    ]


def test_mesh_is_compared() -> None:
    found = structural_diff(step(SMALL, "tensor=2"), step(SMALL, "tensor=4"))
    assert [(c.op, [d.what for d in c.details]) for c in found.changes] == [
        ("builtin.module", ["mesh"])
    ]


def test_op_that_moved_and_changed_is_one_change() -> None:
    first = "%a = aten.mm(%x, %w) : tensor<4x4xf64>"
    rest = [f"%{n} = aten.{n}(%x) : tensor<4x4xf64>" for n in ("neg", "exp", "tanh")]
    head = "input %w : tensor<4x4xf64>\ninput %x : tensor<4x4xf64>\n"
    tail = "".join(f"\noutput %{n}" for n in ("a", "neg", "exp", "tanh"))
    before = head + "\n".join([first, *rest]) + tail
    after = head + "\n".join([*rest, first.replace("%w)", "%x)")]) + tail
    assert changes_to(after, before) == ["changed aten.mm; operand 1: %w -> %x; place: 0 -> 3"]


def test_equal_changes_of_equal_layers_are_folded() -> None:
    before = base("local")
    after = before.clone()
    for op in list(after.ops):
        if op.name == "aten.gelu":
            set_origin(op, "planted")
    groups = structural_diff(before, after).groups()
    (group,) = [g for g in groups if g.blocks[0].startswith("h.")]
    assert group.blocks == tuple(f"h.{i}" for i in range(10))
    assert [c.layer for c in group.changes] == ["h.0.mlp"]
    assert blocks_text(group.blocks) == "h.0 … h.9"


def test_layer_that_changed_otherwise_is_a_group_of_its_own() -> None:
    before = base("local")
    after = before.clone()
    for op in list(after.ops):
        if op.name == "aten.gelu" and layer_of(op) != "h.4.mlp":
            set_origin(op, "planted")
    (group,) = structural_diff(before, after).groups()
    assert blocks_text(group.blocks) == "h.0, h.1, h.2, h.3, h.5, h.6, h.7, h.8, h.9"


def test_starting_collectives_only_replaces_them() -> None:
    local = base("local")
    found = structural_diff(local, run_passes(local, "start-collectives"))
    assert {c.op for c in found.changes if c.kind == "removed"} == {"dist.all_reduce"}
    assert {c.op for c in found.changes if c.kind == "added"} == {
        "dist.start_all_reduce",
        "dist.wait",
    }
    assert found.count("changed") == found.count("moved") == 0


def test_ops_of_a_layer_are_found_again_in_the_program_of_each_rank() -> None:
    found = structural_diff(base("global"), base("local"))
    in_layers = [c for c in found.changes if c.layer.startswith("h.") and c.op.startswith("aten.")]
    # A row-parallel addmm becomes a product, an all-reduce and an addition; cse merges views.
    assert {c.op for c in in_layers if c.kind == "added"} == {"aten.mm", "aten.add.Tensor"}
    assert {c.op for c in in_layers if c.kind == "removed"} == {"aten.addmm", "aten.view"}


@pytest.mark.parametrize("seed", range(50))
def test_longest_increasing_run_is_as_long_as_any(seed: int) -> None:
    random = Random(seed)
    values = random.sample(range(9), 9)[: random.randint(0, 8)]
    found = [values[i] for i in longest_increasing(values)]
    assert found == sorted(set(found))
    lengths = range(len(values), -1, -1)
    best = next(n for n in lengths if any(list(c) == sorted(c) for c in combinations(values, n)))
    assert len(found) == best


@pytest.mark.parametrize("seed", range(50))
def test_common_subsequence_is_as_long_as_any(seed: int) -> None:
    random = Random(seed)
    left, right = ([random.randrange(3) for _ in range(random.randint(0, 6))] for _ in "ab")
    pairs = _common(left, right)
    assert all(left[i] == right[j] for i, j in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    subsequences = {c for n in range(7) for c in combinations(left, n)}
    others = {c for n in range(7) for c in combinations(right, n)}
    assert len(pairs) == max(map(len, subsequences & others))
