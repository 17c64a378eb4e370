"""The command line: its options, and how it says what is wrong.

Nothing heavy is imported until a command needs it, so that `--help` is quick.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from shardweave import __version__
from shardweave.driver import launch
from shardweave.driver.commands.diff import add_diff_options, diff_command
from shardweave.driver.commands.pass_options import add_pass_options
from shardweave.driver.commands.report import add_report_options, report_command
from shardweave.driver.commands.show import add_show_options, show_command
from shardweave.driver.commands.validate_options import add_validate_options
from shardweave.passes.notes import heard_by
from shardweave.planners.registry import PLANNERS

PLAIN = (ValueError, OSError)
"""What bad input causes and one line explains; all else is a defect and shows its traceback."""

DTYPES = ("float32", "float64", "bfloat16")
BACKENDS = ("distributed", "reference", "triton")

MODEL_HELP = (
    "gpt:layers=2,hidden=64,..., unet:..., cnn:..., hf:TYPE:field=value,... (Hugging Face, random "
    "weights) or package.module:factory"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 for success, 1 for failure, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 2
    try:
        with heard_by(_print_note):
            return _run_command(options, arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001  the last place that can tell the user
        return report_error(error, options.debug)


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _run_command(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if options.command == "run":
        from shardweave.driver.commands.run import run_command

        return run_command(options, arguments)
    if options.command == "simulate":
        from shardweave.driver.commands.simulate import simulate_command

        return simulate_command(options)
    if options.command == "plan":
        from shardweave.driver.commands.plan import plan_command

        return plan_command(options)
    if options.command == "profile":
        from shardweave.driver.commands.profile import profile_command

        return profile_command(options)
    if options.command == "diff":
        return diff_command(options)
    if options.command == "report":
        return report_command(options)
    if options.command == "show":
        return show_command(options)
    if options.command == "kernels":
        from shardweave.driver.commands.kernels import kernels_command

        return kernels_command(options)
    from shardweave.driver.commands import text as text_commands

    if options.command == "capture":
        return text_commands.capture_command(options)
    return text_commands.opt_command(options)


def report_error(error: Exception, debug: bool) -> int:
    """Say what went wrong: one line for bad input, everything else with its traceback."""
    is_plain = isinstance(error, PLAIN)
    if launch.is_launched():
        launch.report_failure(error, is_plain=is_plain)
        launch.end_process(1)
    if debug or not (is_plain or isinstance(error, launch.WorkerError)):
        traceback.print_exception(error)
    print(f"error: {_one_line(error)}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    if isinstance(error, launch.WorkerError) and error.tail:
        print("it said last:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in error.tail.splitlines()), file=sys.stderr)
    return 1


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"'{error.filename}': {error.strerror}; give the path of another file."
    return " ".join(str(error).split()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardweave", description="Compiles a PyTorch training step for a device mesh."
    )
    parser.add_argument("--version", action="version", version=f"shardweave {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_capture(commands)
    _add_opt(commands)
    _add_plan(commands)
    _add_run(commands)
    _add_simulate(commands)
    _add_profile(commands)
    add_diff_options(_add_command(commands, "diff", "Say what changed between two programs."))
    add_report_options(_add_command(commands, "report", "Write what a step does as an HTML page."))
    add_show_options(_add_command(commands, "show", "Show a program's layers, or some of its ops."))
    _add_kernels(commands)
    return parser


Commands = argparse._SubParsersAction  # the class has no public name


def _add_command(commands: Commands, name: str, summary: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=summary, description=summary)
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    command.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of weights (default: float32)"
    )
    command.add_argument("--seed", type=int, default=0, help="of weights and inputs (default: 0)")


def _add_capture(commands: Commands) -> None:
    command = _add_command(commands, "capture", "Capture a model's training step as text.")
    _add_model(command)
    command.add_argument(
        "-o", "--output", metavar="FILE", default="-", help="where to (default: standard output)"
    )
    command.add_argument("--mesh", help=argparse.SUPPRESS)  # to say where it belongs
    command.add_argument(
        "--eval", action="store_true", help="the forward pass in evaluation mode alone"
    )


def _add_opt(commands: Commands) -> None:
    command = _add_command(commands, "opt", "Run passes over a program.")
    command.add_argument(
        "file", metavar="FILE", nargs="?", help="a program's text; - reads standard input"
    )
    command.add_argument(
        "--passes", metavar="SPEC", default="", help="pass{option=value},pass,..., in this order"
    )
    command.add_argument("--mesh", help="as in data=2,tensor=2; default: the program's own")
    command.add_argument(
        "-o", "--output", metavar="FILE", default="-", help="where to (default: standard output)"
    )
    add_pass_options(command)
    add_validate_options(command)


def _add_plan(commands: Commands) -> None:
    command = _add_command(commands, "plan", "Choose how to train a program on a cluster.")
    command.add_argument(
        "file", metavar="PROGRAM", help=f"a captured program's text, or a model: {MODEL_HELP}"
    )
    command.add_argument(
        "--cluster",
        required=True,
        help="a preset's name, as h100-pod or testbed:rate=250mbit, or a file",
    )
    command.add_argument(
        "--planner", default="megatron", metavar="NAME",
        help=f"{', '.join(PLANNERS)} (default: megatron)",
    )  # fmt: skip
    command.add_argument(
        "--mesh", default="", help="as in data=2,tensor=2; default: the planner chooses"
    )
    command.add_argument(
        "-O",
        dest="option",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of the planner; may be given several times",
    )
    command.add_argument(
        "-o", "--output", metavar="FILE", help="write the plan there; - for standard output"
    )
    command.add_argument(
        "--explain",
        action="store_true",
        help="show the best plans: time and memory by part, and why each lost",
    )
    command.add_argument(
        "--compare", metavar="A,B", help="two planners or plan files, side by side, instead"
    )
    command.add_argument("--plot", metavar="FILE", help="draw the best plans there")
    command.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of a model (default: float32)"
    )


def _add_run(commands: Commands) -> None:
    command = _add_command(
        commands, "run", "Run a model's training step, sharded, on one process per device."
    )
    _add_model(command)
    command.add_argument(
        "--mesh", default="", help="as in data=2,tensor=2; default: the plan's, else one device"
    )
    command.add_argument(
        "--plan",
        default="megatron",
        help="a planner that needs no cluster, or a plan's JSON file (default: megatron)",
    )
    command.add_argument(
        "--backend",
        choices=BACKENDS,
        default="distributed",
        help="real processes, or all ranks of a virtual mesh in this one (default: distributed)",
    )
    command.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="between tensor-parallel layers, shard activations over the sequence",
    )
    command.add_argument(
        "--passes",
        metavar="SPEC",
        default="",
        help="more passes, after the default ones; in their place if insert-collectives is there",
    )
    command.add_argument(
        "--program",
        metavar="FILE",
        help="run this partitioned program of the model, as it is, without a plan",
    )
    command.add_argument(
        "--check",
        action="store_true",
        help="compare loss and gradients with the eager model; fail if they differ",
    )
    command.add_argument(
        "--steps",
        type=_count,
        default=0,
        metavar="N",
        help="train for N steps with AdamW, and the eager model too, and time both",
    )
    command.add_argument("--no-eager", action="store_true", help="do not train the eager model")
    command.add_argument("--json", metavar="FILE", help="write the results there as well")
    add_validate_options(command)
    command.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="SECONDS",
        help="stop all processes after this long (default: no limit)",
    )


def _add_simulate(commands: Commands) -> None:
    command = _add_command(
        commands, "simulate", "Say what a program's schedule takes on a cluster."
    )
    command.add_argument(
        "file",
        metavar="FILE",
        help="a local program's text, or with --plan a captured one's; - reads standard input",
    )
    command.add_argument(
        "--cluster",
        required=True,
        help="a preset's name, as h100-pod or testbed:rate=250mbit, or a file",
    )
    command.add_argument(
        "--plan", metavar="FILE", help="simulate the program under this plan, stages and ZeRO too"
    )
    command.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev there")
    command.add_argument("--plot", metavar="FILE", help="write a picture of the streams there")
    command.add_argument("--json", action="store_true", help="print the numbers as JSON instead")
    command.add_argument(
        "--optimizer",
        type=float,
        metavar="X",
        help="bytes of optimizer state per byte of parameters (default: 0; with --plan 2, Adam's)",
    )


def _add_profile(commands: Commands) -> None:
    command = _add_command(commands, "profile", "Measure this machine's CPU into a cluster file.")
    command.add_argument(
        "programs", metavar="PROGRAM", nargs="*", help="measure the ops of these programs exactly"
    )
    command.add_argument(
        "-o", "--output", metavar="FILE", default="cluster.yaml", help="default: cluster.yaml"
    )
    command.add_argument(
        "--nproc", type=_processes, default=2, metavar="N", help="processes, all busy (default: 2)"
    )
    command.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="what starts rank {rank}, as 'ip netns exec sw{rank} env GLOO_SOCKET_IFNAME=eth0'",
    )
    command.add_argument(
        "--per-node",
        type=_processes,
        metavar="N",
        help="processes that make a node (default: 1 with --launcher, else all)",
    )
    command.add_argument("--name", default="profiled", help="of the cluster (default: profiled)")
    command.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="SECONDS",
        help="stop after this long (default: no limit)",
    )


def _add_kernels(commands: Commands) -> None:
    command = _add_command(commands, "kernels", "Write and compile the kernels of a program.")
    command.add_argument("file", metavar="FILE", help="a program's text; - reads standard input")
    command.add_argument(
        "-o", "--output", metavar="DIR", required=True, help="the folder to write to"
    )
    command.add_argument(
        "--target",
        default="sm_80,sm_90,gfx942",
        help="chips to compile for; '' writes sources alone (default: sm_80,sm_90,gfx942)",
    )


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of steps, such as 3")
    return int(text)


def _processes(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of processes, such as 2")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds above 0")
    return seconds
