"""Kernels of layers and heads, compiled for chips that are not here: `python
benchmarks/kernel_builds.py [--quick] [--only TEXT] [--json FILE]`.

Steps of one layer of gpt, llama and bert with their heads, at hidden sizes from 768 to 16,384 and
vocabularies of 50,257 and 128,256, are captured (values are fake) and their kernels built for
sm_80, sm_90 and sm_100 at their default configurations. A row is a kernel and a chip: what it
spills, its narrowest access along the contiguous dim, registers, and estimates of its occupancy and
of the bytes that an SM has asked memory for. What FILE holds is kept: of the same kernels, built by
the same compiler, nothing is built again, nor of steps that TEXT leaves out. Exits 1 if a kernel
spills, or accesses less than 128 bits where neighbouring elements lie side by side.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode

import shardweave as sw
from shardweave.backends.triton.launch.ahead import VECTOR_BITS, Built, build
from shardweave.backends.triton.source.source import KernelSource
from shardweave.driver.kernel_files import distinct_kernels
from shardweave.driver.models.models import build_example
from shardweave.passes.notes import unheard

HIDDEN = (768, 1024, 2048, 4096, 8192, 12288, 16384)
VOCABULARIES = (50257, 128256)
TARGETS = ("sm_80", "sm_90", "sm_100")
HEAD_SIZE = 128
MODELS = {
    "gpt": "gpt:layers=1,hidden={hidden},heads={heads},vocab={vocab},seq=1024,batch=8",
    "llama": (
        "hf:llama:num_hidden_layers=1,hidden_size={hidden},num_attention_heads={heads},"
        "num_key_value_heads={heads},intermediate_size={inner},vocab_size={vocab},batch=8,seq=1024"
    ),
    "bert": (
        "hf:bert:num_hidden_layers=1,hidden_size={hidden},num_attention_heads={heads},"
        "intermediate_size={inner},vocab_size={vocab},max_position_embeddings=512,batch=16,seq=512"
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VERSIONS = {"torch": torch.__version__, "triton": triton.__version__}


@dataclass(frozen=True)
class Row:
    """A kernel built for a chip. digest: as `digest_of`. steps: those that have it. narrow:
    statements, with their bits."""

    digest: str
    kernel: str
    target: str
    steps: tuple[str, ...]
    config: dict[str, int]
    registers: int
    shared_bytes: int
    spilled_bytes: int
    access_bits: int | None
    occupancy: float | None
    bytes_in_flight: int | None
    narrow: dict[str, int]

    @property
    def is_right(self) -> bool:
        return not self.spilled_bytes and not self.narrow


def row_of(built: Built) -> Row:
    """Its row, of no step yet."""
    return Row(
        digest_of(built.kernel), built.kernel.name, built.target, (), built.config,
        built.registers, built.shared_bytes, built.spilled_bytes, built.access_bits,
        built.occupancy, built.bytes_in_flight, built.narrow,
    )  # fmt: skip


def cases(*, quick: bool) -> Iterator[tuple[str, str, int, int]]:
    """Model, dtype, hidden size and vocabulary: each hidden size with one vocabulary, in turn.

    Kernels of the head's loss depend on the vocabulary alone, the others on the hidden size.
    """
    for dtype in DTYPES:
        for model in MODELS:
            for number, hidden in enumerate(HIDDEN):
                yield model, dtype, hidden, VOCABULARIES[number % 2]
                if quick:
                    return


def kernels_of(model: str, dtype: str, hidden: int, vocab: int) -> list[KernelSource]:
    """The distinct kernels of a step."""
    heads = hidden // HEAD_SIZE
    spec = MODELS[model].format(hidden=hidden, heads=heads, inner=4 * hidden, vocab=vocab)
    with FakeTensorMode():
        example = build_example(spec, dtype=DTYPES[dtype])
    with unheard():
        program = sw.capture(example.module, kwargs=example.kwargs)
        kernels, _, unfit = distinct_kernels(sw.run_passes(program, "cse,dce,preset:kernels"))
    if unfit:
        raise ValueError(f"{spec} has regions without kernels: {unfit}.")
    return list(kernels.values())


def digest_of(kernel: KernelSource) -> str:
    """Equal for kernels of which the compiler makes the same."""
    aligned = [size % 16 == 0 for size in kernel.sizes.values()]
    parts = [kernel.source, kernel.pointers, kernel.fixed, aligned, kernel.configs]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


Rows = dict[str, list[Row]]
"""By digest, a row for each chip."""


def with_step(rows: Rows, step: str, kernels: list[KernelSource]) -> Rows:
    """Rows with these kernels for those that a step had; what is not there yet is built."""
    found = {
        digest: [replace(row, steps=tuple(s for s in row.steps if s != step)) for row in group]
        for digest, group in rows.items()
    }
    for kernel in kernels:
        digest = digest_of(kernel)
        group = found.get(digest) or [row_of(build(kernel, target)) for target in TARGETS]
        found[digest] = [replace(row, steps=(*row.steps, step)) for row in group]
    return {digest: group for digest, group in found.items() if group[0].steps}


def kept_rows(file: Path) -> Rows:
    """The rows of a file; none if other versions made them."""
    content: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    read = [Row(**row) for row in content.pop("rows", [])]
    rows: Rows = {}
    for row in read if content == VERSIONS else []:
        rows.setdefault(row.digest, []).append(replace(row, steps=tuple(row.steps)))
    return rows


def text_of(rows: list[Row]) -> str:
    """JSON with a line for each row."""
    head = json.dumps(VERSIONS)[1:-1]
    return f'{{{head}, "rows": [\n' + ",\n".join(json.dumps(asdict(r)) for r in rows) + "\n]}\n"


def summary(target: str, rows: list[Row]) -> tuple[str, ...]:
    """The cells of a chip's line in the table."""
    parts = sorted(row.occupancy or 0 for row in rows)
    flights = sorted(row.bytes_in_flight or 0 for row in rows)
    spilling = sum(row.spilled_bytes > 0 for row in rows)
    narrow = sum(bool(row.narrow) for row in rows)
    return (
        target, str(len(rows)), str(spilling), str(narrow), str(max(r.registers for r in rows)),
        f"{parts[0]:.0%}", f"{parts[len(parts) // 2]:.0%}",
        f"{flights[len(flights) // 2] / 1024:.0f}",
    )  # fmt: skip


