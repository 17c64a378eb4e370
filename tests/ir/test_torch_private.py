"""Torch's private names stand in one file, and a torch without some of them still captures."""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardweave.ir import torch_private
from shardweave.ir.capture import trace
from shardweave.ir.notes import TorchNote
from shardweave.tests.ir.capture.stacks import Net, text_of
from shardweave.tests.test_structure import ROOT, layer_files, name_of

HOME = "ir/torch_private.py"
ATTRIBUTES = {
    "_cdata", "_codegen", "_effect", "_get_modified_vars", "_in_spec", "_local_tensor",
    "_out_spec", "_schema", "_spec", "_version",
}  # fmt: skip
"""Private attributes of torch's objects. Those of `torch.nn.Module` and of hooks are not among them:
they are what subclasses have."""

GONE = ("torch._gone:gone",)


def is_private(name: str) -> bool:
    """Whether a dotted name has a private part; the names of ops are ATen's."""
    parts = name.split(".")
    is_op = parts[:2] == ["torch", "ops"]
    return not is_op and any(part.startswith("_") and not part.endswith("__") for part in parts)


def private_names(source: str) -> Iterator[str]:
    """The private names of torch that a file imports, reaches by attributes, or has in a string."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, _, path = ast.unparse(node).partition(".")
            yield f"{known.get(owner, owner)}.{path}"
            if node.attr in ATTRIBUTES and owner != "self":
                yield f"torch.{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (word for word in node.value.split() if word.startswith("torch._"))


def private_names_of_torch(source: str) -> list[str]:
    return [n for n in private_names(source) if n.split(".")[0] == "torch" and is_private(n)]


@pytest.mark.parametrize(
    ("source", "is_allowed"),
    [
        ("import torch._dynamo", False),
        ("from torch.utils import _pytree", False),
        ("from torch import nn\nnn.modules._functions", False),
        ("import torch\ntorch._C.f()", False),
        ("x._spec", False),
        ("place = 'torch._dynamo.config'", False),
        ("import torch\ntorch.ops.aten._to_copy", True),
        ("module._parameters", True),
        ("self._own", True),
        ("from shardweave import _x", True),
    ],
)
def test_check_tells_private_names_of_torch(source: str, is_allowed: bool) -> None:
    assert (private_names_of_torch(source) == []) is is_allowed


def test_no_other_file_has_private_names_of_torch() -> None:
    names = {name_of(path): private_names_of_torch(path.read_text()) for path in layer_files()}
    assert names.pop(HOME)
    assert {name: listed for name, listed in names.items() if listed} == {}


# What a capture makes of a torch that lacks something


@pytest.fixture(autouse=True)
def first_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_said", set())
    # Not the trace that tests share.
    monkeypatch.setattr("shardweave.ir.capture.capture.trace", trace.trace)


def captured() -> str:
    torch.manual_seed(0)
    return text_of(Net(num_blocks=2), (torch.ones(2, 8),), {}, True)


@pytest.fixture(scope="module")
def expected() -> str:
    return captured()


OPTIONAL = [key for key, (_, consequence) in torch_private._REPLACED.items() if consequence]


@pytest.mark.parametrize("key", OPTIONAL)
def test_capture_goes_on_without_what_it_replaces(
    key: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, consequence = torch_private._REPLACED[key]
    monkeypatch.setitem(torch_private._REPLACED, key, (GONE, consequence))
    with pytest.warns(TorchNote) as notes:
        text = captured()
    assert f"has no torch._gone.gone: {consequence}." in {
        str(note.message).partition(" ")[2].partition(" ")[2] for note in notes
    }
    assert text == expected


@pytest.mark.parametrize("name", torch_private._COPYING)
def test_no_block_is_copied_where_torch_lacks_a_name_that_copies_take(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_private._COPYING, name, GONE)
    monkeypatch.delitem(vars(torch_private), name, raising=False)
    assert torch_private.missing_for_copies() == "torch._gone.gone"
    assert not isinstance(object(), getattr(torch_private, name))


@pytest.mark.parametrize("key", torch_private._FOR_COPIES)
def test_blocks_are_traced_where_torch_lacks_a_function_that_copies_replace(
    key: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(torch_private._REPLACED, key, (GONE, ""))
    check_no_copies("torch._gone.gone", expected)


def check_no_copies(missing: str, expected: str) -> None:
    with pytest.warns(TorchNote, match=f"has no {missing}: a capture traces each") as notes:
        assert captured() == expected
    assert len(notes) == 1


@pytest.mark.parametrize("names", ["_OF_TRANSLATOR", "_OF_OUTPUT"])
def test_blocks_are_traced_where_objects_of_dynamo_lack_what_copies_read(
    names: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_private, names, [*getattr(torch_private, names), "gone.attribute"])
    if torch_private.missing_for_copies():
        pytest.skip("no block is copied here")
    check_no_copies("gone.attribute", expected)


@pytest.mark.parametrize("name", torch_private._PLACES)
def test_torch_that_lacks_what_nothing_can_stand_in_for_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(torch_private, name) is not None
    monkeypatch.delitem(vars(torch_private), name)
    monkeypatch.setitem(torch_private._PLACES, name, GONE)
    with pytest.raises(ImportError, match=r"has no torch\._gone\.gone, which shardweave needs"):
        getattr(torch_private, name)


def test_torch_that_is_newer_than_those_tested_is_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_private, "NEWEST_TESTED", "1.13")
    with pytest.warns(TorchNote, match=r"is newer than any .* the newest is 1\.13\."):
        captured()
    with warnings.catch_warnings():
        warnings.simplefilter("error", TorchNote)
        captured()


def test_torch_that_is_tested_is_not_warned_of() -> None:
    if torch_private._minor(torch.__version__) > torch_private._minor(torch_private.NEWEST_TESTED):
        pytest.skip("this torch is newer than those tested")
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", TorchNote)
        captured()
    lacks = torch_private.missing_for_copies()
    assert len(notes) == (1 if lacks else 0)


def test_names_are_looked_for_when_they_are_used() -> None:
    """Dynamo takes a second to import, which a command that only reads programs does not spend."""
    code = (
        "import sys, shardweave.ir.torch_private, shardweave.ir.ops.infer\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(ROOT).parent)
