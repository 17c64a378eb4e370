"""One op of PyTorch's OpInfo database for `opinfo.py`: its samples, sharded, against eager.

Samples of an op run together as one small model; where that is not exact, halves of them run, down
to the sample that is not. The first tensor of a sample is an input of the model, the other
floating-point ones are its parameters and the rest buffers. The loss is a sum of all outputs with
other weights for each element. `opinfo.py` starts this file as a process, which reads
a request a line and writes a row for each.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import random
import re
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardweave as sw
from shardweave.benchmarks.opinfo_models import Builder, Op
from shardweave.driver.checking.check import CONDITION, TOLERANCES, coarsest_dtype
from shardweave.driver.step.binding import example_call
from shardweave.driver.step.checks import check_request
from shardweave.driver.step.compile import bind, load
from shardweave.driver.step.lowering import capture_call, lower
from shardweave.driver.step.request import Request
from shardweave.ir.capture.observed.loose_tensors import register_constants

MARK = "row: "
SEED = 0
F64 = torch.float64
LARGEST = 1e4
"""Of a result that a further op reads; beyond it rounding is all there is to compare."""
LOST = 1e-7
"""Of relative error, by which eager may move where its inputs change in their last digit."""
GROUP = 8
"""Samples in one model."""
MESHES = ("data=2", "tensor=2")
BOTH = ("data=2,tensor=2",)
"""The mesh of compositions."""
UNDEFINED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
UNDEFINED |= {"empty_permuted", "torch.ops.aten._empty_affine_quantized"}
"""Ops whose values nobody defines: their shapes are compared."""
INTERNAL = re.compile(
    r"left an invalid program|INTERNAL ASSERT|file a bug|is not an ATen op|KeyError|IndexError|"
    r"AssertionError|AttributeError|list index out of range|NoneType"
)
"""Words of an error that is not for users, whatever its class is."""
MEMORY_BYTES = 12 * 2**30
RESULTS = ("exact", "refused", "wrong", "crash")


@dataclass(frozen=True)
class Outcome:
    """What came of one run: outputs, and gradients by name; those of inputs by number."""

    outputs: list[Any]
    gradients: dict[str, Tensor]


def run(model: nn.Module, inputs: Sequence[Tensor], *, grad: bool) -> Outcome:
    """Outputs of a model and gradients of their weighted sum."""
    given = [_again(value).requires_grad_(value.requires_grad) for value in inputs]
    with torch.set_grad_enabled(grad):
        outputs = model(*given)
        if outputs and isinstance(outputs[0], Tensor) and outputs[0].requires_grad:
            outputs[0].backward()
    named = [*model.named_parameters(), *((str(i), value) for i, value in enumerate(given))]
    gradients = {name: _own(value.grad) for name, value in named if value.grad is not None}
    return Outcome([_own(o) for o in outputs], gradients)


def _again(value: Tensor) -> Tensor:
    """A copy, in the layout of the original."""
    if value.layout != torch.strided or value.is_contiguous():
        return value.detach().clone()
    return value.detach()


def _own(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = sw.full_tensor(value).detach()
    return value.to_dense() if value.layout != torch.strided else value.clone()


def own_error(model: nn.Module, inputs: Sequence[Tensor]) -> float:
    """By how much eager's results move where all that it reads changes in its last digit."""
    generator = torch.Generator().manual_seed(0)

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.layout != torch.strided:
            return value
        signs = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
        return value * (1 + torch.finfo(value.dtype).eps * signs)

    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(moved(parameter))
    with sw.seeded(SEED):
        want = run(copy.deepcopy(model), inputs, grad=True)
    with sw.seeded(SEED):
        return differences(
            run(
                other,
                [moved(v.detach()).requires_grad_(v.requires_grad) for v in inputs],
                grad=True,
            ),
            want,
        )[0]


def differences(got: Outcome, want: Outcome, *, undefined: bool = False) -> tuple[float, str]:
    """The largest error of a run and where it is; infinite where shapes or kinds differ."""
    if len(got.outputs) != len(want.outputs):
        return float("inf"), "another number of outputs"
    pairs = [(f"output {i}", *p) for i, p in enumerate(zip(got.outputs, want.outputs, strict=True))]
    names = sorted(got.gradients.keys() | want.gradients.keys())
    for name in names:
        ours, theirs = got.gradients.get(name), want.gradients.get(name)
        # No gradient and one of zeros are the same to an optimizer that skips neither.
        like = ours if theirs is None else theirs
        assert like is not None
        zeros = torch.zeros_like(like)
        pairs.append(
            (
                f"gradient of {name}",
                zeros if ours is None else ours,
                theirs if theirs is not None else zeros,
            )
        )
    errors = [(0.0, "")]
    errors += [(_error(ours, theirs, undefined=undefined), what) for what, ours, theirs in pairs]
    return max(errors, key=lambda pair: pair[0] if pair[0] == pair[0] else float("inf"))


