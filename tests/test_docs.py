"""What the pages say is true: their programs parse, their code runs, their links lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch
from mkdocs.commands.build import build
from mkdocs.config import load_config

from shardweave.docs.reference import PAGES as REFERENCE
from shardweave.driver.cli import command_line
from shardweave.driver.commands.arguments import commands_of
from shardweave.ir.dialects.dist import dist_dialect
from shardweave.ir.ops import registry
from shardweave.ir.sharding.rules import lookup
from shardweave.passes.registry import PASSES
from shardweave.planners.registry import PLANNERS
from shardweave.tests.marks import slow_where
from shardweave.tests.pages import PageRun, blocks_of

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"", "console", "diff", "json", "mlir", "python", "sh", "text"}
SLOW = ("plans", "tools", "explore", "planners", "pipelines", "overlap")
COMMANDS = commands_of(command_line())
_GPU_TEST = re.compile(r"@pytest\.mark\.gpu\n(?:@.*\n)*def (test_\w+)")
_MAKE = re.compile(r"(?:^|`)make ([a-z-]+)", re.M)
_NAMED = re.compile(
    r"`((?:ir|planners|passes|backends|driver|tests|benchmarks|examples)/[\w./*-]+)(?::([\w.]+))?`"
)
_COMMAND = re.compile(r"\bshardweave ([a-z]+)([^`\n]*)")
_OPTION = re.compile(r"(?<=\s)--?[A-Za-z][\w-]*")
_PICTURE = re.compile(r'<img[^>]*src="([^"]*)"')
_LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageRun]:
    """A run in a folder of its own, that leaves no rule, pass, default dtype or random state behind."""
    monkeypatch.chdir(tmp_path)
    kept = patch.dict(registry._RECORDS), patch.dict(lookup._known), patch.dict(PASSES)
    dtype = torch.get_default_dtype()
    with kept[0], kept[1], kept[2], torch.random.fork_rng(devices=[]):
        yield PageRun(tmp_path)
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("page", slow_where(lambda page: page.stem in SLOW, PAGES), ids=name_of)
def test_every_block_of_the_page_is_as_it_says(page: Path, page_run: PageRun) -> None:
    for block in blocks_of(page.read_text()):
        try:
            page_run.run(block)
        except Exception as error:
            error.add_note(f"in the block at {name_of(page)}:{block.line}")
            raise


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_has_a_language_that_is_checked_or_known_not_to_be(page: Path) -> None:
    found = {block.language: block.line for block in blocks_of(page.read_text())}
    assert {language: found[language] for language in set(found) - LANGUAGES} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_files_lead_to_files(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    known = {page.parent / link for link in links if link in REFERENCE}  # the code writes them
    paths = {page.parent / link for link in links}
    assert {path for path in paths - known if not path.exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_functions_that_the_page_names_exist(page: Path) -> None:
    missing = [
        f"{path}:{name}"
        for path, name in _NAMED.findall(page.read_text())
        if not any(_defines(file, name) for file in ROOT.glob(path))
    ]
    assert missing == []


def _defines(file: Path, name: str) -> bool:
    """Whether a file has a function or class, or a class in it a method (`Rule.seat`)."""
    text = file.read_text() if name else ""
    return all(
        re.search(rf"(?:def|class) {part}\b", text) for part in filter(None, name.split("."))
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_targets_of_make_that_the_page_names_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(_MAKE.findall(page.read_text())) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_of_commands_that_the_page_shows_exist(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    shown = [(name, _OPTION.findall(rest)) for name, rest in _COMMAND.findall(text)]
    unknown = [
        f"{name} {option}"
        for name, options in shown
        for option in options
        if name in COMMANDS and option not in COMMANDS[name]._option_string_actions
    ]
    assert unknown == []


@pytest.mark.parametrize("page", PAGES[:2], ids=name_of)
def test_links_to_headings_lead_to_headings(page: Path) -> None:
    """Of the pages in `docs`, the build of the site tells."""
    found = re.findall(r"\]\(([\w./-]+\.md)#([\w-]+)\)", page.read_text())
    missing = [link for link in found if link[1] not in _anchors(page.parent / link[0])]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_tests_that_need_a_gpu_are_those_that_the_page_on_gpus_lists() -> None:
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    marked = {name for source in sources for name in _GPU_TEST.findall(source)}
    listed = re.findall(r"^\| `(test_\w+)`", (ROOT / "docs" / "gpu.md").read_text(), re.M)
    assert set(listed) == marked


@pytest.mark.parametrize("name", PLANNERS)
def test_every_planner_is_in_the_table_of_planners(name: str) -> None:
    assert f"\n| `{name}` |" in (ROOT / "docs" / "choosing-a-planner.md").read_text()


@pytest.mark.parametrize(
    "name",
    [op.name for op in dist_dialect().operations if not op.name.startswith("dist.start_")],
)
def test_ops_that_the_page_on_the_dialect_is_to_explain_are_there(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "dialect.md").read_text()


def test_pages_build_as_a_site_without_a_warning(tmp_path: Path) -> None:
    # In this process, since the pages that the code writes import most of it. Links and anchors
    # that lead nowhere are warnings, and `strict` is set, so that a warning is an error.
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    assert config.strict
    for name in [path.name for path in (ROOT / "docs").glob("*.md")] + list(REFERENCE):
        stem = name.removesuffix(".md")
        folder = tmp_path if stem == "index" else tmp_path / stem
        text = (folder / "index.html").read_text()
        assert 'href="../passes/registry.py"' not in text
        assert [src for src in _PICTURE.findall(text) if not (folder / src).exists()] == []
        # Nothing is loaded from elsewhere when the page is opened.
        assert (
            re.findall(r"<(?:script|img)[^>]*src=\"?https?:|<link[^>]*stylesheet[^>]*https?:", text)
            == []
        )


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=name_of)
def test_pictures_are_well_formed_and_carry_no_scripts(picture: Path) -> None:
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(picture).iter()}
    assert "svg" in tags
    assert tags & {"script", "foreignObject", "image"} == set()
