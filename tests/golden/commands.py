"""Golden cases of the command line: what commands print and write, refuse, and take."""

from __future__ import annotations

import argparse
import base64
import contextlib
import gzip
import io
import os
import re
import shlex
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from shardweave.driver.cli import command_line, main
from shardweave.driver.commands.arguments import commands_of
from shardweave.driver.report.explorer import recorder
from shardweave.tests.golden.figures import Figures
from shardweave.tests.golden.programs import FOLDER

UNSURE = re.compile(
    r"\bin \d{1,3}(\.\d+)? (s|ms|us)\b|(?<=x\.html )\(.*\)|(?<=\.step )\(.*\)"
    r"|(?<=\bstep\.mlir )\(.*\)|(?<=\bx\.mlir )\(.*\)"
    r"|error \d\.\d+e-\d+( \(in \S+\))?"
)
"""Measured seconds, sizes of packed files and of files with locations, and rounding errors: these
differ between machines and runs."""

PACKED = re.compile(r"\bH4sI[A-Za-z0-9+/=]{40,}")
"""Data of a page, as base64 of gzip."""

SLOW = "--cluster slow.yaml"
LOCAL = "opt gpt.mlir --mesh data=2,tensor=2 --passes plan-megatron,preset:default -o local.mlir"
PLAN = f"plan gpt.mlir --planner megatron --mesh data=2,tensor=2 {SLOW} -o plan.json"
STAGES = f"plan deep.mlir --planner megatron --mesh pipeline=2,data=2 {SLOW} -o stages.json"

COMMANDS: dict[str, tuple[str, ...]] = {
    "capture": ("capture gpt:layers=1,hidden=8,heads=2,vocab=8,seq=4,batch=2 -o step.mlir",),
    "capture for evaluation": (
        "capture cnn:depth=10,channels=4,size=8,batch=2 --eval --seed 3 --dtype float64 -o x.mlir",
    ),
    "opt": (f"{LOCAL} --print-after-change",),
    "opt with proofs": (LOCAL.replace(" -o", " --prove --print-after cse -o"),),
    "opt with validation": (LOCAL.replace(" -o", " --validate -o"),),
    "opt stops": (LOCAL.replace(" -o", " --stop-after dce --dump-dir passes -o"),),
    "list of passes": ("opt --list-passes",),
    "pipeline": ('opt --print-pipeline --passes "preset:oases,fuse-kernels{matmul=false}"',),
    "show": (LOCAL, "show local.mlir"),
    "show all": ("show llama.mlir",),
    "plan": (PLAN,),
    "plan explained": (
        f"plan slots.mlir {SLOW} --mesh data=2 -O simulate=2 --explain --show-passes --update AdamW",
    ),
    "plans compared": (f"plan gpt.mlir {SLOW} --mesh data=2,tensor=2 --compare megatron,replicated",),
    "plans of files": (PLAN, STAGES, f"plan gpt.mlir {SLOW} --compare plan.json,megatron"),
    "simulate": (PLAN, f"simulate gpt.mlir --plan plan.json {SLOW} --update AdamW --trace t.json"),
    "simulate stages": (STAGES, f"simulate deep.mlir --plan stages.json {SLOW} --json"),
    "simulate a global program": (f"simulate gpt.mlir {SLOW} --optimizer 2",),
    "report": (PLAN, f"report gpt.mlir --plan plan.json {SLOW} -o report.html"),
    "report of stages": (STAGES, f"report deep.mlir --plan stages.json {SLOW} -o report.html"),
    "explore": (f"explore gpt.mlir --mesh tensor=2 --passes plan-megatron,preset:default {SLOW} -o x.html",),
    "explore plans": (PLAN, f"explore gpt.mlir --plan plan.json {SLOW} -o x.html"),
    "diff": (LOCAL, "diff gpt.mlir local.mlir --all --html diff.html"),
    "diff as data": (LOCAL, LOCAL.replace(":default -o local", ":oases -o other"), f"diff local.mlir other.mlir --json {SLOW}"),
    "diff of equals": ("diff gpt.mlir gpt.mlir --exit-code",),
    "diff with a code": ("diff gpt.mlir deep.mlir --exit-code",),
    "prove": (LOCAL, "prove local.mlir --against gpt.mlir"),
    "prove another": (LOCAL, "prove local.mlir --against deep.mlir"),
    "kernels": (LOCAL, "kernels local.mlir --target '' -o kernels"),
    "compile": ("compile gpt:layers=1,hidden=8,heads=2,vocab=8,seq=4,batch=4 --mesh data=2 --zero 3 -o a.step",),
    "run": ("run gpt:layers=1,hidden=8,heads=2,vocab=8,seq=4,batch=4 --mesh data=2,tensor=2 --backend reference --check --dtype float64",),
    "completion": ("completion bash",),
}  # fmt: skip
"""Commands that run one after another in a folder with the stored programs."""

