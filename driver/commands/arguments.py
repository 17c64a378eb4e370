"""Arguments that several commands have, the kinds of values that they take, and where they write.

Imports nothing heavy: they are declared for `--help`.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from shardweave.passes.presets import PREFIX, SUMMARIES

DTYPES = ("float32", "float64", "bfloat16", "float16")

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
"""Suffixes of a picture's file."""

MODEL_HELP = (
    "gpt:layers=2,hidden=64,..., unet:..., cnn:..., hf:TYPE:field=value,... (Hugging Face, random "
    "weights) or package.module:factory"
)

Commands = argparse._SubParsersAction  # the class has no public name


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, by name. parser: the parser of the whole command line."""
    (commands,) = (action for action in parser._actions if isinstance(action, Commands))
    return commands.choices


def new_command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    """A command with the arguments that every command has."""
    command = commands.add_parser(
        name, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def add_flag(command: argparse.ArgumentParser, name: str, what: str) -> None:
    """Declare an option that takes no value."""
    command.add_argument(name, action="store_true", help=what)


def add_model(command: argparse.ArgumentParser) -> None:
    """Declare MODEL, --dtype and --seed."""
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="dtype of weights (default: float32)"
    )
    command.add_argument(
        "--seed", type=int, default=0, help="seed of weights and inputs (default: 0)"
    )


def add_program(command: argparse.ArgumentParser) -> None:
    """Declare FILE, a program's text."""
    command.add_argument("file", metavar="FILE", help="a program's text; - reads standard input")


def add_passes(command: argparse.ArgumentParser) -> None:
    """Declare --passes, and list the presets in the command's help."""
    command.add_argument(
        "--passes", metavar="SPEC", default="", help="pass{option=value},pass,..., in this order"
    )
    width = max(map(len, SUMMARIES)) + len(PREFIX)
    presets = [f"  {PREFIX + name:{width}}  {text}" for name, text in SUMMARIES.items()]
    command.epilog = "\n".join(
        [
            "presets, which may stand among the passes:",
            *presets,
            "'shardweave opt --list-passes' lists the passes too.",
        ]
    )


def add_load(command: argparse.ArgumentParser) -> None:
    """Declare --load, whose files `load_passes` runs before the command."""
    command.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="FILE",
        help="a Python file that registers passes of your own (sw.register_pass)",
    )


def load_passes(paths: Sequence[str]) -> None:
    """Run Python files that register passes. Raises ValueError for a path that is no such file."""
    for path in paths:
        file = Path(path)
        if not file.is_file() or file.suffix != ".py":
            raise ValueError(f"--load {path}: expected a Python file that registers passes.")
        # A name of its own: a file may be called as a module that is there already.
        name = f"shardweave_loaded_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def add_cluster(command: argparse.ArgumentParser, *, required: bool = True, why: str = "") -> None:
    """Declare --cluster. why: a few words before its forms."""
    command.add_argument(
        "--cluster",
        required=required,
        help=f"{why}a preset such as h100-pod or testbed:rate=250mbit, or a file",
    )


def add_optimizer(command: argparse.ArgumentParser) -> None:
    """Declare --optimizer, for the memory of a step, which `optimizer_state` reads."""
    command.add_argument(
        "--optimizer",
        type=not_negative("bytes of state for each byte of parameters, 0 or more"),
        metavar="X",
        help="bytes of optimizer state per byte of parameters (default: 0; with --plan 2, Adam's)",
    )


def add_update(command: argparse.ArgumentParser) -> None:
    """Declare --update, an optimizer by name."""
    command.add_argument(
        "--update",
        metavar="CLASS",
        default="",
        help="count the update of this class of torch.optim too, such as AdamW or Muon: its time, "
        "messages and state",
    )


def optimizer_state(options: argparse.Namespace) -> float | None:
    """Bytes of optimizer state per byte of parameters; None: Adam's, by a plan's precision."""
    if options.optimizer is None:
        return None if options.plan else 0.0
    return options.optimizer


def add_program_output(command: argparse.ArgumentParser) -> None:
    """Declare --output, the file for a program's text."""
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default="-",
        help="file to write (default: standard output)",
    )


def add_time_limit(command: argparse.ArgumentParser, what: str) -> None:
    """Declare --time-limit. what: the words for what it does."""
    command.add_argument(
        "--time-limit",
        type=positive("a number of seconds above 0"),
        metavar="SECONDS",
        help=f"{what} after this long (default: no limit)",
    )


def add_validate_options(command: argparse.ArgumentParser) -> None:
    """Declare --validate and --validate-limit."""
    add_flag(
        command,
        "--validate",
        "run the program before and after each pass, and fail if a result differs",
    )
    command.add_argument(
        "--validate-limit",
        type=positive("a number of FLOPs, such as 1e11"),
        metavar="FLOPS",
        help="validate programs of up to this much work a run (default: 2e10, some seconds)",
    )


def add_prove_option(command: argparse.ArgumentParser, what: str) -> None:
    """Declare --prove. what: the words for what is proved."""
    add_flag(
        command,
        "--prove",
        f"prove, without running it, that {what} computes what the captured program does",
    )


def positive(expected: str) -> Callable[[str], float]:
    """Make an argument type for numbers above 0. expected: words for the type in the error."""
    return _number(expected, lambda value: value > 0)


def not_negative(expected: str) -> Callable[[str], float]:
    """Make an argument type for numbers of 0 or more. expected: words for the type in the error."""
    return _number(expected, lambda value: value >= 0)


def _number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value) or value == math.inf:
            raise argparse.ArgumentTypeError(f"'{text}' is not {expected}")
        return value

    return number


def count(expected: str, least: int = 0) -> Callable[[str], int]:
    """Make an argument type for whole numbers from `least` on. expected: words for the error."""

    def number(text: str) -> int:
        is_number = text.isascii() and text.isdigit() and len(text) < 19
        if not is_number or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not {expected}")
        return int(text)

    return number


def check_output(path: str | None) -> None:
    """Raise ValueError if a file cannot be written there; None and `-` (standard output) pass."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise ValueError(f"'{path}' is a folder, expected a file to write; add a file's name.")
    folder = Path(path).parent
    if not folder.is_dir():
        raise ValueError(f"cannot write '{path}': there is no folder '{folder}'; make it first.")


def check_picture(path: str | None) -> None:
    """Raise ValueError as `check_output` does, for an unknown suffix, and without matplotlib."""
    if path is None:
        return
    check_output(path)
    if Path(path).suffix.lower() not in PICTURES:
        raise ValueError(
            f"cannot draw '{path}': its suffix is not a picture format; use one of "
            f"{', '.join(PICTURES)}."
        )
    from shardweave.planners.simulate.timeline import new_figure

    new_figure(1, 1)


def messages(output: str) -> TextIO:
    """Stream for messages: standard error if the program's text goes to standard output."""
    return sys.stderr if output == "-" else sys.stdout