def _error(got: Any, want: Any, *, undefined: bool) -> float:
    if not isinstance(want, Tensor) or not isinstance(got, Tensor):
        got, want = (
            v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in (got, want)
        )
        return 0.0 if got == want or (got != got and want != want) else float("inf")
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if undefined or not want.numel():
        return 0.0
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(got, want) else float("inf")
    kind = torch.complex128 if want.is_complex() else torch.float64
    got, want = got.to(kind), want.to(kind)
    finite = want.isfinite()
    rest = [torch.view_as_real(v[~finite]) if v.is_complex() else v[~finite] for v in (got, want)]
    if not want.is_complex() and not torch.equal(rest[0].nan_to_num(7.0), rest[1].nan_to_num(7.0)):
        return float("inf")
    if got.isfinite().ne(finite).any():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(want[finite].abs().max().item(), 1e-3)
    return (got[finite] - want[finite]).abs().max().item() / scale


def plan_for(mesh: str, model: nn.Module, inputs: Sequence[Tensor]) -> sw.Plan:
    """A plan that shards inputs and parameters where they can: rows by data, columns by tensor."""
    axes = [part.partition("=")[0] for part in mesh.split(",")]
    parameters = {
        name: text
        for name, value in model.named_parameters()
        if (text := _cut(value.shape, axes, even=False))
    }
    given = {
        f"arg{index}": text
        for index, value in enumerate(inputs)
        if (text := _cut(value.shape, axes, even=True))
    }
    return sw.Plan(mesh=dict.fromkeys(axes, 2), parameters=parameters, inputs=given)


def _cut(shape: Sequence[int], axes: Sequence[str], *, even: bool) -> str:
    placed: list[list[str]] = [[] for _ in shape]
    for axis in axes:
        dims = [
            d
            for d, size in enumerate(shape)
            if size >= 2 << len(placed[d]) and not (even and size % (2 << len(placed[d])))
        ]
        if dims:
            placed[dims[-1 if axis == "tensor" else 0]].append(f'"{axis}"')
    if not any(placed):
        return ""
    return "[" + ", ".join("{" + ", ".join(names) + "}" for names in placed) + "]"


@dataclass(frozen=True)
class Problem:
    """A sample that is not exact on a mesh."""

    sample: int
    mesh: str
    result: str
    why: str


class Measured:
    """An op's samples and what came of them."""

    def __init__(self, name: str, op: Op, *, grad: bool) -> None:
        self.name, self.op, self.grad = name, op, grad
        self.exact = 0
        self.problems: list[Problem] = []

    def measure(self, samples: Sequence[tuple[int, Any]]) -> None:
        """Run samples together; apart, by halves, where that is not exact."""
        problems = self._problems(samples)
        if not problems:
            self.exact += len(samples)
        elif len(samples) == 1:
            self.problems.extend(problems)
        else:
            middle, before = len(samples) // 2, len(self.problems)
            self.measure(samples[:middle])
            self.measure(samples[middle:])
            if len(self.problems) == before:
                self.exact -= 1
                self.problems.extend(replace(p, why=f"with others: {p.why}") for p in problems)

    def _problems(self, samples: Sequence[tuple[int, Any]]) -> list[Problem]:
        builder = Builder(grad=self.grad)
        for _, sample in samples:
            builder.add(self.op, sample)
        return self.problems_of(builder, samples[0][0])

    def problems_of(
        self, builder: Builder, number: int, meshes: Sequence[str] = MESHES
    ) -> list[Problem]:
        """What is not exact of a model, on each mesh."""
        model, inputs = builder.made()
        start = copy.deepcopy(model)
        with sw.seeded(SEED):
            want = run(copy.deepcopy(model), inputs, grad=self.grad)
        problems: list[Problem] = []
        captured: list[Any] = []
        for mesh in meshes:
            try:
                error = self._compared(copy.deepcopy(start), inputs, mesh, want, captured)
            except Exception as exception:  # noqa: BLE001 - whatever it is, it is the row's
                problems.append(Problem(number, mesh, kind_of(exception), text_of(exception)))
            else:
                if error:
                    problems.append(Problem(number, mesh, "wrong", error))
            if not captured:
                break  # the other mesh would say the same
        return problems

    def _compared(
        self,
        model: nn.Module,
        inputs: Sequence[Tensor],
        mesh: str,
        want: Outcome,
        captured: list[Any],
    ) -> str:
        """What differs from eager on a mesh; empty if nothing does."""
        given = [value.detach().requires_grad_(value.requires_grad) for value in inputs]
        start = copy.deepcopy(model)
        plan = plan_for(mesh, model, inputs)
        request = check_request(
            Request(model, given, mesh=mesh, plan=plan, backend="reference", seed=SEED)
        )
        with torch.set_grad_enabled(self.grad):
            call = example_call(request)
            if not captured:
                captured.append(capture_call(request, call))
            lowered = lower(request, call, captured[0], plan)
            register_constants(model, lowered.constants)
            step = bind(request, call, lowered, load(request, lowered, torch.device("cpu")))
        got = run(step, inputs, grad=self.grad)
        undefined = self.name.partition(".")[0] in UNDEFINED or self.name in UNDEFINED
        error, where = differences(got, want, undefined=undefined)
        bound = TOLERANCES[coarsest_dtype(lowered.program, torch.float64)].bound
        if error <= bound or error <= CONDITION * min(own_error(start, inputs), LOST):
            return ""
        return f"{where} is off by {error:.1e}"


