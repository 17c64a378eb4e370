"""Measured runs of others as rows of a table, in the columns of benchmarks/data/runs."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardweave.benchmarks.runs.architectures import PLAIN, Architecture, Told, architecture_of
from shardweave.benchmarks.runs.cells import Cells, RowError
from shardweave.benchmarks.runs.frameworks import framework_of
from shardweave.benchmarks.runs.sizes import SIZED, sizes_of
from shardweave.ir.suggest import did_you_mean

HELD_OUT = 3
"""One group of so many is not looked at until the end."""

OUTER_LAYERS = 2
"""What stands before and behind all layers, where a note counts it."""


COLUMNS = (
    "source cluster gpu gpus gpus_per_node model layers hidden heads kv_heads ffn vocab seq gbs "
    "mbs dp tp pp vpp cp ep sp zero recompute attention precision framework step_ms tflops_gpu "
    "tokens_s_gpu mfu mem_gib status note"
).split()
"""In any order; a file may leave out what it does not know."""

NEEDED = ("gpu", "gpus", "layers", "hidden", "heads", "seq", "gbs")

STATUSES = ("ok", "oom", "error", "unknown")
"""Whether a run fitted. One that does not say is ok where something of it was measured."""

MEASURED = ("step_ms", "tflops_gpu", "tokens_s_gpu", "mfu", "mem_gib")
"""Columns of what a run that fitted took."""


@dataclass(frozen=True)
class MeasuredRun:
    """A row. Counts that it does not say are 1; None: not known. step_s: seconds of a step; 0
    where none was measured. memory_bytes: the most that a device held, 0 where it does not say.
    Both are 0 of a run that is not ok, whatever its cells say of how far it came. per_node:
    devices of a node, 0 for as many as the cluster has. place: its file and line. key_heads: heads
    of keys and values, 0 for as many as of queries. told: which architecture it is taken for.
    flash: which FlashAttention a kernel of attention is."""

    source: str
    cluster: str
    gpu: str
    gpus: int
    per_node: int
    model: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    batch: int
    micro_batch: int | None
    data: int
    tensor: int
    pipeline: int
    chunks: int
    sequence_parallel: bool
    zero: int
    recompute: str
    is_fused: bool
    precision: str
    framework: str
    step_s: float
    memory_bytes: float
    status: str
    note: str
    context: int = 1
    expert: int = 1
    place: str = ""
    key_heads: int = 0
    told: Told = PLAIN
    flash: int = 1

    @property
    def compiles(self) -> bool:
        """Whether its framework, or its note, says that `torch.compile` made its kernels."""
        return "compile" in f"{self.framework} {self.note}".lower()

    @property
    def adapters(self) -> tuple[int, float]:
        """Of a node, and bytes a second that each is sold for, where the cluster's cell says both
        (`4 x 100 Gb/s`, `4 links of 100 Gb/s`); else none, and 0."""
        said = r"(\d+) ?(?:x|(?:\w+ )?links of) ?(\d+) ?Gb(?:it|ps|/s)?\b"
        found = re.search(said, self.cluster)
        return (0, 0.0) if found is None else (int(found[1]), int(found[2]) * 1e9 / 8)

    @property
    def noted_layers(self) -> int:
        """Layers of all stages that the note has; 0 where it has none."""
        return sum(self._noted)

    @property
    def contradiction(self) -> str:
        """What of the note contradicts the row; empty if nothing does."""
        if self.noted_layers in (0, self.layers, self.layers + OUTER_LAYERS):
            return ""
        return (
            f"its note has stages of {self.noted_layers} layers, its row a model of {self.layers}"
        )

    @property
    def _noted(self) -> list[int]:
        found = re.search(r"layers/stage=\[([\d, ]+)\]", self.note)
        return [] if found is None else [int(word) for word in found[1].split(",")]

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """Layers of each stage, where the note says so (`layers/stage=[7, 9, 9, 9]`); else none.

        It may count what stands before and behind all layers as one layer each.
        """
        counts = self._noted
        if sum(counts) == self.layers + OUTER_LAYERS:
            counts[0] -= 1
            counts[-1] -= 1
        is_whole = sum(counts) == self.layers and len(counts) == self.pipeline and min(counts) > 0
        return tuple(counts) if is_whole else ()

    @property
    def group(self) -> tuple[object, ...]:
        """Runs of which a planner would choose one: equal model, devices and batch."""
        return (
            self.source, self.cluster, self.framework, self.precision, self.model, self.layers,
            self.hidden, self.seq, self.gpus, self.batch,
        )  # fmt: skip

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.md5(repr(self.group).encode()).digest()
        return digest[0] % HELD_OUT == 0

    @property
    def name(self) -> str:
        sizes = f"{self.model} {self.layers}x{self.hidden}, seq {self.seq}".strip()
        degrees = f"data={self.data},tensor={self.tensor},pipeline={self.pipeline}"
        return (
            f"{sizes}, batch {self.batch} by {self.micro_batch}, {self.gpus} {self.gpu}, {degrees}"
        )


def read_runs(paths: Iterable[Path]) -> list[MeasuredRun]:
    """The rows of some files. Raises ValueError, with file, line and column, for those that cannot
    be read; OSError."""
    runs, problems = read_rows(paths)
    if problems:
        raise ValueError("\n".join(problems))
    return runs


def read_rows(paths: Iterable[Path]) -> tuple[list[MeasuredRun], list[str]]:
    """The rows of some files that can be read, and what is wrong with each other one.

    Raises ValueError for a file that lacks a column that no run can do without; OSError.
    """
    runs: list[MeasuredRun] = []
    problems: list[str] = []
    for path in paths:
        lines = csv.reader(_text_of(path).splitlines(keepends=True))
        names = [name.strip() for name in next(lines, ())]
        _check_header(path, names)
        for cells in lines:
            place = f"{path}:{lines.line_num}"
            if not any(cell.strip() for cell in cells):
                continue
            try:
                runs.append(run_of(_cells(names, cells), place, path.stem))
            except RowError as error:
                problems.append(f"{place}: {error}")
    return runs, problems


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: it is no text in UTF-8; give runs as CSV, a run a row, with commas."
        ) from None


def _check_header(path: Path, names: Sequence[str]) -> None:
    told = SIZED if "model" in names else ()
    missing = [name for name in NEEDED if name not in (*names, *told)]
    other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), "")
    if missing and other:
        raise ValueError(
            f"{path}:1: the header is one column, '{names[0]}'; separate columns by commas, not by "
            f"{other!r}."
        )
    if missing:
        raise ValueError(
            f"{path}:1: the header has no column {', '.join(map(repr, missing))}; add it (a run is "
            f"predicted from {', '.join(NEEDED)}; benchmarks/data/runs/README.md has all columns)."
        )
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}:1: the header has column '{twice[0]}' twice; keep one of them.")


def note_on_columns(path: Path) -> str:
    """A note on the columns of a file that say nothing here, with what they may mean; or none."""
    names = [name.strip() for name in next(csv.reader(_text_of(path).splitlines()), ())]
    unread: list[str] = []
    for name in names:
        hint = did_you_mean(name, COLUMNS).strip()
        if name not in COLUMNS:
            unread.append(f"{name} ({hint})" if hint else name)
    return f"{path}: columns that are not read: {', '.join(unread)}" if unread else ""


def _cells(names: Sequence[str], cells: Sequence[str]) -> dict[str, str]:
    if len(cells) != len(names):
        raise RowError(
            f"it has {len(cells)} cells, the header {len(names)}; write each column, empty where "
            'nothing is known, and a cell that has commas in quotes ("..")'
        )
    return {name: cell.strip() for name, cell in zip(names, cells, strict=True)}


def run_of(cells: Mapping[str, str], place: str, stem: str) -> MeasuredRun:
    """A row by its columns, and where they leave sizes out by its model's name. stem: its source,
    where it does not say it. Raises RowError."""
    said = {column: cell for column, cell in cells.items() if cell}
    is_sized = all(column in said for column in SIZED)
    row = Cells(said if is_sized else sizes_of(said.get("model", "")) | said)
    hidden, heads, gpus = row.count("hidden"), row.count("heads"), row.count("gpus")
    tensor, pipeline, context = row.count("tp", 1), row.count("pp", 1), row.count("cp", 1)
    source = row.text("source", stem)
    framework = framework_of(row.text("framework"), source)
    key_heads = row.count("kv_heads", 0)
    told = architecture_of(
        row.text("model"),
        hidden=hidden,
        ffn=row.count("ffn", 0),
        heads=heads,
        key_heads=key_heads or heads,
        is_gated=framework.is_gated,
    )
    kind = told.architecture
    is_measured = any(row.text(column) for column in MEASURED)
    status = row.one_of("status", STATUSES, "ok" if is_measured else "unknown")
    found = MeasuredRun(
        source=source,
        cluster=row.text("cluster"),
        gpu=row.text("gpu"),
        gpus=gpus,
        per_node=row.count("gpus_per_node", 0),
        model=row.text("model"),
        layers=row.count("layers"),
        hidden=hidden,
        heads=heads,
        ffn=row.count("ffn", _width(hidden, kind)),
        vocab=row.count("vocab", framework.vocab or kind.vocab),
        seq=row.count("seq"),
        batch=row.count("gbs"),
        micro_batch=row.count("mbs") if row.text("mbs") else None,
        data=row.count("dp", max(1, gpus // (tensor * pipeline * context))),
        tensor=tensor,
        pipeline=pipeline,
        chunks=row.count("vpp", 1),
        sequence_parallel=tensor > 1 and row.is_true("sp", framework.sequence_parallel),
        zero=row.count("zero", framework.zero, least=0),
        recompute=row.recomputation(),
        is_fused=row.is_fused(framework.is_fused or kind.is_gated),
        precision=row.text("precision", framework.precision).lower(),
        framework=row.text("framework"),
        step_s=row.measured("step_ms") / 1e3 if status == "ok" else 0.0,
        memory_bytes=row.measured("mem_gib") * 2**30 if status == "ok" else 0.0,
        status=status,
        note=row.text("note"),
        context=context,
        expert=row.count("ep", 1),
        place=place,
        key_heads=key_heads,
        told=told,
        flash=row.flash(framework.flash),
    )
    _check(found)
    return found


def _width(hidden: int, kind: Architecture) -> int:
    """Features of the MLP of a row that does not say them: a GPT's are four times the hidden ones,
    Llama's two thirds of that, up to a multiple of 256 (Touvron et al. 2023)."""
    return -(-8 * hidden // 3 // 256) * 256 if kind.is_gated else 4 * hidden


def _check(run: MeasuredRun) -> None:
    """Raises RowError where columns contradict each other."""
    degrees = run.data * run.tensor * run.pipeline * run.context
    if degrees != run.gpus:
        raise RowError(
            f"columns dp, tp, pp and cp are {run.data}, {run.tensor}, {run.pipeline} and "
            f"{run.context}, {degrees} devices, but column 'gpus' is {run.gpus}; make them agree"
        )
    for column, size, parts in (("heads", run.hidden, run.heads), ("tp", run.heads, run.tensor)):
        if size % parts:
            whole = {"heads": "hidden", "tp": "heads"}[column]
            raise RowError(
                f"column '{column}' is {parts}, which does not divide column '{whole}', {size}; "
                "write a number that does"
            )
    if run.key_heads and run.heads % run.key_heads:
        raise RowError(
            f"column 'kv_heads' is {run.key_heads}, which does not divide column 'heads', "
            f"{run.heads}; write a number that does"
        )
    if run.zero > 3:
        raise RowError(f"column 'zero' is {run.zero}; write a stage of ZeRO, 0 to 3")
    if run.pipeline > run.layers:
        raise RowError(
            f"column 'pp' is {run.pipeline}, more than column 'layers', {run.layers}; give each "
            "stage a layer"
        )
    if run.pipeline > 1 and run.pipeline * run.chunks > run.layers:
        raise RowError(
            f"columns 'pp' and 'vpp' are {run.pipeline} and {run.chunks}, "
            f"{run.pipeline * run.chunks} stages, more than column 'layers', {run.layers}; write "
            "in 'vpp' how many stages a device has"
        )
