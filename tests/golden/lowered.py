"""Golden cases of lowering: plans and pass pipelines, and all that follows from their programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardweave.backends.emit.emit import emit
from shardweave.driver.kernel_files import distinct_kernels
from shardweave.ir.mesh.mesh import Mesh
from shardweave.ir.program.program import Program
from shardweave.ir.program.staged import parts_of
from shardweave.ir.proof.ops import ProofError
from shardweave.ir.proof.prove import prove
from shardweave.passes.notes import unheard
from shardweave.passes.pipeline import PassPipeline
from shardweave.planners.cost.cluster_file import load_cluster
from shardweave.planners.cost.presets import find_cluster
from shardweave.planners.lowering.apply_plan import ApplyPlanPass
from shardweave.planners.lowering.lower import local_program
from shardweave.planners.lowering.stages.choose import with_pipeline
from shardweave.planners.plan.plan import Plan
from shardweave.planners.planning import plan as make_plan
from shardweave.planners.predict.predict import simulate_step
from shardweave.tests.golden.figures import Figures, text_of
from shardweave.tests.golden.programs import stored

CLUSTERS = {
    path.stem: load_cluster(path)
    for path in sorted((Path(__file__).parent / "clusters").glob("*.yaml"))
} | {"rings": find_cluster("dgx-a100-40:nodes=1")}
"""Clusters of slow links, of mixed devices, and one whose collectives were measured."""

TESTBED = "testbed:nodes=4"

OPTIONS = ("sequence_parallel", "attention_parts", "expert_load")
"""Options of the planner among the changes of a plan."""

TWO = {"stages": [["h.0"], ["h.1"]], "micro_batches": 4}
FOUR = {"stages": [["h.0"], ["h.1"], ["h.2"], ["h.3"]], "micro_batches": 4}


def stages(base: dict[str, Any], schedule: str, **more: Any) -> dict[str, Any]:
    return {"pipeline": {**base, "schedule": schedule, **more}}


PLANS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "one device": ("gpt", "data=1", {"update": "AdamW"}),
    "data": ("gpt", "data=4", {"update": "SGD", "precision": "fp32"}),
    "tensor": ("gpt", "tensor=4", {"update": "Muon"}),
    "sequence": ("gpt", "data=2,tensor=2", {"sequence_parallel": True, "recompute": "layer"}),
    "zero 1": ("gpt", "data=4", {"zero": 1, "update": "AdamW", "alone_bytes": 512}),
    "zero 2": ("gpt", "data=2,tensor=2", {"zero": 2, "update": "Adafactor"}),
    "zero 3": ("gpt", "data=4", {"zero": 3, "recompute": "layer", "update": "AdamW"}),
    "hybrid": ("gpt", "replica=2,data=2", {"zero": 3, "alone_bytes": 1024}),
    "mixed precision": ("llama", "data=2,tensor=2", {"zero": 2, "precision": "bf16-mixed"}),
    "true precision": ("llama", "tensor=2", {"precision": "bf16-true", "update": "AdamW"}),
    "context": ("gpt", "data=2,context=2", {"recompute": "after-communication"}),
    "context of llama": ("llama", "context=2,tensor=2", {"attention_parts": 2}),
    "products kept": ("llama", "data=2,tensor=2", {"recompute": "after-products"}),
    "some recomputed": ("gpt", "tensor=2", {"recompute": "layer", "recompute_in": ["h.1"]}),
    "offload inputs": ("gpt", "data=2", {"recompute": "layer", "offload": "inputs"}),
    "offload all": ("deep", "data=2", {"offload": "all+states", "update": "AdamW"}),
    "offload states": ("gpt", "data=2", {"offload": "states", "zero": 3, "update": "AdamW"}),
    "decompose": (
        "gpt",
        "data=2,tensor=2",
        {"sequence_parallel": True, "decompose": ["h.*"], "schedule": "in-order"},
    ),
    "sub-batches": ("gpt", "data=2,tensor=2", {"batch_split": 2, "schedule": "sub-batch"}),
    "cross-pass": (
        "gpt",
        "tensor=4",
        {"batch_split": 2, "schedule": "cross-pass", "recompute": "after-communication"},
    ),
    "blocking": ("gpt", "data=2,tensor=2", {"schedule": "blocking", "recompute": "layer"}),
    "list": ("gpt", "data=2,tensor=2", {"schedule": "list", "cluster": TESTBED}),
    "list of llama": ("llama", "data=4", {"zero": 3, "schedule": "list", "cluster": "dgx-a100-40"}),
    "loss in chunks": ("gpt", "data=2,tensor=2", {"loss_chunks": 4}),
    "loss of llama": ("llama", "tensor=4", {"loss_chunks": 2, "recompute": "layer"}),
    "dropout": ("dropout", "data=2,tensor=2", {"recompute": "layer"}),
    "dropout in parts": ("dropout", "data=2", {"batch_split": 2, "schedule": "sub-batch"}),
    "experts": ("experts", "data=2,expert=2", {"expert_load": 1.5}),
    "experts and tensor": ("experts", "tensor=2,expert=2", {"recompute": "layer", "zero": 1}),
    "slots": ("slots", "expert=4", {}),
    "slots and data": ("slots", "data=2,expert=2", {"zero": 2, "update": "AdamW"}),
    "convolutions": ("cnn", "data=2,tensor=2", {"zero": 3}),
    "space": ("cnn", "space=2", {}),
    "space of unet": ("unet", "data=2,space=2", {"recompute": "layer"}),
    "unet": ("unet", "data=2,tensor=2", {"schedule": "list", "cluster": "dgx-a100-40"}),
    "t5 in stages": ("t5", "pipeline=2,data=2", {}),
    "micro-batches": ("gpt", "data=2", {"pipeline": {"stages": [["*"]], "micro_batches": 4}}),
    "stages": ("gpt", "pipeline=2,data=2", {"zero": 1, "update": "AdamW"}),
    "stages, zero 2": ("gpt", "pipeline=2,data=2", {"zero": 2, **stages(TWO, "gpipe")}),
    "stages, zero 3": ("gpt", "pipeline=2,data=2", {"zero": 3, "recompute": "layer"}),
    "stages and tensor": (
        "gpt",
        "pipeline=2,tensor=2",
        {"sequence_parallel": True, "recompute": "layer", **stages(TWO, "1f1b")},
    ),
    "stages, list": ("deep", "pipeline=2", {"cluster": "dgx-a100-40", **stages(FOUR, "list")}),
    "stages of mixed shares": (
        "deep",
        "pipeline=3",
        stages(TWO | {"stages": [["h.0", "h.1"], ["h.2", "h.3"]]}, "1f1b", shares=[[1, 3], [4]]),
    ),
    **{
        f"schedule {name}": ("deep", mesh, stages(base, name))
        for name, mesh, base in (
            ("gpipe", "pipeline=4", FOUR),
            ("interleaved-1f1b", "pipeline=2", FOUR),
            ("zero-bubble", "pipeline=4", FOUR),
            ("zero-bubble-h2", "pipeline=4", FOUR),
            ("zero-bubble-v", "pipeline=2", FOUR),
            ("dualpipe-v", "pipeline=2", FOUR),
        )
    },
}
"""Plans by name: the model, the mesh, and the fields in which Megatron's plan is changed."""


