"""Presets: what they stand for, how they nest and print, and that each of them is exact."""

from __future__ import annotations

import pytest

from shardweave.ir.program.program import Program
from shardweave.passes.pipeline import PassPipeline, parse_passes
from shardweave.passes.presets import PRESETS, SUMMARIES, readable_spec
from shardweave.tests.real_step import annotated, assert_equals_eager

WHOLE = sorted(set(PRESETS) - {"recompute", "kernels"})
"""Presets that take an annotated program to a local one."""


@pytest.mark.parametrize("name", PRESETS)
def test_preset_printed_as_a_spec_reads_back_as_the_preset(name: str) -> None:
    pipeline = PassPipeline(f"preset:{name}")
    assert "preset" not in str(pipeline)
    assert PassPipeline(str(pipeline)) == pipeline
    assert len(pipeline.passes) >= 1


def test_presets_stand_among_passes_and_within_presets() -> None:
    names = [one.name for one in parse_passes("cse,preset:megatron,dce")]
    inner = [one.name for one in parse_passes(f"cse,{PRESETS['megatron']},dce")]
    assert names == inner
    assert names[:2] == ["cse", "split-addmm"]
    assert names[-2:] == ["overlap-communication", "dce"]


def test_every_preset_has_a_summary() -> None:
    assert set(SUMMARIES) == set(PRESETS)


def test_unknown_preset_is_answered_with_those_there_are() -> None:
    with pytest.raises(
        ValueError, match="there is no preset 'osaes'; the presets are: axonn, default, domino"
    ):
        parse_passes("cse,preset:osaes")


def test_preset_with_options_is_answered_with_its_passes_written_out() -> None:
    with pytest.raises(
        ValueError, match="has no options; write its passes out and change them: re"
    ):
        parse_passes("preset:recompute{policy=none}")


def test_error_behind_a_preset_is_at_its_own_column() -> None:
    with pytest.raises(ValueError, match="do not parse at column 13"):
        parse_passes("preset:merak cse")


def test_word_preset_within_a_string_is_left_alone() -> None:
    assert readable_spec('apply-plan{file="preset:x.json"},preset:oases') == (
        'apply-plan{file="preset:x.json"},preset-oases'
    )


@pytest.mark.parametrize("name", WHOLE)
def test_every_whole_preset_gives_the_step_of_a_real_model(name: str) -> None:
    program: Program = PassPipeline(f"preset:{name}").run(annotated())
    assert program.is_local
    assert_equals_eager(program)
