"""A text that is not a program gets one line that says where; nothing else ever happens."""

from __future__ import annotations

import random
import re

import pytest

from shardweave.ir.program import Program
from shardweave.ir.text import ProgramTextError
from shardweave.ir.verify import verify
from shardweave.tests.zoo import SPECS, captured, megatron, partitioned

PLACE = re.compile(r"^<text>:\d+:\d+: .+")
CHARACTERS = "%{}[]()<>:=,\"'@#-.x0129 abcf\n"


def mutated(text: str, rng: random.Random) -> str:
    """The text with one slip of the pen: a character or a word gone, doubled or changed."""
    kind = rng.randrange(4)
    if kind == 0:
        at = rng.randrange(len(text))
        return text[:at] + text[at + 1 :]
    if kind == 1:
        at = rng.randrange(len(text))
        return text[:at] + rng.choice(CHARACTERS) + text[at + 1 :]
    words = list(re.finditer(r"[\w.%]+", text))
    one, other = rng.choice(words), rng.choice(words)
    if kind == 2:
        return text[: one.start()] + text[one.end() :]
    return text[: one.start()] + other.group() + text[one.end() :]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_text_of_every_model_parses_back_to_an_equal_program(spec: str) -> None:
    mesh = "data=2,tensor=2"
    for program in (captured(spec).program, partitioned(spec, mesh, megatron(spec, mesh))):
        text = str(program)
        parsed = Program.parse(text)
        assert parsed == program
        assert str(parsed) == text


@pytest.mark.parametrize("seed", range(8))
def test_mutated_text_is_a_program_or_one_line_with_line_and_column(seed: int) -> None:
    text = str(captured(SPECS["gpt"]).program)
    rng = random.Random(seed)
    refused = 0
    for _ in range(25):
        changed = mutated(text, rng)
        outcome = problems_of(changed)
        refused += isinstance(outcome, str)
        if isinstance(outcome, str):
            assert PLACE.match(outcome), outcome
        assert all(
            "\n" not in line for line in ([outcome] if isinstance(outcome, str) else outcome)
        )
    assert refused


def problems_of(text: str) -> str | list[str]:
    """What the parser says of a text, or else what the verifier finds in its program."""
    try:
        return verify(Program.parse(text))
    except ProgramTextError as error:
        return str(error)
