"""Proof of passes, by execution or by algebra: a pass must not change what the program computes.

A program runs on random arguments, in float64 and on all ranks of its virtual mesh, before the
first pass and after each that changed it, and every output, gradient and buffer is compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from xdsl.dialects.builtin import FunctionType
from xdsl.ir import Attribute, Operation
from xdsl.passes import ModulePass
from xdsl.rewriter import Rewriter

from shardweave.backends.programs import Key
from shardweave.backends.reference.reference import run_reference
from shardweave.driver.checking.sample import sample_values
from shardweave.ir.dialects.annotations import layer_of
from shardweave.ir.dialects.types import (
    dtype_of,
    dtype_of_value,
    element_of,
    is_element,
    shape_of,
    tensor_type,
)
from shardweave.ir.inspect.stats import stats
from shardweave.ir.ops.registry import is_random
from shardweave.ir.program.program import Program, Slot, require_program
from shardweave.ir.program.staged import functions_of, is_staged, ops_of_parts
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import Proof, prove
from shardweave.passes import pipeline
from shardweave.passes.kernels.unfuse_kernels import without_regions
from shardweave.passes.observers import Observer, Observers
from shardweave.passes.pipeline import MeshLike, PassError
from shardweave.passes.prepare.block_experts import BlockExpertsPass

BOUND = 1e-9
"""Largest difference that counts as equal, relative to the largest element of the value. Sums in
another order differ by about 1e-13; a wrong program differs by 1e-3 or more."""

FLOOR = 1e-4
"""Least magnitude that differences are relative to, as a fraction of the largest element of all
values of the same kind: a gradient that is zero except for rounding has no correct digit."""

LIMIT = 2e10
"""Work of one run, in FLOPs, up to which a program is validated; a few seconds of one core."""

ELEMENT_FLOPS = 100
"""Cost of an element of a result, in FLOPs: memory and Python, not arithmetic, take time."""


class ValidationError(PassError):
    """Raised if a pass changed the program's results."""


class TooLargeError(ValueError):
    """Raised for a program that takes too long to validate."""


@dataclass(frozen=True)
class Difference:
    """A value that differs in `num_different` of `size` elements. index: the first of these."""

    key: Key
    layer: str
    index: tuple[int, ...]
    expected: float
    actual: float
    num_different: int
    size: int

    def __str__(self) -> str:
        kind, name = self.key
        layer = f" of layer '{self.layer}'" if self.layer else ""
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return (
            f"{_WORDS[kind]} '{name}'{layer}: {at + ': ' if at else ''}expected "
            f"{self.expected:.12g}, found {self.actual:.12g}; {self.num_different} of {self.size} "
            f"elements {'differs' if self.num_different == 1 else 'differ'}"
        )


_WORDS = {"output": "output", "grad": "gradient", "buffer": "buffer"}


class Validator(Observer):
    """Validates each pass of a pipeline. `num_runs` counts the runs of programs.

    inputs: tensors to use for inputs of these names instead of random ones. limit: the FLOPs of one
    run above which TooLargeError is raised.
    """

    def __init__(
        self, *, inputs: Mapping[str, Tensor] | None = None, seed: int = 0, limit: float = LIMIT
    ) -> None:
        self.num_runs = 0
        self._inputs = inputs
        self._seed = seed
        self._limit = limit
        self._values: dict[Key, Tensor] = {}
        self._expected: dict[Key, Tensor] = {}
        self._last: Program | None = None

    @property
    def num_values(self) -> int:
        """Number of outputs, gradients and buffers that are compared after a pass."""
        return len(self._expected)

    def before(self, pass_: ModulePass, program: Program) -> None:
        if self._last is not None:
            return
        _check_size(program, self._limit)
        _check_not_random(program)
        exact = in_float64(program)
        self._values = sample_values(exact, seed=self._seed, inputs=self._inputs)
        self._expected = self._run(exact)
        bad = [key for key, value in self._expected.items() if not value.isfinite().all()]
        if bad:
            raise ValueError(
                f"{_WORDS[bad[0][0]]} '{bad[0][1]}' of the program before the passes is infinite "
                "or NaN on random arguments, so that nothing can be compared; validate a program "
                "that is finite on normally distributed inputs."
            )
        self._last = program.clone()

    def after(self, pass_: ModulePass, program: Program) -> None:
        if program == self._last:
            return
        exact = in_float64(program)
        try:
            actual = self._run(exact)
        except ValueError as error:
            raise ValidationError(
                f"pass '{pass_.name}' made a program that does not run: {error}"
            ) from error
        differences = find_differences(program, self._expected, actual)
        if differences:
            more = f" ({len(differences) - 1} more values differ)" if len(differences) > 1 else ""
            raise ValidationError(
                f"pass '{pass_.name}' changed what the program computes: {differences[0]}{more}."
            )
        self._last = program.clone()

    def _run(self, program: Program) -> dict[Key, Tensor]:
        self.num_runs += 1
        return run_reference(program, self._values)


