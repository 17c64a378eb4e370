"""The options of commands that can validate passes."""

from __future__ import annotations

import argparse


def add_validate_options(command: argparse.ArgumentParser) -> None:
    """Declare --validate and --validate-limit."""
    command.add_argument(
        "--validate",
        action="store_true",
        help="run the program before and after each pass, and fail if a result differs",
    )
    command.add_argument(
        "--validate-limit",
        type=_flops,
        metavar="FLOPS",
        help="validate programs of up to this much work a run (default: 2e10, some seconds)",
    )


def _flops(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of FLOPs, such as 1e11")
    return number
