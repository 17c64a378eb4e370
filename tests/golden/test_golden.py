"""Programs, plans, times and texts of small models are as recorded.

A change that is meant to alter figures rewrites the record, and its review sees which.
"""

from __future__ import annotations

import pytest

from shardweave.tests.golden.cases import CASES, moved
from shardweave.tests.golden.figures import differences, load_record, written

RECORD = load_record()

HELP = """
If the change is meant, record it: python -m shardweave.tests.golden.update '{name}'
To see the texts, run this before and after the change, and compare the folders by diff -r:
    python -m shardweave.tests.golden.update '{name}' --texts FOLDER"""


def test_record_holds_every_case_and_no_other() -> None:
    assert RECORD.keys() - {"versions"} == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_figures_are_as_recorded(name: str) -> None:
    if reason := moved(name, RECORD["versions"]):
        pytest.skip(reason)
    lines = differences(RECORD[name], written(CASES[name]()))
    assert not lines, "\n".join(
        [f"'{name}' differs from the record:", *lines, HELP.format(name=name)]
    )


def test_difference_names_the_figure_and_both_values() -> None:
    before, after = written({"time_s": 1.0, "text": "a"}), written({"time_s": 2.0, "text": "a"})
    assert differences(before, after) == ["time_s: 1.0 -> 2.0"]
    assert differences(before, before | {"time_s": 1.0 + 1e-9}) == []
    assert differences(written({"text": "a\n" * 50}), written({"text": "b\n" * 50})) != []