def in_float64(program: Program) -> Program:
    """Return the program in float64 or complex128, fused regions inlined. Linear in the ops."""
    exact = without_regions(program)
    if exact is program:
        exact = program.clone()
    for part in (exact, *(functions_of(exact).values() if is_staged(exact) else ())):
        _convert(part)
    return exact


def _convert(program: Program) -> None:
    """Change the dtypes of a program's values, and of dtypes among the arguments of its ops."""
    block = program.function.body.block
    for value in (*block.args, *(result for op in program.ops for result in op.results)):
        exact = _exact(dtype_of_value(value))
        if exact is not None:
            Rewriter.replace_value_with_new_type(value, tensor_type(shape_of(value), exact))
    for op in program.ops:
        op.properties = {name: _property(value) for name, value in op.properties.items()}
    results = list(program.return_op.operand_types)
    program.function.function_type = FunctionType.from_lists(list(block.arg_types), results)


def _property(attribute: Attribute) -> Attribute:
    """Convert a dtype among an op's arguments to float64 or complex128; others stay."""
    exact = _exact(dtype_of(attribute)) if is_element(attribute) else None
    return attribute if exact is None else element_of(exact)


def _exact(dtype: torch.dtype) -> torch.dtype | None:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else None


def work_of(program: Program) -> float:
    """FLOPs of a run on all ranks, plus `ELEMENT_FLOPS` per element of results and arguments."""
    elements = sum(math.prod(shape_of(r)) for op in ops_of_parts(program) for r in op.results)
    elements += sum(math.prod(shape_of(slot.value)) for slot in program.arguments)
    ranks = program.mesh.num_devices if program.is_local and program.mesh else 1
    return ranks * (sum(stats(program).flops.values()) + ELEMENT_FLOPS * elements)


def find_differences(
    program: Program, expected: Mapping[Key, Tensor], actual: Mapping[Key, Tensor]
) -> list[Difference]:
    """Return the values that differ or are missing, in the order in which they are computed."""
    places: dict[Operation, int] = {op: place for place, op in enumerate(program.ops)}
    slots = {(slot.kind, slot.name): slot for slot in program.results}
    scales = _scales(expected)
    differences: list[tuple[int, Difference]] = []
    for key, wanted in expected.items():
        slot = slots.get(key)
        layer, value = (_layer(slot), actual.get(key)) if slot else ("", None)
        difference = _compare(key, layer, wanted, value, scales[key[0]])
        if difference is not None:
            owner = slot.value.owner if slot else None
            place = places.get(owner, -1) if isinstance(owner, Operation) else -1
            differences.append((place, difference))
    differences.sort(key=lambda item: item[0])
    return [difference for _, difference in differences]


def _scales(expected: Mapping[Key, Tensor]) -> dict[str, float]:
    scales: dict[str, float] = {}
    for (kind, _), value in expected.items():
        scales[kind] = max(scales.get(kind, 0.0), _largest(value))
    return scales


def _largest(value: Tensor) -> float:
    return value.double().abs().max().item() if value.numel() else 0.0


def _compare(
    key: Key, layer: str, wanted: Tensor, value: Tensor | None, scale: float
) -> Difference | None:
    if value is None or value.shape != wanted.shape:
        first = wanted.flatten()[0].item() if wanted.numel() else math.nan
        return Difference(key, layer, (), first, math.nan, wanted.numel(), wanted.numel())
    bound = BOUND * max(_largest(wanted), FLOOR * scale)
    # Not "> bound": what is not a number is different, too.
    differs = ~((value.double() - wanted.double()).abs() <= bound)
    if not differs.any():
        return None
    first = int(differs.flatten().to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), wanted.shape))
    pair = wanted.flatten()[first].item(), value.flatten()[first].item()
    return Difference(key, layer, index, *pair, int(differs.sum()), wanted.numel())


