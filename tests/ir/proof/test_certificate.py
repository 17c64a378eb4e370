"""Certificates: those of proofs are checked, and what is changed in one is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import shardweave as sw
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.proof import check
from shardweave.ir.proof.certificate import certificate_of
from shardweave.ir.proof.check import check_certificate
from shardweave.ir.proof.expressions import Expressions
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import arguments_of, prove, walked
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.partition import partition
from shardweave.planners.lowering.stages.balance import balanced_stages
from shardweave.planners.megatron.planner import plan_megatron
from shardweave.planners.plan.plan_parts import Pipeline
from shardweave.tests.ir.proof.cases import Case
from shardweave.tests.ir.proof.mutants import mutant
from shardweave.tests.ir.proof.slips import SLIPS
from shardweave.tests.ir_text import step
from shardweave.tests.zoo import SPECS, captured, megatron

TINY = "gpt:layers=1,hidden=8,heads=2,vocab=8,seq=4,batch=4"
ODD = "gpt:layers=1,hidden=12,heads=3,vocab=33,seq=6,batch=4,ffn=21"
MESH = "data=2,tensor=2"

Certificate = dict[str, Any]


@cache
def local(spec: str, passes: str, mesh: str = MESH) -> tuple[Program, Program]:
    """A captured program, and what a rank runs."""
    program = captured(spec).program
    plan = ApplyPlanPass.of(megatron(spec, mesh))
    return program, sw.run_passes(program, [plan, passes], mesh=mesh)


@cache
def planned(spec: str, mesh: str, schedule: str = "", parts: int = 1) -> tuple[Program, Program]:
    """A captured program, and what ranks run of stages, or of attention in parts."""
    program, devices = captured(spec).program, Mesh.parse(mesh)
    plan = plan_megatron(program, devices, attention_parts=parts)
    if schedule:
        pipeline = Pipeline(balanced_stages(program, 2), 2, schedule=schedule)
        plan = replace(plan, pipeline=pipeline)
    return program, partition(program, devices, plan)


def checked(program: Program, rank: Program) -> Certificate:
    """The certificate of a proof, read as text, and checked."""
    certificate = json.loads(json.dumps(prove(rank, against=program).certificate()))
    found = check_certificate(certificate, rank, against=program)
    assert found.num_related > 0.8 * found.num_values
    return certificate


def test_certificate_of_a_loss_by_local_maxima_over_a_cut_vocabulary_checks() -> None:
    certificate = checked(*local(TINY, "preset:sub-batches,preset:kernels"))
    assert sum(step["by"] == "in one" for step in certificate["steps"]) == 2


def sub_batches() -> tuple[Program, Program]:
    return local(TINY, "preset:oases")


def test_draws_of_a_sub_batch_that_come_before_all_its_inputs_are_proved_and_check() -> None:
    program, rank = local(f"{TINY},dropout=0.1", "preset:sub-batches", "data=2")
    rank = rank.clone()
    block, ops = rank.function.body.block, list(rank.ops)
    draw = next(op for op in ops if op.name == "dist.random")
    first = {draw}
    for op in reversed(ops[: ops.index(draw)]):
        if any(use.operation in first for result in op.results for use in result.uses):
            first.add(op)
    begin = next(op for op in ops if op not in first)
    for op in [op for op in ops if op in first]:
        op.detach()
        block.insert_op_before(op, begin)
    names = [op.name for op in rank.ops]
    assert names.index("dist.random") < names.index("aten.slice.Tensor")
    checked(program, rank)


def test_certificates_of_each_kind_of_program_check() -> None:
    checked(*sub_batches())
    checked(*local(ODD, "preset:default,preset:kernels"))
    checked(*local(f"{TINY},dropout=0.1", "preset:sub-batches", "tensor=2"))
    checked(*planned(TINY, "stage=2,data=2", "1f1b"))
    checked(*planned(TINY, "context=2", parts=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_certificates_of_all_models_and_presets_check(name: str) -> None:
    presets = ("default", "merak", "oases", "sub-batches,preset:kernels")
    for mesh, preset in product((MESH, "tensor=4"), presets):
        checked(*local(SPECS[name], f"preset:{preset}", mesh))
    # Batch norm in training adds up over all micro-batches: it has no program of stages.
    for schedule in () if name == "cnn" else ("gpipe", "zero-bubble"):
        checked(*planned(SPECS[name], "stage=2,data=2", schedule))


def test_sum_that_the_model_does_not_have_is_defined() -> None:
    text = """
        input %a : tensor<4x4xf64>
        input %b : tensor<4x4xf64>
        input %c : tensor<4x4xf64>
        %s = aten.add.Tensor({}) : tensor<4x4xf64>
        %t = aten.add.Tensor({}) : tensor<4x4xf64>
        output %t
    """
    program = step(text.format("%a, %b", "%s, %c"))
    rank = step(text.format("%c, %b", "%a, %s"), "data=2", local=True)
    certificate = checked(program, rank)
    assert len(certificate["expressions"]) == 1
    certificate["expressions"][0]["sum"][0][1] = 2.0
    with pytest.raises(ProofError, match=r"aten\.add\.Tensor \(%s\): its relation does not follow"):
        check_certificate(certificate, rank, against=program)


# Certificates that were changed: each does so in a place, and says whether there is one.


def _relation(certificate: Certificate, of: random.Random, key: str) -> Any:
    found = [claim for claim in certificate["claims"] if key in claim]
    return of.choice(found) if found else None


def another_expression(certificate: Certificate, of: random.Random) -> bool:
    claim = _relation(certificate, of, "of")
    claim["of"] += 1
    return True


def another_cut(certificate: Certificate, of: random.Random) -> bool:
    """A dim is said to be cut no more, or one to be cut as another is."""
    claim = _relation(certificate, of, "of")
    dims = [dim for dim, cut in enumerate(claim["cut"]) if cut]
    if not dims:
        return False
    dim = of.choice(dims)
    claim["cut"][dim - 1], claim["cut"][dim] = claim["cut"][dim], []
    return True


def one_more_reduction(certificate: Certificate, of: random.Random) -> bool:
    claim = _relation(certificate, of, "pending")
    claim.pop("pending")
    return True


def another_reduction(certificate: Certificate, of: random.Random) -> bool:
    claim = _relation(certificate, of, "pending")
    claim["pending"][1] = "tensor" if claim["pending"][1] != "tensor" else "data"
    return True


def another_sub_batch(certificate: Certificate, of: random.Random) -> bool:
    claim = _relation(certificate, of, "at")
    if claim is None:
        return False
    claim["at"][0][1] = [1 - claim["at"][0][1][0]]
    return True


def other_factors(certificate: Certificate, of: random.Random) -> bool:
    cuts = of.choice([cuts for cuts in certificate["cuts"] if any(cuts)])
    of.choice([cut for cut in cuts if cut])[0][0] = "context"
    return True


def another_op(certificate: Certificate, of: random.Random) -> bool:
    steps = [step for step in certificate["steps"] if "op" in step]
    of.choice(steps)["op"] += of.choice([-1, 1])
    return True


def another_step(certificate: Certificate, of: random.Random) -> bool:
    ways = {"rule": "move", "move": "rule", "sum": "rule", "merge": "sum", "form": "rule"}
    step = of.choice([step for step in certificate["steps"] if step["by"] in ways])
    step["by"] = ways[step["by"]]
    return True


def lost_step(certificate: Certificate, of: random.Random) -> bool:
    del certificate["steps"][of.randrange(len(certificate["steps"]))]
    return True


def nothing_claimed(certificate: Certificate, of: random.Random) -> bool:
    steps = [step for step in certificate["steps"] if step["by"] in ("rule", "sum")]
    step = of.choice(steps)
    step.clear()
    step["by"] = "itself"
    return True


TAMPERINGS = [
    another_expression,
    another_cut,
    one_more_reduction,
    another_reduction,
    another_sub_batch,
    other_factors,
    another_op,
    another_step,
    lost_step,
    nothing_claimed,
]


def num_refused(program: Program, rank: Program, num_seeds: int) -> int:
    """How many changed certificates are refused: all."""
    right = json.dumps(prove(rank, against=program).certificate())
    count = 0
    for tampering, seed in product(TAMPERINGS, range(num_seeds)):
        changed = json.loads(right)
        if tampering(changed, random.Random(seed)):
            with pytest.raises(ProofError):
                check_certificate(changed, rank, against=program)
            count += 1
    return count


def test_changed_certificates_are_refused() -> None:
    assert num_refused(*sub_batches(), num_seeds=3) >= 25


@pytest.mark.slow
def test_hundreds_of_changed_certificates_are_refused() -> None:
    assert num_refused(*sub_batches(), num_seeds=24) >= 200
    assert num_refused(*planned(TINY, "stage=2,data=2", "1f1b"), num_seeds=24) >= 180
    assert num_refused(*local(ODD, "preset:default"), num_seeds=24) >= 180


def test_certificate_of_another_program_is_refused() -> None:
    program, rank = sub_batches()
    certificate = prove(rank, against=program).certificate()
    other = rank.clone()
    next(iter(other.ops)).results[0].name_hint = "other"
    with pytest.raises(ProofError, match=r"of another program \(local\)"):
        check_certificate(certificate, other, against=program)


def test_certificate_proves_no_wrong_program() -> None:
    """A slip in the program, whose digest is made to fit: the steps do not follow any more."""
    tiny = captured(TINY)
    case = Case.of(tiny.program, tiny.values, sub_batches()[1])
    certificate = prove(case.local, against=case.program).certificate()
    count = 0
    for kind in SLIPS:
        made = mutant(case.local, kind, 0)
        if made is None:
            continue
        certificate["local"] = made.program.digest()
        try:
            check_certificate(certificate, made.program, against=case.program)
        except ProofError:
            count += 1
            continue
        assert case.is_right(made.program), kind
    assert count >= 12


@pytest.mark.slow
def test_what_a_wrong_program_is_made_of_is_refused_with_a_certificate_of_its_own() -> None:
    """All that the proof finds before it refuses, written as if it had not: the check refuses it."""
    tiny = captured(TINY)
    case = Case.of(tiny.program, tiny.values, sub_batches()[1])
    count = 0
    for kind, seed in product(SLIPS, range(3)):
        made = mutant(case.local, kind, seed)
        if made is None:
            continue
        table = Expressions()
        values = table.read(case.program.function.body.block, arguments_of(table, case.program))
        table.num_read = len(table.shapes)
        try:
            walk, _ = walked(made.program, table)
            certificate = certificate_of(walk, values, made.program, case.program)
            check_certificate(certificate, made.program, against=case.program)
        except ProofError:
            count += 1
            continue
        assert case.is_right(made.program), (kind, seed)
    assert count >= 40


OWN = ("check", "check_rules", "check_forms", "check_moves", "claims", "model")
"""The files of the check that the proof does not use."""


def test_check_is_small_enough_to_be_read() -> None:
    folder = Path(check.__file__).parent
    assert sum(len((folder / f"{name}.py").read_text().splitlines()) for name in OWN) <= 1200