def kind_of(error: Exception) -> str:
    """A ValueError is for users, unless its words are not."""
    if isinstance(error, (ValueError, NotImplementedError)) and not INTERNAL.search(str(error)):
        return "refused"
    return "crash"


def text_of(error: Exception) -> str:
    """An error's text in a line; for a crash also where it was raised."""
    text = re.sub(r"/[\w./-]*/(?=[\w.-]+\.py)", "", " ".join(str(error).split()))
    if kind_of(error) == "refused":
        return text[:500]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "shardweave" in f.filename and "benchmarks" not in f.filename]
    place = "; ".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in (own or frames)[-3:])
    return f"{type(error).__name__} at {place}: {text}"[:700]


def ops() -> dict[str, Any]:
    """The ops of the database, by name and variant."""
    from torch.testing._internal import common_methods_invocations as database

    op_db = database.op_db
    # A wrapper that seeds torch's generator around a call, as no model does.
    setattr(database, "wrapper_set_seed", _plainly)  # noqa: B010 - it is not declared
    return {f"{o.name}.{o.variant_test_name}" if o.variant_test_name else o.name: o for o in op_db}


def _plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def dtype_of(op: Any) -> torch.dtype | None:
    """The widest dtype that an op takes, floating-point first."""
    kinds = (torch.float64, torch.complex128, torch.int64, torch.float32, torch.bool)
    return next((dtype for dtype in kinds if dtype in op.dtypes), None)


def samples_of(op: Any, limit: int) -> Iterator[tuple[int, Any]]:
    """Samples evenly chosen, every other one not contiguous; with limit 0 all, in both layouts."""
    dtype = dtype_of(op)
    if dtype is None:
        return
    grad = bool(op.supports_autograd) and (dtype.is_floating_point or dtype.is_complex)
    random.seed(0)
    torch.manual_seed(0)
    every = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
    step = max(1, len(every) / limit) if limit else 1
    chosen = (
        sorted({int(i * step) for i in range(limit)} & set(range(len(every))))
        if limit
        else range(len(every))
    )
    for order, index in enumerate(chosen):
        if not limit or order % 2 == 0:
            yield 2 * index, every[index]
        if not limit or order % 2 == 1 or len(chosen) == 1:
            with contextlib.suppress(RuntimeError):  # of sparse tensors, which have no strides
                yield 2 * index + 1, every[index].noncontiguous()


def refused_by_eager(op: Op, sample: Any, *, grad: bool) -> str | None:
    """Why eager does not run a sample, which is nobody's fault here, or draws as no program does.

    None if it runs; no text if it is eager's own.
    """
    builder = Builder(grad=grad)
    builder.add(op, sample)
    model, inputs = builder.made()
    try:
        with sw.seeded(SEED):
            run(model, inputs, grad=grad)
    except Exception as error:  # noqa: BLE001 - whatever eager raises
        return str(error) if str(error).startswith("sw.seeded") else ""
    return None


