"""The `completion` command: a script by which a shell completes commands, options and their values.

What can be typed is written into the script, so that completing starts no process.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shardweave.driver.commands.arguments import Commands, commands_of, new_command
from shardweave.passes.presets import PREFIX, PRESETS
from shardweave.passes.registry import GENERATED, PASSES
from shardweave.planners.registry import PLANNERS

_FILES = frozenset({"FILE", "FOLDER", "DIR", "A", "B", "PROGRAM"})
"""Names of arguments in usages that stand for paths."""

_LISTS = frozenset({"passes"})
"""Options whose values are lists with commas."""


@dataclass(frozen=True)
class Flag:
    """An option of a command. values: words that it accepts; is_path: whether it takes a path."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    values: tuple[str, ...]
    is_path: bool
    is_list: bool


def add_parser(commands: Commands) -> None:
    command = new_command(commands, completion_command)
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that you use")
    command.epilog = (
        "to set it up, add a line to what the shell reads when it starts:\n"
        '  bash  ~/.bashrc                   eval "$(shardweave completion bash)"\n'
        '  zsh   ~/.zshrc                    eval "$(shardweave completion zsh)"\n'
        "  fish  ~/.config/fish/config.fish  shardweave completion fish | source"
    )


def completion_command(options: argparse.Namespace) -> int:
    """Print a script that completes commands in a shell."""
    commands = commands_of(options.parser)
    lines = _fish(commands) if options.shell == "fish" else _bash(commands)
    if options.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    print(*lines, sep="\n")
    return 0


def _flags_of(command: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in command._actions:
        if not action.option_strings or action.help == argparse.SUPPRESS:
            continue
        values = _values_of(action)
        is_path = action.metavar in _FILES or action.dest in ("cluster", "plan")
        yield Flag(
            tuple(action.option_strings),
            (action.help or "").split(";")[0].replace("%%", "%"),
            action.nargs != 0,
            values,
            is_path,
            action.dest in _LISTS,
        )


def _values_of(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    from shardweave.planners.cost.presets import preset_names  # loads slowly

    known: dict[str, Iterable[str]] = {
        "passes": [*(PREFIX + name for name in PRESETS), *sorted(PASSES), *GENERATED],
        "planner": PLANNERS,
        "cluster": preset_names(),
    }
    if action.dest == "plan" and str(action.default) in PLANNERS:  # which `run` takes too
        return tuple(PLANNERS)
    if action.dest in ("stop_after", "print_before", "print_after"):
        return tuple(sorted(PASSES))
    return tuple(known.get(action.dest, ()))


# bash, and zsh by its emulation of bash

_BASH_HEAD = r"""_shardweave() {
    local line="${COMP_LINE:0:$COMP_POINT}" known="" list=""
    local cur="${line##*[[:space:]]}"
    local before="${line%"$cur"}"
    before="${before%"${before##*[![:space:]]}"}"
    local prev="${before##*[[:space:]]}"
    local command="${before#*[[:space:]]}"
    command="${command%%[[:space:]]*}"
    COMPREPLY=()
    case "$command $prev" in"""

_BASH_TAIL = r"""    esac
    # A list goes on behind its last comma. Bash replaces what follows the last colon alone.
    local done="" colon="" one=""
    if [ -n "$list" ]; then case "$cur" in *,*) done="${cur%,*}," ;; esac; fi
    if [ -z "$ZSH_VERSION" ]; then colon="${cur%"${cur##*:}"}"; fi
    for one in $known; do
        one="$done$one"
        case "$one" in "$cur"*) COMPREPLY+=("${one#"$colon"}") ;; esac
    done
}
complete -o default -F _shardweave shardweave"""


def _bash(commands: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    yield _BASH_HEAD
    yield f"        *' shardweave'|*/shardweave) known={shlex.quote(' '.join(commands))} ;;"
    for name, command in commands.items():
        flags = list(_flags_of(command))
        for flag in flags:
            if flag.takes_value:
                patterns = "|".join(f"'{name} {word}'" for word in flag.names)
                is_list = " list=yes" if flag.is_list else ""
                yield f"        {patterns}) known={shlex.quote(' '.join(flag.values))}{is_list} ;;"
        words = [*(word for flag in flags for word in flag.names), *_places(command)]
        yield f"        '{name} '*) known={shlex.quote(' '.join(words))} ;;"
    yield _BASH_TAIL


def _places(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        if not action.option_strings and action.choices is not None:
            yield from map(str, action.choices)


# fish


def _fish(commands: Mapping[str, argparse.ArgumentParser]) -> Iterator[str]:
    for name, command in commands.items():
        said = shlex.quote(command.description or "")
        yield f"complete -c shardweave -n __fish_use_subcommand -f -a {name} -d {said}"
        here = f"complete -c shardweave -n '__fish_seen_subcommand_from {name}'"
        for flag in _flags_of(command):
            words = _fish_words(name, flag)
            if flag.is_list:
                yield from _fish_function(name, flag)
            yield f"{here} {_fish_names(flag)} -d {shlex.quote(flag.help)}{words}"
        places = list(_places(command))
        if places:
            yield f"{here} -f -a {shlex.quote(' '.join(places))}"


def _fish_names(flag: Flag) -> str:
    names = [f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in flag.names]
    return " ".join(names)


def _fish_words(command: str, flag: Flag) -> str:
    """Arguments of fish's `complete` for an option's values; lists complete after each comma."""
    if not flag.takes_value:
        return ""
    kind = " -r" if flag.is_path or not flag.values else " -x"
    if not flag.values:
        return kind
    words = " ".join(flag.values)
    if flag.is_list:
        words = f"(__fish_complete_list , __shardweave_{command}{_fish_ending(flag)})"
    return f"{kind} -a {shlex.quote(words)}"


def _fish_function(command: str, flag: Flag) -> Iterator[str]:
    words = " ".join(map(shlex.quote, flag.values))
    yield f"function __shardweave_{command}{_fish_ending(flag)}; printf '%s\\n' {words}; end"


def _fish_ending(flag: Flag) -> str:
    return flag.names[0].replace("-", "_")
