"""Are mixtures of experts exact as people write them? `python benchmarks/moe_models.py`

torchtitan's and Hugging Face's mixtures, unedited, with their default experts, each tiny: two steps
on meshes with an axis `expert`, of stages and with ZeRO, on the reference backend. Loss, gradients
and buffers are compared with eager PyTorch's in float64 at 1e-9. A model that computes a part in
float32 or bfloat16, as torchtitan's experts, is held to three times its own distance from itself
with that part in float64; with `float64`, its casts to fewer bits are left out of both sides, and
the bound is 1e-9. On a mesh with an axis `expert` a rank's grouped products have to be those of its
share of the rows: all of them divided by the size of the mesh.

torchtitan and transformers are extras of this benchmark. torchtitan's attention, whose gradient
does not run on CPUs, is written out. `--only` chooses cases by a part of their names, `--on` a
configuration; the table in `--json` keeps the rows of all others. Exits 1 unless all are exact.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardweave as sw
from shardweave.benchmarks.moe_cases import CASES
from shardweave.driver.checking.check import (
    CheckResult,
    Expected,
    compare_steps,
    results_of,
    run_eager,
)
from shardweave.ir.ops.registry import flops_of, spec_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import ops_of_parts

RESULTS = Path(__file__).resolve().parent / "results" / "moe_models.json"
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "expert=2": {"mesh": "expert=2"},
    "data=2,expert=2": {"mesh": "data=2,expert=2"},
    "expert=2,tensor=2": {"mesh": "expert=2,tensor=2"},
    "stage=2": {"mesh": "stage=2"},
    "zero=3": {"mesh": "data=2", "zero": 3},
    "float64": {"mesh": "data=2,expert=2"},
}
BOUND = 1e-9
OWN_DISTANCES = 3
PRODUCTS = (torch._grouped_mm, nn.functional.grouped_mm)  # pyright: ignore[reportPrivateImportUsage]
NARROW = (torch.bfloat16, torch.float16, torch.float32)


class AnyDtype(TorchFunctionMode):
    """Grouped products take float64, which torch's on CPUs do not."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in PRODUCTS:
            return _grouped(*args, **kwargs)
        return func(*args, **kwargs)


class Wide(TorchFunctionMode):
    """Leaves out casts to fewer bits than float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.bfloat16, Tensor.float, Tensor.half):
            return args[0].double()
        args = tuple(map(_wider, args))
        kwargs = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _grouped(rows: Tensor, weights: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Rows times the matrix of their group, differentiable."""
    ends: list[int] = offs.tolist()
    own = zip([0, *ends], ends, weights, strict=False)
    rest = rows.new_zeros(rows.shape[0] - ends[-1], weights.shape[-1])
    return torch.cat([*(rows[start:end] @ weight for start, end, weight in own), rest])


@contextmanager
def _wide() -> Iterator[None]:
    """Nothing is computed in fewer bits than float64, by autocast neither."""
    plain = torch.autocast

    def off(device_type: str, *_: Any, **__: Any) -> Any:
        return plain(device_type, enabled=False)

    with mock.patch.object(torch, "autocast", off), AnyDtype(), Wide():
        yield