def measure(name: str, limit: int) -> dict[str, Any]:
    """The row of an op."""
    start_s = time.perf_counter()
    op = ops()[name]
    dtype = dtype_of(op)
    grad = (
        bool(op.supports_autograd)
        and dtype is not None
        and (dtype.is_floating_point or dtype.is_complex)
    )
    measured = Measured(name, Op.of(name, op), grad=grad)
    skipped = 0
    group: list[tuple[int, Any]] = []
    for number, sample in samples_of(op, limit):
        refusal = refused_by_eager(measured.op, sample, grad=grad)
        if refusal is not None:
            skipped += not refusal
            if refusal:
                measured.problems.append(Problem(number, "", "refused", refusal))
            continue
        group.append((number, sample))
        if len(group) == GROUP:
            measured.measure(group)
            group = []
            gc.collect()
    if group:
        measured.measure(group)
    return row(name, measured, skipped, time.perf_counter() - start_s)


LENGTH = 4
"""Of a random composition of ops."""
UNCHECKED = "batch_norm|embedding_bag|lu_unpack|_segment_reduce"
"""Ops whose kernels on a CPU read or write beyond a tensor that does not fit the other operands."""


def composed(name: str, seed: int) -> dict[str, Any]:
    """The row of a random composition of ops, each of which reads what the one before returns."""
    start_s = time.perf_counter()
    chooser, every = random.Random(seed), ops()
    names = [key for key, op in every.items() if op.supports_autograd and dtype_of(op) == F64]
    chain: list[tuple[Op, Any]] = []
    chosen: list[str] = []
    while len(chain) < LENGTH:
        key = chooser.choice(names)
        samples = [sample for _, sample in samples_of(every[key], 6)]
        if not samples or (chain and re.search(UNCHECKED, key)):
            continue
        longer = [*chain, (Op.of(key, every[key]), chooser.choice(samples))]
        if _goes_on(longer):
            chain = longer
            chosen.append(key)
    measured = Measured(name, Op(len), grad=True)
    measured.problems = measured.problems_of(_chained(chain), seed, BOTH)
    measured.exact = 0 if measured.problems else 1
    done = row(name, measured, 0, time.perf_counter() - start_s)
    return done | {"ops": chosen}


def _chained(chain: Sequence[tuple[Op, Any]]) -> Builder:
    builder = Builder(grad=True)
    for index, (op, sample) in enumerate(chain):
        builder.add(op, sample, follows=index > 0)
    return builder


def _goes_on(chain: Sequence[tuple[Op, Any]]) -> bool:
    """Whether eager runs a chain, and its last result is one that a further op can read."""
    if not isinstance(chain[-1][1].input, Tensor):
        return False
    model, inputs = _chained(chain).made()
    try:
        with sw.seeded(SEED):
            last = run(model, inputs, grad=True).outputs[-1]
    except Exception:  # noqa: BLE001 - whatever eager raises
        return False
    if not isinstance(last, Tensor) or last.dtype != F64 or last.numel() <= 1:
        return False
    if not last.isfinite().all() or last.abs().max().item() >= LARGEST:
        return False
    return own_error(model, inputs) < LOST


def row(name: str, measured: Measured, skipped: int, seconds: float) -> dict[str, Any]:
    """The row of what was measured: samples by result, the worst first five problems."""
    by_sample: dict[int, str] = {}
    for problem in measured.problems:
        worst = max(by_sample.get(problem.sample, "exact"), problem.result, key=RESULTS.index)
        by_sample[problem.sample] = worst
    counts = {result: list(by_sample.values()).count(result) for result in RESULTS[1:]}
    result = max(["exact", *by_sample.values()], key=RESULTS.index)
    if not measured.exact and not by_sample:
        result = "no samples"
    worst = sorted(measured.problems, key=lambda p: -RESULTS.index(p.result))
    return {
        "name": name,
        "result": result,
        "samples": {"exact": measured.exact, **counts, "not in eager": skipped},
        "seconds": round(seconds, 1),
        "problems": [vars(problem) for problem in worst[:5]],
    }


def main() -> None:
    """Measure the ops named on standard input, until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        name, limit = line.rsplit(maxsplit=1)
        try:
            kind, _, seed = name.partition(":")
            result = composed(name, int(seed)) if kind == "compose" else measure(name, int(limit))
        except Exception as error:  # noqa: BLE001 - of the samples themselves
            result = {"name": name, "result": "crash", "samples": {}, "seconds": 0.0}
            result["problems"] = [vars(Problem(0, "", "crash", text_of(error)))]
        print(f"{MARK}{json.dumps(result)}", flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent)
    main()
