"""Which slips does the proof see? `python benchmarks/proof_mutants.py [--count N] [--quick]`

Slips of many kinds are planted in right programs of several models and plans: a collective that
is dropped, doubled, over another axis or before its producer; an offset, a mask or a random key
that is another; an operand of another sub-batch or layer; a gradient that is lost; runs and
messages of stages; and the mistakes in passes of `tests/driver/defects.py`. Each program is run on
all ranks of its mesh in float64, beside the model on one device: it is right, wrong, or fails. And
it is held against the model by `sw.prove`. A table by kind says what the proof answers: whether
wrong ones are refused, and whether the message names the op at fault or one that reads its result.

It goes on until `--count` (1,000) programs are shown to be wrong, as many in each setting. `--seed`
chooses other places, `--only` settings by a part of their names; `--quick` plants 20 in the first.
`--json FILE` holds the counts, and what is not named. Exits 1 if a wrong program is proved, or the
proof itself fails.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import count as numbers
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table
from xdsl.context import Context

from shardweave.benchmarks.compile_time import machine
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.notes import unheard
from shardweave.passes.pipeline import run_passes
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.planners.schedules.schedules import find_schedule
from shardweave.tests.driver.defects import DEFECTS, Defect
from shardweave.tests.driver.test_validate_mutations import PIPELINES, pipeline, program_before
from shardweave.tests.ir.proof.cases import Case
from shardweave.tests.ir.proof.mutants import KINDS, Mutant, Snapshot, distinct, mutant
from shardweave.tests.zoo import SPECS, captured

QUICK = 20
WIDTH = 130
"""Characters of a line of the table, whatever the terminal has."""

MICRO_BATCHES = 2

GPT = "gpt:layers=2,hidden=8,heads=2,vocab=8,seq=4,batch=4"
EXPERTS = f"{GPT},experts=4,capacity=1"
GPT2 = "hf:gpt2:n_layer=1,n_embd=12,n_head=3,vocab_size=16,n_positions=4,batch=4,seq=4"
ODD = "gpt:layers=1,hidden=6,heads=3,vocab=9,seq=4,batch=4,ffn=7"
SMALL = "num_hidden_layers=1,hidden_size=8,num_attention_heads=4,intermediate_size=16,vocab_size=16"
LLAMA = f"hf:llama:{SMALL},num_key_value_heads=2,batch=4,seq=4"
BERT = f"hf:bert:{SMALL},max_position_embeddings=8,batch=4,seq=4"
T5 = "hf:t5:num_layers=1,d_model=8,d_kv=2,d_ff=16,num_heads=4,vocab_size=16,batch=4,seq=4"
CNN = "cnn:depth=10,channels=4,size=8,batch=4,pool=true"
UNET = "unet:channels=4,size=8,batch=4,levels=2,groups=2,heads=2"


@dataclass(frozen=True)
class Setting:
    """A model, a mesh, and what is done to it: passes after its Megatron plan, or what the plan
    says beside shards."""

    name: str
    model: str = GPT
    mesh: str = "data=2,tensor=2"
    passes: str = ""
    schedule: str = ""
    zero: int = 0
    sequence_parallel: bool = False
    attention_parts: int = 1

    def case(self) -> Case:
        found = captured(self.model)
        return Case.of(found.program, found.values, self.local(found.program))

    def local(self, program: Program) -> Program:
        mesh = Mesh.parse(self.mesh)
        plan = plan_megatron(
            program,
            mesh,
            sequence_parallel=self.sequence_parallel,
            attention_parts=self.attention_parts,
        )
        with unheard():
            if self.passes:
                return run_passes(program, [ApplyPlanPass.of(plan), self.passes], mesh=mesh)
            if self.schedule:
                stages = balanced_stages(
                    program, mesh.num_stages * find_schedule(self.schedule).chunks
                )
                pipeline = Pipeline(stages, MICRO_BATCHES, schedule=self.schedule)
                plan = replace(plan, pipeline=pipeline)
            return partition(program, mesh, replace(plan, zero=self.zero))


SETTINGS = (
    Setting("default", passes="preset:default"),
    Setting("sub-batches", passes="preset:sub-batches"),
    Setting("stages", mesh="stage=2,data=2", schedule="1f1b"),
    Setting("sequences", passes="preset:default", sequence_parallel=True),
    Setting("oases", passes="preset:oases"),
    Setting("stages, ZeRO 3", mesh="stage=2,data=2", schedule="zero-bubble", zero=3),
    Setting("stages, interleaved", mesh="stage=2,tensor=2", schedule="interleaved-1f1b"),
    Setting("ZeRO 3", mesh="data=4", zero=3),
    Setting("context", mesh="context=2,tensor=2"),
    Setting("attention in parts", mesh="context=2,tensor=2", attention_parts=2),
    Setting("experts", model=EXPERTS, passes="preset:default"),
    Setting("experts, cut", model=EXPERTS, mesh="data=2,expert=2"),
    Setting("split projections", model=GPT2, mesh="tensor=2"),
    Setting("kernels", passes="preset:default,preset:kernels"),
    Setting("dropout", model=f"{GPT},dropout=0.1", passes="preset:merak"),
    Setting("uneven dims", model=ODD, passes="preset:default"),
    Setting("uneven, sub-batches", model=ODD, mesh="tensor=2", passes="preset:oases"),
    Setting("Llama", model=LLAMA, mesh="tensor=4", passes="preset:megatron"),
    Setting("BERT", model=BERT, passes="preset:merak"),
    Setting("T5", model=T5, passes="preset:default"),
    Setting("CNN", model=CNN, passes="preset:default"),
    Setting("UNet", model=UNET, passes="preset:default"),
)


@dataclass(frozen=True)
class Answer:
    """A program with a slip: what running it shows (right, wrong, fails), what the proof says of
    it (proved, refused, crashed), whether it names the op, and in which words."""

    setting: str
    kind: str
    seed: int
    run: str
    proof: str
    is_named: bool
    words: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.run != "right"

    @property
    def is_false(self) -> bool:
        """Whether a program is proved that is wrong, or the proof fails otherwise."""
        return self.proof == "crashed" or (self.is_wrong and self.proof == "proved")


def answered(setting: str, seed: int, made: Mutant, case: Case) -> Answer:
    """What running a mutant and proving it say."""
    run, named, words = case.outcome(made.program), False, ""
    try:
        prove(made.program, against=case.program)
        proof = "proved"
    except ProofError as error:
        proof, words = "refused", str(error)
        named = made.is_named_in(words)
    except Exception as error:  # noqa: BLE001  any other error is a finding
        proof, words = "crashed", f"{type(error).__name__}: {error}"
    return Answer(setting, made.kind, seed, run, proof, named, words)


def defects() -> Iterator[Answer]:
    """The mistakes in passes."""
    for defect in DEFECTS:
        model, _, _ = PIPELINES[defect.case]
        found = captured(SPECS[model])
        case, made = _defect(defect, found.program, found.values)
        yield answered(f"passes of {defect.case}", 0, made, case)


def _defect(
    defect: Defect, program: Program, values: Mapping[tuple[str, str], torch.Tensor]
) -> tuple[Case, Mutant]:
    broken = program_before(defect.case, defect.pass_name).clone()
    right = next(one for one in pipeline(defect.case).passes if one.name == defect.pass_name)
    right.apply(Context(), broken.module)
    prove(broken, against=program)
    case = Case.of(program, values, broken)
    broken = distinct(broken)
    before = Snapshot(broken)
    defect.mistake(broken)
    return case, Mutant(defect.name, broken, before.names_of_changes(broken))


def planted(setting: Setting, seed: int, count: int) -> list[Answer]:
    """Slips of all kinds in a setting, over and over, at other places each time, until so many
    programs are wrong.

    Raises ProofError if the right program is not proved: then no slip in it is what is refused.
    """
    case, found, wrong = setting.case(), list[Answer](), 0
    prove(case.local, against=case.program)
    assert case.is_right(case.local), setting.name
    for start in numbers(seed):
        for kind in random.Random(start).sample(KINDS, len(KINDS)):
            made = mutant(case.local, kind, start)
            if made is not None:
                found.append(answered(setting.name, start, made, case))
                wrong += found[-1].is_wrong
            if wrong >= count:
                return found
    raise AssertionError("seeds do not end")


Task = tuple[str, int, int]
"""A setting by name (or PASSES), a seed, and how many programs are to be wrong."""

PASSES = "mistakes in passes"


def answers_of(task: Task) -> list[Answer]:
    """The answers of a task."""
    torch.set_num_threads(1)
    name, seed, count = task
    if name == PASSES:
        return list(defects())
    return planted(next(one for one in SETTINGS if one.name == name), seed, count)


def all_answers(tasks: Sequence[Task], jobs: int, keep: Path | None) -> Iterator[Answer]:
    """The answers of tasks, some of which run at a time. keep: a file of what ran before, a task
    a line, to which the others are added."""
    lines = keep.read_text().splitlines() if keep and keep.exists() else []
    done = {tuple(task): answers for task, answers in map(json.loads, lines)}
    left = [task for task in tasks if task not in done]
    for task in tasks:
        yield from (Answer(**answer) for answer in done.get(task, ()))
    with get_context("spawn").Pool(jobs) if jobs > 1 else nullcontext() as pool:
        found = pool.imap(answers_of, left) if pool else map(answers_of, left)
        for task, answers in zip(left, found, strict=True):
            if keep:
                with keep.open("a") as file:
                    file.write(json.dumps([task, [asdict(answer) for answer in answers]]) + "\n")
            yield from answers


@dataclass
class Counts:
    """What became of the slips of a kind, or of a setting."""

    name: str
    planted: int = 0
    wrong: int = 0
    of_which_fail: int = 0
    refused: int = 0
    named: int = 0
    right: int = 0
    right_proved: int = 0
    right_refused: int = 0
    crashed: int = 0
    false_proofs: int = 0

    def add(self, answer: Answer) -> None:
        wrong, refused = answer.is_wrong, answer.proof == "refused"
        self.planted += 1
        self.wrong += wrong
        self.of_which_fail += answer.run == "fails"
        self.refused += wrong and refused
        self.named += wrong and refused and answer.is_named
        self.right += not wrong
        self.right_proved += not wrong and answer.proof == "proved"
        self.right_refused += not wrong and refused
        self.crashed += answer.proof == "crashed"
        self.false_proofs += wrong and answer.proof == "proved"


def counted(answers: Sequence[Answer], by: str) -> list[Counts]:
    """Counts by `kind` or `setting`, in the order in which they came; the last is of all."""
    found: dict[str, Counts] = {}
    total = Counts("all")
    for answer in answers:
        name = getattr(answer, by)
        found.setdefault(name, Counts(name)).add(answer)
        total.add(answer)
    return [*found.values(), total]


COLUMNS = {
    "planted": "planted",
    "wrong": "wrong by running",
    "refused": "refused",
    "named": "named rightly",
    "right_proved": "harmless, proved",
    "right_refused": "harmless, refused",
    "crashed": "crashed",
    "false_proofs": "FALSE PROOFS",
}


def print_table(rows: Sequence[Counts], by: str) -> None:
    table = Table(Column(by, no_wrap=True), *COLUMNS.values())
    for row in rows:
        table.add_row(row.name, *(str(getattr(row, name)) for name in COLUMNS))
    Console(width=WIDTH).print(table)


def report_of(answers: Sequence[Answer], seed: int) -> dict[str, Any]:
    """The counts, and what was proved wrongly or refused in words that do not name the op."""
    missed = [a for a in answers if a.is_wrong and a.proof == "refused" and not a.is_named]
    return {
        "machine": machine(),
        "seed": seed,
        "kinds": [asdict(row) for row in counted(answers, "kind")],
        "settings": [asdict(row) for row in counted(answers, "setting")[:-1]],
        "false": [asdict(answer) for answer in answers if answer.is_false],
        "not_named": [[a.setting, a.kind, a.seed] for a in missed],
    }


def sentences(report: Mapping[str, Any]) -> str:
    """What the page on proofs says of a report."""
    total = report["kinds"][-1]
    share = total["named"] / total["refused"]
    return (
        f"Of {total['planted']:,} programs with a slip, of {len(report['kinds']) - 1} kinds in "
        f"{len(report['settings'])} programs that are right, {total['wrong']:,} compute "
        f"something else, or cannot be run ({total['of_which_fail']}): {total['refused']:,} of "
        f"them are refused, {share:.0%} in words that name the op "
        f"at fault or one that reads its result. Of the {total['right']} that still compute the "
        f"model's results {total['right_proved']} are proved and {total['right_refused']} refused."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="programs that are wrong")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes, of a setting each")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} in the smallest setting")
    parser.add_argument("--only", default="", help="a part of a setting's name")
    parser.add_argument("--keep", type=Path, help="a file that the run goes on from")
    parser.add_argument("--words", action="store_true", help="print what does not name the op")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    options = parser.parse_args()
    settings = SETTINGS[:1] if options.quick else [s for s in SETTINGS if options.only in s.name]
    count = -(-(QUICK if options.quick else options.count) // len(settings))
    names = [setting.name for setting in settings]
    names += [PASSES] if len(settings) == len(SETTINGS) else []
    tasks = [(name, options.seed, count) for name in names]
    answers: list[Answer] = []
    for answer in all_answers(tasks, 1 if options.quick else options.jobs, options.keep):
        answers.append(answer)
        if answer.is_false or (options.words and answer.is_wrong and not answer.is_named):
            print(answer, flush=True)
    print_table(counted(answers, "kind"), "kind")
    if options.json:
        options.json.write_text(json.dumps(report_of(answers, options.seed), indent=1) + "\n")
    return int(any(answer.is_false for answer in answers))


if __name__ == "__main__":
    sys.exit(main())
