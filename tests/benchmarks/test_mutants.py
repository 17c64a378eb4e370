"""Mutants: faults are drawn at places that can change a result, and the nearest tests kill them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from shardweave.benchmarks import reached
from shardweave.benchmarks.mutants import (
    copy_of,
    draw,
    importers,
    judge,
    nearest_tests,
    positions,
    record_reached,
)

SOURCE = '''"""Says nothing."""


def larger(x: int, y: int = 1) -> bool:
    if y < 0:
        raise ValueError("y is negative.")
    return x > y
'''
TEST = """from shardweave.ir.larger import larger


def test_larger() -> None:
    assert larger(2) and not larger(1) and not larger(0)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one function and its test."""
    for name, text in {"ir/larger.py": SOURCE, "tests/test_size.py": TEST}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def lines_of(kind: str) -> list[int]:
    """The lines at which a kind of fault fits."""
    return [line for _, _, line in positions(SOURCE, kind)]


def test_faults_fit_neither_types_nor_texts_of_errors() -> None:
    assert lines_of("comparison") == [5, 7]
    assert set(lines_of("number")) == {5}
    assert lines_of("deletion") == [5]


def test_draws_of_one_seed_are_the_same_and_all_different(repository: Path) -> None:
    mutants = draw(repository, "ir", 4, seed=3)
    assert mutants == draw(repository, "ir", 4, seed=3)
    assert len({mutant.text for mutant in mutants}) == 4


def test_more_mutants_than_places_are_refused(repository: Path) -> None:
    with pytest.raises(ValueError, match="give fewer"):
        draw(repository, "ir", 50, seed=0)
    with pytest.raises(ValueError, match="holds no Python files"):
        draw(repository, "passes", 1, seed=0)


def test_fault_is_killed_by_the_test_that_imports_its_file(
    repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = copy_of(repository, tmp_path_factory.mktemp("copy"))
    importers.cache_clear()
    assert nearest_tests(root, "ir/larger.py") == ["tests/test_size.py"]
    options = argparse.Namespace(workers=0, timeout_s=60.0, nearest=True)
    turned = next(m for m in draw(root, "ir", 6, seed=0) if m.line == 7)
    row = judge(root, turned, options)
    assert row.killer.startswith("tests/test_size.py::test_larger")
    assert (root / "ir/larger.py").read_text() == SOURCE


def test_tests_that_reach_a_line_are_recorded_and_run_first(repository: Path) -> None:
    (repository / "tests/test_other.py").write_text("def test_other() -> None:\n    pass\n")
    benchmarks = repository / "benchmarks"
    benchmarks.mkdir()
    shutil.copy2(reached.__file__, benchmarks)
    root = copy_of(repository, repository / "copy")
    options = argparse.Namespace(workers=0, timeout_s=60.0, limit_s=60.0)
    turned = [m for m in draw(root, "ir", 6, seed=0) if m.line == 7][:1]
    marked = record_reached(root, turned, options)
    assert marked.tests == {0: {"tests/test_size.py::test_larger"}}
    assert set(marked.seconds) == {
        "tests/test_size.py::test_larger",
        "tests/test_other.py::test_other",
    }
    row = judge(root, turned[0], options, sorted(marked.tests[0]), marked.seconds)
    assert row.killer == "tests/test_size.py::test_larger"
    assert row.reached == 1


def test_marks_stand_before_whole_statements_of_functions(tmp_path: Path) -> None:
    source = "X = 1\n\n\ndef f(x):\n    if x:\n        return [\n            x]\n    elif X:\n        x = 2\n"
    (tmp_path / "a.py").write_text(source)
    reached.mark_lines(tmp_path, [("a.py", 1), ("a.py", 7), ("a.py", 8)])
    lines = (tmp_path / "a.py").read_text().splitlines()
    assert lines[4].strip().endswith("hit(2)")
    assert lines[6].strip().endswith("hit(1)")
    assert len(lines) == len(source.splitlines()) + 2