def changed_plan(model: str, mesh: str, changes: dict[str, Any]) -> Plan:
    """Make Megatron's plan of a stored program, change it, and give it stages."""
    program = stored(model)
    options = {key: changes[key] for key in OPTIONS if key in changes}
    with unheard():
        plan = make_plan(program, mesh, "megatron", **options)
    fields = {key: value for key, value in changes.items() if key not in OPTIONS}
    if "expert_load" in changes:
        fields["expert_load"] = changes["expert_load"]
    plan = Plan.from_dict(json.loads(plan.to_json()) | fields)
    return with_pipeline(plan, program, Mesh.parse(mesh))


def plan_figures(name: str) -> Figures:
    """Figures of a plan's program: its text, numbers, proof, source, and simulated steps."""
    model, mesh, changes = PLANS[name]
    plan = changed_plan(model, mesh, changes)
    with unheard():
        local = local_program(stored(model), plan)
    figures = {"plan": plan.to_json(), **program_figures(local)}
    figures["proof"] = proof_of(local, stored(model))
    for name, cluster in CLUSTERS.items():
        simulation = simulate_step(
            local, cluster, precision=plan.precision, pipeline=plan.pipeline, update=plan.update
        )
        events = [tuple(event) for event in simulation.events]
        figures |= {
            f"time_s on {name}": simulation.step_s,
            f"peak_bytes on {name}": simulation.peak_bytes,
            f"simulation on {name}": [simulation.record(), events, simulation.summary()],
        }
    return figures