REFUSED = (
    "prove gpt.mlir",
    "prove gpt.mlir --against none.mlir",
    "plan gpt.mlir --mesh data=3,tensor=2 --planner megatran",
    "plan gpt.mlir --mesh data=2 --explain",
    f"plan gpt.mlir {SLOW} --compare megatron",
    f"plan gpt.mlir {SLOW} -O simulate=4 -O steps=2",
    "simulate gpt.mlir --cluster testbad",
    "opt gpt.mlir --passes dse --mesh data=2",
    "opt gpt.mlir --passes preset:default",
    "kernels gpt.mlir --target sm_1 -o x",
    "diff - - --exit-code",
    "capture gpt:layers=0 -o x",
    "capture gpt:layer=1 -o x",
    "capture gpt --mesh data=2",
    "run gpt --backend refrence",
    "report gpt.mlir -o x.html",
    "explore gpt.mlir --plan a --passes cse --cluster testbed -o x",
    "compile gpt --mesh data=0 -o x",
)
"""Commands that are refused."""


def ran(lines: tuple[str, ...]) -> dict[str, Any]:
    """Run commands in a new folder; return the last one's code, output and files."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        stack.callback(os.chdir, before)
        os.chdir(folder)
        for path in (*FOLDER.glob("*.mlir"), FOLDER.parent / "clusters/slow.yaml"):
            Path(path.name).write_text(path.read_text())
        stack.enter_context(mock.patch.dict(os.environ, {"COLUMNS": "100"}))
        stopped = SimpleNamespace(perf_counter=lambda: 0.0)
        stack.enter_context(mock.patch(f"{recorder.__name__}.time", stopped))
        figures: dict[str, Any] = {}
        for line in lines:
            known = set(Path().rglob("*"))
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(shlex.split(line))
            figures = {"code": code, "out": timeless(out), "err": timeless(err)}
        new = sorted(set(Path().rglob("*")) - known)  # pyright: ignore[reportPossiblyUnbound]
        files = {str(path): text_of_file(path) for path in new if path.is_file()}
        return figures | files | {"files": " ".join(map(str, new))}


def timeless(text: io.StringIO) -> str:
    return UNSURE.sub("~", text.getvalue())


def text_of_file(path: Path) -> str:
    """Read a file that a command wrote, with its packed data unpacked, which zlib packs anew in
    each version. Binary files have no text."""
    if path.suffix not in (".mlir", ".json", ".html", ".py"):
        return ""
    return PACKED.sub(lambda m: gzip.decompress(base64.b64decode(m[0])).decode(), path.read_text())


def command_figures(name: str) -> Figures:
    """Figures of commands that run."""
    return ran(COMMANDS[name])


def refusal_figures() -> Figures:
    """Figures of all commands that are refused: the code and the error of each."""
    figures: dict[str, Any] = {}
    for line in REFUSED:
        refused = ran((line,))
        figures[line] = f"{refused['code']}: {refused['out']}{refused['err']}"
    return figures


def flag_figures() -> Figures:
    """Figures of each command's arguments: all that a parser knows of them."""
    return {name: _arguments(parser) for name, parser in commands_of(command_line()).items()}


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    keys = ("option_strings", "dest", "nargs", "default", "choices", "required", "metavar", "help")
    return [
        f"{type(action).__name__} {[_listed(getattr(action, key)) for key in keys]}"
        for action in parser._actions
    ]


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, dict | range) else value
