"""Whether `auto` is ever slower than another planner, on random problems.

`python benchmarks/auto_never_slower.py [--count N] [--seed N] [--quick] [--json OUT]` draws models
and clusters: every second model is deeper than eight blocks, and every second pair of clusters has
devices of two kinds. `auto` plans each, and so do all other planners; the whole program of each
plan is simulated. A problem that stands in OUT is not planned again, so that a run may go on where
another ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardweave.benchmarks.baselines.exhaustive import plan_exhaustive
from shardweave.driver.models.models import build_example
from shardweave.ir.capture.capture import capture
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.planners.call import call_planner
from shardweave.planners.cost.cluster import Cluster
from shardweave.planners.cost.degrees import divisors
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.lower import RECENT, Lowerings
from shardweave.planners.plan.plan import Plan
from shardweave.planners.predict.predict import TIE, predict_plan

QUICK = 4
OPTIONS: Mapping[str, Mapping[str, int]] = {"oppa": {"trials": 8}}
GIB = 2**30


@dataclass(frozen=True)
class Problem:
    """A model and a cluster, by a number that draws both again."""

    spec: str
    cluster: Cluster

    @property
    def is_mixed(self) -> bool:
        return len({node.device for node in self.cluster.nodes}) > 1


@dataclass(frozen=True)
class Row:
    """What a step takes by the plan of each planner that has one that fits, in seconds."""

    name: str
    is_deep: bool
    is_mixed: bool
    auto: str
    auto_s: float | None
    others_s: Mapping[str, float]
    processor_s: float

    @property
    def behind(self) -> float:
        """The share by which `auto` is slower than the fastest other; infinite if it alone has no
        plan that fits."""
        if not self.others_s:
            return 0.0
        if self.auto_s is None:
            return float("inf")
        return self.auto_s / min(self.others_s.values()) - 1


def drawn(seed: int, number: int) -> Problem:
    """Steps of models on two to eight devices, of memory from scarce to plenty, with links a
    hundredfold apart."""
    random = Random(f"{seed} {number}")
    is_deep, is_mixed = number % 2 == 1, number // 2 % 2 == 1
    layers = random.choice((9, 10, 12)) if is_deep else random.choice((1, 2, 4))
    hidden, seq = random.choice((64, 256, 1024)), random.choice((64, 256, 512))
    batch, vocab = random.choice((4, 8, 16)), random.choice((512, 8192))
    family = random.choice(("gpt", "llama", "bert", "unet"))
    spec = f"gpt:layers={layers},hidden={hidden},heads=8,vocab={vocab},seq={seq},batch={batch}"
    if family in ("llama", "bert"):
        spec = (
            f"hf:{family}:num_hidden_layers={layers},hidden_size={hidden},num_attention_heads=8,"
            f"intermediate_size={4 * hidden},vocab_size={vocab},batch={batch},seq={seq},"
            "max_position_embeddings=512"
        )
    if family == "unet" and not is_deep:
        spec = f"unet:channels={max(16, hidden // 16)},size=16,levels=1,batch={batch}"
    return Problem(spec, _cluster(random, is_mixed))


def _cluster(random: Random, is_mixed: bool) -> Cluster:
    places = ("perlmutter:nodes=1", "oases-3090", "amp-het-cluster")
    fast, slow = (find_cluster(random.choice(places)) for _ in range(2))
    count, devices = random.choice(((1, 2), (1, 4), (2, 1), (2, 2), (1, 8), (2, 4)))
    node = replace(
        fast.nodes[0],
        devices=devices,
        count=count,
        bandwidth_bytes_s=fast.nodes[0].bandwidth_bytes_s * 10 ** random.uniform(-1.5, 0),
        nic_bandwidth_bytes_s=10 ** random.uniform(8.5, 10),
        nics=1,
        islands=(),
        rings=(),
    )
    nodes = [node]
    kinds = {node.device: fast.devices[node.device]}
    if is_mixed:
        name = random.choice([name for name in slow.devices if name not in kinds] or ["T4"])
        kinds[name] = (
            find_cluster("amp-het-cluster").devices[name] if name == "T4" else (slow.devices[name])
        )
        devices = random.choice((1, 2, devices))
        nodes.append(replace(node, device=name, devices=devices, count=1))
    memory = int(random.choice((1, 2, 8, 32)) * GIB)
    kinds = {
        name: replace(kind, memory_bytes=int(memory * random.choice((1, 1, 0.5))))
        for name, kind in kinds.items()
    }
    return replace(
        fast,
        name="drawn",
        devices=kinds,
        nodes=tuple(nodes),
        collectives=(),
    )


def others(program: Program, cluster: Cluster) -> Iterator[tuple[str, Plan]]:
    """The plans of all other planners that have one."""
    count = cluster.num_devices
    wide = [Mesh(data=count // n, tensor=n) for n in divisors(count)]
    asked: list[tuple[str, Mesh | None]] = [(name, None) for name in ("amp", "axonn", "oppa")]
    asked += [("megatron", mesh) for mesh in wide] + [("oases", mesh) for mesh in wide[1:]]
    asked.append(("exhaustive", None))
    for name, mesh in asked:
        try:
            if name == "exhaustive":
                plan = plan_exhaustive(program, None, cluster=cluster)
            else:
                options = OPTIONS.get(name)
                plan = call_planner(name, program, mesh, cluster=cluster, options=options)
        except ValueError:
            continue
        yield f"{name} on {mesh}" if mesh else name, plan


def row_of(name: str, problem: Problem) -> Row:
    with FakeTensorMode():
        example = build_example(problem.spec, dtype=torch.float32)
    program = capture(example.module, kwargs=example.kwargs)
    lowerings = Lowerings(program, most=RECENT)

    def step_s(plan: Plan) -> float | None:
        found = predict_plan(lowerings, plan, problem.cluster)
        return found.time_s if found.fits else None

    start_s = time.process_time()
    try:
        plan = call_planner("auto", program, None, cluster=problem.cluster)
        chosen, auto_s = plan.candidates[0].name, step_s(plan)
    except ValueError as error:
        chosen, auto_s = str(error), None
    processor_s = time.process_time() - start_s
    found: dict[str, float] = {}
    for other, plan in others(program, problem.cluster):
        try:
            seconds = step_s(plan)
        except ValueError:
            continue
        if seconds is not None:
            found[other] = seconds
    is_deep = any(f"layers={n}," in problem.spec for n in (9, 10, 12))
    return Row(name, is_deep, problem.is_mixed, chosen, auto_s, found, processor_s)


def text_of(row: Row) -> str:
    best = min(row.others_s, key=lambda name: row.others_s[name], default="none")
    told = "none fits" if row.auto_s is None else f"{1e3 * row.auto_s:.3f} ms"
    other = f"{best} {1e3 * row.others_s[best]:.3f} ms" if row.others_s else "no other plan fits"
    return f"{row.name}: auto {told} ({row.auto}); {other}; {row.behind:+.2%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this problem alone")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} problems")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    if options.json and options.json.exists():
        rows = [Row(**row) for row in json.loads(options.json.read_text())["rows"]]
    known = {row.name for row in rows}
    numbers = range(QUICK if options.quick else options.count)
    for number in numbers if options.only is None else [options.only]:
        problem = drawn(options.seed, number)
        nodes = " + ".join(f"{n.count} x {n.devices} {n.device}" for n in problem.cluster.nodes)
        name = f"{options.seed}.{number}: {problem.spec} on {nodes}"
        if name in known:
            continue
        rows.append(row_of(name, problem))
        print(text_of(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(
                json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
            )
    slower = [row for row in rows if row.behind > TIE]
    print(f"{len(rows)} problems; auto is slower by more than {TIE:.0%} in {len(slower)}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
