"""Changes between two texts of a program: only what changed, under its layer and phase."""

from __future__ import annotations

import random
import time

from shardweave.passes.observers import changed_text

NOTES = '{layer = "h.0", phase = forward} : tensor<4xf32>'


def text(*ops: str) -> str:
    body = "".join(f"    {op} {NOTES}\n" for op in ops)
    return f"builtin.module {{\n  func.func @step(%x: tensor<4xf32>, %y: tensor<4xf32>) {{\n{body}"


def marked(changes: str) -> list[str]:
    return [line[0] + line[1:].split("{")[0].strip() for line in changes.splitlines()]


def test_equal_texts_have_no_changes() -> None:
    assert changed_text(text("%a = f(%x)"), text("%a = f(%x)")) == ""


def test_changed_op_stands_between_its_neighbours() -> None:
    before = text("%a = f(%x)", "%b = f(%a)", "%c = f(%b)", "%d = f(%c)", "%e = f(%d)")
    after = text("%a = f(%x)", "%b = f(%a)", "%c = g(%b)", "%d = f(%c)", "%e = f(%d)")
    assert marked(changed_text(before, after)) == [
        "@@ layer 'h.0', forward @@",
        " %b = f(%a)",
        "-%c = f(%b)",
        "+%c = g(%b)",
        " %d = f(%c)",
    ]


def test_changes_that_are_apart_are_hunks_of_their_own() -> None:
    ops = [f"%v{i} = f(%x)" for i in range(20)]
    changes = changed_text(text(*ops), text(*ops[:3], *ops[4:15], *ops[16:]))
    assert changes.count("@@ layer") == 2
    assert [line for line in marked(changes) if line[0] == "-"] == ["-%v3 = f(%x)", "-%v15 = f(%x)"]


def test_changed_argument_is_shown_alone() -> None:
    before = text("%a = f(%x)")
    changes = changed_text(before, before.replace("%y: tensor<4xf32>", "%y: tensor<8xf32>"))
    lines = [line for line in changes.splitlines() if line[0] in "-+"]
    assert changes.startswith("@@ arguments and results @@")
    assert [line[0] for line in lines] == ["-", "+"]
    assert all("%x" not in line for line in lines)


def test_changes_applied_to_the_old_text_give_the_new_one() -> None:
    rng = random.Random(0)
    for _ in range(200):
        old = [f"%v{i} = f(%x)" for i in range(rng.randint(0, 12))]
        new = [op for op in old if rng.random() > 0.2]
        for index in range(rng.randint(0, 3)):
            new.insert(rng.randint(0, len(new)), f"%n{index} = g(%x)")
        lines = marked(changed_text(text(*old), text(*new)))
        removed = [line[1:] for line in lines if line[0] == "-"]
        added = [line[1:] for line in lines if line[0] == "+"]
        assert sorted(set(old) - set(removed)) == sorted(set(new) - set(added))
        assert set(removed) <= set(old)
        assert set(added) <= set(new)


def test_many_changes_in_a_long_text_take_no_more_than_seconds() -> None:
    old = [f"%v{i} = f(%v{i - 1})" for i in range(1, 10_000)]
    new = [op.replace(" f(", " g(") if index % 10 == 0 else op for index, op in enumerate(old)]
    start_s = time.process_time()
    changes = changed_text(text(*old), text(*new))
    assert time.process_time() - start_s < 10
    assert changes.count("\n+") == 1000
