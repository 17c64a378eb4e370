"""Pipelines: reading a spec, running on a copy, verifying after each pass, naming who failed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from xdsl.context import Context
from xdsl.dialects import builtin
from xdsl.passes import ModulePass

from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.passes.messages.merge_collectives import MergeCollectivesPass
from shardweave.passes.observers import Observer
from shardweave.passes.partition.propagate_shardings import Propagation
from shardweave.passes.pipeline import (
    PassError,
    PassPipeline,
    as_mesh,
    parse_passes,
    run_passes,
)
from shardweave.passes.prepare.cse import CsePass
from shardweave.passes.registry import PASSES
from shardweave.tests.ir_text import lines, step

TEXT = """
    input %x : tensor<4xf64> [{}]
    %a = aten.neg(%x) : tensor<4xf64>
    %b = aten.neg(%x) : tensor<4xf64>
    %c = aten.add.Tensor(%a, %b) : tensor<4xf64>
    output %c
"""


@dataclass(frozen=True)
class BreakTypesPass(ModulePass):
    """Gives the first op a result type that torch would not."""

    name = "break-types"

    def apply(self, ctx: Context, op: builtin.ModuleOp) -> None:
        first = next(Program(op).ops)
        first.results[0].name_hint = "broken"
        first.results[0]._type = builtin.TensorType(builtin.f32, [4])  # pyright: ignore[reportPrivateUsage]


def test_spec_lists_passes_and_their_options() -> None:
    assert parse_passes("cse,merge-collectives{bucket-bytes=100}") == (
        CsePass(),
        MergeCollectivesPass(bucket_bytes=100),
    )
    assert parse_passes("merge-collectives{bucket_bytes=100}") == parse_passes(
        "merge-collectives{bucket-bytes=100}"
    )
    assert parse_passes("") == ()


def test_text_of_a_pipeline_reads_back_as_the_pipeline() -> None:
    pipeline = PassPipeline("cse,merge-collectives{bucket-bytes=100},dce")
    assert PassPipeline(str(pipeline)) == pipeline


def test_passes_and_specs_can_be_mixed() -> None:
    pipeline = PassPipeline([CsePass(), "dce,cse", MergeCollectivesPass()])
    assert [one.name for one in pipeline.passes] == ["cse", "dce", "cse", "merge-collectives"]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            "shard",
            "there is no pass 'shard'; the passes are: add-pending-sums, apply-plan, block-experts, ",
        ),
        (
            "cse{fast=true}",
            "pass 'cse' has no option 'fast'; its options are none.",
        ),
        (
            'merge-collectives{bucket-bytes="x"}',
            "pass 'merge-collectives': option 'bucket-bytes' is 'x'; give a whole number; "
            "its options are bucket-bytes.",
        ),
        (
            "merge-collectives{bucket-bytes=1,2}",
            "pass 'merge-collectives': option 'bucket-bytes' is '1,2'; give a whole number; "
            "its options are bucket-bytes.",
        ),
        (
            "merge-collectives{bucket-bytes=1.5}",
            "pass 'merge-collectives': option 'bucket-bytes' is '1.5'; give a whole number; "
            "its options are bucket-bytes.",
        ),
        (
            "fuse-kernels{matmul=1}",
            "pass 'fuse-kernels': option 'matmul' is '1'; give true or false; its options are ",
        ),
        (
            "apply-plan{file=true}",
            "pass 'apply-plan': option 'file' is 'True'; give a text; its options are ",
        ),
        (
            "merge-collectives{bucket-bytes=true}",
            "pass 'merge-collectives': option 'bucket-bytes' is 'True'; give a whole number; "
            "its options are bucket-bytes.",
        ),
        (
            "plan-auto{time-limit-s=soon}",
            "pass 'plan-auto': option 'time-limit-s' is 'soon'; give a number; its options are ",
        ),
        (
            "preset:oases{a=1}",
            "preset 'oases' has no options; write its passes out and change them: ",
        ),
        (
            "merge-collectives{bucket-bytes=1234567890123456789}",
            "a number in the passes has over 18 digits, more than any option takes.",
        ),
        (
            "cse dce",
            "the passes 'cse dce' do not parse at column 4: Expected a comma or pass arguments "
            "here; write 'pass,pass{option=value}'.",
        ),
        ("cse,,dce", "the passes 'cse,,dce' do not parse at column 5: Expected pass name here"),
        ("cse{", "the passes 'cse{' do not parse at column 5: Expected argument name here"),
    ],
)
def test_wrong_spec_is_one_line_that_says_what_and_where(spec: str, expected: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  the message is compared below
        parse_passes(spec)
    assert str(error.value).startswith(expected)
    assert "\n" not in str(error.value)


def test_passes_run_on_a_copy_in_order() -> None:
    before = step(TEXT)
    text = str(before)
    after = run_passes(before, "cse,dce")
    assert lines(after)[:-1] == [
        "%a = aten.neg(%x) : tensor<4xf64>",
        "%c = aten.add.Tensor(%a, %a) : tensor<4xf64>",
    ]
    assert str(before) == text


def test_mesh_is_put_on_the_copy_only() -> None:
    before = step(TEXT)
    after = run_passes(before, "cse", mesh="data=2,tensor=4")
    assert after.mesh == Mesh(data=2, tensor=4)
    assert before.mesh is None


def test_mesh_can_be_given_as_text_or_sizes() -> None:
    assert as_mesh("data=2,tensor=4") == as_mesh({"data": 2, "tensor": 4}) == Mesh(data=2, tensor=4)


def test_pass_that_leaves_an_invalid_program_is_named() -> None:
    with pytest.raises(PassError) as error:
        PassPipeline([CsePass(), BreakTypesPass()]).run(step(TEXT))
    assert str(error.value) == (
        "pass 'break-types' left an invalid program: aten.neg (%broken): result type is "
        "tensor<4xf32>, expected tensor<4xf64>."
    )


def test_observer_sees_the_program_before_and_after_each_pass() -> None:
    seen: list[tuple[str, str, int]] = []

    class Watch(Observer):
        def before(self, pass_: ModulePass, program: Program) -> None:
            seen.append(("before", pass_.name, len(lines(program))))

        def after(self, pass_: ModulePass, program: Program) -> None:
            seen.append(("after", pass_.name, len(lines(program))))

    PassPipeline("cse,dce").run(step(TEXT), observer=Watch())
    assert seen == [
        ("before", "cse", 4),
        ("after", "cse", 3),
        ("before", "dce", 3),
        ("after", "dce", 3),
    ]


@pytest.mark.parametrize("name", PASSES)
def test_every_registered_pass_can_be_named_in_a_spec(name: str) -> None:
    (one,) = parse_passes(name)
    assert one.name == name


def test_propagation_runs_forward_once_where_no_pass_in_between_changes_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[Program] = []
    forward = Propagation.forward

    def counted(self: Propagation) -> None:
        runs.append(self.program)
        forward(self)

    monkeypatch.setattr(Propagation, "forward", counted)
    passes = "add-pending-sums,add-pending-sums,propagate-shardings"
    run_passes(step(TEXT, "data=2"), passes)
    assert len(runs) == 1
    run_passes(step(TEXT, "data=2"), "add-pending-sums,cse,propagate-shardings")
    assert len(runs) == 3
