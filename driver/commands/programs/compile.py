"""The `compile` command: a model's step compiled ahead, by one process, for the ranks of a mesh."""

from __future__ import annotations

import argparse
from pathlib import Path

from shardweave.driver.commands.arguments import Commands, new_command
from shardweave.driver.step.run_options import FLAGS, add_compile_options, given_options

OF_A_RUN = ("program", "artifact", "device", "cuda_graph")
"""Options of `run` that do not apply to a step compiled ahead."""

NAMES = [name for name in FLAGS if name not in OF_A_RUN]


def add_parser(commands: Commands) -> None:
    command = new_command(commands, compile_command)
    command.add_model()
    add_compile_options(command, NAMES)
    command.add_load()
    what = "file to write, for run --artifact and sw.compile(artifact=)"
    command.add_output(what, metavar="STEP", required=True)


def compile_command(options: argparse.Namespace) -> int:
    """Compile a step ahead, in one process, for the ranks of a mesh."""
    import torch

    from shardweave.driver.artifact.precompile import precompile
    from shardweave.driver.models.models import example_to_trace
    from shardweave.driver.report.text import status
    from shardweave.planners.cost.quantity import bytes_text, seconds_text

    given = given_options(options, NAMES)
    with status(f"compiling {options.model}"):
        example = example_to_trace(
            options.model, dtype=getattr(torch, options.dtype), seed=options.seed
        )
        lowered = precompile(
            example.module, kwargs=example.kwargs, artifact=options.output, **given
        )
    for text in (*example.notes, *lowered.notes):
        print(f"note: {text}")
    mesh = lowered.program.mesh
    print(
        f"compiled {options.model} for {f'mesh {mesh}' if mesh else 'one device'}: captured in "
        f"{seconds_text(lowered.capture_s)}, plan and passes in {seconds_text(lowered.lowering_s)}"
    )
    print(f"wrote {options.output} ({bytes_text(Path(options.output).stat().st_size)})")
    return 0
