"""Experts under any routing, and with other splits: `python benchmarks/routings.py`

`--routings 2000`: a router and gated experts take batches that leave experts empty, go to the same
experts with all tokens, or tie everywhere, with top-1 to top-8 of 8 experts, on meshes with an axis
`expert`, tokens sent or gathered. Loss and gradients are compared with eager PyTorch's in float64
at 1e-9, on the reference backend; with `--ranks 2` (or 4) between processes.

`--splits 200`: in the program of a rank, the numbers, lists, axes and operands by which tokens are
sent are changed. Such a program has to be refused, or to compute the same.

Exits 1 if a result differs or nothing refuses a changed split that computes something else.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from rank_processes import end_with, rows_of_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import shardweave as sw
from shardweave.backends.reference.reference import run_reference
from shardweave.benchmarks.moe_models import AnyDtype
from shardweave.driver.checking.check import compare_steps, results_of, run_eager
from shardweave.driver.checking.sample import sample_values
from shardweave.ir.program.program import Program
from shardweave.ir.verify.program import verify
from shardweave.passes.presets import PRESETS

grouped_mm = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]

TOKENS, HIDDEN, INNER, EXPERTS = 16, 8, 6, 8
KINDS = ("any", "empty", "the same", "ties")
MESHES = (
    "expert=2", "data=2,expert=2", "expert=2,tensor=2", "expert=4", "data=2,expert=4",
    "stage=2,expert=2",
)  # fmt: skip
MODES = ("all-to-all", "gather", "cheaper")
BOUND = 1e-9
FAR = 1e6
"""Added to a router's score, or taken off it, of an expert that all tokens choose, or none."""


class Mixture(nn.Module):
    """A norm, a router whose scores a batch may shift, gated experts, a residual and a head."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self.choices = choices
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, INNER))
        self.gate = nn.Parameter(0.3 * torch.randn(EXPERTS, HIDDEN, INNER))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, INNER, HIDDEN))

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        x = self.norm(x)
        scores = self.router(x)
        chosen = ((scores * scale).round() + shift).topk(self.choices).indices
        weights = scores.softmax(-1).gather(1, chosen)
        expert, order = chosen.view(-1).sort(stable=True)
        counts = torch.histc(expert.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        ends, token = counts.cumsum(0, dtype=torch.int32), order // self.choices
        rows = x[token]
        inner = F.silu(grouped_mm(rows, self.gate, offs=ends)) * grouped_mm(
            rows, self.up, offs=ends
        )
        out = grouped_mm(inner, self.down, offs=ends) * weights.view(-1)[order][:, None]
        added = torch.zeros_like(x).scatter_add(0, token[:, None].expand(-1, HIDDEN), out)
        return self.head(x + added).square().mean()


def batch(seed: int, choices: int) -> dict[str, Tensor]:
    """Tokens, and the shift and scale of their scores that make one of KINDS of routing.

    Choices are made by scores times `scale`, rounded: with a small one many tie, with 0 all.
    """
    made = torch.Generator().manual_seed(seed)
    kind = KINDS[seed % len(KINDS)]
    shift = torch.zeros(EXPERTS, dtype=torch.float64)
    order = torch.randperm(EXPERTS, generator=made)
    if kind == "the same":
        shift[order[:choices]] = FAR
    elif kind == "empty":
        empty = int(torch.randint(EXPERTS - choices + 1, (), generator=made))
        shift[order[:empty]] = -FAR
    x = torch.randn(TOKENS, HIDDEN, generator=made, dtype=torch.float64)
    scale = float(seed % 3) if kind == "ties" else FAR
    return {"x": x, "shift": FAR * shift, "scale": torch.tensor(scale, dtype=x.dtype)}


def routings(count: int, seed: int, backend: str, ranks: int) -> Iterator[dict[str, Any]]:
    """Rows of comparisons, one for each mesh, mode and number of choices."""
    meshes = [mesh for mesh in MESHES if ranks in (0, sw.Mesh.parse(mesh).num_devices)]
    cases = [(mesh, choices) for choices in range(1, EXPERTS + 1) for mesh in meshes]
    for number, (mesh, choices) in enumerate(cases):
        begin, end = (seed + count * at // len(cases) for at in (number, number + 1))
        seeds = range(begin, end)
        if not seeds:
            continue
        mode = MODES[(choices + number) % len(MODES)]
        torch.manual_seed(seed)
        model = Mixture(choices).double()
        step = compiled(model, mesh, mode, backend, batch(seed, choices))
        worst = 0.0
        for each in seeds:
            given = batch(each, choices)
            step.zero_grad(set_to_none=True)
            steps = [results_of(step, step(**given))]
            with AnyDtype():
                check = compare_steps(steps, [run_eager(model, given)], torch.float64)
            worst = max(worst, check.loss_error, check.max_rel_grad_error)
        kinds = Counter(KINDS[each % len(KINDS)] for each in seeds)
        yield {"mesh": mesh, "mode": mode, "choices": choices, "routings": len(seeds),
               "worst": worst, **kinds}  # fmt: skip


def compiled(
    model: Mixture, mesh: str, mode: str, backend: str, given: Mapping[str, Tensor]
) -> sw.CompiledModule:
    """The step on `mesh`, with tokens sent or gathered."""
    passes = PRESETS["partition"].replace("dispatch-experts", f'dispatch-experts{{mode="{mode}"}}')
    return sw.compile(
        copy.deepcopy(model), (), given, mesh=mesh, backend=backend, backward="in_call",
        passes=f"{passes},start-collectives",
    )  # fmt: skip


# Splits that a slip of the pen changed

SPLITS = re.compile(r"dist\.(row_bounds|row_routes|own_rows|all_rows|\w*fetch_rows|\w*add_rows)\(")
NUMBERS = re.compile(r"\b(rows|blocks|parts|shards|tokens|num_rows) = (\d+)")
LISTS = re.compile(r"\b(places|axes) = \[([^\]]*)\]")
OPERANDS = re.compile(r"\((%[^)]*?)(, \w+ = [^)]*)?\)")


def mutated(text: str, rng: random.Random) -> str:
    """The text with one split changed: a number, a list, or an operand of an op that sends rows."""
    lines = text.splitlines(keepends=True)
    while True:
        at = rng.choice([at for at, line in enumerate(lines) if SPLITS.search(line)])
        kind = rng.choice((_number, _list, _operand))
        changed = kind(lines[at], lines, rng)
        if changed != lines[at]:
            return "".join([*lines[:at], changed, *lines[at + 1 :]])


def _number(line: str, lines: list[str], rng: random.Random) -> str:
    del lines
    return _replaced(NUMBERS, line, rng, _another_number)


def _list(line: str, lines: list[str], rng: random.Random) -> str:
    del lines
    return _replaced(LISTS, line, rng, _another_list)


def _replaced(
    pattern: re.Pattern[str],
    line: str,
    rng: random.Random,
    other: Callable[[str, random.Random], str],
) -> str:
    """Replace group 2 of one of the pattern's matches in a line, if there are any."""
    matches = list(pattern.finditer(line))
    if not matches:
        return line
    match = rng.choice(matches)
    return f"{line[: match.start(2)]}{other(match[2], rng)}{line[match.end(2) :]}"


