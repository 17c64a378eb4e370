"""Optimizers of other packages on meshes: `python benchmarks/optimizers_of_others.py`

Every optimizer class of the packages below that are installed trains a small GPT of uneven sizes
for five steps in float64, on processes and beside on one, from equal seeds. A row holds the largest
difference of a parameter. `noise` is that between two runs on one process: the other has the batch
in another order, and parameters one by one where a class can, so that last bits differ. A row is
equal below 1e-9, or below a hundred times the noise; else equal in float32, refused with the first
line of an error, or wrong. Rows already in the file of `--json` are kept. `--quick`: torch.optim
alone, on two processes with zero=3.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import itertools
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_processes import free_port, start_worker
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

PACKAGES = (
    "torch.optim pytorch_optimizer torch_optimizer heavyball bitsandbytes.optim schedulefree "
    "dadaptation torchao.optim galore_torch muon lomo_optim lion_pytorch prodigyopt came_pytorch "
    "adan_pytorch transformers.optimization"
).split()

MESHES: dict[str, int] = {
    "data=2 zero=1": 2, "data=2 zero=3": 2, "tensor=2": 2, "data=2,tensor=2 zero=3": 4,
    "stage=2": 2,
}  # fmt: skip
"""Meshes, and how many processes they have."""

STEPS = 5
RATE = 0.01
BATCH = 8
FLOAT32 = 1e-7 * RATE * STEPS * 10
"""The most by which states in float32, as some classes keep them, may let parameters differ."""

LIMIT_S = 240.0
"""Seconds after which a case is taken to hang."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 15), nn.Linear(15, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Two blocks of two heads; the widths 6, 15 and 13 do not all divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(13, 6), nn.Embedding(5, 6)
        self.blocks = nn.ModuleList(Block(6, 2) for _ in range(2))
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


# Optimizers

Make = Callable[[nn.Module], Optimizer]


def classes_of(packages: Iterable[str]) -> dict[str, type[Optimizer]]:
    """The optimizer classes of packages that are installed, by package and name."""
    classes: dict[str, type[Optimizer]] = {}
    for package in packages:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        for name, value in sorted(vars(module).items()):
            if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer:
                if package == "torch.optim" or not value.__module__.startswith("torch.optim."):
                    classes[f"{package}.{name}"] = value
    return classes


def makers(cls: type[Optimizer], *, is_joint: bool = True) -> list[Make]:
    """Ways to make an optimizer, by its signature: of parameters, a model, or an optimizer.

    is_joint: whether it may compute several parameters by one op.
    """
    signature = inspect.signature(cls).parameters
    first = next(iter(signature), "")
    options: dict[str, Any] = {"lr": RATE} if "lr" in signature else {}
    options |= {key: value for key, value in SETTINGS.items() if key in signature and key != first}
    make = cast("Callable[..., Optimizer]", cls)
    options |= {} if is_joint else {"foreach": False}
    if first in ("optimizer", "base_optimizer", "base"):
        return [lambda model: make(torch.optim.AdamW(model.parameters(), lr=RATE), **options)]
    if first == "model":
        return [lambda model: make(model, **options)]
    return [
        lambda model: make(list(model.parameters()), **options),
        lambda model: make(groups_of(model, use_muon=True), **options),
        lambda model: make(groups_of(model)[:1], **options),
    ]


SETTINGS: dict[str, Any] = {
    "base_optimizer": torch.optim.AdamW, "base_optimizer_cls": torch.optim.AdamW,
    "optimizer_class": torch.optim.AdamW, "num_iterations": 1, "max_lr": RATE, "num_data": 64,
    "relative_step": False, "hessian_distribution": "rademacher", "min_8bit_size": 16,
}  # fmt: skip
"""Values of parameters that some classes have."""


def groups_of(model: nn.Module, **settings: Any) -> list[dict[str, Any]]:
    """Two groups, of matrices and of the rest; settings: of the first, reversed for the second."""
    parameters = list(model.parameters())
    others = {name: not value for name, value in settings.items()}
    return [
        {"params": [p for p in parameters if p.ndim == 2], **settings},
        {"params": [p for p in parameters if p.ndim != 2], **others},
    ]


