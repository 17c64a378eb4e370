"""Rewrite the golden record: `python -m shardweave.tests.golden.update [CASE ..]`.

Without names all cases are recorded, after the stored programs are captured anew
(`--programs`); with names or their beginnings only these. `--texts FOLDER` writes the figures of
the cases there in full, and no record: run it in two versions of the code, and compare with
`diff -r`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from shardweave.tests.golden.cases import CASES, versions
from shardweave.tests.golden.figures import (
    EXPECTED,
    differences,
    load_record,
    save_record,
    text_of,
    written,
)
from shardweave.tests.golden.programs import write_programs


def main() -> None:
    """Record, or write texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="names of cases, or their first words")
    parser.add_argument("--programs", action="store_true", help="capture the programs anew")
    parser.add_argument("--texts", type=Path, metavar="FOLDER", help="write full figures there")
    options = parser.parse_args()
    if options.programs:
        write_programs()
    words = tuple(options.cases)
    chosen = [name for name in CASES if not words or name.startswith(words)]
    before = load_record() if EXPECTED.exists() else {}
    record = {name: before[name] for name in CASES if name in before}
    for name in chosen:
        figures = CASES[name]()
        if options.texts is not None:
            _write_texts(options.texts / re.sub(r"\W+", "-", name), figures)
            continue
        record[name] = written(figures)
        for line in differences(before.get(name, {}), record[name]):
            print(f"{name}: {line}")
    if options.texts is None:
        save_record(versions(), record)


def _write_texts(folder: Path, figures: object) -> None:
    assert isinstance(figures, dict)
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in figures.items():
        (folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.txt").write_text(text_of(value) + "\n")


if __name__ == "__main__":
    main()
