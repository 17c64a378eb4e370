"""The `capture` command: a model's training step as the text of a program."""

from __future__ import annotations

import argparse
import time

from shardweave.driver.commands.arguments import Commands, messages, new_command


def add_parser(commands: Commands) -> None:
    command = new_command(commands, capture_command)
    command.add_model()
    command.add_program_output()
    command.add_argument("--mesh", help=argparse.SUPPRESS)  # to say where it belongs
    command.add_flag("--eval", "capture only the forward pass, in evaluation mode")


def capture_command(options: argparse.Namespace) -> int:
    """Capture a model's training step as text."""
    if options.mesh is not None:
        raise ValueError(
            "capture writes the global program, which fits any mesh, and takes no --mesh; give "
            f"--mesh to a later command: 'shardweave opt FILE --mesh {options.mesh} --passes "
            f"...', or 'shardweave run {options.model} --mesh {options.mesh}'."
        )
    import torch

    from shardweave.driver.commands.read_programs import program_line, write
    from shardweave.driver.models.models import example_to_trace
    from shardweave.driver.report.text import status
    from shardweave.ir.capture.capture import capture

    dtype = getattr(torch, options.dtype)
    with status(f"building {options.model}"):
        example = example_to_trace(options.model, dtype=dtype, seed=options.seed)
    start_s = time.perf_counter()
    with status(f"capturing {options.model}"):
        program = capture(example.module, kwargs=example.kwargs, train=not options.eval)
    seconds = time.perf_counter() - start_s
    out = messages(options.output)
    for text in example.notes:
        print(f"note: {text}", file=out)
    print(f"captured {options.model} in {seconds:.1f} s: {program_line(program)}", file=out)
    write(program, options.output)
    return 0
