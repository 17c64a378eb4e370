"""A text that is not a program gets one line that says where; nothing else ever happens."""

from __future__ import annotations

import random
import re

import pytest

from shardweave.ir.program.program import Program
from shardweave.ir.program.text import ProgramTextError
from shardweave.ir.verify.program import verify
from shardweave.passes.pipeline import run_passes
from shardweave.tests.marks import slow_where
from shardweave.tests.mutations import mutated
from shardweave.tests.zoo import SPECS, captured, megatron, partitioned

PLACE = re.compile(r"^<text>:\d+:\d+: .+")


@pytest.mark.parametrize("name", slow_where({"t5", "unet"}.__contains__, SPECS))
def test_text_of_every_model_parses_back_to_an_equal_program(name: str) -> None:
    spec, mesh = SPECS[name], "data=2,tensor=2"
    for program in (captured(spec).program, partitioned(spec, mesh, megatron(spec, mesh))):
        text = str(program)
        parsed = Program.parse(text)
        assert parsed == program
        assert str(parsed) == text


@pytest.mark.parametrize("seed", range(8))
def test_mutated_text_is_a_program_or_one_line_with_line_and_column(seed: int) -> None:
    text = str(captured(SPECS["gpt"]).program)
    assert refusals(text, seed, 25) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_thousand_mutated_texts_of_what_ranks_run_never_fail_otherwise(seed: int) -> None:
    mesh, spec = "data=2,tensor=2", SPECS[("gpt", "gpt2", "cnn", "t5")[seed % 4]]
    program = run_passes(partitioned(spec, mesh, megatron(spec, mesh)), "start-collectives")
    assert refusals(str(program), seed, 50) > 0


def refusals(text: str, seed: int, count: int) -> int:
    """How many of `count` mutations of a text are refused, each in one line that says where."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(count):
        outcome = problems_of(mutated(text, rng))
        refused += isinstance(outcome, str)
        if isinstance(outcome, str):
            assert PLACE.match(outcome), outcome
        lines = [outcome] if isinstance(outcome, str) else outcome
        assert all("\n" not in line for line in lines)
    return refused


def problems_of(text: str) -> str | list[str]:
    """What the parser says of a text, or else what the verifier finds in its program."""
    try:
        return verify(Program.parse(text))
    except ProgramTextError as error:
        return str(error)