def _another_number(text: str, rng: random.Random) -> str:
    value = int(text)
    return str(rng.choice([0, -1, 1, 2, 3, value - 1, value + 1, 2 * value, value // 2]))


def _another_list(text: str, rng: random.Random) -> str:
    parts = text.split(", ")
    others = [rng.sample(parts, len(parts)), parts[:-1], [*parts, parts[0]]]
    return ", ".join(rng.choice([*others, [parts[0]] * len(parts)]))


def _operand(line: str, lines: list[str], rng: random.Random) -> str:
    place = OPERANDS.search(line)
    if place is None:
        return line
    operands = place[1].split(", ")
    # Other rows in the first place are another program, not another split of the same.
    at = rng.randrange("row_bounds" not in line and "row_routes" not in line, len(operands))
    above = [made[1] for other in lines[: lines.index(line)] if (made := _RESULT.match(other))]
    operands[at] = rng.choice([*operands, *above])
    return line[: place.start(1)] + ", ".join(operands) + line[place.end(1) :]


_RESULT = re.compile(r"\s*(%[\w.]+) = ")


def splits(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of changed programs: who refuses each, or whether it computes the same."""
    rng = random.Random(seed)
    programs = [_local(mesh) for mesh in ("expert=2", "data=2,expert=2", "expert=4")]
    for number in range(count):
        program, values, wanted = programs[number % len(programs)]
        text = str(program)
        other = mutated(text, rng)
        (before, after), = (
            pair for pair in zip(text.splitlines(), other.splitlines(), strict=True)
            if pair[0] != pair[1]
        )  # fmt: skip
        yield {"before": before, "after": after, **_outcome(other, values, wanted)}


def _local(mesh: str) -> tuple[Program, Any, Any]:
    torch.manual_seed(0)
    model = Mixture(2).double()
    step = compiled(model, mesh, "all-to-all", "reference", batch(0, 2))
    values = sample_values(step.program)
    return step.program, values, run_reference(step.program, values)


def _outcome(text: str, values: Any, wanted: Any) -> dict[str, Any]:
    try:
        program = Program.parse(text)
        problems = verify(program)
    except ValueError as error:
        return {"result": "refused", "by": "parse", "why": str(error)}
    if problems:
        return {"result": "refused", "by": "verify", "why": problems[0]}
    try:
        results = run_reference(program, values)
    except Exception as error:  # noqa: BLE001 - what is no ValueError is told by its row
        is_ours = isinstance(error, ValueError)
        return {"result": "refused" if is_ours else "crashed", "by": "run", "why": str(error)}
    same = all(torch.allclose(results[key], wanted[key], rtol=BOUND, atol=0) for key in wanted)
    return {"result": "same" if same else "wrong", "by": "", "why": ""}


def work(settings: dict[str, Any]) -> None:
    """One of the processes that compare routings."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = list(
        routings(settings["routings"], settings["seed"], "distributed", dist.get_world_size())
    )
    end_with(rows, settings)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--routings", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=0, help="processes; 0: a virtual mesh")
    parser.add_argument("--splits", type=int, default=200, help="programs with a changed split")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if options.ranks:
        settings = {"routings": options.routings, "seed": options.seed}
        rows = rows_of_ranks(Path(__file__), settings, options.ranks, "", timeout_s=3600)
    else:
        rows = list(routings(options.routings, options.seed, "reference", 0))
    for row in rows:
        print(f"{row['mesh']:18} top-{row['choices']} {row['mode']:10} "
              f"{row['routings']:4} routings, worst {row['worst']:.0e}")  # fmt: skip
    changed = list(splits(options.splits, options.seed))
    for row in changed:
        if row["result"] in ("wrong", "crashed"):
            print(f"{row['result']}: {row['why']}\n- {row['before']}\n+ {row['after']}")
    counts = Counter(f"{row['result']} {row['by']}".strip() for row in changed)
    print(f"{sum(row['routings'] for row in rows)} routings, {len(changed)} splits: {dict(counts)}")
    if options.json:
        options.json.write_text(json.dumps({"routings": rows, "splits": counts}, indent=1) + "\n")
    are_far = any(not row["worst"] <= BOUND for row in rows)
    return int(are_far or any(row["result"] in ("wrong", "crashed") for row in changed))


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("--"):
        work(json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
