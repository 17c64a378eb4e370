"""Steps compiled ahead: written by one process, and read by every rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from shardweave.backends.step.step_call import StepCall
from shardweave.driver.artifact.artifact import CONSTANTS, PLAN, PROGRAM, Artifact, versions
from shardweave.driver.artifact.guards import check_guards, guards_of
from shardweave.driver.artifact.options import options_to_store
from shardweave.driver.artifact.outputs import outputs_from_json, outputs_to_json
from shardweave.driver.signature import taking
from shardweave.driver.step.binding import example_call
from shardweave.driver.step.checks import check_request
from shardweave.driver.step.lowering import Lowered, lowered_step, made_here
from shardweave.driver.step.request import Request
from shardweave.ir.capture.observed.loose_tensors import constants_of
from shardweave.ir.program.program import Program
from shardweave.ir.program.text import print_module
from shardweave.planners.plan.plan import Plan


@taking(Request)
def precompile(request: Request) -> Lowered:
    """Compile a training step ahead, in one process and without the mesh's devices, into a file.

    It takes the arguments of `compile`; the model may be on the meta device, and does not change.
    `sw.compile(model, example, artifact=FILE)` then starts from the file on every rank, without
    capture and planning, and runs the same step to the last bit. Options with which the file was
    made need not be given again: plan, mesh, precision. A file of another version, mesh, model or
    setting is refused.

    artifact: the file to write. Others as in `compile`: args, kwargs, mesh, plan, cluster,
    sequence_parallel, zero, passes, program, backend, train, loss, only_loss, precision, backward,
    batch, outputs, reduce_dtype, validate, validate_limit, prove, twin. Options of a run have no
    effect: device, cuda_graph, seed, dynamic, max_programs, sync, weights, optimizers, timeout.

    Returns the `program`, `plan` and `notes` that were written. Raises ValueError as `compile`
    does, and ArtifactError for a model whose outputs cannot be written.
    """
    if not isinstance(request.artifact, str | Path):
        raise ValueError(
            'precompile needs the path of the file to write; give it, as artifact="step.artifact".'
        )
    path, options = str(request.artifact), options_to_store(request)
    request = check_request(replace(request, artifact=None), is_ahead=True)
    call = example_call(request)
    guards = guards_of(request, call)
    lowered = made_here(request, call, partial(lowered_step, call=call), is_first=True)
    mesh = request.on_mesh_of(lowered.plan).devices
    # Those of an earlier capture too, which has made them buffers of the model.
    constants = {**constants_of(request.model), **lowered.constants}
    manifest: dict[str, Any] = {
        "versions": versions(),
        "mesh": str(mesh) if mesh.axes else "",
        "options": options,
        "guards": guards,
        "returned": outputs_to_json(lowered.returned),
        "notes": lowered.notes,
        "warnings": lowered.warnings,
        "num_captured_ops": lowered.num_captured_ops,
    }
    members = {PROGRAM: print_module(lowered.program.module, locations=True).encode()}
    if lowered.plan is not None:
        members[PLAN] = lowered.plan.to_json().encode()
    content = BytesIO()
    torch.save({name: tensor.detach().cpu().clone() for name, tensor in constants.items()}, content)
    members[CONSTANTS] = content.getvalue()
    Artifact(path, manifest, members).write()
    return lowered


def start_from(artifact: Artifact, request: Request, call: StepCall) -> Lowered:
    """Return the artifact's program for a call, on every rank. Collective. Raises ArtifactError on
    every rank if a guard of the artifact differs on any rank."""
    start_s = perf_counter()
    check_guards(artifact, request, call)
    manifest, members = artifact.manifest, artifact.members
    homes = [type(module).__module__ for module in request.model.modules()]
    program = Program.parse(artifact.text(PROGRAM), artifact.path)
    return Lowered(
        program,
        Plan.from_json(artifact.text(PLAN), artifact.path) if PLAN in members else None,
        tuple(manifest["notes"]),
        tuple(manifest["warnings"]),
        outputs_from_json(manifest["returned"], homes),
        manifest["num_captured_ops"],
        lowering_s=perf_counter() - start_s,
        constants=torch.load(BytesIO(members[CONSTANTS]), weights_only=True),
    )