def trained(
    model: nn.Module, make: Make, batch: tuple[Tensor, ...], *, is_called: bool
) -> dict[str, Tensor]:
    """Full values of the parameters after the steps of an optimizer. is_called: with a closure."""
    optimizer: Any = make(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        return loss

    if hasattr(optimizer, "train"):
        optimizer.train()
    for index in range(STEPS):
        torch.manual_seed(index)
        if is_called:
            optimizer.step(closure)
            continue
        closure()
        if hasattr(optimizer, "first_step"):
            optimizer.first_step(zero_grad=True)
            closure()
            optimizer.second_step(zero_grad=True)
        else:
            optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    values = {name: full(p) for name, p in model.named_parameters()}
    if not all(bool(value.isfinite().all()) for value in values.values()):
        raise ValueError("its parameters are not finite")
    return values


def full(tensor: Tensor) -> Tensor:
    from shardweave.backends.optimizers.shards import full_value

    return (full_value(tensor) if isinstance(tensor, DTensor) else tensor).detach().clone()


def difference(values: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max(float((values[name] - others[name]).abs().max()) for name in values)


# Rows


def row_of(
    model: nn.Module, step: nn.Module, cls: type[Optimizer], batch: tuple[Tensor, ...]
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    has_forms = "foreach" in inspect.signature(cls).parameters
    ways = zip(makers(cls), makers(cls, is_joint=not has_forms), strict=True)
    for (make, other_make), is_called in itertools.product(ways, (False, True)):
        run = partial(trained, make=make, is_called=is_called)
        flipped = tuple(x.flip(0) for x in batch)
        try:
            wanted = run(copy.deepcopy(model), batch=batch)
            other = run(copy.deepcopy(model), batch=flipped, make=other_make)
            if not difference(wanted, dict(model.named_parameters())):
                raise ValueError("it changes nothing")
        except Exception as error:  # noqa: BLE001 - others' code may raise anything
            row = row or {"verdict": "not on one process", "says": first_line(error)}
            continue
        row = {"noise": difference(wanted, other)}
        try:
            error = difference(run(step, batch=batch), wanted)
        except Exception as error:  # noqa: BLE001 - others' code may raise anything
            trace = traceback.format_exc().splitlines()
            return row | {"verdict": "refused", "says": first_line(error), "trace": trace[-12:]}
        return row | {"verdict": verdict_of(error, row["noise"]), "error": error}
    return row


def verdict_of(error: float, noise: float) -> str:
    if error < max(1e-9, 100 * noise):
        return "equal"
    return "equal in float32" if error < FLOAT32 else "wrong"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"


def work(settings: dict[str, Any]) -> None:
    """One rank: the cases in turn, each to a line of a file."""
    warnings.simplefilter("ignore")
    import shardweave as sw

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT().double()
    batch = torch.randint(13, (BATCH, 5)), torch.randint(13, (BATCH, 5))
    mesh, _, zero = settings["mesh"].partition(" zero=")
    step = sw.compile(copy.deepcopy(model), batch, mesh=mesh, zero=int(zero or 0))
    start = copy.deepcopy(model.state_dict())
    own = {id(p): set(vars(p)) for p in step.parameters()}
    classes = classes_of({name.rpartition(".")[0] for name in settings["names"]})
    for name in settings["names"]:
        step.load_state_dict(start)
        for p in step.parameters():
            p.grad = None
            for added in vars(p).keys() - own[id(p)]:
                delattr(p, added)
        row = row_of(model, step, classes[name], batch)
        verdicts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(verdicts, row)
        if dist.get_rank() == 0:
            row = next((x for x in verdicts if x["verdict"] == "refused"), verdicts[0])
            with Path(settings["out"]).open("a") as file:
                file.write(json.dumps({"mesh": settings["mesh"], "optimizer": name} | row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def rows_of(mesh: str, names: list[str]) -> list[dict[str, Any]]:
    """The rows of some optimizers; processes that hang in one are started again after it."""
    rows: list[dict[str, Any]] = []
    while len(rows) < len(names):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "rows")
            settings = {"mesh": mesh, "names": names[len(rows) :], "out": str(out)}
            how = watched(settings, MESHES[mesh], out)
            rows += [json.loads(line) for line in out.read_text().splitlines()]
        if len(rows) < len(names):
            rows.append({"mesh": mesh, "optimizer": names[len(rows)], "verdict": how})
            print(rows[-1], flush=True)
    return rows


def watched(settings: dict[str, Any], ranks: int, out: Path) -> str:
    """Run workers until they end, or write nothing for a while; say which."""
    out.touch()
    port = free_port()
    workers = [
        start_worker(Path(__file__), settings, ranks, "", rank, port) for rank in range(ranks)
    ]
    shown, since_s = 0, time.monotonic() + 300
    try:
        while any(worker.poll() is None for worker in workers):
            time.sleep(0.5)
            lines = out.read_text().splitlines()
            if len(lines) > shown:
                print(*lines[shown:], sep="\n", flush=True)
                shown, since_s = len(lines), time.monotonic()
            if time.monotonic() - since_s > LIMIT_S:
                return "hangs"
            if any(worker.poll() for worker in workers):
                return "ends its process"
        return "ends"
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mesh", help="one of the meshes alone")
    parser.add_argument("--only", default="", help="how names begin, such as muon.,lion_pytorch.")
    parser.add_argument("--json", type=Path, help="add the rows to this file")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    path = cast("Path | None", options.json)
    rows = json.loads(path.read_text()) if path and path.exists() else []
    known = {(row["mesh"], row["optimizer"]) for row in rows}
    warnings.simplefilter("ignore")
    packages = PACKAGES[:1] if options.quick else PACKAGES
    parts = tuple(options.only.split(","))
    chosen = [x for x in packages if any(part.startswith(x) for part in parts)] or packages
    names = [name for name in classes_of(chosen) if name.startswith(parts)]
    meshes = [options.mesh] if options.mesh else ["data=2 zero=3"] if options.quick else [*MESHES]
    for mesh in meshes:
        new = rows_of(mesh, [name for name in names if (mesh, name) not in known])
        rows += new
        if path:
            path.write_text(json.dumps(rows, indent=1) + "\n")
        verdicts = [row["verdict"] for row in new]
        print(mesh, {verdict: verdicts.count(verdict) for verdict in sorted({*verdicts})})
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 2 and not sys.argv[1].startswith("--"):
        work(json.loads(sys.argv[1]))
    else:
        raise SystemExit(main())