def show(rows: list[Row], console: Console) -> None:
    """By chip: how many kernels there are, and the worst of each figure; then what is not right."""
    table = Table("chip", box=None, pad_edge=False)
    heads = ("kernels", "spill", "narrow", "registers, most", "occupancy, least", "median")
    for head in (*heads, "KiB in flight per SM, median"):
        table.add_column(head, justify="right")
    for target in TARGETS:
        table.add_row(*summary(target, [row for row in rows if row.target == target]))
    console.print(table)
    for row in rows:
        if not row.is_right:
            said = f"spills {row.spilled_bytes} bytes" if row.spilled_bytes else ""
            said += "".join(f"\n  {bits} bits: {text}" for text, bits in row.narrow.items())
            print(f"{row.target} {row.kernel} of {row.steps[0]}: {said}")
    met = sum(row.is_right for row in rows)
    print(f"{met} of {len(rows)} builds spill nothing and access {VECTOR_BITS} bits")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--quick", action="store_true", help="one step alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="steps whose name has it")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    file = Path(options.json) if options.json else None
    by_digest = kept_rows(file) if file else {}
    rows: list[Row] = []
    for case in cases(quick=options.quick):
        name = "{} {} hidden={} vocab={}".format(*case)
        if options.only not in name:
            continue
        by_digest = with_step(by_digest, name, kernels_of(*case))
        print(f"built {name}: {len(by_digest)} kernels so far", file=sys.stderr, flush=True)
        rows = [row for group in by_digest.values() for row in group]
        if file:
            file.write_text(text_of(rows))
    show(rows, Console(width=120))
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
