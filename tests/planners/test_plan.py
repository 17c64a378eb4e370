"""Plans as JSON: what is written reads back, what is wrong is one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardweave.ir.mesh.mesh import Mesh
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.plan.plan import Plan, PlanError
from shardweave.planners.plan.plan_names import Lookup, check_names, parse_sharding
from shardweave.planners.plan.plan_parts import Candidate, Pipeline, Predicted
from shardweave.tests.ir_text import shardings, step
from shardweave.tests.zoo import SPECS, assert_equals_eager, captured, megatron, partitioned

MESH = Mesh(data=2, tensor=4)


def test_plan_reads_back_as_it_was_written(tmp_path: Path) -> None:
    plan = megatron(SPECS["gpt2"], "data=2,tensor=3", sequence_parallel=True)
    assert plan.notes
    assert Plan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_plan_text_is_plain_json_with_a_format() -> None:
    data = json.loads(Plan(mesh={"data": 2}, inputs={"x": '[{"data"}]'}).to_json())
    assert data == {
        "format": "shardweave.plan/1",
        "mesh": {"data": 2},
        "parameters": {},
        "inputs": {"x": '[{"data"}]'},
        "activations": {},
        "planner": "by hand",
        "notes": [],
    }


def test_everything_may_be_left_out_of_a_plan_written_by_hand() -> None:
    assert Plan.from_json("{}") == Plan()
    assert Plan.from_json('{"mesh": {"tensor": 2}}').mesh == {"tensor": 2}


FULL = Plan(
    mesh={"pipeline": 2, "data": 2},
    batch_split=2,
    recompute="layer",
    schedule="list",
    cluster="testbed",
    pipeline=Pipeline((("wte", "h.0"), ("h.1",)), 4, ("V100", "T4"), ((0, 1), (2, 3))),
    zero=1,
    precision="bf16-mixed",
    predicted=Predicted(
        1.5, 1.0, {"data": 0.25}, 0.25, 0.25, {"parameters": 8.0}, 16.0, "estimated"
    ),
    reasons=("it is the fastest",),
    candidates=(Candidate("this", Predicted(1.5)), Candidate("other", Predicted(2.0), "slower")),
)


def test_all_that_a_plan_can_say_reads_back() -> None:
    assert Plan.from_json(FULL.to_json()) == FULL
    assert FULL.num_stages == 2
    assert Plan().num_stages == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"batch_split": 0}', "p: 'batch_split' must be a whole number, 1 or more."),
        ('{"zero": 4}', "p: 'zero' must be a whole number from 0 to 3."),
        (
            '{"precision": "half"}',
            "p: 'precision' is 'half'; use one of \"\", fp32, bf16-mixed, fp16-mixed, bf16-true.",
        ),
        (
            '{"recompute": "all"}',
            "p: 'recompute' is 'all'; use one of none, layer, after-communication, after-products.",
        ),
        ('{"pipeline": {}}', "p: 'pipeline': the key 'stages' is missing; add it."),
        ('{"pipeline": 2}', "p: 'pipeline' must be an object."),
        (
            '{"pipeline": {"stages": [["a"]], "x": 1}}',
            "p: 'pipeline': the keys ['x'] are unknown; the keys can be ",
        ),
        ('{"pipeline": {"stages": [["a"], []]}}', "p: 'pipeline'.stages must be lists of layer"),
        ('{"pipeline": {"stages": [["a", 1]]}}', "p: 'pipeline'.stages[0][1] must be a string."),
        (
            '{"pipeline": {"stages": [["a"], ["b"]], "devices": ["T4"]}}',
            "p: 'pipeline'.devices has 1 entries, expected one for each of the 2 stages, or an empty list.",
        ),
        ('{"predicted": {"time_s": "1"}}', "p: 'predicted'.time_s must be a number."),
        (
            '{"candidates": [{"name": "a"}]}',
            "p: 'candidates'[0]: the key 'predicted' is missing; add it.",
        ),
    ],
)
def test_parts_of_a_plan_are_read_strictly(text: str, expected: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(text, "p")
    assert str(error.value).startswith(expected)


def test_difference_of_two_plans_is_told_by_name() -> None:
    before = Plan({"data": 2}, {"a": "[{}]", "b": "[{}]"})
    after = Plan({"data": 4}, {"a": '[{"data"}]', "b": "[{}]"}, batch_split=2, schedule="list")
    assert before.diff(after) == [
        "- mesh 'data': 2",
        "+ mesh 'data': 4",
        "- parameters 'a': [{}]",
        "+ parameters 'a': [{\"data\"}]",
        "- batch_split: 1",
        "+ batch_split: 2",
        "- schedule: ",
        "+ schedule: list",
    ]
    assert before.diff(before) == []
    assert "- mesh 'pipeline': 2" in FULL.diff(Plan())


def test_plan_written_by_hand_shards_a_model_and_equals_eager() -> None:
    text = """
    {
      "mesh": {"data": 2, "tensor": 2},
      "parameters": {
        "h.*.mlp.fc_in.*eight": "[{\\"tensor\\"}, {}]",
        "h.*.mlp.fc_in.bias": "[{\\"tensor\\"}]",
        "h.*.mlp.fc_out.weight": "[{}, {\\"tensor\\"}]"
      },
      "inputs": {"*": "[{\\"data\\"}, {}]"}
    }
    """
    program = partitioned(SPECS["gpt"], "data=2,tensor=2", Plan.from_json(text))
    assert shardings(program.arguments)["h.1.mlp.fc_out.weight"] == '[{}, {"tensor"}]'
    assert program.stats().count("all_reduce", ("tensor",)) == 4
    assert_equals_eager(program, captured(SPECS["gpt"]))


def test_plan_moves_to_another_mesh_with_axes_of_the_same_names() -> None:
    plan = megatron(SPECS["gpt"], "data=2,tensor=2")
    program = run_passes(
        captured(SPECS["gpt"]).program, [ApplyPlanPass.of(plan)], mesh="tensor=8,data=1"
    )
    assert shardings(program.arguments)["wte.weight"] == '[{"tensor"}, {}]'


NO_JSON = "; a plan is JSON, as `shardweave plan -o` writes it."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", f"p.json:1:2: not JSON: Expecting property name enclosed in double quotes{NO_JSON}"),
        (
            '{"mesh": {"a": 2},\n "inputs": {"x" 3}}',
            f"p.json:2:17: not JSON: Expecting ':' delimiter{NO_JSON}",
        ),
        ("", f"p.json:1:1: not JSON: Expecting value{NO_JSON}"),
        ("[" * 100_000, "p.json: brackets are nested too deeply for a plan."),
        ("[]", "p.json: found list, expected a JSON object."),
        (
            '{"parameter": {}}',
            "p.json: the plan has unknown keys ['parameter']; did you mean 'parameters'? "
            "its keys can be activations, alone_bytes, "
            "attention_parts, batch_split, candidates, cluster, decompose, expert_load, inputs, "
            "loss_chunks, mesh, notes, "
            "offload, parameters, passes, "
            "pipeline, planner, precision, predicted, projections, reasons, recompute, recompute_in, "
            "schedule, "
            "update, used, zero.",
        ),
        ('{"format": "x/2"}', "p.json: format is 'x/2', expected 'shardweave.plan/1'."),
        ('{"mesh": 4}', "p.json: 'mesh' must be an object of axis sizes."),
        ('{"mesh": {"a": "4"}}', "p.json: 'mesh'['a'] must be a whole number, 1 or more."),
        ('{"mesh": {"a": true}}', "p.json: 'mesh'['a'] must be a whole number, 1 or more."),
        ('{"inputs": {"x": null}}', "p.json: 'inputs'['x'] must be a string."),
        ('{"parameters": ["x"]}', "p.json: 'parameters' must be an object of shardings."),
        ('{"notes": "none"}', "p.json: 'notes' must be a list of strings."),
        ('{"planner": 1}', "p.json: 'planner' must be a string."),
        (
            '{"inputs": {"x": "[{}]", "x": "[{}]"}}',
            "p.json: the key 'x' is given twice; keep one of them.",
        ),
    ],
)
def test_text_that_is_no_plan_is_one_line_that_says_why(text: str, expected: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.from_json(text, "p.json")
    assert str(error.value) == expected


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan '.*' cannot be read: No such file or directory"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="cannot be read: not text; give a JSON file"):
        Plan.load(tmp_path / "binary.json")


def test_exact_name_wins_over_patterns_and_the_first_pattern_over_later_ones() -> None:
    table = Lookup({"h.*": "first", "h.0": "exact", "*": "last"})
    assert [table.find(name) for name in ("h.0", "h.1", "x")] == ["exact", "first", "last"]
    assert table.find("x", "h.1") == "first"
    assert Lookup({"h.0": "exact"}).find("h.1") is None
    assert Lookup({"h.0": "", "g.*": "", "h.?": ""}).unmatched(["h.1"]) == ["h.0", "g.*"]


def test_tied_parameter_is_found_under_each_of_its_names() -> None:
    program = captured(SPECS["gpt"]).program
    for name in ("wte.weight", "head.weight", "head.*"):
        plan = Plan(parameters={name: '[{"tensor"}, {}]'})
        check_names(plan, program)
        after = run_passes(program, [ApplyPlanPass.of(plan)], mesh="tensor=2")
        assert shardings(after.arguments)["wte.weight"] == '[{"tensor"}, {}]'


def test_plan_for_another_model_is_refused_with_names_that_exist() -> None:
    plan = megatron(SPECS["gpt"], "tensor=2")
    with pytest.raises(PlanError) as error:
        check_names(plan, captured(SPECS["bert"]).program)
    message = str(error.value)
    assert message.startswith(
        "the plan names parameter 'wte.weight', which this program does not have (it has "
        "bert.embeddings.word_embeddings.weight, "
    )
    assert message.endswith(", ...); correct the name, or use a plan for this model.")


def test_sharding_of_a_plan_is_checked_against_shape_and_mesh() -> None:
    assert (
        str(parse_sharding('[{"data"}, {}]', (4, 6), MESH, "w")) == '#dist.sharding<[{"data"}, {}]>'
    )
    uneven = parse_sharding('[{}, {"tensor"}]', (4, 6), MESH, "w").on((4, 6), MESH)
    assert uneven.local_shape((4, 6)) == (4, 2)
    with pytest.raises(
        PlanError, match=r"^w of shape \[4, 1\]: a dim of size 1 is too small to shard"
    ):
        parse_sharding('[{}, {"data", "tensor"}]', (4, 1), MESH, "w")


@given(st.text(alphabet='[]{}"datensor:, 0123=unred\n#', max_size=40))
def test_any_text_is_a_sharding_or_one_line_of_error(text: str) -> None:
    try:
        parse_sharding(text, (8,), MESH, "w")
    except PlanError as error:
        assert "\n" not in str(error)  # noqa: PT017  most texts are wrong, some are right


def test_names_of_a_plan_without_entries_fit_every_program() -> None:
    text = "input %x : tensor<4xf64>\n%y = aten.neg(%x) : tensor<4xf64>\noutput %y"
    check_names(Plan(), step(text))
