"""Arguments that several commands share: their declarations, types and output files.

Imports nothing heavy: they are declared for `--help`.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from shardweave.passes.presets import PREFIX, SUMMARIES

T = TypeVar("T")

DTYPES = ("float32", "float64", "bfloat16", "float16")

PICTURES = (".png", ".svg", ".pdf", ".jpg", ".jpeg")
"""Suffixes of a picture's file."""

MODEL_HELP = (
    "gpt:layers=2,hidden=64,..., unet:..., cnn:..., hf:TYPE:field=value,... (Hugging Face, random "
    "weights) or package.module:factory"
)

Commands = argparse._SubParsersAction  # the class has no public name


class Command(argparse.ArgumentParser):
    """The parser of a command, which declares the arguments that several commands share."""

    def add_flag(self, name: str, what: str) -> None:
        """Declare an option that takes no value."""
        self.add_argument(name, action="store_true", help=what)

    def add_model(self) -> None:
        """Declare MODEL, --dtype and --seed."""
        self.add_argument("model", metavar="MODEL", help=MODEL_HELP)
        self.add_argument(
            "--dtype", choices=DTYPES, default="float32", help="dtype of weights (default: float32)"
        )
        self.add_argument(
            "--seed", type=int, default=0, help="seed of weights and inputs (default: 0)"
        )

    def add_program(self) -> None:
        """Declare FILE, a program's text."""
        self.add_argument("file", metavar="FILE", help="a program's text; - reads standard input")

    def add_passes(self) -> None:
        """Declare --passes, and list the presets in the command's help."""
        self.add_argument(
            "--passes",
            metavar="SPEC",
            default="",
            help="pass{option=value},pass,..., in this order",
        )
        width = max(map(len, SUMMARIES)) + len(PREFIX)
        presets = [f"  {PREFIX + name:{width}}  {text}" for name, text in SUMMARIES.items()]
        head = "presets, which may stand among the passes:"
        last = "'shardweave opt --list-passes' lists the passes too."
        self.epilog = "\n".join([head, *presets, last])

    def add_load(self) -> None:
        """Declare --load, whose files `load_passes` runs before the command."""
        self.add_argument(
            "--load",
            action="append",
            default=[],
            metavar="FILE",
            help="a Python file that registers passes of your own (sw.register_pass)",
        )

    def add_cluster(self, *, required: bool = True, why: str = "") -> None:
        """Declare --cluster. why: the words that begin its help."""
        self.add_argument(
            "--cluster",
            required=required,
            help=f"{why}a preset such as h100-pod or testbed:rate=250mbit, or a file",
        )

    def add_optimizer(self) -> None:
        """Declare --optimizer, for the memory of a step, which `optimizer_state` reads."""
        self.add_argument(
            "--optimizer",
            type=positive("bytes of state for each byte of parameters, 0 or more", or_0=True),
            metavar="X",
            help="bytes of optimizer state per byte of parameters (default: 0; with --plan 2, "
            "Adam's)",
        )

    def add_update(self) -> None:
        """Declare --update, an optimizer by name."""
        self.add_argument(
            "--update",
            metavar="CLASS",
            default="",
            help="count the update of this class of torch.optim too, such as AdamW or Muon: its "
            "time, messages and state",
        )

    def add_output(self, what: str, *names: str, **more: Any) -> None:
        """Declare a file that the command writes, --output unless it has other names.

        more: arguments of argparse's `add_argument`.
        """
        own = {"type": OutputFile, "metavar": "FILE", "help": what}
        self.add_argument(*(names or ("-o", "--output")), **(own | more))

    def add_program_output(self) -> None:
        """Declare --output, the file for a program's text."""
        self.add_output("file to write (default: standard output)", default="-")

    def add_time_limit(self, what: str) -> None:
        """Declare --time-limit. what: the words in its help that name its effect."""
        self.add_argument(
            "--time-limit",
            type=positive("a number of seconds above 0"),
            metavar="SECONDS",
            help=f"{what} after this long (default: no limit)",
        )


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command, by name. parser: the parser of the whole command line."""
    (commands,) = (action for action in parser._actions if isinstance(action, Commands))
    return commands.choices


def new_command(commands: Commands, run: Callable[[argparse.Namespace], int]) -> Command:
    """Make a command with the arguments that every command has.

    run: `NAME_command`, which runs it and returns the exit code; its docstring describes it.
    """
    command = commands.add_parser(
        run.__name__.removesuffix("_command"),
        description=run.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(func=run)
    return command


def load_passes(paths: Sequence[str]) -> None:
    """Run Python files that register passes. Raises ValueError for a path that is no such file,
    and for a file that fails."""
    for path in paths:
        file = Path(path)
        if not file.is_file() or file.suffix != ".py":
            raise ValueError(f"--load {path}: expected a Python file that registers passes.")
        # A unique name: the file may have the name of a module that is imported already.
        name = f"shardweave_loaded_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        run_user_code(f"--load {path}", partial(spec.loader.exec_module, module))


def run_user_code(where: str, make: Callable[[], T]) -> T:
    """Call the user's code. Raises ValueError if it fails, or ends the program."""
    try:
        return make()
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
        at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        ended = "ended the program" if isinstance(error, SystemExit) else "failed"
        raise ValueError(
            f"{where} {ended}{at} ({' '.join(said.split())}); --debug shows the traceback."
        ) from error


def optimizer_state(options: argparse.Namespace) -> float | None:
    """Return --optimizer, the bytes of optimizer state per byte of parameters. By default 0; None
    with a plan, for Adam's states in the precision of the plan."""
    if options.optimizer is None:
        return None if options.plan else 0.0
    return options.optimizer


def positive(expected: str, *, or_0: bool = False) -> Callable[[str], float]:
    """Make an argument type for numbers above 0, or 0 too. expected: words for the error."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf or (or_0 and value == 0)):
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


class OutputFile(str):
    """The path of a file that a command writes; `-` is standard output. A type of argument."""

    def check(self) -> None:
        """Raise ValueError if a file cannot be written there."""
        if self == "-":
            return
        if Path(self).is_dir():
            raise ValueError(f"'{self}' is a folder, expected a file to write; add a file's name.")
        folder = Path(self).parent
        if not folder.is_dir():
            raise ValueError(
                f"cannot write '{self}': there is no folder '{folder}'; make it first."
            )


class PictureFile(OutputFile):
    """The path of a picture that a command draws. A type of argument."""

    def check(self) -> None:
        """Raise ValueError as for other files, for an unknown suffix, and without matplotlib."""
        super().check()
        if Path(self).suffix.lower() not in PICTURES:
            raise ValueError(
                f"cannot draw '{self}': its suffix is not a picture format; use one of "
                f"{', '.join(PICTURES)}."
            )
        from shardweave.planners.simulate.timeline import new_figure

        new_figure(1, 1)


def check_writable(options: argparse.Namespace) -> None:
    """Raise ValueError for a file among a command's arguments that cannot be written."""
    for value in vars(options).values():
        if isinstance(value, OutputFile):
            value.check()


def messages(output: str) -> TextIO:
    """Stream for messages: standard error if the program's text goes to standard output."""
    return sys.stderr if output == "-" else sys.stdout