def measure(name: str, build: Callable[[], tuple[nn.Module, Sequence[Mapping[str, Tensor]]]],
            wanted: Sequence[str]) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The rows of a case: what came of each configuration."""
    torch.manual_seed(0)
    try:
        model, batches = build()
        eager_model, wide_model = copy.deepcopy(model), copy.deepcopy(model).double()
        with AnyDtype():
            eager = [run_eager(eager_model, batch) for batch in batches]
        with _wide():
            wide = [run_eager(wide_model, batch) for batch in batches]
        own = compare_steps(eager, wide, torch.float64)
        products = _grouped_flops(sw.capture(copy.deepcopy(model), kwargs=batches[0]))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's
        yield {"case": name, "on": "eager", "result": "not built", "why": _text(error)}
        return
    for on in wanted:
        start_s = time.perf_counter()
        is_wide = on == "float64"
        bound = BOUND if is_wide else max(BOUND, OWN_DISTANCES * _largest(own))
        row: dict[str, Any] = {"case": name, "on": on, "bound": bound}
        try:
            copied = copy.deepcopy(model)
            with (
                warnings.catch_warnings(record=True) as caught,
                Wide() if is_wide else nullcontext(),
            ):
                warnings.simplefilter("always")
                step = sw.compile(
                    copied.double() if is_wide else copied, (), batches[0], backend="reference",
                    backward="in_call", **CONFIGURATIONS[on],
                )  # fmt: skip
            row["idle"] = sorted({str(w.message) for w in caught if "idle" in str(w.message)})
            steps = [_step(step, batch) for batch in batches]
            check = compare_steps(steps, wide if is_wide else eager, torch.float64)
            row["error"] = _largest(check)
            row["share"] = _grouped_flops(step.program) / (products or 1)
            _judge(row, check)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's
            row |= {"result": "crashed", "why": _text(error)}
        row["seconds"] = round(time.perf_counter() - start_s, 1)
        yield row


def _step(step: sw.CompiledModule, batch: Mapping[str, Tensor]) -> Expected:
    step.zero_grad(set_to_none=True)
    return results_of(step, step(**batch))


def _judge(row: dict[str, Any], check: CheckResult) -> None:
    mesh = CONFIGURATIONS[row["on"]]["mesh"]
    ranks = 1
    for axis in mesh.split(",") if "expert" in mesh else ():
        # Interleaved features, as gpt_oss's, are not cut over `tensor`.
        ranks *= 1 if axis.startswith("tensor") else int(axis.partition("=")[2])
    if not row["error"] <= row["bound"]:
        worst = check.worst_parameter, check.worst_buffer
        row |= {"result": "wrong", "why": f"loss {check.loss_error:.0e}, worst {worst}"}
    elif row["idle"] and "expert" in mesh:
        row |= {"result": "idle", "why": row["idle"][0]}
    elif row["share"] * ranks > 1.05 and ranks > 1:
        row |= {"result": "idle", "why": f"a rank computes {row['share']:.3f} of grouped products"}
    else:
        row |= {"result": "exact", "why": ""}


def _largest(check: CheckResult) -> float:
    return max(check.loss_error, check.max_rel_grad_error, check.buffer_error)


def _grouped_flops(program: Program) -> int:
    """FLOPs of the products of experts, of a rank."""
    return sum(flops_of(op) for op in ops_of_parts(program) if spec_of(op).grouped)


def _text(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "shardweave" in f.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__} {place}: {' '.join(str(error).split())}"[:500]


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Put rows into the table of a file, in place of those of the same case and configuration."""
    known = json.loads(path.read_text()) if path.exists() else []
    table = {(row["case"], row["on"]): row for row in (*known, *rows)}
    short = [
        {
            "case": row["case"], "on": row["on"], "result": row["result"], "why": row["why"],
            **{name: float(f"{row[name]:.0e}") for name in ("error", "bound") if name in row},
        }
        for row in table.values()
    ]  # fmt: skip
    path.write_text(json.dumps(short, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--on", choices=CONFIGURATIONS, help="a configuration")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    wanted = [arguments.on] if arguments.on else list(CONFIGURATIONS)
    rows: list[dict[str, Any]] = []
    for name, build in CASES.items():
        for row in measure(name, build, wanted) if arguments.only in name else ():
            rows.append(row)
            print(f"{name:28} {row['on']:18} {row['result']:9} {row.get('error', 0):.0e} "
                  f"of {row.get('bound', 0):.0e}  {row.get('why', '')}", flush=True)  # fmt: skip
        write(rows, arguments.json)
    return int(any(row["result"] != "exact" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