def program_figures(program: Program) -> dict[str, Any]:
    """Figures of any program: its text, its numbers, and the source that ranks run."""
    numbers = program.stats()
    messages = [f"{c.count} {c.kind} over {','.join(c.axes)}" for c in numbers.collectives]
    return {
        "program": str(program),
        "ops": ", ".join(f"{count} {phase}" for phase, count in numbers.ops.items()),
        "messages": "; ".join(messages),
        "sent_bytes": sum(c.sent_bytes for c in numbers.collectives),
        "stats": str(numbers) + text_of(vars(numbers)),
        "source": "\n".join(emit(part) for part in parts_of(program)),
    }


def proof_of(program: Program, goal: Program) -> str:
    """Return the proof that a program computes what another does, or why there is none."""
    try:
        return str(prove(program, against=goal))
    except ProofError as error:
        return f"not proved: {error}"


PIPELINES: dict[str, tuple[str, str, str]] = {
    **{
        f"preset {preset}": ("gpt", "data=2,tensor=2", f"preset:{preset}")
        for preset in ("default", "megatron", "merak", "axonn", "domino", "oases")
    },
    "kernels": ("gpt", "tensor=2", "preset:partition,preset:kernels"),
    "kernels of products": ("gpt", "data=2", "preset:partition,fuse-kernels"),
    "kernels of llama": ("llama", "tensor=2", "preset:default,preset:kernels"),
    "kernels of dropout": ("dropout", "data=2", "preset:default,preset:kernels"),
    "kernels of unet": ("unet", "data=2", "preset:partition,preset:kernels"),
    "kernels of experts": ("experts", "expert=2", "preset:partition,preset:kernels"),
    "blocks": ("llama", "data=2", "preset:partition,fuse-blocks"),
    "unfused": ("gpt", "tensor=2", "preset:partition,preset:kernels,unfuse-kernels"),
    "budget": (
        "deep",
        "data=2",
        'preset:partition,rematerialize{policy="budget" bytes=20000},start-collectives',
    ),
    "small buckets": (
        "deep",
        "data=4",
        "preset:partition,bucket-collectives{bytes=600 alone_bytes=300},start-collectives",
    ),
    "list in little memory": (
        "gpt",
        "data=2,tensor=2",
        'preset:partition,start-collectives,overlap-communication{cluster="dgx-a100-40" '
        "memory_cap=68000}",
    ),
}
"""Pipelines by name: the model, the mesh of Megatron's plan, and the passes after `apply-plan`."""


def pipeline_figures(name: str) -> Figures:
    """Figures of the program after some passes, and of its kernels."""
    model, mesh, passes = PIPELINES[name]
    plan = changed_plan(model, mesh, {})
    with unheard():
        pipeline = PassPipeline([ApplyPlanPass.of(plan), passes])
        program = pipeline.run(stored(model), mesh=Mesh.parse(mesh), verify_each=False)
    figures = program_figures(program)
    kernels, uses, unfit = distinct_kernels(program)
    if uses:
        described = [(x.source, x.pointers, x.fixed) for x in kernels.values()]
        figures |= {"kernels": described, "uses": uses, "unfit": unfit}
        figures["calls"] = "\n".join(emit(part, kernels=True) for part in parts_of(program))
    figures["time_s"] = simulate_step(program, CLUSTERS["slow"]).time_s
    return figures