def _layer(slot: Slot) -> str:
    if slot.kind != "output":
        return slot.name.rpartition(".")[0]
    return layer_of(slot.value.owner) if isinstance(slot.value.owner, Operation) else ""


def _check_size(program: Program, limit: float) -> None:
    work = work_of(program)
    if work > limit:
        enough = 10 ** math.ceil(math.log10(work))
        raise TooLargeError(
            f"each run to validate the program takes {work:.2g} FLOPs, more than the limit of "
            f"{limit:.2g}; raise the limit (--validate-limit {enough:.0e}), or validate the same "
            "passes on a smaller model of the same kind."
        )


def _check_not_random(program: Program) -> None:
    for op in ops_of_parts(program):
        # Attention ops count as random whatever they drop.
        if is_random(op) and not (
            op.signature.parameter("dropout_p") and op.value("dropout_p") == 0
        ):
            raise ValueError(
                f"{op.name} in layer '{layer_of(op)}' draws random numbers, so that two runs "
                "cannot be compared; remove it from the model (dropout 0) to validate."
            )


class ProvedPassError(PassError):
    """Raised if the program after a pass cannot be proved equal to the one before the passes."""


class Prover(Observer):
    """Proves, after each pass, that the program equals the one before all passes; after the pass
    block-experts, that it equals the result of that pass. Raises ProvedPassError, which names the
    pass.

    goal: the program before all passes; by default, the one before the first that is seen. each:
    whether to prove each pass; if False, only `proof_of` proves. is_blocked: whether block-experts
    changed the program.
    """

    def __init__(self, goal: Program | None = None, *, each: bool = True) -> None:
        self.is_blocked = False
        self._goal, self._each = goal, each
        self._unblocked: Program | None = None

    def before(self, pass_: ModulePass, program: Program) -> None:
        if self._goal is None:
            self._goal = program.clone()
        if pass_.name == BlockExpertsPass.name:
            self._unblocked = program.clone()

    def after(self, pass_: ModulePass, program: Program) -> None:
        if pass_.name == BlockExpertsPass.name and program != self._unblocked:
            self._goal, self.is_blocked = program.clone(), True
        if not self._each:
            return
        try:
            self.proof_of(program)
        except ProofError as error:
            raise ProvedPassError(
                f"after pass '{pass_.name}', the program is not proved to compute what it "
                f"computed before the passes: {error}"
            ) from error

    def proof_of(self, program: Program) -> Proof:
        """Prove that a program computes the goal. Raises ProofError."""
        assert self._goal is not None
        return prove(program, against=self._goal)


def run_and_validate(
    program: Program,
    passes: str | Iterable[ModulePass | str],
    *,
    mesh: MeshLike | None = None,
    validate: bool = False,
    prove: bool = False,
    inputs: Mapping[str, Tensor] | None = None,
    validate_limit: float = LIMIT,
    dump_dir: str | Path | None = None,
) -> Program:
    """Run passes over a copy of a program, on `mesh` if one is given.

    validate: run the program before and after each pass, in float64 and on all ranks of the virtual
    mesh, and compare outputs, gradients and buffers. inputs: tensors to validate with, by the names
    of inputs; by default all arguments are random. validate_limit: the work, in FLOPs of one run,
    up to which programs are validated. prove: prove each pass's result against the program before
    the first, without running it (docs/proof.md). dump_dir: a folder for the program before the
    first pass and after each, as numbered files; the error of a failing pass names the file of its
    input.

    Raises PassError if a pass fails, ValidationError (a PassError) if it changes a result,
    ProvedPassError (a PassError) if its result is not proved, and TooLargeError (a ValueError) for
    a program above the limit.
    """
    require_program(program)
    observers: list[Observer] = [Prover()] if prove else []
    if validate:
        observers.append(Validator(inputs=inputs, limit=validate_limit))
    observer = Observers(observers)
    return pipeline.run_passes(program, passes, mesh=mesh, dump_dir=dump_dir, observer=observer)
