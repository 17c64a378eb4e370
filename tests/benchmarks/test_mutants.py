"""Mutants: faults are drawn at places that can change a result, and the nearest tests kill them."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

import pytest

from shardweave.benchmarks.mutants import copy_of, draw, importers, judge, nearest_tests, positions

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
